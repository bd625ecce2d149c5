"""What every shipped task promises; see laminar.tasks.protocol."""

import json
import math
from pathlib import Path

import msgspec
import pytest

from laminar.schema.trajectories import Scored
from laminar.tasks.gcd import GcdTask
from laminar.tasks.grading import InlineGrader
from laminar.tasks.loading import build_task
from laminar.tasks.prompt_files import PromptFileTask
from laminar.tasks.protocol import Problem


def length_reward(payload, answer):
    return 1.0 / (1 + abs(len(answer) - payload["length"]))


@pytest.fixture(params=["gcd", "prompt file"])
def task(request, tmp_path):
    if request.param == "gcd":
        return GcdTask(max_number=30)
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}:", "length": n}) + "\n" for n in range(50)))
    return PromptFileTask(str(file), reward=f"{__name__}:length_reward", heldout_fraction=0.2)


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_ids_are_unique_and_the_order_is_fixed(task, split):
    problems = task.problems(split)
    assert len({problem.problem_id for problem in problems}) == len(problems) > 0
    assert list(task.problems(split)) == list(problems)


def test_no_problem_is_in_both_splits(task):
    train = {problem.prompt for problem in task.problems("train")}
    assert not train & {problem.prompt for problem in task.problems("heldout")}


def test_problems_survive_the_wire(task):
    problem = task.problems("train")[0]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(problem), type=Problem) == problem


@pytest.mark.parametrize("answer", ["", "#", "#1", "84-36=48#12", "\n" * 10_000, "é\0"])
async def test_any_text_gets_a_finite_reward_and_the_same_one_twice(task, answer):
    grader = InlineGrader(task)
    await grader.start()
    for problem in task.problems("train")[:5]:
        grade = await grader.grade(problem, answer)
        assert isinstance(grade, Scored), (problem, answer)
        assert math.isfinite(grade.reward)
        assert await grader.grade(problem, answer) == grade
    await grader.close()


def test_the_shipped_tasks_are_built_by_dotted_path():
    assert build_task("laminar.tasks.gcd:GcdTask", {"max_number": 20}).problems("train")


def test_the_example_of_a_prompt_file_works(monkeypatch):
    folder = Path(__file__).parents[2] / "recipes" / "prompt_file"
    monkeypatch.syspath_prepend(str(folder))
    options = {
        "train": "train.jsonl",
        "heldout": "heldout.jsonl",
        "id_field": "id",
        "reward": "rewards:last_number_is_right",
    }
    task = build_task("laminar.tasks.prompt_files:PromptFileTask", options)
    assert len(task.problems("train")) == 200
    for problem in task.problems("heldout"):
        assert task.grade(problem, f"84-36=48#{problem.payload['solution']}") == 1.0
        assert task.grade(problem, "84-36=48") == 0.0
