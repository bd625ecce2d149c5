"""Start the processes of a run, watch them, start them again, carry out the manager's orders, stop them all.

Invariant: every process of the run is an actor that this process started, on a machine that `Machines` knows; nothing
outlives it. The death of any one of them does not end the run: a service is started again by `scheduling.restarts`, a
replica when the manager says so, both where `scheduling.placement` says.
"""

import asyncio
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from laminar.cluster import builders
from laminar.cluster.life import Life, LifeLost, PingRules
from laminar.cluster.machine import Machine
from laminar.cluster.machines import Machines
from laminar.cluster.ports import port_to, relay_name, replica_name
from laminar.cluster.shell import Builder, Place, Spec
from laminar.cluster.wiring import learner_need, ping_rules, replica_need, restart_rules
from laminar.config.run_config import RunConfig
from laminar.insisting import insist
from laminar.manager.orders import GiveUpOrder, KillOrder, StartOrder
from laminar.scheduling.placement import Need
from laminar.scheduling.restarts import after_failure
from laminar.schema.errors import LaminarError, PortError, RunFailed, UserError
from laminar.schema.fleet import KnownFleet
from laminar.telemetry.events import EventLog
from laminar.telemetry.waits import Waits

if TYPE_CHECKING:
    from laminar.cluster.joined import JoinedCluster

SERVICES: Final[dict[str, Builder]] = {
    "data": builders.data,
    "manager": builders.manager,
    "trainer": builders.trainer,
}
"""Every run has one of each, and a relay on every machine."""

STOP_S: Final = 5.0
"""Time that services get to close what they opened; then their processes are killed."""

EVALUATION_WAIT_S: Final = 300.0
"""The last evaluation takes one batch of one replica."""

ORDERS_WAIT_S: Final = 10.0
"""Length of one call for orders; an order is answered at once."""

RETRY_S: Final = 0.2
"""Pause before a service that restarts is called again."""


class Launcher:
    """The processes of one run; `run` returns when training is done, `scale` works meanwhile."""

    def __init__(
        self,
        config: RunConfig,
        place: Place,
        machines: Machines,
        resume_step: int | None,
        events: EventLog,
        cluster: "JoinedCluster | None" = None,
    ) -> None:
        self._config = config
        self._place = place
        self._machines = machines
        self._cluster = cluster
        self._resume_step = resume_step
        self._events = events
        self._waits = Waits("launcher", events)
        self._pings: PingRules = ping_rules(config)
        self._num_replicas = config.rollout.num_replicas
        self._services: dict[str, Life] = {}
        self._replicas: dict[tuple[str, int], Life] = {}
        self._with_relay: set[str] = set()
        self._last_lives: dict[str, int] = {}
        self._were_ready: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Train to the last step; raises what ended the run early.

        waits for:  the trainer to finish, then the last evaluation
        ends:       then; or when a service failed too often, or the manager gives up
        """
        try:
            async with asyncio.TaskGroup() as around:
                keeping = around.create_task(self._cluster.run()) if self._cluster else None
                await self._run_parts()
                if keeping is not None:
                    keeping.cancel()
        except* LaminarError as errors:
            raise _first(errors) from None

    async def _run_parts(self) -> None:
        """Everything that lives on machines, from its start to its end."""
        try:
            if self._cluster is not None:
                await self._cluster.ready()
            check_gpus(self._config, self._num_replicas, self._machines)
            await self._reserve()
            async with asyncio.TaskGroup() as self._group:
                self._look_at_machines()
                self._spawn(self._follow_machines())
                for name in ("data", "manager"):
                    self._spawn(self._keep_for_ever(name))
                self._spawn(self._obey_for_ever())
                await self._keep("trainer")
                await self._finish()
                for task in self._tasks:
                    task.cancel()
        finally:
            await self._stop_all()

    async def _reserve(self) -> None:
        """The learner gets its room before replicas take it."""
        learner, replica = learner_need(self._config), replica_need(self._config)
        check_room("the learner (trainer.gpus)", learner, 1, self._machines)
        await self._machines.place("trainer", learner)
        check_room("a replica (rollout.gpus_per_replica)", replica, self._num_replicas, self._machines)

    async def scale(self, num_replicas: int) -> None:
        """There shall be so many replicas from now on; raises `UserError` if that cannot be."""
        least = self._config.manager.min_replicas
        if num_replicas < least:
            raise UserError(f"--replicas {num_replicas} is less than manager.min_replicas = {least}")
        check_gpus(self._config, num_replicas, self._machines)
        self._num_replicas = num_replicas  # a manager that starts meanwhile hears of it
        self._events.emit("scaled", num_replicas=num_replicas)
        await self._insist("manager", "scale", num_replicas)

    def _spawn(self, loop: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(self._group.create_task(loop))

    async def _insist(self, name: str, method: str, *args: Any, **wait: float) -> Any:
        """Call a service that may be restarting, until it answers or the time is up in which it would have."""
        call = getattr(port_to(self._place.run_id, name), method)
        deadline_s = self._pings.start_timeout_s + wait.get("wait_s", 0.0)
        on = f"reach the {name} service ({method})"
        with self._waits.on(f"an answer to {method}", of=name, deadline_s=deadline_s):
            return await insist(lambda: call(*args, **wait), on=on, deadline_s=deadline_s, who="the launcher")

    # ---- machines

    async def _follow_machines(self) -> None:
        """Look at them again and again.

        waits for:  a change of machines; ends: cancelled when training is done
        """
        while True:
            self._look_at_machines()
            await self._machines.changed()

    def _look_at_machines(self) -> None:
        """A relay for each machine that has come; what lived on one that is gone is lost."""
        for name, machine in self._machines.present.items():
            if name not in self._with_relay and self._wants_relay(machine):
                self._with_relay.add(name)
                self._spawn(self._keep_relay(machine))
        for life in (*self._services.values(), *self._replicas.values()):
            if not self._is_there(life.machine):
                life.machine_is_lost()

    async def _keep_relay(self, machine: Machine) -> None:
        """The relay of a machine; one of several machines is left if there can be no relay.

        waits for:  the relay's loop to end, which it must not; ends: with the machine
        """
        try:
            await self._keep(relay_name(machine.name), machine)
            if self._is_there(machine):
                raise RunFailed("the loop of the relay returned; it must run until it is stopped")
        except (RunFailed, UserError) as error:
            if len(self._machines.present) == 1:
                raise
            reason = str(error).removesuffix(f" ({self._resume_hint()})")
            self._events.emit("machine_given_up", machine=machine.name, reason=reason)
            machine.leave()

    def _wants_relay(self, machine: Machine) -> bool:
        """Whether replicas can stand there, or the learner does."""
        has_room = machine.num_gpus >= replica_need(self._config).num_gpus
        return has_room or self._machines.machine_of("trainer") is machine

    def _is_there(self, machine: Machine) -> bool:
        return self._machines.present.get(machine.name) is machine

    # ---- services

    async def _keep(self, name: str, machine: Machine | None = None) -> None:
        """Start a service, on this machine or on any, and again whenever it is lost.

        waits for:  the loop of the service
        ends:       with it, or with its `machine`, or with `RunFailed` after too many failures in a row
        """
        loop, rules = asyncio.get_running_loop(), restart_rules(self._config)
        failures = incarnation = 0
        while machine is None or self._is_there(machine):
            incarnation += 1
            began_s = loop.time()
            try:
                await self._live(name, incarnation, machine)
                return
            except LifeLost as error:
                self._events.emit("service_lost", service=name, incarnation=incarnation, reason=str(error))
                restart = after_failure(failures, loop.time() - began_s, rules)
                if restart is None:
                    raise RunFailed(
                        f"{name} failed {failures + 1} times in a row (manager.max_restarts), the last time: {error} "
                        f"({self._resume_hint()})"
                    ) from None
            failures = restart.failures
            await asyncio.sleep(restart.wait_s)

    async def _keep_for_ever(self, name: str) -> None:
        """A service whose loop has no end.

        waits for:  the service's loop to end, which it must not; ends: cancelled when training is done
        """
        await self._keep(name)
        raise RunFailed(f"the loop of {name} returned; it must run until it is stopped")

    async def _live(self, name: str, incarnation: int, machine: Machine | None) -> None:
        """One life of a service."""
        need = learner_need(self._config) if name == "trainer" else Need()
        at = machine or await self._machines.place(name, need)
        spec = replace(
            self._spec(at, incarnation),
            resume_step=None if name in self._were_ready else self._resume_step,
            fleet=self._known_fleet() if name == "manager" else None,
        )
        life = await Life.begin(name, SERVICES.get(name, builders.relay), spec, at, num_gpus=need.num_gpus)
        self._services[name] = life
        me = {"service": name, "incarnation": incarnation, "machine": at.name, "host": at.host}

        def ready(pid: int) -> None:
            self._were_ready.add(name)
            self._events.emit("service_ready", **me, pid=pid)

        began_s = asyncio.get_running_loop().time()
        try:
            await life.run(lambda pid: self._events.emit("service_started", **me, pid=pid), self._pings, ready)
        except LifeLost:
            life.kill()
            del self._services[name]
            self._machines.ended(name, asyncio.get_running_loop().time() - began_s)
            raise

    def _spec(self, machine: Machine, incarnation: int) -> Spec:
        place = replace(self._place, sockets=machine.sockets, events=machine.events)
        near_learner = self._machines.machine_of("trainer") is machine
        chain = self._cluster.chain_place(machine, near_learner=near_learner) if self._cluster else None
        return Spec(config=self._config, place=place, incarnation=incarnation, chain=chain)

    def _known_fleet(self) -> KnownFleet:
        running = dict(self._replicas.keys())
        over = {name: last for name, last in self._last_lives.items() if name not in running}
        return KnownFleet(num_replicas=self._num_replicas, running=running, over=over)

    # ---- replicas

    async def _obey_for_ever(self) -> None:
        """Start and kill replicas as the manager says.

        waits for:  orders  <- the manager decides something; ends: cancelled when training is done
        """
        manager = port_to(self._place.run_id, "manager")
        while True:
            try:
                orders = await manager.orders(wait_s=ORDERS_WAIT_S)
            except PortError:
                await asyncio.sleep(RETRY_S)  # it is being restarted, and then knows what runs
                continue
            for order in orders:
                match order:
                    case StartOrder(replica_id=replica_id, incarnation=incarnation):
                        self._last_lives[replica_id] = incarnation
                        self._spawn(self._run_replica(replica_id, incarnation))
                    case KillOrder(replica_id=replica_id, incarnation=incarnation):
                        self._kill_replica(replica_id, incarnation)
                    case GiveUpOrder(reason=reason):
                        raise RunFailed(f"{reason} ({self._resume_hint()})")

    async def _run_replica(self, replica_id: str, incarnation: int) -> None:
        """One life of a replica; the manager hears of its end.

        waits for:  the replica's loop to end, by itself or with its process
        """
        me = {"replica_id": replica_id, "incarnation": incarnation}
        loop, need = asyncio.get_running_loop(), replica_need(self._config)
        began_s = loop.time()
        try:
            at = await self._machines.place(replica_id, need)
            spec = replace(self._spec(at, incarnation), replica_id=replica_id)
            name = replica_name(replica_id, incarnation)
            life = await Life.begin(name, builders.replica, spec, at, num_gpus=need.num_gpus)
            self._replicas[replica_id, incarnation] = life
            where = {"machine": at.name, "host": at.host}
            await life.run(lambda pid: self._events.emit("replica_started", **me, pid=pid, **where))
            reason = "its loop returned"
        except (LifeLost, UserError, RunFailed) as error:
            reason = str(error)
        self._events.emit("process_ended", **me, reason=reason)
        self._kill_replica(replica_id, incarnation)
        self._machines.ended(replica_id, loop.time() - began_s)
        await self._insist("manager", "lost", replica_id, incarnation, reason)

    def _kill_replica(self, replica_id: str, incarnation: int) -> None:
        if (life := self._replicas.pop((replica_id, incarnation), None)) is not None:
            life.kill()

    # ---- the end

    async def _finish(self) -> None:
        """The last evaluation, and no open ends in the ledger."""
        if self._config.evaluation.num_prompts:
            await self._insist("data", "evaluation", self._config.trainer.num_steps, wait_s=EVALUATION_WAIT_S)
        await self._insist("data", "finish_run", "the run was finished")

    async def _stop_all(self) -> None:
        """Producers first, so that the data shard hears their last words."""
        last = [self._services.pop(name) for name in tuple(self._services) if name not in ("manager", "trainer")]
        await _stop([*self._replicas.values(), *self._services.values()])
        await _stop(last)

    def _resume_hint(self) -> str:
        return f"nothing is lost; go on with: laminar train --resume {self._place.folder}"


async def _stop(lives: list[Life]) -> None:
    stops = [asyncio.ensure_future(life.stop()) for life in lives]
    if stops:
        await asyncio.wait(stops, timeout=STOP_S)
    for life in lives:
        life.kill()


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


def check_gpus(config: RunConfig, num_replicas: int, machines: Machines) -> None:
    """Raise `UserError` if processes would wait for GPUs that are not there."""
    learner, replica = learner_need(config).num_gpus, replica_need(config).num_gpus
    needed = learner + num_replicas * replica
    if needed > machines.num_gpus:
        have = "this machine has" if len(machines.present) == 1 else f"the {len(machines.present)} machines have"
        raise UserError(
            f"the learner and {num_replicas} replicas need {needed:g} GPUs but {have} {machines.num_gpus:g}; lower "
            "trainer.gpus and rollout.gpus_per_replica to let them share, or rollout.num_replicas"
        )


def check_room(what: str, need: Need, num: int, machines: Machines) -> None:
    """Raise `UserError` if there are GPUs enough, but not enough of them on one machine."""
    room = machines.num_that_fit(need)
    if room < num:
        raise UserError(
            f"{what} needs {need.num_gpus:g} GPUs of one machine; {num} of them are asked for, and there is room for "
            f"{room:g}"
        )
