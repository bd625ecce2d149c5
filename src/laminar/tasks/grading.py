"""Run rewards written by users without ever being blocked or killed by them.

Invariant: every call of `grade` ends within its time limit (plus the start of a worker) in `Scored` or `Unscorable`,
and no process outlives the grader: not after `close`, and not when the service that owns it is killed.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from laminar.schema.errors import UserError
from laminar.schema.trajectories import Grade, Unscorable
from laminar.tasks.protocol import Problem, Task
from laminar.tasks.verdicts import verdict
from laminar.tasks.worker import GradeCall, WorkerSetup
from laminar.tasks.worker_process import WorkerDied, WorkerProcess


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
        self._idle: asyncio.LifoQueue[WorkerProcess | None] = asyncio.LifoQueue()
        self._workers: set[WorkerProcess] = set()
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
    async def _a_worker(self) -> AsyncIterator[WorkerProcess]:
        """Have a worker to oneself, started if need be; what was discarded meanwhile is not given back."""
        worker = await self._idle.get()
        try:
            if self._closed:
                raise RuntimeError("the grader is closed")
            worker = worker or await self._start_worker()
            yield worker
        finally:
            self._idle.put_nowait(worker if worker in self._workers else None)

    async def _ask(self, worker: WorkerProcess, call: GradeCall) -> Grade:
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

    async def _start_worker(self) -> WorkerProcess:
        worker = WorkerProcess()
        self._workers.add(worker)
        try:
            await worker.set_up(self._setup)
        except BaseException:
            self._workers.discard(worker)
            raise
        return worker

    async def _discard(self, worker: WorkerProcess) -> None:
        self._workers.discard(worker)
        await worker.discard()
