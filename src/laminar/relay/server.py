"""The relay's end of its Unix socket: who comes in, what they ask, what they get.

Invariant: a peer that misbehaves loses its connection and what it held; nobody else notices.
"""

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, cast

import msgspec

from laminar.relay.frames import BadFrame, FrameSocket, WrongSecret, challenge_peer
from laminar.relay.messages import (
    Abandon,
    Answer,
    Call,
    Commit,
    Done,
    GetStatus,
    Leased,
    Memory,
    Newest,
    RelayStatus,
    ReleaseLease,
    Reply,
    Request,
    Reserve,
    Reserved,
    TakeLease,
    Version,
    WaitNewer,
    decode_call,
    encode,
    to_failure,
)
from laminar.relay.slots import SharedSlot, SlotMemory
from laminar.relay.store import Lease, Reservation
from laminar.schema.errors import Fenced, LaminarError, PeerLost, UserError
from laminar.telemetry.events import Events

log = logging.getLogger(__name__)

GREETING_S = 5.0
"""A peer that has not shown by then that it knows the secret is turned away."""

SEND_S = 10.0
"""A peer that does not read its answers for so long is turned away."""

MAX_CALLS = 64
"""Calls of one connection in progress at once; a reader has three."""

MAX_PATH_BYTES = 100
"""The kernel allows 108, macOS 104."""

PAUSE_S = 0.1
"""Out of descriptors or memory for a new connection: the others go on, and it is tried again."""

Result = Reply | Lease | Reservation


class Relay(Protocol):
    """What a connection needs of the relay; `peer` is the connection's number."""

    def connected(self, peer: int) -> None: ...
    def disconnected(self, peer: int) -> None: ...
    def live_slots(self) -> tuple[int, ...]: ...
    async def newest(self) -> int | None: ...
    async def wait_newer(self, than: int | None, wait_s: float) -> int | None: ...
    async def status(self) -> RelayStatus: ...
    async def lease(self, peer: int, version: int | None) -> Lease: ...
    async def release(self, peer: int, lease_id: int) -> None: ...
    async def reserve(self, peer: int, request: Reserve) -> Reservation: ...
    async def commit(self, peer: int, reservation_id: int, part: int, num_bytes: int) -> None: ...
    async def abandon(self, peer: int, reservation_id: int) -> None: ...


@contextlib.contextmanager
def unix_listener(path: Path) -> Iterator[socket.socket]:
    """Own the socket at this path, for this user only; a socket that a dead relay left is replaced."""
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise UserError(f"the socket path {path} is longer than {MAX_PATH_BYTES} bytes; the kernel allows no more")
    _remove_dead_socket(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind(str(path))
        os.chmod(path, 0o600)
        listener.listen(128)
        yield listener
    finally:
        listener.close()
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


async def serve_peers(listener: socket.socket, secret: bytes, relay: Relay, events: Events) -> None:
    """Accept connections.

    waits for:  a peer to connect
    blocks on:  nothing; each connection has its own task
    ends:       never; cancelled by the relay, and closes all connections then
    """
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        for peer in itertools.count(1):
            sock = await accept(loop, listener)
            group.create_task(_Session(peer, sock, secret, relay, events).run(), name=f"peer {peer}")


class _Session:
    """One connection."""

    def __init__(self, peer: int, sock: socket.socket, secret: bytes, relay: Relay, events: Events) -> None:
        self._peer = peer
        self._frames = FrameSocket(sock, takes_fds=False)
        self._secret = secret
        self._relay = relay
        self._events = events
        self._sending = asyncio.Lock()
        self._num_calls = 0
        self._sent: set[tuple[int, bool]] = set()

    async def run(self) -> None:
        """Serve the peer.

        waits for:  its calls
        ends:       when it closes the connection or breaks the rules; its leases and reservations end then
        """
        try:
            async with asyncio.timeout(GREETING_S):
                await challenge_peer(self._frames, self._secret)
            self._relay.connected(self._peer)
            try:
                async with asyncio.TaskGroup() as group:
                    await self._serve(group)
            finally:
                self._relay.disconnected(self._peer)
        except* PeerLost as errors:
            log.debug("peer %d: %s", self._peer, first_of(errors))
        except* (BadFrame, WrongSecret, TimeoutError) as errors:
            reason = str(first_of(errors)) or "it was too slow"
            log.warning("closed the connection of peer %d: %s", self._peer, reason)
            self._events.emit("peer_refused", peer=self._peer, reason=reason)
        finally:
            self._frames.close()

    async def _serve(self, group: asyncio.TaskGroup) -> None:
        while True:
            try:
                call = decode_call(await self._frames.receive())
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                raise BadFrame(f"not a call: {error}") from None
            if self._num_calls >= MAX_CALLS:
                raise BadFrame(f"more than {MAX_CALLS} calls at once")
            self._num_calls += 1
            group.create_task(self._answer(call), name=f"{type(call.request).__name__} of peer {self._peer}")

    async def _answer(self, call: Call) -> None:
        try:
            result: Result = await self._do(call.request)
        except LaminarError as error:
            result = to_failure(error)
        # Under the lock, so that a descriptor is sent with the first answer that mentions its slot.
        async with asyncio.timeout(SEND_S), self._sending:
            fds: list[int] = []
            reply = self._to_reply(result, fds)
            await self._frames.send(encode(Answer(call.number, reply)), fds)
        self._num_calls -= 1

    async def _do(self, request: Request) -> Result:
        relay, peer = self._relay, self._peer
        match request:
            case Newest():
                return Version(await relay.newest())
            case WaitNewer(than, wait_s):
                return Version(await relay.wait_newer(than, wait_s))
            case TakeLease(version):
                return await relay.lease(peer, version)
            case ReleaseLease(lease_id):
                await relay.release(peer, lease_id)
            case Reserve():
                return await relay.reserve(peer, request)
            case Commit(reservation_id, part, num_bytes):
                await relay.commit(peer, reservation_id, part, num_bytes)
            case Abandon(reservation_id):
                await relay.abandon(peer, reservation_id)
            case GetStatus():
                return await relay.status()
        return Done()

    def _to_reply(self, result: Result, fds: list[int]) -> Reply:
        match result:
            case Lease(lease_id=lease_id, held=held):
                memory = self._to_memory(held.slot, fds, writable=False)
                return Leased(
                    lease_id=lease_id,
                    version=held.version,
                    manifest=held.manifest,
                    checksum=held.checksum,
                    memory=memory,
                )
            case Reservation(reservation_id=reservation_id, slot=slot):
                if cast(SharedSlot, slot).write_fd < 0:
                    return to_failure(Fenced("this version was begun anew by another writer"))
                return Reserved(reservation_id=reservation_id, memory=self._to_memory(slot, fds, writable=True))
            case reply:
                return reply

    def _to_memory(self, slot: SlotMemory, fds: list[int], *, writable: bool) -> Memory:
        shared = cast(SharedSlot, slot)  # the service makes no others
        first = (shared.slot_id, writable) not in self._sent
        if first:
            self._sent.add((shared.slot_id, writable))
            fds.append(shared.write_fd if writable else shared.read_fd)
        return Memory(
            slot_id=shared.slot_id,
            num_bytes=shared.num_bytes,
            with_fd=first,
            writable=writable,
            live_slots=self._relay.live_slots(),
        )


async def accept(loop: asyncio.AbstractEventLoop, listener: socket.socket) -> socket.socket:
    """The next connection; waits while the system cannot give one."""
    while True:
        try:
            sock, _ = await loop.sock_accept(listener)
            return sock
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ECONNABORTED):
                raise
            log.warning("cannot accept a connection now: %s", error)
            await asyncio.sleep(PAUSE_S)


def _remove_dead_socket(path: Path) -> None:
    """Raises `UserError` if a living process listens there."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:  # its queue is full
            pass
    raise UserError(f"another relay serves {path}; stop it first")


def first_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """One of the errors, whatever the nesting."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
