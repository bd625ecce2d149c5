"""The child processes that run code of users: a supervisor, and below it the worker, which grades or plays episodes.

Invariant: when the owner hangs up, for whatever reason, or the worker ends, all processes below the supervisor are
killed, in whatever session they are, and it ends as the last. The worker alone could not promise that: a regular
expression that backtracks for ever holds the interpreter lock, and a process that is killed takes nobody along.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import socket
import sys
from typing import Any, Literal

import msgspec
import psutil
from msgspec import Struct

from laminar.schema.errors import UserError
from laminar.tasks.episode_worker import serve_episodes
from laminar.tasks.framing import FRAME_HEADER
from laminar.tasks.loading import build_task
from laminar.tasks.protocol import Problem
from laminar.tasks.verdicts import user_line, verdict

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""From linux/prctl.h."""

SIGNAL_EXIT_BASE = 128
"""The supervisor of a worker that signal n killed exits with 128 + n, as a shell does."""


class WorkerSetup(Struct, frozen=True, kw_only=True):
    """What a worker needs to build the task by itself; the first message that it receives."""

    task_path: str
    task_options: dict[str, Any]
    sys_path: tuple[str, ...]
    memory_bytes: int | None
    role: Literal["grade", "play"] = "grade"


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
    """Serve the socket that was inherited as `descriptor`; run in a fresh interpreter."""
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    # Orphans of the worker become the supervisor's children, so that it can find them.
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    worker = os.fork()
    if worker == 0:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _serve(connection)
    else:
        os._exit(_supervise(worker, connection))


def _supervise(worker: int, connection: socket.socket) -> int:
    """Wait until either end is gone, kill what is left, and tell how the worker ended.

    waits for:    the worker's exit      <- user code, or the end of `_serve`
                  a hang-up              <- the owner discards this worker, or its owner died
    ends:         at the first of the two
    """
    wakeup, child_ended = socket.socketpair()
    wakeup.setblocking(False)
    child_ended.setblocking(False)
    signal.set_wakeup_fd(wakeup.fileno())
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    poller = select.poll()
    poller.register(connection, select.POLLHUP)
    poller.register(child_ended, select.POLLIN)
    hung_up = False
    # Orphans are children too, so a signal need not be the worker's.
    while not hung_up and os.waitid(os.P_PID, worker, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        hung_up = any(fd == connection.fileno() for fd, _ in poller.poll())
        with contextlib.suppress(BlockingIOError):
            child_ended.recv(4096)
    status = _kill_descendants(worker)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else SIGNAL_EXIT_BASE + os.WTERMSIG(status)


def _kill_descendants(worker: int) -> int:
    """Kill and reap until there is none, since whoever is killed may have started another just before."""
    worker_status = 0
    while True:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return worker_status
        if pid == worker:
            worker_status = status


def _serve(connection: socket.socket) -> None:
    """Build the task, then play episodes, or grade one answer after the other.

    waits for:    a GradeCall      <- Grader sends one when the last was answered
    blocks on:    user code        <- Grader hangs up after the time limit
    ends:         when the owner hangs up
    """
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
    if setup.role == "play":
        serve_episodes(connection, task)
    while True:
        call = _receive(stream, GradeCall)
        _send(stream, verdict(task, call.problem, call.answer))


def _receive(stream: Any, message_type: Any) -> Any:
    header = stream.read(FRAME_HEADER.size)
    if len(header) < FRAME_HEADER.size:
        sys.exit()
    return msgspec.msgpack.decode(stream.read(*FRAME_HEADER.unpack(header)), type=message_type)


def _send(stream: Any, message: Struct) -> None:
    body = msgspec.msgpack.encode(message)
    stream.write(FRAME_HEADER.pack(len(body)) + body)
    stream.flush()


def _prctl(option: int, value: int) -> None:
    """Ask the Linux kernel; elsewhere an orphan in another session may get away."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
