"""What one claim gets; how much of it is decided in `scheduling.admission`.

Invariant: an evaluation that is due goes first, then what came back, then new prompts.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from laminar.data.evaluations import Evaluations
from laminar.data.experience_buffer import ExperienceBuffer
from laminar.data.ledger import Trajectory
from laminar.data.ports import DataRules
from laminar.data.prompt_pool import PromptPool
from laminar.scheduling.admission import AdmissionRules, AdmissionState, plan_issue
from laminar.scheduling.order import trajectory_seed
from laminar.scheduling.schedules import groups_allowed
from laminar.schema.trajectories import Batch, Purpose, WorkItem

UNBOUNDED = 1 << 62
"""Groups ahead, when the question is what a claim would draw if the buffer were not full."""


class Claims:
    """Fills claims from the pools."""

    def __init__(
        self, rules: DataRules, prompts: PromptPool, buffer: ExperienceBuffer, evaluations: Evaluations
    ) -> None:
        self._rules = rules
        self._prompts = prompts
        self._buffer = buffer
        self._evaluations = evaluations
        self._admission = AdmissionRules(max_groups_ahead=rules.max_groups_ahead, group_size=rules.group_size)

    @property
    def wait_for_completions(self) -> bool:
        """Whether a group that becomes complete may make room; else only what a step takes or a drop does."""
        return self._rules.schedule.waits_for_all or self._rules.eviction != "none"

    def fill(self, version: int, max_trajectories: int) -> tuple[Purpose, list[Trajectory]]:
        """Trajectories for a replica at `version`; none while there is no room. An evaluation comes as a whole."""
        if trajectories := self._evaluations.claim(version):
            return "evaluation", trajectories
        num_returned = self._prompts.num_returned(version)
        self._make_room(self._state(num_returned, version), max_trajectories)
        issue = plan_issue(self._state(num_returned, version), self._admission, max_trajectories)
        trajectories = self._prompts.take_returned(version, issue.num_returned)
        for group in self._prompts.draw(issue.num_new_groups):
            self._buffer.expect(group)
            trajectories += group.members
        return "training", trajectories

    def batch(self, trajectories: Sequence[Trajectory]) -> Batch:
        """Work items of trajectories that are in a lease."""
        return Batch(items=tuple(self._item(trajectory) for trajectory in trajectories))

    def _make_room(self, state: AdmissionState, max_trajectories: int) -> None:
        """Let the eviction drop ready groups if the buffer is all that keeps a claim from being filled."""
        unbounded = replace(self._admission, max_groups_ahead=UNBOUNDED)
        num_wanted = plan_issue(state, unbounded, max_trajectories).num_new_groups
        capacity = max(0, self._rules.max_groups_ahead - state.in_flight_groups - num_wanted)
        if num_wanted and state.ready_groups > capacity:
            self._buffer.evict(capacity)

    def _state(self, num_returned: int, version: int) -> AdmissionState:
        rules, num_ready, num_taken = self._rules, self._buffer.num_ready, self._buffer.num_taken
        return AdmissionState(
            in_flight_groups=self._buffer.num_in_flight,
            ready_groups=num_ready,
            taken_groups=num_taken,
            allowed_groups=groups_allowed(rules.schedule, version, num_ready + num_taken, rules.groups_per_step),
            total_groups=rules.total_groups,
            returned_trajectories=num_returned,
        )

    def _item(self, trajectory: Trajectory) -> WorkItem:
        row, group = trajectory.row, trajectory.group
        return WorkItem(
            trajectory_id=row.trajectory_id,
            group_id=group.row.group_id,
            attempt=row.attempt,
            prompt=group.prompt,
            pieces=trajectory.response.pieces(),
            version=trajectory.response.version,
            seed=trajectory_seed(self._rules.seed, group.row.position, row.member),
            purpose=group.row.purpose,
        )
