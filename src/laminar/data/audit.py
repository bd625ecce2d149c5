"""What became of every trajectory, read from a journal: of a live run or a dead one, and without touching it.

Everything here is a function of the journal's rows at one moment. What is wrong is a sentence in the report.
"""

from collections import Counter, defaultdict
from itertools import islice
from pathlib import Path

from msgspec import Struct

from laminar.data.audit_checks import (
    NOTHING_KEPT,
    GroupChecks,
    StintsInStep,
    TakeChecks,
    group_problems,
    kept_tokens,
    stint_problems,
    token_problems,
    trajectory_problems,
)
from laminar.data.journal import Rows
from laminar.data.rows import GroupRow, State, TrajectoryRow
from laminar.data.sqlite_journal import read_journal
from laminar.schema.errors import UserError
from laminar.schema.trajectories import Purpose

MAX_PROBLEMS = 100
"""Problems that a report spells out; a broken journal may have millions of the same kind."""


MOST_PROMPTS = 5
"""Prompts that a report names."""


class Fate(Struct, frozen=True, kw_only=True):
    """Training trajectories that ended alike; means are None if there is nothing to average.

    `prompts` are the ones with most such trajectories, each with how many.
    """

    num: int
    num_prompts: int
    mean_tokens: float | None
    mean_reward: float | None
    prompts: dict[str, int]


class AuditReport(Struct, frozen=True, kw_only=True):
    """The ledger's balance. `problems` are the first of `num_problems`; a sound journal has none.

    `trained` and `dropped` side by side show whether dropping favours some answers: short ones, good ones, or those to
    a few prompts.
    """

    num_issued: int
    counts: dict[State, int]
    drop_reasons: dict[str, int]
    trained: Fate
    dropped: Fate
    num_problems: int
    problems: tuple[str, ...]

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong."""
        return self.num_problems == 0


class Stint(Struct, frozen=True, kw_only=True):
    """One attempt of a trajectory: who held it, under which version, from how many tokens on, how it ended."""

    attempt: int
    lease_id: str
    version: int
    num_tokens: int
    began_s: float
    ended_s: float | None
    end: str | None


class TrajectoryStory(Struct, frozen=True, kw_only=True):
    """Everything that is known about one trajectory."""

    row: TrajectoryRow
    prompt_id: str
    purpose: Purpose
    stints: tuple[Stint, ...]


class GroupStory(Struct, frozen=True, kw_only=True):
    """Everything that is known about one draw of a prompt."""

    row: GroupRow
    trajectories: tuple[TrajectoryStory, ...]


def audit(path: Path, *, mixes_versions: bool = False) -> AuditReport:
    """Check a journal; `mixes_versions` as in `scheduling.schedules`. Raises `UserError` if the file is none."""
    with read_journal(path) as rows:
        return audit_rows(rows, mixes_versions=mixes_versions)


def describe_prompt(path: Path, prompt_id: str) -> tuple[GroupStory, ...]:
    """All draws of a prompt, oldest first. Raises `UserError` if it was never drawn."""
    with read_journal(path) as rows:
        stories = tuple(_group_story(rows, group) for group in list(rows.groups(prompt_id=prompt_id)))
    if not stories:
        raise UserError(f"prompt {prompt_id!r} was not drawn (so far)")
    return stories


def describe_trajectory(path: Path, trajectory_id: str) -> TrajectoryStory:
    """One trajectory. Raises `UserError` if it was never issued."""
    group_id, _, member = trajectory_id.rpartition("-")
    with read_journal(path) as rows:
        for group in rows.groups():
            if group.group_id == group_id and member.isdecimal() and int(member) < group.num_members:
                return _group_story(rows, group).trajectories[int(member)]
    raise UserError(f"trajectory {trajectory_id!r} was not issued (so far)")


def dropped(path: Path) -> tuple[TrajectoryRow, ...]:
    """All dropped trajectories, oldest first, each with its reason."""
    with read_journal(path) as rows:
        return tuple(rows.trajectories(state="dropped"))


def audit_rows(rows: Rows, *, mixes_versions: bool = False) -> AuditReport:
    """Check every invariant that the rows can show."""
    position = rows.position()
    fates, problems, groups, takes = _Fates(), _Problems(), GroupChecks(position), TakeChecks()
    leases = {lease.num: lease for lease in rows.leases()}
    kept = kept_tokens(rows)
    trajectories, stints = rows.trajectories(), StintsInStep(rows.stints())
    for group in rows.groups():
        members = list(islice(trajectories, group.num_members))
        takes.add(group)
        problems.add(group.group_id, groups.problems(group) + group_problems(group, members))
        for row in members:
            fates.add(row, group)
            problems.add(
                row.trajectory_id,
                trajectory_problems(row, group, position)
                + stint_problems(row, stints.take(row.num), leases, mixes_versions=mixes_versions)
                + token_problems(row, kept.pop(row.num, NOTHING_KEPT), mixes_versions=mixes_versions),
            )
    num_orphans = sum(1 for _ in trajectories)
    problems.add("the ledger", groups.sums(sum(fates.counts.values()), num_orphans))
    problems.add("the ledger", [f"trajectory {num} was held, but not issued" for num in stints.left()])
    problems.add("the ledger", [f"trajectory {num} has tokens, but was not issued" for num in kept])
    problems.add("the ledger", takes.problems())
    return AuditReport(
        num_issued=position.num_trajectories,
        counts=dict(fates.counts),
        drop_reasons=dict(fates.reasons),
        trained=fates.of("trained"),
        dropped=fates.of("dropped"),
        num_problems=problems.num,
        problems=tuple(problems.first),
    )


class _Problems:
    """The first problems, and how many there are."""

    def __init__(self) -> None:
        self.num = 0
        self.first: list[str] = []

    def add(self, who: str, problems: list[str]) -> None:
        self.num += len(problems)
        self.first += [f"{who}: {problem}" for problem in problems[: MAX_PROBLEMS - len(self.first)]]


class _Fates:
    """Sums over trajectories that ended alike."""

    def __init__(self) -> None:
        self.counts: Counter[State] = Counter()
        self.reasons: Counter[str] = Counter()
        self._training: Counter[State] = Counter()
        self._tokens: Counter[State] = Counter()
        self._rewards: dict[State, list[float]] = defaultdict(list)
        self._prompts: dict[State, Counter[str]] = defaultdict(Counter)

    def add(self, row: TrajectoryRow, group: GroupRow) -> None:
        self.counts[row.state] += 1
        if row.state == "dropped" and row.reason is not None:
            self.reasons[row.reason] += 1
        if group.purpose == "training":
            self._training[row.state] += 1
            self._prompts[row.state][group.prompt_id] += 1
            self._tokens[row.state] += row.num_generated
            if row.reward is not None:
                self._rewards[row.state].append(row.reward)

    def of(self, state: State) -> Fate:
        num, rewards = self._training[state], self._rewards[state]
        return Fate(
            num=num,
            num_prompts=len(self._prompts[state]),
            mean_tokens=self._tokens[state] / num if num else None,
            mean_reward=sum(rewards) / len(rewards) if rewards else None,
            prompts=dict(self._prompts[state].most_common(MOST_PROMPTS)),
        )


def _group_story(rows: Rows, group: GroupRow) -> GroupStory:
    leases = {lease.num: lease for lease in rows.leases()}
    stints: dict[int, list[Stint]] = defaultdict(list)
    for stint in rows.stints(group.trajectories):
        lease = leases[stint.lease]
        stints[stint.trajectory].append(
            Stint(
                attempt=stint.attempt,
                lease_id=lease.lease_id,
                version=lease.version,
                num_tokens=stint.num_tokens,
                began_s=stint.began_s,
                ended_s=stint.ended_s,
                end=stint.end,
            )
        )
    return GroupStory(
        row=group,
        trajectories=tuple(
            TrajectoryStory(row=row, prompt_id=group.prompt_id, purpose=group.purpose, stints=tuple(stints[row.num]))
            for row in rows.trajectories(group.trajectories)
        ),
    )
