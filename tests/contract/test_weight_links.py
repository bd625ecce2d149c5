"""Every way from a learner's tensors to a replica's keeps the same promises."""

import asyncio
import contextlib
import functools
import importlib.util
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from laminar.relay.keeper import ChainKeeper, ChainWatch
from laminar.relay.manifest import DTYPE_BYTES
from laminar.relay.member import ChainMember, ChainRules
from laminar.relay.memory_link import MemoryLink
from laminar.relay.nixl_link import PACKAGES
from laminar.relay.process import run_relay
from laminar.relay.publisher import WeightPublisher
from laminar.relay.pushing import ChainPublisher
from laminar.relay.reader import WeightReader
from laminar.relay.service import RelayService
from laminar.relay.tensors import Rows, Slice
from laminar.rollout.ports import WeightSource
from laminar.schema.errors import RunFailed, WeightsUnavailable
from laminar.trainer.ports import WeightSink

KEEP_VERSIONS = 2
SECRET = b"a secret of the contract tests"


@dataclass
class Link:
    """Both ends of a link, and what the manager sees of it."""

    sink: WeightSink
    source: WeightSource
    relay: Any


@contextlib.asynccontextmanager
async def memory_link(folder: Path, dtype: str) -> AsyncIterator[Link]:
    link = MemoryLink(dtype, keep_versions=KEEP_VERSIONS)
    yield Link(link, link, link)


@contextlib.asynccontextmanager
async def socket_link(folder: Path, dtype: str) -> AsyncIterator[Link]:
    path = folder / "relay.sock"
    service = RelayService(socket_path=path, secret=SECRET, keep_versions=KEEP_VERSIONS)
    running = asyncio.create_task(service.run())
    async with WeightPublisher(path, SECRET, dtype) as publisher, WeightReader(path, SECRET) as reader:
        yield Link(publisher, reader, service)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


@contextlib.asynccontextmanager
async def chain_link(folder: Path, dtype: str, kind: str = "tcp", *, pushed: bool = False) -> AsyncIterator[Link]:
    """Two relays: the learner publishes to the first one, the replica reads from the second."""
    async with contextlib.AsyncExitStack() as stack:
        keeper = ChainKeeper(host="127.0.0.1", port=0, secret=SECRET)
        await stack.enter_async_context(running(keeper.run()))
        await keeper.listening.wait()
        host, port = keeper.address
        first, second = [
            await stack.enter_async_context(chained(folder / name, name, kind, host, port)) for name in ("one", "two")
        ]
        if pushed:
            watch = ChainWatch(host, port, SECRET)
            await stack.enter_async_context(running(watch.run()))
            publisher: Any = ChainPublisher(watch, SECRET, dtype)
        else:
            publisher = await stack.enter_async_context(WeightPublisher(folder / "one", SECRET, dtype))
        reader = await stack.enter_async_context(WeightReader(folder / "two", SECRET))
        yield Link(Awaited(publisher, second), reader, Both(first, second))


@contextlib.asynccontextmanager
async def chained(path: Path, relay_id: str, kind: str, host: str, port: int) -> AsyncIterator[RelayService]:
    service = RelayService(socket_path=path, secret=SECRET, keep_versions=KEEP_VERSIONS)
    rules = ChainRules(relay_id=relay_id, keeper_host=host, keeper_port=port, link=kind, beat_s=0.2)
    member = ChainMember(service, SECRET, rules)
    async with running(run_relay(service, member)):
        await member.listening.wait()
        while relay_id not in [known.relay_id for known in member.chain.members]:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        yield service


@contextlib.asynccontextmanager
async def running(loop: Any) -> AsyncIterator[None]:
    task = asyncio.create_task(loop)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class Awaited:
    """A sink that has completed a version when the end of the chain has heard of it, as the suite expects it."""

    def __init__(self, sink: Any, last: RelayService) -> None:
        self._sink = sink
        self._last = last

    async def publish(self, version: int, tensors: Any) -> float:
        try:
            stall_s = await self._sink.publish(version, tensors)
        except BaseException:
            await self._until(lambda status: not status.incoming)
            raise
        await self._until_seen(version)
        return stall_s

    async def write(self, version: int, tensors: Any) -> Any:
        return version, await self._sink.write(version, tensors)

    async def complete(self, written: Any) -> None:
        await self._sink.complete(written[1])
        await self._until_seen(written[0])

    async def _until_seen(self, version: int) -> None:
        await self._until(lambda status: version in [held.version for held in status.versions])

    async def _until(self, condition: Callable[[Any], bool]) -> None:
        async with asyncio.timeout(10.0):
            while not condition(await self._last.status()):  # noqa: ASYNC110 (the relay has no event for it)
                await asyncio.sleep(0.001)


class Both:
    """What the manager sees of two relays: what it orders goes to both, what it asks is about the last."""

    def __init__(self, first: RelayService, last: RelayService) -> None:
        self._first = first
        self._last = last

    async def pin(self, versions: Any) -> None:
        for relay in (self._first, self._last):
            await relay.pin(versions)

    async def rewind(self, version: int) -> None:
        await self._first.rewind(version)
        async with asyncio.timeout(10.0):
            while (newest := await self._last.newest()) is not None and newest > version:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def status(self) -> Any:
        return await self._last.status()


LINKS = {
    "memory": memory_link,
    "socket": socket_link,
    "tcp chain": chain_link,
    "pushed to a tcp chain": functools.partial(chain_link, pushed=True),
    "nixl chain": functools.partial(chain_link, kind="nixl-tcp"),
}

OpenLink = Callable[..., contextlib.AbstractAsyncContextManager[Link]]


NIXL = pytest.mark.skipif(
    not any(importlib.util.find_spec(package) for package in PACKAGES), reason="NIXL is not installed (extra `rdma`)"
)


@pytest.fixture(params=[pytest.param(name, marks=NIXL if "nixl" in name else ()) for name in LINKS])
def open_link(request: pytest.FixtureRequest, tmp_path: Path) -> OpenLink:
    return lambda dtype="keep": LINKS[request.param](tmp_path, dtype)


def filled(version: int, num: int = 1_000) -> dict[str, torch.Tensor]:
    """Weights that show which version they belong to."""
    return {"w": torch.full((num,), float(version)), "v": torch.full((3, 5), version, dtype=torch.int64)}


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*flat)


async def test_there_are_no_weights_before_the_first_publish(open_link: OpenLink) -> None:
    async with open_link() as link:
        assert await link.source.newest() is None
        assert await link.source.wait_newer(None, 0.01) is None
        with pytest.raises(WeightsUnavailable, match="no weights yet"):
            async with link.source.lease():
                pass


async def test_every_dtype_arrives_bit_for_bit(open_link: OpenLink) -> None:
    tensors = {}
    for name, size in DTYPE_BYTES.items():
        raw = torch.randint(0, 2 if name == "bool" else 256, (7 * size,), dtype=torch.uint8)
        tensors[name] = raw.view(getattr(torch, name))
    async with open_link() as link:
        await link.sink.publish(0, tensors)
        async with link.source.lease(0) as weights:
            assert weights.version == 0
            assert list(weights.tensors) == list(tensors)
            for name, tensor in tensors.items():
                assert same_bytes(weights.tensors[name], tensor), name


async def test_odd_tensors_arrive_whole(open_link: OpenLink) -> None:
    base = torch.randn(6, 8)
    tensors = {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0),
        "empty_rows": torch.empty(4, 0, 3, dtype=torch.int8),
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": torch.randn(1, 5).expand(4, 5),
        "scalar_of_bytes": torch.tensor(7, dtype=torch.uint8),
        "conjugated": torch.randn(4, dtype=torch.complex64).conj(),
        "trained": torch.randn(3, 3, requires_grad=True),
        "large": torch.randn(300, 1_000),
    }
    async with open_link() as link:
        await link.sink.publish(3, tensors)
        async with link.source.lease() as weights:
            for name, tensor in tensors.items():
                assert same_bytes(weights.tensors[name], tensor.detach().resolve_conj()), name


async def test_a_model_of_nothing_but_empty_tensors_can_be_published(open_link: OpenLink) -> None:
    async with open_link() as link:
        await link.sink.publish(1, {"nothing": torch.empty(0)})
        async with link.source.lease() as weights:
            assert weights.tensors["nothing"].shape == (0,)


async def test_tied_tensors_are_stored_once_and_found_under_both_names(open_link: OpenLink) -> None:
    embedding = torch.randn(100, 16)
    tensors = {"embed": embedding, "norm": torch.ones(16), "head": embedding}
    async with open_link() as link:
        await link.sink.publish(0, tensors)
        assert (await link.relay.status()).versions[0].num_bytes < 2 * embedding.nbytes
        async with link.source.lease() as weights:
            assert weights.tensors["head"].data_ptr() == weights.tensors["embed"].data_ptr()
            assert torch.equal(weights.tensors["head"], embedding)


async def test_views_of_one_tensor_that_differ_are_not_tied(open_link: OpenLink) -> None:
    fused = torch.randn(6, 4)
    tensors = {"q": fused[:2], "k": fused[2:4], "all": fused, "flipped": fused.t()}
    async with open_link() as link:
        await link.sink.publish(0, tensors)
        async with link.source.lease() as weights:
            for name, tensor in tensors.items():
                assert torch.equal(weights.tensors[name], tensor)


async def test_floats_are_cast_on_the_way_and_everything_else_is_kept(open_link: OpenLink) -> None:
    wide = {"f32": torch.randn(64), "f64": torch.randn(8).double(), "f16": torch.randn(8).half()}
    kept = {
        "int": torch.arange(5),
        "mask": torch.tensor([True, False]),
        "fp8": torch.randn(8).to(torch.float8_e4m3fn),
        "bf16": torch.randn(8).bfloat16(),
    }
    async with open_link("bfloat16") as link:
        await link.sink.publish(0, wide | kept)
        async with link.source.lease() as weights:
            for name, tensor in wide.items():
                assert same_bytes(weights.tensors[name], tensor.bfloat16()), name
            for name, tensor in kept.items():
                assert same_bytes(weights.tensors[name], tensor), name


async def test_whatever_happens_to_tensors_between_versions_the_next_one_has_them_as_they_are(
    open_link: OpenLink,
) -> None:
    tensors = {"a": torch.randn(8, 8), "b": torch.randn(5)}
    square = tensors["a"]
    changes = [
        lambda: square.normal_(),
        lambda: tensors.update(a=square.t()),
        lambda: tensors.update(a=torch.randn(8, 8)),
        lambda: tensors.update(b=torch.randn(9)),
        lambda: tensors.update(a=tensors["a"][:3]),
        lambda: tensors.update(b=tensors["b"].view(torch.int32)),
        lambda: tensors.update(c=tensors["a"]),
        lambda: tensors.pop("a"),
        lambda: tensors["c"].zero_(),
    ]
    async with open_link() as link:
        for version, change in enumerate(changes):
            change()
            await link.sink.publish(version, tensors)
            async with link.source.lease() as weights:
                assert list(weights.tensors) == list(tensors)
                for name, tensor in tensors.items():
                    assert same_bytes(weights.tensors[name], tensor), (version, name)


async def test_a_learner_may_change_its_tensors_before_the_version_that_it_wrote_is_completed(
    open_link: OpenLink,
) -> None:
    async with open_link() as link:
        for version in range(4):
            tensors = filled(version)
            written = await link.sink.write(version, tensors)
            tensors["w"].fill_(-1.0)
            await link.sink.complete(written)
            async with link.source.lease() as weights:
                assert weights.version == version
                assert weights.tensors["w"].unique() == version


async def test_publishing_the_same_again_is_harmless(open_link: OpenLink) -> None:
    async with open_link() as link:
        for version in (1, 2, 2, 2, 1, 3):
            await link.sink.publish(version, filled(version))
        assert await link.source.newest() == 3
        async with link.source.lease(2) as weights:
            assert weights.tensors["w"].unique() == 2


async def test_a_version_never_changes(open_link: OpenLink) -> None:
    async with open_link() as link:
        await link.sink.publish(1, filled(1))
        with pytest.raises(RunFailed, match="version 1 is held already, with other weights"):
            await link.sink.publish(1, filled(100))
        with pytest.raises(RunFailed, match="version 1 is held already, with other weights"):
            await link.sink.publish(1, {"other": torch.ones(3)})
        async with link.source.lease(1) as weights:
            assert weights.tensors["w"].unique() == 1
        await link.sink.publish(2, filled(2))
        assert await link.source.newest() == 2


async def test_equal_weights_are_equal_even_in_memory_that_held_another_layout(open_link: OpenLink) -> None:
    odd = {"a": torch.full((7,), -1, dtype=torch.int8), "b": torch.full((33,), -1, dtype=torch.int8)}
    async with open_link() as link:
        for version in range(KEEP_VERSIONS + 1):
            await link.sink.publish(version, {"w": torch.full((1_000,), -1, dtype=torch.int32)})
        await link.sink.publish(10, odd)
        await link.sink.publish(11, filled(11))
        await link.sink.publish(10, odd)
        assert await link.source.newest() == 11


async def test_a_waiting_reader_is_woken_by_the_publish(open_link: OpenLink) -> None:
    async with open_link() as link:
        waiting = asyncio.create_task(link.source.wait_newer(None, 20.0))
        await asyncio.sleep(0.02)
        await link.sink.publish(5, filled(5))
        assert await asyncio.wait_for(waiting, 10.0) == 5
        assert await link.source.wait_newer(4, 20.0) == 5
        assert await link.source.wait_newer(5, 0.01) == 5


async def test_the_newest_versions_are_kept_and_older_ones_go(open_link: OpenLink) -> None:
    async with open_link() as link:
        for version in range(8):
            await link.sink.publish(version, filled(version))
        for version in (6, 7):
            async with link.source.lease(version) as weights:
                assert weights.tensors["w"].unique() == version
        with pytest.raises(WeightsUnavailable, match="does not hold version 2"):
            async with link.source.lease(2):
                pass


async def test_a_leased_version_stays_as_it_is(open_link: OpenLink) -> None:
    async with open_link() as link:
        await link.sink.publish(0, filled(0))
        async with link.source.lease(0) as weights:
            tensor = weights.tensors["w"]
            for version in range(1, 8):
                await link.sink.publish(version, filled(version))
                assert tensor.unique() == 0
            async with link.source.lease() as newest:
                assert newest.tensors["w"].unique() == 7
            assert weights.tensors["v"].unique() == 0
        for version in range(8, 12):
            await link.sink.publish(version, filled(version))
        status = await link.relay.status()
        assert 0 not in [held.version for held in status.versions]
        assert status.num_slots <= KEEP_VERSIONS + 2, "the newest ones, what the reader read last, and one to write to"


async def test_pinned_versions_are_kept_until_the_pins_are_replaced(open_link: OpenLink) -> None:
    async with open_link() as link:
        await link.relay.pin((0, 2))
        for version in range(8):
            await link.sink.publish(version, filled(version))
        held = {v.version: v.pinned for v in (await link.relay.status()).versions}
        assert held[0]
        assert held[2]
        assert not held[7]
        await link.relay.pin(())
        for version in range(8, 11):
            await link.sink.publish(version, filled(version))
        assert not {0, 2} & {v.version for v in (await link.relay.status()).versions}


async def test_a_learner_that_goes_back_may_publish_other_weights_after_a_rewind(open_link: OpenLink) -> None:
    async with open_link() as link:
        for version in range(5):
            await link.sink.publish(version, filled(version))
        async with link.source.lease(4) as old:
            await link.relay.rewind(3)
            assert await link.source.newest() == 3
            for version in range(4, 9):
                await link.sink.publish(version, filled(version + 100))
            assert old.tensors["w"].unique() == 4
        async with link.source.lease(8) as new:
            assert new.tensors["w"].unique() == 108


async def test_a_tensor_parallel_worker_sees_its_share(open_link: OpenLink) -> None:
    tensors = {"column": torch.randn(8, 6), "row": torch.randn(6, 8), "whole": torch.randn(5)}
    async with open_link() as link:
        await link.sink.publish(0, tensors)
        shares = []
        for rank in range(4):
            slices = {"column": Slice(dim=0, rank=rank, world_size=4), "row": Slice(dim=1, rank=rank, world_size=4)}
            async with link.source.lease(None, slices) as weights:  # type: ignore[call-arg]
                shares.append({name: tensor.clone() for name, tensor in weights.tensors.items()})
        assert torch.equal(torch.cat([share["column"] for share in shares]), tensors["column"])
        assert torch.equal(torch.cat([share["row"] for share in shares], dim=1), tensors["row"])
        assert all(torch.equal(share["whole"], tensors["whole"]) for share in shares)
        uneven = {"column": Rows(dim=0, start=3, stop=8), "row": Rows(dim=1, start=0, stop=0)}
        async with link.source.lease(None, uneven) as weights:  # type: ignore[call-arg]
            assert torch.equal(weights.tensors["column"], tensors["column"][3:])
            assert weights.tensors["row"].shape == (6, 0)
        async with link.source.lease(None, {"whole": Rows(dim=0, start=0, stop=6)}) as weights:  # type: ignore[call-arg]
            with pytest.raises(ValueError, match="no elements 0 to 6 along dimension 0"):
                weights.tensors["whole"]
        async with link.source.lease(None, {"whole": Slice(dim=0, rank=0, world_size=4)}) as weights:  # type: ignore[call-arg]
            with pytest.raises(ValueError, match="no 4 equal parts"):
                weights.tensors["whole"]


async def test_a_publish_that_fails_half_way_leaves_nothing_visible(open_link: OpenLink) -> None:
    async with open_link() as link:
        await link.sink.publish(0, filled(0))
        for broken in ({"a": torch.ones(3), "b": torch.ones(3, device="meta")}, {"s": torch.ones(3).to_sparse()}):
            with pytest.raises((NotImplementedError, ValueError)):
                await link.sink.publish(1, broken)
            assert await link.source.newest() == 0
        assert (await link.relay.status()).incoming == ()
        await link.sink.publish(1, filled(1))
        assert await link.source.newest() == 1


async def test_a_lease_that_is_over_gives_no_more_tensors(open_link: OpenLink) -> None:
    async with open_link() as link:
        await link.sink.publish(0, filled(0))
        async with link.source.lease() as weights:
            assert weights.tensors.compute_checksum() == weights.tensors.checksum  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="lease of these weights is over"):
            weights.tensors["w"]


async def test_readers_do_not_hinder_each_other(open_link: OpenLink) -> None:
    async def read(times: int) -> None:
        for _ in range(times):
            async with link.source.lease() as weights:
                await asyncio.sleep(0)
                assert weights.tensors["w"].unique() == weights.version

    async with open_link() as link:
        await link.sink.publish(0, filled(0))
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(read(10))
            for version in range(1, 20):
                await link.sink.publish(version, filled(version))
        status = await link.relay.status()
        assert status.newest == 19
        assert not any(held.num_leases for held in status.versions)
