"""The state of a run as far as its events tell it: a fold, event by event, that needs no clock and no file.

Invariant: memory stays bounded however long the run is, but for one entry per evaluation. Any order and any gap in the
events gives a view; at worst an incomplete one.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from laminar.telemetry.vocabulary import (
    FINISHED,
    BatchDone,
    Checkpoint,
    CommandFailed,
    Dropped,
    Evaluation,
    EventsDropped,
    Fact,
    Load,
    MachineGivenUp,
    MachineJoined,
    MachineLost,
    MachineRefused,
    PeerRefused,
    ProcessEnded,
    Published,
    Pulled,
    Repack,
    ReplicaLost,
    ReplicaRetired,
    ReplicaStarted,
    ReplicaSuspect,
    Resumed,
    RunFinished,
    RunStarted,
    ServiceLost,
    ServiceReady,
    Step,
    Trajectory,
    undone_by,
)
from laminar.telemetry.waits import Wait, fold_wait

WINDOW_S = 30.0
"""Throughput is averaged over this time; shorter shows the batches instead of the trend."""

HISTORY_STEPS = 512
"""Steps remembered for the curve of the reward."""

NOTICES = 50
"""Failures remembered, the newest."""

Health = Literal["starting", "healthy", "suspect", "lost", "retired"]


@dataclass(slots=True)
class ReplicaView:
    """The last that was heard of a replica; `kv_fraction` is 0 to 1, `incarnation` -1 before its first life."""

    replica_id: str
    health: Health = "starting"
    incarnation: int = -1
    phase: str = "starting"
    version: int | None = None
    num_running: int = 0
    num_waiting: int = 0
    num_acting: int = 0
    kv_fraction: float = 0.0
    num_finished: int = 0
    num_restarts: int = 0
    seen: float = 0.0
    machine: str = ""

    @property
    def state(self) -> str:
        """The phase of a healthy replica, else what is wrong with it."""
        return self.phase if self.health == "healthy" else self.health


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that a person should know, whatever else scrolls by."""

    t: float
    text: str
    is_failure: bool


@dataclass(slots=True)
class RunView:
    """Everything that is shown of a run; times are wall seconds."""

    run_id: str = ""
    name: str = ""
    num_steps: int = 0
    num_replicas: int = 0
    started: float | None = None
    now: float = 0.0
    exit_reason: str | None = None
    step: int = 0
    last_step: Step | None = None
    version: int | None = None
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY_STEPS))
    accuracies: list[Evaluation] = field(default_factory=list)
    replicas: dict[str, ReplicaView] = field(default_factory=dict)
    waits: dict[str, Wait] = field(default_factory=dict)
    staleness: Counter[int] = field(default_factory=Counter)
    drop_reasons: Counter[str] = field(default_factory=Counter)
    machines: set[str] = field(default_factory=set)
    lost_services: set[str] = field(default_factory=set)
    num_trajectories: int = 0
    num_repacks: int = 0
    num_moved: int = 0
    num_released: int = 0
    num_pulls: int = 0
    num_pulls_after_repack: int = 0
    num_losses: int = 0
    num_restarts: int = 0
    num_events_dropped: int = 0
    last_checkpoint: int | None = None
    num_notices: int = 0
    notices: deque[Notice] = field(default_factory=lambda: deque(maxlen=NOTICES))
    recent_tokens: deque[tuple[float, int]] = field(default_factory=deque)
    recent_steps: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=20))

    def age_s(self, t: float) -> float:
        """Seconds from the start of the run, or from its resumption, to `t`."""
        return 0.0 if self.started is None else t - self.started

    @property
    def num_dropped(self) -> int:
        """Trajectories that will not be trained."""
        return self.drop_reasons.total()

    @property
    def tokens_per_s(self) -> float:
        """Answer tokens of trajectories that finished in the last WINDOW_S, per second."""
        span_s = min(WINDOW_S, self.age_s(self.now))
        return sum(tokens for _, tokens in self.recent_tokens) / span_s if span_s > 0 else 0.0

    @property
    def staleness_mean(self) -> float | None:
        """Mean inherent staleness of all training trajectories."""
        num = self.staleness.total()
        return sum(value * times for value, times in self.staleness.items()) / num if num else None

    @property
    def seconds_left(self) -> float | None:
        """Time to the last step at the pace of the last twenty; None before two steps."""
        if len(self.recent_steps) < 2:
            return None
        (t0, step0), (t1, step1) = self.recent_steps[0], self.recent_steps[-1]
        return max(0, self.num_steps - self.step) * (t1 - t0) / max(1, step1 - step0)

    def waits_of(self, waiter: str) -> list[Wait]:
        """Current announced waits of one service, the oldest first."""
        return sorted((wait for wait in self.waits.values() if wait.waiter == waiter), key=lambda wait: wait.since)


def fold(view: RunView, facts: Iterable[Fact]) -> RunView:
    """Bring a view up to date with more events; returns the same view."""
    for fact in facts:
        view.now = max(view.now, fact.t)
        fold_wait(view.waits, fact)
        handler = _HANDLERS.get(type(fact))
        if handler is not None:
            handler(view, fact)
    while view.recent_tokens and view.recent_tokens[0][0] < view.now - WINDOW_S:
        view.recent_tokens.popleft()
    return view


# ---- one function per kind of event


def _run_started(view: RunView, fact: RunStarted | Resumed) -> None:
    step = max(0, undone_by(fact) or 0)
    view.run_id, view.name = fact.run_id or view.run_id, fact.name or view.name
    view.num_replicas, view.num_steps = fact.num_replicas or view.num_replicas, fact.num_steps or view.num_steps
    view.started, view.exit_reason, view.step, view.version = fact.t, None, step, step
    view.accuracies = [evaluation for evaluation in view.accuracies if evaluation.version <= (undone_by(fact) or 0)]
    view.replicas.clear()
    view.machines.clear()
    view.recent_tokens.clear()
    view.recent_steps.clear()
    view.notices.clear()
    if isinstance(fact, Resumed):
        _notice(view, fact.t, f"resumed after step {fact.step}", is_failure=False)


def _run_finished(view: RunView, fact: RunFinished) -> None:
    view.exit_reason = fact.reason
    if fact.reason != FINISHED:
        _notice(view, fact.t, f"the run ended early: {fact.reason}")


def _published(view: RunView, fact: Published) -> None:
    view.version = fact.version


def _pulled(view: RunView, fact: Pulled) -> None:
    view.num_pulls += 1
    view.num_pulls_after_repack += fact.freed_by_repack
    _replica(view, fact.replica_id).version = fact.version


def _load(view: RunView, fact: Load) -> None:
    replica = _life(view, fact.replica_id, fact.incarnation, fact.t)
    if replica is None or replica.health in ("lost", "retired"):
        return  # the last words of a life that is over
    replica.health = "healthy"
    replica.phase, replica.version = fact.phase, fact.version
    replica.num_running, replica.num_waiting, replica.num_acting = fact.num_running, fact.num_waiting, fact.num_acting
    replica.kv_fraction, replica.seen = fact.kv_fraction, fact.t


def _batch_done(view: RunView, fact: BatchDone) -> None:
    _replica(view, fact.replica_id).num_finished += fact.num_trajectories


def _trajectory(view: RunView, fact: Trajectory) -> None:
    view.recent_tokens.append((fact.t, fact.tokens))
    if fact.purpose == "training":
        view.num_trajectories += 1
        view.staleness[fact.staleness] += 1


def _dropped(view: RunView, fact: Dropped) -> None:
    view.drop_reasons[fact.reason] += 1


def _repack(view: RunView, fact: Repack) -> None:
    view.num_repacks += 1
    view.num_moved += sum(move.num_trajectories for move in fact.moves)
    view.num_released += fact.num_released


def _replica_started(view: RunView, fact: ReplicaStarted) -> None:
    replica = _life(view, fact.replica_id, fact.incarnation, fact.t)
    if replica is not None:
        replica.machine = fact.machine


def _machine_joined(view: RunView, fact: MachineJoined) -> None:
    view.machines.add(fact.machine)
    if view.last_step is not None:
        _notice(view, fact.t, f"machine {fact.machine} joined", is_failure=False)


def _machine_lost(view: RunView, fact: MachineLost) -> None:
    view.machines.discard(fact.machine)
    _notice(view, fact.t, f"machine {fact.machine} lost{_because(fact.reason)}")


def _machine_refused(view: RunView, fact: MachineRefused) -> None:
    _notice(view, fact.t, f"machine {fact.host} cannot be used{_because(fact.reason)}")


def _machine_given_up(view: RunView, fact: MachineGivenUp) -> None:
    _notice(view, fact.t, f"machine {fact.machine} is given up{_because(fact.reason)}")


def _replica_suspect(view: RunView, fact: ReplicaSuspect) -> None:
    replica = _life(view, fact.replica_id, fact.incarnation, fact.t)
    if replica is not None and replica.health == "healthy":
        replica.health = "suspect"


def _replica_lost(view: RunView, fact: ReplicaLost) -> None:
    view.num_losses += 1
    replica = _life(view, fact.replica_id, fact.incarnation, fact.t)
    if replica is not None:
        _end(replica, "lost")
    _notice(view, fact.t, f"{fact.replica_id} lost{_because(fact.reason)}")


def _process_ended(view: RunView, fact: ProcessEnded) -> None:
    replica = _life(view, fact.replica_id, fact.incarnation, fact.t)
    if replica is not None and replica.health != "retired":
        _end(replica, "lost")


def _replica_retired(view: RunView, fact: ReplicaRetired) -> None:
    _end(_replica(view, fact.replica_id), "retired")
    _notice(view, fact.t, f"{fact.replica_id} retired{_because(fact.reason)}")


def _service_lost(view: RunView, fact: ServiceLost) -> None:
    view.num_losses += 1
    view.lost_services.add(fact.service)
    _notice(view, fact.t, f"{fact.service} lost{_because(fact.reason)}")


def _service_ready(view: RunView, fact: ServiceReady) -> None:
    if fact.service not in view.lost_services:
        return  # the ordinary start
    view.lost_services.discard(fact.service)
    view.num_restarts += 1
    _notice(view, fact.t, f"{fact.service} is back", is_failure=False)


def _command_failed(view: RunView, fact: CommandFailed) -> None:
    _notice(view, fact.t, f"an order of the manager failed{_because(fact.reason)}")


def _peer_refused(view: RunView, fact: PeerRefused) -> None:
    _notice(view, fact.t, f"the relay refused peer {fact.peer}{_because(fact.reason)}")


def _step(view: RunView, fact: Step) -> None:
    view.step, view.last_step = fact.step, fact
    view.recent_steps.append((fact.t, fact.step))
    if fact.reward_mean is not None:
        view.rewards.append(fact.reward_mean)


def _checkpoint(view: RunView, fact: Checkpoint) -> None:
    view.last_checkpoint = fact.step


def _evaluation(view: RunView, fact: Evaluation) -> None:
    view.accuracies.append(fact)
    view.accuracies.sort(key=lambda evaluation: evaluation.version)


def _events_dropped(view: RunView, fact: EventsDropped) -> None:
    view.num_events_dropped += fact.num
    _notice(view, fact.t, f"{fact.source} could not write {fact.num} events (disk full?); numbers here are too low")


def _replica(view: RunView, replica_id: str) -> ReplicaView:
    return view.replicas.setdefault(replica_id, ReplicaView(replica_id=replica_id))


def _life(view: RunView, replica_id: str, incarnation: int, t: float) -> ReplicaView | None:
    """The view of this life, begun anew if it is a later one than was known; None if it is over.

    Events of several processes reach the file out of order, so any event of a life may be the first one read.
    """
    known = _replica(view, replica_id)
    if incarnation == known.incarnation:
        return known
    if incarnation < known.incarnation:
        return None
    life = ReplicaView(replica_id=replica_id, incarnation=incarnation, seen=t, num_finished=known.num_finished)
    if known.incarnation >= 0:
        life.num_restarts = known.num_restarts + 1
        view.num_restarts += 1
        _notice(view, t, f"{replica_id} is back (life {incarnation})", is_failure=False)
    view.replicas[replica_id] = life
    return life


def _end(replica: ReplicaView, health: Health) -> None:
    replica.health, replica.kv_fraction = health, 0.0
    replica.num_running = replica.num_waiting = replica.num_acting = 0


def _notice(view: RunView, t: float, text: str, *, is_failure: bool = True) -> None:
    view.num_notices += 1
    view.notices.append(Notice(t, text, is_failure))


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


_HANDLERS: dict[type[Fact], Any] = {
    RunStarted: _run_started,
    RunFinished: _run_finished,
    Resumed: _run_started,
    Published: _published,
    Pulled: _pulled,
    Load: _load,
    BatchDone: _batch_done,
    Trajectory: _trajectory,
    Dropped: _dropped,
    Repack: _repack,
    ReplicaStarted: _replica_started,
    ReplicaSuspect: _replica_suspect,
    MachineJoined: _machine_joined,
    MachineLost: _machine_lost,
    MachineRefused: _machine_refused,
    MachineGivenUp: _machine_given_up,
    ReplicaLost: _replica_lost,
    ProcessEnded: _process_ended,
    ReplicaRetired: _replica_retired,
    ServiceLost: _service_lost,
    ServiceReady: _service_ready,
    CommandFailed: _command_failed,
    PeerRefused: _peer_refused,
    Step: _step,
    Checkpoint: _checkpoint,
    Evaluation: _evaluation,
    EventsDropped: _events_dropped,
}
"""What each kind of event changes; kinds that are not here change nothing that is shown."""
