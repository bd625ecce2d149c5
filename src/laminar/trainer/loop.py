"""The trainer: draw experience, update, publish, checkpoint, for every version.

Invariant: version n is what n iterations made of version 0. A checkpoint of version n is durable before the buffer
hears that the experience of the first n iterations is trained for good. So after a stop at any instant the newest
checkpoint and what the buffer gives out again fit together.

What the relay has does not enter into that. A version that has left the learner is shown while the next one is made; if
it is lost on the way, training goes on and a later version is shown. Only the first and the last one are insisted on.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from laminar.config.training import TrainerConfig
from laminar.insisting import insist
from laminar.schema.errors import PortError, RunFailed
from laminar.schema.trajectories import ExperienceGroup
from laminar.telemetry.events import Events
from laminar.telemetry.waits import Waits
from laminar.trainer.batch_facts import batch_facts, merge_metrics
from laminar.trainer.ports import (
    BufferPort,
    CheckpointStore,
    Learner,
    ManagerPort,
    RunBlocking,
    WeightSink,
    Written,
)

SAMPLE_SLICE_S = 1.0
"""One call to the buffer waits at most so long; then the trainer looks whether the relay still has its weights."""

RELAY_PROBE_S = 0.25
"""A relay that lives answers within milliseconds, so training waits no longer for one that does not."""

Answer = TypeVar("Answer")
Facts = dict[str, Any]


class TrainerLoop:
    """Makes one weight version after the other until there are `num_steps`.

    `evaluate_every` is the number of versions between two evaluations, None for no evaluation.
    """

    def __init__(
        self,
        rules: TrainerConfig,
        *,
        evaluate_every: int | None,
        learner: Learner,
        buffer: BufferPort,
        sink: WeightSink,
        manager: ManagerPort,
        checkpoints: CheckpointStore,
        events: Events,
        run_blocking: RunBlocking = asyncio.to_thread,
    ) -> None:
        self._rules = rules
        self._evaluate_every = evaluate_every
        self._learner = learner
        self._buffer = buffer
        self._sink = sink
        self._manager = manager
        self._checkpoints = checkpoints
        self._events = events
        self._waits = Waits("trainer", events)
        self._run_blocking = run_blocking
        self._showing: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Go on from the newest checkpoint, or begin with version 0.

        waits for:  complete groups <- replicas finish trajectories; ends: after `num_steps`, or with `RunFailed`
        """
        try:
            await self._make_versions()
        finally:
            if self._showing is not None:
                self._showing.cancel()
                await asyncio.gather(self._showing, return_exceptions=True)

    async def _make_versions(self) -> None:
        start = await self._restore()
        await self._publish(start)
        await self._evaluate_if_due(start)
        for version in range(start + 1, self._rules.num_steps + 1):
            learned = await self._learn(version)
            published = await self._publish_if_heard(version)
            self._events.emit("step", step=version, **learned, **published)
            await self._evaluate_if_due(version)
            await self._checkpoint_if_due(version)

    async def _restore(self) -> int:
        """Load the newest checkpoint; the buffer gives out again whatever was taken after it."""
        newest = await self._run_blocking(self._checkpoints.newest)
        step = newest.step if newest else 0
        if newest:
            await self._run_blocking(self._learner.restore, newest.path)
            await self._commit(step)
        await self._insist(lambda: self._buffer.rewind(step), on=f"rewind the data service to step {step}")
        self._events.emit("learner_loaded", step=step)
        return step

    async def _learn(self, version: int) -> Facts:
        """All mini-batch updates of one iteration; each takes the groups that are complete when its turn comes."""
        now_s = asyncio.get_running_loop().time
        wait_s = train_s = 0.0
        taken: list[ExperienceGroup] = []
        metrics: list[dict[str, float]] = []
        for part in range(self._rules.mini_batches):
            asked_s = now_s()
            groups = await self._draw(version, part)
            drawn_s = now_s()
            metrics.append(await self._run_blocking(self._learner.step, groups))
            wait_s += drawn_s - asked_s
            train_s += now_s() - drawn_s
            taken.extend(groups)
        facts = batch_facts(taken, learner_version=version - 1)
        return {"wait_s": wait_s, "train_s": train_s} | merge_metrics(metrics) | facts

    async def _draw(self, version: int, part: int) -> tuple[ExperienceGroup, ...]:
        """One mini-batch of complete groups, within `batch_deadline_s`."""
        now_s = asyncio.get_running_loop().time
        num_groups, deadline_s = self._rules.groups_per_mini_batch, self._rules.batch_deadline_s
        give_up_s = now_s() + deadline_s
        what = f"{num_groups} complete groups for mini-batch {part} of step {version}"
        with self._waits.on(what, of=("data", "replica"), deadline_s=deadline_s):
            while (left_s := give_up_s - now_s()) > 0:
                slice_s = min(SAMPLE_SLICE_S, left_s)
                groups = await insist(
                    partial(self._buffer.sample, version, part, num_groups, slice_s),
                    on=f"draw {what}",
                    deadline_s=left_s,
                    who="the trainer",
                )
                if groups:
                    return groups
                if part == 0:
                    await self._refill_relay(version - 1)
        raise RunFailed(
            f"the trainer waited {deadline_s:g} s (trainer.batch_deadline_s) for {what}, and the replicas did not "
            "finish them; nothing is lost, resume when generation works, with a longer deadline if it is merely slow"
        )

    async def _publish(self, version: int) -> Facts:
        """Have the fleet see this version, however long the relay takes to come back."""
        now_s = asyncio.get_running_loop().time
        began_s = now_s()
        tensors = await self._run_blocking(self._learner.tensors)
        with self._waits.on(f"version {version} to be published", of="relay", deadline_s=self._rules.batch_deadline_s):
            stall_s = await self._insist(
                lambda: self._offer(version, tensors), on=f"publish version {version} to the relay"
            )
        await self._tell_manager(version)
        return {"publish_s": now_s() - began_s, "stall_s": stall_s}

    async def _publish_if_heard(self, version: int) -> Facts:
        """Write the version to the relay and train on while it is made visible; or without it, if the relay does not
        answer: it is being restarted, and gets the next version.

        The last version is insisted on, as nothing else would follow.
        """
        now_s = asyncio.get_running_loop().time
        began_s = now_s()
        await self._settle()
        if version == self._rules.num_steps:
            return await self._publish(version)
        try:
            async with asyncio.timeout(RELAY_PROBE_S):
                await self._sink.newest()
        except (PortError, TimeoutError) as error:
            self._skip(version, error)
            return {"publish_s": now_s() - began_s, "stall_s": 0.0}
        tensors = await self._run_blocking(self._learner.tensors)
        with self._waits.on(f"version {version} to be written", of="relay", deadline_s=self._rules.batch_deadline_s):
            written = await self._insist(
                lambda: self._write(version, tensors), on=f"write version {version} to the relay"
            )
        self._showing = asyncio.create_task(self._show(version, written), name=f"show version {version}")
        return {"publish_s": now_s() - began_s, "stall_s": written.stall_s if written else 0.0}

    async def _offer(self, version: int, tensors: Mapping[str, Any]) -> float:
        """Publish, unless the relay has this version or later ones: the trainer was restarted and makes it again.

        So a replica never goes back to older weights, and a label never stands for two sets of them.
        """
        if await self._relay_has(version):
            return 0.0
        stall_s = await self._sink.publish(version, tensors)
        self._events.emit("published", version=version, stall_s=stall_s)
        return stall_s

    async def _write(self, version: int, tensors: Mapping[str, Any]) -> Written | None:
        """As `_offer`, but only the part for which the learner stands still."""
        return None if await self._relay_has(version) else await self._sink.write(version, tensors)

    async def _show(self, version: int, written: Written | None) -> None:
        """Make visible what has left the learner. Runs beside the next iteration; what fails here is not tried again,
        because the learner may have changed its weights by now."""
        if written is not None:
            try:
                async with asyncio.timeout(self._rules.batch_deadline_s):
                    await self._sink.complete(written)
            except (PortError, TimeoutError) as error:
                self._skip(version, error)
                return
            self._events.emit("published", version=version, stall_s=written.stall_s)
        await self._tell_manager(version)

    async def _settle(self) -> None:
        """Wait until the last version that was written can be seen, or is lost."""
        if self._showing is not None:
            with self._waits.on(
                "the last version to be published", of="relay", deadline_s=self._rules.batch_deadline_s
            ):
                await self._showing
            self._showing = None

    async def _tell_manager(self, version: int) -> None:
        """Training goes on also if it cannot be told."""
        try:
            await self._manager.published(version)
        except PortError as error:
            self._events.emit("command_failed", reason=f"the manager did not hear of version {version}: {error}")

    def _skip(self, version: int, error: Exception) -> None:
        self._events.emit("publish_skipped", version=version, reason=str(error) or "the relay gave no answer")

    async def _relay_has(self, version: int) -> bool:
        newest = await self._sink.newest()
        return newest is not None and newest >= version

    async def _refill_relay(self, version: int) -> None:
        """A relay that was restarted lacks this version, and replicas that wait for its weights finish no groups.

        Only before the first update of an iteration: after it the learner's weights are no version.
        """
        if self._showing is not None and not self._showing.done():
            return
        await self._settle()
        try:
            if not await self._relay_has(version):
                await self._publish(version)
        except PortError:
            return  # it is still down; the next look comes soon

    async def _evaluate_if_due(self, version: int) -> None:
        if self._evaluate_every is not None and self._is_due(version, self._evaluate_every):
            await self._insist(
                lambda: self._buffer.request_evaluation(version), on=f"ask for an evaluation of version {version}"
            )

    async def _checkpoint_if_due(self, version: int) -> None:
        """Make the learner's state durable, then let the buffer forget what led to it."""
        if not self._is_due(version, self._rules.checkpoint.every_steps):
            return
        now_s = asyncio.get_running_loop().time
        began_s = now_s()
        path = await self._run_blocking(self._checkpoints.save, version, self._learner.save)
        await self._commit(version)
        self._events.emit("checkpoint", step=version, path=str(path), seconds=now_s() - began_s)

    async def _commit(self, step: int) -> None:
        await self._insist(lambda: self._buffer.commit(step), on=f"tell the data service that step {step} is durable")

    def _is_due(self, version: int, every: int) -> bool:
        return version % every == 0 or version == self._rules.num_steps

    async def _insist(self, call: Callable[[], Awaitable[Answer]], *, on: str) -> Answer:
        return await insist(call, on=on, deadline_s=self._rules.batch_deadline_s, who="the trainer")
