"""Facts about the greatest-common-divisor task."""

import math
import subprocess
import sys

import pytest

from laminar.schema.errors import UserError
from laminar.tasks.gcd import GcdTask, is_held_out, subtraction_steps
from laminar.tasks.protocol import Problem

PROBLEM = Problem(problem_id="84,36", prompt="84,36:", payload={"a": 84, "b": 36, "gcd": 12})


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("84-36=48,48-36=12,36-12=24,24-12=12#12", 1.0),
        ("#12", 1.0),
        ("84-36=48#36", 0.0),
        ("84-36=48,48-36=12", 0.0),
        ("12", 0.0),
        ("#12,", 0.0),
        ("#12#12", 0.0),
        ("#012", 0.0),
        ("# 12", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_right_number_after_the_only_mark_is_rewarded(answer, reward):
    assert GcdTask().grade(PROBLEM, answer) == reward


def test_subtraction_ends_at_the_greatest_common_divisor():
    assert subtraction_steps(84, 36) == [(84, 36, 48), (48, 36, 12), (36, 12, 24), (24, 12, 12)]
    for problem in GcdTask().problems("heldout"):
        larger, smaller, difference = subtraction_steps(problem.payload["a"], problem.payload["b"])[-1]
        assert difference == smaller == problem.payload["gcd"], (problem, larger)


def test_about_one_pair_in_eight_is_held_out_together_with_its_mirror_image():
    task = GcdTask()
    train = {(p.payload["a"], p.payload["b"]) for p in task.problems("train")}
    heldout = {(p.payload["a"], p.payload["b"]) for p in task.problems("heldout")}
    assert 0.11 < len(heldout) / len(train | heldout) < 0.14
    assert not train & heldout
    assert {(b, a) for a, b in heldout} == heldout
    assert len(train | heldout) == sum(a != b and math.gcd(a, b) <= 8 for a in range(1, 100) for b in range(1, 100))


def test_options_bound_the_numbers_but_move_no_pair_between_splits():
    small = GcdTask(max_number=20, max_gcd=3)
    for split in ("train", "heldout"):
        for problem in small.problems(split):
            a, b = problem.payload["a"], problem.payload["b"]
            assert max(a, b) <= 20
            assert problem.payload["gcd"] == math.gcd(a, b) <= 3
            assert is_held_out(a, b) == (split == "heldout")


def test_order_and_splits_are_the_same_in_every_process():
    code = "from laminar.tasks.gcd import *; print([p.problem_id for p in GcdTask().problems('heldout')[:3]])"
    runs = {
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    }
    assert runs == {"['80,83', '94,56', '16,79']\n"}


def test_options_that_leave_no_pair_are_refused():
    with pytest.raises(UserError, match="max_number=2"):
        GcdTask(max_number=2)
