"""What happens when the model's turn is over: the environment replies, or the answer is graded."""

from laminar.rollout.ports import Environments, Grader, Tokenizer
from laminar.rollout.trajectory import EpisodeLimits, RunningTrajectory, model_turns, stop_reason
from laminar.schema.errors import UserError
from laminar.schema.trajectories import Finish, Grade, StopReason, Unscorable, response_ids
from laminar.tasks.protocol import Environment, EnvironmentLost, EpisodeFailed, Reply, Turn
from laminar.tasks.verdicts import as_grade
from laminar.telemetry.waits import Waits

MAX_REPLAYS = 3
"""An episode whose environment is lost so often in a row is taken for the cause."""


class Episodes:
    """Environments and rewards of the trajectories on one replica."""

    def __init__(
        self,
        *,
        limits: EpisodeLimits,
        tokenizer: Tokenizer,
        grader: Grader,
        environments: Environments | None,
        waits: Waits,
    ) -> None:
        self._limits = limits
        self._tokenizer = tokenizer
        self._grader = grader
        self._environments = environments
        self._waits = waits
        self._open: dict[str, Environment] = {}

    async def turn_over(self, trajectory: RunningTrajectory) -> Finish | None:
        """Let the environment reply (None: the model goes on), or grade the answer."""
        if self._environments is None:
            return await self._graded(trajectory, stop_reason(trajectory.pieces, self._limits))
        turns = model_turns(trajectory.pieces)
        if trajectory.num_tokens >= self._limits.max_new_tokens or len(turns) >= self._limits.max_turns:
            return await self._graded(trajectory, "length")
        reply = await self._reply(trajectory, turns)
        if isinstance(reply, Unscorable):
            return self._finish(trajectory, "environment", reply)
        try:
            ids = self._ids_of(reply, turns[-1])
        except UserError as error:  # its messages do not fit the model's chat template
            return self._finish(trajectory, "environment", Unscorable(reason=f"environment: {error}"))
        trajectory.reply(ids[: self._limits.max_new_tokens - trajectory.num_tokens])
        if not reply.done:
            return None
        if reply.grade is not None:
            return self._finish(trajectory, "environment", as_grade(reply.grade))
        return await self._graded(trajectory, "environment")

    def _ids_of(self, reply: Reply, turn: list[int]) -> tuple[int, ...]:
        if reply.messages:
            return self._tokenizer.encode_reply(reply.messages, after=turn)
        return self._tokenizer.encode_text(reply.text)

    def forget(self, trajectory_id: str) -> None:
        """The trajectory left this replica."""
        if (environment := self._open.pop(trajectory_id, None)) is not None:
            assert self._environments is not None, "it was made there"
            self._environments.forget(environment)

    async def _reply(self, trajectory: RunningTrajectory, turns: list[list[int]]) -> Reply | Unscorable:
        """The environment's answer to the last turn; one that is lost with others is played up to there again."""
        for _ in range(MAX_REPLAYS + 1):
            try:
                with self._waits.on(f"the environment of {trajectory.item.trajectory_id} to reply", of="environment"):
                    environment = await self._environment(trajectory, turns)
                    return await environment.act(Turn(self._tokenizer.decode(turns[-1]), turns[-1]))
            except EpisodeFailed as error:
                return Unscorable(reason=f"environment: {error}")
            except EnvironmentLost as error:
                lost = str(error)
                self.forget(trajectory.item.trajectory_id)
        return Unscorable(reason=f"environment lost {MAX_REPLAYS + 1} times: {lost}")

    async def _environment(self, trajectory: RunningTrajectory, turns: list[list[int]]) -> Environment:
        """The episode's environment; one that was lost with another replica is played up to the last turn again."""
        trajectory_id = trajectory.item.trajectory_id
        if trajectory_id not in self._open:
            assert self._environments is not None
            environment = self._environments.environment(trajectory.problem)
            self._open[trajectory_id] = environment
            for turn in turns[:-1]:
                await environment.act(Turn(self._tokenizer.decode(turn), turn))
        return self._open[trajectory_id]

    async def _graded(self, trajectory: RunningTrajectory, reason: StopReason) -> Finish:
        answer = self._tokenizer.decode(response_ids(trajectory.pieces))
        with self._waits.on(f"the reward of {trajectory.item.trajectory_id}", of="grader"):
            return self._finish(trajectory, reason, await self._grader.grade(trajectory.problem, answer))

    def _finish(self, trajectory: RunningTrajectory, reason: StopReason, grade: Grade) -> Finish:
        item = trajectory.item
        return Finish(trajectory_id=item.trajectory_id, attempt=item.attempt, stop_reason=reason, grade=grade)
