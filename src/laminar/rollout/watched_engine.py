"""An engine whose calls are timed, so that one that hangs is told from one that works.

An engine that hangs leaves its replica's event loop alive, and with it the heartbeats. The replica therefore stops
reporting when a call takes too long, and is replaced like one that is frozen as a whole.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from laminar.engines.protocol import Engine, EngineLoad, Output, Request


class WatchedEngine:
    """The engine given, with `silent_s`. Implements `engines.protocol.Engine`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._began_s: dict[int, float] = {}
        self._num_calls = 0

    def silent_s(self) -> float:
        """How long the oldest call under way has taken so far; 0 if there is none."""
        return asyncio.get_running_loop().time() - min(self._began_s.values()) if self._began_s else 0.0

    async def start(self) -> None:
        """Not timed: whoever starts a replica waits for its first heartbeat."""
        await self._engine.start()

    def submit(self, requests: Sequence[Request]) -> None:
        self._engine.submit(requests)

    async def step(self) -> list[Output]:
        with self._timed():
            return await self._engine.step()

    async def abort(self, request_ids: Sequence[str] | None = None) -> list[Output]:
        with self._timed():
            return await self._engine.abort(request_ids)

    async def load_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        with self._timed():
            await self._engine.load_weights(version, tensors)

    def load(self) -> EngineLoad:
        return self._engine.load()

    async def close(self) -> None:
        await self._engine.close()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        self._num_calls += 1
        number = self._num_calls
        self._began_s[number] = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            del self._began_s[number]
