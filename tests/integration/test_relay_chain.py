"""Weights flow down a chain of relay processes, whoever is killed, frozen, late or slow."""

import asyncio
import contextlib
import gc
import importlib.util
import logging
import os
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import chain_kit as kit
import pytest
import torch

from laminar.relay.client import ClientRules
from laminar.relay.keeper import ChainWatch, KeeperRules, look
from laminar.relay.nixl_link import PACKAGES
from laminar.relay.parcels import Part
from laminar.relay.publisher import WeightPublisher
from laminar.relay.pushing import ChainPublisher, PushRules
from laminar.relay.reader import WeightReader
from laminar.schema.errors import PortError

log = logging.getLogger(__name__)

NUM_INSTANTS = int(os.environ.get("LAMINAR_KILL_INSTANTS", "4"))
"""Random instants per kind of failure: few on every push, twenty for the figures in docs/relay.md."""

WARM = 4
MIB = 16
"""Large enough for a kill to hit a version on its way."""

SLACK_S = 5.0
"""What a repair may take on a machine that is busy with other things; what it does take is logged."""

DEAD_AFTER_S = 1.0
NAMES = ("a", "b", "c", "d")
QUICK = KeeperRules(dead_after_s=DEAD_AFTER_S, slow_window_s=0.5)
FAST_LINKS = {"beat_s": 0.2, "deadline_s": DEAD_AFTER_S, "chunk_bytes": 64 << 10}


def weights(version: int, mib: int = 4) -> dict[str, torch.Tensor]:
    """Weights that show which version they belong to."""
    return {f"w{at}": torch.full((mib << 17,), float(version * 4 + at), dtype=torch.bfloat16) for at in range(4)}


class Readers:
    """A reader at each relay, that reads all the time, takes the checksum of every read and remembers what was torn."""

    def __init__(self, chain: kit.ChainOfProcesses) -> None:
        self._chain = chain
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.newest: dict[str, int | None] = {}
        self.torn: list[str] = []
        self.num_reads = 0

    def attach(self, relay_id: str) -> None:
        self.newest[relay_id] = None
        self._tasks[relay_id] = asyncio.create_task(self._read(relay_id))

    async def detach(self, relay_id: str) -> None:
        self.newest.pop(relay_id)
        task = self._tasks.pop(relay_id)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def all_have(self, version: int, names: list[str], within_s: float) -> float:
        """Seconds until all of these read the version."""
        started_s = time.monotonic()
        async with asyncio.timeout(within_s):
            while any(not self.has(name, version) for name in names):  # noqa: ASYNC110 (other processes)
                await asyncio.sleep(0.002)
        return time.monotonic() - started_s

    def has(self, name: str, version: int) -> bool:
        newest = self.newest[name]
        return newest is not None and newest >= version

    async def _read(self, relay_id: str) -> None:
        rules = ClientRules(connect_s=5.0, call_s=5.0)
        async with WeightReader(self._chain.socket(relay_id), kit.SECRET, rules=rules) as reader:
            while True:
                try:
                    version = await reader.wait_newer(self.newest[relay_id], 0.2)
                    if version is not None:
                        await self._check(reader, relay_id)
                except PortError:  # it is being killed
                    await asyncio.sleep(0.01)

    async def _check(self, reader: WeightReader, relay_id: str) -> None:
        async with reader.lease() as held:
            version = held.version
            good = held.tensors.compute_checksum() == held.tensors.checksum
            good &= all(t[0] == t[-1] == float(version * 4 + at) for at, t in enumerate(held.tensors.values()))
            self.num_reads += 1
        if not good:
            self.torn.append(f"version {version} of {relay_id}")
        self.newest[relay_id] = version


@contextlib.asynccontextmanager
async def learner(chain: kit.ChainOfProcesses) -> AsyncIterator[ChainPublisher]:
    """A learner on another machine than the relays."""
    watch = ChainWatch(*chain.keeper.address, kit.SECRET)
    watching = asyncio.create_task(watch.run())
    try:
        rules = PushRules(idle_s=DEAD_AFTER_S, epoch_wait_s=0.2, second_s=20.0)
        yield ChainPublisher(watch, kit.SECRET, rules=rules)
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


@contextlib.asynccontextmanager
async def running(folder: Path, names: tuple[str, ...] = NAMES, link: str = "tcp") -> AsyncIterator[tuple]:
    """A chain, a learner and a reader for each relay; what was torn or left behind fails the test."""
    before = open_files()
    with kit.chain_of_processes(folder, names, QUICK, **FAST_LINKS, link=link) as chain:
        readers = Readers(chain)
        for name in names:
            readers.attach(name)
        async with learner(chain) as sink:
            yield chain, sink, readers
        for name in list(readers.newest):
            await readers.detach(name)
        pids = [process.pid for process in chain.relays.values()]
    assert readers.torn == []
    assert not any(kit.is_alive(pid) for pid in pids)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5.0):
            while open_files() - before:
                await asyncio.sleep(0.05)
                gc.collect()  # errors of connections that were killed hold what their frames held
    assert open_files() - before == Counter()
    assert not [name for name in os.listdir("/dev/shm") if "laminar" in name]


async def warmed_up(sink: ChainPublisher, readers: Readers, role: str) -> float:
    """Publish until every slot is warm; returns how long a version takes then to the master, or else to the last."""
    for version in range(WARM):
        push_s = await sink.publish(version, weights(version, MIB))
        span_s = push_s + await readers.all_have(version, list(NAMES), 20.0)
    return span_s if role != "master" else push_s


def open_files() -> Counter[str]:
    """What the descriptors of this process stand for; those of earlier tests may be closed at any time."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(re.sub(r"\d+", "n", os.readlink(f"/proc/self/fd/{fd}")))
    return Counter(names)


def victim_of(role: str, order: list[str]) -> str:
    return {"master": order[0], "middle": order[len(order) // 2], "last": order[-1]}[role]


@pytest.mark.parametrize("role", ["middle", "last", "master"])
async def test_survivors_of_a_killed_relay_soon_hold_the_newest_version(role: str, tmp_path: Path) -> None:
    rng = random.Random(5)
    async with running(tmp_path) as (chain, sink, readers):
        span_s = await warmed_up(sink, readers, role)
        slowest_s = stall_s = 0.0
        num_torn = 0
        for version in range(WARM, WARM + NUM_INSTANTS):
            victim = victim_of(role, chain.order())
            survivors = [name for name in chain.order() if name != victim]
            publishing = asyncio.create_task(sink.publish(version, weights(version, MIB)))
            await asyncio.sleep(rng.uniform(0.0, span_s) if version > WARM else 0.0)  # once for sure on its way
            chain.relays[victim].kill()
            killed_s = time.monotonic()
            num_torn += not all(readers.has(name, version) for name in survivors)
            stall_s = max(stall_s, await publishing)
            await readers.all_have(version, survivors, 20.0)
            slowest_s = max(slowest_s, time.monotonic() - killed_s)
            chain.start(victim)
            await readers.all_have(version, list(NAMES), 20.0)
        log.info("%s: %d of %d torn, survivors %.3f s, push %.3f s", role, num_torn, NUM_INSTANTS, slowest_s, stall_s)
        assert num_torn, "the kills came too late to say anything"
        assert slowest_s < SLACK_S
        assert stall_s < SLACK_S


@pytest.mark.parametrize("role", ["middle", "master"])
async def test_survivors_of_a_frozen_relay_hold_it_soon_after_the_heartbeat_timeout(role: str, tmp_path: Path) -> None:
    rng = random.Random(6)
    async with running(tmp_path) as (chain, sink, readers):
        span_s = await warmed_up(sink, readers, role)
        slowest_s = 0.0
        num_torn = 0
        for version in range(WARM, WARM + NUM_INSTANTS):
            victim = victim_of(role, chain.order())
            survivors = [name for name in chain.order() if name != victim]
            publishing = asyncio.create_task(sink.publish(version, weights(version, MIB)))
            await asyncio.sleep(rng.uniform(0.0, span_s) if version > WARM else 0.0)  # once for sure on its way
            chain.relays[victim].freeze()
            frozen_s = time.monotonic()
            num_torn += not all(readers.has(name, version) for name in survivors)
            await publishing
            await readers.all_have(version, survivors, 20.0)
            slowest_s = max(slowest_s, time.monotonic() - frozen_s)
            chain.relays[victim].thaw()
            await readers.all_have(version, list(NAMES), 10.0)  # it learns of the epoch, and catches up
            await in_chain(chain, victim)
        log.info("%s frozen: %d of %d torn, survivors %.3f s", role, num_torn, NUM_INSTANTS, slowest_s)
        assert num_torn, "it froze too late to say anything"
        assert slowest_s < DEAD_AFTER_S + SLACK_S


@pytest.mark.skipif(not any(map(importlib.util.find_spec, PACKAGES)), reason="NIXL is not installed")
@pytest.mark.parametrize("how", ["kill", "freeze"])
async def test_a_chain_of_one_sided_links_is_repaired_as_well(how: str, tmp_path: Path) -> None:
    async with running(tmp_path, link="nixl-tcp") as (chain, sink, readers):
        span_s = await warmed_up(sink, readers, "middle")
        victim = victim_of("middle", chain.order())
        survivors = [name for name in chain.order() if name != victim]
        publishing = asyncio.create_task(sink.publish(WARM, weights(WARM, MIB)))
        await asyncio.sleep(span_s / 3)
        getattr(chain.relays[victim], how)()
        hit_s = time.monotonic()
        await publishing
        await readers.all_have(WARM, survivors, 20.0)
        log.info("%s over nixl: survivors %.3f s", how, time.monotonic() - hit_s)
        assert time.monotonic() - hit_s < DEAD_AFTER_S + SLACK_S
        for version in (WARM + 1, WARM + 2, WARM + 3):  # slots are used again, but not those the dead one may write to
            await sink.publish(version, weights(version, MIB))
            await readers.all_have(version, survivors, 20.0)


async def in_chain(chain: kit.ChainOfProcesses, relay_id: str) -> None:
    async with asyncio.timeout(10.0):
        while relay_id not in chain.order():  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.01)


async def test_a_learner_is_answered_once_a_second_relay_has_its_version(tmp_path: Path) -> None:
    with kit.chain_of_processes(tmp_path, ("a", "b"), KeeperRules(dead_after_s=60.0), deadline_s=60.0) as chain:
        async with learner(chain) as sink, WeightReader(chain.socket("a"), kit.SECRET) as reader:
            chain.relays["b"].freeze()
            publishing = asyncio.create_task(sink.publish(1, weights(1)))
            assert await reader.wait_newer(None, 20.0) == 1
            assert not publishing.done(), "only the master has it"
            chain.relays["b"].kill()
            await publishing  # there is no second relay any more


async def test_a_learner_hears_what_the_master_lacks_so_that_it_can_push_it_again(tmp_path: Path) -> None:
    with kit.chain_of_processes(tmp_path, ("a",), QUICK, **FAST_LINKS) as chain:
        async with learner(chain) as sink:
            assert await sink.newest() is None
            await sink.publish(3, weights(3))
            async with WeightReader(chain.socket("a"), kit.SECRET) as reader:
                assert await reader.newest() == 3
            chain.relays["a"].kill()
            chain.start("b")  # nobody has the weights any more
            chain.await_chain(lambda order: order == ["b"])
            assert await sink.newest() is None
            await sink.publish(3, weights(3))
            await sink.publish(3, weights(3))  # the same again changes nothing
            async with WeightReader(chain.socket("b"), kit.SECRET) as reader, reader.lease() as held:
                assert (held.version, float(held.tensors["w2"][0])) == (3, 14.0)


async def test_a_late_relay_and_one_that_comes_back_get_the_newest_version(tmp_path: Path) -> None:
    async with running(tmp_path, ("a",)) as (chain, sink, readers):
        await sink.publish(3, weights(3))
        chain.start("b")
        readers.attach("b")
        await readers.all_have(3, ["a", "b"], 20.0)
        status = await look(*chain.keeper.address, kit.SECRET)
        assert [report.member.relay_id for report in status.relays] == ["a", "b"]


async def test_relays_outlive_their_keeper_and_join_its_successor_under_a_later_epoch(tmp_path: Path) -> None:
    with kit.chain_of_processes(tmp_path, ("a", "b"), QUICK, **FAST_LINKS) as chain:
        epoch = (await look(*chain.keeper.address, kit.SECRET)).epoch
        port = chain.keeper.address[1]
        async with learner(chain) as sink:
            await sink.publish(0, weights(0))
            chain.keeper.kill()
            await sink.publish(1, weights(1))  # the chain goes on as it was
            async with WeightReader(chain.socket("b"), kit.SECRET) as reader:
                assert await reader.wait_newer(0, 10.0) == 1
            chain.keeper.close()
            chain.keeper = kit.Process(kit.KeepOrder(secret=kit.SECRET, port=port, rules=QUICK))
            chain.await_chain(lambda order: sorted(order) == ["a", "b"])
            status = await look(*chain.keeper.address, kit.SECRET)
            assert status.epoch > epoch
            await sink.publish(2, weights(2))
            async with WeightReader(chain.socket("b"), kit.SECRET) as reader:
                assert await reader.wait_newer(1, 10.0) == 2


async def test_ranks_push_their_parts_in_parallel_and_the_version_is_seen_once_all_are_there(tmp_path: Path) -> None:
    tensors = {f"w{at}": torch.randn(100_000 + at) for at in range(9)} | {"scalar": torch.tensor(2.0)}
    with kit.chain_of_processes(tmp_path, ("a", "b"), QUICK, **FAST_LINKS) as chain:
        async with learner(chain) as _:
            watch = ChainWatch(*chain.keeper.address, kit.SECRET)
            watching = asyncio.create_task(watch.run())
            ranks = [
                ChainPublisher(watch, kit.SECRET, part=Part(index=index, count=3), life=b"one life")
                for index in range(3)
            ]
            async with WeightReader(chain.socket("b"), kit.SECRET) as reader:
                first = [asyncio.create_task(rank.publish(1, tensors)) for rank in ranks[:2]]
                await asyncio.sleep(0.3)
                assert not any(task.done() for task in first)
                assert await reader.newest() is None
                await asyncio.gather(*first, ranks[2].publish(1, tensors))
                assert await reader.wait_newer(None, 10.0) == 1
                async with reader.lease() as held:
                    assert all(torch.equal(held.tensors[name], tensor) for name, tensor in tensors.items())
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching


async def test_a_learner_beside_the_master_writes_into_its_memory_and_nobody_else_s(
    tmp_path: Path,
) -> None:
    with kit.chain_of_processes(tmp_path, ("a", "b"), QUICK, **FAST_LINKS) as chain:
        async with WeightPublisher(chain.socket("b"), kit.SECRET) as stranger:
            with pytest.raises(PortError, match=r"relay b (does not lead|has not joined) its chain"):
                await stranger.publish(0, weights(0))
        async with WeightPublisher(chain.socket("a"), kit.SECRET) as local:
            watch = ChainWatch(*chain.keeper.address, kit.SECRET)
            watching = asyncio.create_task(watch.run())
            sink = ChainPublisher(watch, kit.SECRET, local=local, local_id="a")
            await sink.publish(0, weights(0))
            async with WeightReader(chain.socket("b"), kit.SECRET) as reader:
                assert await reader.wait_newer(None, 10.0) == 0
                tensors = weights(1)
                written = await sink.write(1, tensors)
                tensors["w0"].zero_()
                assert await sink.newest() == 0
                await sink.complete(written)
                assert await reader.wait_newer(0, 10.0) == 1
                async with reader.lease() as held:
                    assert torch.equal(held.tensors["w0"], weights(1)["w0"])
                lost = await sink.write(2, tensors)
                chain.relays["a"].kill()  # the learner's own relay: it goes on over the network
                with pytest.raises(PortError):
                    await sink.complete(lost)
                await sink.publish(3, weights(3))
                assert await reader.newest() == 3
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching


async def test_weights_of_a_learner_that_went_back_replace_those_it_had_published(tmp_path: Path) -> None:
    async with running(tmp_path, ("a", "b")) as (chain, first_life, readers):
        for version in (0, 1, 2):
            await first_life.publish(version, weights(version))
        await readers.all_have(2, ["a", "b"], 20.0)
        async with learner(chain) as second_life:
            other = {f"w{at}": tensor + 0 for at, tensor in enumerate(weights(1).values())}
            other["w3"][5] = 77.0
            await second_life.publish(1, other)
            async with WeightReader(chain.socket("b"), kit.SECRET) as reader:
                async with asyncio.timeout(10.0):
                    while await reader.newest() != 1:  # noqa: ASYNC110 (another process)
                        await asyncio.sleep(0.01)
                async with reader.lease() as held:
                    assert held.tensors["w3"][5] == 77.0
