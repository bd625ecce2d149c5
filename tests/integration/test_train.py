"""`laminar train` for real: Ray, replicas, relay, manager, data shard and learner as processes."""

import contextlib
import os
import signal
import tempfile
from collections import Counter
from pathlib import Path

import psutil
import pytest
import run_kit as kit

from laminar.cluster.instance import SCRATCH_PREFIX
from laminar.data.sqlite_journal import read_journal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def pid_of(run: Path, replica_id: str, incarnation: int) -> int | None:
    started = [
        event["pid"]
        for event in kit.events(run, "replica_started")
        if (event["replica_id"], event["incarnation"]) == (replica_id, incarnation)
    ]
    return started[0] if started else None


def test_a_killed_replica_costs_nothing_but_time(tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    steps = ("trainer.num_steps=80", "trainer.checkpoint.every_steps=20", "evaluation.every_steps=80")
    with kit.training(str(kit.RECIPE), *kit.SMALL, *steps, "--out", str(run), log=log) as process:
        kit.wait_for("a first step", lambda: kit.last_step(run) >= 1, process, log)
        pid = pid_of(run, "replica-0", 1)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        kit.finish(process, log)
    assert kit.last_step(run) == 80
    assert pid_of(run, "replica-0", 2) is not None, "the replica was not started again"
    lost = next(event for event in kit.events(run, "process_ended") if event["replica_id"] == "replica-0")
    assert lost["incarnation"] == 1
    report = kit.audit(run)
    assert report["problems"] == []
    assert report["counts"]["trained"] == 80 * 4 * 8
    told = kit.summary(run)
    assert told["restarts"] == 1
    assert told["exit_reason"] == "finished"
    assert (run / "export" / "model.safetensors").is_file()


def test_ctrl_c_leaves_nothing_behind_and_the_run_can_go_on(tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    shm_before, scratch_before = set(os.listdir("/dev/shm")), scratch_folders()
    with kit.training(str(kit.RECIPE), *kit.SMALL, "--out", str(run), log=log) as process:
        kit.wait_for("a first step", lambda: kit.last_step(run) >= 1, process, log)
        processes = kit.family(process)
        os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to every process of the group
        assert process.wait(kit.DEADLINE_S) == 128 + signal.SIGINT, log.read_text()
        assert kit.survivors(processes, within_s=5.0) == []
    assert set(os.listdir("/dev/shm")) <= shm_before
    assert scratch_folders() <= scratch_before
    assert kit.summary(run)["exit_reason"] != "finished"
    with kit.training("--resume", str(run), log=log) as process:
        kit.finish(process, log)
    assert kit.audit(run)["problems"] == []


def steps_since_resume(run: Path) -> int:
    """Steps made since the newest resume."""
    kinds = [event["kind"] for event in kit.events(run)]
    return kinds[kinds.index("resumed") :].count("step") if "resumed" in kinds else 0


def scratch_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob(f"{SCRATCH_PREFIX}*"))


def test_a_run_survives_sigterm_and_then_sigkill_of_everything(tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    shm_before = set(os.listdir("/dev/shm"))
    with kit.training(str(kit.RECIPE), *kit.SMALL, "--out", str(run), log=log) as process:
        kit.wait_for("a checkpoint", lambda: kit.events(run, "checkpoint"), process, log)
        processes = kit.family(process)
        process.terminate()
        assert process.wait(kit.DEADLINE_S) == 128 + signal.SIGTERM, log.read_text()
        assert kit.survivors(processes, within_s=5.0) == []
    with kit.training("--resume", str(run), log=log) as process:
        kit.wait_for("a step after the resume", lambda: steps_since_resume(run) >= 1, process, log)
        processes = kit.family(process)
        for victim in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        process.wait(kit.DEADLINE_S)
        assert kit.survivors(processes, within_s=10.0) == []
    with kit.training("--resume", str(run), log=log) as process:
        kit.finish(process, log)
    report = kit.audit(run)
    assert report["problems"] == []
    assert report["counts"]["trained"] == 6 * 4 * 8
    assert kit.summary(run)["resumes"] == 2
    assert set(os.listdir("/dev/shm")) <= shm_before


def test_a_launcher_killed_alone_takes_everything_with_it_and_the_run_can_go_on(tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    with kit.training(str(kit.RECIPE), *kit.SMALL, "--out", str(run), log=log) as process:
        kit.wait_for("a replica", lambda: pid_of(run, "replica-1", 1), process, log)
        processes = kit.family(process)
        assert len(processes) > 6
        process.kill()
        process.wait(kit.DEADLINE_S)
        assert kit.survivors(processes, within_s=10.0) == []
    assert not kit.events(run, "checkpoint"), "the kill came too late to show a resume without one"
    with kit.training("--resume", str(run), log=log) as process:
        kit.finish(process, log)
    report = kit.audit(run)
    assert report["problems"] == []
    assert report["counts"]["trained"] == 6 * 4 * 8


TASK = '''
from laminar.tasks.protocol import Problem


class Parity:
    """Say whether a number is even: `e` or `o`."""

    def problems(self, split):
        numbers = range(0, 40) if split == "train" else range(40, 56)
        return [Problem(problem_id=str(n), prompt=f"{n}:", payload={"even": n % 2 == 0}) for n in numbers]

    def grade(self, problem, answer):
        if problem.problem_id == "7":
            raise RuntimeError("seven cannot be graded")
        return float(len(answer) % 2 == problem.payload["even"])
'''

RECIPE = """
model: {path: MODEL}
task: {path: "parity:Parity"}
data: {group_size: 4}
rollout: {num_replicas: 1, batch_trajectories: 16, max_new_tokens: 24}
manager: {heartbeat_s: 0.2, suspect_after_s: 5, dead_after_s: 10}
trainer: {num_steps: 12, groups_per_step: 4, optimizer: {lr: 1.0e-4}}
evaluation: {num_prompts: 0}
"""


def test_a_task_in_a_file_of_the_users_own_trains_and_its_failures_have_names(tmp_path: Path) -> None:
    (tmp_path / "parity.py").write_text(TASK)
    recipe = tmp_path / "parity.yaml"
    recipe.write_text(RECIPE.replace("MODEL", str(kit.RECIPE.parent / "gcd" / "model")))
    run, log = tmp_path / "run", tmp_path / "log"
    with kit.training(str(recipe), "--out", str(run), log=log) as process:
        kit.finish(process, log)
    assert kit.last_step(run) == 12
    dropped = kit.events(run, "dropped")
    assert any("seven cannot be graded" in event["reason"] for event in dropped)
    assert kit.audit(run)["problems"] == []


SCHOOL = '''
from laminar.tasks.protocol import Problem


class School:
    """One epoch of 24 prompts."""

    def problems(self, split):
        return [Problem(problem_id=f"p{n}", prompt=f"{n}:") for n in range(24)]

    def grade(self, problem, answer):
        return float(len(answer) % 3)
'''


def test_an_epoch_that_is_killed_and_resumed_trains_every_prompt_exactly_once(tmp_path: Path) -> None:
    (tmp_path / "school.py").write_text(SCHOOL)
    recipe = tmp_path / "school.yaml"
    model = str(kit.RECIPE.parent / "gcd" / "model")
    recipe.write_text(RECIPE.replace("MODEL", model).replace("parity:Parity", "school:School"))
    run, log = tmp_path / "run", tmp_path / "log"
    settings = ("trainer.num_steps=6", "trainer.checkpoint.every_steps=2", "rollout.num_replicas=2")
    with kit.training(str(recipe), *settings, "--out", str(run), log=log) as process:
        kit.wait_for("a checkpoint", lambda: kit.events(run, "checkpoint"), process, log)
        processes = kit.family(process)
        for victim in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        process.wait(kit.DEADLINE_S)
        assert kit.survivors(processes, within_s=10.0) == []
    with read_journal(run / "journal.sqlite") as rows:
        in_flight = sum(1 for group in rows.groups(open_only=True))
    assert in_flight > 0, "nothing was under way"
    with kit.training("--resume", str(run), log=log) as process:
        kit.finish(process, log)
    assert kit.audit(run)["problems"] == []
    with read_journal(run / "journal.sqlite") as rows:
        trained = Counter(group.prompt_id for group in rows.groups() if group.step is not None)
    assert trained == Counter({f"p{n}": 1 for n in range(24)})
