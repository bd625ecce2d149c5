"""Whatever comes over the wire, a relay closes the connection and goes on."""

import asyncio
import contextlib
import logging
import os
import random
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from laminar.relay.chain_messages import (
    Accepted,
    Alive,
    Beat,
    Begin,
    Chunk,
    Dropped,
    Follow,
    GivenUp,
    Join,
    Look,
    Push,
    Rewound,
    Runs,
    Same,
    Taken,
    VersionKey,
    Want,
    Watch,
    Whole,
    Written,
)
from laminar.relay.following import Follower, HopMeter
from laminar.relay.frames import BadFrame, FrameSocket, answer_challenge
from laminar.relay.keeper import ChainKeeper, KeeperRules
from laminar.relay.links import TcpLink
from laminar.relay.manifest import Manifest, TensorEntry
from laminar.relay.member import ChainMember, ChainRules
from laminar.relay.messages import encode
from laminar.relay.process import run_relay
from laminar.relay.publisher import WeightPublisher
from laminar.relay.reader import WeightReader
from laminar.relay.service import RelayService
from laminar.relay.wire import Wire
from laminar.scheduling.chain import RelayPlace
from laminar.scheduling.membership import Member
from laminar.schema.errors import LaminarError

SECRET = b"a secret of the fuzz tests"
FUZZ_S = float(os.environ.get("LAMINAR_FUZZ_S", "2"))
"""How long each of the tests here goes on."""

pytestmark = pytest.mark.timeout(FUZZ_S + 120)

DATA = bytes(range(256)) * 8
MANIFEST = Manifest(total_bytes=2048, entries=(TensorEntry("w", "uint8", (2048,), 0),))
KEY = VersionKey(7, 77)
DIGEST = int(xxhash.xxh3_64_intdigest(DATA))
MEMBER = Member(place=RelayPlace(relay_id="mad", rack="r", machine="m"), host="127.0.0.1", port=9)


def framed(message: Any, payload: bytes = b"") -> bytes:
    frame = encode(message)
    return len(frame).to_bytes(4, "big") + frame + payload


def to_relay(epoch: int) -> list[list[bytes]]:
    """Conversations that make sense, to be spoilt."""
    follow = framed(Follow(relay_id="two", epoch=epoch, link="tcp", held=(KEY,)))
    want = framed(Want(key=KEY, missing=((0, 2048),), bases=(KEY,)))
    push = framed(Push(epoch=epoch, key=KEY, manifest=MANIFEST, part=0, num_parts=1, second_s=0.01))
    runs = framed(Runs(((0, 1024), (1024, 2048)), DIGEST), DATA)
    return [
        [follow, want, want],
        [follow, want, framed(Taken(KEY)), want, framed(Taken(KEY))],
        [push, runs, framed(Written())],
        [push, framed(Same(((0, 2048),), DIGEST)), framed(Written())],
        [push, framed(Runs(((0, 64),), int(xxhash.xxh3_64_intdigest(DATA[:64]))), DATA[:64]), framed(GivenUp())],
    ]


BEAT = Beat(newest=1, coming=7, coming_bytes=9, bytes_per_s=1e9, startup_s=1e-4, held_bytes=5, epoch=1)
TO_KEEPER = [[framed(Join(member=MEMBER, epoch=3)), framed(BEAT), framed(BEAT)], [framed(Watch())], [framed(Look())]]


def from_predecessor() -> list[bytes]:
    """What a relay hears from the one before it."""
    begin = framed(Begin(epoch=1, key=KEY, manifest=MANIFEST, chunk_bytes=1024))
    chunks = [
        framed(Chunk(index=at, inline=1024, digest=int(xxhash.xxh3_64_intdigest(DATA[:1024]))), DATA[:1024])
        for at in range(2)
    ]
    changes = framed(Chunk(index=0, inline=9, digest=DIGEST, base=3), bytes([1, 0, 0, 0, 1, 5, 1, 2, 3])[:9])
    whole = framed(Whole(KEY, int(xxhash.xxh3_64_intdigest(DATA))))
    return [
        b"\x00\x00\x00\x09" + encode(Alive()),
        begin,
        *chunks,
        changes,
        framed(Dropped(KEY)),
        whole,
        framed(Rewound(5)),
    ]


def spoilt(rng: random.Random, parts: list[bytes]) -> bytes:
    """Some parts left out, doubled or swapped; some bytes flipped, left out or put in."""
    parts = [part for part in parts for _ in range(rng.choice([1, 1, 1, 1, 0, 2]))]
    if rng.random() < 0.2:
        rng.shuffle(parts)
    data = bytearray(b"".join(parts))
    for _ in range(rng.choice([0, 0, 1, 2, 5, 20])):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 2:
                del data[at : at + rng.randrange(1, 9)]
            case _:
                data[at : at + 4] = rng.choice([b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x00\x00\x00\x00"])
    return bytes(data[: rng.randrange(len(data) + 1)] if rng.random() < 0.2 else data)


@contextlib.asynccontextmanager
async def chain_of_two(folder: Path) -> AsyncIterator[tuple[ChainKeeper, list[ChainMember], list[asyncio.Task[None]]]]:
    keeper = ChainKeeper(host="127.0.0.1", port=0, secret=SECRET, rules=KeeperRules(dead_after_s=2.0))
    tasks = [asyncio.create_task(keeper.run())]
    await keeper.listening.wait()
    members = []
    for name in ("one", "two"):
        service = RelayService(socket_path=folder / name, secret=SECRET, keep_versions=2, available=lambda: 1 << 28)
        rules = ChainRules(relay_id=name, keeper_host="127.0.0.1", keeper_port=keeper.address[1], beat_s=0.2)
        member = ChainMember(service, SECRET, rules)
        tasks.append(asyncio.create_task(run_relay(service, member)))
        await member.listening.wait()
        await until(lambda m=member, n=name: n in [known.relay_id for known in m.chain.members])
        members.append(member)
    try:
        yield keeper, members, tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(condition: Callable[[], Any], wait_s: float = 10.0) -> None:
    async with asyncio.timeout(wait_s):
        while not condition():  # noqa: ASYNC110 (the code under test has no event for it)
            await asyncio.sleep(0.002)


async def attack(address: tuple[str, int], data: bytes, *, greet: bool) -> None:
    """Say this to whoever listens there, and hang up when it does, or soon."""
    sock = socket.socket()
    sock.setblocking(False)
    frames = FrameSocket(sock, takes_fds=False)
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError, LaminarError, BadFrame, TimeoutError):
        async with asyncio.timeout(0.05):
            await loop.sock_connect(sock, address)
            if greet:
                await answer_challenge(frames, SECRET)
            await loop.sock_sendall(sock, data)
            while await loop.sock_recv(sock, 1 << 16):
                pass
    frames.close()


async def test_spoilt_conversations_harm_neither_relays_nor_keeper(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    rng = random.Random(time.time_ns())
    async with (
        chain_of_two(tmp_path) as (keeper, members, tasks),
        WeightReader(tmp_path / "two", SECRET) as reader,
    ):
        ends_s, num = time.monotonic() + FUZZ_S, 0
        while time.monotonic() < ends_s:
            target = rng.choice([keeper, *members])
            conversations = TO_KEEPER if target is keeper else to_relay(target.chain.epoch)
            greet = rng.random() < 0.9
            data = spoilt(rng, rng.choice(conversations)) if rng.random() < 0.95 else rng.randbytes(rng.randrange(200))
            await attack(target.address, data, greet=greet)
            num += 1
            assert not any(task.done() for task in tasks), data
        await until(lambda: [m.relay_id for m in keeper.chain.members] == ["one", "two"])
        await until(lambda: members[0].chain.epoch == members[1].chain.epoch == keeper.chain.epoch)
        version = (await reader.newest() or 0) + 1
        async with WeightPublisher(tmp_path / "one", SECRET) as publisher:
            await publisher.publish(version, {"w": torch.arange(1000)})
        assert await reader.wait_newer(version - 1, 10.0) == version
        async with reader.lease(version) as held:
            assert held.tensors.compute_checksum() == held.tensors.checksum
        assert num > 10


async def test_a_mad_predecessor_can_only_lose_its_link(tmp_path: Path) -> None:
    rng = random.Random(time.time_ns())
    service = RelayService(socket_path=tmp_path / "r", secret=SECRET, keep_versions=2, available=lambda: 1 << 28)
    member = ChainMember(service, SECRET, ChainRules(relay_id="r", keeper_port=1))
    running = asyncio.create_task(run_relay(service, member))
    await member.listening.wait()
    ends_s, num = time.monotonic() + FUZZ_S, 0
    while time.monotonic() < ends_s:
        data = framed(Accepted()) + spoilt(rng, from_predecessor())
        ours, theirs = socket.socketpair()
        link = TcpLink(Wire(theirs, 1.0))
        follower = Follower(link, service.board, member.calls, 1, HopMeter())
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        with contextlib.suppress(LaminarError, BadFrame):
            await asyncio.to_thread(follower.run, "r", "tcp")
        link.close()
        ours.close()
        num += 1
        assert not running.done(), data
        newest = await service.newest()
        if newest is not None:
            lease = await service.lease(1, None)
            assert lease.held.slot.checksum(lease.held.manifest.total_bytes) == lease.held.checksum, data
            await service.release(1, lease.lease_id)
    assert num > 10
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
