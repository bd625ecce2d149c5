"""The fleet's state machine on random histories, against a small cluster that obeys its orders and has faults.

The cluster knows what the machine can only infer: which processes live, who holds which batch, what is unfinished.
After every event the invariants of `scheduling.fleet` are checked; at the end, once nothing happens but ticks, no
orphan may be left.
"""

from collections import Counter
from dataclasses import dataclass, field

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.scheduling.fleet import (
    Adopt,
    Adopted,
    AdoptFailed,
    Beat,
    Event,
    Fleet,
    FleetRules,
    GiveUp,
    Kill,
    LeasesSeen,
    Lost,
    Pin,
    Published,
    Released,
    Retire,
    Scaled,
    Start,
    StartOver,
    Tick,
    is_fenced,
    new_fleet,
    step,
)
from laminar.schema.fleet import Lease, ReplicaLoad, lease_name

RULES = FleetRules(
    suspect_after_s=3.0,
    dead_after_s=5.0,
    start_timeout_s=20.0,
    max_restarts=3,
    backoff_s=1.0,
    min_replicas=2,
    redirect_wait_s=15.0,
    adopt_timeout_s=6.0,
)

ACTIONS = (
    "work", "work", "work", "work", "tick", "tick", "tick", "beat", "finish", "crash", "crash", "vanish", "list",
    "list", "old_list", "release", "adopt", "adopt", "adopt_late", "fail_adopt", "publish", "publish", "scale", "echo",
    "sleep",
)  # fmt: skip
"""`work`, by far the most frequent in a real run, weighs enough here for histories to be about a running cluster."""


def encoded(fleet: Fleet) -> bytes:
    return msgspec.msgpack.encode(fleet, enc_hook=dict)


@dataclass
class Process:
    """One life of a replica, as it really is."""

    replica_id: str
    incarnation: int
    up: bool = False
    version: int | None = None
    lease_id: str | None = None
    cycle: int = 0

    def load(self) -> ReplicaLoad:
        busy = self.lease_id is not None
        return ReplicaLoad(
            replica_id=self.replica_id,
            incarnation=self.incarnation,
            phase=("generating" if busy else "idle") if self.up else "starting",
            version=self.version,
            lease_id=self.lease_id,
            num_running=int(busy),
            num_waiting=0,
            num_acting=0,
            kv_used_tokens=10 * self.cycle % 97,
            kv_capacity_tokens=100,
        )


@dataclass
class Cluster:
    """Obeys orders, has faults, and checks every order it gets."""

    now_s: float = 0.0
    fleet: Fleet = field(default_factory=lambda: new_fleet(0.0))
    processes: dict[str, Process] = field(default_factory=dict)
    unfinished: dict[str, int] = field(default_factory=dict)
    """Lease to version, as the data shard sees it."""
    killed: set[tuple[str, int]] = field(default_factory=set)
    started: dict[str, int] = field(default_factory=dict)
    retired: set[str] = field(default_factory=set)
    orders: list[Adopt] = field(default_factory=list)
    old_loads: list[ReplicaLoad] = field(default_factory=list)
    old_list: LeasesSeen = field(default_factory=lambda: LeasesSeen(leases=()))
    pinned: tuple[int, ...] = ()
    version: int = 0
    num_give_ups: int = 0

    def tell(self, event: Event) -> None:
        before, frozen = self.fleet, encoded(self.fleet)
        self.fleet, commands = step(before, event, self.now_s, RULES)
        assert encoded(before) == frozen, "a step changed its input"
        for command in commands:
            self.obey(command, before)
        self.check(before)

    def obey(self, command, before: Fleet) -> None:
        match command:
            case Start():
                last = self.started.get(command.replica_id, 0)
                assert command.replica_id not in self.retired
                assert command.incarnation > last
                assert last == 0 or (command.replica_id, last) in self.killed, "two lives at once"
                self.started[command.replica_id] = command.incarnation
                self.processes[command.replica_id] = Process(command.replica_id, command.incarnation)
            case Kill():
                assert command.replica_id not in self.retired
                assert not is_fenced(before, command.replica_id, command.incarnation), "killed twice"
                assert is_fenced(self.fleet, command.replica_id, command.incarnation)
                self.killed.add((command.replica_id, command.incarnation))
                self.processes.pop(command.replica_id, None)
            case Retire():
                assert command.replica_id not in self.retired
                self.retired.add(command.replica_id)
            case Adopt():
                self.check_adopt(command)
                self.orders.append(command)
            case StartOver():
                assert command.lease_id in before.orphans
                assert command.lease_id not in self.fleet.orphans
                self.unfinished.pop(command.lease_id, None)
            case Pin():
                assert command.versions != self.pinned, "only changes are told"
                self.pinned = command.versions
            case GiveUp():
                self.num_give_ups += 1

    def check_adopt(self, order: Adopt) -> None:
        replica = self.fleet.replicas[order.replica_id]
        assert replica.status == "healthy"
        assert not is_fenced(self.fleet, order.replica_id, order.incarnation)
        assert replica.load is not None
        assert replica.load.lease_id is None or replica.load.version == order.version
        assert replica.load.lease_id != order.lease_id
        orphan = self.fleet.orphans[order.lease_id]
        assert (orphan.adopter, orphan.version) == (order.replica_id, order.version)

    def check(self, before: Fleet) -> None:
        fleet = self.fleet
        for replica_id, replica in fleet.replicas.items():
            earlier = before.replicas.get(replica_id)
            if earlier is not None:
                assert replica.incarnation >= earlier.incarnation
                assert earlier.status != "retired" or replica == earlier
            assert replica.failures <= RULES.max_restarts + 1
            assert replica.is_live == (replica_id in self.processes or replica_id in self.gone()), replica
        for replica_id, earlier in before.replicas.items():
            later = fleet.replicas[replica_id]
            died = earlier.is_live and (later.incarnation > earlier.incarnation or not later.is_live)
            if died and earlier.load is not None and earlier.load.lease_id is not None:
                assert earlier.load.lease_id in fleet.orphans, "a batch has died with its replica"
        runs = Counter(r.load.version for r in fleet.replicas.values() if r.is_live and r.load and r.load.lease_id)
        held = {version for version in runs if version is not None}
        assert fleet.num_holders == {version: runs[version] for version in held}
        assert held | {orphan.version for orphan in fleet.orphans.values()} <= set(fleet.pinned)
        assert fleet.pinned == self.pinned
        assert self.num_give_ups == int(fleet.gave_up)
        free = [
            orphan.adopter
            for orphan in fleet.orphans.values()
            if orphan.adopter and not fleet.replicas[orphan.adopter].is_live
        ]
        assert not free, "an order stands to a replica that is gone"

    def gone(self) -> set[str]:
        """Replicas whose process vanished without anybody having noticed."""
        return {r.replica_id for r in self.fleet.replicas.values() if r.is_live} - set(self.processes)

    def act(self, action: str, choice: int) -> None:
        getattr(self, f"do_{action}")(choice)

    def pick(self, choice: int) -> Process | None:
        names = sorted(self.processes)
        return self.processes[names[choice % len(names)]] if names else None

    def do_tick(self, choice: int) -> None:
        self.now_s += 0.5 + choice % 3
        self.tell(Tick())

    def do_sleep(self, choice: int) -> None:
        self.now_s += 5.0 + choice % 50
        self.tell(Tick())

    def do_work(self, choice: int) -> None:
        """Everybody comes up, claims if free (but for one, at times) and reports."""
        spared = self.pick(choice) if choice % 2 else None
        for process in self.processes.values():
            process.up = True
            if process.lease_id is None and process is not spared:
                process.version = self.version
                self.begin(process)
        for replica_id in list(self.processes):
            if replica_id in self.processes:
                self.do_beat_of(self.processes[replica_id])

    def do_beat(self, choice: int) -> None:
        process = self.pick(choice)
        if process is not None:
            self.do_beat_of(process)

    def do_beat_of(self, process: Process) -> None:
        load = process.load()
        self.old_loads = [*self.old_loads[-20:], load]
        assert not is_fenced(self.fleet, process.replica_id, process.incarnation)
        self.tell(Beat(load=load))

    def do_echo(self, choice: int) -> None:
        """A heartbeat that was long on its way."""
        if self.old_loads:
            load = self.old_loads[choice % len(self.old_loads)]
            fenced, before = is_fenced(self.fleet, load.replica_id, load.incarnation), self.fleet
            if fenced:
                self.tell(Beat(load=load))
                assert self.fleet == before, "a fenced life has changed something"

    def begin(self, process: Process) -> None:
        process.cycle += 1
        process.lease_id = lease_name(process.replica_id, process.incarnation, process.cycle)
        assert process.version is not None
        self.unfinished[process.lease_id] = process.version

    def do_finish(self, choice: int) -> None:
        process = self.pick(choice)
        if process is not None and process.lease_id is not None:
            self.unfinished.pop(process.lease_id, None)
            process.lease_id = None

    def do_crash(self, choice: int) -> None:
        process = self.pick(choice)
        if process is not None:
            del self.processes[process.replica_id]
            self.tell(Lost(replica_id=process.replica_id, incarnation=process.incarnation, reason="crash"))

    def do_vanish(self, choice: int) -> None:
        process = self.pick(choice)
        if process is not None:
            del self.processes[process.replica_id]

    def do_list(self, choice: int) -> None:
        leases = tuple(
            Lease(lease_id=lease_id, version=version, num_unfinished=1, purpose="training")
            for lease_id, version in self.unfinished.items()
        )
        self.old_list = LeasesSeen(leases=leases)
        self.tell(self.old_list)

    def do_old_list(self, choice: int) -> None:
        self.tell(self.old_list)

    def do_release(self, choice: int) -> None:
        process, other = self.pick(choice), self.pick(choice + 1)
        if process is not None and other is not None and process.lease_id is not None:
            lease_id, process.lease_id = process.lease_id, None
            self.tell(Released(lease_id=lease_id, version=self.unfinished[lease_id], destination=other.replica_id))

    def do_adopt(self, choice: int) -> None:
        if self.orders:
            self.carry_out(self.orders.pop(choice % len(self.orders)))

    def do_adopt_late(self, choice: int) -> None:
        """The order is carried out, but a second answer comes as well."""
        if self.orders:
            order = self.orders[choice % len(self.orders)]
            self.tell(Adopted(replica_id=order.replica_id, lease_id=order.lease_id))

    def carry_out(self, order: Adopt) -> None:
        process = self.processes.get(order.replica_id)
        if process is None or process.incarnation != order.incarnation or not process.up:
            return
        if process.lease_id is None:
            process.version = order.version
            self.begin(process)
        if process.version != order.version:
            self.tell(AdoptFailed(replica_id=order.replica_id, lease_id=order.lease_id))
            return
        adopted_version = self.unfinished.pop(order.lease_id, order.version)
        assert adopted_version == process.version, "two versions in one batch"
        self.tell(Adopted(replica_id=order.replica_id, lease_id=order.lease_id))

    def do_fail_adopt(self, choice: int) -> None:
        if self.orders:
            order = self.orders.pop(choice % len(self.orders))
            lacks = choice % 3 == 0
            self.tell(AdoptFailed(replica_id=order.replica_id, lease_id=order.lease_id, lacks_weights=lacks))

    def do_publish(self, choice: int) -> None:
        self.version += 1
        self.tell(Published(version=self.version))

    def do_scale(self, choice: int) -> None:
        self.tell(Scaled(num_replicas=choice % 7))

    def calm_down(self) -> None:
        """From now on only time passes: whoever lives beats, nobody answers an order, the data shard lists leases."""
        calm_s = RULES.redirect_wait_s + RULES.adopt_timeout_s + RULES.dead_after_s + 2
        orphans_then = set(self.fleet.orphans)
        for _ in range(int(calm_s)):
            self.now_s += 1.0
            for process in list(self.processes.values()):
                if process.replica_id in self.processes:
                    self.do_beat_of(process)
            self.tell(Tick())
        assert not orphans_then & set(self.fleet.orphans), "an orphan was neither adopted nor started over"
        self.do_list(0)
        owned = {process.lease_id for process in self.processes.values()}
        for lease_id in self.unfinished:
            known = lease_id in self.fleet.orphans or lease_id in self.fleet.late
            assert lease_id in owned or known, f"{lease_id} is lost"


actions = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 100)), min_size=30, max_size=80)


@settings(max_examples=80, deadline=None)
@given(st.integers(2, 5), actions)
def test_every_invariant_holds_through_any_history(num_replicas, history):
    cluster = Cluster()
    cluster.tell(Scaled(num_replicas=num_replicas))
    for action, choice in history:
        cluster.act(action, choice)
    cluster.calm_down()


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 5), actions)
def test_in_a_cluster_that_answers_every_unfinished_batch_ends_in_live_hands_or_starts_over(num_replicas, history):
    cluster = Cluster()
    cluster.tell(Scaled(num_replicas=num_replicas))
    for action, choice in history:
        cluster.act(action, choice)
    for second in range(60):
        cluster.now_s += 1.0
        cluster.do_work(1)
        cluster.tell(Tick())
        while cluster.orders:
            cluster.do_adopt(0)
        if second % 2:
            cluster.do_list(0)
    in_live_hands = {process.lease_id for process in cluster.processes.values()}
    assert set(cluster.unfinished) <= in_live_hands
