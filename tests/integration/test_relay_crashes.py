"""Whoever is killed at whatever instant: nothing torn is seen, nothing is leaked, the others go on."""

import asyncio
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import relay_kit as kit

from laminar.relay.client import ClientRules
from laminar.relay.publisher import WeightPublisher
from laminar.relay.reader import WeightReader
from laminar.schema.errors import PeerLost


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "relay.sock"


async def told(pipe: Connection, timeout_s: float = 30.0) -> object:
    """The next message of a child."""
    assert await asyncio.to_thread(pipe.poll, timeout_s), "the child is silent"
    return pipe.recv()


async def test_a_publisher_killed_while_it_writes_is_never_seen_and_never_missed(path: Path) -> None:
    rng = random.Random(7)
    num_torn = 0
    with kit.process(kit.run_relay, path):
        async with WeightReader(path, kit.SECRET) as reader, WeightPublisher(path, kit.SECRET, "bfloat16") as successor:
            for version in (-1, 0):
                span_s = await successor.publish(version, kit.weights(version, 40, 200_000))
            for version in range(1, 17, 2):
                with kit.process(kit.run_publisher, path, range(version, version + 1), 40, 200_000) as (child, pipe):
                    assert await told(pipe) == ("begins", version)
                    await asyncio.sleep(rng.uniform(0.0, span_s))
                    child.kill()
                    child.join()
                newest = await until_idle(reader)
                num_torn += newest < version
                async with reader.lease() as held:
                    assert held.version in (version - 1, version)
                    assert all(kit.is_of(tensor, held.version) for tensor in held.tensors.values())
                await successor.publish(version + 1, kit.weights(version + 1, 40, 200_000))
                assert await reader.newest() == version + 1
            status = await reader.status()
            assert status.num_slots <= kit.KEEP_VERSIONS + 1
            assert status.num_peers == 2
    assert num_torn >= 3, "the kills came too late to say anything"


async def until_idle(reader: WeightReader) -> int:
    """Newest version once the relay has noticed the death."""
    status = await kit.eventually(reader.status, lambda status: not status.incoming and status.num_peers <= 2)
    assert status.newest is not None
    return status.newest


async def test_a_killed_reader_frees_its_lease_and_the_slot_is_used_again(path: Path) -> None:
    with kit.process(kit.run_relay, path):
        async with WeightReader(path, kit.SECRET) as reader, WeightPublisher(path, kit.SECRET) as publisher:
            await publisher.publish(0, kit.weights(0))
            with kit.process(kit.run_leaser, path) as (child, pipe):
                assert await told(pipe) == 0
                for version in range(1, 6):
                    await publisher.publish(version, kit.weights(version))
                held = {v.version: v.num_leases for v in (await reader.status()).versions}
                assert held[0] == 1
                child.kill()
                child.join()
            await kit.eventually(reader.status, lambda status: not any(v.num_leases for v in status.versions))
            await kit.eventually(reader.status, lambda status: 0 not in [v.version for v in status.versions])
            for version in range(6, 10):
                await publisher.publish(version, kit.weights(version))
            status = await reader.status()
            assert 0 not in [v.version for v in status.versions]
            assert status.num_slots == kit.KEEP_VERSIONS + 1


async def test_a_killed_relay_is_noticed_at_once_leaves_nothing_and_is_replaced(path: Path) -> None:
    async with WeightReader(path, kit.SECRET) as reader, WeightPublisher(path, kit.SECRET) as publisher:
        with kit.process(kit.run_relay, path) as (relay, _):
            await publisher.publish(0, kit.weights(0))
            assert kit.weight_segments() != []
            waiting = asyncio.create_task(reader.wait_newer(0, 60.0))
            lease = reader.lease()
            held = await lease.__aenter__()
            relay.kill()
            relay.join()
            killed_s = time.monotonic()
            with pytest.raises(PeerLost, match="the relay is gone"):
                await waiting
            assert time.monotonic() - killed_s < 2.0
            assert all(kit.is_of(tensor, 0) for tensor in held.tensors.values())
            tensor = held.tensors["w0"]
            with pytest.raises(PeerLost, match="the relay is gone"):
                await lease.__aexit__(None, None, None)
            assert kit.is_of(tensor, 0)  # the memory lives as long as somebody shows it
            del tensor, held
        impatient = WeightReader(path, kit.SECRET, rules=ClientRules(connect_s=0.1))
        with pytest.raises(PeerLost, match="no relay at"):
            await impatient.newest()
        assert kit.weight_segments() == []
        assert kit.shared_memory_files() == []

        with kit.process(kit.run_relay, path):
            assert await reader.newest() is None
            await publisher.publish(1, kit.weights(1))
            async with reader.lease() as held:
                assert held.version == 1
                assert all(kit.is_of(tensor, 1) for tensor in held.tensors.values())


async def test_a_reader_that_is_there_first_waits_for_the_relay(path: Path) -> None:
    async with WeightReader(path, kit.SECRET, rules=ClientRules(connect_s=30.0)) as reader:
        asking = asyncio.create_task(reader.newest())
        await asyncio.sleep(0.1)
        with kit.process(kit.run_relay, path):
            assert await asking is None
