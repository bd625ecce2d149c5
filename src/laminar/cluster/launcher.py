"""Start the processes of a run, watch them, carry out the manager's orders, stop them all.

Invariant: every process of the run is a child of the Ray instance that this process started; nothing outlives it.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Coroutine, Iterator
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from laminar.cluster import builders, shell
from laminar.cluster.ports import cause_line, first_line, port_to, replica_name
from laminar.cluster.shell import Builder, Place, Spec
from laminar.config.run_config import RunConfig
from laminar.manager.orders import GiveUpOrder, KillOrder, StartOrder
from laminar.schema.errors import LaminarError, RunFailed, UserError
from laminar.telemetry.events import EventLog

SERVICES: dict[str, Builder] = {
    "relay": builders.relay,
    "data": builders.data,
    "manager": builders.manager,
    "trainer": builders.trainer,
}
"""Every run has one of each; a relay will be one per machine."""

STOP_S = 5.0
"""Time that services get to close what they opened; then their processes are killed."""

EVALUATION_WAIT_S = 300.0
"""The last evaluation takes one batch of one replica."""

MAX_CALLS = 10_000
"""Calls that may wait in one process at a time; each waiting claim or sample is one."""

ORDERS_WAIT_S = 10.0
"""Length of one call for orders; an order is answered at once."""


class Launcher:
    """The processes of one run; `run` returns when training is done."""

    def __init__(self, config: RunConfig, place: Place, resume_step: int | None, events: EventLog) -> None:
        self._config = config
        self._place = place
        self._resume_step = resume_step
        self._events = events
        self._handles: dict[str, Any] = {}
        self._pids: dict[str, int] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Train to the last step; raises what ended the run early.

        waits for:  the trainer to finish, then the last evaluation
        ends:       then; or when a service dies, or the manager gives up
        """
        try:
            resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
            check_gpus(self._config, available=resources.get("GPU", 0.0))
            async with asyncio.TaskGroup() as self._group:
                for name in ("relay", "data", "manager"):
                    self._start(name, SERVICES[name])
                    self._spawn(self._watch_service(name))
                self._spawn(self._obey_for_ever())
                self._start("trainer", SERVICES["trainer"])
                await self._until_it_ends("trainer")
                await self._finish()
                for task in self._tasks:
                    task.cancel()
        except* LaminarError as errors:
            raise _first(errors) from None
        finally:
            await self._stop_all()

    def _port(self, name: str) -> Any:
        return port_to(self._place.run_id, name)

    def _spawn(self, loop: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(self._group.create_task(loop))

    def _start(self, name: str, build: Builder, *, replica_id: str = "", incarnation: int = 0) -> None:
        spec = Spec(
            config=self._config,
            place=self._place,
            resume_step=self._resume_step,
            replica_id=replica_id,
            incarnation=incarnation,
        )
        options = {
            "name": name,
            "namespace": self._place.run_id,
            "num_cpus": 0,
            "num_gpus": gpus_of(build, self._config),
            "max_concurrency": MAX_CALLS,
        }
        self._handles[name] = shell.Shell.options(**options).remote(build, spec)  # type: ignore[attr-defined]

    async def _until_it_ends(self, name: str) -> None:
        """Wait for the loop of a service to return; raises `RunFailed` or what the service raised for the user."""
        try:
            await self._handles[name].run.remote()
        except RayTaskError as error:
            if isinstance(error.cause, UserError | RunFailed):
                raise error.cause from None
            raise RunFailed(f"the {name} process failed: {cause_line(error)} ({self._resume_hint()})") from error
        except RayActorError as error:
            raise RunFailed(f"the {name} process died: {first_line(error)} ({self._resume_hint()})") from None

    async def _watch_service(self, name: str) -> None:
        """An endless loop that returns is an error.

        waits for:  the service's loop to end, which it must not; ends: cancelled when training is done
        """
        await self._until_it_ends(name)
        raise RunFailed(f"the loop of {name} returned; it must run until it is stopped")

    async def _watch_replica(self, replica_id: str, incarnation: int) -> None:
        """Tell the manager when a life of a replica is over.

        waits for:  the replica's loop to end, by itself or with its process
        """
        name = replica_name(replica_id, incarnation)
        handle = self._handles.get(name)
        if handle is None:
            return  # killed in the same breath in which it was started
        try:
            self._pids[name] = await handle.pid.remote()
            self._events.emit("replica_started", replica_id=replica_id, incarnation=incarnation, pid=self._pids[name])
            await handle.run.remote()
            reason = "its loop returned"
        except RayTaskError as error:
            reason = cause_line(error)
        except RayActorError as error:
            reason = first_line(error)
        self._events.emit("process_ended", replica_id=replica_id, incarnation=incarnation, reason=reason)
        self._kill(name)
        await self._port("manager").lost(replica_id, incarnation, reason)

    async def _obey_for_ever(self) -> None:
        """Start and kill replicas as the manager says.

        waits for:  orders  <- the manager decides something; ends: cancelled when training is done
        """
        manager = self._port("manager")
        while True:
            for order in await manager.orders(wait_s=ORDERS_WAIT_S):
                match order:
                    case StartOrder(replica_id=replica_id, incarnation=incarnation):
                        name = replica_name(replica_id, incarnation)
                        self._start(name, builders.replica, replica_id=replica_id, incarnation=incarnation)
                        self._spawn(self._watch_replica(replica_id, incarnation))
                    case KillOrder(replica_id=replica_id, incarnation=incarnation):
                        self._kill(replica_name(replica_id, incarnation))
                    case GiveUpOrder(reason=reason):
                        raise RunFailed(f"{reason} ({self._resume_hint()})")

    async def _finish(self) -> None:
        """The last evaluation, and no open ends in the ledger."""
        data = self._port("data")
        if self._config.evaluation.num_prompts:
            await data.evaluation(self._config.trainer.num_steps, wait_s=EVALUATION_WAIT_S)
        await data.finish_run("the run was finished")

    async def _stop_all(self) -> None:
        """Producers first, so that the data shard hears their last words."""
        services = ["data", "relay"]
        await self._stop([name for name in self._handles if name not in services])
        await self._stop([name for name in services if name in self._handles])

    async def _stop(self, names: list[str]) -> None:
        stops = [asyncio.ensure_future(_quietly(self._handles[name].stop.remote())) for name in names]
        if stops:
            await asyncio.wait(stops, timeout=STOP_S)
        for name in names:
            self._kill(name)

    def _kill(self, name: str) -> None:
        """End a process even if it is frozen and hears no call."""
        handle = self._handles.pop(name, None)
        if handle is not None:
            ray.kill(handle)
        pid = self._pids.pop(name, None)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _resume_hint(self) -> str:
        return f"nothing is lost; go on with: laminar train --resume {self._place.folder}"


async def _quietly(call: Any) -> None:
    """A process that is gone already needs no stopping."""
    with contextlib.suppress(RayError):
        await call


def _first(errors: BaseExceptionGroup[LaminarError]) -> LaminarError:
    """The error to show: what the user can mend before what merely failed."""
    flat = list(_flatten(errors))
    return next((error for error in flat if isinstance(error, UserError)), flat[0])


def _flatten(errors: BaseExceptionGroup[LaminarError]) -> Iterator[LaminarError]:
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _flatten(error)
        else:
            yield error


def gpus_of(build: Builder, config: RunConfig) -> float:
    """GPUs, or the share of one, that Ray must set aside for a process."""
    engine = config.rollout.engine
    if build is builders.trainer and config.trainer.device.startswith("cuda"):
        return config.trainer.gpus
    if build is builders.replica and engine.kind != "scripted" and engine.device.startswith("cuda"):
        return config.rollout.gpus_per_replica
    return 0.0


def check_gpus(config: RunConfig, *, available: float) -> None:
    """Raise `UserError` if Ray would wait for GPUs that are not there."""
    learner, replica = gpus_of(builders.trainer, config), gpus_of(builders.replica, config)
    needed = learner + config.rollout.num_replicas * replica
    if needed > available:
        raise UserError(
            f"the learner and {config.rollout.num_replicas} replicas need {needed:g} GPUs but this machine has "
            f"{available:g}; lower trainer.gpus and rollout.gpus_per_replica to let them share, or rollout.num_replicas"
        )
