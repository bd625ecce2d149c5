"""Back-pressure: how much a claim may draw, and what that bounds."""

from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.scheduling.admission import (
    AdmissionRules,
    AdmissionState,
    is_outdated,
    max_buffer_wait,
    plan_issue,
)

counts = st.integers(0, 50)


@settings(deadline=None)
@given(counts, counts, counts, st.none() | st.integers(0, 120), counts, st.integers(1, 60), st.integers(1, 8), counts)
def test_a_draw_keeps_every_bound_and_is_as_large_as_they_allow(
    in_flight, ready, taken, total, returned, ahead, group_size, asked
):
    state = AdmissionState(
        in_flight_groups=in_flight,
        ready_groups=ready,
        taken_groups=taken,
        total_groups=total,
        returned_trajectories=returned,
    )
    rules = AdmissionRules(max_groups_ahead=ahead, group_size=group_size)
    issue = plan_issue(state, rules, asked)
    drawn = issue.num_new_groups

    def allowed(groups: int) -> bool:
        fits = issue.num_returned + groups * group_size <= asked
        in_bound = in_flight + ready + groups <= ahead
        needed = total is None or in_flight + ready + taken + groups <= total
        return fits and in_bound and needed

    assert drawn == 0 or allowed(drawn)
    assert not allowed(drawn + 1)
    assert issue.num_returned == min(returned, asked)


def test_what_came_back_is_issued_before_new_prompts_even_beyond_the_bound():
    state = AdmissionState(in_flight_groups=9, ready_groups=0, taken_groups=0, returned_trajectories=5)
    issue = plan_issue(state, AdmissionRules(max_groups_ahead=8, group_size=4), 16)
    assert (issue.num_returned, issue.num_new_groups) == (5, 0)


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(0, 20), st.lists(st.integers(0, 1_000), max_size=150))
def test_no_group_waits_longer_than_the_bound_under_fifo(groups_per_step, slack, moves):
    """A pipeline in which claims, completions and training happen in any order."""
    ahead = groups_per_step + slack
    rules = AdmissionRules(max_groups_ahead=ahead, group_size=1)
    in_flight: list[int] = []
    ready: list[tuple[int, int]] = []
    version = issued = taken_in_step = taken = 0
    for move in moves:
        if move % 3 == 0:
            state = AdmissionState(in_flight_groups=len(in_flight), ready_groups=len(ready), taken_groups=taken)
            drawn = plan_issue(state, rules, move).num_new_groups
            in_flight += range(issued, issued + drawn)
            issued += drawn
        elif move % 3 == 1 and in_flight:
            ready.append((in_flight.pop(move % len(in_flight)), version))
        elif move % 3 == 2:
            while ready and taken_in_step < groups_per_step:
                _, completed_at = ready.pop(0)
                assert version - completed_at <= max_buffer_wait(ahead, groups_per_step)
                taken_in_step += 1
                taken += 1
            if taken_in_step == groups_per_step:
                version, taken_in_step = version + 1, 0
        assert len(in_flight) + len(ready) <= ahead


def test_only_a_publish_while_it_waited_makes_a_claim_outdated() -> None:
    assert is_outdated(version=4, published_before=4, published_now=5)
    assert not is_outdated(version=5, published_before=4, published_now=5)
    assert not is_outdated(version=3, published_before=5, published_now=5), "a relay that lags must not starve"
