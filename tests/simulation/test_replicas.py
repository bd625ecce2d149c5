"""Replicas, manager and data shard together: moves, deaths and lost lines change who works, never what is answered."""

import asyncio
import math
import re
from collections import Counter
from statistics import NormalDist
from typing import Any

import pytest
from world import RUN_SEED, STOP, VOCAB, EchoTask, Settings, World

from laminar.dashboard.state import RunView, fold
from laminar.dashboard.status import chain_lines
from laminar.engines.protocol import Output, Request
from laminar.engines.scripted_engine import scripted_logprob, scripted_token
from laminar.scheduling.order import trajectory_seed
from laminar.schema.tokens import unpack_ids, unpack_logprobs
from laminar.schema.trajectories import Experience, response_ids, versions_of
from laminar.simulator import clock
from laminar.tasks.protocol import Problem, Reply
from laminar.telemetry.vocabulary import to_facts

STEPS_AHEAD = 4
"""So many steps' groups may be complete or under way, see `World`."""


def played(settings: Settings, trouble: Any = None) -> World:
    """A whole run, with something happening to it meanwhile."""

    async def main() -> World:
        async with World(settings) as world:
            disturbing = asyncio.ensure_future(trouble(world)) if trouble else None
            await world.train()
            if disturbing is not None:
                await disturbing
        return world

    return clock.run(main())


def check_everything_was_trained_once(world: World) -> None:
    s = world.settings
    report = world.audit()
    assert report.problems == ()
    assert report.counts["trained"] == s.num_steps * s.groups_per_step * s.group_size
    ids = Counter(member.trajectory_id for group in world.trained for member in group.members)
    assert set(ids.values()) == {1}


def check_answers_are_what_one_version_gives(world: World) -> None:
    """The scripted engine's tokens follow from prompt, seed, index and version: a mix-up of any of them shows."""
    with world.journal.rows() as rows:
        positions = {group.group_id: group.position for group in rows.groups()}
    for group in world.trained:
        for member in group.members:
            seed = trajectory_seed(RUN_SEED, positions[group.group_id], int(member.trajectory_id.rpartition("-")[2]))
            check_answer(group.prompt.token_ids, seed, member)


def check_answer(prompt_ids: tuple[int, ...], seed: int, member: Experience) -> None:
    *drawn, last = response_ids(member.pieces)
    assert last == STOP
    for index, token_id in enumerate(drawn):
        expected = scripted_token(prompt_ids, seed, index, member.version, VOCAB)
        assert token_id == (expected if expected != STOP else STOP + 1)
    logprobs = {logprob for piece in member.pieces for logprob in unpack_logprobs(piece.logprobs)}
    assert logprobs == {scripted_logprob(member.version)}
    assert versions_of(member.pieces) == {member.version}


def answers(world: World) -> dict[tuple[str, int], list[int]]:
    return {
        (member.trajectory_id, member.version): response_ids(member.pieces)
        for group in world.trained
        for member in group.members
    }


async def wait_for_the_middle(world: World) -> None:
    """All are in the middle of their batches."""
    await world.until(lambda: world.version >= 1 and world.shard is not None and len(world.facts("claimed")) > 4)
    await asyncio.sleep(0.3)


async def kill_mid_batch(world: World) -> None:
    await wait_for_the_middle(world)
    world.kill("replica-0", 1)


async def freeze(world: World) -> None:
    """No heartbeat and no word to the data shard for long, then all at once again."""
    await world.until(lambda: world.version >= 1)
    lines = world.lives["replica-0", 1].lines
    for line in lines.values():
        line.is_cut = True
    await asyncio.sleep(5.0)
    for line in lines.values():
        line.is_cut = False


def test_an_undisturbed_run_trains_every_trajectory_once_under_one_version() -> None:
    world = played(Settings())
    check_everything_was_trained_once(world)
    check_answers_are_what_one_version_gives(world)


def test_repack_moves_trajectories_and_their_answers_stay_what_they_would_have_been() -> None:
    moved, alone = played(Settings(repack=True)), played(Settings(repack=False))
    assert moved.facts("repack"), "nothing was moved"
    assert not alone.facts("repack")
    check_everything_was_trained_once(moved)
    check_answers_are_what_one_version_gives(moved)
    ours, theirs = answers(moved), answers(alone)
    shared = ours.keys() & theirs.keys()
    assert len(shared) > 50
    assert {key: ours[key] for key in shared} == {key: theirs[key] for key in shared}


def test_a_replica_freed_by_a_repack_takes_new_weights() -> None:
    world = played(Settings(num_replicas=3, num_steps=8))
    freed = [event for event in world.facts("pulled") if event["freed_by_repack"]]
    assert freed


def test_a_killed_replica_loses_no_trajectory() -> None:
    world = played(Settings(), kill_mid_batch)
    check_everything_was_trained_once(world)
    check_answers_are_what_one_version_gives(world)
    assert world.current("replica-0") == 2
    assert world.facts("adopted"), "its trajectories were not taken over"


def test_a_frozen_replica_is_fenced_when_it_wakes() -> None:
    world = played(Settings(), freeze)
    check_everything_was_trained_once(world)
    check_answers_are_what_one_version_gives(world)
    assert world.current("replica-0") == 2


def test_a_trajectory_that_never_returns_is_named_and_goes_on_elsewhere() -> None:
    async def hang(world: World) -> None:
        await wait_for_the_middle(world)
        step = world.lives["replica-0", 1].engine.step

        async def never() -> list[Output]:
            await step()
            await asyncio.get_running_loop().create_future()
            raise AssertionError("nobody sets it")

        world.lives["replica-0", 1].engine.step = never  # type: ignore[method-assign]

    world = played(Settings(), hang)
    check_everything_was_trained_once(world)
    check_answers_are_what_one_version_gives(world)
    (stuck,) = world.facts("engine_stuck")
    assert stuck["replica_id"] == "replica-0"
    assert stuck["lease_id"].startswith("replica-0/1/")
    assert world.current("replica-0") == 2
    assert world.facts("adopted"), "its trajectories were not taken over"


def test_replicas_that_are_removed_leave_their_work_to_the_others() -> None:
    async def shrink(world: World) -> None:
        await wait_for_the_middle(world)
        await world.manager.scale(1)

    world = played(Settings(num_replicas=3), shrink)
    check_everything_was_trained_once(world)
    check_answers_are_what_one_version_gives(world)
    assert world.facts("adopted"), "their trajectories were not taken over"
    assert len(world.facts("replica_retired")) == 2


def test_the_only_replica_may_die_and_its_successor_goes_on_under_the_same_version() -> None:
    world = played(Settings(num_replicas=1), kill_mid_batch)
    check_everything_was_trained_once(world)
    adopted = world.facts("adopted")
    assert adopted
    assert all(event["to_lease"].startswith("replica-0/2/") for event in adopted)


def test_a_data_shard_that_cannot_be_reached_for_a_while_costs_no_token() -> None:
    async def cut(world: World) -> None:
        await world.until(lambda: world.version >= 1)
        for life in world.lives.values():
            life.lines["data"].is_cut = True
        await asyncio.sleep(3.0)
        for life in world.lives.values():
            life.lines["data"].is_cut = False

    world = played(Settings(), cut)
    check_everything_was_trained_once(world)
    assert world.current("replica-0") == world.current("replica-1") == 1


def test_replicas_go_on_under_the_weights_that_they_have_while_the_relay_is_away() -> None:
    newest_before = 0

    async def cut(world: World) -> None:
        nonlocal newest_before
        await world.until(lambda: world.version >= 1)
        newest_before = world.version
        for life in world.lives.values():
            life.lines["relay"].is_cut = True
        await world.until(lambda: world.version >= newest_before + STEPS_AHEAD + 2, within_s=50.0)
        for life in world.lives.values():
            life.lines["relay"].is_cut = False

    world = played(Settings(num_steps=16), cut)
    check_everything_was_trained_once(world)
    check_answers_are_what_one_version_gives(world)
    versions = [event["version"] for event in world.facts("pulled")]
    assert max(versions) > newest_before, "nobody took new weights when the relay was back"
    assert world.current("replica-0") == world.current("replica-1") == 1


def test_episodes_with_an_environment_survive_a_kill_and_count_only_drawn_tokens() -> None:
    world = played(Settings(environments=EchoTask(), lengths=lambda request: request.num_answered + 6), kill_mid_batch)
    check_everything_was_trained_once(world)
    for group in world.trained:
        for member in group.members:
            origins = [piece.generated for piece in member.pieces]
            assert origins == [True, False, True, False, True, False]
            replies = [unpack_ids(piece.token_ids) for piece in member.pieces if not piece.generated]
            assert replies == [[51], [52], [53]]


class Sleepy:
    """The first turn of all takes five minutes."""

    def __init__(self) -> None:
        self._turns = 0

    async def act(self, turn: str) -> Reply:
        await asyncio.sleep(300.0 if self._turns == 0 else 0.1)
        self._turns += 1
        return Reply(text="51", done=self._turns == 2)


class SleepyTask(EchoTask):
    def environment(self, problem: Problem) -> Sleepy:
        return Sleepy()


def test_a_run_that_stands_still_says_who_waits_for_whom_down_to_the_tool_call() -> None:
    told: list[str] = []

    async def look(world: World) -> None:
        await asyncio.sleep(200.0)
        view = fold(RunView(), to_facts(world.events.events))
        told.extend(chain_lines(view, asyncio.get_running_loop().time()))

    settings = Settings(num_replicas=1, num_steps=1, environments=SleepyTask(), act_timeout_s=400.0)
    check_everything_was_trained_once(played(settings, look))
    assert len(told) >= 2
    assert re.match(r"data has waited \d+\.\d s for 8 of 8 answers of group \S+ from replica-0", told[0])
    assert re.search(r"replica-0 has waited \d+\.\d s for the environment of \S+ to reply from environment", told[1])


def test_evaluation_runs_at_one_version_while_training_goes_on() -> None:
    async def ask(world: World) -> None:
        await world.until(lambda: world.version >= 2)
        await world.shard.request_evaluation(2)
        await world.until(lambda: world.facts("evaluation"))

    world = played(Settings(num_heldout=8), ask)
    (evaluation,) = world.facts("evaluation")
    assert evaluation["version"] >= 2
    assert evaluation["num"] == 8
    check_everything_was_trained_once(world)


@pytest.mark.parametrize("seed", range(6))
def test_many_kills_at_many_moments_lose_nothing(seed: int) -> None:
    async def kills(world: World) -> None:
        for number in range(3):
            victim = f"replica-{(seed + number) % 3}"
            await asyncio.sleep(0.37 * (seed + 1) + 1.3 * number)
            if world.alive(victim, world.current(victim)) is not None:
                world.kill(victim, world.current(victim))

    async def begin(world: World) -> None:
        await world.until(lambda: len(world.lives) >= 3)
        await kills(world)

    world = played(Settings(num_replicas=3, num_steps=8), begin)
    check_everything_was_trained_once(world)
    check_answers_are_what_one_version_gives(world)


def test_moves_between_training_and_evaluation_batches_leave_nobody_behind() -> None:
    """A trajectory that a repack let go and nobody took over would show as staleness far beyond its siblings'."""

    async def evaluate_always(world: World) -> None:
        for version in range(world.settings.num_steps):
            await world.until(lambda: world.version >= version)  # noqa: B023
            await world.shard.request_evaluation(version)

    world = played(Settings(num_replicas=3, num_steps=10, num_heldout=24), evaluate_always)
    check_everything_was_trained_once(world)
    moves = [move for event in world.facts("repack") for move in event["moves"]]
    assert len(moves) > 5
    assert max(member.staleness for group in world.trained for member in group.members) <= 4


@pytest.mark.parametrize("repack", [True, False])
@pytest.mark.parametrize("strict_idleness", [True, False])
@pytest.mark.parametrize("num_heldout", [0, 6])
@pytest.mark.parametrize("interactive", [True, False])
def test_every_combination_of_switches_trains_everything_and_each_switch_shows(
    repack: bool, strict_idleness: bool, num_heldout: int, interactive: bool
) -> None:
    async def evaluate(world: World) -> None:
        await world.until(lambda: world.version >= 1)
        await world.shard.request_evaluation(1)

    settings = Settings(
        repack=repack,
        strict_idleness=strict_idleness,
        num_heldout=num_heldout,
        environments=EchoTask() if interactive else None,
        num_steps=4,
    )
    world = played(settings, evaluate if num_heldout else None)
    check_everything_was_trained_once(world)
    assert bool(world.facts("repack")) <= repack
    assert bool(world.facts("evaluation")) == bool(num_heldout)
    origins = {piece.generated for group in world.trained for member in group.members for piece in member.pieces}
    assert origins == ({True, False} if interactive else {True})


def log_normal(request: Request) -> int:
    """The 99th percentile is ten times the median, 40 tokens."""
    uniform = (request.seed % 9_973 + 0.5) / 9_973
    return min(450, max(2, round(40 * math.exp(NormalDist().inv_cdf(uniform) * math.log(10) / 2.326))))


def test_with_a_long_tail_repack_raises_the_rate_of_tokens_and_changes_no_answer() -> None:
    def timed(repack: bool) -> tuple[float, World]:
        tail = {"num_replicas": 8, "num_steps": 10, "groups_per_step": 16, "train_s": 0.1}
        world = played(Settings(**tail, lengths=log_normal, repack=repack))
        tokens = sum(len(response_ids(m.pieces)) for group in world.trained for m in group.members)
        times = [event["t"] for event in world.facts("taken")]
        return tokens / max(times), world

    (with_repack, moved), (without, alone) = timed(True), timed(False)
    assert moved.facts("adopted")
    assert with_repack > without
    ours, theirs = answers(moved), answers(alone)
    shared = ours.keys() & theirs.keys()
    assert len(shared) > 100
    assert all(ours[key] == theirs[key] for key in shared)
