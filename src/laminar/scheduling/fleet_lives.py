"""Lives of replicas: heartbeats, silence, failures, restarts, retirement, and how many there shall be.

Invariants: incarnations only grow; a life starts only after the one before it was killed; a retired replica stays so.
"""

from typing import Final

from msgspec.structs import replace

from laminar.scheduling.fleet_orphans import orphan_all_of
from laminar.scheduling.fleet_state import (
    Draft,
    GiveUp,
    Kill,
    Replica,
    ReplicaStatus,
    Retire,
    Start,
)
from laminar.schema.fleet import ReplicaLoad

REMOVED_FIRST: Final[dict[ReplicaStatus, int]] = {"dead": 0, "starting": 1, "suspect": 2, "healthy": 3}
"""Scaling down takes those first that do least."""


def replica_name(number: int) -> str:
    """Names are numbered through the run and never used again."""
    return f"replica-{number}"


def heard(draft: Draft, load: ReplicaLoad) -> None:
    """Take in a heartbeat of a life that is not fenced."""
    replica = draft.replicas.get(load.replica_id)
    if replica is None:
        replica = _survivor(draft, load.replica_id, load.incarnation)
    elif load.incarnation > replica.incarnation:
        # We number the lives, so a larger number is one that we forgot in a restart.
        if replica.is_live:
            draft.commands.append(
                Kill(replica_id=replica.replica_id, incarnation=replica.incarnation, reason="a later life reported")
            )
            orphan_all_of(draft, replica)
        replica = _survivor(draft, load.replica_id, load.incarnation)
    is_up = replica.status != "starting" or load.phase != "starting"
    status: ReplicaStatus = "healthy" if is_up else "starting"
    draft.put(
        Replica(
            replica_id=replica.replica_id,
            incarnation=replica.incarnation,
            status=status,
            since_s=replica.since_s if status == replica.status else draft.now_s,
            last_beat_s=draft.now_s,
            load=load,
            failures=0 if _has_recovered(draft, replica, load) else replica.failures,
        )
    )


def _has_recovered(draft: Draft, replica: Replica, load: ReplicaLoad) -> bool:
    """Whether earlier failures count no more: this life finished a batch of its own, or held one for long enough.

    Being up is not enough: a replica that fails on its first batch, each time, must not restart for ever.
    """
    if not replica.failures:
        return True
    held = replica.load.lease_id if replica.load else None
    if held is not None and held.startswith(f"{replica.replica_id}/{replica.incarnation}/") and held != load.lease_id:
        return True
    lasted = draft.now_s - replica.since_s >= draft.rules.stable_after_s
    return replica.status == "healthy" and held is not None and held == load.lease_id and lasted


def _survivor(draft: Draft, replica_id: str, incarnation: int) -> Replica:
    return Replica(
        replica_id=replica_id,
        incarnation=incarnation,
        status="suspect",
        since_s=draft.now_s,
        last_beat_s=draft.now_s,
    )


def check_time(draft: Draft) -> None:
    """Turn silence into suspicion and death, and start again what has waited long enough.

    If ticks were missing, it was the manager that slept: nobody is suspected before they had time to be heard again.
    """
    if draft.now_s - draft.last_tick_s > draft.rules.suspect_after_s:
        draft.awake_since_s = draft.now_s
    draft.last_tick_s = draft.now_s
    draft.settling = draft.now_s - draft.awake_since_s < draft.rules.dead_after_s
    for replica in list(draft.replicas.values()):
        match replica.status:
            case "healthy" | "suspect":
                _check_silence(draft, replica)
            case "starting":
                waited_s = draft.now_s - max(replica.since_s, draft.awake_since_s)
                if waited_s >= draft.rules.start_timeout_s:
                    end_life(draft, replica, f"not up after {waited_s:.0f} s")
            case "dead":
                if draft.now_s >= replica.restart_at_s:
                    _start(draft, replica)
            case "retired":
                pass


def _check_silence(draft: Draft, replica: Replica) -> None:
    silent_s = draft.now_s - max(replica.last_beat_s, draft.awake_since_s)
    if silent_s >= draft.rules.dead_after_s:
        end_life(draft, replica, f"no heartbeat for {silent_s:.1f} s")
    elif silent_s >= draft.rules.suspect_after_s and replica.status == "healthy":
        draft.put(replace(replica, status="suspect", since_s=draft.now_s))


def lost(draft: Draft, replica_id: str, incarnation: int, reason: str) -> None:
    """The present life of a replica is gone; news about an earlier one changes nothing."""
    replica = draft.replicas.get(replica_id)
    if replica is not None and replica.is_live and replica.incarnation == incarnation:
        end_life(draft, replica, reason)


def end_life(draft: Draft, replica: Replica, reason: str) -> None:
    """A life has failed: the first time in a row it is followed by the next at once, then after growing waits, and
    after `max_restarts` restarts in a row by none."""
    failures = replica.failures + 1
    draft.commands.append(Kill(replica_id=replica.replica_id, incarnation=replica.incarnation, reason=reason))
    orphan_all_of(draft, replica)
    if failures > draft.rules.max_restarts:
        retire(draft, replica, f"{failures} failures in a row, the last one: {reason}")
        return
    wait_s = 0.0 if failures == 1 else draft.rules.backoff_s * 2.0 ** (failures - 2)
    buried = replace(
        replica,
        status="dead",
        since_s=draft.now_s,
        load=None,
        failures=failures,
        restart_at_s=draft.now_s + min(wait_s, draft.rules.max_backoff_s),
    )
    draft.put(buried)
    if failures == 1:
        _start(draft, buried)


def _start(draft: Draft, replica: Replica) -> None:
    incarnation = replica.incarnation + 1
    draft.commands.append(Start(replica_id=replica.replica_id, incarnation=incarnation))
    draft.put(
        Replica(
            replica_id=replica.replica_id,
            incarnation=incarnation,
            status="starting",
            since_s=draft.now_s,
            last_beat_s=draft.now_s,
            failures=replica.failures,
        )
    )


def retire(draft: Draft, replica: Replica, reason: str) -> None:
    """Give a replica up, and the run with it if too few are left."""
    draft.commands.append(Retire(replica_id=replica.replica_id, reason=reason))
    draft.put(replace(replica, status="retired", since_s=draft.now_s, load=None))
    num_left = len(_kept(draft))
    if num_left < draft.rules.min_replicas and not draft.gave_up:
        draft.gave_up = True
        draft.commands.append(
            GiveUp(
                reason=f"replicas left: {num_left}, needed (manager.min_replicas): {draft.rules.min_replicas}; "
                f"{replica.replica_id} was given up: {reason}"
            )
        )


def scale(draft: Draft, num_replicas: int) -> None:
    """Add replicas under new names, or remove those that do least. Retired ones do not count, so asking again for the
    same number replaces them. Never goes below `min_replicas`."""
    target = max(num_replicas, draft.rules.min_replicas)
    kept = _kept(draft)
    for _ in range(target - len(kept)):
        while replica_name(draft.next_number) in draft.replicas:
            draft.next_number += 1
        _start(draft, _unborn(draft, replica_name(draft.next_number)))
        draft.next_number += 1
    kept.sort(key=lambda replica: (REMOVED_FIRST[replica.status], replica.load.num_trajectories if replica.load else 0))
    for replica in kept[: max(0, len(kept) - target)]:
        reason = f"scaled down to {target}"
        if replica.is_live:
            draft.commands.append(Kill(replica_id=replica.replica_id, incarnation=replica.incarnation, reason=reason))
            orphan_all_of(draft, replica)
        retire(draft, replica, reason)


def _kept(draft: Draft) -> list[Replica]:
    return [replica for replica in draft.replicas.values() if replica.status != "retired"]


def _unborn(draft: Draft, replica_id: str) -> Replica:
    return Replica(replica_id=replica_id, incarnation=0, status="dead", since_s=draft.now_s, last_beat_s=draft.now_s)
