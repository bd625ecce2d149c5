"""The trainer loop against small neighbours that really do what the ports say, in memory."""

import asyncio
import itertools
import json
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

from laminar.config.training import TrainerConfig
from laminar.schema.errors import PeerLost, RunFailed
from laminar.schema.tokens import pack_ids, pack_logprobs
from laminar.schema.trajectories import Experience, ExperienceGroup, Piece, Prompt
from laminar.telemetry.vocabulary import problem
from laminar.trainer.checkpoints import Checkpoints
from laminar.trainer.loop import TrainerLoop


def one_group(number: int) -> ExperienceGroup:
    piece = Piece(token_ids=pack_ids([1, 2]), logprobs=pack_logprobs([-1, -1]), generated=True, version=0)
    members = tuple(
        Experience(
            trajectory_id=f"{number}/{index}",
            pieces=(piece,),
            reward=float(index),
            metrics={},
            stop_reason="stop",
            version=0,
            staleness=0,
        )
        for index in range(2)
    )
    prompt = Prompt(prompt_id=str(number), token_ids=(1,), payload={})
    return ExperienceGroup(group_id=f"group-{number}", prompt=prompt, members=members)


class MemoryBuffer:
    """Makes groups without end; remembers what each step took until it is committed or taken back."""

    def __init__(self) -> None:
        self.taken: dict[tuple[int, int], tuple[ExperienceGroup, ...]] = {}
        self.returned: list[ExperienceGroup] = []
        self.trained: set[str] = set()
        self.evaluations: list[int] = []
        self.ready = asyncio.Event()
        self.ready.set()
        self.num_lost_calls = 0
        self._numbers = itertools.count()

    def _lose_a_call(self) -> None:
        if self.num_lost_calls > 0:
            self.num_lost_calls -= 1
            raise PeerLost("the data service restarts")

    async def sample(self, step: int, part: int, num_groups: int, wait_s: float) -> tuple[ExperienceGroup, ...]:
        self._lose_a_call()
        try:
            async with asyncio.timeout(wait_s):
                await self.ready.wait()
        except TimeoutError:
            return ()
        if (step, part) not in self.taken:
            fresh = (
                self.returned.pop(0) if self.returned else one_group(next(self._numbers)) for _ in range(num_groups)
            )
            self.taken[step, part] = tuple(fresh)
        return self.taken[step, part]

    async def commit(self, step: int) -> None:
        self._lose_a_call()
        for key in [key for key in self.taken if key[0] <= step]:
            self.trained |= {group.group_id for group in self.taken.pop(key)}

    async def rewind(self, step: int) -> None:
        self._lose_a_call()
        for key in sorted(key for key in self.taken if key[0] > step):
            self.returned.extend(self.taken.pop(key))

    async def request_evaluation(self, version: int) -> None:
        self._lose_a_call()
        self.evaluations.append(version)


class CountingLearner:
    """Its only weight is the list of the groups that it was trained on."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def step(self, groups) -> dict[str, float]:
        self.seen += [group.group_id for group in groups]
        return {"loss": 0.5, "lr": 1e-3, "trained_tokens": 4}

    def tensors(self) -> dict[str, list[str]]:
        return {"seen": list(self.seen)}

    def save(self, folder: Path) -> None:
        (folder / "seen.json").write_text(json.dumps(self.seen))

    def restore(self, folder: Path) -> None:
        self.seen = json.loads((folder / "seen.json").read_text())


class MemorySink:
    def __init__(self) -> None:
        self.lost = False
        self.published: dict[int, dict] = {}
        self.reached: dict[int, asyncio.Event] = defaultdict(asyncio.Event)

    async def newest(self) -> int | None:
        if self.lost:
            raise PeerLost("the relay restarts")
        return max(self.published, default=None)

    async def publish(self, version: int, tensors) -> float:
        written = await self.write(version, tensors)
        await self.complete(written)
        return written.stall_s

    async def write(self, version: int, tensors) -> "MemoryWritten":
        if self.lost:
            raise PeerLost("the relay restarts")
        return MemoryWritten(version, dict(tensors))

    async def complete(self, written: "MemoryWritten") -> None:
        self.published[written.version] = written.tensors
        self.reached[written.version].set()


@dataclass(frozen=True)
class MemoryWritten:
    version: int
    tensors: dict
    stall_s: float = 0.25


class MemoryManager:
    def __init__(self) -> None:
        self.heard: list[int] = []
        self.lost = False

    async def published(self, version: int) -> None:
        if self.lost:
            raise PeerLost("the manager restarts")
        self.heard.append(version)


class MemoryEvents:
    def __init__(self) -> None:
        self.all: list[dict] = []

    def emit(self, kind: str, **fields) -> None:
        self.all.append({"kind": kind, **fields})

    def of(self, kind: str) -> list[dict]:
        return [event for event in self.all if event["kind"] == kind]


class World:
    """A trainer loop and its neighbours; a new loop on the same world is a trainer that was restarted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.buffer, self.sink, self.manager, self.events = (
            MemoryBuffer(),
            MemorySink(),
            MemoryManager(),
            MemoryEvents(),
        )
        self.learner = CountingLearner()

    def loop(self, *, evaluate_every: int | None = 2, **rules) -> TrainerLoop:
        checkpoint = {"every_steps": 2, "keep_last": 2}
        config = TrainerConfig(
            **{"num_steps": 5, "groups_per_step": 4, "mini_batches": 2, "checkpoint": checkpoint} | rules
        )
        self.learner = CountingLearner()
        return TrainerLoop(
            config,
            evaluate_every=evaluate_every,
            learner=self.learner,
            buffer=self.buffer,
            sink=self.sink,
            manager=self.manager,
            checkpoints=Checkpoints(self.folder, config.checkpoint),
            events=self.events,
        )

    def evaluated_and_durable(self) -> bool:
        return self.buffer.evaluations == [0, 2, 4, 5] and len(self.buffer.trained) == 20


@pytest.fixture
async def world(tmp_path):
    return World(tmp_path)


async def test_every_version_is_drawn_trained_published_and_made_durable(world):
    await world.loop().run()
    assert [len(world.sink.published[version]["seen"]) for version in range(6)] == [0, 4, 8, 12, 16, 20]
    assert world.manager.heard == [0, 1, 2, 3, 4, 5]
    assert world.buffer.evaluations == [0, 2, 4, 5]
    assert [event["step"] for event in world.events.of("checkpoint")] == [2, 4, 5]
    assert len(world.buffer.trained) == 20
    assert world.buffer.taken == {}


async def test_what_is_emitted_keeps_to_the_vocabulary(world):
    await world.loop().run()
    steps = world.events.of("step")
    assert [event["step"] for event in steps] == [1, 2, 3, 4, 5]
    last = steps[-1]
    assert (last["reward_mean"], last["tokens"], last["loss"], last["stall_s"]) == (0.5, 4 * 2 * 3, 0.5, 0.25)
    assert last["consumed_staleness_mean"] == 4
    assert last["trained_tokens"] == 8
    for event in world.events.all:
        assert problem({"t": 0.0, "source": "trainer"} | event) is None, event


async def test_no_evaluation_is_asked_for_if_there_is_none(world):
    await world.loop(evaluate_every=None).run()
    assert world.buffer.evaluations == []


async def test_a_restarted_trainer_goes_on_from_the_newest_checkpoint_and_trains_nothing_twice(world):
    task = asyncio.create_task(world.loop().run())
    await world.sink.reached[3].wait()
    world.buffer.ready.clear()
    task.cancel()
    await asyncio.wait([task])
    before = world.sink.published[2]["seen"]
    world.buffer.ready.set()
    world.sink.published.clear()
    await world.loop().run()
    assert min(world.sink.published) in (2, 4)
    final = world.sink.published[5]["seen"]
    assert final[:8] == before
    assert len(final) == len(set(final)) == 20
    assert set(final) == world.buffer.trained


async def test_a_restarted_trainer_leaves_newer_weights_in_the_relay_until_it_has_made_newer_ones(world):
    task = asyncio.create_task(world.loop().run())
    await world.sink.reached[3].wait()
    world.buffer.ready.clear()
    task.cancel()
    await asyncio.wait([task])
    first_life = dict(world.sink.published)
    world.buffer.ready.set()
    await world.loop().run()
    assert {version: world.sink.published[version] for version in first_life} == first_life
    assert [event["version"] for event in world.events.of("published")] == [0, 1, 2, 3, 4, 5]
    assert [event["step"] for event in world.events.of("learner_loaded")] == [0, 2]
    assert len(world.sink.published[5]["seen"]) == 20


class Killed(BaseException):
    """SIGKILL: nothing after it is executed."""


class Doom:
    """Kills at the n-th chance, which comes before and after every call that leaves the loop."""

    def __init__(self, chances: float) -> None:
        self.chances = chances

    def chance(self) -> None:
        self.chances -= 1
        if self.chances <= 0:  # also whatever else runs beside the call that was killed
            raise Killed

    def doom(self, neighbour: object, *methods: str) -> None:
        for name in methods:
            method = getattr(neighbour, name)
            setattr(
                neighbour, name, self._async(method) if asyncio.iscoroutinefunction(method) else self._plain(method)
            )

    def _async(self, method):
        async def doomed(*args):
            self.chance()
            answer = await method(*args)
            self.chance()
            return answer

        return doomed

    def _plain(self, method):
        def doomed(*args):
            self.chance()
            answer = method(*args)
            self.chance()
            return answer

        return doomed


async def test_a_trainer_killed_at_any_instant_goes_on_as_if_it_had_not_been(tmp_path):
    """Between batch and checkpoint, in the middle of a publish, of a checkpoint, of telling the data service."""
    undisturbed = World(tmp_path / "undisturbed")
    await undisturbed.loop().run()
    num_kills = 0
    for chances in itertools.count(1):
        world, doom = World(tmp_path / str(chances)), Doom(chances)
        loop = world.loop()
        doom.doom(world.buffer, "sample", "commit", "rewind", "request_evaluation")
        doom.doom(world.sink, "write", "complete", "newest")
        doom.doom(world.learner, "step", "save")
        try:
            await loop.run()
            break
        except Killed:
            num_kills += 1
        doom.chances = math.inf
        await world.loop().run()
        assert world.sink.published[5] == undisturbed.sink.published[5], f"killed at chance {chances}"
        assert world.buffer.trained == undisturbed.buffer.trained
        assert world.buffer.taken == {}
    assert num_kills > 80


async def test_the_learner_trains_on_while_its_version_is_made_visible(world):
    loop, complete = world.loop(num_steps=3), world.sink.complete
    went_on = asyncio.Event()

    async def complete_when_the_learner_went_on(written):
        if written.version == 1:
            await went_on.wait()
            assert len(world.learner.seen) > 4
            assert world.manager.heard == [0], "nobody is told of what cannot be seen"
        await complete(written)

    def step(groups):
        metrics = CountingLearner.step(world.learner, groups)
        if len(world.learner.seen) > 4:
            running.call_soon_threadsafe(went_on.set)
        return metrics

    running = asyncio.get_running_loop()
    world.learner.step, world.sink.complete = step, complete_when_the_learner_went_on
    async with asyncio.timeout(10):
        await loop.run()
    assert [len(world.sink.published[version]["seen"]) for version in range(4)] == [0, 4, 8, 12]
    assert [event["version"] for event in world.events.of("published")] == world.manager.heard == [0, 1, 2, 3]


async def test_no_version_is_written_before_the_one_before_it_is_visible_or_lost(world):
    loop, write, complete = world.loop(), world.sink.write, world.sink.complete
    incomplete: set[int] = set()

    async def write_one(version, tensors):
        assert not incomplete
        incomplete.add(version)
        return await write(version, tensors)

    async def complete_slowly(written):
        for _ in range(20):
            await asyncio.sleep(0)
        incomplete.discard(written.version)
        await complete(written)

    world.sink.write, world.sink.complete = write_one, complete_slowly
    await loop.run()
    assert sorted(world.sink.published) == [0, 1, 2, 3, 4, 5]


async def test_a_version_that_is_lost_on_its_way_is_skipped_and_nobody_is_told_of_it(world):
    loop, complete = world.loop(), world.sink.complete

    async def lose_one(written):
        if written.version == 2:
            raise PeerLost("the relay is gone")
        await complete(written)

    world.sink.complete = lose_one
    await loop.run()
    assert [event["version"] for event in world.events.of("publish_skipped")] == [2]
    assert [event["version"] for event in world.events.of("published")] == world.manager.heard == [0, 1, 3, 4, 5]
    assert world.evaluated_and_durable()


async def test_a_version_that_is_lost_on_its_way_is_published_again_while_the_trainer_waits(world):
    loop, complete = world.loop(), world.sink.complete
    lost = asyncio.Event()

    async def lose_one(written):
        if written.version == 2 and not lost.is_set():
            world.buffer.ready.clear()
            lost.set()
            raise PeerLost("the relay is gone")
        await complete(written)

    world.sink.complete = lose_one
    task = asyncio.create_task(loop.run())
    async with asyncio.timeout(10):
        await world.sink.reached[2].wait()
        assert len(world.sink.published[2]["seen"]) == 8
        world.buffer.ready.set()
        await task
    assert world.manager.heard == [0, 1, 2, 3, 4, 5]


async def test_a_version_that_the_relay_refuses_for_good_ends_the_run(world):
    loop, complete = world.loop(), world.sink.complete

    async def refuse(written):
        if written.version == 2:
            raise RunFailed("version 2 is held already, with other weights")
        await complete(written)

    world.sink.complete = refuse
    with pytest.raises(RunFailed, match="version 2 is held already"):
        await loop.run()
    assert 3 not in world.sink.published


async def test_a_trainer_that_is_stopped_leaves_nothing_running(world):
    loop, complete = world.loop(), world.sink.complete
    completing = asyncio.Event()

    async def hang(written):
        if written.version == 2:
            completing.set()
            await asyncio.get_running_loop().create_future()
        await complete(written)

    world.sink.complete = hang
    before = asyncio.all_tasks()
    task = asyncio.create_task(loop.run())
    await completing.wait()
    task.cancel()
    await asyncio.wait([task])
    assert asyncio.all_tasks() == before


async def test_a_relay_that_lost_its_weights_gets_them_again_while_the_trainer_waits(world):
    world.buffer.ready.clear()
    task = asyncio.create_task(world.loop().run())
    await world.sink.reached[0].wait()
    world.sink.published.clear()
    world.sink.reached[0].clear()
    async with asyncio.timeout(10):
        await world.sink.reached[0].wait()
    assert world.sink.published[0]["seen"] == []
    world.buffer.ready.set()
    await task
    assert len(world.buffer.trained) == 20


async def test_weights_between_two_versions_are_never_published(world, monkeypatch):
    monkeypatch.setattr("laminar.trainer.loop.SAMPLE_SLICE_S", 0.02)
    loop, step, sample = world.loop(), world.learner.step, world.buffer.sample
    num_empty = 0

    def step_and_lose_what_the_relay_had(groups):
        if not world.learner.seen:
            world.buffer.ready.clear()
            world.sink.published.clear()
        return step(groups)

    async def sample_and_count(*what):
        nonlocal num_empty
        groups = await sample(*what)
        num_empty += not groups
        if num_empty == 5:
            world.buffer.ready.set()
        return groups

    world.learner.step, world.buffer.sample = step_and_lose_what_the_relay_had, sample_and_count
    await loop.run()
    assert num_empty == 5, "the trainer waited in the middle of its first iteration"
    assert sorted(world.sink.published) == [1, 2, 3, 4, 5]
    assert all(len(tensors["seen"]) == 4 * version for version, tensors in world.sink.published.items())


async def test_training_goes_on_without_a_relay_and_the_next_version_is_published(world):
    loop, step = world.loop(), world.learner.step

    def step_without_relay(groups):
        world.sink.lost = len(world.learner.seen) in (4, 6)  # while version 2 is made
        return step(groups)

    world.learner.step = step_without_relay
    await loop.run()
    assert [event["version"] for event in world.events.of("publish_skipped")] == [2]
    assert sorted(world.sink.published) == [0, 1, 3, 4, 5]
    assert [event["step"] for event in world.events.of("step")] == [1, 2, 3, 4, 5]


async def test_the_last_version_is_published_even_if_the_relay_comes_back_late(world):
    loop, step = world.loop(), world.learner.step

    def step_and_lose_the_relay(groups):
        if len(world.learner.seen) == 18:
            world.sink.lost = True
            running.call_soon_threadsafe(running.call_later, 0.3, setattr, world.sink, "lost", False)
        return step(groups)

    running = asyncio.get_running_loop()
    world.learner.step = step_and_lose_the_relay
    await loop.run()
    assert 5 in world.sink.published


async def test_a_finished_run_that_is_started_again_only_publishes(world):
    await world.loop().run()
    world.sink.published.clear()
    await world.loop().run()
    assert list(world.sink.published) == [5]
    assert world.buffer.evaluations == [0, 2, 4, 5, 5]


async def test_a_data_service_that_restarts_is_waited_for(world):
    world.buffer.num_lost_calls = 3
    await world.loop().run()
    assert len(world.buffer.trained) == 20


async def test_a_data_service_that_stays_away_ends_the_run_with_one_sentence(world):
    world.buffer.num_lost_calls = 10**9
    with pytest.raises(
        RunFailed, match=r"could not rewind the data service to step 0 within 0\.3 s; last error: the data"
    ):
        await world.loop(batch_deadline_s=0.3).run()


async def test_a_batch_that_never_comes_ends_the_run_and_says_what_is_missing(world):
    world.buffer.ready.clear()
    with pytest.raises(RunFailed, match=r"waited 0\.3 s .* for 2 complete groups for mini-batch 0 of step 1"):
        await world.loop(batch_deadline_s=0.3).run()


async def test_a_lost_manager_does_not_stop_training(world):
    world.manager.lost = True
    await world.loop().run()
    assert 5 in world.sink.published
    assert len(world.events.of("command_failed")) == 6


async def test_the_event_loop_stays_responsive_while_the_learner_works(world):
    loop = world.loop(num_steps=1, mini_batches=1)
    step = world.learner.step
    blocked = asyncio.Event()
    running = asyncio.get_running_loop()

    def slow_step(groups):
        asyncio.run_coroutine_threadsafe(set_event(blocked), running).result(timeout=5)
        return step(groups)

    world.learner.step = slow_step
    await loop.run()
    assert blocked.is_set()


async def set_event(event: asyncio.Event) -> None:
    event.set()
