"""Who is alive, what is done to them, and how a recovery is read from events."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.chaos.faults import Fault, FaultKind, RandomFaults, inject
from laminar.chaos.processes import Process, live_processes
from laminar.chaos.recovery import recovery, step_spans, touching
from laminar.chaos.session import ChaosSession
from laminar.schema.errors import UserError
from laminar.telemetry.events import EventLog
from laminar.telemetry.vocabulary import Fact, to_facts


def facts(*events: tuple[float, str, dict[str, object]]) -> list[Fact]:
    told = list(to_facts({"t": t, "source": "x", "kind": kind, **fields} for t, kind, fields in events))
    assert len(told) == len(events), "an event does not keep to the vocabulary"
    return told


START = (0.0, "run_started", {"run_id": "r", "name": "n", "num_replicas": 2, "num_steps": 9})


def replica(number: int, incarnation: int, **fields: object) -> dict[str, object]:
    return {"replica_id": f"replica-{number}", "incarnation": incarnation, **fields}


def service(name: str, incarnation: int, **fields: object) -> dict[str, object]:
    return {"service": name, "incarnation": incarnation, **fields}


def test_the_newest_life_of_each_part_that_has_not_ended_is_alive():
    told = facts(
        START,
        (1.0, "replica_started", replica(0, 1, pid=10)),
        (1.0, "replica_started", replica(1, 1, pid=11)),
        (1.0, "service_started", service("relay", 1, pid=12)),
        (2.0, "service_ready", service("relay", 1, pid=12)),
        (3.0, "process_ended", replica(0, 1)),
        (4.0, "replica_started", replica(0, 2, pid=13)),
        (4.0, "process_ended", replica(0, 1)),
        (5.0, "service_lost", service("relay", 1)),
        (6.0, "replica_retired", {"replica_id": "replica-1"}),
    )
    assert set(live_processes(told[:5])) == {"replica-0", "replica-1", "relay"}
    assert live_processes(told) == {"replica-0": Process(name="replica-0", incarnation=2, pid=13)}
    assert live_processes([*told, *facts((7.0, "run_finished", {"reason": "finished"}))]) == {}


@given(
    seed=st.integers(0, 1000), names=st.lists(st.sampled_from(["data", "relay", "replica-0"]), min_size=1, unique=True)
)
def test_a_seed_repeats_its_faults_and_hits_only_who_is_there(seed: int, names: list[str]):
    def story() -> list[tuple[float, Fault]]:
        faults = RandomFaults(seed, 2.0)
        return [(faults.pause_s(), faults.pick(names)) for _ in range(20)]

    assert story() == story()
    assert {fault.target for _, fault in story()} <= set(names)
    assert all((fault.seconds is not None) == (fault.kind is FaultKind.SLOW) for _, fault in story())


def test_seeds_differ_and_every_kind_of_fault_occurs():
    first, second = ([RandomFaults(seed, 1.0).pick(["a", "b"]) for _ in range(1)] for seed in (1, 2))
    assert first != second
    faults = RandomFaults(0, 1.0)
    assert {faults.pick(["a"]).kind for _ in range(50)} == set(FaultKind)


@pytest.fixture
def sleeper() -> Iterator[Process]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield Process(name="relay", incarnation=1, pid=child.pid)
    child.send_signal(signal.SIGCONT)
    child.kill()
    child.wait()


def test_a_killed_process_is_dead_and_a_frozen_one_stands_still(sleeper: Process):
    live = {"relay": sleeper}
    assert inject(Fault(kind=FaultKind.FREEZE, target="relay"), live) == sleeper
    assert os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED) is not None, "a signal is acted on at the next time slice"
    assert inject(Fault(kind=FaultKind.KILL, target="relay"), live) == sleeper
    assert psutil.Process(sleeper.pid).wait(timeout=10) is not None


@pytest.mark.parametrize("kind", [FaultKind.FREEZE, FaultKind.SLOW])
def test_what_is_frozen_or_slow_for_a_while_runs_on_afterwards(sleeper: Process, kind: FaultKind):
    inject(Fault(kind=kind, target="relay", seconds=0.3), {"relay": sleeper})
    assert psutil.Process(sleeper.pid).status() != psutil.STATUS_STOPPED


def test_nobody_is_hit_if_the_target_is_not_there(sleeper: Process):
    assert inject(Fault(kind=FaultKind.KILL, target="data"), {"relay": sleeper}) is None
    assert psutil.Process(sleeper.pid).is_running()


def test_what_runs_on_another_machine_is_not_hit_from_here(tmp_path: Path, sleeper: Process):
    with EventLog(tmp_path / "events.jsonl", "launcher") as log:
        log.emit("run_started", run_id="r", name="n", num_replicas=2, num_steps=9)
        for name, host in (("replica-0", "another-host"), ("replica-1", socket.gethostname())):
            log.emit("replica_started", replica_id=name, incarnation=1, pid=sleeper.pid, host=host)
    session = ChaosSession(tmp_path)
    with pytest.raises(UserError, match=r"replica-0 runs on another-host; run laminar chaos .* there"):
        session.strike(Fault(kind=FaultKind.KILL, target="replica-0"))
    assert psutil.Process(sleeper.pid).status() != psutil.STATUS_ZOMBIE
    session.strike(Fault(kind=FaultKind.KILL, target="replica-1"))
    assert psutil.Process(sleeper.pid).wait(timeout=10) is not None


LOAD = {"version": 1, "lease_id": None, "num_running": 0, "num_waiting": 0, "num_acting": 0, "kv_fraction": 0.0}
STEP = {"wait_s": 0, "train_s": 0, "publish_s": 0}


def test_a_lost_replica_works_again_when_its_next_life_generates():
    told = recovery(
        Process(name="replica-0", incarnation=1, pid=1),
        10.0,
        facts(
            (9.0, "load", replica(0, 1, phase="generating", **LOAD)),
            (10.5, "process_ended", replica(0, 1)),
            (10.6, "adopted", {"from_lease": "replica-0/1/3", "to_lease": "replica-1/1/7", "version": 1}
             | {"num_trajectories": 5, "num_tokens": 70}),
            (10.6, "adopted", {"from_lease": "replica-2/1/3", "to_lease": "replica-1/1/7", "version": 1}
             | {"num_trajectories": 9, "num_tokens": 90}),
            (11.0, "step", {"step": 4, **STEP}),
            (12.0, "replica_started", replica(0, 2, pid=2)),
            (12.5, "load", replica(1, 1, phase="generating", **LOAD)),
            (13.0, "load", replica(0, 2, phase="loading", **LOAD)),
            (14.0, "load", replica(0, 2, phase="generating", **LOAD)),
        ),
    )  # fmt: skip
    assert (told.detected_s, told.started_s, told.working_s) == (0.5, 2.0, 4.0)
    assert (told.trajectories_adopted, told.tokens_kept, told.steps_meanwhile) == (5, 70, 1)


def test_a_lost_trainer_works_again_after_a_step_and_says_what_it_did_again():
    told = recovery(
        Process(name="trainer", incarnation=1, pid=1),
        10.0,
        facts(
            (9.0, "step", {"step": 17, **STEP}),
            (10.1, "service_lost", service("trainer", 1)),
            (10.2, "service_started", service("trainer", 2, pid=3)),
            (13.0, "learner_loaded", {"step": 15}),
            (14.0, "step", {"step": 16, **STEP}),
            (15.0, "step", {"step": 17, **STEP}),
        ),
    )
    assert told.working_s == 4.0
    assert told.steps_redone == 2


@pytest.mark.parametrize(
    ("name", "sign"),
    [
        ("relay", ("published", {"version": 3})),
        ("manager", ("service_ready", service("manager", 2, pid=5))),
        ("data", ("claimed", {"lease_id": "replica-0/1/1", "version": 1, "num_trajectories": 8})),
    ],
)
def test_each_service_works_again_when_it_has_done_what_it_is_for(name: str, sign: tuple[str, dict[str, object]]):
    kind, fields = sign
    told = recovery(
        Process(name=name, incarnation=1, pid=1),
        10.0,
        facts(
            (10.1, kind, fields),
            (10.2, "service_lost", service(name, 1)),
            (10.4, "service_started", service(name, 2, pid=5)),
            (12.0, kind, fields),
        ),
    )
    assert (told.detected_s, told.started_s, told.working_s) == pytest.approx((0.2, 0.4, 2.0))


def test_without_further_events_nothing_is_claimed():
    told = recovery(
        Process(name="relay", incarnation=1, pid=1), 10.0, facts((9.0, "service_lost", service("relay", 1)))
    )
    assert (told.detected_s, told.started_s, told.working_s) == (None, None, None)


def test_the_steps_of_an_outage_are_those_that_it_touches():
    steps = step_spans(facts(*[(t, "step", {"step": int(t), **STEP}) for t in (1.0, 2.0, 5.0, 6.0)]))
    assert steps == [(1.0, 2.0), (2.0, 5.0), (5.0, 6.0)]
    assert touching(steps, (2.5, 3.0)) == [(2.0, 5.0)]
    assert touching(steps, (1.5, 5.5)) == steps
    assert touching(steps, (6.0, 9.0)) == []
