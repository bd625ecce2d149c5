"""Which requests run, which wait and who owns which KV page: continuous batching as a state machine without I/O.

Invariants: pages in use never exceed the budget and have one owner each; the oldest running request is never pushed
out, so it finishes, and the queue is first in, first out, so everything finishes. Prefilling covers all but the last
token of a request; the last one is always computed by decoding, which is also what draws the next token.
"""

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from laminar.engines.protocol import FinishReason, Output, Request

RUNNING_PER_SPARE_PAGE = 8
"""Admission leaves one page free per this many running requests, or the newcomer would be pushed out at once."""

ShareKey = tuple[str, tuple[int, ...]]
"""Group and the tokens its members have in common: equal keys have equal KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRules:
    """Bounds: requests in the cache, pages in the cache, tokens per page, prompt tokens computed per iteration."""

    max_running: int
    num_pages: int
    page_tokens: int
    prefill_chunk_tokens: int

    def __post_init__(self) -> None:
        if min(self.max_running, self.num_pages, self.page_tokens, self.prefill_chunk_tokens) < 1:
            raise ValueError(f"every bound of the batch must be at least 1: {self}")

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that waits or runs. KV of the first `num_computed` of `token_ids` lies in `pages`, in order."""

    request: Request
    token_ids: list[int]
    share_key: ShareKey
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)
    fresh_ids: list[int] = field(default_factory=list)
    fresh_logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None

    @property
    def num_answered(self) -> int:
        """Tokens after the prompt, which is the index of the next draw."""
        return self.request.num_answered + len(self.token_ids) - len(self.request.token_ids)

    @property
    def num_shareable(self) -> int:
        """Leading tokens whose KV may come from another member of the group; the last token is decoded here."""
        return min(self.request.num_shared, len(self.token_ids) - 1)

    def append(self, token_id: int, logprob: float) -> None:
        """Take a drawn token and notice whether it is the last one."""
        self.token_ids.append(token_id)
        self.fresh_ids.append(token_id)
        self.fresh_logprobs.append(logprob)
        if token_id in self.request.stop_token_ids:
            self.finish = "stop"
        elif len(self.token_ids) - len(self.request.token_ids) >= self.request.max_new_tokens:
            self.finish = "length"

    def take_output(self) -> Output:
        """Report what is new; the next report starts after it."""
        output = Output(
            request_id=self.request.request_id,
            token_ids=tuple(self.fresh_ids),
            logprobs=tuple(self.fresh_logprobs),
            finish=self.finish,
        )
        self.fresh_ids.clear()
        self.fresh_logprobs.clear()
        return output


def enliven(request: Request) -> LiveRequest:
    """Bookkeeping of a new request."""
    share_key = (request.group_id, request.token_ids[: request.num_shared])
    return LiveRequest(request, list(request.token_ids), share_key)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute KV of tokens start..stop of a request; `stop` is at most its last token."""

    live: LiveRequest
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One iteration, in this order: forget `dropped`, copy pages, compute `chunks`, decode.

    `joining` are those that decode for the first time since they were admitted; `grown` those that got one more page.
    """

    dropped: list[LiveRequest]
    grown: list[LiveRequest]
    page_copies: list[tuple[int, int]]
    chunks: list[Chunk]
    joining: list[LiveRequest]


class Batcher:
    """Admission, preemption and KV pages. Page 0 is for padding and is never given out."""

    def __init__(self, rules: BatchRules) -> None:
        self.rules = rules
        self.waiting: deque[LiveRequest] = deque()
        self.running: list[LiveRequest] = []
        self.num_preempted = 0
        self._free_pages = list(range(1, rules.num_pages + 1))
        self._decoding: set[LiveRequest] = set()

    @property
    def num_pages_used(self) -> int:
        return self.rules.num_pages - len(self._free_pages)

    def decoding(self) -> list[LiveRequest]:
        """Those that draw a token in the planned iteration, oldest first."""
        return [live for live in self.running if live in self._decoding]

    def check(self, request: Request) -> None:
        """Raise ValueError if the request could never fit."""
        num_tokens = len(request.token_ids) + request.max_new_tokens
        if self.rules.pages_for(num_tokens) > self.rules.num_pages:
            capacity_tokens = self.rules.num_pages * self.rules.page_tokens
            raise ValueError(
                f"request {request.request_id} may grow to {num_tokens} tokens ({len(request.token_ids)} given, up to "
                f"{request.max_new_tokens} new), which can never fit a KV cache of {capacity_tokens} tokens"
            )

    def submit(self, lives: Iterable[LiveRequest]) -> None:
        self.waiting.extend(lives)

    def remove(self, live: LiveRequest) -> None:
        """A request ended, wherever it was: give its pages back."""
        if live.pages:
            self.running.remove(live)
            self._drop_kv(live)
        else:
            self.waiting.remove(live)

    def plan(self) -> Plan:
        """Decide the next iteration and book its KV; `num_computed` then counts what the plan will compute."""
        grown, dropped = self._grow()
        self._admit()
        prefilling = [live for live in self.running if live not in self._decoding]
        page_copies = self._share(prefilling)
        chunks = self._prefill(prefilling)
        joining = [live for live in prefilling if live.num_computed == len(live.token_ids) - 1]
        self._decoding.update(joining)
        for live in self._decoding:
            live.num_computed += 1
        return Plan(dropped=dropped, grown=grown, page_copies=page_copies, chunks=chunks, joining=joining)

    def compact(self) -> dict[int, int]:
        """Move pages so that those in use are the lowest ones; returns old number to new. Targets are unused before."""
        used = {page for live in self.running for page in live.pages}
        keep = len(used)
        holes = (page for page in range(1, keep + 1) if page not in used)
        moves = dict(zip(sorted(page for page in used if page > keep), holes, strict=True))
        for live in self.running:
            live.pages = [moves.get(page, page) for page in live.pages]
        self._free_pages = list(range(keep + 1, self.rules.num_pages + 1))
        return moves

    def _grow(self) -> tuple[list[LiveRequest], list[LiveRequest]]:
        """A page for everyone who decodes past the last one, oldest first; the newest make room if there is none."""
        grown: list[LiveRequest] = []
        dropped: list[LiveRequest] = []
        for live in list(self.running):
            has_room = len(live.token_ids) <= len(live.pages) * self.rules.page_tokens
            if has_room or not live.pages:  # without pages it was pushed out earlier in this loop
                continue
            while not self._free_pages and self.running[-1] is not live:
                dropped.append(self._preempt())
            if self._free_pages:
                live.pages.append(heapq.heappop(self._free_pages))
                grown.append(live)
            else:
                dropped.append(self._preempt())
        return grown, dropped

    def _preempt(self) -> LiveRequest:
        """Push the newest out of the cache; its tokens stay, and it is the next to be admitted."""
        live = self.running.pop()
        self._drop_kv(live)
        self.waiting.appendleft(live)
        self.num_preempted += 1
        return live

    def _drop_kv(self, live: LiveRequest) -> None:
        for page in live.pages:
            heapq.heappush(self._free_pages, page)
        live.pages = []
        live.num_computed = 0
        self._decoding.discard(live)

    def _admit(self) -> None:
        """First in, first out: a small request does not overtake one that waits for room."""
        while self.waiting and len(self.running) < self.rules.max_running:
            live = self.waiting[0]
            need = self.rules.pages_for(len(live.token_ids))
            spare = len(self.running) // RUNNING_PER_SPARE_PAGE
            if need + spare > len(self._free_pages):
                return
            self.waiting.popleft()
            live.pages = [heapq.heappop(self._free_pages) for _ in range(need)]
            self.running.append(live)

    def _share(self, prefilling: list[LiveRequest]) -> list[tuple[int, int]]:
        """Copy the common prompt from a member of the group that has it: (from page, to page)."""
        copies: list[tuple[int, int]] = []
        if not prefilling:
            return copies
        donors = {live.share_key: live for live in self.running if live.num_computed >= live.request.num_shared}
        for live in prefilling:
            donor = donors.get(live.share_key)
            if donor is not None and live.num_computed < live.num_shareable:
                num_pages = self.rules.pages_for(live.num_shareable)
                copies.extend(zip(donor.pages[:num_pages], live.pages[:num_pages], strict=True))
                live.num_computed = live.num_shareable
        return copies

    def _prefill(self, prefilling: list[LiveRequest]) -> list[Chunk]:
        """Spend the budget, oldest first. While one member computes the group's prompt the others wait to copy it."""
        budget = self.rules.prefill_chunk_tokens
        chunks: list[Chunk] = []
        in_hand: set[ShareKey] = set()
        for live in prefilling:
            if live.num_computed < live.num_shareable:
                if live.share_key in in_hand:
                    continue
                in_hand.add(live.share_key)
            stop = min(len(live.token_ids) - 1, live.num_computed + budget)
            if stop > live.num_computed:
                chunks.append(Chunk(live, live.num_computed, stop))
                budget -= stop - live.num_computed
                live.num_computed = stop
        return chunks
