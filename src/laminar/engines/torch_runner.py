"""The torch engine without its event loop: plan an iteration, compute it, take the drawn tokens.

Invariant: between iterations, what `Batcher` booked as computed lies in the KV pages, and `DecodeRows` holds exactly the
requests that decode. One thread at a time, except that `enqueue` and `load` may be called while `run` is at work.
"""

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from laminar.engines.batching import Batcher, BatchRules, Chunk, LiveRequest, Plan, enliven
from laminar.engines.decode_rows import DecodeRows
from laminar.engines.decoder_shape import DecoderShape, read_shape
from laminar.engines.llama import Batch, Llama
from laminar.engines.paged_kv import ChunkView, PagedKV, PageTables, page_mask
from laminar.engines.protocol import EngineLoad, Output, Request
from laminar.engines.sampler import DrawTensors, sample

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

IDLE_SPAN = 0.25
"""Attention reads all pages up to the highest in use; with more than this share unused, pages are moved together."""

FEW_PAGES = 16
"""So many unused pages are never worth a move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchEngineRules:
    """What the torch engine may use.

    KV memory holds `kv_capacity_tokens`, rounded down to whole pages; a request reserves the pages of its present
    tokens. `prefill_chunk_tokens` bounds the prompt tokens of one iteration, so that decoding is not starved.
    """

    max_running: int
    kv_capacity_tokens: int
    prefill_chunk_tokens: int
    quantum_s: float = 0.05
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    page_tokens: int = 32

    def batch_rules(self) -> BatchRules:
        return BatchRules(
            max_running=self.max_running,
            num_pages=self.kv_capacity_tokens // self.page_tokens,
            page_tokens=self.page_tokens,
            prefill_chunk_tokens=self.prefill_chunk_tokens,
        )


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
        self._rows = DecodeRows(
            max_rows=batch_rules.max_running,
            num_pages=batch_rules.num_pages,
            max_pages_per_row=min(batch_rules.num_pages, batch_rules.pages_for(self._shape.max_positions)),
            page_tokens=batch_rules.page_tokens,
        )
        self._batcher = Batcher(batch_rules)
        self._lives: dict[str, LiveRequest] = {}
        self._inbox: deque[LiveRequest] = deque()  # bounded by the caller, who holds every request anyway
        self._version: int | None = None

    @property
    def is_idle(self) -> bool:
        return not self._lives

    def enqueue(self, requests: Sequence[Request]) -> None:
        """Queue all of them or, with a ValueError, none."""
        fresh: dict[str, LiveRequest] = {}
        for request in requests:
            self._check(request)
            if request.request_id in self._lives or request.request_id in fresh:
                raise ValueError(f"request {request.request_id} is already queued")
            fresh[request.request_id] = enliven(request)
        self._lives.update(fresh)
        self._inbox.extend(fresh.values())

    def _check(self, request: Request) -> None:
        name, num_tokens = request.request_id, len(request.token_ids)
        if num_tokens < 1 or request.max_new_tokens < 1:
            raise ValueError(f"request {name} needs at least 1 token and room for at least 1 new one")
        if num_tokens + request.max_new_tokens > self._shape.max_positions:
            raise ValueError(
                f"request {name} may grow to {num_tokens + request.max_new_tokens} tokens; the model has "
                f"{self._shape.max_positions} positions"
            )
        if min(request.token_ids) < 0 or max(request.token_ids) >= self._shape.vocab:
            raise ValueError(f"request {name} has token ids outside the vocabulary of {self._shape.vocab}")
        self._batcher.check(request)

    def load(self) -> EngineLoad:
        batcher = self._batcher
        return EngineLoad(
            num_running=len(batcher.running),
            num_waiting=len(batcher.waiting) + len(self._inbox),
            kv_used_tokens=batcher.num_pages_used * self._page_tokens,
            kv_capacity_tokens=batcher.rules.num_pages * self._page_tokens,
            num_preempted=batcher.num_preempted,
        )

    @torch.inference_mode()
    def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Replace all weights in place and wipe the KV memory."""
        if not self.is_idle:
            raise RuntimeError(f"weights can only be swapped when the engine is idle; it has {len(self._lives)} requests")
        self._model.load(tensors)
        self._kv.clear()
        self._version = version

    @torch.inference_mode()
    def run(self) -> None:
        """Iterate for a quantum, or until nothing is left to do."""
        if self._version is None and self._lives:
            raise RuntimeError("the engine has requests but no weights; call load_weights first")
        deadline_s = time.perf_counter() + self._quantum_s
        while self._has_work() and time.perf_counter() < deadline_s:
            self._iterate()

    def collect(self) -> list[Output]:
        """Report what is new and forget what has ended."""
        outputs = [live.take_output() for live in self._lives.values() if live.fresh_ids or live.finish]
        for output in outputs:
            if output.finish is not None:
                del self._lives[output.request_id]
        return outputs

    def abort(self, request_ids: Sequence[str] | None) -> list[Output]:
        """Stop requests where they are; tokens that were not yet reported are in the result."""
        self._has_work()  # takes in what was submitted
        outputs = []
        for request_id in list(self._lives) if request_ids is None else request_ids:
            live = self._lives.pop(request_id, None)
            if live is None:
                continue
            if live.finish is None:
                self._rows.remove(live)
                self._batcher.remove(live)
                live.finish = "aborted"
            outputs.append(live.take_output())
        return outputs

    def _has_work(self) -> bool:
        """Take in new requests; they are never in neither queue, so `load` may count one twice but never miss it."""
        while self._inbox:
            self._batcher.submit([self._inbox[0]])
            self._inbox.popleft()
        return bool(self._batcher.waiting or self._batcher.running)

    def _iterate(self) -> None:
        plan = self._batcher.plan()
        for live in plan.dropped:
            self._rows.remove(live)
        for live in plan.grown:
            self._rows.grow(live)
        if plan.page_copies:
            self._kv.copy_pages(plan.page_copies)
        for live in plan.joining:
            self._rows.add(live)
        logits = self._model.forward(self._batch(plan), self._kv)
        if logits is not None:
            self._take(*sample(logits, self._draws()))

    def _take(self, tokens: Tensor, logprobs: Tensor) -> None:
        """Append one token to every row and let go of what has ended."""
        token_ids, values = tokens.tolist(), logprobs.tolist()
        if not math.isfinite(sum(values)):
            raise RuntimeError(f"version {self._version} of the model computes log-probs that are not finite")
        self._rows.advance(token_ids)
        ended = []
        for live, token_id, logprob in zip(self._rows.lives, token_ids, values, strict=True):
            live.append(token_id, logprob)
            if live.finish is not None:
                ended.append(live)
        for live in ended:
            self._rows.remove(live)
            self._batcher.remove(live)
        if ended:
            self._compact()

    def _compact(self) -> None:
        unused = self._rows.span - 1 - self._batcher.num_pages_used
        if unused > max(FEW_PAGES, IDLE_SPAN * self._rows.span):
            moves = self._batcher.compact()
            self._kv.copy_pages(list(moves.items()))
            self._rows.move_pages(moves)

    def _batch(self, plan: Plan) -> Batch:
        rows, first = self._rows, len(self._rows)
        columns = [(rows.tokens, rows.positions, rows.pages, rows.offsets)]
        chunks = []
        for chunk in plan.chunks:
            last = first + chunk.stop - chunk.start
            columns.append(self._chunk_columns(chunk))
            pages = torch.tensor(chunk.live.pages, device=self._device)
            chunks.append(ChunkView(first=first, last=last, start=chunk.start, stop=chunk.stop, pages=pages))
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
        view = self._rows.begin()
        return PageTables(
            owner_P=self._upload(view.owner),
            table=self._upload(view.table),
            width=view.width,
            mask_P1T=page_mask(self._upload(view.valid), self._page_tokens, self._kv.dtype),
        )

    def _draws(self) -> DrawTensors:
        draws = self._rows.draws()
        return DrawTensors(
            seeds=self._upload(draws.seeds),
            indices=self._upload(draws.indices),
            temperatures=self._upload(draws.temperatures),
            top_ps=self._upload(draws.top_ps),
            top_ks=self._upload(draws.top_ks),
            all_unit=draws.all_unit,
            any_greedy=draws.any_greedy,
            any_filtered=draws.any_filtered,
        )

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
