"""Which complete groups train next (paper §6: any strategy; FIFO in its experiments).

A sampler is any function of this form, a user's own included (`data.sampler: module:function`):

    def sampler(ready: Sequence[ReadyGroup], num_groups: int, learner_version: int, rules: SamplingRules) -> Draw

Invariants (`check_draw`): a draw picks exactly `num_groups` of the ready groups or none; what it drops leaves the
buffer whether or not it picked; nothing is picked twice or picked and dropped.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from msgspec import Struct


class ReadyGroup(Struct, frozen=True, kw_only=True):
    """A complete group as a sampler sees it.

    `version` is the oldest that generated one of its members, `completed` its place in the order of completion,
    `rewards` those of its gradable members, `position` its prompt's place in the order of prompts.
    """

    group_id: str
    version: int
    completed: int
    rewards: tuple[float, ...] = ()
    position: int = 0


class SamplingRules(Struct, frozen=True, kw_only=True):
    """`max_staleness`: learner version minus group version at which `bounded_staleness` still trains a group."""

    max_staleness: int | None = None


class Draw(Struct, frozen=True, kw_only=True):
    """Ids to train on, and ids to drop each with the reason."""

    picked: tuple[str, ...] = ()
    dropped: tuple[tuple[str, str], ...] = ()


Sampler = Callable[[Sequence[ReadyGroup], int, int, SamplingRules], Draw]


def fifo(ready: Sequence[ReadyGroup], num_groups: int, learner_version: int, rules: SamplingRules) -> Draw:
    """In order of completion: nothing waits longer than `admission.max_buffer_wait` iterations."""
    del learner_version, rules
    return Draw(picked=_first(sorted(ready, key=_by_completion), num_groups))


def prompt_order(ready: Sequence[ReadyGroup], num_groups: int, learner_version: int, rules: SamplingRules) -> Draw:
    """In the order of prompts, among those that are complete: where all of a step are awaited, always the same."""
    del learner_version, rules
    return Draw(picked=_first(sorted(ready, key=lambda group: group.position), num_groups))


def freshest(ready: Sequence[ReadyGroup], num_groups: int, learner_version: int, rules: SamplingRules) -> Draw:
    """Newest version first, then in order of completion. Old groups may wait for ever; pair it with an eviction."""
    del learner_version, rules
    return Draw(picked=_first(sorted(ready, key=lambda group: (-group.version, group.completed)), num_groups))


def bounded_staleness(ready: Sequence[ReadyGroup], num_groups: int, learner_version: int, rules: SamplingRules) -> Draw:
    """In order of completion, after dropping what is more than `max_staleness` versions behind the learner."""
    bound = rules.max_staleness
    if bound is None:
        raise ValueError("the sampler bounded_staleness needs data.max_staleness")
    kept = [group for group in ready if learner_version - group.version <= bound]
    dropped = tuple(
        (group.group_id, f"version {group.version} is {learner_version - group.version} behind, allowed are {bound}")
        for group in sorted(ready, key=_by_completion)
        if learner_version - group.version > bound
    )
    return Draw(picked=_first(sorted(kept, key=_by_completion), num_groups), dropped=dropped)


def by_priority(key: Callable[[ReadyGroup], float]) -> Sampler:
    """Make a sampler that takes the groups with the largest key, equal ones in order of completion."""

    def sampler(ready: Sequence[ReadyGroup], num_groups: int, learner_version: int, rules: SamplingRules) -> Draw:
        del learner_version, rules
        return Draw(picked=_first(sorted(ready, key=lambda group: (-key(group), group.completed)), num_groups))

    return sampler


def reward_spread(group: ReadyGroup) -> float:
    """Largest minus smallest reward: 0 if all answers did equally well, and a group-relative loss learns nothing."""
    return max(group.rewards) - min(group.rewards) if group.rewards else 0.0


SAMPLERS: Final[Mapping[str, Sampler]] = {
    "fifo": fifo,
    "prompt_order": prompt_order,
    "freshest": freshest,
    "bounded_staleness": bounded_staleness,
    "priority": by_priority(reward_spread),
}


def check_draw(draw: Draw, ready: Sequence[ReadyGroup], num_groups: int) -> None:
    """Raise ValueError, with a sentence for the author of a sampler, if a draw breaks the invariants above."""
    known = {group.group_id for group in ready}
    named = [*draw.picked, *(group_id for group_id, _ in draw.dropped)]
    unknown = sorted(set(named) - known)
    if unknown:
        raise ValueError(f"the sampler named groups that are not ready: {', '.join(unknown[:3])}")
    if len(set(named)) < len(named):
        raise ValueError("the sampler named a group twice, or picked and dropped the same one")
    if len(draw.picked) not in (0, num_groups):
        raise ValueError(f"the sampler picked {len(draw.picked)} groups; it must pick {num_groups} or none")


def _by_completion(group: ReadyGroup) -> int:
    return group.completed


def _first(ordered: Sequence[ReadyGroup], num_groups: int) -> tuple[str, ...]:
    """The first groups, or none while there are too few for a draw."""
    if len(ordered) < num_groups:
        return ()
    return tuple(group.group_id for group in ordered[:num_groups])
