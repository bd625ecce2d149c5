"""What events there are and what they say: the single source for those who emit and those who read.

Every line of `events.jsonl` has `t` (wall seconds since the epoch), `source` (the process, e.g. `replica-0`, `trainer`)
and `kind`, which is the name of one of the classes below in snake case. Fields without a default are always there.
Units are in the names; `seconds` is seconds, `tokens` a count; versions and steps are integers, and step n makes
version n. Lease ids look like `replica-1/2/37`: replica, incarnation, cycle.

Emitters pass the fields to `Events.emit(kind, ...)` and may add more of their own; readers ignore what they don't know.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec import Struct


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Fact(Struct, frozen=True, kw_only=True, tag_field="kind", tag=_snake_case):
    """An event of a known kind."""

    t: float
    source: str


# ---- the run


class RunStarted(Fact, frozen=True, kw_only=True):
    """A run begins at version 0; a second one in the same folder undoes the first."""

    run_id: str
    name: str
    num_replicas: int
    num_steps: int


class RunFinished(Fact, frozen=True, kw_only=True):
    """`reason` is FINISHED, or says why the run ended early."""

    reason: str


FINISHED = "finished"
"""The reason of a run that trained to its last step."""


class Resumed(Fact, frozen=True, kw_only=True):
    """A run goes on after this step, in new processes; later steps are done again."""

    step: int
    run_id: str = ""
    name: str = ""
    num_replicas: int = 0
    num_steps: int = 0


# ---- weights


class Published(Fact, frozen=True, kw_only=True):
    """The relay holds this version completely; the learner stood still for `stall_s`."""

    version: int
    stall_s: float = 0.0


class PublishSkipped(Fact, frozen=True, kw_only=True):
    """The relay did not answer, or lost the version before it was visible; training went on, a later one follows."""

    version: int
    reason: str = ""


class Listening(Fact, frozen=True, kw_only=True):
    """A relay, or the keeper of a chain, accepts connections of other machines there."""

    host: str
    port: int


class ChainChanged(Fact, frozen=True, kw_only=True):
    """The relays pass weights on in this order now; the first is the master. `reason` says who came or went."""

    epoch: int
    order: list[str]
    reason: str


class WeightsArrived(Fact, frozen=True, kw_only=True):
    """A relay holds a version completely that came from another machine, `seconds` after its first byte was awaited;
    `wire_bytes` of its `num_bytes` were sent: fewer if it came as changes."""

    relay_id: str
    version: int
    num_bytes: int
    wire_bytes: int = 0
    chunk_bytes: int = 0
    seconds: float = 0.0


class Pulled(Fact, frozen=True, kw_only=True):
    """A replica has taken new weights, `seconds` after it asked; `freed_by_repack`: a repack had emptied it."""

    replica_id: str
    incarnation: int
    version: int
    seconds: float = 0.0
    freed_by_repack: bool = False


# ---- generation


class Load(Fact, frozen=True, kw_only=True):
    """One heartbeat of a replica; `kv_fraction` is 0 to 1."""

    replica_id: str
    incarnation: int
    phase: str
    version: int | None
    lease_id: str | None
    num_running: int
    num_waiting: int
    num_acting: int
    kv_fraction: float


class Claimed(Fact, frozen=True, kw_only=True):
    """The data shard gave a batch into the hands of a replica."""

    lease_id: str
    version: int
    num_trajectories: int
    purpose: str = "training"


class BatchDone(Fact, frozen=True, kw_only=True):
    """A replica has finished its batch, adopted trajectories included."""

    replica_id: str
    lease_id: str
    version: int
    num_trajectories: int
    seconds: float


class Trajectory(Fact, frozen=True, kw_only=True):
    """A trajectory is finished and graded; `reward` is None if it could not be computed."""

    trajectory_id: str
    group_id: str
    version: int
    staleness: int
    tokens: int
    reward: float | None
    purpose: str = "training"
    attempt: int = 0
    stop_reason: str = "stop"


class Dropped(Fact, frozen=True, kw_only=True):
    """A trajectory will not be trained."""

    trajectory_id: str
    reason: str


# ---- moving work


class Move(Struct, frozen=True, kw_only=True):
    """The unfinished trajectories of one replica go to another; `kv_fraction` is the KV share they take there."""

    source: str
    target: str
    num_trajectories: int = 0
    kv_fraction: float = 0.0


class Repack(Fact, frozen=True, kw_only=True):
    """The manager orders moves among replicas of one version; `num_released` replicas become free."""

    version: int
    moves: list[Move]
    num_released: int = 0
    plan_s: float = 0.0


class Released(Fact, frozen=True, kw_only=True):
    """A replica has let go of a batch, finished or not."""

    replica_id: str
    lease_id: str
    num_trajectories: int


class Adopted(Fact, frozen=True, kw_only=True):
    """A replica has taken over the unfinished trajectories of a lease, after a repack or a failure."""

    from_lease: str
    to_lease: str
    version: int
    num_trajectories: int
    num_tokens: int = 0


# ---- failures


class ReplicaStarted(Fact, frozen=True, kw_only=True):
    """A new life of a replica has reported for the first time; `machine` is empty if the run has only one."""

    replica_id: str
    incarnation: int
    reason: str = ""
    pid: int = 0
    machine: str = ""
    host: str = ""


class ReplicaSuspect(Fact, frozen=True, kw_only=True):
    """No heartbeat for a while; gets no more work."""

    replica_id: str
    incarnation: int
    reason: str = ""


class EngineStuck(Fact, frozen=True, kw_only=True):
    """An engine has not answered a call for so long; its replica stops reporting, and is replaced."""

    replica_id: str
    incarnation: int
    seconds: float
    lease_id: str | None = None


class ReplicaLost(Fact, frozen=True, kw_only=True):
    """This life is over."""

    replica_id: str
    incarnation: int
    reason: str = ""


class ReplicaRetired(Fact, frozen=True, kw_only=True):
    """No further life will follow."""

    replica_id: str
    incarnation: int | None = None
    reason: str = ""


class ProcessEnded(Fact, frozen=True, kw_only=True):
    """The process of a replica is gone, wanted or not; what that means the manager says."""

    replica_id: str
    incarnation: int
    reason: str = ""


class ServiceLost(Fact, frozen=True, kw_only=True):
    """This life of a service other than a replica (data, relay, trainer, manager) is over."""

    service: str
    incarnation: int = 0
    reason: str = ""


class ServiceStarted(Fact, frozen=True, kw_only=True):
    """A process of a service runs; what it is built of is still being loaded."""

    service: str
    incarnation: int = 0
    pid: int = 0
    machine: str = ""
    host: str = ""


class ServiceReady(Fact, frozen=True, kw_only=True):
    """It answers calls."""

    service: str
    incarnation: int = 0
    pid: int = 0
    machine: str = ""
    host: str = ""


class MachineJoined(Fact, frozen=True, kw_only=True):
    """A machine of the Ray cluster can be used from now on; its host's name is `host`."""

    machine: str
    host: str
    num_gpus: float = 0.0


class MachineLost(Fact, frozen=True, kw_only=True):
    """A machine is gone, with all that lived there."""

    machine: str
    reason: str = ""


class MachineRefused(Fact, frozen=True, kw_only=True):
    """A machine of the Ray cluster cannot be used."""

    host: str
    reason: str = ""


class MachineGivenUp(Fact, frozen=True, kw_only=True):
    """A machine gets work only where no other has room: the same part failed there again after a restart in place."""

    machine: str
    reason: str = ""


class Scaled(Fact, frozen=True, kw_only=True):
    """The user asked for so many replicas."""

    num_replicas: int


class LearnerLoaded(Fact, frozen=True, kw_only=True):
    """A trainer begins after this step; what an earlier one did after it is done again, with the same experience."""

    step: int


class Fault(Fact, frozen=True, kw_only=True):
    """A simulation broke something on purpose; `what` names the kind of fault."""

    what: str


class CommandFailed(Fact, frozen=True, kw_only=True):
    """The manager could not carry out an order; it decides anew."""

    reason: str


# ---- training


class Taken(Fact, frozen=True, kw_only=True):
    """Mini-batch `part` of iteration `step` was drawn; `groups` are their ids, or how many."""

    step: int
    part: int
    groups: list[str] | int


class Step(Fact, frozen=True, kw_only=True):
    """An iteration is complete: it waited, trained and published, in this order, and ended at `t`.

    With several mini-batches the times are sums. The means are over the trajectories that it consumed, `tokens` counts
    their prompts too. Further numeric fields are metrics of the
    learner and of the task; they go to metrics.jsonl.
    """

    step: int
    wait_s: float
    train_s: float
    publish_s: float
    reward_mean: float | None = None
    response_tokens_mean: float | None = None
    staleness_mean: float | None = None
    staleness_max: float | None = None
    tokens: float = 0
    lr: float | None = None
    loss: float | None = None
    clip_fraction: float | None = None


class Checkpoint(Fact, frozen=True, kw_only=True):
    """A durable state that covers all steps up to `step`; writing took `seconds`."""

    step: int
    path: str
    seconds: float = 0.0


class Evaluation(Fact, frozen=True, kw_only=True):
    """Held-out accuracy, 0 to 1, of one version over `num` prompts."""

    version: int
    accuracy: float
    num: int = 0


class PeerRefused(Fact, frozen=True, kw_only=True):
    """The relay closed a connection: a peer without the run's secret, or one that sent nonsense."""

    peer: int | str
    reason: str


# ---- waits and telemetry itself


class WaitStarted(Fact, frozen=True, kw_only=True):
    """`waiter` has waited for `waited_s` for what one of the sources `of` must do; emitted late, by design."""

    wait_id: str
    waiter: str
    what: str
    of: list[str] = []
    deadline_s: float | None = None
    waited_s: float = 0.0


class WaitEnded(Fact, frozen=True, kw_only=True):
    """The announced wait is over, `waited_s` after it began."""

    wait_id: str
    waiter: str
    waited_s: float = 0.0


class EventsDropped(Fact, frozen=True, kw_only=True):
    """So many events of this source could not be written."""

    num: int


KINDS: dict[str, type[Fact]] = {_snake_case(kind.__name__): kind for kind in Fact.__subclasses__()}
"""Every kind of event by its name."""


def _kind_of(event: dict[str, Any]) -> type[Fact] | None:
    name = event.get("kind")
    return KINDS.get(name) if isinstance(name, str) else None


def problem(event: dict[str, Any]) -> str | None:
    """What is wrong with an event, in one sentence; None if it keeps to the vocabulary."""
    kind = _kind_of(event)
    if kind is None:
        return f"{event.get('kind')!r} is not in the vocabulary"
    try:
        msgspec.convert(event, kind)
    except msgspec.ValidationError as error:
        return f"{event['kind']}: {error}"
    return None


def undone_by(fact: Fact) -> int | None:
    """The step after which a new start of the run takes everything back; None for all other events."""
    match fact:
        case RunStarted():
            return -1
        case Resumed(step=step):
            return step
    return None


def to_facts(events: Iterable[dict[str, Any]]) -> Iterator[Fact]:
    """Typed events; those that do not keep to the vocabulary are left out (`problem` says why)."""
    for event in events:
        kind = _kind_of(event)
        if kind is not None:
            try:
                yield msgspec.convert(event, kind)
            except msgspec.ValidationError:
                continue
