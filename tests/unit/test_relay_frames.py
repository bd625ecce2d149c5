"""Frames arrive whole or not at all, and strangers stay outside."""

import asyncio
import os
import random
import socket
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from laminar.relay.frames import (
    MAX_FRAME_BYTES,
    MAX_GREETING_BYTES,
    BadFrame,
    FrameSocket,
    WrongSecret,
    answer_challenge,
    challenge_peer,
)
from laminar.relay.messages import Challenge, Proof, Welcome, decode_greeting, encode
from laminar.schema.errors import PeerLost

Pair = tuple[FrameSocket, FrameSocket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = tuple(FrameSocket(sock, takes_fds=True) for sock in socket.socketpair())
    for end in ends:
        end.max_frame_bytes = MAX_FRAME_BYTES
    yield ends
    for end in ends:
        end.close()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(max_size=300), max_size=8), st.integers(0, 1_000))
def test_frames_survive_any_fragmentation(frames: list[bytes], seed: int) -> None:
    async def exchange() -> list[bytes]:
        rng = random.Random(seed)
        left, right = socket.socketpair()
        end = FrameSocket(right, takes_fds=False)
        stream = b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames)

        async def trickle() -> None:
            position = 0
            while position < len(stream):
                position += left.send(stream[position : position + rng.randint(1, 50)])
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            group.create_task(trickle())
            received = [await end.receive() for _ in frames]
        left.close()
        end.close()
        return received

    assert asyncio.run(exchange()) == frames


async def test_a_frame_larger_than_every_buffer_arrives(pair: Pair) -> None:
    frame = os.urandom(3 << 20)
    async with asyncio.TaskGroup() as group:
        group.create_task(pair[0].send(frame))
        assert await pair[1].receive() == frame


async def test_descriptors_come_with_their_frames_even_with_large_ones(pair: Pair) -> None:
    fds = [os.memfd_create(name) for name in ("one", "two")]
    for fd, text in zip(fds, (b"first", b"second"), strict=True):
        os.write(fd, text)

    async def send() -> None:
        await pair[0].send(b"a" * (1 << 20), fds[:1])
        await pair[0].send(b"none")
        await pair[0].send(b"b", fds[1:])

    async with asyncio.TaskGroup() as group:
        group.create_task(send())
        texts = []
        for _ in range(3):
            if await pair[1].receive() != b"none":
                fd = pair[1].take_fd()
                texts.append(os.pread(fd, 100, 0))
                os.close(fd)
    assert texts == [b"first", b"second"]
    with pytest.raises(BadFrame, match="did not come"):
        pair[1].take_fd()
    for fd in fds:
        os.close(fd)


async def test_descriptors_that_nobody_takes_are_closed() -> None:
    left, right = socket.socketpair()
    sender, receiver = FrameSocket(left, takes_fds=True), FrameSocket(right, takes_fds=True)
    num_before = len(os.listdir("/proc/self/fd"))
    fd = os.memfd_create("x")
    await sender.send(b"x", [fd, fd, fd])
    await receiver.receive()
    os.close(fd)
    sender.close()
    receiver.close()
    assert len(os.listdir("/proc/self/fd")) <= num_before - 2


async def test_a_relay_takes_no_descriptors() -> None:
    left, right = socket.socketpair()
    sender, receiver = FrameSocket(left, takes_fds=True), FrameSocket(right, takes_fds=False)
    num_before = len(os.listdir("/proc/self/fd"))
    await sender.send(b"x", [0, 1, 2])
    assert await receiver.receive() == b"x"
    assert len(os.listdir("/proc/self/fd")) <= num_before
    sender.close()
    receiver.close()


async def test_the_end_of_the_stream_is_told_apart_from_a_torn_frame() -> None:
    for sent, text in ((b"", "closed$"), (b"\x00\x00", "in the middle"), (b"\x00\x00\x00\x09four", "in the middle")):
        left, right = socket.socketpair()
        end = FrameSocket(right, takes_fds=False)
        left.sendall(sent)
        left.close()
        with pytest.raises(PeerLost, match=text):
            await end.receive()
        end.close()


async def test_an_oversized_frame_is_refused_by_its_header() -> None:
    left, right = socket.socketpair()
    end = FrameSocket(right, takes_fds=False)
    left.sendall((MAX_GREETING_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(BadFrame, match="a frame of 1025 bytes; 1024 are allowed"):
        await end.receive()
    left.close()
    end.close()


async def greet(relay_secret: bytes, peer_secret: bytes, pair: Pair) -> list[BaseException | None]:
    return await asyncio.gather(
        challenge_peer(pair[0], relay_secret), answer_challenge(pair[1], peer_secret), return_exceptions=True
    )


async def test_both_sides_prove_that_they_know_the_secret(pair: Pair) -> None:
    assert await greet(b"secret", b"secret", pair) == [None, None]
    await pair[0].send(b"hello")
    assert await pair[1].receive() == b"hello"


async def test_a_peer_with_another_secret_is_refused_and_told(pair: Pair) -> None:
    relay_side, peer_side = await greet(b"secret", b"guess", pair)
    assert isinstance(relay_side, WrongSecret)
    assert isinstance(peer_side, WrongSecret)
    assert "does not know this run's secret" in str(peer_side)


async def test_a_relay_that_does_not_know_the_secret_is_not_believed(pair: Pair) -> None:
    answering = asyncio.create_task(answer_challenge(pair[1], b"secret"))
    await pair[0].send(encode(Challenge(1, b"n" * 32)))
    proof = decode_greeting(await pair[0].receive())
    assert isinstance(proof, Proof)
    for mac in (b"", b"m" * 32, proof.mac):  # the last one is the peer's own proof, played back
        await pair[0].send(encode(Welcome(mac)))
        with pytest.raises(WrongSecret, match="the relay does not know"):
            await answering
        answering = asyncio.create_task(answer_challenge(pair[1], b"secret"))
        await pair[0].send(encode(Challenge(1, b"n" * 32)))
        await pair[0].receive()
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering


@pytest.mark.parametrize(
    "greeting", [b"", b"\xc1", encode(Welcome(b"x")), encode(Challenge(99, b"n" * 32)), b"\x91" * 900]
)
async def test_what_is_no_greeting_is_refused(greeting: bytes, pair: Pair) -> None:
    await pair[0].send(greeting)
    with pytest.raises(BadFrame):
        await answer_challenge(pair[1], b"secret")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=2_000))
def test_random_bytes_never_pass_the_greeting(noise: bytes) -> None:
    async def attempt() -> None:
        left, right = socket.socketpair()
        end = FrameSocket(right, takes_fds=False)
        left.sendall(noise)
        left.shutdown(socket.SHUT_WR)
        with pytest.raises((BadFrame, PeerLost, WrongSecret)):
            await challenge_peer(end, b"secret")
        left.close()
        end.close()

    asyncio.run(attempt())


@pytest.mark.parametrize("fds", [(), (0,)])
async def test_a_sender_that_is_stuck_is_released_when_the_stream_is_shut_down(
    fds: tuple[int, ...], pair: Pair
) -> None:
    sending = asyncio.create_task(pair[0].send(b"x" * (8 << 20), fds))
    await asyncio.sleep(0.01)
    assert not sending.done()
    pair[0].shut_down()
    with pytest.raises(PeerLost):
        await asyncio.wait_for(sending, 5.0)
