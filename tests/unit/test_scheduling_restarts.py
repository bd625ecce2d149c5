"""Restarts of services."""

from hypothesis import given
from hypothesis import strategies as st

from laminar.scheduling.restarts import RestartRules, after_failure

RULES = RestartRules(max_restarts=5, backoff_s=1.0, max_backoff_s=6.0, stable_after_s=60.0)


def test_the_first_failure_is_followed_by_a_new_life_at_once_and_later_ones_after_growing_waits():
    waits, failures = [], 0
    while (restart := after_failure(failures, 1.0, RULES)) is not None:
        failures = restart.failures
        waits.append(restart.wait_s)
    assert waits == [0.0, 1.0, 2.0, 4.0, 6.0]


def test_a_stable_life_wipes_the_slate():
    assert after_failure(5, 59.9, RULES) is None
    restart = after_failure(5, 60.0, RULES)
    assert restart is not None
    assert (restart.failures, restart.wait_s) == (1, 0.0)


@given(lives=st.lists(st.floats(0, 1e4), max_size=40))
def test_no_more_than_the_allowed_restarts_happen_in_a_row(lives: list[float]):
    failures = in_a_row = 0
    for lived_s in lives:
        in_a_row = 1 if lived_s >= RULES.stable_after_s else in_a_row + 1
        restart = after_failure(failures, lived_s, RULES)
        assert (restart is None) == (in_a_row > RULES.max_restarts)
        if restart is None:
            break
        failures = restart.failures
