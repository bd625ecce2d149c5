"""Which complete groups train next, which are dropped, and that a user's function is checked."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.scheduling.eviction import EVICTIONS, none, oldest_version
from laminar.scheduling.sampling import (
    SAMPLERS,
    Draw,
    ReadyGroup,
    SamplingRules,
    bounded_staleness,
    by_priority,
    check_draw,
    fifo,
    freshest,
    prompt_order,
)

RULES = SamplingRules(max_staleness=2)


@st.composite
def ready_groups(draw):
    versions = draw(st.lists(st.integers(0, 6), max_size=20))
    order = draw(st.permutations(range(len(versions))))
    return [
        ReadyGroup(group_id=f"g{n}", version=v, completed=order[n], rewards=(0.0, float(n % 3)))
        for n, v in enumerate(versions)
    ]


@pytest.mark.parametrize("name", sorted(SAMPLERS))
@settings(deadline=None)
@given(ready=ready_groups(), num_groups=st.integers(1, 8), learner_version=st.integers(0, 8))
def test_every_sampler_keeps_the_contract(name, ready, num_groups, learner_version):
    draw = SAMPLERS[name](ready, num_groups, learner_version, RULES)
    check_draw(draw, ready, num_groups)
    left = len(ready) - len(draw.dropped)
    assert len(draw.picked) == (num_groups if left >= num_groups else 0)


@settings(deadline=None)
@given(ready_groups(), st.integers(1, 5))
def test_fifo_takes_in_order_of_completion(ready, num_groups):
    picked = fifo(ready, num_groups, 0, RULES).picked
    completed = {g.group_id: g.completed for g in ready}
    assert [completed[i] for i in picked] == list(range(len(picked)))


def test_prompt_order_takes_the_first_prompts_whenever_they_were_completed():
    ready = [ReadyGroup(group_id=f"g{n}", version=n, completed=9 - n, position=7 * n % 5) for n in range(5)]
    assert prompt_order(ready, 3, 0, RULES).picked == ("g0", "g3", "g1")
    assert prompt_order(ready, 6, 0, RULES).picked == ()


@settings(deadline=None)
@given(ready_groups(), st.integers(1, 5))
def test_freshest_leaves_nothing_newer_behind(ready, num_groups):
    picked = set(freshest(ready, num_groups, 0, RULES).picked)
    left = [g.version for g in ready if g.group_id not in picked]
    if picked and left:
        assert min(g.version for g in ready if g.group_id in picked) >= max(left)


@settings(deadline=None)
@given(ready_groups(), st.integers(0, 8))
def test_bounded_staleness_trains_nothing_older_and_drops_it_with_a_reason(ready, learner_version):
    draw = bounded_staleness(ready, 3, learner_version, RULES)
    too_old = {g.group_id for g in ready if learner_version - g.version > 2}
    assert {group_id for group_id, _ in draw.dropped} == too_old
    assert not too_old & set(draw.picked)
    assert all("behind" in reason for _, reason in draw.dropped)


def test_bounded_staleness_needs_its_bound():
    with pytest.raises(ValueError, match="max_staleness"):
        bounded_staleness([], 1, 0, SamplingRules())


def test_priority_takes_the_largest_key_and_then_the_first_completed():
    ready = [ReadyGroup(group_id=f"g{n}", version=0, completed=n, rewards=(0.0, r)) for n, r in enumerate([0, 1, 1, 2])]
    assert SAMPLERS["priority"](ready, 3, 0, RULES).picked == ("g3", "g1", "g2")
    assert by_priority(lambda group: -group.completed)(ready, 1, 0, RULES).picked == ("g0",)


@pytest.mark.parametrize(
    ("draw", "complaint"),
    [
        (Draw(picked=("x", "a")), "not ready"),
        (Draw(picked=("a", "a")), "twice"),
        (Draw(picked=("a", "b"), dropped=(("a", "old"),)), "picked and dropped"),
        (Draw(picked=("a",)), "2 or none"),
    ],
)
def test_a_draw_that_breaks_the_contract_is_refused(draw, complaint):
    ready = [ReadyGroup(group_id=name, version=0, completed=n) for n, name in enumerate("ab")]
    with pytest.raises(ValueError, match=complaint):
        check_draw(draw, ready, 2)


@settings(deadline=None)
@given(ready_groups(), st.integers(0, 12))
def test_eviction_drops_the_oldest_versions_beyond_the_capacity(ready, capacity):
    evicted = {group_id for group_id, _ in oldest_version(ready, capacity, 7)}
    left = [g for g in ready if g.group_id not in evicted]
    assert len(left) == min(len(ready), capacity)
    if evicted and left:
        assert max(g.version for g in ready if g.group_id in evicted) <= min(g.version for g in left)


def test_evicting_none_drops_nothing():
    assert none([ReadyGroup(group_id="a", version=0, completed=0)], 0, 5) == ()
    assert sorted(EVICTIONS) == ["none", "oldest_version"]
