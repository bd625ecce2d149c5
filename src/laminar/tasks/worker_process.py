"""Our end of a process that runs code of users: start it, exchange messages, kill it with all that it started.

Invariant: no such process outlives the one that started it: not after `kill`, and not when its owner is killed.
"""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from laminar.schema.errors import UserError
from laminar.tasks.framing import FRAME_HEADER
from laminar.tasks.worker import SIGNAL_EXIT_BASE, NotReady, Ready, WorkerSetup

START_TIMEOUT_S: Final = 60.0
"""A worker imports the user's module first; on a cold network file system that takes tens of seconds."""

KILL_TIMEOUT_S: Final = 10.0
"""A supervisor that has not cleared up after so long is stopped or stuck; the kernel then kills the worker with it."""

_LAUNCH: Final = (
    "import sys; sys.path.insert(0, sys.argv[2]); from laminar.tasks.worker import main; main(int(sys.argv[1]))"
)


class WorkerDied(Exception):
    """The worker process ended or closed its pipe before it answered."""


class WorkerProcess:
    """A child process (see `tasks.worker`) in a session of its own, and our end of the socket to it.

    `broken` once an exchange failed or was cancelled; the socket is closed then, and only `discard` is left to do.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            package_folder = Path(__file__).parents[2]
            self._process = subprocess.Popen(
                [sys.executable, "-c", _LAUNCH, str(theirs.fileno()), str(package_folder)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        ours.setblocking(False)
        self.socket = ours
        self.broken = False
        self._end: asyncio.Task[None] | None = None

    async def set_up(self, setup: WorkerSetup) -> None:
        """Have it build the task; a worker that cannot is discarded, and `UserError` says why."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                greeting = await self.exchange(setup, Ready | NotReady)
        except TimeoutError:
            raise UserError(f"{setup.task_path} was not built within {START_TIMEOUT_S:g} s.") from None
        except WorkerDied:
            await self.discard()
            raise UserError(f"The process that builds {setup.task_path} died ({self.describe_end()}).") from None
        finally:
            if self.broken:
                await self.discard()
        if isinstance(greeting, NotReady):
            await self.discard()
            raise UserError(greeting.reason)

    async def exchange(self, message: Struct, answer_type: Any) -> Any:
        """Send one message and await the answer to it."""
        answered = False
        try:
            await self.send(message)
            answer = await self.receive(answer_type)
            answered = True
            return answer
        finally:
            if not answered:
                self.hang_up()

    async def send(self, message: Struct) -> None:
        """Raises `WorkerDied`."""
        body = msgspec.msgpack.encode(message)
        try:
            await asyncio.get_running_loop().sock_sendall(self.socket, FRAME_HEADER.pack(len(body)) + body)
        except OSError as error:
            raise WorkerDied(str(error)) from error

    async def receive(self, message_type: Any) -> Any:
        """The next message; raises `WorkerDied`.

        waits for:  the worker; the caller sets the deadline
        """
        try:
            (num_bytes,) = FRAME_HEADER.unpack(await self._receive(FRAME_HEADER.size))
            return msgspec.msgpack.decode(await self._receive(num_bytes), type=message_type)
        except (OSError, msgspec.DecodeError) as error:
            raise WorkerDied(str(error)) from error

    async def _receive(self, num_bytes: int) -> bytes:
        loop = asyncio.get_running_loop()
        received = b""
        while len(received) < num_bytes:
            chunk = await loop.sock_recv(self.socket, num_bytes - len(received))
            if not chunk:
                raise WorkerDied("end of stream")
            received += chunk
        return received

    def hang_up(self) -> None:
        """Exchange no more messages; the worker ends."""
        self.broken = True
        self.socket.close()

    async def discard(self) -> None:
        """Kill it, once, and wait until it is gone; that is finished even if the caller is cancelled."""
        if self._end is None:
            # In a thread, as a process with gigabytes takes a while to vanish.
            self._end = asyncio.create_task(asyncio.to_thread(self._kill))
        await asyncio.shield(self._end)
        self.socket.close()

    def _kill(self) -> None:
        """Hang up, at which the supervisor kills everything below itself; wait until it is gone."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(timeout=KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def describe_end(self) -> str:
        """How the worker ended; call it after `discard`."""
        code = self._process.returncode
        number = -code if code < 0 else code - SIGNAL_EXIT_BASE
        # Exit codes above 128 that stand for no signal were chosen by the user's code.
        return f"killed by {signal.Signals(number).name}" if number in set(signal.Signals) else f"exit code {code}"
