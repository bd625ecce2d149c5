"""Advantages against numbers worked out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.trainer.advantages import ADVANTAGES, grpo, grpo_no_std, rloo

rewards_of_a_group = st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=17)


def test_grpo_divides_by_the_sample_deviation():
    # mean 0.25, deviations 0.75, -0.25 x 3; sample variance (0.5625 + 3 * 0.0625) / 3 = 0.25
    assert grpo([1, 0, 0, 0]) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_grpo_without_std_only_centres():
    assert grpo_no_std([1, 0, 0, 0]) == [0.75, -0.25, -0.25, -0.25]


def test_rloo_compares_with_the_other_members():
    assert rloo([1, 0, 0, 0]) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert rloo([3.0, 1.0]) == pytest.approx([2, -2])


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_group_of_equal_rewards_teaches_exactly_nothing(name):
    assert ADVANTAGES[name]([0.1] * 3) == [0.0] * 3
    assert ADVANTAGES[name]([0.7]) == [0.0]


@pytest.mark.parametrize("name", ADVANTAGES)
@given(rewards=rewards_of_a_group)
def test_advantages_add_up_to_zero_and_keep_the_order(name, rewards):
    advantages = ADVANTAGES[name](rewards)
    assert len(advantages) == len(rewards)
    assert math.fsum(advantages) == pytest.approx(0, abs=1e-4)
    best, worst = rewards.index(max(rewards)), rewards.index(min(rewards))
    assert advantages[best] == max(advantages)
    assert advantages[worst] == min(advantages)
