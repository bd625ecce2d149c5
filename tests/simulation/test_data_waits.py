"""Who waits for what at a data shard, on a virtual clock: woken by events, and never beyond the deadline."""

import asyncio

import pytest

from laminar.data.journal import MemoryJournal
from laminar.data.ports import DataRules
from laminar.data.shard import DataShard
from laminar.data.signal import Signal
from laminar.schema.trajectories import Batch, Finish, Prompt, Scored
from laminar.simulator.clock import run
from laminar.telemetry.events import NullEvents


class Prompts:
    num_train = 10
    num_heldout = 1

    def prompt(self, split: str, index: int) -> Prompt:
        return Prompt(prompt_id=f"{split}{index}", token_ids=(1,), payload={})


def shard(max_groups_ahead: int = 1) -> DataShard:
    rules = DataRules(group_size=1, max_groups_ahead=max_groups_ahead)
    return DataShard(MemoryJournal(), Prompts(), rules, NullEvents())


async def answer(shard: DataShard, lease: str, batch: Batch) -> None:
    for item in batch.items:
        finish = Finish(trajectory_id=item.trajectory_id, attempt=0, stop_reason="stop", grade=Scored(reward=1.0))
        assert await shard.stream(lease, (finish,)) == ()


@pytest.mark.parametrize("wait_s", [0.0, 0.25, 3600.0])
def test_every_wait_ends_exactly_at_its_deadline(wait_s: float):
    async def main() -> None:
        loop, data = asyncio.get_running_loop(), shard()
        assert (await data.claim("a", 0, 1, wait_s)).items
        for wait, nothing in (
            (data.claim("b", 0, 1, wait_s), Batch()),
            (data.sample(1, 0, 1, wait_s), ()),
            (data.evaluation(3, wait_s), None),
        ):
            started_s = loop.time()
            assert await wait == nothing
            assert loop.time() - started_s == pytest.approx(wait_s)

    run(main())


def test_waiters_go_on_at_the_moment_of_the_event_and_in_the_order_in_which_they_came():
    async def main() -> None:
        loop, data = asyncio.get_running_loop(), shard()
        batch, served = await data.claim("first", 0, 1, 0.0), []

        async def claim(lease: str) -> None:
            if (got := await data.claim(lease, 0, 1, 1000.0)).items:
                served.append((lease, loop.time()))
                await answer(data, lease, got)

        started_s = loop.time()
        waiting = []
        for lease in ("b", "c", "d"):
            waiting.append(asyncio.ensure_future(claim(lease)))
            await asyncio.sleep(1.0)
        await answer(data, "first", batch)
        for part in (0, 1, 2):
            await asyncio.sleep(10.0)
            assert len(await data.sample(1, part, 1, 1000.0)) == 1
        await asyncio.gather(*waiting)
        assert [lease for lease, _ in served] == ["b", "c", "d"]
        assert [at_s - started_s for _, at_s in served] == pytest.approx([13.0, 23.0, 33.0])

    run(main())


def test_a_claim_that_waited_while_a_version_was_published_is_sent_for_it():
    async def main() -> None:
        loop, data = asyncio.get_running_loop(), shard()
        await answer(data, "first", await data.claim("first", 0, 1, 0.0))
        started_s = loop.time()
        waiting = asyncio.ensure_future(data.claim("a", 0, 1, 1000.0))
        await asyncio.sleep(5.0)
        await data.sample(2, 0, 1, 0.0)
        assert await waiting == Batch()
        assert loop.time() - started_s == pytest.approx(5.0)
        assert len((await data.claim("a", 1, 1, 0.0)).items) == 1

    run(main())


def test_two_calls_of_one_lease_get_the_same_batch():
    async def main() -> None:
        data = shard()
        await answer(data, "first", await data.claim("first", 0, 1, 0.0))
        calls = [asyncio.ensure_future(data.claim("a", 0, 1, 50.0)) for _ in range(2)]
        await asyncio.sleep(1.0)
        await data.sample(1, 0, 1, 0.0)
        one, other = await asyncio.gather(*calls)
        assert one == other
        assert len(one.items) == 1

    run(main())


def test_a_cancelled_wait_leaves_nothing_behind():
    async def main() -> None:
        data = shard()
        await data.claim("a", 0, 1, 0.0)
        waits = [asyncio.ensure_future(wait) for wait in (data.claim("b", 0, 1, 1e6), data.sample(1, 0, 1, 1e6))]
        await asyncio.sleep(1.0)
        for wait in waits:
            wait.cancel()
        await asyncio.wait(waits)
        assert (await data.stats()).waits == ()
        await data.request_evaluation(0)
        assert [lease.lease_id for lease in await data.leases()] == ["a"]

    run(main())


def test_a_signal_tries_once_per_event():
    async def main() -> None:
        signal, tries = Signal(), []

        def attempt() -> int | None:
            tries.append(asyncio.get_running_loop().time())
            return len(tries) if len(tries) == 3 else None

        waiting = asyncio.ensure_future(signal.wait_for(attempt, 100.0))
        for _ in range(2):
            await asyncio.sleep(7.0)
            signal.fire()
        assert await waiting == 3
        assert len(tries) == 3

    run(main())
