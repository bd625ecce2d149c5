"""What happens when the model's turn is over: the environment replies, or the answer is graded."""

import asyncio

from laminar.rollout.ports import Environments, Grader, Tokenizer
from laminar.rollout.trajectory import EpisodeLimits, RunningTrajectory, model_turns, stop_reason
from laminar.schema.trajectories import Finish, Grade, StopReason, Unscorable, response_ids
from laminar.tasks.protocol import Environment, Reply


class Episodes:
    """Environments and rewards of the trajectories on one replica."""

    def __init__(
        self,
        *,
        limits: EpisodeLimits,
        tokenizer: Tokenizer,
        grader: Grader,
        environments: Environments | None,
        act_timeout_s: float,
    ) -> None:
        self._limits = limits
        self._tokenizer = tokenizer
        self._grader = grader
        self._environments = environments
        self._act_timeout_s = act_timeout_s
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
        room = self._limits.max_new_tokens - trajectory.num_tokens
        trajectory.reply(self._tokenizer.encode_text(reply.text)[:room])
        if reply.done:
            return await self._graded(trajectory, "environment")
        return None

    def forget(self, trajectory_id: str) -> None:
        """The trajectory left this replica."""
        self._open.pop(trajectory_id, None)

    async def _reply(self, trajectory: RunningTrajectory, turns: list[list[int]]) -> Reply | Unscorable:
        """The environment's answer to the last turn; what user code raises is a fact about this episode."""
        try:
            async with asyncio.timeout(self._act_timeout_s):
                environment = await self._environment(trajectory, turns)
                return await environment.act(self._tokenizer.decode(turns[-1]))
        except TimeoutError:
            return Unscorable(reason=f"environment gave no reply within {self._act_timeout_s:g} s")
        except Exception as error:  # noqa: BLE001 - the boundary to user code
            return Unscorable(reason=f"environment raised {type(error).__name__}: {error}")

    async def _environment(self, trajectory: RunningTrajectory, turns: list[list[int]]) -> Environment:
        """The episode's environment; one that was lost with another replica is played up to the last turn again."""
        trajectory_id = trajectory.item.trajectory_id
        if trajectory_id not in self._open:
            assert self._environments is not None
            environment = self._environments.environment(trajectory.problem)
            for turn in turns[:-1]:
                await environment.act(self._tokenizer.decode(turn))
            self._open[trajectory_id] = environment
        return self._open[trajectory_id]

    async def _graded(self, trajectory: RunningTrajectory, reason: StopReason) -> Finish:
        answer = self._tokenizer.decode(response_ids(trajectory.pieces))
        return self._finish(trajectory, reason, await self._grader.grade(trajectory.problem, answer))

    def _finish(self, trajectory: RunningTrajectory, reason: StopReason, grade: Grade) -> Finish:
        item = trajectory.item
        return Finish(trajectory_id=item.trajectory_id, attempt=item.attempt, stop_reason=reason, grade=grade)
