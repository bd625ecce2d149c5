"""The decode batch as dense arrays on the host: one row per request that decodes, advanced by vector operations.

Invariant: rows 0..n-1 are in use; `valid` is 0 for every page that no row owns, so what such a page holds is masked.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from laminar.engines.batching import LiveRequest
from laminar.engines.counter_hash import fold_seed, uniforms

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingView:
    """Sampling parameters per row, and what holds for all or any of them."""

    temperatures: Floats
    top_ps: Floats
    top_ks: Ints
    all_unit: bool
    any_greedy: bool
    any_filtered: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PageView:
    """Pages 0..span-1 as attention sees them: whose they are, how many tokens count, and each row's pages in order.

    `table` is [rows * width]; rows with fewer pages are padded with page 0.
    """

    owner: Ints
    valid: Ints
    table: Ints
    width: int


class DecodeRows:
    """Rows come and go with their requests; a hole is filled with the last row."""

    def __init__(self, *, max_rows: int, num_pages: int, max_pages_per_row: int, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._lives: list[LiveRequest] = []
        self._row_of: dict[LiveRequest, int] = {}
        self._ints = np.zeros((6, max_rows), np.int64)
        self._token, self._position, self._page, self._offset, self._seed, self._index = self._ints
        self._top_k = np.zeros(max_rows, np.int64)
        self._temperature = np.ones(max_rows, np.float32)
        self._top_p = np.ones(max_rows, np.float32)
        self._table = np.zeros((max_rows, max_pages_per_row), np.int64)
        self._owner = np.zeros(num_pages + 1, np.int64)
        self._valid = np.zeros(num_pages + 1, np.int64)
        self._count = np.zeros(max_rows, np.int64)
        self._view: PageView | None = None
        self._sampling: SamplingView | None = None

    def __len__(self) -> int:
        return len(self._lives)

    @property
    def lives(self) -> list[LiveRequest]:
        """The request of each row, in row order."""
        return self._lives

    @property
    def tokens(self) -> Ints:
        """Last token of each row: the input of this iteration."""
        return self._token[: len(self)]

    @property
    def positions(self) -> Ints:
        return self._position[: len(self)]

    @property
    def pages(self) -> Ints:
        """Page that takes the KV of this iteration's token."""
        return self._page[: len(self)]

    @property
    def offsets(self) -> Ints:
        """Place in that page."""
        return self._offset[: len(self)]

    @property
    def span(self) -> int:
        """One more than the highest page that any row owns."""
        return int(self._valid.nonzero()[0].max(initial=0)) + 1

    def add(self, live: LiveRequest) -> None:
        """A request joins: everything before its last token is in its pages."""
        row, pages, sampling = len(self._lives), live.pages, live.request.sampling
        self._lives.append(live)
        self._row_of[live] = row
        position = len(live.token_ids) - 1
        full, offset = divmod(position, self._page_tokens)
        seed = fold_seed(live.request.seed)
        self._ints[:, row] = (live.token_ids[-1], position, pages[full], offset, seed, live.num_answered)
        self._top_k[row], self._top_p[row], self._temperature[row] = (
            sampling.top_k,
            sampling.top_p,
            sampling.temperature,
        )
        self._count[row] = len(pages)
        self._table[row, : len(pages)] = pages
        self._owner[pages] = row
        self._valid[pages[:full]] = self._page_tokens
        self._view = self._sampling = None

    def grow(self, live: LiveRequest) -> None:
        """The request got one more page, which takes its next token."""
        row, page = self._row_of[live], live.pages[-1]
        self._count[row] = len(live.pages)
        self._table[row, len(live.pages) - 1] = page
        self._owner[page] = row
        self._page[row], self._offset[row] = page, 0
        self._view = None

    def remove(self, live: LiveRequest) -> None:
        """The request leaves (unknown ones are ignored); the last row moves into its place."""
        row = self._row_of.pop(live, None)
        if row is None:
            return
        self._view = self._sampling = None
        pages = self._table[row, : self._count[row]]
        self._valid[pages] = self._owner[pages] = 0
        pages[:] = 0
        last = self._lives.pop()
        if last is not live:
            self._move_row(len(self._lives), row)
            self._lives[row] = last
            self._row_of[last] = row

    def _move_row(self, source: int, target: int) -> None:
        self._ints[:, target] = self._ints[:, source]
        for column in (self._top_k, self._top_p, self._temperature, self._count):
            column[target] = column[source]
        pages = self._table[source, : self._count[source]]
        self._table[target, : len(pages)] = pages
        self._owner[pages] = target
        pages[:] = 0

    def move_pages(self, moves: Mapping[int, int]) -> None:
        """Follow a compaction: old page number to new, targets unused before."""
        old, new = np.array(list(moves.keys())), np.array(list(moves.values()))
        renumber = np.arange(len(self._owner))
        renumber[old] = new
        self._owner[new], self._valid[new] = self._owner[old], self._valid[old]
        self._owner[old] = self._valid[old] = 0
        self._table[: len(self)] = renumber[self._table[: len(self)]]
        self._page[: len(self)] = renumber[self.pages]
        self._view = None

    def begin(self) -> PageView:
        """Count this iteration's tokens as valid and show the pages; the same object as before if nothing moved."""
        self._valid[self.pages] = self.offsets + 1
        if self._view is None:
            span, width = self.span, int(self._count[: len(self)].max())
            table = self._table[: len(self), :width].reshape(-1).copy()
            self._view = PageView(owner=self._owner[:span], valid=self._valid[:span], table=table, width=width)
        return self._view

    def sampling(self) -> SamplingView:
        """The same object as before if no row came or went."""
        if self._sampling is None:
            rows = slice(0, len(self))
            temperatures, top_ps, top_ks = self._temperature[rows], self._top_p[rows], self._top_k[rows]
            self._sampling = SamplingView(
                temperatures=temperatures,
                top_ps=top_ps,
                top_ks=top_ks,
                all_unit=bool((temperatures == 1.0).all()),
                any_greedy=bool((temperatures == 0.0).any()),
                any_filtered=bool(((top_ps < 1.0) | (top_ks > 0)).any()),
            )
        return self._sampling

    def uniforms(self) -> NDArray[np.float64]:
        """The number that decides each row's next token."""
        return uniforms(self._seed[: len(self)], self._index[: len(self)])

    def advance(self, token_ids: list[int]) -> None:
        """Every row drew a token: it is the next input."""
        rows = slice(0, len(self))
        self._token[rows] = token_ids
        self._position[rows] += 1
        self._offset[rows] += 1
        self._index[rows] += 1
