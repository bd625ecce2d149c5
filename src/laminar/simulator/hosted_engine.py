"""An engine inside a process that can be frozen, and whose weights come over an emulated link."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from laminar.engines.protocol import Engine, EngineLoad, Output, Request
from laminar.simulator.lines import Host


class HostedEngine:
    """Passes everything through; does nothing while its host is frozen."""

    def __init__(self, engine: Engine, host: Host, pull: Callable[[], Awaitable[None]]) -> None:
        self._engine = engine
        self._host = host
        self._pull = pull

    async def start(self) -> None:
        await self._engine.start()

    def submit(self, requests: Sequence[Request]) -> None:
        self._engine.submit(requests)

    async def step(self) -> list[Output]:
        await self._host.awake()
        outputs = await self._engine.step()
        await self._host.awake()
        return outputs

    async def abort(self, request_ids: Sequence[str] | None = None) -> list[Output]:
        return await self._engine.abort(request_ids)

    async def load_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        await self._pull()
        await self._host.awake()
        await self._engine.load_weights(version, tensors)

    def load(self) -> EngineLoad:
        return self._engine.load()

    async def close(self) -> None:
        await self._engine.close()
