"""A replica: claim a batch, run it under one weight version, take the newest version, begin again.

Invariant: weights change only between batches, and a batch is told to the data shard completely before the next begins.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from msgspec import Struct

from laminar.engines.protocol import Engine
from laminar.insisting import insist
from laminar.rollout.batch_run import BatchRun, StreamRules
from laminar.rollout.episodes import Episodes
from laminar.rollout.outbox import Outbox
from laminar.rollout.ports import DataPort, ManagerPort, WeightSource
from laminar.rollout.trajectory import EpisodeLimits
from laminar.rollout.watched_engine import WatchedEngine
from laminar.schema.errors import DeadlinePassed, PeerLost, WeightsUnavailable
from laminar.schema.fleet import Adoption, ReplicaLoad, ReplicaPhase, lease_name
from laminar.schema.trajectories import Batch, Purpose, Sampling
from laminar.telemetry.events import Events
from laminar.telemetry.waits import Waits

INTERRUPT_WAIT_S = 60.0
"""One look for newer weights; a batch that ends meanwhile is noticed by then."""

RETRY_S = 0.1
"""Pause before a relay that restarts is asked again."""

LOOK_S = 0.25
"""A relay that lives says within milliseconds what it holds; a replica that has weights waits no longer for one."""

ClaimedBatch = tuple[str, Batch]
"""A lease and what is in it."""


class ReplicaRules(Struct, frozen=True, kw_only=True):
    """How a replica runs its batches."""

    replica_id: str
    incarnation: int
    batch_trajectories: int
    heartbeat_s: float
    weights_deadline_s: float
    port_deadline_s: float
    engine_timeout_s: float
    limits: EpisodeLimits
    stream: StreamRules
    sampling: dict[Purpose, Sampling]
    refill_room: int | None = None
    """New work is claimed whenever there is room for so many trajectories; None: when the batch is done."""
    interrupts: bool = False
    """A new version stops the batch, which then goes on under that version."""
    claim_wait_s: float = 0.5
    """A replica that gets no batch for so long looks for orders and newer weights before it asks again."""


class Replica:
    """One rollout worker; see the module docstring for its cycle."""

    def __init__(
        self,
        rules: ReplicaRules,
        *,
        engine: Engine,
        episodes: Episodes,
        weights: WeightSource,
        data: DataPort,
        manager: ManagerPort,
        events: Events,
    ) -> None:
        self._rules = rules
        self._engine = WatchedEngine(engine)
        self._episodes = episodes
        self._weights = weights
        self._data = data
        self._manager = manager
        self._events = events
        self._waits = Waits(f"{rules.replica_id}/{rules.incarnation}", events)
        self._phase: ReplicaPhase = "starting"
        self._version: int | None = None
        self._batch: BatchRun | None = None
        self._next: Adoption | None = None
        self._cycle = 0
        self._freed_by_repack = False
        self._is_stuck = False
        self._batch_begins = asyncio.Event()
        self._handing_over = asyncio.Lock()

    async def run(self) -> None:
        """Run until cancelled; raises when this replica cannot go on."""
        await self._engine.start()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._report_for_ever())
                group.create_task(self._cycle_for_ever())
                if self._rules.refill_room is not None:
                    group.create_task(self._refill_for_ever(self._rules.refill_room))
                if self._rules.interrupts:
                    group.create_task(self._interrupt_for_ever())
        finally:
            await self._engine.close()

    async def release(self, lease_id: str) -> bool:
        """Let all trajectories of this lease go, for somebody else to adopt; False if it is not held (any more)."""
        batch = self._batch
        if batch is None or batch.lease_id != lease_id or not batch.is_open:
            return False
        num_trajectories = await batch.release()
        self._freed_by_repack = True
        self._emit("released", lease_id=lease_id, num_trajectories=num_trajectories)
        return True

    async def adopt(self, lease_id: str, version: int) -> bool:
        """Take over what is unfinished of a lease: at once in a batch of that version, next if idle, else False."""
        batch = self._batch
        if batch is None:
            self._next = self._next or Adoption(lease_id=lease_id, version=version)
            return self._next.lease_id == lease_id
        if batch.version != version or not batch.is_open:
            return False
        batch.expect(+1)
        try:
            adopted = await self._insist(lambda: self._data.adopt(lease_id, batch.lease_id, version), "adopt")
            await batch.join(adopted.items)
        finally:
            batch.expect(-1)
        return True

    async def _report_for_ever(self) -> None:
        """Heartbeats.

        waits for:  time
        ends:       cancelled with the replica, or `Fenced` by the manager; a manager that restarts is waited for
        """
        while True:
            if self._engine.silent_s() < self._rules.engine_timeout_s:
                told = await self._report()
                self._next = self._next or told
            elif not self._is_stuck:
                self._is_stuck = True
                self._emit("engine_stuck", seconds=self._engine.silent_s(), lease_id=self._lease_id())
            await asyncio.sleep(self._rules.heartbeat_s)

    async def _cycle_for_ever(self) -> None:
        """Batches, one after the other.

        waits for:  weights     <- the relay completes a version
                    a batch     <- the data shard has room ahead of the trainer
        ends:       cancelled with the replica
        """
        while True:
            order = await self._next_order()
            if order is None:
                await self._load_newest()
                await self._run_batch(await self._claim())
            elif await self._load(order.version):
                await self._run_batch(await self._take_over(order))
            else:
                await self._tell_adoption(order, taken_over=False)

    async def _refill_for_ever(self, room: int) -> None:
        """New work for a batch that goes on.

        waits for:  a batch, then answers that finish, then the data shard's room
        ends:       cancelled with the replica
        """
        while True:
            batch = await self._open_batch()
            await batch.until_few(self._rules.batch_trajectories - room)
            async with self._handing_over:
                if batch.is_open:
                    await self._refill(batch)

    async def _refill(self, batch: BatchRun) -> None:
        """Claim under a lease of its own, and move what that brings into the batch."""
        lease_id = self._new_lease()
        room = self._rules.batch_trajectories - batch.num_here
        batch.expect(+1)
        try:
            version, wait_s = batch.version, self._rules.claim_wait_s
            claimed = await self._insist(lambda: self._data.claim(lease_id, version, room, wait_s), "claim")
            if claimed.items:
                adopted = await self._insist(lambda: self._data.adopt(lease_id, batch.lease_id, version), "adopt")
                await batch.join(adopted.items)
        finally:
            batch.expect(-1)

    async def _interrupt_for_ever(self) -> None:
        """Stop a batch for new weights, and go on with it under them.

        waits for:  a batch, then a newer version  <- the relay completes one
        ends:       cancelled with the replica
        """
        while True:
            batch = await self._open_batch()
            newest = await self._newer_than(batch.version, INTERRUPT_WAIT_S)
            async with self._handing_over:
                if newest is not None and newest > batch.version and batch is self._batch and batch.is_open:
                    await batch.release()
                    self._next = self._next or Adoption(lease_id=batch.lease_id, version=newest)

    async def _open_batch(self) -> BatchRun:
        """waits for:  a batch that more trajectories may join"""
        while self._batch is None or not self._batch.is_open:
            self._batch_begins.clear()
            await self._batch_begins.wait()
        return self._batch

    async def _next_order(self) -> Adoption | None:
        self._phase = "idle"
        told = await self._report()
        order, self._next = self._next or told, None
        return order

    async def _load_newest(self) -> None:
        """The newest version; while the relay is away or empty, what is loaded will do. Raises `DeadlinePassed`."""
        if self._version is not None and await self._newest() is not None:
            await self._load(None)
        if self._version is None:
            await self._load_first()

    async def _newest(self) -> int | None:
        """None also if the relay is lost."""
        try:
            async with asyncio.timeout(LOOK_S):
                return await self._weights.newest()
        except (PeerLost, DeadlinePassed, TimeoutError):
            return None

    async def _load_first(self) -> None:
        """Raises `DeadlinePassed`.

        waits for:  the relay to hold a version, also while it restarts
        """
        loop, deadline_s = asyncio.get_running_loop(), self._rules.weights_deadline_s
        give_up_s = loop.time() + deadline_s
        with self._waits.on("weights", of="relay", deadline_s=deadline_s):
            while not (await self._there_are_weights(give_up_s - loop.time()) and await self._load(None)):
                if loop.time() >= give_up_s:
                    raise DeadlinePassed(f"the relay had no weights within {deadline_s:g} s")
                await asyncio.sleep(RETRY_S)

    async def _there_are_weights(self, wait_s: float) -> bool:
        return await self._newer_than(None, wait_s) is not None

    async def _newer_than(self, version: int | None, wait_s: float) -> int | None:
        """None also if the relay is lost."""
        try:
            return await self._weights.wait_newer(version, max(0.0, wait_s))
        except (PeerLost, DeadlinePassed):
            await asyncio.sleep(RETRY_S)
            return None

    async def _load(self, version: int | None) -> bool:
        """Swap in a version (None: the newest); False if the relay does not hold it, or was lost on the way."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        is_new = False
        try:
            async with self._weights.lease(version) as weights:
                is_new = weights.version != self._version
                if is_new:
                    self._phase = "loading"
                    await self._engine.load_weights(weights.version, weights.tensors)
                    self._version = weights.version
                    seconds = loop.time() - started_s
                    self._emit("pulled", version=self._version, seconds=seconds, freed_by_repack=self._freed_by_repack)
                    self._freed_by_repack = False
        except WeightsUnavailable:
            return False
        except (PeerLost, DeadlinePassed):
            if is_new:
                self._version = None  # the copy may be torn, so it is made again whatever version comes next
            return False
        return True

    async def _claim(self) -> ClaimedBatch:
        lease_id = self._new_lease()
        version, num, wait_s = self._held_version(), self._rules.batch_trajectories, self._rules.claim_wait_s
        return lease_id, await self._insist(lambda: self._data.claim(lease_id, version, num, wait_s), "claim")

    async def _take_over(self, order: Adoption) -> ClaimedBatch:
        lease_id, version = self._new_lease(), self._held_version()
        batch = await self._insist(lambda: self._data.adopt(order.lease_id, lease_id, version), "adopt")
        await self._tell_adoption(order, taken_over=True)
        return lease_id, batch

    async def _insist(self, call: Callable[[], Awaitable[Batch]], verb: str) -> Batch:
        """What a call to the data shard brings, which may be restarting; asked in the same words it answers the same,
        so nothing is handed out twice or to nobody."""
        deadline_s, who = self._rules.port_deadline_s, self._rules.replica_id
        with self._waits.on(f"an answer to {verb}", of="data", deadline_s=deadline_s):
            return await insist(call, on=f"{verb} a batch from the data service", deadline_s=deadline_s, who=who)

    async def _tell_adoption(self, order: Adoption, *, taken_over: bool) -> None:
        """The manager finds out by itself, later, if it cannot be told."""
        with contextlib.suppress(PeerLost, DeadlinePassed):
            await self._manager.adoption_ended(self._rules.replica_id, order.lease_id, taken_over)

    def _new_lease(self) -> str:
        self._cycle += 1
        return lease_name(self._rules.replica_id, self._rules.incarnation, self._cycle)

    def _held_version(self) -> int:
        assert self._version is not None, "a batch begins only after weights were loaded"
        return self._version

    async def _run_batch(self, claimed: ClaimedBatch) -> None:
        lease_id, batch = claimed
        if not batch.items:
            return
        run = self._begin(lease_id, self._held_version(), batch)
        started_s = asyncio.get_running_loop().time()
        self._batch, self._phase = run, "generating"
        self._batch_begins.set()
        try:
            await run.run()
        finally:
            self._batch, self._phase = None, "idle"
        seconds = asyncio.get_running_loop().time() - started_s
        self._emit(
            "batch_done", lease_id=lease_id, version=run.version, num_trajectories=run.num_started, seconds=seconds
        )

    def _begin(self, lease_id: str, version: int, batch: Batch) -> BatchRun:
        run = BatchRun(
            lease_id=lease_id,
            version=version,
            sampling=self._rules.sampling,
            engine=self._engine,
            episodes=self._episodes,
            outbox=Outbox(self._data, lease_id, give_up_after_s=self._rules.port_deadline_s),
            limits=self._rules.limits,
            stream=self._rules.stream,
        )
        run.add(batch.items)
        return run

    async def _report(self) -> Adoption | None:
        load = self.load()
        self._emit(
            "load",
            phase=load.phase,
            version=load.version,
            lease_id=load.lease_id,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_acting=load.num_acting,
            kv_fraction=round(load.kv_fraction, 4),
        )
        try:
            return await self._manager.heartbeat(load)
        except (PeerLost, DeadlinePassed):
            return None

    def load(self) -> ReplicaLoad:
        """What a heartbeat says."""
        engine = self._engine.load()
        return ReplicaLoad(
            replica_id=self._rules.replica_id,
            incarnation=self._rules.incarnation,
            phase=self._phase,
            version=self._version,
            lease_id=self._lease_id(),
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            num_acting=self._batch.num_acting if self._batch else 0,
            kv_used_tokens=engine.kv_used_tokens,
            kv_capacity_tokens=engine.kv_capacity_tokens,
        )

    def _lease_id(self) -> str | None:
        return self._batch.lease_id if self._batch else None

    def _emit(self, kind: str, **fields: object) -> None:
        self._events.emit(kind, replica_id=self._rules.replica_id, incarnation=self._rules.incarnation, **fields)
