"""Tasks that are played by a program of the user's which talks to the model over HTTP, as to any chat service.

The program thinks that it calls a model; for the rest of the system it is an environment whose replies are the messages
that it adds from one call to the next. Nothing that the model drew is ever turned into text and back for training.
"""

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from laminar.schema.trajectories import Grade
from laminar.tasks.chat_endpoint import OVER, Call, ChatEndpoint
from laminar.tasks.protocol import Environment, Message, Problem, Reply, Split, Turn

ENDPOINT: Final = ChatEndpoint()
"""Of this process."""

MAX_THREADS: Final = 4096
"""Agents that are plain functions need a thread each; a replica has one agent per trajectory."""


class AgentTask(ABC):
    """A task whose episodes are calls of `play`. Prompts are chat messages, and the model has a chat template."""

    @abstractmethod
    def problems(self, split: Split) -> Sequence[Problem]:
        """All problems of a split, in a fixed order; `prompt` is what `play` sends in its first call."""

    @abstractmethod
    def play(self, problem: Problem, base_url: str) -> Any:
        """Play one episode, as a coroutine or as a plain function, and return its reward (a number, or `Scored`).

        `base_url` is an OpenAI-style endpoint for this episode alone. Its first call has the messages of
        `problem.prompt`; every further call has all messages so far, the model's answers included, and new ones at the
        end. Must be repeatable: it is played again up to the last turn when its process or its replica is lost.
        """

    def grade(self, problem: Problem, answer: str) -> float | Grade:
        """Reward of an episode that reached `rollout.max_new_tokens` or `rollout.max_turns` before `play` returned."""
        return 0.0

    def environment(self, problem: Problem) -> Environment:
        """One episode."""
        return AgentEnvironment(self, problem)


class AgentEnvironment:
    """One call of `play`. It is started by the model's first turn and cancelled when the episode is over.

    Invariant: between two `act`s the agent waits in `_call`, whose messages were handed on as the last reply.
    """

    _threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="agent")

    def __init__(self, task: AgentTask, problem: Problem) -> None:
        if isinstance(problem.prompt, str):
            raise TypeError(f"problem {problem.problem_id}: an agent's prompt must be chat messages, not text")
        self._task = task
        self._problem = problem
        self._expected: list[Message] = [dict(message) for message in problem.prompt]
        self._calls: asyncio.Queue[Call] = asyncio.Queue()
        self._call: Call | None = None
        self._answered: tuple[list[Message], Turn] | None = None
        self._playing: asyncio.Future[Any] | None = None
        self._base_url = ""
        self._is_closed = False

    async def act(self, turn: Turn) -> Reply:
        """Answer the agent's call with the model's turn; what it adds in its next call is the reply."""
        if self._playing is None:
            self._start()
            self._call = await self._next_call()
            if self._call is not None and self._call.messages != self._expected:
                raise self._spoilt("its first call must have the messages of the problem's prompt", self._call)
        if self._call is None:
            raise RuntimeError("the agent returned before it called the model")
        self._answer(self._call, turn)
        call = self._call = await self._next_call()
        if call is None:
            assert self._playing is not None
            return Reply(done=True, grade=self._playing.result())
        known = len(self._expected)
        if call.messages[:known] != self._expected or len(call.messages) == known:
            raise self._spoilt("a call must have all messages so far as they were, and new ones at the end", call)
        added = call.messages[known:]
        self._expected = call.messages
        return Reply(messages=tuple(added))

    def hear(self, call: Call) -> None:
        """A call of the agent; one that was on its way when the episode ended is refused, or it would wait for ever."""
        if self._is_closed:
            call.refuse(OVER, 410)
        else:
            self._calls.put_nowait(call)

    async def close(self) -> None:
        """Nobody waits for the agent any more: a call under way is refused, so that it comes to its end."""
        self._is_closed = True
        if self._base_url:
            ENDPOINT.close(self._base_url)
        pending = [self._call] if self._call is not None else []
        while not self._calls.empty():
            pending.append(self._calls.get_nowait())
        for call in pending:
            call.refuse(OVER, 410)
        if self._playing is not None:
            self._playing.cancel()

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        self._base_url = ENDPOINT.open(lambda call: loop.call_soon_threadsafe(self.hear, call))
        if inspect.iscoroutinefunction(self._task.play):
            self._playing = asyncio.ensure_future(self._task.play(self._problem, self._base_url))
        else:
            self._playing = loop.run_in_executor(self._threads, self._task.play, self._problem, self._base_url)

    def _answer(self, call: Call, turn: Turn) -> None:
        self._answered = call.messages, turn
        self._expected = [*call.messages, {"role": "assistant", "content": str(turn)}]
        call.answer(turn)

    async def _next_call(self) -> Call | None:
        """The agent's next call, None if it is done; raises what it raised.

        waits for:  the program of the user; ends: cancelled by the owner's time limit
        """
        assert self._playing is not None
        while True:
            waiting = asyncio.ensure_future(self._calls.get())
            try:
                await asyncio.wait([waiting, self._playing], return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not waiting.done():
                    waiting.cancel()
            if not waiting.done():
                self._playing.result()
                return None
            call = waiting.result()
            if self._answered is None or call.messages != self._answered[0]:
                return call
            call.answer(self._answered[1])  # a client that lost the response asks again

    def _spoilt(self, reason: str, call: Call) -> ValueError:
        call.refuse(reason)
        return ValueError(f"the agent's conversation cannot be trained on: {reason}")
