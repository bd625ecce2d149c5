"""Two budgets for two kinds of failure."""

from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.scheduling.retries import (
    HOPELESS_AFTER,
    Drop,
    FailureCounts,
    Retry,
    RetryRules,
    decide_retry,
    is_hopeless,
)

RULES = RetryRules(infrastructure_failures=6, data_failures=2)


@settings(deadline=None)
@given(st.lists(st.sampled_from(["infrastructure", "data"]), max_size=20))
def test_a_trajectory_is_dropped_when_one_of_its_budgets_is_used_up_and_not_before(failures):
    counts = FailureCounts()
    for number, kind in enumerate(failures, start=1):
        verdict = decide_retry(counts, kind, "it broke", RULES)
        counts = verdict.counts
        so_far = failures[:number]
        assert counts == FailureCounts(infrastructure=so_far.count("infrastructure"), data=so_far.count("data"))
        used_up = counts.infrastructure >= 6 if kind == "infrastructure" else counts.data >= 2
        assert isinstance(verdict, Drop if used_up else Retry)
        if isinstance(verdict, Drop):
            assert kind in verdict.reason
            assert "it broke" in verdict.reason
            return


def test_a_lost_replica_does_not_use_up_the_budget_for_bad_data():
    verdict = decide_retry(FailureCounts(infrastructure=5, data=0), "data", "sandbox timeout", RULES)
    assert verdict == Retry(counts=FailureCounts(infrastructure=5, data=1))


def test_a_reward_is_given_up_only_if_it_never_worked() -> None:
    assert not is_hopeless(num_scored=0, num_unscorable=HOPELESS_AFTER - 1)
    assert is_hopeless(num_scored=0, num_unscorable=HOPELESS_AFTER)
    assert not is_hopeless(num_scored=1, num_unscorable=10 * HOPELESS_AFTER)
