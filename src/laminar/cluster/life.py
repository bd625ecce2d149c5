"""One life of a service or replica: an actor process from its start to its end, however that comes.

Invariant: `run` ends when the process does, or when it has been silent too long; then `kill` leaves nothing of it.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final

import ray
from msgspec import Struct
from ray.exceptions import RayActorError, RayError, RayTaskError

from laminar.cluster import shell
from laminar.cluster.machine import Machine
from laminar.cluster.ports import cause_line, first_line
from laminar.cluster.shell import Builder, Spec
from laminar.schema.errors import LaminarError, RunFailed, UserError

MAX_CALLS: Final = 10_000
"""Calls that may wait in one process at a time; each waiting claim or sample is one."""

NAME_FREE_S: Final = 10.0
"""Ray takes a moment to free the name of an actor that died."""

NAME_RETRY_S: Final = 0.05


class LifeLost(LaminarError):
    """The process ended, froze, or raised what nobody can mend; another life may do better."""


class PingRules(Struct, frozen=True, kw_only=True):
    """A process is asked every `every_s` and lost after `dead_after_s` without an answer; at first it has longer."""

    every_s: float
    dead_after_s: float
    start_timeout_s: float


class Life:
    """An actor under `name` on a machine. Its constructor starts the process and returns at once."""

    def __init__(self, name: str, build: Builder, spec: Spec, machine: Machine, *, num_gpus: float = 0.0) -> None:
        options = {
            **machine.options,
            "name": name,
            "namespace": spec.place.run_id,
            "num_cpus": 0,
            "num_gpus": num_gpus,
            "max_concurrency": MAX_CALLS,
        }
        self.name = name
        self.machine = machine
        self.pid: int | None = None
        self._lost = asyncio.Event()
        self._handle: Any = shell.Shell.options(**options).remote(build, spec)  # type: ignore[attr-defined]

    @classmethod
    async def begin(cls, name: str, build: Builder, spec: Spec, machine: Machine, *, num_gpus: float = 0.0) -> "Life":
        """Start a life under a name that an earlier one may have left a moment ago.

        waits for:  Ray to free the name; ends: after NAME_FREE_S with `LifeLost`
        """
        give_up_s = asyncio.get_running_loop().time() + NAME_FREE_S
        while True:
            try:
                return cls(name, build, spec, machine, num_gpus=num_gpus)
            except ValueError as error:
                if asyncio.get_running_loop().time() > give_up_s:
                    raise LifeLost(f"{name} could not be started: {first_line(error)}") from None
            await asyncio.sleep(NAME_RETRY_S)

    async def run(
        self,
        on_started: Callable[[int], None],
        pings: PingRules | None = None,
        on_ready: Callable[[int], None] | None = None,
    ) -> None:
        """Until its loop returns. `on_started` and `on_ready` hear the process id.

        waits for:  the loop of the service
        ends:       with it; raises what it raised for the user, else `LifeLost`; with `pings` also after silence, and
                    always with its machine
        """
        running = asyncio.ensure_future(self._run())
        watching = asyncio.ensure_future(self._watch(on_started, on_ready, pings))
        losing = asyncio.ensure_future(self._until_machine_is_lost())
        tasks = [running, watching, losing]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await next(task for task in tasks if task.done())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def machine_is_lost(self) -> None:
        """Its machine is gone, whatever the connection to the process says yet."""
        self._lost.set()

    async def stop(self) -> None:
        """Let the service close what it opened; a process that is gone needs no stopping."""
        with contextlib.suppress(RayError):
            await self._handle.stop.remote()

    def kill(self) -> None:
        """End the process even if it is frozen and hears no call."""
        ray.kill(self._handle)
        if self.pid is not None:
            self.machine.kill(self.pid)

    async def _until_machine_is_lost(self) -> None:
        await self._lost.wait()
        raise LifeLost(f"machine {self.machine.name} was lost")

    async def _run(self) -> None:
        try:
            await self._handle.run.remote()
        except RayTaskError as error:
            if isinstance(error.cause, UserError | RunFailed):
                raise error.cause from None
            raise LifeLost(cause_line(error)) from error
        except RayActorError as error:
            raise LifeLost(first_line(error)) from None

    async def _watch(
        self, on_started: Callable[[int], None], on_ready: Callable[[int], None] | None, pings: PingRules | None
    ) -> None:
        """Raises `LifeLost` after a silence; a process that ends is left to `_run`.

        waits for:  answers of the process; ends: cancelled with `run`
        """
        with contextlib.suppress(RayError):
            self.pid = int(await self._handle.pid.remote())
            on_started(self.pid)
            if pings is not None:
                await self._answer("ready", pings.start_timeout_s)
            if on_ready is not None:
                on_ready(self.pid)
            while pings is not None:
                await asyncio.sleep(pings.every_s)
                await self._answer("pid", pings.dead_after_s)
        await asyncio.get_running_loop().create_future()  # the end of the process is told by `_run`

    async def _answer(self, method: str, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                await getattr(self._handle, method).remote()
        except TimeoutError:
            raise LifeLost(f"no answer for {deadline_s:g} s") from None
