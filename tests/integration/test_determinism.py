"""`deterministic: true`: a run that is killed again and again ends with the very weights of one that is not."""

import contextlib
import random
from pathlib import Path

import psutil
import pytest
import run_kit as kit

from laminar.data.sqlite_journal import read_journal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SETTINGS = (*kit.SMALL, "deterministic=true", "trainer.num_steps=10", "trainer.checkpoint.every_steps=3")
NUM_KILLS = 5
NUM_ANSWERS = 10 * 4 * 8


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


def kill_all_when(run: Path, log: Path, at_answers: int, *args: str) -> None:
    """Let a run go on until so many answers were finished, then SIGKILL every process of it."""
    with kit.training(*args, log=log) as process:
        kit.wait_for(f"{at_answers} answers", lambda: num_answers(run) >= at_answers, process, log)
        processes = kit.family(process)
        for victim in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        process.wait(kit.DEADLINE_S)
        assert kit.survivors(processes, within_s=10.0) == []


def test_five_kills_of_everything_change_neither_weights_nor_order(tmp_path: Path) -> None:
    whole, torn, log = tmp_path / "whole", tmp_path / "torn", tmp_path / "log"
    with kit.training(str(kit.RECIPE), *SETTINGS, "--out", str(whole), log=log) as process:
        kit.finish(process, log)
    points = sorted(random.Random(0).sample(range(1, NUM_ANSWERS - 20), NUM_KILLS))
    kill_all_when(torn, log, points[0], str(kit.RECIPE), *SETTINGS, "--out", str(torn))
    for point in points[1:]:
        kill_all_when(torn, log, point, "--resume", str(torn))
    with kit.training("--resume", str(torn), log=log) as process:
        kit.finish(process, log)
    assert kit.summary(torn)["resumes"] == NUM_KILLS
    for run in (whole, torn):
        assert kit.audit(run)["problems"] == []
    order = trained_in_order(whole)
    assert len(order) == NUM_ANSWERS
    assert trained_in_order(torn) == order
    weights = [(run / "export" / "model.safetensors").read_bytes() for run in (whole, torn)]
    assert weights[0] == weights[1]
    assert weights[0] != (kit.RECIPE.parent / "gcd" / "model" / "model.safetensors").read_bytes()
