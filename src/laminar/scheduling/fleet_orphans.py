"""Orphans: leases that nobody runs, and who goes on with their trajectories (paper §3.3).

Invariants: trajectories go on under the version that began them, or start over; at most one replica at a time is
ordered to adopt an orphan; after `redirect_wait_s` without success an orphan is started over, so none waits for ever.
"""

from collections import Counter
from collections.abc import Iterable

from msgspec.structs import replace

from laminar.scheduling.fleet_state import Adopt, Draft, Orphan, OrphanCause, Replica, StartOver, held_version, owner_of
from laminar.schema.fleet import Lease, ReplicaLoad


def orphan_lease(draft: Draft, lease_id: str, version: int, cause: OrphanCause, preferred: str | None = None) -> None:
    """Nobody runs this lease from now on; one that is an orphan already stays as it is."""
    if lease_id not in draft.orphans:
        draft.orphans[lease_id] = Orphan(
            lease_id=lease_id, version=version, cause=cause, since_s=draft.now_s, preferred=preferred
        )
        draft.pins_may_change = True


def settle(draft: Draft, lease_id: str) -> None:
    """Somebody runs this lease, or nothing of it is unfinished."""
    if draft.orphans.pop(lease_id, None) is not None:
        draft.pins_may_change = True


def orphan_all_of(draft: Draft, replica: Replica) -> None:
    """A life has ended: its batch is an orphan, and what it was to adopt needs somebody else."""
    draft.pins_may_change = True
    for orphan in list(draft.orphans.values()):
        if orphan.adopter == replica.replica_id:
            draft.orphans[orphan.lease_id] = replace(orphan, adopter=None)
    load = replica.load
    if load is not None and load.lease_id is not None and load.version is not None:
        orphan_lease(draft, load.lease_id, load.version, "dead")


def released(draft: Draft, lease_id: str, version: int, destination: str | None) -> None:
    """A repack has emptied a replica, which now takes new weights; its last heartbeat says otherwise, so correct it."""
    source = draft.replicas.get(owner_of(lease_id)[0])
    if source is not None and source.load is not None and source.load.lease_id == lease_id:
        load = replace(
            source.load, phase="loading", lease_id=None, num_running=0, num_waiting=0, num_acting=0, kv_used_tokens=0
        )
        draft.put(replace(source, load=load))
    orphan_lease(draft, lease_id, version, "released", preferred=destination)


def adopted(draft: Draft, replica_id: str, lease_id: str) -> None:
    """The orphan is in good hands, even if the answer came late. Until its next heartbeat an adopter that was between
    batches counts as running the orphan's lease, so that its version stays pinned and nobody else's is sent there."""
    orphan = draft.orphans.get(lease_id)
    adopter = draft.replicas.get(replica_id)
    load = adopter.load if adopter is not None and adopter.is_live else None
    if orphan is not None and adopter is not None and load is not None and load.lease_id is None:
        load = replace(load, phase="generating", version=orphan.version, lease_id=lease_id)
        draft.put(replace(adopter, load=load))
    settle(draft, lease_id)


def adopt_failed(draft: Draft, replica_id: str, lease_id: str, *, lacks_weights: bool) -> None:
    """Look for another adopter, and leave this one alone for a while. Weights that are gone do not come back, so if
    nobody runs under them the orphan is started over at once."""
    orphan = draft.orphans.get(lease_id)
    if orphan is None or orphan.adopter != replica_id:
        return
    _reopen(draft, orphan)
    if lacks_weights and orphan.version not in draft.num_holders:
        _start_over(draft, orphan)


def _reopen(draft: Draft, orphan: Orphan) -> None:
    still_avoided = tuple((other, until_s) for other, until_s in orphan.avoid if until_s > draft.now_s)
    failed = ((orphan.adopter, draft.now_s + draft.rules.readopt_after_s),) if orphan.adopter is not None else ()
    draft.orphans[orphan.lease_id] = replace(orphan, adopter=None, avoid=still_avoided + failed)


def check_deadlines(draft: Draft) -> None:
    """Give up on adopters that do not answer, and on orphans that nobody could adopt in time."""
    for orphan in list(draft.orphans.values()):
        if orphan.adopter is not None and draft.now_s >= orphan.deadline_s:
            _reopen(draft, orphan)
        if draft.orphans[orphan.lease_id].adopter is None and _is_overdue(draft, orphan):
            _start_over(draft, orphan)


def _start_over(draft: Draft, orphan: Orphan) -> None:
    settle(draft, orphan.lease_id)
    draft.commands.append(StartOver(lease_id=orphan.lease_id))


def _is_overdue(draft: Draft, orphan: Orphan) -> bool:
    return draft.now_s - orphan.since_s >= draft.rules.redirect_wait_s


def reconcile(draft: Draft, leases: Iterable[Lease]) -> None:
    """Compare the data shard's list with what replicas report.

    Lists and heartbeats cross on their way, so a lease whose owner lives is not an orphan before that owner has denied
    it in heartbeats for `dead_after_s`; nor is one of an owner that a manager just started may not have heard of yet.
    """
    unfinished = [lease for lease in leases if lease.num_unfinished > 0]
    reported = {replica.load.lease_id for replica in draft.replicas.values() if replica.is_live and replica.load}
    draft.leased_versions = tuple(sorted({lease.version for lease in unfinished}))
    draft.pins_may_change = True
    listed = {lease.lease_id for lease in unfinished}
    for orphan in list(draft.orphans.values()):
        if orphan.lease_id not in listed and not _is_awaited(draft, orphan):
            settle(draft, orphan.lease_id)
    late: dict[str, float] = {}
    for lease in unfinished:
        if lease.lease_id in draft.orphans or lease.lease_id in reported:
            continue
        replica_id, incarnation = owner_of(lease.lease_id)
        owner = draft.replicas.get(replica_id)
        if owner is None or incarnation > owner.incarnation:
            if not draft.settling:
                orphan_lease(draft, lease.lease_id, lease.version, "dead")
        elif incarnation < owner.incarnation or not owner.is_live:
            orphan_lease(draft, lease.lease_id, lease.version, "dead")
        else:
            since_s = draft.late.get(lease.lease_id, draft.now_s)
            late[lease.lease_id] = since_s
            if owner.status != "starting" and owner.last_beat_s - since_s >= draft.rules.dead_after_s:
                orphan_lease(draft, lease.lease_id, lease.version, "unclaimed")
    draft.late = late


def _is_awaited(draft: Draft, orphan: Orphan) -> bool:
    """Whether an adopter that was between batches has not begun one yet: until then nothing else is sent there."""
    adopter = draft.replicas.get(orphan.adopter) if orphan.adopter is not None else None
    return adopter is not None and held_version(adopter.load) is None


def reconsider(draft: Draft, load: ReplicaLoad) -> bool:
    """What a heartbeat says about orphans: its replica runs another version than that of an orphan it was to adopt, and
    so has missed the order (returns True); or it runs a lease that it seemed to deny, and nobody was told to adopt."""
    missed = False
    if load.lease_id is None:
        return missed
    for orphan in list(draft.orphans.values()):
        if orphan.adopter == load.replica_id and load.version != orphan.version:
            _reopen(draft, orphan)
            missed = True
        elif orphan.lease_id == load.lease_id and orphan.cause == "unclaimed" and orphan.adopter is None:
            settle(draft, orphan.lease_id)
    return missed


def assign(draft: Draft, among: Iterable[Replica] | None = None) -> None:
    """Order adopters for the orphans that have none, oldest orphan first; `among` narrows who is asked.

    Best is the destination that a repack planned, then a healthy replica that generates under the same version with
    the fewest adoptions under way and the least KV use, then one between batches, which loads the version first.
    """
    waiting = [o for o in draft.orphans.values() if o.adopter is None and not _is_overdue(draft, o)]
    if not waiting:
        return
    adopting = Counter(orphan.adopter for orphan in draft.orphans.values() if orphan.adopter is not None)
    if among is None:
        # A repack releases many at once, so look at all replicas only for those that its plan does not help.
        waiting = [orphan for orphan in waiting if not _assign_as_planned(draft, orphan, adopting)]
        if not waiting:
            return
    of_version, free = _able_to_adopt(draft.replicas.values() if among is None else among, adopting)
    served = [orphan for orphan in waiting if free or orphan.version in of_version]
    for orphan in sorted(served, key=lambda o: o.since_s):
        adopter = _best(draft, orphan, of_version.get(orphan.version, []), adopting)
        if adopter is None:
            adopter = _best(draft, orphan, free, adopting)
            if adopter is None:
                continue
            free.remove(adopter)
        adopting[adopter.replica_id] += 1
        _order(draft, orphan, adopter)


def _assign_as_planned(draft: Draft, orphan: Orphan, adopting: Counter[str]) -> bool:
    """Order the destination that a repack planned, if it generates under the same version and may be asked."""
    planned = draft.replicas.get(orphan.preferred) if orphan.preferred is not None else None
    of_version, _ = _able_to_adopt([planned] if planned is not None else [], adopting)
    adopter = _best(draft, orphan, of_version.get(orphan.version, []), adopting)
    if adopter is not None:
        adopting[adopter.replica_id] += 1
        _order(draft, orphan, adopter)
    return adopter is not None


def _able_to_adopt(
    replicas: Iterable[Replica], adopting: Counter[str]
) -> tuple[dict[int, list[ReplicaLoad]], list[ReplicaLoad]]:
    """Loads of the healthy ones that generate, by version, and of those that are between batches and to adopt nothing
    yet."""
    of_version: dict[int, list[ReplicaLoad]] = {}
    free: list[ReplicaLoad] = []
    for replica in replicas:
        load = replica.load
        if replica.status != "healthy" or load is None:
            continue
        if load.lease_id is None:
            if load.phase in ("idle", "loading") and not adopting[load.replica_id]:
                free.append(load)
        elif load.phase == "generating" and load.version is not None:
            of_version.setdefault(load.version, []).append(load)
    return of_version, free


def _best(draft: Draft, orphan: Orphan, loads: list[ReplicaLoad], adopting: Counter[str]) -> ReplicaLoad | None:
    """The best adopter that may be asked; never the source, on which a late heartbeat may still show the lease."""
    avoided = {replica_id for replica_id, until_s in orphan.avoid if until_s > draft.now_s}
    able = [load for load in loads if load.replica_id not in avoided and load.lease_id != orphan.lease_id]

    def cost(load: ReplicaLoad) -> tuple[bool, int, bool, bool, float, str]:
        return (
            load.replica_id != orphan.preferred,
            adopting[load.replica_id],
            load.version != orphan.version,
            load.phase == "loading",
            load.kv_fraction,
            load.replica_id,
        )

    return min(able, key=cost, default=None)


def _order(draft: Draft, orphan: Orphan, adopter: ReplicaLoad) -> None:
    deadline_s = draft.now_s + draft.rules.adopt_timeout_s
    draft.orphans[orphan.lease_id] = replace(orphan, adopter=adopter.replica_id, deadline_s=deadline_s)
    draft.commands.append(
        Adopt(
            replica_id=adopter.replica_id,
            incarnation=adopter.incarnation,
            lease_id=orphan.lease_id,
            version=orphan.version,
        )
    )
