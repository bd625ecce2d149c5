"""Whole messages over a Unix socket, with descriptors, without blocking the event loop; and who may speak.

Invariant: a frame is delivered completely or not at all; a peer that does not hold the secret is sent nothing else.

asyncio's streams cannot carry descriptors, so this reads the socket when the loop says that it is readable.
"""

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from laminar.relay.messages import PROTOCOL, Challenge, Proof, Refused, Welcome, decode_greeting, encode
from laminar.schema.errors import PeerLost

HEADER_BYTES = 4

MAX_GREETING_BYTES = 1024
"""Before a peer has shown that it knows the secret it may send this much; greetings take under 120 bytes."""

MAX_FRAME_BYTES = 64 << 20
"""A manifest takes some 80 bytes per tensor: room for 800,000 of them."""

READ_BYTES = 256 << 10
MAX_FDS = 8

NONCE_BYTES = 32


class BadFrame(Exception):
    """The peer does not keep to the protocol; its connection must be closed."""


class WrongSecret(Exception):
    """The peer belongs to another run."""


class FrameSocket:
    """A connected socket that speaks in frames. One task sends and one receives at a time."""

    def __init__(self, sock: socket.socket, *, takes_fds: bool) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._takes_fds = takes_fds
        self._buffer = bytearray()
        self._fds: deque[int] = deque()
        self._closed = False
        self.max_frame_bytes = MAX_GREETING_BYTES

    async def send(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Returns when the kernel has taken all of it. Raises `PeerLost`; after any error the stream is unusable."""
        data = memoryview(len(frame).to_bytes(HEADER_BYTES, "big") + frame)
        try:
            if fds:
                data = data[await self._send_fds(data, fds) :]
            await asyncio.get_running_loop().sock_sendall(self._sock, data)
        except OSError as error:
            raise PeerLost(f"the connection broke: {error.strerror}") from None

    async def receive(self) -> bytes:
        """The next frame. Raises `PeerLost` at the end of the stream and `BadFrame` for what is none."""
        while True:
            frame = self._take_frame()
            if frame is not None:
                return frame
            await self._ready(write=False)
            self._read()

    def take_fd(self) -> int:
        """The next descriptor that came along; the caller closes it."""
        if not self._fds:
            raise BadFrame("a descriptor was announced but did not come")
        return self._fds.popleft()

    def hand_over(self) -> socket.socket:
        """Give the socket to somebody who reads it another way. Raises `BadFrame` if the peer has said too much."""
        if self._buffer or self._fds:
            raise BadFrame("the peer spoke before it was asked")
        self._closed = True
        return self._sock

    def shut_down(self) -> None:
        """End the stream in both directions; whoever is inside `send` or `receive` gets `PeerLost`."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket and all descriptors that nobody took. Nobody may be inside `send` or `receive`."""
        if not self._closed:
            self._closed = True
            self._sock.close()
            while self._fds:
                os.close(self._fds.popleft())

    async def _send_fds(self, data: memoryview, fds: Sequence[int]) -> int:
        while True:
            await self._ready(write=True)
            with contextlib.suppress(BlockingIOError):
                return socket.send_fds(self._sock, [data], list(fds))

    def _take_frame(self) -> bytes | None:
        if len(self._buffer) < HEADER_BYTES:
            return None
        size = int.from_bytes(self._buffer[:HEADER_BYTES], "big")
        if size > self.max_frame_bytes:
            raise BadFrame(f"a frame of {size} bytes; {self.max_frame_bytes} are allowed")
        end = HEADER_BYTES + size
        if len(self._buffer) < end:
            return None
        frame = bytes(self._buffer[HEADER_BYTES:end])
        del self._buffer[:end]
        return frame

    def _read(self) -> None:
        try:
            if self._takes_fds:
                data, fds, _, _ = socket.recv_fds(self._sock, READ_BYTES, MAX_FDS)
                self._fds.extend(fds)
            else:
                data = self._sock.recv(READ_BYTES)  # the kernel drops descriptors that nobody asked for
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerLost(f"the connection broke: {error.strerror}") from None
        if not data:
            raise PeerLost("the connection was closed" + (" in the middle of a frame" if self._buffer else ""))
        self._buffer += data

    async def _ready(self, *, write: bool) -> None:
        loop = asyncio.get_running_loop()
        ready = loop.create_future()
        fd = self._sock.fileno()
        add, remove = (loop.add_writer, loop.remove_writer) if write else (loop.add_reader, loop.remove_reader)
        add(fd, _wake, ready)
        try:
            await ready
        finally:
            remove(fd)


async def challenge_peer(frames: FrameSocket, secret: bytes) -> None:
    """The relay's side: let the peer in, or raise `WrongSecret`."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    await frames.send(encode(Challenge(PROTOCOL, nonce)))
    proof = await _greeting(frames, Proof)
    if not hmac.compare_digest(proof.mac, _mac(secret, b"peer", nonce, proof.nonce)):
        with contextlib.suppress(PeerLost):
            await frames.send(encode(Refused("it does not know this run's secret")))
        raise WrongSecret("a peer does not know this run's secret")
    await frames.send(encode(Welcome(_mac(secret, b"relay", nonce, proof.nonce))))
    frames.max_frame_bytes = MAX_FRAME_BYTES


async def answer_challenge(frames: FrameSocket, secret: bytes) -> None:
    """The peer's side: raises `WrongSecret` if either side does not know it."""
    challenge = await _greeting(frames, Challenge)
    if challenge.protocol != PROTOCOL:
        raise BadFrame(f"the relay speaks protocol {challenge.protocol}, this process {PROTOCOL}")
    nonce = secrets.token_bytes(NONCE_BYTES)
    await frames.send(encode(Proof(nonce, _mac(secret, b"peer", challenge.nonce, nonce))))
    welcome = await _greeting(frames, Welcome)
    if not hmac.compare_digest(welcome.mac, _mac(secret, b"relay", challenge.nonce, nonce)):
        raise WrongSecret("the relay does not know this run's secret")
    frames.max_frame_bytes = MAX_FRAME_BYTES


async def _greeting(frames: FrameSocket, kind: Any) -> Any:
    try:
        greeting = decode_greeting(await frames.receive())
    except msgspec.DecodeError as error:
        raise BadFrame(f"no greeting: {error}") from None
    if isinstance(greeting, Refused):
        raise WrongSecret(f"the relay refused this process: {greeting.reason}")
    if not isinstance(greeting, kind):
        raise BadFrame(f"{type(greeting).__name__} where {kind.__name__} was due")
    return greeting


def _mac(secret: bytes, role: bytes, relay_nonce: bytes, peer_nonce: bytes) -> bytes:
    """The role keeps one side's proof from being played back as the other side's."""
    return hmac.digest(secret, b"laminar-relay:" + role + b":" + relay_nonce + peer_nonce, "sha256")


def _wake(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)
