"""The manager's state machine: `step(fleet, event, now_s, rules) -> fleet, commands` (paper §3.3, §4.3).

    starting -> healthy <-> suspect -> dead -> starting, one incarnation later
                                         \\-> retired, after too many failures in a row

Invariants, checked on random events by `tests/unit/test_scheduling_fleet_properties.py`: incarnations only grow, and a
life starts only after the one before it was killed; what a fenced life says changes nothing, and nothing is ordered
from it; a lease whose replica is gone is adopted under its own version or started over; versions of trajectories under
way are pinned.

Who may go on with an orphan, and when it is one, is in `fleet_orphans`; lives and restarts are in `fleet_lives`; the
values are in `fleet_state`, and all that users need is importable from here.

Not done here: repack (`scheduling.repack`, fed with `movable_loads`), and machines: a replica is restarted in its place
or retired, whatever else stands on the same machine.
"""

from collections.abc import Mapping
from typing import assert_never

from laminar.scheduling import fleet_lives as lives
from laminar.scheduling import fleet_orphans as orphans
from laminar.scheduling.fleet_state import (
    Adopt,
    Adopted,
    AdoptFailed,
    Beat,
    Command,
    Draft,
    Event,
    Fleet,
    FleetRules,
    GiveUp,
    Kill,
    LeasesSeen,
    Lost,
    Orphan,
    Pin,
    Published,
    Released,
    Replica,
    ReplicaStatus,
    Retire,
    Scaled,
    Start,
    StartOver,
    Tick,
)
from laminar.scheduling.table import Table
from laminar.schema.fleet import ReplicaLoad

__all__ = [
    "Adopt",
    "AdoptFailed",
    "Adopted",
    "Beat",
    "Command",
    "Event",
    "Fleet",
    "FleetRules",
    "GiveUp",
    "Kill",
    "LeasesSeen",
    "Lost",
    "Orphan",
    "Pin",
    "Published",
    "Released",
    "Replica",
    "Retire",
    "Scaled",
    "Start",
    "StartOver",
    "Tick",
    "is_fenced",
    "movable_loads",
    "new_fleet",
    "step",
]


def new_fleet(now_s: float, survivors: Mapping[str, int] | None = None, over: Mapping[str, int] | None = None) -> Fleet:
    """A fleet at the start of a manager; `Scaled` starts its replicas.

    `survivors` are replicas that an earlier manager left running, with their incarnations: they are killed and started
    again only if they stay silent. Replicas that are `over` with their last incarnation do not come back; others take
    their places.
    """
    known: list[tuple[Mapping[str, int], ReplicaStatus]] = [(survivors or {}, "suspect"), (over or {}, "retired")]
    replicas = {
        replica_id: Replica(
            replica_id=replica_id, incarnation=incarnation, status=status, since_s=now_s, last_beat_s=now_s
        )
        for lives, status in known
        for replica_id, incarnation in lives.items()
    }
    return Fleet(awake_since_s=now_s, last_tick_s=now_s, replicas=Table(replicas))


def step(fleet: Fleet, event: Event, now_s: float, rules: FleetRules) -> tuple[Fleet, tuple[Command, ...]]:
    """Take in one event; returns the new state and what to do about it, in the order in which it must be begun."""
    draft = Draft(fleet, now_s, rules)
    match event:
        case Beat():
            _on_beat(draft, event.load)
            return draft.finish()
        case Tick():
            lives.check_time(draft)
            orphans.check_deadlines(draft)
        case Lost():
            lives.lost(draft, event.replica_id, event.incarnation, event.reason)
        case LeasesSeen():
            orphans.reconcile(draft, event.leases)
        case Released():
            orphans.released(draft, event.lease_id, event.version, event.destination)
        case Adopted():
            orphans.adopted(draft, event.replica_id, event.lease_id)
        case AdoptFailed():
            orphans.adopt_failed(draft, event.replica_id, event.lease_id, lacks_weights=event.lacks_weights)
        case Scaled():
            lives.scale(draft, event.num_replicas)
        case Published():
            draft.newest_version = max(event.version, draft.newest_version or event.version)
        case _:
            assert_never(event)
    orphans.assign(draft)
    return draft.finish()


def _on_beat(draft: Draft, load: ReplicaLoad) -> None:
    """The frequent event: touches one replica, and only if it can help an orphan more than that."""
    known = draft.replicas.get(load.replica_id)
    if (known is None and not draft.settling) or _is_over(known, load.incarnation):
        return
    lives.heard(draft, load)
    if draft.orphans:
        missed = orphans.reconsider(draft, load)
        orphans.assign(draft, among=None if missed else [draft.replicas[load.replica_id]])


def _is_over(replica: Replica | None, incarnation: int) -> bool:
    """Whether this life was declared dead; a later one than we know is one that we forgot, and welcome."""
    if replica is None:
        return False
    if replica.status == "retired" or incarnation < replica.incarnation:
        return True
    return replica.status == "dead" and incarnation == replica.incarnation


def is_fenced(fleet: Fleet, replica_id: str, incarnation: int) -> bool:
    """Whether this life must let go of all it holds: it was declared dead, or nobody knows the replica.

    A manager that has just started takes unknown replicas in as survivors of an earlier one.
    """
    replica = fleet.replicas.get(replica_id)
    if replica is None:
        return not fleet.settling
    return _is_over(replica, incarnation)


def movable_loads(fleet: Fleet) -> tuple[ReplicaLoad, ...]:
    """Loads of the replicas that a repack may plan with: healthy, and with no adoption under way or expected, whose
    tokens their heartbeats do not show yet."""
    taking_over = {orphan.adopter or orphan.preferred for orphan in fleet.orphans.values()}
    return tuple(
        replica.load
        for replica in fleet.replicas.values()
        if replica.status == "healthy" and replica.load is not None and replica.replica_id not in taking_over
    )
