"""`laminar train` for real: Ray, replicas, relay, manager, data shard and learner as processes."""

from collections import Counter
from pathlib import Path

import pytest
import run_kit as kit

from laminar.data.sqlite_journal import read_journal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


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
import time
from pathlib import Path

from laminar.tasks.protocol import Problem


class School:
    """One epoch of 24 prompts; of its 96 answers 64 are graded at once, the others when `folder`/gate is there."""

    def __init__(self, folder):
        self._gate, self._graded = Path(folder) / "gate", Path(folder) / "graded"

    def problems(self, split):
        return [Problem(problem_id=f"p{n}", prompt=f"{n}:") for n in range(24)]

    def grade(self, problem, answer):
        with self._graded.open("ab") as file:
            file.write(b".")
        while self._graded.stat().st_size > 64 and not self._gate.exists():
            time.sleep(0.01)
        return float(len(answer) % 3)
'''


def test_an_epoch_that_is_killed_and_resumed_trains_every_prompt_exactly_once(tmp_path: Path) -> None:
    (tmp_path / "school.py").write_text(SCHOOL)
    recipe = tmp_path / "school.yaml"
    model = str(kit.RECIPE.parent / "gcd" / "model")
    recipe.write_text(RECIPE.replace("MODEL", model).replace("parity:Parity", "school:School"))
    run, log = tmp_path / "run", tmp_path / "log"
    settings = ("trainer.num_steps=6", "trainer.checkpoint.every_steps=2", "rollout.num_replicas=2")
    options = (f"task.options.folder={tmp_path}", "task.grade_timeout_s=100")
    with kit.training(str(recipe), *settings, *options, "--out", str(run), log=log) as process:
        kit.wait_for("a checkpoint", lambda: kit.events(run, "checkpoint"), process, log)
        kit.kill_all(process)
    (tmp_path / "gate").touch()
    with read_journal(run / "journal.sqlite") as rows:
        in_flight = sum(1 for group in rows.groups(open_only=True))
    assert in_flight > 0, "nothing was under way"
    with kit.training("--resume", str(run), log=log) as process:
        kit.finish(process, log)
    assert kit.audit(run)["problems"] == []
    with read_journal(run / "journal.sqlite") as rows:
        trained = Counter(group.prompt_id for group in rows.groups() if group.step is not None)
    assert trained == Counter({f"p{n}": 1 for n in range(24)})
