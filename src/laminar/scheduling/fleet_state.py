"""The values of the fleet's state machine: what it remembers, what it hears, what it orders, by which rules.

`scheduling.fleet` documents the machine as a whole and is where to import from.
"""

from collections import Counter
from typing import Literal

from msgspec import Struct, field

from laminar.scheduling.table import Table
from laminar.schema.fleet import Lease, ReplicaLoad

ReplicaStatus = Literal["starting", "healthy", "suspect", "dead", "retired"]
"""`suspect` has missed heartbeats, `dead` waits to be started again, `retired` is gone for good."""

OrphanCause = Literal["dead", "released", "unclaimed"]
"""Why nobody runs a lease: its replica died, a repack emptied its replica, or its replica lives and denies it."""


class FleetRules(Struct, frozen=True, kw_only=True):
    """Timeouts and budgets; the wiring fills them from `manager` in the configuration."""

    suspect_after_s: float
    dead_after_s: float
    start_timeout_s: float
    max_restarts: int
    backoff_s: float
    min_replicas: int
    redirect_wait_s: float
    max_backoff_s: float = 60.0
    stable_after_s: float = 60.0
    """A replica that held a batch for so long has recovered; no shorter than the longest backoff, so that one that
    always fails early is always seen to fail in a row."""
    adopt_timeout_s: float = 30.0
    """An adoption may include loading another version; after so long it is ordered elsewhere."""
    readopt_after_s: float = 2.0
    """A replica that could not adopt an orphan is not asked for the same one again before."""


class Replica(Struct, frozen=True, kw_only=True):
    """One rollout worker over all its lives; `incarnation` numbers the present or the last one, from 1.

    `since_s` is when the status was entered, `load` the last heartbeat of this life, `failures` counts lives that
    failed in a row.
    """

    replica_id: str
    incarnation: int
    status: ReplicaStatus
    since_s: float
    last_beat_s: float
    load: ReplicaLoad | None = None
    failures: int = 0
    restart_at_s: float = 0.0

    @property
    def is_live(self) -> bool:
        """Whether a process of it may exist."""
        return self.status in ("starting", "healthy", "suspect")


class Orphan(Struct, frozen=True, kw_only=True):
    """A lease that nobody runs. `adopter` was ordered to take it over and has not answered; `avoid` lists who could
    not, each until when."""

    lease_id: str
    version: int
    cause: OrphanCause
    since_s: float
    preferred: str | None = None
    adopter: str | None = None
    deadline_s: float = 0.0
    avoid: tuple[tuple[str, float], ...] = ()


class Fleet(Struct, frozen=True, kw_only=True):
    """All that the manager knows. The maps are never changed in place.

    While it is `settling`, the manager has started or been asleep so recently that silence means nothing yet. `late`
    holds leases whose live owner does not report them, each with the time when that was first seen. `num_holders` says
    under which versions live replicas run batches, and how many under each.
    """

    awake_since_s: float
    last_tick_s: float
    settling: bool = True
    replicas: Table[Replica] = field(default_factory=Table)
    num_holders: dict[int, int] = {}
    orphans: dict[str, Orphan] = {}
    late: dict[str, float] = {}
    leased_versions: tuple[int, ...] = ()
    pinned: tuple[int, ...] = ()
    next_number: int = 0
    newest_version: int | None = None
    gave_up: bool = False


class Tick(Struct, frozen=True, kw_only=True, tag="tick"):
    """Time has passed. Must come more often than `suspect_after_s`."""


class Beat(Struct, frozen=True, kw_only=True, tag="beat"):
    """A replica reported."""

    load: ReplicaLoad


class Lost(Struct, frozen=True, kw_only=True, tag="lost"):
    """The connection to a replica broke, or its start failed; noticed at once."""

    replica_id: str
    incarnation: int
    reason: str


class LeasesSeen(Struct, frozen=True, kw_only=True, tag="leases_seen"):
    """All batches in somebody's hands, as the data shard sees them."""

    leases: tuple[Lease, ...]


class Released(Struct, frozen=True, kw_only=True, tag="released"):
    """The source of a repack has let its batch go; `destination` is who was planned to take it over."""

    lease_id: str
    version: int
    destination: str | None = None


class Adopted(Struct, frozen=True, kw_only=True, tag="adopted"):
    """A replica has taken a lease over, or will before anything else. If this is lost, `LeasesSeen` makes up for it."""

    replica_id: str
    lease_id: str


class AdoptFailed(Struct, frozen=True, kw_only=True, tag="adopt_failed"):
    """A replica could not take a lease over: it moved on to another version, or, with `lacks_weights`, there are none
    of that version to load any more."""

    replica_id: str
    lease_id: str
    lacks_weights: bool = False


class Scaled(Struct, frozen=True, kw_only=True, tag="scaled"):
    """There shall be so many replicas; the first one starts the fleet."""

    num_replicas: int


class Published(Struct, frozen=True, kw_only=True, tag="published"):
    """The relay holds this version completely."""

    version: int


Event = Tick | Beat | Lost | LeasesSeen | Released | Adopted | AdoptFailed | Scaled | Published


class Start(Struct, frozen=True, kw_only=True, tag="start"):
    """Start a life of a replica, in place if it had one before."""

    replica_id: str
    incarnation: int


class Kill(Struct, frozen=True, kw_only=True, tag="kill"):
    """Make sure that no process of this life is left; harmless if there is none."""

    replica_id: str
    incarnation: int
    reason: str


class Retire(Struct, frozen=True, kw_only=True, tag="retire"):
    """Give the replica's place up for good."""

    replica_id: str
    reason: str


class Adopt(Struct, frozen=True, kw_only=True, tag="adopt"):
    """Take over the trajectories of a lease, after loading `version` if the replica has no batch."""

    replica_id: str
    incarnation: int
    lease_id: str
    version: int


class StartOver(Struct, frozen=True, kw_only=True, tag="start_over"):
    """Have the data shard put the trajectories of a lease back without their answers: nobody can go on with them."""

    lease_id: str


class Pin(Struct, frozen=True, kw_only=True, tag="pin"):
    """Keep exactly these versions besides the newest ones: trajectories under way were generated by them."""

    versions: tuple[int, ...]


class GiveUp(Struct, frozen=True, kw_only=True, tag="give_up"):
    """End the run: too few replicas are left and none will come back."""

    reason: str


Command = Start | Kill | Retire | Adopt | StartOver | Pin | GiveUp


class Draft:
    """A fleet while one event is worked in, and the orders so far. Lives inside one `step` and is never shared."""

    def __init__(self, fleet: Fleet, now_s: float, rules: FleetRules) -> None:
        self.before = fleet
        self.now_s = now_s
        self.rules = rules
        self.replicas = fleet.replicas
        self.num_holders = fleet.num_holders
        self.orphans = dict(fleet.orphans)
        self.late = fleet.late
        self.leased_versions = fleet.leased_versions
        self.awake_since_s = fleet.awake_since_s
        self.last_tick_s = fleet.last_tick_s
        self.settling = fleet.settling
        self.next_number = fleet.next_number
        self.newest_version = fleet.newest_version
        self.gave_up = fleet.gave_up
        self.pins_may_change = False
        self.commands: list[Command] = []

    def put(self, replica: Replica) -> None:
        """What is known of a replica from now on."""
        before, now = _version_run_by(self.replicas.get(replica.replica_id)), _version_run_by(replica)
        if before != now:
            counts = Counter(self.num_holders)
            counts.update([now] if now is not None else [])
            counts.subtract([before] if before is not None else [])
            self.num_holders = dict(+counts)
            self.pins_may_change = True
        self.replicas = self.replicas.with_entry(replica.replica_id, replica)

    def finish(self) -> tuple[Fleet, tuple[Command, ...]]:
        """The new state and the orders, with a `Pin` if other versions than before are needed now."""
        pinned = self._versions_in_use() if self.pins_may_change else self.before.pinned
        if pinned != self.before.pinned:
            self.commands.append(Pin(versions=pinned))
        fleet = Fleet(
            awake_since_s=self.awake_since_s,
            last_tick_s=self.last_tick_s,
            settling=self.settling,
            replicas=self.replicas,
            num_holders=self.num_holders,
            orphans=self.orphans,
            late=self.late,
            leased_versions=self.leased_versions,
            pinned=pinned,
            next_number=self.next_number,
            newest_version=self.newest_version,
            gave_up=self.gave_up,
        )
        return fleet, tuple(self.commands)

    def _versions_in_use(self) -> tuple[int, ...]:
        orphaned = {orphan.version for orphan in self.orphans.values()}
        return tuple(sorted({*self.num_holders} | orphaned | {*self.leased_versions}))


def held_version(load: ReplicaLoad | None) -> int | None:
    """The version under which a replica runs a batch, None between batches."""
    return load.version if load is not None and load.lease_id is not None else None


def _version_run_by(replica: Replica | None) -> int | None:
    return held_version(replica.load) if replica is not None and replica.is_live else None


def owner_of(lease_id: str) -> tuple[str, int]:
    """Replica and incarnation in a name made by `schema.fleet.lease_name`; an odd name belongs to nobody."""
    replica_id, _, rest = lease_id.rpartition("/")
    replica_id, _, incarnation = replica_id.rpartition("/")
    return (replica_id, int(incarnation)) if rest and incarnation.isdecimal() else ("", 0)
