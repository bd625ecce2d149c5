"""One data shard: prompt pool, partial response pool, experience buffer and ledger behind the calls of the neighbours.

Invariants: every call is idempotent; between two awaits the state is consistent, and what a call changed is one
operation in the journal. A call is answered when what it did survives the loss of this process, so a neighbour that got
no answer asks again, and nothing that was answered is forgotten; what the trainer gets survives the loss of power, too.

Resident are the tokens of all trajectories that are not settled: at most `max_groups_ahead` groups besides those that
steps took since the last durable checkpoint.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from msgspec import Struct

from laminar.data.claims import Claims
from laminar.data.evaluations import EvaluationResult, Evaluations
from laminar.data.experience_buffer import ExperienceBuffer, experience_group
from laminar.data.journal import Journal
from laminar.data.ledger import Group, Ledger
from laminar.data.partial_pool import PartialPool
from laminar.data.ports import DataRules, Events, Prompts
from laminar.data.progress import Progress
from laminar.data.prompt_pool import PromptPool
from laminar.data.rows import State
from laminar.data.signal import Signal
from laminar.scheduling.admission import is_outdated
from laminar.schema.errors import RunFailed, UserError
from laminar.schema.fleet import Lease
from laminar.schema.trajectories import Batch, ExperienceGroup, Update
from laminar.telemetry.waits import Waits


class Wait(Struct, frozen=True, kw_only=True):
    """A `sample` that waits: mini-batch `part` of `step` needs `num_groups` groups, since `since_s` of the run."""

    step: int
    part: int
    num_groups: int
    since_s: float


class Stragglers:
    """What the trainer's batch lacks, as a wait of the data service: it spans the short calls in which it is asked."""

    def __init__(self, events: Events) -> None:
        self._waits = Waits("data", events)
        self._open = ExitStack()
        self._what: str | None = None

    def awaited(self, what: str, holders: tuple[str, ...]) -> None:
        """A call ended in vain."""
        if what != self._what:
            self.come()
            self._open.enter_context(self._waits.on(what, of=holders))
            self._what = what

    def come(self) -> None:
        """The batch is complete."""
        self._open.close()
        self._what = None


class ShardStats(Struct, frozen=True, kw_only=True):
    """A shard at one moment; `counts` goes over all trajectories that were ever issued."""

    counts: dict[State, int]
    num_in_flight_groups: int
    num_ready_groups: int
    num_taken_groups: int
    num_leases: int
    partial_tokens: int
    buffered_tokens: int
    learner_version: int
    committed_step: int
    waits: tuple[Wait, ...]


class DataShard:
    """See the module; `rollout.ports.DataPort`, `trainer.ports.BufferPort` and `manager.ports.DataPort` in one."""

    def __init__(self, journal: Journal, prompts: Prompts, rules: DataRules, events: Events) -> None:
        """Take up whatever the journal holds. Needs a running event loop, whose clock is the only one."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        self._journal = journal
        self._rules = rules
        self._events = events
        self._room, self._ready, self._evaluated = Signal(), Signal(), Signal()
        self._waits: dict[tuple[int, int], Wait] = {}
        self._stragglers = Stragglers(events)
        self._is_finished = False
        self._num_completed = 0
        self._woken_for_version = 0
        self._fatal: asyncio.Future[UserError] = loop.create_future()
        with journal.rows() as rows:
            began_s = rows.position().now_s
            self._ledger = Ledger(journal, events, lambda: began_s + loop.time() - started_s)
            self._pool = PartialPool(
                self._ledger, keeps_partial=not rules.deterministic, mixes_versions=rules.schedule.interrupts
            )
            self._prompts = PromptPool(self._ledger, prompts, rules)
            self._buffer = ExperienceBuffer(self._ledger, rules)
            self._evaluations = Evaluations(self._ledger, prompts, rules, events)
            self._ledger.restore(rows, prompts)
            self._pool.restore(rows)
            self._prompts.restore()
            self._buffer.restore()
            self._evaluations.restore(rows)
        self._claims = Claims(rules, self._prompts, self._buffer, self._evaluations)
        self._progress = Progress(
            rules, self._ledger, self._pool, self._prompts, self._buffer, self._evaluations, events
        )

    @classmethod
    @asynccontextmanager
    async def open(
        cls, journal: Journal, prompts: Prompts, rules: DataRules, events: Events, resume_step: int | None = None
    ) -> AsyncIterator["DataShard"]:
        """A shard that owns its journal. With `resume_step` all its neighbours start anew from that checkpoint."""
        try:
            shard = cls(journal, prompts, rules, events)
            if resume_step is not None:
                await shard.resume(resume_step)
            yield shard
        finally:
            journal.close()

    async def run(self) -> None:
        """Raise what ends the run.

        waits for:  the journal to fail, a claim to find that no prompt is short enough, a reward that grades nothing;
                    else for ever
        """
        failed = asyncio.ensure_future(self._journal.failed())
        ends: list[asyncio.Future[Any]] = [failed, self._fatal]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            raise self._fatal.result() if self._fatal.done() else RunFailed(str(failed.exception()))
        finally:
            failed.cancel()
            self._stragglers.come()

    # ---- for replicas

    async def claim(self, lease_id: str, version: int, max_trajectories: int, wait_s: float) -> Batch:
        """Lease a batch: an evaluation that is due, else what came back and new groups; empty after `wait_s`.

        Also empty, at once, if a newer version was published while the claim waited: the replica then takes that
        version first. Asking again with the same lease returns what is unfinished of it.

        waits for:  room  <- a group is taken, dropped or comes back; an evaluation is requested
        """
        begins_at = self._ledger.position.learner_version

        def attempt() -> Batch | None:
            newest = self._ledger.position.learner_version
            if self._pool.purpose(lease_id) is None and is_outdated(version, begins_at, newest):
                return Batch()
            return self._try_claim(lease_id, version, max_trajectories)

        batch = await self._room.wait_for(attempt, wait_s) or Batch()
        await self._journal.committed()
        return batch

    async def stream(self, lease_id: str, updates: tuple[Update, ...]) -> tuple[str, ...]:
        """Record progress; returns the ids that the caller does not hold under this lease and attempt (any more).

        waits for:  the journal
        """
        fenced: dict[str, None] = {}
        for update in updates:
            trajectory = self._ledger.find(update.trajectory_id)
            holder = self._pool.holder_of(lease_id, trajectory, update.attempt)
            if holder is None or (holder.row.state == "running" and not self._progress.take_in(holder, update)):
                fenced[update.trajectory_id] = None
        if (why := self._progress.why_hopeless) is not None and not self._fatal.done():
            self._fatal.set_result(UserError(f"task: {why}"))
        self._write()
        await self._journal.committed()
        return tuple(fenced)

    async def adopt(self, from_lease: str, to_lease: str, version: int) -> Batch:
        """Move what is unfinished of a lease to another one, new or not, of the same version; each with attempt + 1.

        What cannot go on under `version` stays where it is.
        """
        if movable := self._pool.movable(from_lease, to_lease, version):
            self._pool.hand_over(movable, from_lease, to_lease, version)
            self._events.emit(
                "adopted",
                from_lease=from_lease,
                to_lease=to_lease,
                version=version,
                num_trajectories=len(movable),
                num_tokens=sum(trajectory.response.num_tokens for trajectory in movable),
            )
            self._write()
        adopted = self._pool.adopted(from_lease, to_lease, version)
        await self._journal.committed()
        return self._claims.batch(adopted)

    # ---- for the manager

    async def leases(self) -> tuple[Lease, ...]:
        """All leases with unfinished trajectories."""
        return self._pool.live()

    async def start_over(self, lease_id: str) -> None:
        """Put the unfinished trajectories of a lost lease back, their answers discarded."""
        for trajectory in self._pool.held(lease_id):
            self._progress.fail(trajectory, "infrastructure", f"lease {lease_id} was lost")
        self._write()
        await self._journal.committed()

    # ---- for the trainer

    async def sample(self, step: int, part: int, num_groups: int, wait_s: float) -> tuple[ExperienceGroup, ...]:
        """Draw complete groups for a mini-batch; () after `wait_s`. Asking again returns the same ones.

        waits for:  complete groups  <- their last member finishes or is dropped; then the journal
        """
        self._learner_is_at(step - 1)
        since_s = self._ledger.now_s()
        self._waits[step, part] = Wait(step=step, part=part, num_groups=num_groups, since_s=since_s)
        try:
            groups = await self._ready.wait_for(lambda: self._try_sample(step, part, num_groups), wait_s)
        finally:
            self._waits.pop((step, part), None)
        if groups is None:
            self._stragglers.awaited(*self._buffer.oldest_in_flight(self._pool.holders))
            return ()
        self._stragglers.come()
        await self._journal.durable()
        return tuple(experience_group(group) for group in groups)

    async def commit(self, step: int) -> None:
        """What iterations up to `step` took is trained for good; returns when that is durable."""
        self._buffer.commit(step)
        self._write()
        await self._journal.durable()

    async def rewind(self, step: int) -> None:
        """The learner restarts after iteration `step`: what later ones took is ready again."""
        self._go_back(step)
        self._write()
        self._ready.fire()
        await self._journal.durable()

    async def request_evaluation(self, version: int) -> None:
        """Have the held-out prompts answered by the next replica that claims at `version` or newer."""
        self._evaluations.request(version)
        self._write()
        await self._journal.committed()

    async def evaluation(self, version: int, wait_s: float) -> EvaluationResult | None:
        """What was asked for `version`; None if it is not there after `wait_s`.

        waits for:  the last answer of the evaluation
        """
        return await self._evaluated.wait_for(lambda: self._evaluations.result(version), wait_s)

    # ---- for whoever runs the shard

    async def resume(self, checkpoint_step: int) -> None:
        """Go on from a durable checkpoint, with new replicas and a new learner.

        What it covers is trained, what later steps took is ready again. Answers that were under way wait to be claimed;
        their tokens are kept if the version that drew them is the one that the run goes on with.
        """
        reason = f"trained after step {checkpoint_step}, from which the run was resumed"
        self._ledger.lose_steps(checkpoint_step, reason)
        self._buffer.commit(checkpoint_step)
        self._ledger.advance(committed_step=checkpoint_step)
        self._go_back(checkpoint_step)
        for group in list(self._ledger.groups.values()):
            for trajectory in group.in_state("running", "waiting"):
                keep_tokens = not self._rules.deterministic and trajectory.response.version == checkpoint_step
                if trajectory.row.state == "running":
                    self._pool.give_back(trajectory, "returned: the run was resumed", keep_tokens=keep_tokens)
                elif not keep_tokens and trajectory.response.num_tokens:
                    self._ledger.draw_anew(trajectory)
            self._prompts.returned(group)
        self._pool.forget_leases()
        self._write()
        await self._journal.durable()

    async def finish_run(self, reason: str) -> None:
        """The run is over: whatever is neither trained nor taken is dropped, and claims bring nothing any more."""
        self._is_finished = True
        for group in list(self._ledger.groups.values()):
            if group.row.purpose == "training":
                for trajectory in group.in_state("waiting", "running"):
                    self._pool.drop(trajectory, reason)
        self._buffer.drop_all(reason)
        self._evaluations.give_up_all(lambda trajectory: self._pool.drop(trajectory, reason))
        self._write()
        await self._journal.durable()

    async def stats(self) -> ShardStats:
        """Counts of this moment."""
        groups = self._ledger.groups.values()
        running = [t for group in groups for t in group.in_state("running", "waiting")]
        buffered = [t for group in groups for t in group.in_state("finished", "taken")]
        return ShardStats(
            counts={state: num for state, num in self._ledger.counts.items() if num},
            num_in_flight_groups=self._buffer.num_in_flight,
            num_ready_groups=self._buffer.num_ready,
            num_taken_groups=self._buffer.num_taken,
            num_leases=len(self._pool.live()),
            partial_tokens=sum(trajectory.response.num_tokens for trajectory in running),
            buffered_tokens=sum(trajectory.response.num_tokens for trajectory in buffered),
            learner_version=self._ledger.position.learner_version,
            committed_step=self._ledger.position.committed_step,
            waits=tuple(self._waits.values()),
        )

    # ---- operations

    def _try_claim(self, lease_id: str, version: int, max_trajectories: int) -> Batch | None:
        if self._pool.purpose(lease_id) is not None:
            return self._claims.batch(self._pool.held(lease_id))
        if self._is_finished:
            return None
        try:
            purpose, trajectories = self._claims.fill(version, max_trajectories)
        except UserError as error:
            if not self._fatal.done():
                self._fatal.set_result(error)
            raise
        if trajectories:
            self._pool.lend(lease_id, version, purpose, trajectories)
            self._events.emit(
                "claimed", lease_id=lease_id, version=version, num_trajectories=len(trajectories), purpose=purpose
            )
        self._write()
        return self._claims.batch(trajectories) if trajectories else None

    def _try_sample(self, step: int, part: int, num_groups: int) -> list[Group] | None:
        known = self._buffer.taken(step, part)
        groups = known or self._buffer.draw(step, part, num_groups)
        if groups is not None and known is None:
            self._events.emit(
                "taken",
                step=step,
                part=part,
                groups=[group.row.group_id for group in groups],
                staleness_mean=self._buffer.staleness_mean(groups),
            )
        self._write()
        return groups

    def _learner_is_at(self, version: int) -> None:
        self._ledger.advance(learner_version=max(version, self._ledger.position.learner_version))

    def _go_back(self, step: int) -> None:
        self._buffer.rewind(step)
        reason = f"its weights were lost when the run went back to step {step}"
        self._evaluations.void_after(step, lambda trajectory: self._pool.drop(trajectory, reason))
        self._ledger.advance(learner_version=step)

    def _write(self) -> None:
        """End the operation: queue it for the journal, wake who may go on."""
        entered = self._ledger.write()
        position = self._ledger.position
        has_completed = position.num_completed > self._num_completed
        is_newer = position.learner_version != self._woken_for_version
        self._num_completed, self._woken_for_version = position.num_completed, position.learner_version
        makes_room = has_completed and self._claims.wait_for_completions
        came_back = "waiting" in entered and "running" not in entered  # else a claim lends what it has just issued
        if makes_room or is_newer or came_back or entered & {"dropped", "taken"}:
            self._room.fire()
        if has_completed or "dropped" in entered:
            self._ready.fire()
        if entered & {"evaluated", "dropped"}:
            self._evaluated.fire()
