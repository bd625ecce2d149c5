"""The process around a service: build it, run it, pass calls through.

Invariant: a service is built and run inside one asyncio task; when that ends, whatever it opened is closed.
"""

import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

import ray
from msgspec import Struct

from laminar.config.run_config import RunConfig
from laminar.schema.fleet import KnownFleet
from laminar.telemetry.files import EVENTS


class Place(Struct, frozen=True, kw_only=True):
    """Where a run lives. `sockets` and `events`, a file of the run folder, are those of a process's machine."""

    run_id: str
    folder: Path
    sockets: Path
    secret: bytes
    module_path: tuple[str, ...]
    events: str = EVENTS


class ChainPlace(Struct, frozen=True, kw_only=True):
    """A relay's place in the chain of all machines, and where its keeper is. The relay listens at `address` and is
    given up, or gives a link up, after `deadline_s` of silence."""

    relay_id: str
    machine: str
    address: str
    keeper: tuple[str, int]
    near_learner: bool
    deadline_s: float


class Spec(Struct, frozen=True, kw_only=True):
    """Which life of which service, of which run.

    `resume_step` is for the data service until it has resumed once, `fleet` for the manager; `chain` is that of the
    machine's relay, None if the run has no other machine.
    """

    config: RunConfig
    place: Place
    incarnation: int
    resume_step: int | None = None
    replica_id: str = ""
    fleet: KnownFleet | None = None
    chain: ChainPlace | None = None


class Service(Protocol):
    """Anything with a loop of its own; its other public methods are callable through a port."""

    async def run(self) -> None:
        """Until cancelled, or until its work is done."""
        ...


Builder = Callable[[Spec], AbstractAsyncContextManager[Service]]


@ray.remote
class Shell:
    """One actor process around one service."""

    def __init__(self, build: Builder, spec: Spec) -> None:
        sys.path[:0] = [entry for entry in spec.place.module_path if entry not in sys.path]
        self._build = build
        self._spec = spec
        self._service: Service | None = None
        self._ready = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    async def pid(self) -> int:
        """Process id, for the launcher to kill what hangs."""
        return os.getpid()

    async def ready(self) -> None:
        """Return when the service is built."""
        await self._ready.wait()

    async def run(self) -> None:
        """Build and run the service; returns when it is done or was stopped, raises what it raises."""
        self._running = asyncio.ensure_future(self._build_and_run())
        try:
            await self._running
        except asyncio.CancelledError:
            if not self._running.cancelled():
                self._running.cancel()
                raise

    async def call(self, method: str, args: tuple[Any, ...], extra: dict[str, Any]) -> Any:
        """Pass a call through, once the service is built."""
        await self._ready.wait()
        return await getattr(self._service, method)(*args, **extra)

    async def stop(self) -> None:
        """Let the service close what it opened."""
        if self._running is not None and not self._running.done():
            self._running.cancel()
            await asyncio.wait([self._running])

    async def _build_and_run(self) -> None:
        async with self._build(self._spec) as self._service:
            self._ready.set()
            await self._service.run()
