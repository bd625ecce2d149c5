"""What a data shard promises to replicas, manager and trainer, one promise per test."""

import asyncio
from collections.abc import Sequence

import pytest

from laminar.data.audit import audit_rows
from laminar.data.evaluations import EvaluationResult
from laminar.data.journal import MemoryJournal
from laminar.data.ports import DataRules
from laminar.data.shard import DataShard, Wait
from laminar.scheduling.order import prompt_at, trajectory_seed
from laminar.scheduling.sampling import Draw, ReadyGroup, SamplingRules
from laminar.scheduling.schedules import SCHEDULES
from laminar.schema.errors import ConfigError, RunFailed, UserError
from laminar.schema.fleet import Lease
from laminar.schema.tokens import pack_ids, pack_logprobs
from laminar.schema.trajectories import (
    Append,
    Batch,
    Finish,
    Grade,
    Piece,
    Prompt,
    Scored,
    Unscorable,
    Update,
    WorkItem,
    response_ids,
)
from laminar.telemetry.events import MemoryEvents
from laminar.telemetry.vocabulary import problem


class Prompts:
    """Prompt n of a split is called like it; those in `too_long` have a hundred tokens."""

    def __init__(self, num_train: int = 50, num_heldout: int = 3, too_long: Sequence[int] = (), name: str = "") -> None:
        self.num_train = num_train
        self.num_heldout = num_heldout
        self._too_long = too_long
        self._name = name

    def prompt(self, split: str, index: int) -> Prompt:
        num_tokens = 100 if index in self._too_long else 3
        return Prompt(prompt_id=f"{split[0]}{self._name}{index}", token_ids=(7,) * num_tokens, payload={"i": index})


class World:
    """A shard and what tests do with it."""

    def __init__(self, prompts: Prompts | None = None, **rules: object) -> None:
        defaults = {"group_size": 2, "max_groups_ahead": 8, "shuffle": False, "max_prompt_tokens": 10}
        self.rules = DataRules(**{**defaults, **rules})  # type: ignore[arg-type]
        self.prompts = prompts or Prompts()
        self.journal = MemoryJournal()
        self.events = MemoryEvents()
        self.shard = DataShard(self.journal, self.prompts, self.rules, self.events)

    def restart(self) -> "World":
        """The process dies, all of its journal is kept."""
        self.journal = self.journal.after_crash(self.journal.num_pending)
        self.shard = DataShard(self.journal, self.prompts, self.rules, self.events)
        return self

    async def claim(self, lease: str, version: int = 0, num: int = 2, wait_s: float = 0.0) -> Batch:
        return await self.shard.claim(lease, version, num, wait_s)

    async def append(self, lease: str, item: WorkItem, ids: Sequence[int], version: int = 0, offset: int = 0):
        return await self.shard.stream(lease, (append(item, ids, version, offset),))

    async def grade(self, lease: str, item: WorkItem, grade: Grade | float = 1.0):
        grade = Scored(reward=grade) if isinstance(grade, float) else grade
        finish = Finish(trajectory_id=item.trajectory_id, attempt=item.attempt, stop_reason="stop", grade=grade)
        return await self.shard.stream(lease, (finish,))

    async def answer(self, lease: str, batch: Batch, version: int = 0, reward: float = 1.0) -> None:
        for item in batch.items:
            assert await self.append(lease, item, [1, 2, 3], version) == ()
            assert await self.grade(lease, item, reward) == ()

    async def ready(self, num_groups: int, version: int = 0) -> list[str]:
        """Make some groups complete, one after the other."""
        names = []
        for _ in range(num_groups):
            lease = f"ready-{len(self.events.of('claimed'))}"
            batch = await self.claim(lease, version, self.rules.group_size)
            await self.answer(lease, batch, version)
            names.append(batch.items[0].group_id)
        return names

    async def counts(self) -> dict[str, int]:
        return dict((await self.shard.stats()).counts)

    def check(self) -> None:
        """The journal is sound and every event is in the vocabulary."""
        with self.journal.rows() as rows:
            report = audit_rows(rows)
        assert report.is_sound, report.problems
        assert [p for p in map(problem, self.events.events) if p] == []


def append(item: WorkItem, ids: Sequence[int], version: int = 0, offset: int = 0) -> Update:
    logprobs = pack_logprobs([-0.5] * len(ids))
    piece = Piece(token_ids=pack_ids(ids), logprobs=logprobs, generated=True, version=version)
    return Append(trajectory_id=item.trajectory_id, attempt=item.attempt, offset=offset, pieces=(piece,))


def ids(batch: Batch) -> list[str]:
    return [item.trajectory_id for item in batch.items]


def purposes(batch: Batch) -> set[str]:
    return {item.purpose for item in batch.items}


# ---- claims


async def test_a_claim_draws_whole_groups_in_the_order_of_the_prompts():
    world = World(shuffle=True, seed=5)
    batch = await world.claim("a", num=5)
    drawn = [prompt_at(position, 50, 5, True) for position in range(2)]
    assert ids(batch) == [f"{epoch}-t{index}-{member}" for epoch, index in drawn for member in range(2)]
    assert [item.seed for item in batch.items] == [trajectory_seed(5, p, m) for p in range(2) for m in range(2)]
    assert {item.attempt for item in batch.items} == {0}
    assert batch.items[2].prompt == world.prompts.prompt("train", drawn[1][1])


async def test_a_prompt_comes_again_only_in_the_next_epoch():
    world = World(Prompts(num_train=3), shuffle=True)
    groups = await world.ready(6)
    assert len(set(groups)) == 6
    assert sorted(groups[:3]) == ["0-t0", "0-t1", "0-t2"]
    assert sorted(groups[3:]) == ["1-t0", "1-t1", "1-t2"]


async def test_the_same_lease_gets_the_same_batch_and_never_another():
    world = World()
    batch = await world.claim("a")
    assert await world.claim("a", version=9, num=8) == batch
    await world.answer("a", batch)
    assert await world.claim("a") == Batch()
    assert (await world.counts())["finished"] == 2


async def test_claims_stop_at_the_bound_and_go_on_when_a_step_has_taken():
    world = World(max_groups_ahead=2)
    await world.ready(1)
    await world.claim("a")
    assert await world.claim("b") == Batch()
    waiting = asyncio.ensure_future(world.claim("c", num=8, wait_s=5.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    await world.shard.sample(1, 0, 1, 0.0)
    assert ids(await waiting) == ["0-t2-0", "0-t2-1"]


async def test_no_more_groups_are_drawn_than_the_run_trains():
    world = World(total_groups=3)
    await world.ready(1)
    await world.shard.sample(1, 0, 1, 0.0)
    assert len(ids(await world.claim("a", num=100))) == 4
    assert await world.claim("b") == Batch()
    await world.shard.commit(1)
    assert await world.restart().claim("c") == Batch()


async def test_returned_trajectories_come_first_and_in_whole_groups():
    world = World(group_size=3)
    first = await world.claim("a", num=6)
    await world.answer("a", Batch(items=first.items[:1]))
    await world.shard.start_over("a")
    batch = await world.claim("b", num=4)
    assert ids(batch) == ["0-t0-1", "0-t0-2"], "three members of the other group do not fit, new groups neither"
    assert ids(await world.claim("c", num=1)) == ["0-t1-0"], "split, since nothing else is to be had"
    assert ids(await world.claim("d", num=5)) == ["0-t1-1", "0-t1-2", "0-t2-0", "0-t2-1", "0-t2-2"]
    world.check()


async def test_a_prompt_that_is_too_long_is_dropped_with_the_reason():
    world = World(Prompts(too_long=(0, 2)))
    batch = await world.claim("a", num=4)
    assert {item.group_id for item in batch.items} == {"0-t1", "0-t3"}
    reasons = {event["reason"] for event in world.events.of("dropped")}
    assert reasons == {"the prompt has 100 tokens, data.max_prompt_tokens is 10"}
    assert (await world.counts())["dropped"] == 4
    world.check()


async def test_a_task_of_long_prompts_ends_the_run_with_a_sentence():
    world = World(Prompts(num_train=3, too_long=range(3)))
    running = asyncio.ensure_future(world.shard.run())
    with pytest.raises(UserError, match="every prompt of the task is longer"):
        await world.claim("a")
    with pytest.raises(UserError, match="every prompt of the task is longer"):
        await running


async def test_an_eviction_makes_room_where_claims_would_wait():
    world = World(max_groups_ahead=3, eviction="oldest_version")
    oldest, *_ = await world.ready(3)
    await world.shard.sample(5, 0, 4, 0.0)
    assert len(ids(await world.claim("a", version=4))) == 2
    assert {event["trajectory_id"] for event in world.events.of("dropped")} == {f"{oldest}-0", f"{oldest}-1"}
    assert "version 0 is 4 behind" in world.events.of("dropped")[0]["reason"]
    world.check()


# ---- streaming


async def test_tokens_stream_in_pieces_and_survive_a_handover():
    world = World()
    batch = await world.claim("a", version=3)
    item = batch.items[0]
    assert await world.append("a", item, [1, 2], 3) == ()
    assert await world.append("a", item, [2, 3, 4], 3, offset=1) == ()
    adopted = await world.shard.adopt("a", "b", 3)
    assert [(i.attempt, i.version, response_ids(i.pieces)) for i in adopted.items] == [
        (1, 3, [1, 2, 3, 4]),
        (1, None, []),
    ]
    assert await world.append("b", adopted.items[0], [5], 3, offset=4) == ()
    assert await world.append("a", item, [5], 3, offset=4) == (item.trajectory_id,)
    world.check()


async def test_the_last_holder_may_repeat_itself_and_nobody_else_is_heard():
    world = World()
    item = (await world.claim("a")).items[0]
    await world.append("a", item, [1])
    for _ in range(2):
        assert await world.grade("a", item, 0.5) == ()
    assert await world.append("a", item, [1]) == ()
    assert await world.grade("b", item) == (item.trajectory_id,)
    await world.claim("b")
    assert await world.grade("b", item) == (item.trajectory_id,)
    assert len(world.events.of("trajectory")) == 1


@pytest.mark.parametrize(
    ("ids", "version", "offset"), [([9], 0, 3), ([9, 9], 0, 1), ([9], 1, 2)], ids=["gap", "differs", "other version"]
)
async def test_what_cannot_be_true_is_refused_and_the_trajectory_starts_over(ids: list[int], version: int, offset: int):
    world = World()
    item = (await world.claim("a")).items[0]
    await world.append("a", item, [1, 2])
    assert await world.append("a", item, ids, version, offset) == (item.trajectory_id,)
    assert await world.append("a", item, [3], offset=2) == (item.trajectory_id,), "it is not held any more"
    again = (await world.claim("b", num=1)).items[0]
    assert (again.trajectory_id, again.attempt, again.pieces) == (item.trajectory_id, 1, ())
    world.check()


async def test_inherent_staleness_counts_versions_from_start_to_finish():
    world = World()
    batch = await world.claim("a", version=2)
    assert await world.shard.sample(3, 0, 1, 0.0) == (), "the trainer works on step 3, so it has published version 2"
    await world.append("a", batch.items[0], [1], 2)
    await world.grade("a", batch.items[0])
    assert await world.shard.sample(5, 0, 1, 0.0) == (), "the trainer works on step 5, so it has published version 4"
    await world.append("a", batch.items[1], [1], 2)
    await world.grade("a", batch.items[1])
    (group,) = await world.shard.sample(5, 0, 1, 0.0)
    assert [member.staleness for member in group.members] == [0, 2]
    world.check()


# ---- failures


async def test_an_unscorable_answer_is_tried_again_and_then_dropped():
    world = World(group_size=3)
    batch = await world.claim("a", num=3)
    await world.answer("a", Batch(items=batch.items[:2]))
    await world.append("a", batch.items[2], [1])
    assert await world.grade("a", batch.items[2], Unscorable(reason="the sandbox broke")) == ()
    retry = await world.claim("b", num=1)
    assert [(i.trajectory_id, i.attempt, i.pieces) for i in retry.items] == [("0-t0-2", 1, ())]
    assert await world.shard.sample(1, 0, 1, 0.0) == ()
    await world.grade("b", retry.items[0], float("nan"))
    (group,) = await world.shard.sample(1, 0, 1, 0.0)
    assert [member.trajectory_id for member in group.members] == ["0-t0-0", "0-t0-1"]
    (dropped,) = world.events.of("dropped")
    assert dropped["reason"] == "2 data failures, the last one: the reward is nan"
    world.check()


async def test_a_group_with_one_gradable_member_is_dropped_as_a_whole():
    world = World(data_failures=1)
    batch = await world.claim("a")
    await world.answer("a", Batch(items=batch.items[:1]))
    await world.grade("a", batch.items[1], Unscorable(reason="no"))
    assert await world.counts() == {"dropped": 2}
    assert world.events.of("dropped")[-1]["reason"] == "only 1 of 2 members of the group could be graded"
    world.check()


async def test_in_a_deterministic_run_a_group_is_answered_only_by_the_version_before_its_step_also_after_a_resume():
    world = World(deterministic=True, schedule=SCHEDULES["sync"], groups_per_step=2, group_size=2, max_groups_ahead=8)
    first = await world.claim("a", version=0, num=8)
    assert len(first.items) == 4, "two groups a step"
    assert await world.claim("b", version=0, num=8) == Batch(), "the rest needs version 1"
    await world.answer("a", first, 0)
    assert await world.shard.sample(1, 0, 2, 0.0)
    second = await world.claim("c", version=1, num=8)
    assert len(second.items) == 4
    await world.answer("c", Batch(items=second.items[:1]), 1)
    world = world.restart()
    await world.shard.resume(0)
    assert await world.claim("d", version=0, num=8) == Batch(), "version 0 answers nothing of step 2"
    again = await world.claim("e", version=1, num=8)
    assert {item.trajectory_id for item in again.items} == {item.trajectory_id for item in second.items[1:]}
    world.check()


async def test_an_answer_may_have_to_begin_anew_wherever_it_goes_on():
    world = World(deterministic=True, schedule=SCHEDULES["sync"], groups_per_step=1)
    batch = await world.claim("a", version=0)
    await world.append("a", batch.items[0], [1, 2, 3], 0)
    adopted = await world.shard.adopt("a", "b", 0)
    assert [(item.attempt, item.pieces) for item in adopted.items] == [(1, ()), (1, ())]
    await world.append("b", adopted.items[0], [1, 2], 0)
    world = world.restart()
    await world.shard.resume(0)
    assert all(item.pieces == () for item in (await world.claim("c", version=0)).items)
    world.check()


@pytest.mark.parametrize(("rule", "outcome"), [("train_rest", {"finished": 2, "dropped": 1}), ("drop", {"dropped": 3})])
async def test_a_group_with_a_member_that_cannot_be_graded_follows_the_rule(rule: str, outcome: dict[str, int]):
    world = World(data_failures=1, group_size=3, incomplete_groups=rule)
    batch = await world.claim("a", num=3)
    await world.grade("a", batch.items[0], Unscorable(reason="no"))
    await world.answer("a", Batch(items=batch.items[1:]))
    assert await world.counts() == outcome
    world.check()


async def test_a_group_of_one_by_configuration_is_trained():
    world = World(group_size=1)
    await world.ready(1)
    assert len(await world.shard.sample(1, 0, 1, 0.0)) == 1
    world.check()


async def test_whatever_kills_twenty_replicas_is_dropped():
    world = World()
    for n in range(20):
        assert len((await world.claim(f"a{n}")).items) == 2
        await world.shard.start_over(f"a{n}")
    assert await world.counts() == {"dropped": 2}
    assert "20 infrastructure failures" in world.events.of("dropped")[0]["reason"]
    world.check()


async def test_a_lost_lease_starts_over_and_is_gone():
    world = World()
    item = (await world.claim("a", version=1)).items[0]
    await world.append("a", item, [1], 1)
    assert await world.shard.leases() == (Lease(lease_id="a", version=1, num_unfinished=2, purpose="training"),)
    for _ in range(2):
        await world.shard.start_over("a")
        assert await world.shard.leases() == ()
    batch = await world.claim("b", version=5)
    assert [(i.attempt, i.version, i.pieces) for i in batch.items] == [(1, None, ())] * 2
    world.check()


# ---- adoption


async def test_an_adoption_joins_a_running_batch_and_may_be_repeated():
    world = World()
    await world.claim("a")
    mine = await world.claim("b")
    adopted = await world.shard.adopt("a", "b", 0)
    assert ids(adopted) == ["0-t0-0", "0-t0-1"]
    assert await world.shard.adopt("a", "b", 0) == adopted
    assert await world.shard.leases() == (Lease(lease_id="b", version=0, num_unfinished=4, purpose="training"),)
    assert await world.shard.adopt("b", "b", 0) == Batch()
    assert await world.shard.adopt("nobody", "b", 0) == Batch()
    await world.answer("b", adopted)
    assert await world.shard.adopt("a", "b", 0) == Batch()
    await world.answer("b", mine)
    assert await world.shard.leases() == ()
    assert len(world.events.of("adopted")) == 1
    world.check()


async def test_tokens_never_go_on_under_another_version():
    world = World()
    batch = await world.claim("a", version=1)
    await world.append("a", batch.items[0], [1], 1)
    assert ids(await world.shard.adopt("a", "b", 2)) == [batch.items[1].trajectory_id], "it has no tokens yet"
    assert await world.shard.adopt("a", "b", 1) == Batch(), "b runs under version 2"
    assert ids(await world.shard.adopt("a", "c", 1)) == [batch.items[0].trajectory_id]
    world.check()


async def test_an_evaluation_keeps_its_version_and_may_share_a_lease_with_training():
    world = World()
    await world.shard.request_evaluation(0)
    evaluation = await world.claim("a", num=1)
    training = await world.claim("b")
    assert (purposes(evaluation), purposes(training)) == ({"evaluation"}, {"training"})
    assert await world.shard.adopt("a", "c", 1) == Batch(), "its version is pinned"
    adopted = await world.shard.adopt("a", "b", 0)
    assert purposes(adopted) == {"evaluation"}
    assert ids(adopted) == ids(evaluation)
    world.check()


# ---- training


async def test_a_mini_batch_gets_the_same_groups_again():
    world = World()
    groups = await world.ready(3)
    first = await world.shard.sample(1, 0, 2, 0.0)
    assert [group.group_id for group in first] == groups[:2]
    assert await world.shard.sample(1, 0, 2, 0.0) == first
    assert [group.group_id for group in await world.shard.sample(1, 1, 1, 0.0)] == groups[2:]
    assert world.journal.num_pending == 0, "it was durable before it was given"
    again = await world.restart().shard.sample(1, 0, 2, 0.0)
    assert again == first
    world.check()


async def test_a_rewind_puts_groups_back_in_their_old_place():
    world = World()
    groups = await world.ready(4)
    for step in (1, 2):
        await world.shard.sample(step, 0, 1, 0.0)
    await world.shard.rewind(0)
    assert [group.group_id for group in await world.shard.sample(1, 0, 4, 0.0)] == groups
    world.check()


async def test_what_a_durable_checkpoint_covers_is_trained_for_good():
    world = World()
    await world.ready(2)
    await world.shard.sample(1, 0, 1, 0.0)
    await world.shard.sample(2, 0, 1, 0.0)
    for _ in range(2):
        await world.shard.commit(1)
        assert await world.counts() == {"trained": 2, "taken": 2}
    await world.shard.rewind(1)
    assert await world.counts() == {"trained": 2, "finished": 2}
    with pytest.raises(RunFailed, match="step 1 asks for experience"):
        await world.shard.sample(1, 1, 1, 0.0)
    world.check()


async def test_a_sample_that_waits_says_so_and_wakes_with_the_last_member():
    world = World()
    batch = await world.claim("a")
    waiting = asyncio.ensure_future(world.shard.sample(1, 0, 1, 5.0))
    await asyncio.sleep(0)
    (wait,) = (await world.shard.stats()).waits
    assert isinstance(wait, Wait)
    assert (wait.step, wait.part, wait.num_groups) == (1, 0, 1)
    await world.answer("a", batch)
    assert len(await waiting) == 1
    assert (await world.shard.stats()).waits == ()


async def test_a_stale_group_is_dropped_by_the_bounded_sampler():
    world = World(sampler="bounded_staleness", max_staleness=1)
    await world.ready(1, version=0)
    await world.ready(1, version=2)
    (group,) = await world.shard.sample(3, 0, 1, 0.0)
    assert [member.version for member in group.members] == [2, 2]
    assert await world.counts() == {"dropped": 2, "taken": 2}
    world.check()


def last_first(ready: Sequence[ReadyGroup], num_groups: int, version: int, rules: SamplingRules) -> Draw:
    """A user's own sampler."""
    return Draw(picked=tuple(group.group_id for group in reversed(ready))[:num_groups] if len(ready) > 1 else ())


def greedy(ready: Sequence[ReadyGroup], num_groups: int, version: int, rules: SamplingRules) -> Draw:
    """A user's own mistake."""
    return Draw(picked=tuple(group.group_id for group in ready))


async def test_samplers_can_be_the_users_own():
    world = World(sampler=f"{__name__}:last_first")
    groups = await world.ready(3)
    assert [group.group_id for group in await world.shard.sample(1, 0, 2, 0.0)] == [groups[2], groups[1]]
    await world.shard.rewind(0)
    assert [group.group_id for group in await world.shard.sample(1, 0, 1, 0.0)] == groups[2:], "in order of completion"
    world = World(sampler=f"{__name__}:greedy")
    await world.ready(2)
    with pytest.raises(UserError, match=r"data\.sampler .*:greedy: the sampler picked 2 groups"):
        await world.shard.sample(1, 0, 1, 0.0)
    with pytest.raises(ConfigError, match=r"data\.sampler is 'fofi', which is neither fifo"):
        World(sampler="fofi")


# ---- evaluation


async def test_an_evaluation_is_one_batch_at_a_new_enough_version_and_goes_first():
    world = World()
    await world.shard.request_evaluation(2)
    await world.shard.request_evaluation(2)
    assert purposes(await world.claim("a", version=1)) == {"training"}
    batch = await world.claim("b", version=3, num=1)
    assert ids(batch) == ["eval2-h0-0", "eval2-h1-0", "eval2-h2-0"]
    assert purposes(await world.claim("c", version=3)) == {"training"}
    waiting = asyncio.ensure_future(world.shard.evaluation(2, 5.0))
    await world.answer("b", Batch(items=batch.items[:2]), 3)
    await world.grade("b", batch.items[2], 0.25)
    result = EvaluationResult(version=3, asked_version=2, accuracy=0.75, num=3, mean_tokens=2.0)
    assert await waiting == result
    await world.shard.request_evaluation(2)
    assert purposes(await world.claim("d", version=3)) == {"training"}
    assert await world.restart().shard.evaluation(2, 0.0) == result
    world.check()


async def test_an_evaluation_that_changes_its_version_is_drawn_anew():
    world = World()
    await world.shard.request_evaluation(0)
    batch = await world.claim("a", version=1)
    await world.answer("a", Batch(items=batch.items[:2]), 1)
    await world.shard.start_over("a")
    same = await world.claim("b", version=1)
    assert ids(same) == ids(batch)[2:], "what this version answered stands"
    await world.shard.start_over("b")
    other = await world.claim("c", version=2)
    assert ids(other) == ids(batch)
    await world.answer("c", other, 2, reward=0.0)
    result = await world.shard.evaluation(0, 0.0)
    assert result is not None
    assert (result.version, result.accuracy, result.num) == (2, 0.0, 3)
    world.check()


async def test_an_answer_that_cannot_be_graded_does_not_count():
    world = World()
    await world.shard.request_evaluation(0)
    batch = await world.claim("a")
    for item in batch.items:
        await world.grade("a", item, Unscorable(reason="no"))
    result = await world.shard.evaluation(0, 0.0)
    assert result == EvaluationResult(version=0, asked_version=0, accuracy=None, num=0, mean_tokens=None)
    assert world.events.of("evaluation") == []
    world.check()


async def test_without_held_out_prompts_the_result_is_empty_at_once():
    world = World(Prompts(num_heldout=0))
    await world.shard.request_evaluation(0)
    assert purposes(await world.claim("a")) == {"training"}
    result = await world.shard.evaluation(0, 5.0)
    assert result is not None
    assert result.num == 0


async def test_going_back_voids_what_lost_weights_scored():
    world = World()
    for version in (1, 2):
        await world.shard.request_evaluation(version)
        lease = f"a{version}"
        batch = await world.claim(lease, version)
        if version == 1:
            await world.answer(lease, batch, version)
    await world.shard.rewind(1)
    assert await world.shard.evaluation(1, 0.0) is not None
    assert await world.shard.leases() == ()
    await world.shard.request_evaluation(2)
    batch = await world.claim("b", 2)
    assert ids(batch)[0] == "eval2.1-h0-0"
    await world.answer("b", batch, 2)
    assert await world.shard.evaluation(2, 0.0) is not None
    world.check()


# ---- restarts


async def test_a_resume_keeps_tokens_only_of_the_version_it_goes_on_with():
    world = World(max_groups_ahead=20)
    for version in (1, 2):
        batch = await world.claim("replica-0/0/1" if version == 1 else "replica-1/0/1", version)
        await world.append(f"replica-{version - 1}/0/1", batch.items[0], [version], version)
    await world.restart().shard.resume(2)
    batch = await world.claim("replica-0/0/1", version=2, num=4)
    assert [(i.attempt, i.version, response_ids(i.pieces)) for i in batch.items] == [
        (1, None, []),
        (1, None, []),
        (1, 2, [2]),
        (1, None, []),
    ], "a name of before the resume is a new lease"
    world.check()


async def test_kept_tokens_are_given_up_when_only_newer_weights_are_left():
    world = World()
    item = (await world.claim("a", version=1)).items[0]
    await world.append("a", item, [1, 2], 1)
    await world.restart().shard.resume(1)
    assert (await world.claim("b", version=0)).items[0].trajectory_id != item.trajectory_id
    batch = await world.claim("c", version=2)
    assert (batch.items[0].trajectory_id, batch.items[0].pieces) == (item.trajectory_id, ())
    world.check()


async def test_a_resume_trains_what_the_checkpoint_covers_and_nothing_twice():
    """The checkpoint of step 1 was written, the process died before it could say so."""
    world = World()
    groups = await world.ready(3)
    for step in (1, 2):
        await world.shard.sample(step, 0, 1, 0.0)
    await world.restart().shard.resume(1)
    assert await world.counts() == {"trained": 2, "finished": 4}
    assert [group.group_id for group in await world.shard.sample(2, 0, 2, 0.0)] == groups[1:]
    world.check()


async def test_a_resume_from_an_older_checkpoint_drops_what_only_the_newer_ones_knew():
    world = World(total_groups=4)
    await world.ready(3)
    for step in (1, 2):
        await world.shard.sample(step, 0, 1, 0.0)
        await world.shard.commit(step)
    await world.restart().shard.resume(1)
    assert await world.counts() == {"trained": 2, "dropped": 2, "finished": 2}
    assert len(await world.shard.sample(2, 0, 1, 0.0)) == 1
    await world.shard.commit(2)
    assert len((await world.claim("a", num=100)).items) == 4, "one group is lost, so two are missing to four"
    world.check()
    assert (await world.restart().counts()) == {"trained": 4, "dropped": 2, "running": 4}


async def test_a_task_that_changed_is_noticed():
    world = World()
    await world.claim("a")
    world.prompts = Prompts(name="other")
    with pytest.raises(UserError, match=r"the task has no problem 't0' at place 0 of its train split any more"):
        world.restart()
    world.prompts = Prompts(num_train=0)
    with pytest.raises(UserError, match="has no problem"):
        world.restart()


async def test_time_of_the_run_goes_on_after_a_restart():
    world = World()
    await world.claim("a")
    await asyncio.sleep(0.02)
    await world.claim("b")
    await world.restart().claim("c")
    with world.journal.rows() as rows:
        times = [lease.opened_s for lease in rows.leases()]
    assert times == sorted(times)
    assert 0.02 <= times[2] < times[1] + 1.0


async def test_a_finished_run_has_no_open_ends():
    world = World(max_groups_ahead=4)
    await world.shard.request_evaluation(0)
    evaluation = await world.claim("e")
    await world.answer("e", Batch(items=evaluation.items[:1]))
    await world.ready(2)
    await world.shard.sample(1, 0, 1, 0.0)
    await world.shard.commit(1)
    running = await world.claim("a", num=4)
    await world.grade("a", running.items[0])
    for _ in range(2):
        await world.shard.finish_run("the run was finished")
        assert await world.counts() == {"trained": 2, "evaluated": 1, "dropped": 2 + 4 + 2}
    assert await world.claim("b") == Batch()
    assert await world.append("a", running.items[1], [1]) == (running.items[1].trajectory_id,)
    assert await world.shard.leases() == ()
    world.check()
    world.restart().check()


async def test_a_reward_that_never_works_ends_the_run_with_its_reason():
    world = World(Prompts(num_train=40), max_groups_ahead=40, group_size=2)
    running = asyncio.ensure_future(world.shard.run())
    batch = await world.claim("a", num=64)
    for item in batch.items:
        await world.grade("a", item, Unscorable(reason="ZeroDivisionError: no such unit"))
    with pytest.raises(UserError, match=r"none of the first 64 answers could be graded.*no such unit"):
        await running
