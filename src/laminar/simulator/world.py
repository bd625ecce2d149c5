"""A whole run in one event loop: the shipped data shard, manager, replicas and trainer loop among emulated parts.

Every service lives in a `Host`, which can be frozen and can end, and reaches the others by `Line`s. What a cluster's
launcher does, starting and ending lives as the manager orders, `World` does here.

Invariant: with the same settings, two runs emit the same events at the same times.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from laminar.config.simulation import SimulationConfig
from laminar.data.journal import MemoryJournal
from laminar.data.shard import DataShard
from laminar.engines.calibration import calibration
from laminar.engines.emulated_engine import EmulatedEngine
from laminar.insisting import insist
from laminar.manager.manager import Manager
from laminar.manager.orders import GiveUpOrder, KillOrder, Order, StartOrder
from laminar.rollout.episodes import Episodes
from laminar.rollout.replica import Replica
from laminar.schema.errors import PeerLost, PortError, RunFailed
from laminar.schema.fleet import KnownFleet
from laminar.simulator import rules
from laminar.simulator.hosted_engine import HostedEngine
from laminar.simulator.learner import EmulatedCheckpoints, EmulatedLearner
from laminar.simulator.lines import Calm, Host, Line, Weather
from laminar.simulator.recorder import Recorder
from laminar.simulator.relays import LocalRelay, MachineRelay, Relays
from laminar.simulator.task import EmulatedGrader, EmulatedPrompts, EmulatedTokenizer, EmulatedTools
from laminar.telemetry.waits import Waits
from laminar.trainer.loop import TrainerLoop

ORDERS_WAIT_S = 10.0
"""Length of one call for orders."""

KILL_S = 0.2
"""From the order to end a process until it is gone."""

RETRY_S = 0.2
"""Pause before a manager that restarts is asked for orders again."""

KEEP_VERSIONS = 2
"""Newest versions that a relay keeps; those in use are kept besides."""


class Life:
    """One life of a replica."""

    def __init__(self, replica_id: str, incarnation: int, machine: str) -> None:
        self.replica_id = replica_id
        self.incarnation = incarnation
        self.machine = machine
        self.host = Host(f"{replica_id}/{incarnation}")
        self.lines: list[Line] = []
        self.replica: Replica | None = None


class World:
    """See the module; `open` starts the services, `train` runs the trainer to its last step."""

    def __init__(self, config: SimulationConfig, recorder: Recorder, weather: Weather | None = None) -> None:
        self.config = config
        self.recorder = recorder
        self.events = recorder.source("launcher")
        self.weather = weather or Calm()
        self.journal = MemoryJournal()
        self.checkpoints = EmulatedCheckpoints()
        self.lives: dict[str, Life] = {}
        self.broken_replicas: set[str] = set()
        """Replicas whose engine fails at every start."""
        self.lost_machines: set[str] = set()
        c = config.cluster
        num_machines = -(-config.num_replicas * c.tensor_parallel // c.gpus_per_machine)
        constants = calibration()
        weight_bytes = constants.models[c.model].weight_bytes
        machines = [f"machine-{number}" for number in range(num_machines)]
        self.relays = Relays(machines, weight_bytes, constants.links, KEEP_VERSIONS)
        self._workload = rules.workload_of(config)
        self._engine_rules = rules.engine_rules(config)
        self._ever_lived: list[Life] = []
        self._relay_of: dict[tuple[str, int], LocalRelay] = {}
        self._machine_is_back = asyncio.Condition()
        self.trainer_host: Host | None = None
        self.data_host: Host | None = None

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator["World"]:
        """All services but the trainer run inside."""
        async with asyncio.TaskGroup() as self._group:
            endless = [self._group.create_task(self.relays.run())]
            self.start_data()
            await self._start_manager()
            endless.append(self._group.create_task(self._obey_for_ever()))
            try:
                yield self
            finally:
                self.manager_host.end()
                for task in endless:
                    task.cancel()
                for life in self._ever_lived:
                    life.host.end()

    async def train(self) -> None:
        """The trainer's loop, begun anew from its checkpoint whenever its process is lost.

        waits for:  the last step
        """
        while True:
            self.trainer_host = host = Host("trainer")
            learner = self.learner()
            loop = TrainerLoop(
                rules.trainer_rules(self.config),
                evaluate_every=None,
                learner=learner,
                buffer=self.line(self._data, "data", host),
                sink=self.relays,
                manager=self.line(self._find_manager, "manager", host),
                checkpoints=self.checkpoints,
                events=self.recorder.source("trainer"),
                run_blocking=learner.run_blocking,
            )
            work = host.spawn(loop.run(), self._group)
            await asyncio.wait([work])
            if not host.is_over:
                work.result()
                return
            self.events.emit("service_lost", service="trainer", reason="killed")
            await asyncio.sleep(self.config.cluster.trainer_restart_s)
            self.events.emit("service_started", service="trainer")

    def line(self, find: Any, name: str, caller: Host | None = None) -> Any:
        """A way to a service."""
        return Line(find, name, self.weather, caller)

    def port(self, replica_id: str, incarnation: int) -> Any:
        """A way to one life of a replica (`manager.ports.Replicas`)."""

        def find() -> tuple[Host, Any] | None:
            life = self.lives.get(replica_id)
            if life is None or life.incarnation != incarnation or life.host.is_over or life.replica is None:
                return None
            return life.host, life.replica

        return self.line(find, f"{replica_id}/{incarnation}", self.manager_host)

    # ---- lives

    def learner(self) -> EmulatedLearner:
        """The learner of one life of the trainer."""
        return EmulatedLearner(rules.learner_pace(self.config), self.config.emulation.tokens_per_id)

    def start_data(self) -> None:
        """A life of the data service, from what its journal holds."""
        self.data_host = Host("data")
        prompts = EmulatedPrompts(rules.ids(self.config, self.config.work.prompt_tokens))
        self.shard = DataShard(self.journal, prompts, rules.data_rules(self.config), self.recorder.source("data"))

    async def data_lost(self, num_kept: int) -> None:
        """The data service is gone, and all but so many of the operations that its disk had not confirmed."""
        if self.data_host is None or self.data_host.is_over:
            return
        self.data_host.end()
        self.events.emit("service_lost", service="data", reason="killed")
        self.journal = self.journal.after_crash(num_kept)
        await asyncio.sleep(self.config.cluster.data_restart_s)
        self.start_data()
        self.events.emit("service_started", service="data")

    async def _start_manager(self) -> None:
        """A life of the manager, which is told what runs."""
        host = Host("manager")
        running = {life.replica_id: life.incarnation for life in self.lives.values() if not life.host.is_over}
        over = {name: life.incarnation for name, life in self.lives.items() if name not in running}
        manager = Manager(
            rules.manager_rules(self.config),
            fleet=KnownFleet(num_replicas=self.config.num_replicas, running=running, over=over),
            replicas=self,
            data=self.line(self._data, "data", host),
            relay=self.relays,
            events=self.recorder.source("manager"),
        )
        host.spawn(manager.run(), self._group)
        await asyncio.sleep(0)
        self.manager_host, self._manager = host, manager

    async def manager_lost(self) -> None:
        """The manager is gone with all that it knew, and with orders that nobody has taken."""
        if self.manager_host.is_over:
            return
        self.manager_host.end()
        self.events.emit("service_lost", service="manager", reason="killed")
        await asyncio.sleep(self.config.cluster.manager_restart_s)
        await self._start_manager()
        self.events.emit("service_started", service="manager")

    def trainer_lost(self) -> None:
        """The trainer is gone; `train` begins it anew."""
        if self.trainer_host is not None:
            self.trainer_host.end()

    async def relay_lost(self, machine: str) -> None:
        """A relay is gone with its memory; engines of its machine go on."""
        if self.relays.machines[machine].host.is_over:
            return
        self.relays.kill(machine)
        self.events.emit("service_lost", service=f"relay of {machine}", reason="killed")
        await asyncio.sleep(self.config.cluster.relay_restart_s)
        if machine not in self.lost_machines:
            await self.relays.restart(machine)
            self.events.emit("service_started", service=f"relay of {machine}")

    def end_life(self, life: Life, reason: str) -> None:
        """The process of a replica is gone at once, without last words; the manager hears of its connection."""
        if life.host.is_over:
            return
        life.host.end()
        self.events.emit("process_ended", replica_id=life.replica_id, incarnation=life.incarnation, reason=reason)
        self._group.create_task(self._tell_lost(life, reason))

    async def _tell_lost(self, life: Life, reason: str) -> None:
        await insist(
            lambda: self.line(self._find_manager, "manager").lost(life.replica_id, life.incarnation, reason),
            on="reach the manager",
            deadline_s=rules.DEADLINE_S,
            who="the launcher",
        )

    async def machine_lost(self, machine: str) -> None:
        """A machine with all that runs on it is gone; another one takes its place after a while."""
        if machine in self.lost_machines:
            return
        self.lost_machines.add(machine)
        self.relays.kill(machine)
        for life in [life for life in self.lives.values() if life.machine == machine]:
            self.end_life(life, f"{machine} was lost")
        await asyncio.sleep(self.config.cluster.machine_replace_s)
        await self.relays.restart(machine)
        self.lost_machines.discard(machine)
        async with self._machine_is_back:
            self._machine_is_back.notify_all()

    def relay_of(self, replica_id: str, incarnation: int) -> MachineRelay | None:
        """The relay that this life of a replica took its weights from."""
        relay = self._relay_of.get((replica_id, incarnation))
        return relay.last if relay else None

    def machine_of(self, replica_id: str) -> str:
        """Where a replica stands."""
        number = int(replica_id.rpartition("-")[2])
        c = self.config.cluster
        return f"machine-{number * c.tensor_parallel // c.gpus_per_machine % len(self.relays.machines)}"

    async def _obey_for_ever(self) -> None:
        """Start and end lives.

        waits for:  orders  <- the manager decides something; ends: cancelled with the world
        """
        while True:
            manager = self._manager
            try:
                orders = await self.manager_host.serve(lambda: manager.orders(ORDERS_WAIT_S))  # noqa: B023
            except PeerLost:
                await asyncio.sleep(RETRY_S)
                continue
            for order in orders:
                self._obey(order)

    def _obey(self, order: Order) -> None:
        match order:
            case StartOrder(replica_id=replica_id, incarnation=incarnation):
                life = Life(replica_id, incarnation, self.machine_of(replica_id))
                self.lives[replica_id] = life
                self._ever_lived.append(life)
                life.host.spawn(self._live(life), self._group)
            case KillOrder(replica_id=replica_id, incarnation=incarnation):
                known = self.lives.get(replica_id)
                if known is not None and known.incarnation == incarnation:
                    known.host.spawn(self._kill(known), self._group)
            case GiveUpOrder(reason=reason):
                raise RunFailed(reason)

    async def _kill(self, life: Life) -> None:
        """A process that hangs, or whose machine is cut off, is gone only a while after it was given up."""
        await life.host.awake()
        await asyncio.sleep(KILL_S)
        life.host.end()

    async def _live(self, life: Life) -> None:
        """From the start of a process to the end of its loop, which the manager then hears of."""
        async with self._machine_is_back:
            await self._machine_is_back.wait_for(lambda: life.machine not in self.lost_machines)
        await asyncio.sleep(self.config.cluster.start_s)
        reason = "its engine fails at every start"
        if life.replica_id not in self.broken_replicas:
            life.replica = self._replica(life)
            self.events.emit("replica_started", replica_id=life.replica_id, incarnation=life.incarnation)
            try:
                await life.replica.run()
                reason = "its loop returned"
            except* PortError as errors:
                reason = str(errors.exceptions[0])
        self.end_life(life, reason)

    def _replica(self, life: Life) -> Replica:
        events = self.recorder.source(life.host.name)
        replica_rules = rules.replica_rules(self.config, life.replica_id, life.incarnation)
        relay = self._relay_of[life.replica_id, life.incarnation] = LocalRelay(self.relays, life.machine)
        return Replica(
            replica_rules,
            engine=HostedEngine(EmulatedEngine(self._engine_rules, self._workload), life.host, self.relays.pull),
            episodes=Episodes(
                limits=replica_rules.limits,
                tokenizer=EmulatedTokenizer(rules.ids(self.config, self._workload.reply_tokens)),
                grader=EmulatedGrader(),
                environments=EmulatedTools(self._workload) if self.config.work.tool else None,
                waits=Waits(life.host.name, events),
            ),
            weights=relay,
            data=self._replica_line(life, self._data, "data"),
            manager=self._replica_line(life, self._find_manager, "manager"),
            events=events,
        )

    def _replica_line(self, life: Life, find: Any, name: str) -> Any:
        line = self.line(find, name, life.host)
        life.lines.append(line)
        return line

    def _data(self) -> tuple[Host, Any] | None:
        host = self.data_host
        return None if host is None or host.is_over else (host, self.shard)

    def _find_manager(self) -> tuple[Host, Any] | None:
        host = self.manager_host
        return None if host.is_over else (host, self._manager)
