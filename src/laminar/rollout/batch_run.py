"""One batch from its first to its last token.

Invariant: every trajectory of the batch is either still here, or finished and told to the data shard, or fenced, or was
let go by `release`; a batch ends only when nothing is here any more.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

from msgspec import Struct

from laminar.engines.protocol import Engine, Output
from laminar.rollout.episodes import Episodes
from laminar.rollout.outbox import Outbox
from laminar.rollout.trajectory import EpisodeLimits, RunningTrajectory, next_step
from laminar.schema.trajectories import Purpose, Sampling, WorkItem

COALESCE_S = 0.02
"""Answers that finish within so long are told in one call; a call costs about a millisecond of CPU at either end."""


class StreamRules(Struct, frozen=True, kw_only=True):
    """How soon new tokens reach the partial response pool."""

    every_tokens: int
    every_s: float


class BatchRun:
    """The trajectories of one lease on this replica."""

    def __init__(
        self,
        *,
        lease_id: str,
        version: int,
        sampling: Mapping[Purpose, Sampling],
        engine: Engine,
        episodes: Episodes,
        outbox: Outbox,
        limits: EpisodeLimits,
        stream: StreamRules,
    ) -> None:
        self.lease_id = lease_id
        self.version = version
        self.num_started = 0
        self._sampling = sampling
        self._engine = engine
        self._episodes = episodes
        self._outbox = outbox
        self._limits = limits
        self._stream = stream
        self._here: dict[str, RunningTrajectory] = {}
        self._unsent: dict[str, RunningTrajectory] = {}
        self._acting: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._due = asyncio.Event()
        self._fewer = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._arriving = 0
        self._released = False

    @property
    def num_acting(self) -> int:
        """Trajectories whose turn is over and that wait for environment or grader."""
        return len(self._acting)

    @property
    def num_here(self) -> int:
        """Trajectories that are not finished."""
        return len(self._here)

    @property
    def is_open(self) -> bool:
        """Whether more trajectories may still join."""
        return not self._released and bool(self._here or self._arriving)

    def add(self, items: Sequence[WorkItem]) -> None:
        """Let trajectories join, new ones and those that others began."""
        self.num_started += len(items)
        arrivals = [RunningTrajectory(item, self.version) for item in items]
        self._here.update({t.item.trajectory_id: t for t in arrivals})
        if self._group is not None:
            self._go_on(arrivals)

    async def join(self, items: Sequence[WorkItem]) -> None:
        """Let trajectories join a batch that runs.

        One that is here already came back by way of a data shard that had forgotten who holds it: the newcomer counts.
        """
        await self._let_go([item.trajectory_id for item in items if item.trajectory_id in self._here])
        self.add(items)

    def expect(self, arriving: int) -> None:
        """Keep the batch open while `arriving` (+1) or no longer (-1) an adoption is under way."""
        self._arriving += arriving
        self._changed.set()

    async def until_few(self, most: int) -> None:
        """waits for:  at most so many trajectories to be here, or the batch to be closed"""
        while self.is_open and len(self._here) > most:
            self._fewer.clear()
            await self._fewer.wait()

    async def run(self) -> None:
        """Generate until nothing is left here and all of it is told.

        waits for:    the engine            <- a quantum of decoding ends
                      environment, grader   <- their tasks set `_changed`
        blocks on:    the data shard, once, when the batch ends
        """
        async with asyncio.TaskGroup() as group:
            self._group = group
            streamer = group.create_task(self._stream_partials())
            self._go_on(list(self._here.values()))
            while self._here or self._arriving:
                if self._engine_is_busy():
                    self._take(await self._engine.step())
                else:
                    self._changed.clear()
                    await self._changed.wait()
            streamer.cancel()
        await self._outbox.send()

    async def release(self) -> int:
        """Stop everything, tell the pool the last tokens, let all trajectories go; returns how many."""
        self._released = True
        for output in await self._engine.abort():
            self._record(output)
        for task in self._acting.values():
            task.cancel()
        unfinished = list(self._here.values())
        self._queue_unsent()
        await self._outbox.send()
        for trajectory in unfinished:
            self._drop(trajectory.item.trajectory_id)
        return len(unfinished)

    def _go_on(self, trajectories: Sequence[RunningTrajectory]) -> None:
        """Send each to the engine, or to environment and grader if its turn is over already."""
        if self._released:
            return
        requests = []
        for trajectory in trajectories:
            if next_step(trajectory.pieces, self._limits) == "generate":
                requests.append(trajectory.request(self._limits, self._sampling[trajectory.item.purpose]))
            else:
                self._begin_acting(trajectory)
        self._engine.submit(requests)
        self._changed.set()

    def _take(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            trajectory = self._record(output)
            if trajectory is not None and output.finish in {"stop", "length"}:
                self._begin_acting(trajectory)

    def _record(self, output: Output) -> RunningTrajectory | None:
        trajectory = self._here.get(output.request_id)
        if trajectory is not None and output.token_ids:
            trajectory.extend(output.token_ids, output.logprobs)
            self._unsent[output.request_id] = trajectory
            if trajectory.num_unsent >= self._stream.every_tokens:
                self._due.set()
        return trajectory

    def _begin_acting(self, trajectory: RunningTrajectory) -> None:
        assert self._group is not None, "trajectories go on only while the batch runs"
        task = self._group.create_task(self._act(trajectory))
        self._acting[trajectory.item.trajectory_id] = task

    async def _act(self, trajectory: RunningTrajectory) -> None:
        trajectory_id = trajectory.item.trajectory_id
        try:
            finish = await self._episodes.turn_over(trajectory)
        finally:
            self._acting.pop(trajectory_id, None)
        if finish is None:
            if trajectory.num_unsent:
                self._unsent[trajectory_id] = trajectory
            self._go_on([trajectory])
            return
        self._queue(trajectory)
        self._outbox.put(finish)
        self._due.set()
        self._drop(trajectory_id)

    async def _stream_partials(self) -> None:
        """Tell the pool what is new.

        waits for:    enough tokens or a finished answer   <- `_record`, `_act` set `_due`; or `every_s` passes
        ends:         cancelled by `run` when the batch is over
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._stream.every_s):
                    await self._due.wait()
            await asyncio.sleep(COALESCE_S)
            self._due.clear()
            self._queue_unsent()
            await self._let_go(await self._outbox.send())

    async def _let_go(self, fenced: Sequence[str]) -> None:
        """Trajectories that were given to somebody else meanwhile."""
        if fenced:
            await self._engine.abort(fenced)
        for trajectory_id in fenced:
            if task := self._acting.get(trajectory_id):
                task.cancel()
            self._drop(trajectory_id)

    def _queue_unsent(self) -> None:
        for trajectory in self._unsent.values():
            self._queue(trajectory)
        self._unsent.clear()

    def _queue(self, trajectory: RunningTrajectory) -> None:
        if update := trajectory.take_unsent():
            self._outbox.put(update)

    def _drop(self, trajectory_id: str) -> None:
        self._here.pop(trajectory_id, None)
        self._unsent.pop(trajectory_id, None)
        self._episodes.forget(trajectory_id)
        self._changed.set()
        self._fewer.set()

    def _engine_is_busy(self) -> bool:
        load = self._engine.load()
        return load.num_running + load.num_waiting > 0
