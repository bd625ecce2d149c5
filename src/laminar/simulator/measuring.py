"""What a simulated run achieved, from its events and its journal.

All averages are over the time from the end of the warm-up to the end of the last step. A step ends with its training,
or, where steps are generated one by one and training waits for them, with its last answer.
"""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from msgspec import Struct

from laminar.config.simulation import SimulationConfig
from laminar.data.journal import MemoryJournal
from laminar.scheduling.schedules import schedule_named
from laminar.simulator.recorder import Event, Recorder

WAITING = 0.01
"""With a larger share of its time spent waiting, the trainer is not what takes longest."""


class Measures(Struct, frozen=True, kw_only=True):
    """Numbers of one run.

    tokens_per_s          prompts and answers that the trainer consumed, per second (the paper's throughput)
    generated_per_s       tokens of answers that were finished, per second
    iteration_s           mean time of an iteration
    trainer_wait_fraction share of it in which the trainer waited for experience
    kv_use                mean share of the KV cache in use, over replicas and time
    busy_fraction         mean share of time in which a replica generates
    latency_mean_s        time from the first claim of an answer to its end
    staleness_mean/max    inherent staleness; `staleness_shares` its distribution from 0 on
    num_repacks           looks at the fleet that moved something; `num_released` replicas were freed
    moved_tokens          KV that was computed again after a move
    num_dropped           trajectories that were never trained
    pull_mean_s           time of taking new weights
    """

    num_steps: int
    simulated_s: float
    tokens_per_s: float
    generated_per_s: float
    iteration_s: float
    trainer_wait_fraction: float
    kv_use: float
    busy_fraction: float
    latency_mean_s: float
    latency_max_s: float
    staleness_mean: float
    staleness_max: int
    staleness_shares: tuple[float, ...]
    num_repacks: int
    num_released: int
    moved_tokens: int
    num_dropped: int
    pull_mean_s: float


def measure(config: SimulationConfig, recorder: Recorder, journal: MemoryJournal) -> Measures:
    """Measure a finished run."""
    steps = [event for event in recorder.events if event["kind"] == "step"]
    counted = steps[config.work.warmup_steps :]
    ends_s = [step["t"] for step in steps]
    if schedule_named(config.schedule, config.max_lag).waits_for_all and _trainer_waits(counted):
        ends_s = _generated_s(journal, config.work.groups_per_step)[: len(steps)]
    begin_s = ends_s[config.work.warmup_steps - 1] if config.work.warmup_steps else 0.0
    end_s = ends_s[-1]
    events = [event for event in recorder.events if begin_s <= event["t"] <= end_s]
    seconds = end_s - begin_s
    answers = _of(events, "trajectory")
    loads = _of(events, "load")
    repacks = _of(events, "repack")
    latencies = _latencies_s(journal, begin_s, end_s)
    staleness = Counter(int(answer["staleness"]) for answer in answers)
    return Measures(
        num_steps=len(steps),
        simulated_s=steps[-1]["t"],
        tokens_per_s=sum(step["tokens"] for step in counted) / seconds,
        generated_per_s=sum(answer["tokens"] for answer in answers) / seconds,
        iteration_s=seconds / len(counted),
        trainer_wait_fraction=sum(step["wait_s"] for step in counted) / seconds,
        kv_use=_mean([load["kv_fraction"] for load in loads]),
        busy_fraction=_mean([load["phase"] == "generating" for load in loads]),
        latency_mean_s=_mean(latencies),
        latency_max_s=max(latencies, default=0.0),
        staleness_mean=_mean([answer["staleness"] for answer in answers]),
        staleness_max=max(staleness, default=0),
        staleness_shares=tuple(staleness[value] / len(answers) for value in range(max(staleness, default=0) + 1)),
        num_repacks=len(repacks),
        num_released=sum(repack["num_released"] for repack in repacks),
        moved_tokens=sum(
            move["num_tokens"] for repack in repacks if repack["num_released"] for move in repack["moves"]
        ),
        num_dropped=_num_dropped(journal),
        pull_mean_s=_mean([pull["seconds"] for pull in _of(events, "pulled")]),
    )


def _trainer_waits(steps: Sequence[Event]) -> bool:
    waited_s: float = sum(step["wait_s"] for step in steps)
    busy_s: float = sum(step["train_s"] + step["publish_s"] for step in steps)
    return waited_s > WAITING * (waited_s + busy_s)


def _generated_s(journal: MemoryJournal, groups_per_step: int) -> list[float]:
    """When the last answer of each step was there.

    If generation is what takes longest, a schedule repeats itself from one of these moments to the next. Training ends
    a mini-batch to a whole step later, by how long the last answers are, and over three steps that is more than what
    two such schedules differ by.
    """
    with journal.rows() as rows:
        completed_s = {row.completed: row.completed_s for row in rows.groups()}
    ends_s: list[float] = []
    while (end_s := completed_s.get(groups_per_step * (len(ends_s) + 1))) is not None:
        ends_s.append(end_s)
    return ends_s


def _of(events: Sequence[Event], kind: str) -> list[Event]:
    return [event for event in events if event["kind"] == kind]


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _latencies_s(journal: MemoryJournal, begin_s: float, end_s: float) -> list[float]:
    """From first claim to end, of the answers that ended in between."""
    with journal.rows() as rows:
        began = {stint.trajectory: stint.began_s for stint in rows.stints() if stint.attempt == 0}
        return [
            row.finished_s - began[row.num]
            for row in rows.trajectories()
            if row.finished_s is not None and begin_s <= row.finished_s <= end_s and row.num in began
        ]


def _num_dropped(journal: MemoryJournal) -> int:
    with journal.rows() as rows:
        return rows.counts()["dropped"]
