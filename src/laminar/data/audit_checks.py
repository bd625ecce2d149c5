"""What must hold in a sound journal, one function per kind of row; each returns sentences about what does not."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from msgspec import Struct

from laminar.data.journal import Rows
from laminar.data.ledger import SETTLED
from laminar.data.rows import GroupRow, LeaseRow, PositionRow, State, StintRow, TrajectoryRow

GRADED: frozenset[State] = frozenset({"finished", "taken", "trained", "evaluated"})
"""States that only an answer with a reward can be in."""


class Kept(Struct, frozen=True, kw_only=True):
    """Tokens of one trajectory that the journal still has."""

    num_tokens: int
    versions: frozenset[int]


NOTHING_KEPT = Kept(num_tokens=0, versions=frozenset())


class GroupChecks:
    """What must hold across groups."""

    def __init__(self, position: PositionRow) -> None:
        self._position = position
        self._num = 0
        self._num_training = 0
        self._ids: set[str] = set()
        self._completed: set[int] = set()

    def problems(self, group: GroupRow) -> list[str]:
        found = []
        self._num += 1
        if group.num != self._num:
            found.append(f"has number {group.num}, expected was {self._num}")
        if group.group_id in self._ids:
            found.append("was drawn twice")
        self._ids.add(group.group_id)
        if group.purpose == "training":
            if group.position != self._num_training:
                found.append(f"was drawn at position {group.position}, the next one was {self._num_training}")
            self._num_training += 1
        if group.completed is not None and group.completed in self._completed:
            found.append(f"is number {group.completed} in the order of completion, and so is another one")
        self._completed.add(group.completed or 0)
        return found

    def sums(self, num_trajectories: int, num_orphans: int) -> list[str]:
        position = self._position
        pairs = {
            "trajectories": (num_trajectories, position.num_trajectories),
            "groups": (self._num, position.num_groups),
            "training groups": (self._num_training, position.cursor),
            "trajectories without a group": (num_orphans, 0),
        }
        return [f"there are {is_} {what}, not {ought}" for what, (is_, ought) in pairs.items() if is_ != ought]


def group_problems(group: GroupRow, members: list[TrajectoryRow]) -> list[str]:
    """Groups are whole, and all their members are in states that go together."""
    if [row.num for row in members] != list(group.trajectories) or [row.member for row in members] != list(
        range(group.num_members)
    ):
        return ["its members are not the trajectories that were issued for it"]
    states = {row.state for row in members}
    found = []
    if group.settled and not states <= SETTLED:
        found.append(f"is settled, but has members that are {_listed(states - SETTLED)}")
    if group.purpose == "training":
        if not group.settled and states <= SETTLED:
            found.append("is not settled, but all its members are")
        allowed = _allowed_states(group)
        if not states <= allowed:
            found.append(f"has members that are {_listed(states - allowed)}, but only {_listed(allowed)} go together")
        if group.step is not None and states == {"dropped"}:
            found.append(f"was taken by step {group.step}, but has no gradable member")
    return found


def _allowed_states(group: GroupRow) -> frozenset[State]:
    if group.step is not None:
        return frozenset({"trained", "dropped"}) if group.settled else frozenset({"taken", "dropped"})
    if group.settled:
        return frozenset({"dropped"})
    if group.completed is not None:
        return frozenset({"finished", "dropped"})
    return frozenset({"waiting", "running", "finished", "dropped"})


def trajectory_problems(row: TrajectoryRow, group: GroupRow, position: PositionRow) -> list[str]:
    checks = {
        "belongs to another group": row.group == group.num,
        "runs in no lease": row.state != "running" or row.lease is not None,
        "was dropped without a reason": row.state != "dropped" or row.reason is not None,
        "has no time of settlement": (row.state in SETTLED) == (row.settled_s is not None),
        "is for training, but was evaluated": row.state != "evaluated" or group.purpose == "evaluation",
        f"is of step {row.step}, its group of step {group.step}": row.state not in ("taken", "trained")
        or (row.step is not None and row.step == group.step),
        f"is trained by step {row.step}, but no checkpoint covers that": row.state != "trained"
        or (row.step or 0) <= position.committed_step,
        f"was taken by step {row.step}, which a checkpoint covers, and is not trained": row.state != "taken"
        or (row.step or 0) > position.committed_step,
    }
    found = [problem for problem, holds in checks.items() if not holds]
    return found + (_grading_problems(row) if row.state in GRADED else [])


def _grading_problems(row: TrajectoryRow) -> list[str]:
    if row.reward is None or row.stop_reason is None or row.version is None or row.learner_version is None:
        return [f"is {row.state}, but lacks its reward, stop reason or version"]
    staleness = max(0, row.learner_version - row.version)
    if row.staleness != staleness:
        return [f"has staleness {row.staleness}, but version {row.version} finished at {row.learner_version}"]
    return []


def stint_problems(
    row: TrajectoryRow, stints: list[StintRow], leases: dict[int, LeaseRow], *, mixes_versions: bool
) -> list[str]:
    if any(stint.lease not in leases for stint in stints):
        return ["was in a lease that is not known"]
    found = []
    for before, after in pairwise(stints):
        old, new = leases[before.lease].version, leases[after.lease].version
        if after.num_tokens and new != old and not mixes_versions:
            found.append(f"went on under version {new} with tokens of {old}")
        if before.end is None:
            found.append(f"has an attempt {before.attempt} that never ended")
    last = stints[-1] if stints else None
    is_open = last is not None and last.end is None
    if is_open != (row.state == "running"):
        found.append(f"is {row.state}, but its last attempt {'goes on' if is_open else 'is over'}")
    if row.state == "running" and last is not None and (last.attempt, last.lease) != (row.attempt, row.lease):
        found.append(f"runs in attempt {row.attempt}, but its last one was {last.attempt}")
    if row.state in GRADED and (last is None or leases[last.lease].version != row.version):
        found.append(f"has version {row.version}, but its last attempt had another one")
    return found


class StintsInStep:
    """Stints go by trajectory, and so does the caller."""

    def __init__(self, stints: Iterator[StintRow]) -> None:
        self._stints = stints
        self._next = next(stints, None)

    def take(self, num: int) -> list[StintRow]:
        taken = []
        while self._next is not None and self._next.trajectory == num:
            taken.append(self._next)
            self._next = next(self._stints, None)
        return taken

    def left(self) -> list[int]:
        return [] if self._next is None else [self._next.trajectory]


class TakeChecks:
    """The groups of a mini-batch stand in places 0, 1, 2, ... once each."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, int], list[int]] = defaultdict(list)

    def add(self, group: GroupRow) -> None:
        if group.step is not None and group.part is not None:
            self._places[group.step, group.part].append(-1 if group.place is None else group.place)

    def problems(self) -> list[str]:
        return [
            f"the groups of step {step} part {part} do not stand in places 0, 1, 2, ... once each"
            for (step, part), places in self._places.items()
            if sorted(places) != list(range(len(places)))
        ]


def kept_tokens(rows: Rows) -> dict[int, Kept]:
    """What is kept, by number of the trajectory."""
    kept: dict[int, Kept] = {}
    for piece in rows.pieces():
        before = kept.get(piece.trajectory, NOTHING_KEPT)
        version = {piece.piece.version} if piece.piece.generated else set()
        kept[piece.trajectory] = Kept(
            num_tokens=before.num_tokens + piece.piece.num_tokens, versions=before.versions | version
        )
    return kept


def token_problems(row: TrajectoryRow, kept: Kept, *, mixes_versions: bool) -> list[str]:
    """Kept tokens are those that the row tells of, all of one version unless answers mix them, and nobody's who needs
    none."""
    found = []
    if row.state in SETTLED and kept.num_tokens:
        found.append(f"is {row.state}, but {kept.num_tokens} of its tokens are kept")
    # The row of a running trajectory is as old as its last hand-over.
    if row.state in ("waiting", "finished", "taken") and kept.num_tokens != row.num_tokens:
        found.append(f"has {row.num_tokens} tokens, but {kept.num_tokens} are kept")
    versions = kept.versions | ({row.version} if row.state in GRADED and row.version is not None else set())
    if len(versions) > 1 and not mixes_versions:
        found.append(f"has tokens of versions {sorted(versions)}")
    return found


def _listed(states: frozenset[State] | set[State]) -> str:
    return ", ".join(sorted(states))
