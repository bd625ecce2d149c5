"""What a data shard writes down, one kind of row per table.

Invariant: a row says how things are, not what changed, so writing it again changes nothing; a later row with the same
key replaces an earlier one. Times are seconds of this run, down time excluded.
"""

from typing import Literal

from msgspec import Struct

from laminar.schema.trajectories import Piece, Purpose, StopReason

State = Literal["waiting", "running", "finished", "taken", "trained", "dropped", "evaluated"]
"""Where a trajectory is; every one that was issued is in exactly one state.

waiting    issued or returned, nobody runs it
running    in somebody's lease
finished   graded, in the experience buffer
taken      drawn by a step that no durable checkpoint covers yet
trained    drawn by a step that a durable checkpoint covers
dropped    will never be trained; the reason is beside it
evaluated  graded, never meant for training
"""


class PositionRow(Struct, frozen=True, kw_only=True):
    """The one row of its table: how far the shard has come.

    `cursor` counts the training groups drawn, `num_completed` the groups that became complete.
    Lease numbers up to `num_dead_leases` belong to replicas of before a resume, which used the same names.
    """

    cursor: int = 0
    num_groups: int = 0
    num_trajectories: int = 0
    num_leases: int = 0
    num_dead_leases: int = 0
    num_completed: int = 0
    learner_version: int = 0
    committed_step: int = 0
    now_s: float = 0.0


class GroupRow(Struct, frozen=True, kw_only=True):
    """The trajectories of one prompt: numbers `first_trajectory` and the `num_members - 1` that follow.

    `position` is the draw's place in the order of prompts, and what seeds are made of; evaluations count down from -1.
    `completed` is the place in the order in which groups became complete. `step`, `part` and `place` say which
    mini-batch took the group, and where in it it stands. `settled`: no member can change its state any more.
    """

    num: int
    group_id: str
    purpose: Purpose
    prompt_id: str
    prompt_index: int
    position: int
    first_trajectory: int
    num_members: int
    issued_s: float
    asked_version: int | None = None
    completed: int | None = None
    completed_s: float | None = None
    step: int | None = None
    part: int | None = None
    place: int | None = None
    taken_s: float | None = None
    settled: bool = False

    @property
    def trajectories(self) -> range:
        """Numbers of the members."""
        return range(self.first_trajectory, self.first_trajectory + self.num_members)


class TrajectoryRow(Struct, frozen=True, kw_only=True):
    """One trajectory. `lease` is the last one that held it, `adopted_from` the one that this took it over from.

    `version` is set from the first token on; `learner_version` is that of the learner when the trajectory finished.
    """

    num: int
    trajectory_id: str
    group: int
    member: int
    state: State
    issued_s: float
    attempt: int = 0
    lease: int | None = None
    adopted_from: int | None = None
    version: int | None = None
    infrastructure_failures: int = 0
    data_failures: int = 0
    reason: str | None = None
    reward: float | None = None
    metrics: dict[str, float] = {}
    stop_reason: StopReason | None = None
    num_tokens: int = 0
    num_generated: int = 0
    learner_version: int | None = None
    staleness: int | None = None
    step: int | None = None
    finished_s: float | None = None
    settled_s: float | None = None


class LeaseRow(Struct, frozen=True, kw_only=True):
    """A batch that was claimed, or adopted into."""

    num: int
    lease_id: str
    version: int
    purpose: Purpose
    opened_s: float


class StintRow(Struct, frozen=True, kw_only=True):
    """One attempt of a trajectory in somebody's hands; it began with `num_tokens` of the answer already there.

    `end` says how it ended, None as long as it lasts.
    """

    trajectory: int
    attempt: int
    lease: int
    num_tokens: int
    began_s: float
    ended_s: float | None = None
    end: str | None = None


class EvaluationRow(Struct, frozen=True, kw_only=True):
    """Held-out accuracy that was asked for; `round` counts how often the run went back to before `asked_version`.

    `version` answered it, None as long as nobody does. `accuracy` is None until it is `done`, or if no answer could be
    graded. `void`: the weights it is about are gone.
    """

    asked_version: int
    round: int
    version: int | None = None
    done: bool = False
    void: bool = False
    accuracy: float | None = None
    num: int = 0
    mean_tokens: float | None = None


class PieceRow(Struct, frozen=True, kw_only=True):
    """The next tokens of a trajectory."""

    trajectory: int
    piece: Piece


class ForgetTokens(Struct, frozen=True, kw_only=True):
    """All pieces of a trajectory go: it starts over, or has served."""

    trajectory: int


class LoseSteps(Struct, frozen=True, kw_only=True):
    """What steps after `after_step` trained is dropped: the run goes on from a checkpoint that does not hold it."""

    after_step: int
    reason: str


Row = PositionRow | GroupRow | TrajectoryRow | LeaseRow | StintRow | EvaluationRow | PieceRow | ForgetTokens | LoseSteps
