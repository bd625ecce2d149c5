"""The relay serves whoever keeps to the rules, and says clearly what cannot be."""

import asyncio
import contextlib
import logging
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from laminar.relay.client import ClientRules, RelayClient
from laminar.relay.frames import MAX_FRAME_BYTES, FrameSocket, answer_challenge
from laminar.relay.manifest import Manifest, TensorEntry
from laminar.relay.messages import (
    Abandon,
    Call,
    Commit,
    Done,
    Leased,
    Newest,
    RelayStatus,
    ReleaseLease,
    Reserve,
    Reserved,
    TakeLease,
    WaitNewer,
    encode,
)
from laminar.relay.parcels import Part, Piece
from laminar.relay.publisher import WeightPublisher
from laminar.relay.reader import WeightReader
from laminar.relay.service import RelayService
from laminar.relay.tensors import layout_of
from laminar.schema.errors import DeadlinePassed, Fenced, PeerLost, RunFailed, UserError
from laminar.telemetry.events import MemoryEvents

SECRET = b"s" * 32
MIB = 1 << 20


@contextlib.asynccontextmanager
async def serving(path: Path, **options) -> AsyncIterator[RelayService]:
    service = RelayService(socket_path=path, secret=SECRET, **{"keep_versions": 2, **options})
    running = asyncio.create_task(service.run())
    await until(lambda: path.exists() or running.done())
    try:
        yield service
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not condition():  # noqa: ASYNC110 (the code under test has no event for it)
            await asyncio.sleep(0.001)


async def until_status(service: RelayService, condition: Callable[[RelayStatus], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not condition(await service.status()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "relay.sock"


def weights(version: int, num: int = 1_000) -> dict[str, torch.Tensor]:
    return {"w": torch.full((num,), float(version))}


async def test_what_a_reader_read_last_is_kept_while_it_lives(path: Path) -> None:
    def held(status: RelayStatus) -> set[int]:
        return {version.version for version in status.versions}

    options = {"keep_versions": 1, "keep_read_s": 0.5}
    async with serving(path, **options) as service, WeightPublisher(path, SECRET) as publisher:
        async with WeightReader(path, SECRET) as reader:
            await publisher.publish(1, weights(1))
            async with reader.lease():
                pass
            for version in (2, 3, 4):
                await publisher.publish(version, weights(version))
            assert {1, 4} <= held(await service.status())
            assert 2 not in held(await service.status())
            async with reader.lease(1) as again:
                assert again.tensors["w"][0] == 1
        assert 1 in held(await service.status()), "its watcher has had no time to order anything"
        await until_status(service, lambda status: 1 not in held(status))


# ---- who gets in


async def test_the_socket_is_for_this_user_only_and_goes_with_the_relay(path: Path) -> None:
    async with serving(path):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert path.name not in os.listdir(path.parent)


async def test_a_socket_that_a_dead_relay_left_is_replaced_and_a_living_one_is_not(path: Path) -> None:
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    async with serving(path), WeightReader(path, SECRET) as reader:
        assert await reader.newest() is None
        with pytest.raises(UserError, match="another relay serves"):
            await RelayService(socket_path=path, secret=SECRET, keep_versions=2).run()
        assert await reader.newest() is None


async def test_a_path_that_is_too_long_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="longer than 100 bytes"):
        await RelayService(socket_path=tmp_path / ("x" * 120), secret=SECRET, keep_versions=2).run()


async def test_a_peer_of_another_run_is_told_and_logged(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    events = MemoryEvents()
    async with serving(path, events=events) as service, WeightReader(path, b"guess") as stranger:
        with pytest.raises(UserError, match="does not know this run's secret"):
            await stranger.newest()
        assert (await service.status()).num_peers == 0
        async with WeightReader(path, SECRET) as reader:
            assert await reader.newest() is None
    assert "a peer does not know this run's secret" in caplog.text
    assert [event["reason"] for event in events.of("peer_refused")] == ["a peer does not know this run's secret"]


def test_an_empty_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="keeps nobody out"):
        RelayService(socket_path=Path("x"), secret=b"", keep_versions=2)


# ---- peers that break the rules


async def connected(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, str(path))
    return sock


async def greeted(path: Path) -> socket.socket:
    """A connection that is in, to misbehave on."""
    sock = await connected(path)
    await answer_challenge(FrameSocket(sock, takes_fds=True), SECRET)
    return sock


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


RESERVE = encode(Call(1, Reserve(1, Manifest(total_bytes=64, entries=(TensorEntry("w", "int8", (64,), 0),)), 0, 1)))
CALLS = [
    RESERVE,
    encode(Call(2, TakeLease(None))),
    encode(Call(3, WaitNewer(7, 0.0))),
    encode(Call(4, Commit(1, 0, 64))),
]


def mutated(data: st.DataObject) -> bytes:
    call = bytearray(data.draw(st.sampled_from(CALLS)))
    for _ in range(data.draw(st.integers(1, 4))):
        call[data.draw(st.integers(0, len(call) - 1))] = data.draw(st.integers(0, 255))
    return frame(bytes(call))


noises = st.one_of(
    st.binary(max_size=200),
    st.binary(max_size=200).map(frame),
    st.sampled_from(CALLS).flatmap(lambda call: st.integers(0, len(call) - 1).map(lambda end: frame(call[:end]))),
    st.sampled_from(CALLS).flatmap(lambda call: st.integers(0, len(call)).map(lambda end: frame(call)[:end])),
    st.integers(MAX_FRAME_BYTES + 1, 2**32 - 1).map(lambda size: size.to_bytes(4, "big")),
    st.just(frame(b"\x91" * 100_000)),
    st.just(frame(encode([1, {"type": "Newest", "x": [[[[]]]]}])[:-5] + b"\x91" * 50_000)),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(noises, min_size=1, max_size=3), st.data(), st.booleans())
def test_noise_harms_nobody_else(tmp_path: Path, noise: list[bytes], data: st.DataObject, greet: bool) -> None:
    path = tmp_path / "fuzz.sock"
    noise = [*noise, mutated(data)]

    async def attempt() -> None:
        logging.getLogger("laminar.relay").setLevel(logging.ERROR)
        async with serving(path) as service, WeightReader(path, SECRET) as bystander:
            assert await bystander.newest() is None
            with await greeted(path) if greet else await connected(path) as sock, contextlib.suppress(OSError):
                await asyncio.get_running_loop().sock_sendall(sock, b"".join(noise))
            assert await bystander.newest() is None
            await until(lambda: service.num_peers == 1)
            assert (await service.status()).incoming == ()

    asyncio.run(attempt())
    logging.getLogger("laminar.relay").setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (frame(b"\xc1"), "not a call"),
        (frame(encode([1, {"type": "Unpickle"}])), "not a call: Invalid value 'Unpickle'"),
        (frame(encode([-1, Newest()])), "not a call"),
        (frame(b"\x92\x01" + b"\x91" * 100_000), "not a call"),
        ((MAX_FRAME_BYTES + 1).to_bytes(4, "big"), "a frame of 67108865 bytes; 67108864 are allowed"),
        (b"".join(frame(encode(Call(n, WaitNewer(None, 60.0)))) for n in range(100)), "more than 64 calls at once"),
    ],
)
async def test_a_peer_that_breaks_the_rules_is_cut_off_with_the_reason_logged(
    path: Path, sent: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(path) as service:
        with await greeted(path) as sock:
            await asyncio.get_running_loop().sock_sendall(sock, sent)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 1), 5.0) == b""
        assert reason in caplog.text
        assert service.num_peers == 0


async def test_a_manifest_that_lies_is_refused_and_the_connection_lives(path: Path) -> None:
    lying = Manifest(total_bytes=64, entries=(TensorEntry("w", "int8", (65,), 0),))
    async with serving(path), WeightPublisher(path, SECRET) as publisher:
        with pytest.raises(RunFailed, match="manifest of version 1 is wrong: w: ends at byte 65 of 64"):
            await publisher.write_pieces(1, lying, [])
        await publisher.publish(1, weights(1))
        with pytest.raises(RunFailed, match="manifest of version 2 is wrong"):
            await publisher.write_pieces(2, lying, [])
        await publisher.publish(2, weights(2))


# ---- memory


async def test_too_little_memory_is_a_sentence_before_anything_is_taken(path: Path) -> None:
    async with serving(path, available=lambda: 10 * MIB) as service, WeightPublisher(path, SECRET) as publisher:
        with pytest.raises(RunFailed) as failed:
            await publisher.publish(0, weights(0, num=MIB))
        assert (await service.status()).num_slots == 0
        assert str(failed.value) == (
            "Keeping 2 weight versions while one more comes in takes 3 x 4.0 MiB of memory: 12.0 MiB more than the "
            "relay has now, and 9.5 MiB can be had. Lower relay.keep_versions (now 2), publish a smaller relay.dtype, "
            "or use a machine with more memory."
        )
        await publisher.publish(0, weights(0, num=MIB // 2))


async def test_slots_for_the_next_versions_are_made_ahead(path: Path) -> None:
    async with serving(path) as service, WeightPublisher(path, SECRET) as publisher:
        await publisher.publish(0, weights(0))
        await until_status(service, lambda status: status.num_slots == 3)
        assert (await service.status()).num_free_slots == 2


def three_slots_of_memory(service_box: list[RelayService]) -> Callable[[], int]:
    """What a machine with room for three slots of 4 KiB has left."""
    return lambda: 3 * 4_400 - sum(4_096 for _ in service_box[0].live_slots())


async def test_a_writer_waits_for_readers_when_memory_is_short(path: Path) -> None:
    box: list[RelayService] = []
    async with serving(path, available=three_slots_of_memory(box)) as service:
        box.append(service)
        async with WeightPublisher(path, SECRET) as publisher, WeightReader(path, SECRET) as reader:
            await publisher.publish(0, weights(0))
            async with reader.lease(0):
                for version in (1, 2):
                    await publisher.publish(version, weights(version))
                waiting = asyncio.create_task(publisher.publish(3, weights(3)))
                await asyncio.sleep(0.05)
                assert not waiting.done()
            await asyncio.wait_for(waiting, 5.0)
            assert await reader.newest() == 3


async def test_readers_that_never_let_go_are_named_after_a_while(path: Path) -> None:
    box: list[RelayService] = []
    async with serving(path, available=three_slots_of_memory(box), slot_wait_s=0.05) as service:
        box.append(service)
        async with WeightPublisher(path, SECRET) as publisher, WeightReader(path, SECRET) as reader:
            await publisher.publish(0, weights(0))
            async with reader.lease(0), reader.lease(0):
                for version in (1, 2):
                    await publisher.publish(version, weights(version))
                with pytest.raises(RunFailed, match=r"no memory for weight version 3.*0 \(2 readers\).*keep_versions"):
                    await publisher.publish(3, weights(3))
            await publisher.publish(3, weights(3))


async def test_a_pinned_version_is_given_up_rather_than_the_run(path: Path) -> None:
    box: list[RelayService] = []
    async with serving(path, available=three_slots_of_memory(box)) as service:
        box.append(service)
        await service.pin((0,))
        async with WeightPublisher(path, SECRET) as publisher:
            for version in range(4):
                await publisher.publish(version, weights(version))
        assert [held.version for held in (await service.status()).versions] == [1, 2, 3]


# ---- several writers


async def test_ranks_that_hold_everything_share_the_work(path: Path) -> None:
    tensors = {f"w{i}": torch.randn(50 + i, 7) for i in range(20)} | {"scalar": torch.tensor(1.0)}
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(serving(path))
        ranks = [
            await stack.enter_async_context(WeightPublisher(path, SECRET, part=Part(index=index, count=3)))
            for index in range(3)
        ]
        reader = await stack.enter_async_context(WeightReader(path, SECRET))
        written = [await ranks[0].write(4, tensors), await ranks[1].write(4, tensors)]
        first = asyncio.create_task(ranks[0].complete(written[0]))
        await asyncio.sleep(0.02)
        assert not first.done()
        assert await reader.newest() is None
        await asyncio.gather(first, ranks[1].complete(written[1]), ranks[2].publish(4, tensors))
        assert all(part.num_bytes < sum(t.nbytes for t in tensors.values()) for part in written)
        async with reader.lease() as held:
            assert all(torch.equal(held.tensors[name], tensor) for name, tensor in tensors.items())


async def test_sharded_ranks_write_the_blocks_that_they_own(path: Path) -> None:
    full = {"rows": torch.randn(8, 6), "columns": torch.randn(5, 4), "bias": torch.randn(3)}
    manifest = layout_of(full, torch.bfloat16)
    pieces = [
        [
            Piece(name="rows", start=(0, 0), data=full["rows"][:5]),
            Piece(name="columns", start=(0, 2), data=full["columns"][:, 2:]),
        ],
        [
            Piece(name="rows", start=(5, 0), data=full["rows"][5:]),
            Piece(name="columns", start=(0, 0), data=full["columns"][:, :2]),
            Piece(name="bias", start=(0,), data=full["bias"]),
        ],
    ]

    async def publish(rank: int) -> None:
        async with WeightPublisher(path, SECRET, part=Part(index=rank, count=2)) as publisher:
            await publisher.complete(await publisher.write_pieces(1, manifest, pieces[rank]))

    async with serving(path), WeightReader(path, SECRET) as reader:
        await asyncio.gather(publish(0), publish(1))
        async with reader.lease() as held:
            assert all(torch.equal(held.tensors[name], tensor.bfloat16()) for name, tensor in full.items())


async def test_a_lost_rank_fences_the_others_and_the_version_can_be_published_again(path: Path) -> None:
    async with serving(path) as service, contextlib.AsyncExitStack() as stack:
        ranks = [
            await stack.enter_async_context(WeightPublisher(path, SECRET, part=Part(index=index, count=2)))
            for index in range(2)
        ]
        survivor = asyncio.create_task(ranks[0].publish(1, weights(1)))
        await ranks[1].write(1, weights(1))
        await ranks[1].close()
        with pytest.raises(Fenced, match="another part of it was lost"):
            await asyncio.wait_for(survivor, 5.0)
        assert await service.newest() is None
        await asyncio.gather(*(rank.publish(1, weights(1)) for rank in ranks))
        assert await service.newest() == 1


async def test_the_last_writer_of_a_version_wins(path: Path) -> None:
    async with serving(path), WeightReader(path, SECRET) as reader:
        async with WeightPublisher(path, SECRET) as hung, WeightPublisher(path, SECRET) as successor:
            written = await hung.write(1, weights(100))
            await successor.publish(1, weights(1))
            with pytest.raises(Fenced):
                await hung.complete(written)
        async with reader.lease() as held:
            assert held.tensors["w"].unique() == 1


# ---- calls that are cut short


async def test_a_lease_that_nobody_waits_for_any_more_is_given_back(path: Path) -> None:
    async with serving(path) as service, WeightPublisher(path, SECRET) as publisher:
        await publisher.publish(0, weights(0))
        client = RelayClient(path, SECRET, ClientRules())
        connection = await client.connection()
        for attempt in range(200):
            call = asyncio.create_task(connection.call(TakeLease(None), Leased, 5.0))
            for _ in range(attempt % 7):
                await asyncio.sleep(0)
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await connection.call(ReleaseLease((await call).lease_id), Done, 5.0)
        await until_status(service, lambda status: not status.versions[0].num_leases)
        assert connection.is_open
        await client.close()


async def test_a_reservation_that_nobody_waits_for_any_more_is_dropped(path: Path) -> None:
    manifest = layout_of(weights(0), None)
    async with serving(path) as service:
        client = RelayClient(path, SECRET, ClientRules())
        connection = await client.connection()
        for attempt in range(20):
            call = asyncio.create_task(connection.call(Reserve(1, manifest, 0, 1), Reserved, 5.0))
            for _ in range(attempt):
                await asyncio.sleep(0)
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await connection.call(Abandon((await call).reservation_id), Done, 5.0)
        await until_status(service, lambda status: not status.incoming)
        await client.close()


async def test_a_cancelled_publish_leaves_no_reservation(path: Path) -> None:
    tensors = {f"w{i}": torch.ones(100_000) for i in range(20)}
    async with serving(path) as service, WeightPublisher(path, SECRET, "bfloat16") as publisher:
        for pause_s in (0.0, 0.001, 0.003, 0.01):
            publishing = asyncio.create_task(publisher.publish(1, tensors))
            await asyncio.sleep(pause_s)
            publishing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await publishing
            await until_status(service, lambda status: not status.incoming)
        await publisher.publish(2, tensors)
        assert await service.newest() == 2


async def test_the_same_tensors_go_to_every_slot_and_to_a_relay_that_was_restarted(path: Path) -> None:
    tensors = weights(0)
    async with WeightPublisher(path, SECRET) as publisher, WeightReader(path, SECRET) as reader:
        for first in (0, 5):
            async with serving(path):
                for version in range(first, first + 5):
                    tensors["w"].fill_(version)
                    await publisher.publish(version, tensors)
                    async with reader.lease() as held:
                        assert held.tensors["w"].unique() == version


async def test_a_relay_that_does_not_answer_is_a_deadline(path: Path) -> None:
    silent = socket.socket(socket.AF_UNIX)
    silent.bind(str(path))
    silent.listen()
    rules = ClientRules(connect_s=0.05, call_s=0.05)
    async with WeightReader(path, SECRET, rules=rules) as reader:
        with pytest.raises(PeerLost, match=r"no relay at .* within 0\.05 s"):
            await reader.newest()
    silent.close()
    os.unlink(path)
    async with serving(path), WeightPublisher(path, SECRET, rules=ClientRules(publish_s=0.1)) as publisher:
        other_rank = WeightPublisher(path, SECRET, part=Part(index=0, count=2), rules=ClientRules(publish_s=0.1))
        with pytest.raises(DeadlinePassed, match=r"no answer to Commit within 0\.1"):
            await other_rank.publish(1, weights(1))
        await other_rank.close()
        await publisher.publish(1, weights(1))


async def test_no_relay_at_all_is_a_lost_peer(path: Path) -> None:
    async with WeightReader(path, SECRET, rules=ClientRules(connect_s=0.1)) as reader:
        with pytest.raises(PeerLost, match="no relay at"):
            await reader.newest()


async def test_a_lease_that_outlives_its_connection_is_reported(path: Path) -> None:
    async with serving(path), WeightPublisher(path, SECRET) as publisher:
        await publisher.publish(0, weights(0))
        reader = WeightReader(path, SECRET)
        with pytest.raises(PeerLost):
            async with reader.lease():
                await reader.close()
        assert await reader.newest() == 0
        with pytest.raises(KeyError, match="mine"):
            await fail_in_a_lease(reader)
        await reader.close()


async def fail_in_a_lease(reader: WeightReader) -> None:
    async with reader.lease():
        await reader.close()
        raise KeyError("mine")


async def test_everything_is_closed_at_the_end(path: Path) -> None:
    num_before = len(os.listdir("/proc/self/fd"))
    async with serving(path), WeightPublisher(path, SECRET) as publisher, WeightReader(path, SECRET) as reader:
        for version in range(5):
            await publisher.publish(version, weights(version))
            async with reader.lease() as held:
                assert held.version == version
        del held
    assert len(os.listdir("/proc/self/fd")) <= num_before
