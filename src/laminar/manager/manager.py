"""The rollout manager: heartbeats in, orders out.

Every decision is `scheduling.fleet.step` or `scheduling.repack.plan_repack`; this file carries them out.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

from msgspec import Struct

from laminar.manager.orders import GiveUpOrder, KillOrder, Order, OrderQueue, StartOrder
from laminar.manager.ports import DataPort, RelayPort, Replicas
from laminar.manager.repacker import Repacker
from laminar.scheduling import fleet as decide
from laminar.scheduling.repack import RepackRules
from laminar.schema.errors import Fenced, PortError
from laminar.schema.fleet import Adoption, KnownFleet, ReplicaLoad
from laminar.telemetry.events import Events


class ManagerRules(Struct, frozen=True, kw_only=True):
    """How often the manager looks, and what it may do."""

    fleet: decide.FleetRules
    repack: RepackRules | None
    """None: no repack."""
    repack_every_s: float
    tick_s: float
    leases_every_s: float
    repack_dry_run: bool = False
    """Plans are told, not carried out."""


class Manager:
    """Watches the fleet and carries out what scheduling says; the methods work while `run` does."""

    def __init__(
        self,
        rules: ManagerRules,
        *,
        fleet: KnownFleet,
        replicas: Replicas,
        data: DataPort,
        relay: RelayPort,
        events: Events,
    ) -> None:
        self._rules = rules
        self._replicas = replicas
        self._data = data
        self._relay = relay
        self._events = events
        self._known = fleet
        self._orders = OrderQueue()
        self._answers: dict[str, Adoption] = {}
        self._repacker = (
            Repacker(rules.repack, replicas, events, dry_run=rules.repack_dry_run) if rules.repack else None
        )
        self._look_now = asyncio.Event()

    async def run(self) -> None:
        """Watch until cancelled."""
        known = self._known
        self._fleet = decide.new_fleet(asyncio.get_running_loop().time(), known.running, known.over)
        async with asyncio.TaskGroup() as self._group:
            self._apply(decide.Scaled(num_replicas=known.num_replicas))
            self._group.create_task(self._tick_for_ever())
            self._group.create_task(self._reconcile_for_ever())
            if self._repacker is not None:
                self._group.create_task(self._repack_for_ever(self._repacker))

    async def heartbeat(self, load: ReplicaLoad) -> Adoption | None:
        """A replica reports. Raises `Fenced` if that life of it was declared dead."""
        if decide.is_fenced(self._fleet, load.replica_id, load.incarnation):
            raise Fenced(f"{load.replica_id} life {load.incarnation} was declared dead")
        if self._repacker is not None:
            self._repacker.observe(load)
        self._apply(decide.Beat(load=load))
        return self._answers.pop(load.replica_id, None) if load.phase == "idle" else None

    async def adoption_ended(self, replica_id: str, lease_id: str, taken_over: bool) -> None:
        """A replica between two batches carried out an `Adoption`, or found no weights to load for it."""
        if taken_over:
            self._apply(decide.Adopted(replica_id=replica_id, lease_id=lease_id))
        else:
            self._apply(decide.AdoptFailed(replica_id=replica_id, lease_id=lease_id, lacks_weights=True))

    async def published(self, version: int) -> None:
        """The relay holds a new version: freed replicas would get it, so look for replicas to free now."""
        self._apply(decide.Published(version=version))
        self._look_now.set()

    async def lost(self, replica_id: str, incarnation: int, reason: str) -> None:
        """The cluster layer saw a replica's process end or fail to start."""
        self._apply(decide.Lost(replica_id=replica_id, incarnation=incarnation, reason=reason))

    async def scale(self, num_replicas: int) -> None:
        """There shall be so many replicas from now on."""
        self._apply(decide.Scaled(num_replicas=num_replicas))

    async def orders(self, wait_s: float) -> tuple[Order, ...]:
        """What the cluster layer has to do next; waits up to `wait_s` for something."""
        return await self._orders.take(wait_s)

    async def _tick_for_ever(self) -> None:
        """Let time pass for the state machine.

        waits for:  time; ends: cancelled with the manager
        """
        while True:
            await asyncio.sleep(self._rules.tick_s)
            self._apply(decide.Tick())

    async def _reconcile_for_ever(self) -> None:
        """Compare the data shard's leases with who says to hold them, so that no lost message loses a trajectory.

        waits for:  time; ends: cancelled with the manager
        """
        while True:
            await asyncio.sleep(self._rules.leases_every_s)
            try:
                leases = await self._data.leases()
            except PortError:
                continue
            self._apply(decide.LeasesSeen(leases=leases))

    async def _repack_for_ever(self, repacker: Repacker) -> None:
        """Look for replicas whose tail can move.

        waits for:  time, or a publish   <- `published` sets `_look_now`
        ends:       cancelled with the manager
        """
        while True:
            try:
                async with asyncio.timeout(self._rules.repack_every_s):
                    await self._look_now.wait()
            except TimeoutError:
                pass
            self._look_now.clear()
            for released in await repacker.repack(decide.movable_loads(self._fleet)):
                self._apply(released)

    def _apply(self, event: decide.Event) -> None:
        now_s = asyncio.get_running_loop().time()
        self._fleet, commands = decide.step(self._fleet, event, now_s, self._rules.fleet)
        for command in commands:
            self._obey(command)

    def _obey(self, command: decide.Command) -> None:
        match command:
            case decide.Start(replica_id=replica_id, incarnation=incarnation):
                self._orders.put(StartOrder(replica_id=replica_id, incarnation=incarnation))
            case decide.Kill(replica_id=replica_id, incarnation=incarnation, reason=reason):
                self._events.emit("replica_lost", replica_id=replica_id, incarnation=incarnation, reason=reason)
                self._orders.put(KillOrder(replica_id=replica_id, incarnation=incarnation, reason=reason))
            case decide.Retire(replica_id=replica_id, reason=reason):
                self._events.emit("replica_retired", replica_id=replica_id, reason=reason)
            case decide.GiveUp(reason=reason):
                self._orders.put(GiveUpOrder(reason=reason))
            case decide.Adopt():
                self._hand_over(command)
            case decide.StartOver(lease_id=lease_id):
                self._spawn(self._data.start_over(lease_id))
            case decide.Pin(versions=versions):
                self._spawn(self._relay.pin(versions))

    def _hand_over(self, command: decide.Adopt) -> None:
        """An idle replica learns of its adoption in the answer to its heartbeat, a busy one by a call."""
        load = self._fleet.replicas[command.replica_id].load
        if load is not None and load.phase == "idle":
            self._answers[command.replica_id] = Adoption(lease_id=command.lease_id, version=command.version)
        else:
            self._spawn(self._adopt(command))

    async def _adopt(self, command: decide.Adopt) -> None:
        port = self._replicas.port(command.replica_id, command.incarnation)
        try:
            adopted = await port.adopt(command.lease_id, command.version)
        except PortError:
            adopted = False
        answer = decide.Adopted if adopted else decide.AdoptFailed
        self._apply(answer(replica_id=command.replica_id, lease_id=command.lease_id))

    def _spawn(self, call: Coroutine[Any, Any, None]) -> None:
        self._group.create_task(self._carry_out(call))

    async def _carry_out(self, call: Coroutine[Any, Any, None]) -> None:
        """A call that a lost neighbour spoils is repeated by the state machine when its own deadline passes."""
        try:
            await call
        except PortError as error:
            self._events.emit("command_failed", reason=str(error))
