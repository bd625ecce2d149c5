"""How much a claim may draw: the back-pressure from the trainer to the replicas.

Invariants: groups in flight plus groups ready for the trainer never exceed `max_groups_ahead` through a draw; a run
never issues more groups than its steps can train; trajectories that came back are issued before new prompts.

What this bounds. Let A = `max_groups_ahead` and S = groups per iteration, with the `fifo` sampler. When a group
completes, at most A - 1 others are ready, and none that completes later overtakes it; every iteration takes S. For k
versions to be published before the group is taken, the k - 1 iterations that lie wholly in between must have taken
(k - 1) S of those A - 1 groups, so k <= (A - 1) // S + 1 (`max_buffer_wait`). The staleness of what is trained is
therefore at most its inherent staleness (versions published while it was generated, which only the longest answer and
the trainer's speed determine; paper §6) plus that bound. Without the rule the second part would grow for as long as
replicas are faster than the trainer. Memory is bounded with it: A x group_size trajectories.
"""

from msgspec import Struct


class AdmissionRules(Struct, frozen=True, kw_only=True):
    """`max_groups_ahead` is the bound A; `group_size` the trajectories of one prompt."""

    max_groups_ahead: int
    group_size: int


class AdmissionState(Struct, frozen=True, kw_only=True):
    """Counts of groups at one instant; a group that was dropped counts nowhere, so another one takes its place.

    `in_flight_groups` were issued and are not complete, `returned_trajectories` are members of them that nobody runs,
    `ready_groups` are complete and wait, `taken_groups` went to the trainer, `total_groups` is what the whole run
    trains (None: no end), `allowed_groups` what the schedule lets be issued until now (None: any number).
    """

    in_flight_groups: int
    ready_groups: int
    taken_groups: int
    total_groups: int | None = None
    allowed_groups: int | None = None
    returned_trajectories: int = 0


class Issue(Struct, frozen=True, kw_only=True):
    """What one claim gets: trajectories that came back, then groups of new prompts."""

    num_returned: int
    num_new_groups: int


def plan_issue(state: AdmissionState, rules: AdmissionRules, asked_trajectories: int) -> Issue:
    """Fill a claim with returned trajectories first: their prompts were drawn long ago, and their groups wait for them.

    New groups are whole ones only, at least one if the bounds allow any and a group fits into what was asked.

    The returned ones are in flight already, so no bound holds them back.
    """
    num_returned = min(state.returned_trajectories, max(0, asked_trajectories))
    fitting = (asked_trajectories - num_returned) // rules.group_size
    return Issue(num_returned=num_returned, num_new_groups=max(0, min(fitting, _room(state, rules))))


def _room(state: AdmissionState, rules: AdmissionRules) -> int:
    """Groups that may be added; negative after a rewind put taken groups back."""
    ahead = state.in_flight_groups + state.ready_groups
    room = rules.max_groups_ahead - ahead
    for bound in (state.total_groups, state.allowed_groups):
        if bound is not None:
            room = min(room, bound - state.taken_groups - ahead)
    return room


def is_outdated(version: int, published_before: int, published_now: int) -> bool:
    """Whether a claim under `version` waited so long that the learner published a newer one meanwhile.

    Room appears when the trainer takes a batch, which is just after a publish; without this rule whoever waited would
    begin under the version before. A claim that need not wait is never outdated, so a replica whose relay lags behind
    is not sent round in circles.
    """
    return version < published_now and published_before < published_now


def max_buffer_wait(max_groups_ahead: int, groups_per_step: int) -> int:
    """Versions published at most between a group's completion and its training, under `fifo` (proof above)."""
    return (max_groups_ahead - 1) // groups_per_step + 1
