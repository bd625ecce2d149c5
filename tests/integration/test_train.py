"""`laminar train` for real: Ray, replicas, relay, manager, data shard and learner as processes."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import run_kit as kit

from laminar.data.sqlite_journal import read_journal
from laminar.rollout.trajectory import model_turns
from laminar.schema.trajectories import Pieces, join_pieces

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


AGENTS = '''
import json
import urllib.request
from pathlib import Path

from laminar.tasks.agents import AgentTask
from laminar.tasks.protocol import Problem


class Agents(AgentTask):
    """Two questions, the second by a tool; notes which ids the model was said to have drawn."""

    def __init__(self, notes):
        self._notes = Path(notes)

    def problems(self, split):
        return [Problem(problem_id=f"p{n}", prompt=({"role": "user", "content": f"{n},36:"},)) for n in range(40, 72)]

    def play(self, problem, base_url):
        messages, drawn = list(problem.prompt), []
        for more in ({"role": "tool", "content": "99,33:"}, None):
            body = json.dumps({"model": "policy", "messages": messages}).encode()
            with urllib.request.urlopen(base_url + "/chat/completions", body, timeout=60) as response:
                (choice,) = json.load(response)["choices"]
            drawn.append(choice["token_ids"])
            messages += [choice["message"], more]
        with self._notes.open("a") as file:
            file.write(json.dumps({"problem": problem.problem_id, "drawn": drawn}) + "\\n")
        return float(messages[1]["content"].endswith("1"))
'''


def drawn_turns(run: Path) -> Counter[tuple[str, tuple[tuple[int, ...], ...]]]:
    """Of each trajectory that a step took and whose agent came to its end: its prompt, and the ids of each turn."""
    with read_journal(run / "journal.sqlite") as rows:
        prompts = {group.num: group.prompt_id for group in rows.groups()}
        taken = rows.trajectories(state="taken")  # "trained" only once a checkpoint covers them
        trained = [row for row in taken if row.stop_reason == "environment"]
        pieces: dict[int, Pieces] = {}
        for row in rows.pieces():
            pieces[row.trajectory] = join_pieces(pieces.get(row.trajectory, ()), (row.piece,))
    return Counter((prompts[row.group], tuple(map(tuple, model_turns(pieces[row.num])))) for row in trained)


def test_what_an_agent_was_told_over_http_is_what_is_trained_on(tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text(AGENTS)
    model = shutil.copytree(kit.RECIPE.parent / "gcd" / "model", tmp_path / "model")
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    recipe, notes = tmp_path / "agents.yaml", tmp_path / "notes.jsonl"
    recipe.write_text(RECIPE.replace("MODEL", str(model)).replace("parity:Parity", "agents:Agents"))
    run, log = tmp_path / "run", tmp_path / "log"
    settings = ("trainer.num_steps=100000", "trainer.checkpoint.every_steps=100000", "rollout.max_new_tokens=300")
    with kit.training(str(recipe), *settings, f"task.options.notes={notes}", "--out", str(run), log=log) as process:
        kit.wait_for("a third step", lambda: kit.last_step(run) >= 3, process, log)
        kit.kill_all(process)  # before a checkpoint: the journal still has what was trained on
    told = Counter(
        (note["problem"], tuple(tuple(ids) for ids in note["drawn"]))
        for note in map(json.loads, notes.read_text().splitlines())
    )
    trained = drawn_turns(run)
    assert sum(trained.values()) > 0
    assert trained <= told
    assert all(len(turns) == 2 for _, turns in trained)
