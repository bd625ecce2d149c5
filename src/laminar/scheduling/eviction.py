"""Which waiting groups make room for newer ones when the experience buffer is full.

An eviction is any function of this form, a user's own included (`data.eviction: module:function`):

    def eviction(ready: Sequence[ReadyGroup], capacity: int, learner_version: int) -> Evicted

Invariant: at most `capacity` groups stay, except under `none`, where claims wait instead (`admission`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from laminar.scheduling.sampling import ReadyGroup

Evicted = tuple[tuple[str, str], ...]
"""Group ids, each with the reason that goes into the ledger."""

Eviction = Callable[[Sequence[ReadyGroup], int, int], Evicted]


def none(ready: Sequence[ReadyGroup], capacity: int, learner_version: int) -> Evicted:
    """Drop nothing: the bound on groups ahead holds back new claims before the buffer overflows."""
    del ready, capacity, learner_version
    return ()


def oldest_version(ready: Sequence[ReadyGroup], capacity: int, learner_version: int) -> Evicted:
    """Drop the groups of the oldest versions beyond `capacity`; within one version what completed first goes first."""
    excess = len(ready) - capacity
    if excess <= 0:
        return ()
    oldest_first = sorted(ready, key=lambda group: (group.version, group.completed))
    return tuple(
        (group.group_id, f"buffer is full and version {group.version} is {learner_version - group.version} behind")
        for group in oldest_first[:excess]
    )


EVICTIONS: Final[Mapping[str, Eviction]] = {"none": none, "oldest_version": oldest_version}
