"""Play episodes in environments written by users without ever being blocked or killed by them.

Invariants: every `act` ends within its time limit in a reply, in `EpisodeFailed`, which is a fact about this episode,
or in `EnvironmentLost`, which is none: the process was lost because of another one, and the turns so far can be played
again elsewhere. No process outlives the pool.
"""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from laminar.schema.errors import LaminarError, UserError
from laminar.tasks.episode_worker import OUT_OF_MEMORY, Act, Acted, Close, Open, checked_reply, close_environment
from laminar.tasks.protocol import Environment, EnvironmentLost, EpisodeFailed, InteractiveTask, Problem, Reply, Turn
from laminar.tasks.verdicts import user_line
from laminar.tasks.worker import WorkerSetup
from laminar.tasks.worker_process import WorkerDied, WorkerProcess

ALIVE_S: Final = 2.0
"""A worker that is told to give up a turn answers within this, unless user code blocks it: then it is killed."""


class EnvironmentRules(Struct, frozen=True, kw_only=True):
    """Limits of user code. `memory_bytes` bounds a worker's address space; None leaves it unbounded."""

    timeout_s: float = 30.0
    num_workers: int = 1
    memory_bytes: int | None = None


class InlineEnvironments:
    """Plays on the caller's event loop: for the simulator's virtual clock, and for tasks that are known to behave."""

    def __init__(self, task: InteractiveTask, timeout_s: float) -> None:
        self._task, self._timeout_s = task, timeout_s
        self._closing: set[asyncio.Task[None]] = set()

    def environment(self, problem: Problem) -> Environment:
        """A fresh environment for one episode."""
        return _InlineEpisode(self._task, problem, self._timeout_s)

    def forget(self, environment: Environment) -> None:
        """The episode is over."""
        assert isinstance(environment, _InlineEpisode), "it is one of ours"
        closing = asyncio.create_task(environment.close(), name="close an episode")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


class _InlineEpisode:
    def __init__(self, task: InteractiveTask, problem: Problem, timeout_s: float) -> None:
        self._task, self._problem, self._timeout_s = task, problem, timeout_s
        self._environment: Environment | None = None

    async def act(self, turn: Turn) -> Reply:
        """One turn; what user code raises is a fact about this episode."""
        try:
            async with asyncio.timeout(self._timeout_s):
                if self._environment is None:
                    self._environment = self._task.environment(self._problem)
                reply = checked_reply(await self._environment.act(turn))
        except TimeoutError:
            raise EpisodeFailed(f"no reply after {self._timeout_s:g} s") from None
        except Exception as error:  # noqa: BLE001  user code
            raise EpisodeFailed(f"{type(error).__name__}: {error} ({user_line(error)})") from None
        if isinstance(reply, str):
            raise EpisodeFailed(reply)
        return reply

    async def close(self) -> None:
        """Let the environment give back what it holds."""
        await close_environment(self._environment)


class EnvironmentPool:
    """Fulfils `rollout.ports.Environments`. Episodes are spread over the workers; one that dies is replaced."""

    def __init__(
        self, task_path: str, task_options: Mapping[str, Any], *, sys_path: Sequence[str], rules: EnvironmentRules
    ) -> None:
        self._setup = WorkerSetup(
            task_path=task_path,
            task_options=dict(task_options),
            sys_path=tuple(sys_path),
            memory_bytes=rules.memory_bytes,
            role="play",
        )
        self._rules = rules
        self._numbers = itertools.count(1)
        self._workers: list[_Worker | None] = [None] * rules.num_workers
        self._starting = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    def environment(self, problem: Problem) -> Environment:
        """A fresh environment for one episode; its process is chosen, and started if need be, at its first turn."""
        return _Episode(self, next(self._numbers), problem, self._rules.timeout_s)

    def forget(self, environment: Environment) -> None:
        """The episode is over: let its process drop it, as soon as it can."""
        assert isinstance(environment, _Episode), "it is one of ours"
        task = asyncio.create_task(environment.close(), name="close an episode")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Kill all workers; turns under way end as `EnvironmentLost`."""
        self._closed = True
        for task in self._closing:
            task.cancel()
        workers = [worker for worker in self._workers if worker is not None]
        await asyncio.gather(*(worker.end() for worker in workers))

    async def worker(self, episode: int) -> "_Worker":
        """The worker for a new episode. Raises `UserError` if the task cannot be built."""
        place = episode % len(self._workers)
        async with self._starting:
            if self._closed:
                raise RuntimeError("the pool is closed")
            worker = self._workers[place]
            if worker is None or worker.is_over:
                process = WorkerProcess()
                await process.set_up(self._setup)
                worker = self._workers[place] = _Worker(process)
            return worker


class _Episode:
    """One episode, in one worker for all its turns."""

    def __init__(self, pool: EnvironmentPool, number: int, problem: Problem, timeout_s: float) -> None:
        self._pool, self._number, self._problem, self._timeout_s = pool, number, problem, timeout_s
        self._host: _Worker | None = None

    async def act(self, turn: Turn) -> Reply:
        """See the module."""
        try:
            if self._host is None:
                self._host = await self._pool.worker(self._number)
                await self._host.open(self._number, self._problem)
            return await self._host.act(self._number, turn, self._timeout_s)
        except UserError as error:
            raise EpisodeFailed(str(error)) from None

    async def close(self) -> None:
        """Let the worker forget it."""
        if self._host is not None:
            await self._host.close(self._number)


class _Worker:
    """A worker and the turns that it is playing."""

    def __init__(self, process: WorkerProcess) -> None:
        self._process = process
        self._sending = asyncio.Lock()
        self._playing: dict[int, asyncio.Future[Acted]] = {}
        self._culprit: int | None = None
        self._listener = asyncio.create_task(self._listen(), name="replies of environments")

    @property
    def is_over(self) -> bool:
        """Whether this process plays no more."""
        return self._listener.done() or self._culprit is not None

    async def open(self, episode: int, problem: Problem) -> None:
        """Begin an episode."""
        await self._send(Open(episode=episode, problem=problem))

    async def act(self, episode: int, turn: Turn, timeout_s: float) -> Reply:
        """One turn; a turn that takes too long ends the episode, and the process if it cannot be stopped alone."""
        answer: asyncio.Future[Acted] = asyncio.get_running_loop().create_future()
        self._playing[episode] = answer
        try:
            await self._send(Act(episode=episode, turn=str(turn), token_ids=turn.token_ids))
            try:
                acted = await asyncio.wait_for(asyncio.shield(answer), timeout_s)
            except TimeoutError:
                await self._give_up(episode, answer)
                raise EpisodeFailed(f"no reply after {timeout_s:g} s") from None
        finally:
            self._playing.pop(episode, None)
        if acted.reply is None:
            raise EpisodeFailed(acted.reason)
        return acted.reply

    async def close(self, episode: int) -> None:
        """Forget an episode; a process that is gone has done so already."""
        try:
            await self._send(Close(episode=episode))
        except LaminarError:
            return

    async def end(self) -> None:
        """Kill the process."""
        self._listener.cancel()
        await self._process.discard()
        await asyncio.wait([self._listener])

    async def _give_up(self, episode: int, answer: "asyncio.Future[Acted]") -> None:
        """Stop one turn. A process that does not even answer that is blocked by this turn, or another one."""
        try:
            await self._send(Close(episode=episode))
            await asyncio.wait_for(asyncio.shield(answer), ALIVE_S)
        except (TimeoutError, EnvironmentLost, EpisodeFailed):
            self._culprit = episode
            await self._process.discard()

    async def _send(self, message: Struct) -> None:
        try:
            async with self._sending:
                await self._process.send(message)
        except WorkerDied:
            raise EnvironmentLost("the environment's process is gone") from None

    async def _listen(self) -> None:
        """Hand replies to those who wait for them.

        waits for:  replies of the worker; ends: with it
        """
        try:
            while True:
                acted: Acted = await self._process.receive(Acted)
                answer = self._playing.get(acted.episode)
                if answer is not None and not answer.done():
                    answer.set_result(acted)
        except WorkerDied:
            await self._process.discard()
            self._tell_all(self._process.describe_end())
        except asyncio.CancelledError:
            self._tell_all("closed")
            raise

    def _tell_all(self, end: str) -> None:
        """A turn that was played alone has killed the process; of several it may have been any."""
        if end == f"exit code {OUT_OF_MEMORY}":
            end = "out of memory"
        alone = len(self._playing) == 1 and self._culprit is None
        for answer in self._playing.values():
            if not answer.done():
                error = EpisodeFailed if alone else EnvironmentLost
                answer.set_exception(error(f"the environment's process died ({end})"))
                answer.exception()  # seen, even if nobody waits any more
