"""`deterministic: true`: however often and in whatever way a run is ended, its weights come out the same."""

import os
import random
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import run_kit as kit

from laminar.cluster.instance import SCRATCH_PREFIX
from laminar.data.sqlite_journal import read_journal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SETTINGS = (*kit.SMALL, "deterministic=true", "trainer.num_steps=10", "trainer.checkpoint.every_steps=3")
NUM_ANSWERS = 10 * 4 * 8


def launcher_alone(process: subprocess.Popen[bytes]) -> None:
    processes = kit.family(process)
    assert len(processes) > 6
    process.kill()
    process.wait(kit.DEADLINE_S)
    assert kit.survivors(processes, within_s=10.0) == []


def ctrl_c(process: subprocess.Popen[bytes]) -> None:
    """A terminal sends it to every process of the group."""
    processes = kit.family(process)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(kit.DEADLINE_S) == 128 + signal.SIGINT
    assert kit.survivors(processes, within_s=5.0) == []


def sigterm(process: subprocess.Popen[bytes]) -> None:
    processes = kit.family(process)
    process.terminate()
    assert process.wait(kit.DEADLINE_S) == 128 + signal.SIGTERM
    assert kit.survivors(processes, within_s=5.0) == []


WAYS: list[Callable[[subprocess.Popen[bytes]], None]] = [
    kit.kill_all,
    ctrl_c,
    kit.kill_all,
    kit.kill_all,
    sigterm,
    kit.kill_all,
    kit.kill_all,
]


def trained_in_order(run: Path) -> list[tuple[int | None, str]]:
    """Ids of trained trajectories as the learner saw them, each with its step."""
    with read_journal(run / "journal.sqlite") as rows:
        groups = {group.num: group for group in rows.groups()}
        trained = list(rows.trajectories(state="trained"))

    def key(row):  # type: ignore[no-untyped-def]
        group = groups[row.group]
        return group.step, group.part, group.place, row.member

    return [(row.step, row.trajectory_id) for row in sorted(trained, key=key)]


def num_answers(run: Path) -> int:
    return len({event["trajectory_id"] for event in kit.events(run, "trajectory") if event["purpose"] == "training"})


def left_behind() -> set[str]:
    """What processes of a run leave outside its folder. None of them uses multiprocessing, other programs may."""
    scratch = Path(tempfile.gettempdir()).glob(f"{SCRATCH_PREFIX}*")
    return {
        *(str(path) for path in scratch),
        *(name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")),
    }


def replicas_started(run: Path) -> int:
    return len(kit.events(run, "replica_started"))


def test_however_often_it_is_ended_a_run_keeps_its_weights_and_its_order(tmp_path: Path) -> None:
    whole, torn, log = tmp_path / "whole", tmp_path / "torn", tmp_path / "log"
    before = left_behind()
    with kit.training(str(kit.RECIPE), *SETTINGS, "--out", str(whole), log=log) as process:
        kit.finish(process, log)

    with kit.training(str(kit.RECIPE), *SETTINGS, "--out", str(torn), log=log) as process:
        kit.wait_for("both replicas", lambda: replicas_started(torn) == 2, process, log)
        launcher_alone(process)
    assert not kit.events(torn, "checkpoint"), "the end came too late to show a resume without one"
    points = sorted(random.Random(0).sample(range(1, NUM_ANSWERS * 3 // 4), len(WAYS)))
    for resumes, (at_answers, end) in enumerate(zip(points, WAYS, strict=True), start=1):
        with kit.training("--resume", str(torn), log=log) as process:
            kit.wait_for("the resume", lambda n=resumes: len(kit.events(torn, "resumed")) == n, process, log)
            kit.wait_for("answers", lambda least=at_answers: num_answers(torn) >= least, process, log)
            end(process)
        if end in (ctrl_c, sigterm):
            assert left_behind() <= before
            assert kit.summary(torn)["exit_reason"] != "finished"
    with kit.training("--resume", str(torn), log=log) as process:
        kit.finish(process, log)

    assert left_behind() <= before
    assert kit.summary(torn)["resumes"] == 1 + len(WAYS)
    for run in (whole, torn):
        assert kit.audit(run)["problems"] == []
    order = trained_in_order(whole)
    assert len(order) == NUM_ANSWERS
    assert trained_in_order(torn) == order
    weights = [(run / "export" / "model.safetensors").read_bytes() for run in (whole, torn)]
    assert weights[0] == weights[1]
    assert weights[0] != (kit.RECIPE.parent / "gcd" / "model" / "model.safetensors").read_bytes()
