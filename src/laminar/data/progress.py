"""What becomes of a running trajectory when its holder reports, or is lost.

Invariant: a report moves its trajectory on, gives it back, or drops it with a reason; whether a failure is tried again
is decided in `scheduling.retries`.
"""

import math

from laminar.data.evaluations import Evaluations
from laminar.data.experience_buffer import ExperienceBuffer
from laminar.data.ledger import Ledger, Trajectory
from laminar.data.partial_pool import PartialPool
from laminar.data.ports import DataRules, Events
from laminar.data.prompt_pool import PromptPool
from laminar.data.responses import Refused
from laminar.scheduling.retries import FailureCounts, FailureKind, Retry, RetryRules, decide_retry, is_hopeless
from laminar.schema.trajectories import Append, Finish, Scored, Unscorable, Update

EVALUATION_RETRIES = RetryRules(data_failures=1)
"""An evaluation is one batch under one version, which nobody may hold any more when a second try is due; its result
says how many answers could be graded."""


class Progress:
    """Moves running trajectories on."""

    def __init__(
        self,
        rules: DataRules,
        ledger: Ledger,
        pool: PartialPool,
        prompts: PromptPool,
        buffer: ExperienceBuffer,
        evaluations: Evaluations,
        events: Events,
    ) -> None:
        self._ledger = ledger
        self._pool = pool
        self._prompts = prompts
        self._buffer = buffer
        self._evaluations = evaluations
        self._events = events
        self._retries = RetryRules(data_failures=rules.data_failures)
        self._num_scored = self._num_unscorable = 0
        self._last_reason = ""

    @property
    def why_hopeless(self) -> str | None:
        """What is wrong with the reward, if it has not graded a single answer since the start; else None."""
        if not is_hopeless(self._num_scored, self._num_unscorable):
            return None
        num = self._num_unscorable
        return f"none of the first {num} answers could be graded, the last one because {self._last_reason}"

    def take_in(self, trajectory: Trajectory, update: Update) -> bool:
        """Whether the caller still holds the trajectory afterwards, or has finished it."""
        match update:
            case Append():
                try:
                    self._pool.append(trajectory, update)
                except Refused as refusal:
                    self.fail(trajectory, "infrastructure", str(refusal))
                    return False
            case Finish(grade=Unscorable(reason=reason)):
                self._cannot_score(trajectory, reason)
            case Finish(grade=Scored(reward=reward)) if not math.isfinite(reward):
                self._cannot_score(trajectory, f"the reward is {reward}")
            case Finish(grade=Scored() as grade):
                self._num_scored += 1
                self._finish(trajectory, update, grade)
        return True

    def fail(self, trajectory: Trajectory, kind: FailureKind, detail: str) -> None:
        """The trajectory waits to be claimed anew, or is dropped."""
        row, group = trajectory.row, trajectory.group
        counts = FailureCounts(infrastructure=row.infrastructure_failures, data=row.data_failures)
        rules = self._retries if group.row.purpose == "training" else EVALUATION_RETRIES
        match decide_retry(counts, kind, detail, rules):
            case Retry(counts=now):
                self._pool.give_back(
                    trajectory,
                    f"returned: {detail}",
                    keep_tokens=False,
                    infrastructure_failures=now.infrastructure,
                    data_failures=now.data,
                )
                self._prompts.returned(group)
            case drop:
                self._pool.drop(trajectory, drop.reason)
                self._member_done(trajectory)

    def _cannot_score(self, trajectory: Trajectory, reason: str) -> None:
        self._num_unscorable += 1
        self._last_reason = reason
        self.fail(trajectory, "data", reason)

    def _finish(self, trajectory: Trajectory, finish: Finish, grade: Scored) -> None:
        learner_version, group = self._ledger.position.learner_version, trajectory.group.row
        version = self._pool.lease_of(trajectory).version
        # A learner that was rewound is behind replicas that still hold what it had published.
        staleness = max(0, learner_version - version)
        self._pool.finish(
            trajectory,
            "finished" if group.purpose == "training" else "evaluated",
            reward=grade.reward,
            metrics=grade.metrics,
            stop_reason=finish.stop_reason,
            learner_version=learner_version,
            staleness=staleness,
            finished_s=self._ledger.now_s(),
        )
        self._events.emit(
            "trajectory",
            trajectory_id=finish.trajectory_id,
            group_id=group.group_id,
            version=version,
            staleness=staleness,
            tokens=trajectory.row.num_generated,
            reward=grade.reward,
            purpose=group.purpose,
            attempt=finish.attempt,
            stop_reason=finish.stop_reason,
        )
        self._member_done(trajectory)

    def _member_done(self, trajectory: Trajectory) -> None:
        self._buffer.member_done(trajectory.group)
        self._evaluations.member_done(trajectory.group)
