"""Run rewards written by users without ever being blocked or killed by them.

Invariant: every call of `grade` ends within its time limit (plus the start of a worker) in `Scored` or `Unscorable`,
and no process outlives the grader: not after `close`, and not when the service that owns it is killed.
"""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from laminar.schema.errors import UserError
from laminar.schema.trajectories import Grade, Unscorable
from laminar.tasks.grading_worker import FRAME_HEADER, SIGNAL_EXIT_BASE, GradeCall, NotReady, Ready, WorkerSetup
from laminar.tasks.protocol import Problem, Task
from laminar.tasks.verdicts import verdict

START_TIMEOUT_S = 60.0
"""A worker imports the user's module first; on a cold network file system that takes tens of seconds."""

KILL_TIMEOUT_S = 10.0
"""A supervisor that has not cleared up after so long is stopped or stuck; the kernel then kills the worker with it."""

_LAUNCH = (
    "import sys; sys.path.insert(0, sys.argv[2]); from laminar.tasks.grading_worker import main; main(int(sys.argv[1]))"
)


class GradingRules(Struct, frozen=True, kw_only=True):
    """Limits of user code. `memory_bytes` bounds a worker's address space; None leaves it unbounded."""

    timeout_s: float = 10.0
    num_workers: int = 2
    memory_bytes: int | None = None


class AnyGrader(Protocol):
    """What the rollout asks for a reward."""

    async def start(self) -> None:
        """Make ready to grade; raises UserError if the task cannot be built."""
        ...

    async def grade(self, problem: Problem, answer: str) -> Grade:
        """The verdict on one answer."""
        ...

    async def close(self) -> None:
        """Let go of everything."""
        ...


class InlineGrader:
    """Grades on the caller's event loop: for tasks known to be quick, and for the simulator's virtual clock.

    A reward that blocks, blocks the caller; `Grader` is for code that one does not know.
    """

    def __init__(self, task: Task) -> None:
        self._task = task

    async def start(self) -> None:
        """Nothing to do."""

    async def grade(self, problem: Problem, answer: str) -> Grade:
        """The verdict on one answer; an exception makes it Unscorable."""
        return verdict(self._task, problem, answer)

    async def close(self) -> None:
        """Nothing to do."""


class WorkerDied(Exception):
    """The worker process ended or closed its pipe before it answered."""


class Grader:
    """Grades in `num_workers` processes, one answer at a time in each.

    A worker that does not answer in time, or whose caller is cancelled, is killed with all its children; the next call
    that needs one starts another. Calls beyond the number of workers wait their turn; the time limit counts from a
    call's own start.
    """

    def __init__(
        self, task_path: str, task_options: Mapping[str, Any], *, sys_path: Sequence[str], rules: GradingRules
    ) -> None:
        self._setup = WorkerSetup(
            task_path=task_path,
            task_options=dict(task_options),
            sys_path=tuple(sys_path),
            memory_bytes=rules.memory_bytes,
        )
        self._rules = rules
        # One entry per worker that may exist; None stands for one that has yet to be started. Last in, first out keeps
        # few workers busy and warm rather than all of them lukewarm.
        self._idle: asyncio.LifoQueue[_Worker | None] = asyncio.LifoQueue()
        self._workers: set[_Worker] = set()
        self._closed = False
        for _ in range(rules.num_workers):
            self._idle.put_nowait(None)

    async def start(self) -> None:
        """Start one worker, to learn now rather than at the first answer whether the task can be built."""
        async with self._a_worker():
            pass

    async def grade(self, problem: Problem, answer: str) -> Grade:
        """The verdict on one answer, whatever the user's code does."""
        try:
            async with self._a_worker() as worker:
                return await self._ask(worker, GradeCall(problem=problem, answer=answer))
        except UserError as error:
            return Unscorable(reason=str(error))

    async def close(self) -> None:
        """Kill all workers and wait for calls under way; those end as Unscorable, later ones raise RuntimeError."""
        if self._closed:
            return
        self._closed = True
        await asyncio.gather(*[self._discard(worker) for worker in list(self._workers)])
        for worker in [await self._idle.get() for _ in range(self._rules.num_workers)]:
            if worker is not None:
                worker.socket.close()
            # For calls that still wait, so that they learn of the end.
            self._idle.put_nowait(None)

    @contextlib.asynccontextmanager
    async def _a_worker(self) -> AsyncIterator["_Worker"]:
        """Have a worker to oneself, started if need be; what was discarded meanwhile is not given back."""
        worker = await self._idle.get()
        try:
            if self._closed:
                raise RuntimeError("the grader is closed")
            worker = worker or await self._start_worker()
            yield worker
        finally:
            self._idle.put_nowait(worker if worker in self._workers else None)

    async def _ask(self, worker: "_Worker", call: GradeCall) -> Grade:
        """Exchange one question for one answer; a worker that fails at it is discarded."""
        try:
            async with asyncio.timeout(self._rules.timeout_s):
                grade: Grade = await worker.exchange(call, Grade)
                return grade
        except TimeoutError:
            return Unscorable(reason=f"no answer after {self._rules.timeout_s:g} s")
        except WorkerDied:
            await self._discard(worker)
            return Unscorable(reason=f"the grading process died ({worker.describe_end()})")
        finally:
            if worker.broken:
                await self._discard(worker)

    async def _start_worker(self) -> "_Worker":
        worker = _Worker()
        self._workers.add(worker)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                greeting = await worker.exchange(self._setup, Ready | NotReady)
        except TimeoutError:
            raise UserError(f"{self._setup.task_path} was not built within {START_TIMEOUT_S:g} s.") from None
        except WorkerDied:
            await self._discard(worker)
            raise UserError(
                f"The process that builds {self._setup.task_path} died ({worker.describe_end()})."
            ) from None
        finally:
            if worker.broken:
                await self._discard(worker)
        if isinstance(greeting, NotReady):
            await self._discard(worker)
            worker.socket.close()
            raise UserError(greeting.reason)
        return worker

    async def _discard(self, worker: "_Worker") -> None:
        """Kill a worker, once, and wait until it is gone; that is finished even if the caller is cancelled."""
        self._workers.discard(worker)
        if worker.end is None:
            # In a thread, as a process with gigabytes takes a while to vanish.
            worker.end = asyncio.create_task(asyncio.to_thread(worker.kill))
        await asyncio.shield(worker.end)


class _Worker:
    """A child process (see `grading_worker`) in a session of its own, and our end of the socket to it.

    `broken` once an exchange failed or was cancelled; the socket is closed then, and only `kill` is left to do. An idle
    worker's socket is closed by whoever discards it.
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
        self.end: asyncio.Task[None] | None = None

    async def exchange(self, message: Struct, answer_type: Any) -> Any:
        """Send one message and await the answer to it."""
        loop = asyncio.get_running_loop()
        body = msgspec.msgpack.encode(message)
        answered = False
        try:
            await loop.sock_sendall(self.socket, FRAME_HEADER.pack(len(body)) + body)
            (num_bytes,) = FRAME_HEADER.unpack(await self._receive(FRAME_HEADER.size))
            answer = msgspec.msgpack.decode(await self._receive(num_bytes), type=answer_type)
            answered = True
            return answer
        except OSError as error:
            raise WorkerDied(str(error)) from error
        finally:
            if not answered:
                self.broken = True
                self.socket.close()

    async def _receive(self, num_bytes: int) -> bytes:
        loop = asyncio.get_running_loop()
        received = b""
        while len(received) < num_bytes:
            chunk = await loop.sock_recv(self.socket, num_bytes - len(received))
            if not chunk:
                raise WorkerDied("end of stream")
            received += chunk
        return received

    def kill(self) -> None:
        """Hang up, at which the supervisor kills everything below itself; wait until it is gone."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(timeout=KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def describe_end(self) -> str:
        """How the worker ended; call it after `kill`."""
        code = self._process.returncode
        number = -code if code < 0 else code - SIGNAL_EXIT_BASE
        # Exit codes above 128 that stand for no signal were chosen by the user's code.
        return f"killed by {signal.Signals(number).name}" if number in set(signal.Signals) else f"exit code {code}"
