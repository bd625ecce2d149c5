"""How a run got over the loss of one process, read from its events.

All times are wall seconds since the fault. A part *works again* when it has done what it is for: a replica generates,
the relay holds weights, the data service has given out or taken in, the trainer has finished a step, the manager
answers.
"""

from collections.abc import Iterable
from itertools import pairwise

from msgspec import Struct

from laminar.chaos.processes import Process
from laminar.telemetry.vocabulary import (
    Adopted,
    Claimed,
    Fact,
    LearnerLoaded,
    Load,
    ProcessEnded,
    Published,
    ReplicaLost,
    ReplicaStarted,
    ServiceLost,
    ServiceReady,
    ServiceStarted,
    Step,
    Taken,
    Trajectory,
    WeightsArrived,
)


class Recovery(Struct, kw_only=True):
    """None: not yet. `tokens_kept` and `trajectories_adopted` went on elsewhere; `steps_redone` by the trainer."""

    detected_s: float | None = None
    started_s: float | None = None
    working_s: float | None = None
    trajectories_adopted: int = 0
    tokens_kept: int = 0
    steps_redone: int = 0
    steps_meanwhile: int = 0


def recovery(victim: Process, at: float, facts: Iterable[Fact]) -> Recovery:
    """What followed a fault that hit `victim` at wall time `at`; facts in order of time."""
    told = Recovery()
    last_step = 0
    for fact in facts:
        if fact.t < at:
            last_step = fact.step if isinstance(fact, Step) else last_step
            continue
        since_s = fact.t - at
        if told.detected_s is None and _is_loss(fact, victim):
            told.detected_s = since_s
        if told.detected_s is not None and told.started_s is None and _is_start(fact, victim):
            told.started_s = since_s
        if told.started_s is not None and told.working_s is None and _shows_work(fact, victim):
            told.working_s = since_s
        match fact:
            case Adopted(from_lease=lease) if lease.startswith(f"{victim.name}/{victim.incarnation}/"):
                told.trajectories_adopted += fact.num_trajectories
                told.tokens_kept += fact.num_tokens
            case LearnerLoaded(step=step) if victim.name == "trainer":
                told.steps_redone = max(told.steps_redone, last_step - step)
            case Step() if told.working_s is None:
                told.steps_meanwhile += 1
    return told


Span = tuple[float, float]
"""Begin and end in wall time."""


def step_spans(facts: Iterable[Fact]) -> list[Span]:
    """From the end of one training step to that of the next."""
    return list(pairwise(fact.t for fact in facts if isinstance(fact, Step)))


def touching(spans: Iterable[Span], outage: Span) -> list[Span]:
    """Those that an outage overlaps. The trainer goes on during an outage if they are about as long as others."""
    return [(begin, end) for begin, end in spans if begin < outage[1] and end > outage[0]]


def _is_loss(fact: Fact, victim: Process) -> bool:
    match fact:
        case (
            ProcessEnded(replica_id=name, incarnation=incarnation)
            | ReplicaLost(replica_id=name, incarnation=incarnation)
        ):
            return (name, incarnation) == (victim.name, victim.incarnation)
        case ServiceLost(service=name, incarnation=incarnation):
            return (name, incarnation) == (victim.name, victim.incarnation)
    return False


def _is_start(fact: Fact, victim: Process) -> bool:
    match fact:
        case ReplicaStarted(replica_id=name, incarnation=incarnation):
            return name == victim.name and incarnation > victim.incarnation
        case ServiceStarted(service=name, incarnation=incarnation):
            return name == victim.name and incarnation > victim.incarnation
    return False


def _shows_work(fact: Fact, victim: Process) -> bool:
    match fact:
        case Load(replica_id=name, incarnation=incarnation, phase="generating"):
            return name == victim.name and incarnation > victim.incarnation
        case Published():
            return victim.name.startswith("relay")
        case WeightsArrived(relay_id=name):
            return name == victim.name
        case Step():
            return victim.name == "trainer"
        case Claimed() | Taken() | Trajectory() | Adopted():
            return victim.name == "data"
        case ServiceReady(service="manager"):
            return victim.name == "manager"
    return False
