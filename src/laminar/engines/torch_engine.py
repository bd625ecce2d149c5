"""Our engine in ordinary PyTorch, CPU or GPU: an event-loop shell around `TorchRunner`.

Invariant: at most one call touches the runner at a time, in its own thread, and a cancelled caller waits for that
thread before it lets go. Tokens that a cancelled `step` did not report are reported by the next `step` or `abort`.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from laminar.engines.protocol import EngineLoad, Output, Request
from laminar.engines.rules import TorchEngineRules
from laminar.engines.torch_runner import TorchRunner

__all__ = ["TorchEngine", "TorchEngineRules"]

T = TypeVar("T")


class TorchEngine:
    """Runs any checkpoint of the Llama, Qwen2 or Qwen3 family that `model_path`/config.json describes."""

    def __init__(self, model_path: Path, rules: TorchEngineRules) -> None:
        self._model_path = model_path
        self._rules = rules
        self._lock = asyncio.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch-engine")
        self._started: TorchRunner | None = None

    async def start(self) -> None:
        async with self._lock:
            self._started = await self._in_thread(lambda: TorchRunner(self._model_path, self._rules))

    def submit(self, requests: Sequence[Request]) -> None:
        self._runner.enqueue(requests)

    async def step(self) -> list[Output]:
        if self._runner.is_idle:
            return []
        async with self._lock:
            await self._in_thread(self._runner.run)
            return self._runner.collect()

    async def abort(self, request_ids: Sequence[str] | None = None) -> list[Output]:
        async with self._lock:
            return self._runner.abort(request_ids)

    async def load_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        async with self._lock:
            await self._in_thread(lambda: self._runner.load_weights(version, tensors))

    def load(self) -> EngineLoad:
        return self._runner.load()

    async def close(self) -> None:
        async with self._lock:
            self._started = None
            self._thread.shutdown()

    @property
    def _runner(self) -> TorchRunner:
        if self._started is None:
            raise RuntimeError("the engine is not started, or is closed")
        return self._started

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in the engine's thread and, whatever happens to the caller, until it is done."""
        future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                with suppress(asyncio.CancelledError):  # a second one must not leave the thread alone either
                    await asyncio.wait([future])
            future.exception()  # the caller is gone: marks it as seen
            raise
