"""The torch engine without its event loop: plan an iteration, compute it, take the drawn tokens.

Invariant: between iterations, what the batcher booked as computed lies in the KV pages, and `DecodeRows` holds exactly
the requests that decode. One thread at a time, except that `enqueue` and `load` may be called while `run` is at work.
"""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from laminar.engines.batching import BatchRules, Chunk, Plan
from laminar.engines.decode_rows import DecodeRows, PageView, SamplingView
from laminar.engines.decoder_shape import DecoderShape, read_shape
from laminar.engines.llama import Batch, Llama
from laminar.engines.paged_kv import ChunkView, PagedKV, PageTables
from laminar.engines.protocol import EngineLoad, Output, Request
from laminar.engines.request_book import RequestBook
from laminar.engines.rules import TorchEngineRules
from laminar.engines.sampler import RowSampling, sample

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

IDLE_SPAN = 0.25
"""Attention reads all pages up to the highest in use; with more than this share unused, pages are moved together."""

FEW_PAGES = 16
"""So many unused pages are never worth a move."""


class TorchRunner:
    """One model, its KV memory and the requests on it. Everything is allocated when it is built."""

    def __init__(self, model_path: Path, rules: TorchEngineRules) -> None:
        batch_rules, dtype = rules.batch_rules(), DTYPES[rules.dtype]
        self._page_tokens = batch_rules.page_tokens
        self._quantum_s = rules.quantum_s
        self._device = torch.device(rules.device)
        self._shape = read_shape(model_path)
        self._model = Llama(self._shape, dtype, self._device)
        self._kv = _build_kv(self._shape, batch_rules, dtype, self._device)
        self.rows = DecodeRows(
            max_rows=batch_rules.max_running,
            num_pages=batch_rules.num_pages,
            max_pages_per_row=min(batch_rules.num_pages, batch_rules.pages_for(self._shape.max_positions)),
            page_tokens=batch_rules.page_tokens,
        )
        self._book = RequestBook(batch_rules)
        self._version: int | None = None
        self._seen_pages: tuple[PageView, Tensor, Tensor] | None = None
        self._seen_sampling: tuple[SamplingView, RowSampling] | None = None

    @property
    def is_idle(self) -> bool:
        return not self._book

    def enqueue(self, requests: Sequence[Request]) -> None:
        """Queue all of them or, with a ValueError, none."""
        for request in requests:
            name, most = request.request_id, len(request.token_ids) + request.max_new_tokens
            positions, vocab = self._shape.max_positions, self._shape.vocab
            if most > positions:
                raise ValueError(f"request {name} may grow to {most} tokens; the model has {positions} positions")
            if request.token_ids and not 0 <= min(request.token_ids) <= max(request.token_ids) < vocab:
                raise ValueError(f"request {name} has token ids outside 0..{vocab - 1}")
        self._book.enqueue(requests)

    def load(self) -> EngineLoad:
        return self._book.load()

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor that `load_weights` needs, by name."""
        return {
            name: shape for part in self._model.parts() for name, shape in zip(part.names, part.shapes, strict=True)
        }

    @torch.inference_mode()
    def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Replace all weights in place and wipe the KV memory."""
        if self._book:
            raise RuntimeError(f"weights can only be swapped when idle; the engine has {len(self._book)} requests")
        self._model.load(tensors)
        self._kv.clear()
        self._version = version

    @torch.inference_mode()
    def run(self) -> None:
        """Iterate for a quantum, or until nothing is left to do."""
        if self._version is None:
            raise RuntimeError("the engine has requests but no weights; call load_weights first")
        deadline_s = time.perf_counter() + self._quantum_s
        while self._book.take_in():
            self._iterate()
            if time.perf_counter() >= deadline_s:
                return

    def collect(self) -> list[Output]:
        return self._book.collect()

    def abort(self, request_ids: Sequence[str] | None) -> list[Output]:
        return self._book.abort(request_ids, forget=self.rows.remove)

    def _iterate(self) -> None:
        plan = self._book.batcher.plan()
        for live in plan.dropped:
            self.rows.remove(live)
        for live in plan.grown:
            self.rows.grow(live)
        if plan.page_copies:
            self._kv.copy_pages(plan.page_copies)
        for live in plan.joining:
            self.rows.add(live)
        logits = self._model.forward(self._batch(plan), self._kv)
        if logits is not None:
            self._take(*sample(logits, self._upload(self.rows.uniforms()), self._sampling()))

    def _take(self, tokens: Tensor, logprobs: Tensor) -> None:
        """Append one token to every row and let go of what has ended."""
        token_ids, values = tokens.tolist(), logprobs.tolist()
        if not math.isfinite(sum(values)):
            raise RuntimeError(f"version {self._version} of the model computes log-probs that are not finite")
        self.rows.advance(token_ids)
        ended = []
        for live, token_id, logprob in zip(self.rows.lives, token_ids, values, strict=True):
            live.append(token_id, logprob)
            if live.finish is not None:
                ended.append(live)
        for live in ended:
            self.rows.remove(live)
            self._book.batcher.remove(live)
        if ended:
            self._compact()

    def _compact(self) -> None:
        unused = self.rows.span - 1 - self._book.batcher.num_pages_used
        if unused > max(FEW_PAGES, IDLE_SPAN * self.rows.span):
            moves = self._book.batcher.compact()
            self._kv.copy_pages(list(moves.items()))
            self.rows.move_pages(moves)

    def _batch(self, plan: Plan) -> Batch:
        rows, first = self.rows, len(self.rows)
        columns = [(rows.tokens, rows.positions, rows.pages, rows.offsets)]
        chunks = []
        for equal in _equal_prompts(plan.chunks):
            columns.extend(self._chunk_columns(chunk) for chunk in equal)
            start, stop, last = equal[0].start, equal[0].stop, first + sum(chunk.stop - chunk.start for chunk in equal)
            pages = torch.tensor(equal[0].live.pages, device=self._device)
            chunks.append(ChunkView(first=first, last=last, count=len(equal), start=start, stop=stop, pages=pages))
            first = last
        joined = columns[0] if len(columns) == 1 else [np.concatenate(column) for column in zip(*columns, strict=True)]
        tokens, positions, pages, offsets = (self._upload(column) for column in joined)
        return Batch(
            token_ids_R=tokens,
            positions_R=positions,
            pages_R=pages,
            offsets_R=offsets,
            num_decode=len(rows),
            tables=self._tables() if len(rows) else None,
            chunks=chunks,
        )

    def _chunk_columns(self, chunk: Chunk) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        positions = np.arange(chunk.start, chunk.stop)
        pages = np.array(chunk.live.pages)[positions // self._page_tokens]
        return np.array(chunk.live.token_ids[chunk.start : chunk.stop]), positions, pages, positions % self._page_tokens

    def _tables(self) -> PageTables:
        """Uploaded when a page came or went; the mask changes with every token."""
        view = self.rows.begin()
        if self._seen_pages is None or self._seen_pages[0] is not view:
            self._seen_pages = (view, self._upload(view.owner), self._upload(view.table))
        _, owner, table = self._seen_pages
        mask = self._kv.mask(self._upload(view.valid), self._shape.num_heads // self._shape.num_kv_heads)
        return PageTables(owner_P=owner, table=table, width=view.width, mask=mask)

    def _sampling(self) -> RowSampling:
        """Uploaded when a row came or went."""
        view = self.rows.sampling()
        if self._seen_sampling is None or self._seen_sampling[0] is not view:
            rows = RowSampling(
                temperatures_N=self._upload(view.temperatures),
                top_ps_N=self._upload(view.top_ps),
                top_ks_N=self._upload(view.top_ks),
                all_unit=view.all_unit,
                any_greedy=view.any_greedy,
                any_filtered=view.any_filtered,
            )
            self._seen_sampling = (view, rows)
        return self._seen_sampling[1]

    def _upload(self, array: np.ndarray) -> Tensor:
        """On CPU a view of the rows, valid until they advance."""
        return torch.from_numpy(array).to(self._device)


def _build_kv(shape: DecoderShape, rules: BatchRules, dtype: torch.dtype, device: torch.device) -> PagedKV:
    return PagedKV(
        num_layers=shape.num_layers,
        num_pages=rules.num_pages,
        page_tokens=rules.page_tokens,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
        device=device,
    )


def _equal_prompts(chunks: list[Chunk]) -> list[list[Chunk]]:
    """Group whole prompts of one length, which attention takes as one batch; other chunks stay alone."""
    groups: dict[tuple[int, int], list[Chunk]] = {}
    for index, chunk in enumerate(chunks):
        groups.setdefault((0, chunk.stop) if chunk.start == 0 else (1, index), []).append(chunk)
    return list(groups.values())
