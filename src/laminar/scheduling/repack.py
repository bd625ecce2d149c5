"""Repack: which replicas in ramp-down hand their last trajectories to which others (paper §5, Algorithm 1).

Invariants of every plan: moves stay within one weight version; a replica is released or takes over, never both; no
destination is filled beyond C_max of its KV cache or beyond B trajectories; so every move releases one replica, and a
plan that only shuffles work does not exist. Destinations are replicas in ramp-down themselves, never busy ones.

Algorithm 1 as printed lets a destination be released later, which overfills its heir or drops what it was given. The
guard against that is the only difference, besides the idleness latch (`update_idleness`).

Not done here: whether a move pays. The paper moves whenever it releases a replica, and so do we.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from laminar.scheduling.best_fit import BestFit
from laminar.schema.fleet import ReplicaLoad


class RepackRules(Struct, frozen=True, kw_only=True):
    """`max_kv_fill` is C_max, `max_running` is B (`roofline`), `strict_idleness` is Algorithm 1, line 3, as printed."""

    max_running: int
    max_kv_fill: float = 0.99
    strict_idleness: bool = False


class IdleState(Struct, frozen=True, kw_only=True):
    """What the heartbeats of one batch have shown so far; a new batch starts a new state."""

    incarnation: int
    lease_id: str | None
    most_trajectories: int
    kv_used_tokens: int
    is_idle: bool


class RepackCandidate(Struct, frozen=True, kw_only=True):
    """A replica in ramp-down: it may be released, or take over from others."""

    replica_id: str
    version: int
    lease_id: str
    kv_used_tokens: int
    kv_capacity_tokens: int
    num_trajectories: int

    @property
    def kv_fraction(self) -> float:
        """Used share of the KV cache, 0 to 1."""
        return self.kv_used_tokens / self.kv_capacity_tokens if self.kv_capacity_tokens else 0.0


class Move(Struct, frozen=True, kw_only=True):
    """All unfinished trajectories of `source` go on at `destination`.

    `reprefill_tokens` is what the destination must compute again: the tokens that the source has in its KV cache.
    """

    source: str
    destination: str
    version: int
    lease_id: str
    num_trajectories: int
    reprefill_tokens: int


class RepackPlan(Struct, frozen=True, kw_only=True):
    """The moves of one look at the fleet; every source is released."""

    moves: tuple[Move, ...] = ()

    @property
    def released(self) -> tuple[str, ...]:
        return tuple(move.source for move in self.moves)

    @property
    def reprefill_tokens(self) -> int:
        return sum(move.reprefill_tokens for move in self.moves)


def update_idleness(previous: IdleState | None, load: ReplicaLoad, rules: RepackRules) -> IdleState:
    """Fold one heartbeat into what is known about the replica's batch (paper §5.2). Call it once per heartbeat.

    Ramp-down begins "when no trajectory is waiting and running ones finish". We see that when, between two heartbeats
    of one batch, nothing waits, KV use is below C_max and has fallen, and fewer trajectories are left than the batch
    had at its largest. A batch that fits into the cache as a whole has nothing waiting from its first second, but its
    KV use still grows and nothing has finished, so it does not count; a dip because trajectories wait for their
    environments does not count either, before one has finished.

    Once seen, idleness stays until the next batch (the latch): in the deep tail KV use *grows* between two completions,
    and the strict test would fail just where repack helps most. `strict_idleness` asks anew at every heartbeat.
    A manager that restarts sees only the rest of a batch, and waits for one more completion.
    """
    same_batch = (
        previous is not None and previous.incarnation == load.incarnation and previous.lease_id == load.lease_id
    )
    if previous is None or not same_batch or load.lease_id is None:
        return _idle_state(load, most_trajectories=load.num_trajectories, is_idle=False)
    most_trajectories = max(previous.most_trajectories, load.num_trajectories)
    ramping_down = (
        load.num_waiting == 0
        and load.kv_used_tokens < previous.kv_used_tokens
        and load.kv_fraction < rules.max_kv_fill
        and load.num_trajectories < most_trajectories
    )
    latched = previous.is_idle and not rules.strict_idleness
    return _idle_state(load, most_trajectories=most_trajectories, is_idle=ramping_down or latched)


def _idle_state(load: ReplicaLoad, *, most_trajectories: int, is_idle: bool) -> IdleState:
    return IdleState(
        incarnation=load.incarnation,
        lease_id=load.lease_id,
        most_trajectories=most_trajectories,
        kv_used_tokens=load.kv_used_tokens,
        is_idle=is_idle,
    )


def repack_candidates(loads: Iterable[ReplicaLoad], states: Mapping[str, IdleState]) -> tuple[RepackCandidate, ...]:
    """The replicas that a plan may touch: idle in the sense of `states`, generating, not empty.

    A replica in which trajectories queue again (pushed out by growth, or just moved in) is passed over while they do:
    its KV use then understates what it holds.
    """
    candidates = []
    for load in loads:
        state = states.get(load.replica_id)
        if state is None or not state.is_idle or state.incarnation != load.incarnation:
            continue
        if load.phase != "generating" or load.version is None or load.lease_id is None:
            continue
        if state.lease_id != load.lease_id or load.num_waiting or not load.num_trajectories:
            continue
        candidates.append(
            RepackCandidate(
                replica_id=load.replica_id,
                version=load.version,
                lease_id=load.lease_id,
                kv_used_tokens=load.kv_used_tokens,
                kv_capacity_tokens=load.kv_capacity_tokens,
                num_trajectories=load.num_trajectories,
            )
        )
    return tuple(candidates)


def plan_repack(candidates: Sequence[RepackCandidate], rules: RepackRules) -> RepackPlan:
    """Best-fit packing per version group: the smallest source first, each onto the fullest replica that takes it.

    "Fullest" is the one with the fewest free tokens below C_max, which for replicas of one size is the highest KV use,
    and for different sizes still means what it should. Sums per destination are kept as moves are planned, and
    destinations in order of free tokens: 10,000 replicas took 50 ms of a core that others used too, and the search over
    all destinations a hundred times as long (`benchmarks/repack_plan.py`).
    """
    groups: dict[int, list[RepackCandidate]] = {}
    for candidate in candidates:
        if _may_take_part(candidate, rules):
            groups.setdefault(candidate.version, []).append(candidate)
    moves: list[Move] = []
    for version in sorted(groups):
        moves.extend(_plan_group(groups[version], rules))
    return RepackPlan(moves=tuple(moves))


def _may_take_part(candidate: RepackCandidate, rules: RepackRules) -> bool:
    """Line 3: room left in the cache and below B. An empty replica has nothing to give and is free to go already."""
    return (
        0 < candidate.num_trajectories < rules.max_running
        and candidate.kv_used_tokens < rules.max_kv_fill * candidate.kv_capacity_tokens
    )


def _plan_group(group: list[RepackCandidate], rules: RepackRules) -> list[Move]:
    """Lines 4 to 12 with the guard; ties go by replica id, so that equal input gives the equal plan."""
    group.sort(key=lambda candidate: (candidate.kv_used_tokens, candidate.replica_id))
    bins = BestFit(
        [int(rules.max_kv_fill * c.kv_capacity_tokens) - c.kv_used_tokens for c in group],
        [rules.max_running - c.num_trajectories for c in group],
    )
    is_destination = [False] * len(group)
    moves = []
    for number, source in enumerate(group):
        if is_destination[number]:
            continue
        target = bins.put(number, source.kv_used_tokens, source.num_trajectories)
        if target is None:
            continue
        is_destination[target] = True
        moves.append(
            Move(
                source=source.replica_id,
                destination=group[target].replica_id,
                version=source.version,
                lease_id=source.lease_id,
                num_trajectories=source.num_trajectories,
                reprefill_tokens=source.kv_used_tokens,
            )
        )
    return moves
