"""Replicas that are much faster than the trainer: admission holds them back, so that next to nothing goes stale."""

import asyncio
import itertools

import pytest

from laminar.data.journal import MemoryJournal
from laminar.data.ports import DataRules
from laminar.data.shard import DataShard
from laminar.scheduling.admission import max_buffer_wait
from laminar.schema.trajectories import Finish, Prompt, Scored
from laminar.simulator.clock import run
from laminar.telemetry.events import NullEvents

GROUPS_PER_STEP = 4
NUM_STEPS = 40
TRAIN_S = 10.0


class Prompts:
    num_train = 100
    num_heldout = 0

    def prompt(self, split: str, index: int) -> Prompt:
        return Prompt(prompt_id=f"{split}{index}", token_ids=(1,), payload={})


async def replica(shard: DataShard, number: int) -> None:
    """Answers a group in a tenth of a second under whatever version is the newest."""
    for cycle in itertools.count(1):
        lease = f"r{number}/1/{cycle}"
        version = (await shard.stats()).learner_version
        batch = await shard.claim(lease, version, 2, 5.0)
        await asyncio.sleep(0.1)
        for item in batch.items:
            finish = Finish(trajectory_id=item.trajectory_id, attempt=0, stop_reason="stop", grade=Scored(reward=1.0))
            await shard.stream(lease, (finish,))


async def overloaded(max_groups_ahead: int, max_staleness: int) -> dict[str, int]:
    """How many trajectories ended how after NUM_STEPS slow steps."""
    rules = DataRules(
        group_size=2, max_groups_ahead=max_groups_ahead, sampler="bounded_staleness", max_staleness=max_staleness
    )
    shard = DataShard(MemoryJournal(), Prompts(), rules, NullEvents())
    replicas = [asyncio.ensure_future(replica(shard, number)) for number in range(8)]
    for step in range(1, NUM_STEPS + 1):
        while not await shard.sample(step, 0, GROUPS_PER_STEP, 100.0):
            pass
        await asyncio.sleep(TRAIN_S)
        await shard.commit(step)
    for task in replicas:
        task.cancel()
    await asyncio.wait(replicas)
    return {str(state): num for state, num in (await shard.stats()).counts.items()}


@pytest.mark.parametrize("ahead", [4, 8, 16])
def test_nothing_is_dropped_under_permanent_overload_if_the_bounds_fit_together(ahead: int):
    """Beside its wait in the buffer, an answer sees at most one publish while it is made."""
    counts = run(overloaded(ahead, max_buffer_wait(ahead, GROUPS_PER_STEP) + 1))
    assert counts["trained"] == NUM_STEPS * GROUPS_PER_STEP * 2
    assert counts.get("dropped", 0) == 0


def test_without_pacing_most_of_the_work_would_go_stale():
    counts = run(overloaded(400, 2))
    assert counts["dropped"] > counts["trained"]
