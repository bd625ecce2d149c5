"""Schedules: who may start, when weights change, and what trains next (paper §2, §8; Fig. 3).

All differences between the five are the values below. The loops ask the functions of this file and know no names.

    laminar    every trajectory at its own pace; the trainer takes what is complete
    sync       generate a whole step under the newest version, then train on it (verl, time-sharing)
    one_step   a whole step trains while the next one is generated, one version behind
    stream     as one_step, but a mini-batch trains as soon as it is complete
    partial    generate without a pause; a new version interrupts every answer, which goes on under it (AReaL)

Invariants: with `max_lag` no answer is begun more than that many versions before the step that it is for (groups are
numbered by the order in which they are drawn); with `waits_for_all` no answer of a step is begun before all groups of
the steps before are complete.
"""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from laminar.schema.schedule import ScheduleName


class Schedule(Struct, frozen=True, kw_only=True):
    """What may start when. Step n trains version n - 1 into version n.

    `max_lag`: a group of step n begins under version n - 1 - max_lag or a newer one; None: no bound.
    `waits_for_all`: the groups of a step begin when those of the steps before are complete.
    `trains_whole_steps`: the first mini-batch of a step waits for the groups of all of them.
    `refills`: a replica takes new work as answers finish, rather than when its batch is done.
    `interrupts`: a new version stops every answer, which then goes on under that version; else an answer has one.
    `repacks`: tails of batches may move between replicas.
    """

    max_lag: int | None = None
    waits_for_all: bool = False
    trains_whole_steps: bool = False
    refills: bool = False
    interrupts: bool = False
    repacks: bool = False


SCHEDULES: Final[Mapping[ScheduleName, Schedule]] = {
    "laminar": Schedule(repacks=True),
    "sync": Schedule(max_lag=0, trains_whole_steps=True),
    "one_step": Schedule(max_lag=1, waits_for_all=True, trains_whole_steps=True),
    "stream": Schedule(max_lag=1, waits_for_all=True),
    "partial": Schedule(refills=True, interrupts=True),
}
"""`partial` gets its bound, AReaL's eta, from the configuration (`schedule_named`)."""


def schedule_named(name: ScheduleName, max_lag: int | None = None) -> Schedule:
    """A schedule; `max_lag` replaces its own bound where it has none, and must be None where it has one."""
    schedule = SCHEDULES[name]
    if max_lag is None:
        return schedule
    if schedule.max_lag is not None:
        raise ValueError(f"schedule {name} has max_lag {schedule.max_lag} by definition")
    return replace(schedule, max_lag=max_lag)


def groups_allowed(schedule: Schedule, version: int, num_completed: int, groups_per_step: int) -> int | None:
    """Groups that may have been issued in all after a claim under `version`; None: any number.

    `num_completed` counts the groups that are complete, trained ones included.
    """
    bounds = []
    if schedule.max_lag is not None:
        bounds.append(groups_per_step * (version + 1 + schedule.max_lag))
    if schedule.waits_for_all:
        bounds.append(groups_per_step * (num_completed // groups_per_step + 1))
    return min(bounds, default=None)


def only_version(rank: int, groups_per_step: int) -> int:
    """With `max_lag` 0, the version of the answers to the group of this rank among those that were not dropped, from 0.

    An answer that comes back must wait for it where weights of older steps are about, as after a resume.
    """
    return rank // groups_per_step


def groups_needed(schedule: Schedule, part: int, num_groups: int, groups_per_step: int) -> int:
    """Complete groups that must be ready before mini-batch `part` of a step may draw its `num_groups`."""
    return groups_per_step if schedule.trains_whole_steps and part == 0 else num_groups
