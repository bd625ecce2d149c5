"""Relays on machines of their own: network namespaces with links that have a rate and can be cut. Needs root."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import chain_kit as kit
import pytest
import torch

from laminar.relay import netns
from laminar.relay.keeper import KeeperRules
from laminar.relay.publisher import WeightPublisher
from laminar.relay.reader import WeightReader

REASON = netns.missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

MBIT_PER_S = 200.0
RULES = KeeperRules(dead_after_s=1.0, slow_window_s=0.6)
LINKS = {"beat_s": 0.2, "deadline_s": 1.0, "with_deltas": False}


def weights(version: int, mib: int) -> dict[str, torch.Tensor]:
    make = torch.Generator().manual_seed(version)
    return {"w": torch.randint(-(1 << 62), 1 << 62, (mib << 17,), generator=make), "version": torch.tensor(version)}


@contextlib.contextmanager
def relays_on(lab: netns.Lab, folder: Path) -> Iterator[kit.ChainOfProcesses]:
    """A keeper on the first machine, and a relay named after its number on every machine."""
    first = lab.machines[0]
    where = {"prefix": first.prefix, "keeper_host": first.address}
    with kit.chain_of_processes(folder, (), RULES, **where, **LINKS) as chain:
        for number, machine in enumerate(lab.machines):
            chain.start(str(number), prefix=machine.prefix, host=machine.address)
        yield chain


async def arrival_s(chain: kit.ChainOfProcesses, name: str, version: int, wait_s: float) -> float:
    """When a relay had a version, by the machine's monotonic clock."""
    event = await asyncio.to_thread(
        chain.relays[name].expect, lambda e: e["kind"] == "weights_arrived" and e["version"] == version, wait_s
    )
    return float(event["t"])


async def test_the_last_of_six_machines_has_a_version_hardly_later_than_the_first(tmp_path: Path) -> None:
    with netns.lab(6, mbit_per_s=MBIT_PER_S) as lab, relays_on(lab, tmp_path) as chain:
        async with WeightPublisher(chain.socket("0"), kit.SECRET) as publisher:
            for version in range(3):  # the last one finds its slots warm and its chunks cut to the links
                started_s = time.monotonic()
                await publisher.publish(version, weights(version, 16))
                first_s, last_s = [await arrival_s(chain, name, version, 30.0) for name in ("1", "5")]
        async with WeightReader(chain.socket("5"), kit.SECRET) as reader, reader.lease(2) as held:
            assert torch.equal(held.tensors["w"], weights(2, 16)["w"])
        assert last_s - started_s < 1.5 * (first_s - started_s), "store and forward would take five times as long"


async def test_a_machine_whose_cable_is_pulled_is_left_out_and_comes_back(tmp_path: Path) -> None:
    with netns.lab(4, mbit_per_s=MBIT_PER_S) as lab, relays_on(lab, tmp_path) as chain:
        async with WeightPublisher(chain.socket("0"), kit.SECRET) as publisher:
            await publisher.publish(0, weights(0, 16))
            await arrival_s(chain, "3", 0, 30.0)
            await publisher.publish(1, weights(1, 16))
            await asyncio.sleep(0.3)  # it takes 0.7 s: the cut is in the middle
            lab.cut(1)
            cut_s = time.monotonic()
            arrived_s = [await arrival_s(chain, name, 1, 20.0) for name in ("2", "3")]
            assert max(arrived_s) - cut_s < RULES.dead_after_s + 1.0 + 2.0
            assert chain.order() == ["0", "2", "3"]
            lab.mend(1)
            await arrival_s(chain, "1", 1, 20.0)
            assert sorted(chain.order()) == ["0", "1", "2", "3"]


async def test_a_relay_that_is_a_hundred_times_slower_goes_to_the_end_where_it_holds_up_nobody(tmp_path: Path) -> None:
    with netns.lab(4, mbit_per_s=MBIT_PER_S) as lab, relays_on(lab, tmp_path) as chain:
        async with WeightPublisher(chain.socket("0"), kit.SECRET) as publisher:
            await publisher.publish(0, weights(0, 16))
            await arrival_s(chain, "3", 0, 30.0)
            await asyncio.sleep(0.5)  # a beat: what is typical is known
            lab.throttle(1, MBIT_PER_S / 100)
            await publisher.publish(1, weights(1, 32))
            published_s = time.monotonic()
            arrived_s = [await arrival_s(chain, name, 1, 30.0) for name in ("2", "3")]
            assert max(arrived_s) - published_s < 10.0, "over the slow machine it would take more than a minute"
            assert chain.order() == ["0", "2", "3", "1"]


async def test_a_version_overtakes_one_that_is_still_on_its_way(tmp_path: Path) -> None:
    with netns.lab(3, mbit_per_s=MBIT_PER_S) as lab, relays_on(lab, tmp_path) as chain:
        async with WeightPublisher(chain.socket("0"), kit.SECRET) as publisher:
            await publisher.publish(0, weights(0, 1))
            await arrival_s(chain, "2", 0, 30.0)
            for version in (1, 2, 3):  # each takes 0.7 s, and they come at once
                await publisher.publish(version, weights(version, 16))
            await arrival_s(chain, "2", 3, 30.0)
            async with WeightReader(chain.socket("2"), kit.SECRET) as reader:
                assert await reader.newest() == 3
        came = [event["version"] for event in chain.relays["2"].seen if event["kind"] == "weights_arrived"]
        assert came in ([0, 2, 3], [0, 1, 3], [0, 3]), "at most one that is older is finished first"
