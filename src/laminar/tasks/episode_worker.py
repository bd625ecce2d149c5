"""The loop of a worker that plays episodes: many environments side by side, each called one turn at a time.

Invariant: every `Act` is answered by one `Acted`, unless user code blocks the process; then the owner kills it.
"""

import asyncio
import contextlib
import os
import socket
from typing import Any

import msgspec
from msgspec import Struct

from laminar.schema.trajectories import Unscorable
from laminar.tasks.framing import FRAME_HEADER
from laminar.tasks.protocol import ClosableEnvironment, Environment, InteractiveTask, Problem, Reply, Turn
from laminar.tasks.verdicts import as_grade, user_line

OUT_OF_MEMORY = 97
"""Exit code of a worker that reached its limit: what else it holds cannot be relied on."""


class Open(Struct, frozen=True, kw_only=True, tag="open"):
    """Begin an episode."""

    episode: int
    problem: Problem


class Act(Struct, frozen=True, kw_only=True, tag="act"):
    """Play one turn."""

    episode: int
    turn: str
    token_ids: tuple[int, ...]


class Close(Struct, frozen=True, kw_only=True, tag="close"):
    """Forget an episode, also one that is playing a turn."""

    episode: int


class Acted(Struct, frozen=True, kw_only=True):
    """The reply to a turn, or why there is none; of a closed episode, that it is closed."""

    episode: int
    reply: Reply | None
    reason: str = ""


def serve_episodes(connection: socket.socket, task: Any) -> None:
    """Serve until the owner hangs up; never returns."""
    connection.setblocking(False)
    asyncio.run(_EpisodeServer(task, connection).run())
    os._exit(0)


class _EpisodeServer:
    def __init__(self, task: InteractiveTask, connection: socket.socket) -> None:
        self._task = task
        self._connection = connection
        self._episodes: dict[int, Environment | str] = {}
        self._acting: dict[int, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()

    async def run(self) -> None:
        """Obey messages in their order.

        waits for:  messages of the owner; ends: when it hangs up
        """
        reader, writer = await asyncio.open_connection(sock=self._connection)
        self._send = writer.write
        self._drain = writer.drain
        while True:
            try:
                (num_bytes,) = FRAME_HEADER.unpack(await reader.readexactly(FRAME_HEADER.size))
                message = msgspec.msgpack.decode(await reader.readexactly(num_bytes), type=Open | Act | Close)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            match message:
                case Open(episode=episode, problem=problem):
                    self._episodes[episode] = _made(self._task, problem)
                case Act(episode=episode, turn=turn, token_ids=token_ids):
                    self._acting[episode] = asyncio.create_task(self._act(episode, Turn(turn, token_ids)))
                case Close(episode=episode):
                    if (acting := self._acting.pop(episode, None)) is not None:
                        acting.cancel()
                    if (environment := self._episodes.pop(episode, None)) is not None:
                        closing = asyncio.create_task(close_environment(environment))
                        self._closing.add(closing)
                        closing.add_done_callback(self._closing.discard)

    async def _act(self, episode: int, turn: Turn) -> None:
        environment = self._episodes.get(episode, "the episode is closed")
        try:
            reply = environment if isinstance(environment, str) else checked_reply(await environment.act(turn))
        except asyncio.CancelledError:
            reply = "the episode was closed"
        except (Exception, SystemExit) as error:  # noqa: BLE001  user code
            reply = _told(error)
        if isinstance(reply, str):
            await self._tell(Acted(episode=episode, reply=None, reason=reply))
        else:
            await self._tell(Acted(episode=episode, reply=reply))
        if self._acting.get(episode) is asyncio.current_task():
            del self._acting[episode]

    async def _tell(self, answer: Acted) -> None:
        body = msgspec.msgpack.encode(answer)
        async with self._sending:
            self._send(FRAME_HEADER.pack(len(body)) + body)
            await self._drain()


def _made(task: InteractiveTask, problem: Problem) -> Environment | str:
    try:
        return task.environment(problem)
    except (Exception, SystemExit) as error:  # noqa: BLE001  user code
        return _told(error)


async def close_environment(environment: object) -> None:
    """Let an environment give back what it holds; what it raises then is nobody's business any more."""
    if isinstance(environment, ClosableEnvironment):
        with contextlib.suppress(Exception):
            await environment.close()


def checked_reply(reply: Any) -> Reply | str:
    """What user code returned, its grade judged as any other; or why it is no reply."""
    if not isinstance(reply, Reply):
        return f"the reply is not a Reply but a {type(reply).__name__}: {reply!r:.80}"
    if not isinstance(reply.text, str) or not isinstance(reply.done, bool):
        return f"a Reply has a text and a bool, this one {reply.text!r:.80} and {reply.done!r:.80}"
    if reply.text and reply.messages:
        return "a Reply has a text or messages, this one both"
    for message in reply.messages:
        if not {"role", "content"} <= message.keys() or not all(isinstance(value, str) for value in message.values()):
            return f"a message has a role and a content, all strings; this one is {message!r:.80}"
    if reply.grade is None:
        return reply
    if not reply.done:
        return "a Reply with a grade ends the episode: done=True is missing"
    grade = as_grade(reply.grade)
    return grade.reason if isinstance(grade, Unscorable) else msgspec.structs.replace(reply, grade=grade)


def _told(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        os._exit(OUT_OF_MEMORY)
    return f"{type(error).__name__}: {error} ({user_line(error)})"
