"""What a data shard promises to replicas: claims, streams, failures and adoptions, one promise per test."""

import asyncio

import pytest
from data_shard_kit import Prompts, World, ids, purposes

from laminar.scheduling.order import prompt_at, trajectory_seed
from laminar.scheduling.schedules import SCHEDULES
from laminar.schema.errors import UserError
from laminar.schema.fleet import Lease
from laminar.schema.trajectories import (
    Batch,
    Unscorable,
    response_ids,
)


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
