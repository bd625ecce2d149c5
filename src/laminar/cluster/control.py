"""How the command line speaks to a live run: a Unix socket that only the same user can open, one question a connection.

The socket lies in the run's scratch folder, as a path in the run folder may be too long for one; a file of the run
folder says where. Questions and answers are one line of JSON each.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from laminar.schema.errors import LaminarError, PeerLost, RunFailed, UserError

ADDRESS: Final = ".control"
"""File of the run folder that holds the path of the socket, and the host it is on, while the run lives."""

MAX_LINE: Final = 1 << 16
READ_S: Final = 5.0
"""A question comes at once, or not at all."""

ANSWER_S: Final = 60.0
"""The launcher may have to wait for a service that restarts."""


class Scale(Struct, frozen=True, kw_only=True, tag="scale"):
    """There shall be so many replicas."""

    num_replicas: int


class Answer(Struct, frozen=True, kw_only=True):
    """`error` is a sentence for the user; `mistake` says that it was theirs."""

    error: str | None = None
    mistake: bool = False


@contextlib.asynccontextmanager
async def control_socket(folder: Path, scratch: Path, obey: Callable[[Scale], Awaitable[None]]) -> AsyncIterator[None]:
    """Answer questions for the time of the context."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            writer.write(msgspec.json.encode(await _answer(reader, obey)) + b"\n")
            await writer.drain()

    path = scratch / "control"
    server = await asyncio.start_unix_server(serve, path, limit=MAX_LINE)
    os.chmod(path, 0o600)
    (folder / ADDRESS).write_text(f"{path}\n{socket.gethostname()}", encoding="utf-8")
    try:
        yield
    finally:
        (folder / ADDRESS).unlink(missing_ok=True)
        server.close()


async def _answer(reader: asyncio.StreamReader, obey: Callable[[Scale], Awaitable[None]]) -> Answer:
    try:
        async with asyncio.timeout(READ_S):
            line = await reader.readline()
        await obey(msgspec.json.decode(line, type=Scale))
    except (msgspec.DecodeError, ValueError, TimeoutError) as error:
        return Answer(error=f"that was no question: {error}", mistake=True)
    except LaminarError as error:
        return Answer(error=str(error), mistake=isinstance(error, UserError))
    return Answer()


def ask(folder: Path, question: Scale) -> None:
    """Ask the live run of this folder. Raises `UserError` if there is none, or what the launcher refused."""
    try:
        path, host = (folder / ADDRESS).read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError):
        raise UserError(f"{folder} is not a run that is alive; start it with laminar train --resume {folder}") from None
    if host != socket.gethostname():
        raise UserError(f"the run of {folder} was started on {host}; ask there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(ANSWER_S)
        try:
            sock.connect(path)
            sock.sendall(msgspec.json.encode(question) + b"\n")
            with sock.makefile("rb") as file:
                answer = msgspec.json.decode(file.readline(MAX_LINE), type=Answer)
        except (ConnectionError, FileNotFoundError):
            raise UserError(f"the run of {folder} is not alive; go on with laminar train --resume {folder}") from None
        except (OSError, msgspec.DecodeError) as error:
            raise PeerLost(f"the run of {folder} gave no answer: {error}") from None
    if answer.error is not None:
        raise (UserError if answer.mistake else RunFailed)(answer.error)
