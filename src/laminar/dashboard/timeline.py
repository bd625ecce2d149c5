"""What every part of a run did when, derived from its events; pictures, trace and summary are drawn from this.

Invariant: slices of one batch do not overlap, and every slice that was begun has an end, at the latest the run's.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from laminar.telemetry.vocabulary import (
    Adopted,
    BatchDone,
    Claimed,
    Fact,
    Published,
    Pulled,
    Released,
    ReplicaLost,
    ReplicaRetired,
    ReplicaStarted,
    RunFinished,
    Step,
    undone_by,
)

Outcome = Literal["done", "moved", "lost", "open"]


class BatchSlice(Struct, kw_only=True):
    """A replica works on one batch, from claim or adoption to its end."""

    replica_id: str
    incarnation: int
    lease_id: str
    version: int
    start: float
    end: float
    num_trajectories: int
    purpose: str
    outcome: Outcome = "open"


class WorkMove(Struct, frozen=True, kw_only=True):
    """Unfinished trajectories left one replica and went on at another."""

    departed: float
    arrived: float
    source: str
    target: str
    version: int
    num_trajectories: int
    after_failure: bool


class LifeMark(Struct, frozen=True, kw_only=True):
    """A life of a replica began or ended."""

    t: float
    replica_id: str
    what: Literal["started", "lost", "retired"]
    reason: str


class TrainerSlice(Struct, frozen=True, kw_only=True):
    """One part of one iteration."""

    phase: Literal["wait", "train", "publish"]
    step: int
    start: float
    end: float


class Timeline(Struct, kw_only=True):
    """All of it; times are wall seconds, `begin` the first start of the run and `end` its last event."""

    begin: float
    end: float
    replicas: list[str]
    batches: list[BatchSlice]
    pulls: list[Pulled]
    publishes: list[Published]
    moves: list[WorkMove]
    marks: list[LifeMark]
    trainer: list[TrainerSlice]


def build_timeline(facts: Iterable[Fact]) -> Timeline:
    """Derive the timeline; facts must be in order of time."""
    builder = _Builder()
    for fact in facts:
        builder.add(fact)
    return builder.finish()


def without_downtime(facts: Sequence[Fact]) -> list[Fact]:
    """The same events as if a run that was resumed had never been away: each start follows its last event at once."""
    away_s, last = 0.0, None
    moved: list[Fact] = []
    for fact in facts:
        if last is not None and undone_by(fact) is not None:
            away_s += fact.t - last
        last = fact.t
        moved.append(replace(fact, t=fact.t - away_s) if away_s else fact)
    return moved


def replica_of(lease_id: str) -> tuple[str, int]:
    """Replica and incarnation of a lease name like `replica-1/2/37`."""
    replica_id, _, rest = lease_id.partition("/")
    incarnation = rest.partition("/")[0]
    return replica_id, int(incarnation) if incarnation.isdigit() else 0


class _Builder:
    def __init__(self) -> None:
        self._line = Timeline(
            begin=0.0, end=0.0, replicas=[], batches=[], pulls=[], publishes=[], moves=[], marks=[], trainer=[]
        )
        self._has_begun = False
        self._seen: set[str] = set()
        self._open: dict[str, BatchSlice] = {}
        self._departed: dict[str, float] = {}
        self._dead_leases: set[str] = set()

    def add(self, fact: Fact) -> None:
        if undone_by(fact) is not None:
            self._close_all(self._line.end, "open")  # a crash left these; nothing is known of them after its last event
        if not self._has_begun:
            self._has_begun, self._line.begin = True, fact.t
        self._line.end = max(self._line.end, fact.t)
        self._add_batches(fact)
        self._add_lives(fact)
        match fact:
            case Published():
                self._line.publishes.append(fact)
            case Step():
                self._line.trainer.extend(_parts_of(fact, not_before=self._trainer_end()))

    def _add_batches(self, fact: Fact) -> None:
        match fact:
            case Claimed():
                self._begin(fact.t, fact.lease_id, fact.version, fact.num_trajectories, fact.purpose)
            case BatchDone():
                self._close(fact.lease_id, fact.t, "done")
            case Released():
                self._departed[fact.lease_id] = fact.t
                self._close(fact.lease_id, fact.t, "moved")
            case Adopted():
                self._adopt(fact)
            case RunFinished():
                self._close_all(fact.t, "open")

    def _add_lives(self, fact: Fact) -> None:
        match fact:
            case Pulled():
                self._seen.add(fact.replica_id)
                self._line.pulls.append(fact)
            case ReplicaStarted():
                self._mark(fact.t, fact.replica_id, "started", fact.reason)
            case ReplicaLost():
                self._close_all(fact.t, "lost", fact.replica_id)
                self._mark(fact.t, fact.replica_id, "lost", fact.reason)
            case ReplicaRetired():
                self._mark(fact.t, fact.replica_id, "retired", fact.reason)

    def finish(self) -> Timeline:
        self._close_all(self._line.end, "open")
        self._line.replicas = sorted(self._seen, key=_by_number)
        return self._line

    def _begin(self, t: float, lease_id: str, version: int, num_trajectories: int, purpose: str) -> None:
        replica_id, incarnation = replica_of(lease_id)
        self._seen.add(replica_id)
        self._close_all(t, "open", replica_id)  # one batch at a time, even if the event of an end was lost
        batch = BatchSlice(
            replica_id=replica_id,
            incarnation=incarnation,
            lease_id=lease_id,
            version=version,
            start=t,
            end=t,
            num_trajectories=num_trajectories,
            purpose=purpose,
        )
        self._open[lease_id] = batch
        self._line.batches.append(batch)

    def _adopt(self, fact: Adopted) -> None:
        if not fact.num_trajectories:
            return
        if fact.to_lease in self._open:
            self._open[fact.to_lease].num_trajectories += fact.num_trajectories
        else:
            self._begin(fact.t, fact.to_lease, fact.version, fact.num_trajectories, "training")
        self._close(fact.from_lease, fact.t, "moved")
        self._line.moves.append(
            WorkMove(
                departed=self._departed.get(fact.from_lease, fact.t),
                arrived=fact.t,
                source=replica_of(fact.from_lease)[0],
                target=replica_of(fact.to_lease)[0],
                version=fact.version,
                num_trajectories=fact.num_trajectories,
                after_failure=fact.from_lease in self._dead_leases,
            )
        )

    def _close(self, lease_id: str, t: float, outcome: Outcome) -> None:
        batch = self._open.pop(lease_id, None)
        if batch is not None:
            batch.end = max(batch.start, t)
            batch.outcome = outcome

    def _close_all(self, t: float, outcome: Outcome, replica_id: str | None = None) -> None:
        for lease_id, batch in list(self._open.items()):
            if replica_id is None or batch.replica_id == replica_id:
                self._close(lease_id, t, outcome)
                if outcome == "lost":
                    self._dead_leases.add(lease_id)
                    self._departed[lease_id] = t

    def _trainer_end(self) -> float:
        return self._line.trainer[-1].end if self._line.trainer else self._line.begin

    def _mark(self, t: float, replica_id: str, what: Literal["started", "lost", "retired"], reason: str) -> None:
        self._seen.add(replica_id)
        self._line.marks.append(LifeMark(t=t, replica_id=replica_id, what=what, reason=reason))


def _parts_of(step: Step, not_before: float) -> list[TrainerSlice]:
    """A step event ends its iteration, so that its parts lie before it, one after the other."""
    publish = max(not_before, step.t - step.publish_s)
    train = max(not_before, publish - step.train_s)
    wait = max(not_before, train - step.wait_s)
    return [
        TrainerSlice(phase="wait", step=step.step, start=wait, end=train),
        TrainerSlice(phase="train", step=step.step, start=train, end=publish),
        TrainerSlice(phase="publish", step=step.step, start=publish, end=step.t),
    ]


def _by_number(replica_id: str) -> tuple[str, int]:
    role, _, number = replica_id.rpartition("-")
    return (role, int(number)) if number.isdigit() else (replica_id, 0)
