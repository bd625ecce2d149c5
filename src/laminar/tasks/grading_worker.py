"""The child process of `grading.Grader`: build the task, then grade one answer after the other.

Invariant: it ends, with its children, when the process that started it does, even if user code never returns.
"""

import ctypes
import os
import resource
import select
import signal
import socket
import struct
import sys
import threading
from typing import Any

import msgspec
from msgspec import Struct

from laminar.schema.errors import UserError
from laminar.tasks.loading import build_task
from laminar.tasks.protocol import Problem
from laminar.tasks.verdicts import user_line, verdict

FRAME_HEADER = struct.Struct("<I")
"""A message on the socket is its length, then its msgpack."""

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


class WorkerSetup(Struct, frozen=True, kw_only=True):
    """What a worker needs to build the task by itself; the first message that it receives."""

    task_path: str
    task_options: dict[str, Any]
    sys_path: tuple[str, ...]
    memory_bytes: int | None


class Ready(Struct, frozen=True, kw_only=True, tag="ready"):
    """First message of a worker: the task is built."""


class NotReady(Struct, frozen=True, kw_only=True, tag="not_ready"):
    """First message of a worker whose task cannot be built, and its last."""

    reason: str


class GradeCall(Struct, frozen=True, kw_only=True):
    """One answer to grade."""

    problem: Problem
    answer: str


def main(descriptor: int) -> None:
    """Serve the socket that was inherited as `descriptor` until it is closed.

    waits for:    a GradeCall      <- Grader sends one when the last was answered
    blocks on:    user code        <- Grader kills this process after the time limit
    ends:         when the other end of the socket is closed
    """
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    _die_with_parent(connection)
    stream = connection.makefile("rwb")
    setup = _receive(stream, WorkerSetup)
    sys.path[:0] = setup.sys_path
    if setup.memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (setup.memory_bytes, setup.memory_bytes))
    try:
        task = build_task(setup.task_path, setup.task_options)
    except UserError as error:
        _send(stream, NotReady(reason=str(error)))
        return
    except Exception as error:  # noqa: BLE001  the task's constructor is user code
        reason = f"{setup.task_path} cannot be built: {type(error).__name__}: {error} ({user_line(error)})"
        _send(stream, NotReady(reason=reason))
        return
    _send(stream, Ready())
    while True:
        call = _receive(stream, GradeCall)
        _send(stream, verdict(task, call.problem, call.answer))


def _die_with_parent(connection: socket.socket) -> None:
    """Two ways, as each has a gap: the thread takes our children along, but cannot run while C code holds the
    interpreter lock (a regular expression that backtracks for ever does); the kernel's signal reaches just us, always.
    """
    threading.Thread(target=_kill_group_at_hang_up, args=(connection,), daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill_group_at_hang_up(connection: socket.socket) -> None:
    poller = select.poll()
    poller.register(connection, select.POLLHUP)
    poller.poll()
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _receive(stream: Any, message_type: Any) -> Any:
    header = stream.read(FRAME_HEADER.size)
    if len(header) < FRAME_HEADER.size:
        sys.exit()
    return msgspec.msgpack.decode(stream.read(FRAME_HEADER.unpack(header)[0]), type=message_type)


def _send(stream: Any, message: Struct) -> None:
    body = msgspec.msgpack.encode(message)
    stream.write(FRAME_HEADER.pack(len(body)) + body)
    stream.flush()
