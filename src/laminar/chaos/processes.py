"""Which processes a run has at this moment, by name, as far as its events tell."""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from laminar.telemetry.vocabulary import (
    Fact,
    ProcessEnded,
    ReplicaRetired,
    ReplicaStarted,
    Resumed,
    RunFinished,
    RunStarted,
    ServiceLost,
    ServiceReady,
)


class Process(Struct, frozen=True, kw_only=True):
    """One life of a part of the run: `replica-1`, `relay`, `data`, `manager`, `trainer`; `host` is where, if known."""

    name: str
    incarnation: int
    pid: int
    host: str = ""


def live_processes(facts: Iterable[Fact]) -> Mapping[str, Process]:
    """The newest life of each part that has started and not ended, of the newest start of the run."""
    live: dict[str, Process] = {}
    for fact in facts:
        match fact:
            case RunStarted() | Resumed() | RunFinished():
                live.clear()
            case (
                ReplicaStarted(replica_id=name, incarnation=incarnation, pid=pid, host=host)
                | ServiceReady(service=name, incarnation=incarnation, pid=pid, host=host)
            ):
                live[name] = Process(name=name, incarnation=incarnation, pid=pid, host=host)
            case (
                ProcessEnded(replica_id=name, incarnation=incarnation)
                | ServiceLost(service=name, incarnation=incarnation)
            ):
                if name in live and live[name].incarnation <= incarnation:
                    del live[name]
            case ReplicaRetired(replica_id=name):
                live.pop(name, None)
    return live
