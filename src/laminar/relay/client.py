"""A local process's end of the relay's socket, shared by readers and publishers.

Invariants: an answer that nobody waits for any more (the caller was cancelled, or its deadline passed) is undone, so
nothing stays leased by mistake; the death of the relay fails all calls in flight at once.
"""

import asyncio
import contextlib
import itertools
import mmap
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from laminar.relay.frames import BadFrame, FrameSocket, WrongSecret, answer_challenge
from laminar.relay.messages import (
    Abandon,
    Call,
    Failure,
    Leased,
    Memory,
    ReleaseLease,
    Reply,
    Request,
    Reserved,
    decode_answer,
    encode,
    to_error,
)
from laminar.relay.slots import map_readable, map_writable
from laminar.schema.errors import DeadlinePassed, PeerLost, PortError, UserError

R = TypeVar("R", bound=Reply)

RETRY_S = 0.05
"""Between two attempts to connect while there is no relay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRules:
    """Deadlines of a local peer; what takes time by size gets more by size."""

    connect_s: float = 30.0
    """The relay may be starting: on a machine that is busy starting others, a Python process takes seconds."""
    call_s: float = 10.0
    """Answers that need no waiting."""
    publish_s: float = 120.0
    """Reserving memory and completing a version, besides the time that its bytes take."""
    slowest_bytes_per_s: float = 100 * 2**20
    """Making pages was measured at 1 to 2 GiB/s, hashing at 5 to 15: so slow only if the machine is in trouble."""

    def by_size_s(self, num_bytes: int) -> float:
        """Deadline for work on so many bytes."""
        return self.publish_s + num_bytes / self.slowest_bytes_per_s


class Maps:
    """Slots mapped into this process, kept over versions: setting up page tables costs 0.1 to 0.2 s per GiB."""

    def __init__(self) -> None:
        self._fds: dict[tuple[int, bool], int] = {}
        self._maps: dict[tuple[int, bool], mmap.mmap] = {}

    def learn(self, memory: Memory, fd: int | None) -> None:
        """Take over the descriptor that came along, and forget slots that are gone."""
        if fd is not None:
            self._fds[memory.slot_id, memory.writable] = fd
        for key in [key for key in self._maps.keys() | self._fds.keys() if key[0] not in memory.live_slots]:
            self._forget(key)

    def map(self, memory: Memory) -> tuple[mmap.mmap, bool]:
        """The memory, and whether this map is new."""
        key = (memory.slot_id, memory.writable)
        if key in self._maps:
            return self._maps[key], False
        if key not in self._fds:
            raise PortError(f"the relay did not send a descriptor for slot {memory.slot_id}")
        make = map_writable if memory.writable else map_readable
        self._maps[key] = make(self._fds[key], memory.num_bytes)
        os.close(self._fds.pop(key))
        return self._maps[key], True

    def clear(self) -> None:
        """Forget all; memory that tensors still show goes with them."""
        for key in self._maps.keys() | self._fds.keys():
            self._forget(key)

    def _forget(self, key: tuple[int, bool]) -> None:
        self._maps.pop(key, None)
        fd = self._fds.pop(key, None)
        if fd is not None:
            os.close(fd)


class Connection:
    """One connection that has passed the greeting."""

    def __init__(self, frames: FrameSocket) -> None:
        self._frames = frames
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._sending = asyncio.Lock()
        self._lost: PeerLost | None = None
        self.maps = Maps()
        self._receiver = asyncio.create_task(self._receive(), name="answers of the relay")
        self._undoing: set[asyncio.Task[None]] = set()

    @property
    def is_open(self) -> bool:
        return self._lost is None

    async def call(self, request: Request, kind: type[R], deadline_s: float) -> R:
        """Ask and wait. Raises `PeerLost`, `DeadlinePassed`, or what the relay answers with."""
        if self._lost is not None:
            raise PeerLost(str(self._lost))
        number = next(self._numbers)
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            async with asyncio.timeout(deadline_s):
                async with self._sending:
                    await self._send(Call(number, request))
                reply = await answer
        except BaseException as error:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self._undo(answer.result())
            if isinstance(error, TimeoutError):
                name = type(request).__name__
                raise DeadlinePassed(f"the relay gave no answer to {name} within {deadline_s:g} s") from None
            raise
        finally:
            del self._waiting[number]
        if isinstance(reply, Failure):
            raise to_error(reply)
        if not isinstance(reply, kind):
            raise PortError(f"the relay answered {type(request).__name__} with {type(reply).__name__}")
        return reply

    async def close(self) -> None:
        """Close; the relay frees what was held."""
        tasks = [self._receiver, *self._undoing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._end()  # a task that was cancelled before its first step has done nothing

    async def _send(self, call: Call) -> None:
        try:
            await self._frames.send(encode(call))
        except asyncio.CancelledError:
            self._break(PeerLost("a call was cancelled while it was being sent"))
            raise

    async def _receive(self) -> None:
        """Hand answers to those who wait for them.

        waits for:  answers of the relay
        ends:       with the connection; whoever waits then gets `PeerLost`
        """
        try:
            while True:
                answer = decode_answer(await self._frames.receive())
                self._learn(answer.reply)
                waiting = self._waiting.get(answer.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer.reply)
                else:
                    self._undo(answer.reply)
        except PeerLost as error:
            self._break(PeerLost(f"the relay is gone: {error}"))
        except (BadFrame, msgspec.DecodeError) as error:
            self._break(PeerLost(f"the relay does not keep to the protocol: {error}"))
        finally:
            await self._end()

    def _learn(self, reply: Reply) -> None:
        if isinstance(reply, Leased | Reserved):
            self.maps.learn(reply.memory, self._frames.take_fd() if reply.memory.with_fd else None)

    def _undo(self, reply: Reply) -> None:
        """Give back what came too late."""
        match reply:
            case Leased(lease_id=lease_id):
                request: Request = ReleaseLease(lease_id)
            case Reserved(reservation_id=reservation_id):
                request = Abandon(reservation_id)
            case _:
                return
        task = asyncio.create_task(self._tell(request), name="undo")
        self._undoing.add(task)
        task.add_done_callback(self._undoing.discard)

    async def _tell(self, request: Request) -> None:
        with contextlib.suppress(PeerLost):
            async with self._sending:
                await self._send(Call(next(self._numbers), request))

    async def _end(self) -> None:
        self._break(PeerLost("the connection to the relay was closed"))
        self.maps.clear()
        self._frames.shut_down()  # whoever is sending fails now
        async with self._sending:
            self._frames.close()

    def _break(self, error: PeerLost) -> None:
        if self._lost is None:
            self._lost = error
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(PeerLost(str(error)))


class RelayClient:
    """A connection to the relay that is opened when it is needed, and again after the relay restarted."""

    def __init__(self, socket_path: Path, secret: bytes, rules: ClientRules) -> None:
        self._socket_path = socket_path
        self._secret = secret
        self.rules = rules
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()

    async def connection(self) -> Connection:
        """An open connection. Raises `PeerLost` if there is no relay, `UserError` if it is another run's."""
        async with self._connecting:
            if self._connection is None or not self._connection.is_open:
                await self.close()
                self._connection = await self._open()
            return self._connection

    async def call(self, request: Request, kind: type[R], deadline_s: float | None = None) -> R:
        """Ask and wait; see `Connection.call`."""
        connection = await self.connection()
        return await connection.call(request, kind, self.rules.call_s if deadline_s is None else deadline_s)

    async def close(self) -> None:
        """Close; the next call opens it again."""
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    async def _open(self) -> Connection:
        refusal = "nobody answers"
        try:
            async with asyncio.timeout(self.rules.connect_s):
                while True:
                    try:
                        return await self._greet(await self._connect())
                    except (OSError, PeerLost) as error:
                        refusal = str(error)
                        await asyncio.sleep(RETRY_S)
        except TimeoutError:
            reason = f"no relay at {self._socket_path} within {self.rules.connect_s:g} s: {refusal}"
            raise PeerLost(reason) from None

    async def _connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, str(self._socket_path))
        except BaseException:
            sock.close()
            raise
        return sock

    async def _greet(self, sock: socket.socket) -> Connection:
        frames = FrameSocket(sock, takes_fds=True)
        try:
            await answer_challenge(frames, self._secret)
        except BaseException as error:
            frames.close()
            if isinstance(error, WrongSecret | BadFrame):
                raise UserError(f"{self._socket_path} cannot be used: {error}") from None
            raise
        return Connection(frames)
