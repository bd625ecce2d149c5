"""What a schedule allows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.scheduling.schedules import (
    SCHEDULES,
    Schedule,
    groups_allowed,
    groups_needed,
    only_version,
    schedule_named,
)


def test_laminar_binds_nobody():
    assert groups_allowed(SCHEDULES["laminar"], version=3, num_completed=5, groups_per_step=8) is None
    assert groups_needed(SCHEDULES["laminar"], part=0, num_groups=2, groups_per_step=8) == 2


def test_sync_lets_exactly_the_next_step_begin():
    assert groups_allowed(SCHEDULES["sync"], version=0, num_completed=0, groups_per_step=8) == 8
    assert groups_allowed(SCHEDULES["sync"], version=3, num_completed=24, groups_per_step=8) == 32


@given(groups_per_step=st.integers(1, 6), drawn=st.lists(st.integers(0, 10), max_size=60))
def test_sync_draws_each_group_under_its_only_version(groups_per_step: int, drawn: list[int]):
    version = issued = 0
    for asked in drawn:
        allowed = groups_allowed(SCHEDULES["sync"], version, issued, groups_per_step)
        assert allowed is not None
        num = min(asked, allowed - issued)
        assert {only_version(rank, groups_per_step) for rank in range(issued, issued + num)} <= {version}
        issued += num
        version += issued == allowed


def test_one_step_lets_a_step_begin_when_the_one_before_is_complete_and_at_most_one_version_behind():
    allowed = [groups_allowed(SCHEDULES["one_step"], 0, completed, 8) for completed in (0, 7, 8, 16, 24)]
    assert allowed == [8, 8, 16, 16, 16]


def test_whole_steps_are_asked_for_once_per_step():
    needed = [groups_needed(SCHEDULES["one_step"], part, 2, 8) for part in range(4)]
    assert needed == [8, 2, 2, 2]
    assert [groups_needed(SCHEDULES["stream"], part, 2, 8) for part in range(4)] == [2] * 4


def test_the_bound_of_partial_is_that_of_areal():
    """Reject a rollout if floor((N - 1) / G) > i + eta, N rollouts begun so far, in groups."""
    schedule = schedule_named("partial", max_lag=4)
    for version in range(5):
        allowed = groups_allowed(schedule, version, 0, 8)
        begun = [number for number in range(1, 100) if (number - 1) // 8 <= version + 4]
        assert allowed == begun[-1]


@pytest.mark.parametrize("name", ["sync", "one_step", "stream"])
def test_a_schedule_with_a_bound_takes_no_other(name: str):
    with pytest.raises(ValueError, match="by definition"):
        schedule_named(name, max_lag=2)  # type: ignore[arg-type]


@given(
    max_lag=st.none() | st.integers(0, 5),
    waits=st.booleans(),
    version=st.integers(0, 20),
    completed=st.integers(0, 200),
    per_step=st.integers(1, 16),
)
def test_newer_versions_and_more_completed_groups_never_allow_less(
    max_lag: int | None, waits: bool, version: int, completed: int, per_step: int
):
    schedule = Schedule(max_lag=max_lag, waits_for_all=waits)
    now = groups_allowed(schedule, version, completed, per_step)
    for later in (
        groups_allowed(schedule, version + 1, completed, per_step),
        groups_allowed(schedule, version, completed + 1, per_step),
    ):
        assert (now is None) == (later is None)
        assert now is None or later is None or later >= now
