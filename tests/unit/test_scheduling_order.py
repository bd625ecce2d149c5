"""The order of prompts and the seeds of trajectories."""

from collections import Counter
from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.scheduling.order import prompt_at, stable_hash, trajectory_seed

seeds = st.integers(-(2**70), 2**70)


def epoch_order(epoch: int, num_prompts: int, seed: int, shuffle: bool = True) -> list[int]:
    first = epoch * num_prompts
    drawn = [prompt_at(position, num_prompts, seed, shuffle) for position in range(first, first + num_prompts)]
    assert {e for e, _ in drawn} == {epoch}
    return [index for _, index in drawn]


@settings(deadline=None)
@given(st.integers(1, 300), seeds, st.integers(0, 1_000))
def test_every_epoch_draws_each_prompt_once(num_prompts, seed, epoch):
    assert sorted(epoch_order(epoch, num_prompts, seed)) == list(range(num_prompts))


@settings(deadline=None)
@given(st.integers(1, 100), seeds)
def test_without_shuffling_prompts_come_in_file_order(num_prompts, seed):
    assert epoch_order(3, num_prompts, seed, shuffle=False) == list(range(num_prompts))


@settings(deadline=None)
@given(st.integers(30, 200), seeds, st.integers(0, 50))
def test_epochs_and_seeds_have_orders_of_their_own(num_prompts, seed, epoch):
    order = epoch_order(epoch, num_prompts, seed)
    assert order != epoch_order(epoch + 1, num_prompts, seed)
    assert order != epoch_order(epoch, num_prompts, seed + 1)
    assert order != list(range(num_prompts))


@settings(deadline=None)
@given(st.integers(2**20, 2**50), seeds, st.integers(0, 2**60))
def test_positions_of_a_huge_data_set_do_not_collide(num_prompts, seed, start):
    drawn = [prompt_at(position, num_prompts, seed, True) for position in range(start, start + 100)]
    assert len(set(drawn)) == 100
    assert all(0 <= index < num_prompts for _, index in drawn)


@pytest.mark.parametrize("num_prompts", [2, 3, 4, 5])
def test_small_data_sets_are_shuffled_evenly(num_prompts):
    """All orders occur, about equally often: chi-square below its 99.99 % quantile for the 119 orders of 5 prompts."""
    orders = list(permutations(range(num_prompts)))
    expected = 20
    seen = Counter(tuple(epoch_order(epoch, num_prompts, 0)) for epoch in range(expected * len(orders)))
    assert set(seen) == set(orders)
    assert sum((seen[order] - expected) ** 2 / expected for order in orders) < 187


def test_neighbours_do_not_stay_neighbours():
    order = epoch_order(0, 10_000, 7)
    close = sum(abs(a - b) < 100 for a, b in pairwise(order))
    assert close < 300, "2 % of the pairs are expected by chance"


def test_orders_and_seeds_never_change_between_releases():
    assert [prompt_at(position, 10, 0, True)[1] for position in range(10)] == [1, 3, 6, 2, 7, 5, 4, 8, 9, 0]
    assert trajectory_seed(0, 0, 0) == 5693419890864411942


def test_a_position_outside_the_data_set_is_refused():
    with pytest.raises(ValueError, match="no position"):
        prompt_at(0, 0, 0, True)
    with pytest.raises(ValueError, match="no position"):
        prompt_at(-1, 5, 0, True)


@settings(deadline=None)
@given(seeds, st.integers(0, 2**40), st.integers(0, 1_000))
def test_trajectory_seeds_have_63_bits(run_seed, position, member):
    assert 0 <= trajectory_seed(run_seed, position, member) < 2**63


def test_trajectory_seeds_of_a_run_differ():
    drawn = {trajectory_seed(s, p, m) for s in range(10) for p in range(100) for m in range(16)}
    assert len(drawn) == 16_000


def test_the_hash_tells_apart_how_many_numbers_it_was_given():
    assert len({stable_hash(), stable_hash(0), stable_hash(0, 0), stable_hash(1, 0), stable_hash(0, 1)}) == 5
