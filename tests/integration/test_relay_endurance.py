"""Hundreds of versions: nothing torn, nothing grows."""

import asyncio
import logging
from pathlib import Path

import chain_kit
import psutil
import pytest
import relay_kit as kit

from laminar.relay.publisher import WeightPublisher
from laminar.relay.reader import WeightReader

log = logging.getLogger(__name__)

NUM_PUBLISHED = 200
NUM_SEEN = 50
"""Versions of those that each reader must have seen; how many more depends on who gets the processor."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "relay.sock"


async def test_no_reader_ever_sees_a_torn_version(path: Path) -> None:
    publisher = kit.process(kit.run_publisher, path, range(100_000), 12, 20_000)
    readers = [kit.process(kit.run_reader, path, NUM_SEEN, NUM_PUBLISHED - 1) for _ in range(2)]
    loop = asyncio.get_running_loop()
    with kit.process(kit.run_relay, path), readers[0] as (_, one), readers[1] as (_, two), publisher as (_, progress):
        loop.add_reader(progress.fileno(), progress.recv)  # a full pipe would stop the publisher
        for pipe in (one, two):
            assert await asyncio.to_thread(pipe.poll, 60.0), "the reader is silent"
            torn, num_reads = pipe.recv()
            assert torn == []
            assert num_reads >= NUM_SEEN
        loop.remove_reader(progress.fileno())


async def test_memory_and_descriptors_stay_flat(path: Path) -> None:
    async def publish(first: int, last: int) -> None:
        for version in range(first, last):
            await publisher.publish(version, kit.weights(version, 30, 5_000))
            async with reader.lease() as held:
                assert held.version == version
                assert kit.is_of(held.tensors["w3"], version)

    with kit.process(kit.run_relay, path) as (_, pipe):
        async with WeightPublisher(path, kit.SECRET) as publisher, WeightReader(path, kit.SECRET) as reader:
            await publish(0, 30)
            ours_before = kit.num_fds(), kit.private_bytes()
            pipe.send("?")
            relay_before = pipe.recv()
            await publish(30, 330)
            ours_after = kit.num_fds(), kit.private_bytes()
            pipe.send("?")
            relay_after = pipe.recv()
            status = await reader.status()
    assert status.num_slots == kit.KEEP_VERSIONS + 1
    assert ours_after[0] <= ours_before[0]
    assert relay_after[0] <= relay_before[0]
    assert ours_after[1] < ours_before[1] + (4 << 20)
    assert relay_after[1] < relay_before[1] + (2 << 20)


async def test_memory_stays_flat_over_a_thousand_versions_down_a_chain(tmp_path: Path) -> None:
    def memory() -> dict[str, int]:
        """KiB, without what processes share; and of /dev/shm."""
        used = {name: psutil.Process(relay.pid).memory_full_info().uss >> 10 for name, relay in chain.relays.items()}
        used["keeper"] = psutil.Process(chain.keeper.pid).memory_full_info().uss >> 10
        return used | {"/dev/shm": psutil.disk_usage("/dev/shm").used >> 10 if Path("/dev/shm").is_dir() else 0}

    async def publish(first: int, last: int) -> None:
        for version in range(first, last):
            await publisher.publish(version, kit.weights(version, 10, 5_000))
            await reader.wait_newer(version - 1, 20.0)
            async with reader.lease() as held:
                assert kit.is_of(held.tensors["w3"], held.version)

    with chain_kit.chain_of_processes(tmp_path, ("a", "b", "c")) as chain:
        async with (
            WeightPublisher(chain.socket("a"), chain_kit.SECRET) as publisher,
            WeightReader(chain.socket("c"), chain_kit.SECRET) as reader,
        ):
            await publish(0, 100)
            before = memory()
            await publish(100, 1_100)
            after = memory()
    log.info("KiB before and after 1,000 versions: %s, %s", before, after)
    for name, used in after.items():
        if name != "/dev/shm":  # others use it, too
            assert used < before[name] + (4 << 10), (name, before, after)
