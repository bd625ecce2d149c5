"""An engine without a model, for tests and dry runs: real batching, bounded KV, made-up but reproducible answers.

A token is a function of prompt, seed, index and loaded version (`scripted_token`), and its log-prob names the version
(`scripted_logprob`), so a test can tell which version drew what, and that a continued answer equals an undisturbed one.
Time passes only in `asyncio.sleep`, so it runs on a virtual clock too.
"""

import asyncio
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from laminar.engines.batching import LiveRequest
from laminar.engines.protocol import EngineLoad, Output, Request
from laminar.engines.request_book import RequestBook
from laminar.engines.rules import ScriptedEngineRules
from laminar.schema.tokens import pack_ids

__all__ = ["ScriptedEngine", "ScriptedEngineRules", "scripted_logprob", "scripted_token"]

Lengths = Callable[[Request], int] | Mapping[str, int]
"""How many tokens an answer has, the stop token included: by request, or by group id."""


def scripted_token(prompt_ids: Sequence[int], seed: int, index: int, version: int, vocab: int) -> int:
    """Token `index` after the prompt."""
    return zlib.crc32(f"{seed} {index} {version}".encode(), zlib.crc32(pack_ids(prompt_ids))) % vocab


def scripted_logprob(version: int) -> float:
    """Log-prob of every token that `version` draws."""
    return -1.0 - version


def hashed_length(request: Request) -> int:
    """1 to 32 tokens, by prompt and seed."""
    return 1 + scripted_token(prompt_of(request), request.seed, -1, 0, 32)


def prompt_of(request: Request) -> tuple[int, ...]:
    return request.token_ids[: len(request.token_ids) - request.num_answered]


class ScriptedEngine:
    """Passes the same contract as the real engines."""

    def __init__(self, rules: ScriptedEngineRules, lengths: Lengths = hashed_length) -> None:
        self._rules = rules
        self._lengths = lengths
        self._book = RequestBook(rules.batch_rules())
        self._lock = asyncio.Lock()
        self._version: int | None = None

    async def start(self) -> None:
        pass

    def submit(self, requests: Sequence[Request]) -> None:
        self._book.enqueue(requests)

    async def step(self) -> list[Output]:
        if not self._book:
            return []
        async with self._lock:
            if self._version is None:
                raise RuntimeError("the engine has requests but no weights; call load_weights first")
            num_iterations, elapsed_s = 0, 0.0
            while num_iterations < self._rules.iterations_per_step and self._book.take_in():
                elapsed_s += self._iterate(self._version)
                num_iterations += 1
            await asyncio.sleep(elapsed_s)
            return self._book.collect()

    async def abort(self, request_ids: Sequence[str] | None = None) -> list[Output]:
        async with self._lock:
            return self._book.abort(request_ids, forget=lambda live: None)

    async def load_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        async with self._lock:
            if self._book:
                raise RuntimeError(f"weights can only be swapped when idle; the engine has {len(self._book)} requests")
            self._version = version

    def load(self) -> EngineLoad:
        return self._book.load()

    async def close(self) -> None:
        pass

    def _iterate(self, version: int) -> float:
        """One token for everyone who decodes; returns how long that took."""
        batcher = self._book.batcher
        plan = batcher.plan()
        for live in batcher.decoding():
            live.append(self._next_token(live, version), scripted_logprob(version))
            if live.finish is not None:
                batcher.remove(live)
        num_prefilled = sum(chunk.stop - chunk.start for chunk in plan.chunks)
        return self._rules.token_s + self._rules.prefill_token_s * num_prefilled

    def _next_token(self, live: LiveRequest, version: int) -> int:
        request, index = live.request, live.num_answered
        stops = request.stop_token_ids
        length = self._lengths(request) if callable(self._lengths) else self._lengths[request.group_id]
        if stops and index >= length - 1:
            return stops[0]
        token_id = scripted_token(prompt_of(request), request.seed, index, version, self._rules.vocab)
        while token_id in stops:
            token_id = (token_id + 1) % self._rules.vocab
        return token_id
