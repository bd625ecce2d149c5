"""The state of every trajectory, and the only place where it changes.

Invariants: each trajectory that was issued is in exactly one state and leaves it only as `LEGAL` allows. Every change
is in the journal's queue before the operation that made it ends. In memory is what can change, the rest is counted.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from laminar.data.journal import Journal, Rows
from laminar.data.ports import Events, Prompts, Split
from laminar.data.responses import Response
from laminar.data.rows import (
    ForgetTokens,
    GroupRow,
    LoseSteps,
    PieceRow,
    PositionRow,
    Row,
    State,
    StintRow,
    TrajectoryRow,
)
from laminar.schema.errors import UserError
from laminar.schema.trajectories import Prompt, Purpose

LEGAL: dict[State, frozenset[State]] = {
    "waiting": frozenset({"running", "waiting", "dropped"}),
    "running": frozenset({"running", "waiting", "finished", "evaluated", "dropped"}),
    "finished": frozenset({"taken", "dropped"}),
    "taken": frozenset({"finished", "trained"}),
    "evaluated": frozenset({"waiting"}),
    "trained": frozenset(),
    "dropped": frozenset(),
}
"""Running to running is an adoption, waiting to waiting the loss of kept tokens, taken to finished a rewind, evaluated
to waiting an evaluation drawn anew."""

SETTLED: frozenset[State] = frozenset({"trained", "dropped", "evaluated"})
"""States in which a trajectory needs its tokens no more."""


@dataclass(slots=True, eq=False)
class Trajectory:
    """A trajectory that can still change: its row as it is now, its group and its answer."""

    row: TrajectoryRow
    group: "Group"
    response: Response = field(default_factory=Response)
    stint: StintRow | None = None


@dataclass(slots=True, eq=False)
class Group:
    """A group that can still change."""

    row: GroupRow
    prompt: Prompt
    members: list[Trajectory] = field(default_factory=list)

    def in_state(self, *states: State) -> list[Trajectory]:
        """Members in one of these states."""
        return [member for member in self.members if member.row.state in states]


class Ledger:
    """Rows of the open groups, and the operation that is being put together."""

    def __init__(self, journal: Journal, events: Events, now: Callable[[], float]) -> None:
        self._journal = journal
        self._events = events
        self._now = now
        self._operation: list[Row] = []
        self._entered: set[State] = set()
        self._written_position = PositionRow()
        self._by_id: dict[str, Trajectory] = {}
        self.position = PositionRow()
        self.groups: dict[int, Group] = {}
        self.counts: Counter[State] = Counter()
        self.trained_by_step: Counter[int] = Counter()
        self.trained_groups_by_step: Counter[int] = Counter()

    def restore(self, rows: Rows, prompts: Prompts) -> None:
        """Take up what an earlier process wrote; prompts are read from the task again."""
        self.position = self._written_position = rows.position()
        self.counts = rows.counts()
        self.trained_by_step = rows.trained_by_step()
        self.trained_groups_by_step = rows.trained_groups_by_step()
        by_number: dict[int, Trajectory] = {}
        for group_row in rows.groups(open_only=True):
            group = Group(group_row, _same_prompt(prompts, group_row))
            self.groups[group_row.num] = group
            for row in rows.trajectories(group_row.trajectories):
                by_number[row.num] = self._by_id[row.trajectory_id] = trajectory = Trajectory(row, group)
                group.members.append(trajectory)
        for piece in rows.pieces():
            by_number[piece.trajectory].response.add(piece.piece)
        for trajectory in by_number.values():
            if trajectory.row.state == "running":
                trajectory.row = replace(trajectory.row, version=trajectory.response.version)

    def now_s(self) -> float:
        """Seconds of this run."""
        return self._now()

    def find(self, trajectory_id: str) -> Trajectory | None:
        """A trajectory of an open group."""
        return self._by_id.get(trajectory_id)

    def record(self, *rows: Row) -> None:
        """Make rows part of the operation."""
        self._operation.extend(rows)

    def advance(self, **changes: Any) -> None:
        """Change fields of the position."""
        self.position = replace(self.position, **changes)

    def issue(
        self,
        group_id: str,
        prompt: Prompt,
        *,
        prompt_index: int,
        position: int,
        num_members: int,
        purpose: Purpose,
        asked_version: int | None = None,
    ) -> Group:
        """A new group, all members waiting."""
        now_s = self._now()
        row = GroupRow(
            num=self.position.num_groups + 1,
            group_id=group_id,
            purpose=purpose,
            prompt_id=prompt.prompt_id,
            prompt_index=prompt_index,
            position=position,
            first_trajectory=self.position.num_trajectories + 1,
            num_members=num_members,
            issued_s=now_s,
            asked_version=asked_version,
        )
        self.advance(num_groups=row.num, num_trajectories=self.position.num_trajectories + num_members)
        self.groups[row.num] = group = Group(row, prompt)
        self.record(row)
        for member, num in enumerate(row.trajectories):
            trajectory_row = TrajectoryRow(
                num=num,
                trajectory_id=f"{group_id}-{member}",
                group=row.num,
                member=member,
                state="waiting",
                issued_s=now_s,
            )
            group.members.append(Trajectory(trajectory_row, group))
            self._by_id[trajectory_row.trajectory_id] = group.members[-1]
            self.record(trajectory_row)
        self.counts["waiting"] += num_members
        self._entered.add("waiting")
        return group

    def move(self, trajectory: Trajectory, state: State, **changes: Any) -> None:
        """Change the state; what a settled trajectory does not need any more is forgotten."""
        old = trajectory.row
        if state not in LEGAL[old.state]:
            raise RuntimeError(f"trajectory {old.trajectory_id} cannot go from {old.state} to {state}")
        response = trajectory.response
        changes |= {"num_tokens": response.num_tokens, "num_generated": response.num_generated}
        if state in SETTLED:
            changes |= {"metrics": {}, "settled_s": self._now()}
            self.forget_tokens(trajectory)
        trajectory.row = replace(old, state=state, **changes)
        self.record(trajectory.row)
        self.counts[old.state] -= 1
        self.counts[state] += 1
        self._entered.add(state)
        if state == "trained" and trajectory.row.step is not None:
            self.trained_by_step[trajectory.row.step] += 1

    def drop(self, trajectory: Trajectory, reason: str) -> None:
        """The trajectory will not be trained."""
        changes = {} if trajectory.row.state == "finished" else {"version": trajectory.response.version}
        self.move(trajectory, "dropped", reason=reason, **changes)
        self._events.emit("dropped", trajectory_id=trajectory.row.trajectory_id, reason=reason)

    def draw_anew(self, trajectory: Trajectory) -> None:
        """Back to the first token, after it was graded or while it waits."""
        graded = trajectory.row.state == "evaluated"
        self.forget_tokens(trajectory)
        fresh = {"version": None, "reward": None, "stop_reason": None, "learner_version": None, "staleness": None}
        times = {"finished_s": None, "settled_s": None}
        self.move(trajectory, "waiting", attempt=trajectory.row.attempt + graded, **fresh, **times)

    def forget_tokens(self, trajectory: Trajectory) -> None:
        """Discard the answer."""
        if trajectory.response.num_tokens:
            trajectory.response = Response()
            self.record(ForgetTokens(trajectory=trajectory.row.num))

    def change_group(self, group: Group, **changes: Any) -> None:
        """Change fields of a group."""
        group.row = replace(group.row, **changes)
        self.record(group.row)

    def settle(self, group: Group) -> None:
        """Nothing about the group can change any more: from now on only the journal knows it."""
        self.change_group(group, settled=True)
        if group.row.step is not None:
            self.trained_groups_by_step[group.row.step] += 1
        del self.groups[group.row.num]
        for member in group.members:
            del self._by_id[member.row.trajectory_id]

    def lose_steps(self, after_step: int, reason: str) -> None:
        """What later steps trained is dropped: the learner that knows it is gone."""
        lost = [step for step in self.trained_groups_by_step if step > after_step]
        if lost:
            self.record(LoseSteps(after_step=after_step, reason=reason))
        for step in lost:
            self.trained_groups_by_step.pop(step)
            num_trajectories = self.trained_by_step.pop(step)
            self.counts["trained"] -= num_trajectories
            self.counts["dropped"] += num_trajectories

    def write(self) -> set[State]:
        """The operation is complete: hand it to the journal. Returns the states that it put trajectories into."""
        if self.position != self._written_position or any(type(row) is not PieceRow for row in self._operation):
            self._written_position = self.position = replace(self.position, now_s=self._now())
            self._operation.append(self.position)
        if self._operation:
            operation, self._operation = tuple(self._operation), []
            self._journal.write(operation)
        entered, self._entered = self._entered, set()
        return entered


def _same_prompt(prompts: Prompts, row: GroupRow) -> Prompt:
    split: Split = "train" if row.purpose == "training" else "heldout"
    num = prompts.num_train if split == "train" else prompts.num_heldout
    if row.prompt_index < num:
        prompt = prompts.prompt(split, row.prompt_index)
        if prompt.prompt_id == row.prompt_id:
            return prompt
    raise UserError(
        f"the task has no problem {row.prompt_id!r} at place {row.prompt_index} of its {split} split any more; "
        "resume with the task and options that the run began with"
    )
