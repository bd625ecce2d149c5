"""Whether a trajectory that failed is tried again: two budgets for two kinds of failure.

Invariants: a failure of the infrastructure never uses up the budget for bad data, nor the reverse; every trajectory is
retried a bounded number of times, so none can circulate for ever.

- *infrastructure*: the replica, its machine or a connection was lost, or a deadline passed. It says nothing about the
  trajectory, so the budget is generous. It still ends: a trajectory that crashes whoever runs it looks like this.
- *data*: the reward could not be computed, or the environment refused. Likely to happen again, so there are few tries.
"""

from typing import Literal

from msgspec import Struct

FailureKind = Literal["infrastructure", "data"]


class RetryRules(Struct, frozen=True, kw_only=True):
    """Failures of each kind at which a trajectory is dropped."""

    infrastructure_failures: int = 20
    """All trajectories of a replica fail with it, hundreds of innocent ones for each culprit: 20 deaths of replicas
    under one trajectory do not happen by chance."""
    data_failures: int = 2


class FailureCounts(Struct, frozen=True, kw_only=True):
    """Failures of one trajectory so far."""

    infrastructure: int = 0
    data: int = 0


HOPELESS_AFTER = 64
"""Answers that could not be graded, before the first that could; a reward that works now and then does so sooner."""


class Retry(Struct, frozen=True, kw_only=True):
    """Try again; `counts` replace the old ones."""

    counts: FailureCounts


class Drop(Struct, frozen=True, kw_only=True):
    """Give up, with the reason for the ledger."""

    counts: FailureCounts
    reason: str


def decide_retry(counts: FailureCounts, kind: FailureKind, detail: str, rules: RetryRules) -> Retry | Drop:
    """Count one more failure and say whether the trajectory is tried again. `detail` says what happened this time."""
    if kind == "infrastructure":
        now = FailureCounts(infrastructure=counts.infrastructure + 1, data=counts.data)
        failed, allowed = now.infrastructure, rules.infrastructure_failures
    else:
        now = FailureCounts(infrastructure=counts.infrastructure, data=counts.data + 1)
        failed, allowed = now.data, rules.data_failures
    if failed < allowed:
        return Retry(counts=now)
    return Drop(counts=now, reason=f"{failed} {kind} failures, the last one: {detail}")


def is_hopeless(num_scored: int, num_unscorable: int) -> bool:
    """Whether the reward itself is broken, rather than some answers odd: nothing was ever graded.

    The run then ends with the reason, instead of dropping one prompt after the other until the trainer gives up.
    """
    return num_scored == 0 and num_unscorable >= HOPELESS_AFTER
