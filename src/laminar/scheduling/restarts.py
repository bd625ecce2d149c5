"""Whether a service that failed is started again, and how soon.

Invariants: the first failure after a stable time is followed by a new life at once, further ones in a row after waits
that double up to a bound; after `max_restarts` restarts in a row there is none.
"""

from typing import Final

from msgspec import Struct

STABLE_AFTER_S: Final = 60.0
"""A life that lasted so long was a success."""


class RestartRules(Struct, frozen=True, kw_only=True):
    """A life that lasted `stable_after_s` was a success: what fails after it fails for the first time."""

    max_restarts: int
    backoff_s: float
    max_backoff_s: float = 60.0
    stable_after_s: float = STABLE_AFTER_S


class Restart(Struct, frozen=True, kw_only=True):
    """Start again after `wait_s`; `failures` is how many lives in a row have failed."""

    failures: int
    wait_s: float


def after_failure(failures: int, lived_s: float, rules: RestartRules) -> Restart | None:
    """What to do after a life of `lived_s` that `failures` failed ones preceded; None: give up."""
    in_a_row = 1 if lived_s >= rules.stable_after_s else failures + 1
    if in_a_row > rules.max_restarts:
        return None
    wait_s = 0.0 if in_a_row == 1 else min(rules.backoff_s * 2.0 ** (in_a_row - 2), rules.max_backoff_s)
    return Restart(failures=in_a_row, wait_s=wait_s)
