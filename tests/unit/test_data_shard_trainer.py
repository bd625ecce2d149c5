"""What a data shard promises to the trainer: experience, evaluations and restarts, one promise per test."""

import asyncio
from collections.abc import Sequence

import pytest
from data_shard_kit import Prompts, World, ids, purposes

from laminar.data.evaluations import EvaluationResult
from laminar.data.shard import Wait
from laminar.scheduling.sampling import Draw, ReadyGroup, SamplingRules
from laminar.schema.errors import ConfigError, RunFailed, UserError
from laminar.schema.trajectories import (
    Batch,
    Unscorable,
    response_ids,
)


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
