"""A relay's end of the connections that other machines open to it: who comes in, and what they come for.

Invariant: a peer that cannot show the run's secret, or breaks the rules, loses its connection with a logged reason;
nobody else notices.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec

from laminar.relay.chain_messages import Denied, Message, decode_message
from laminar.relay.frames import BadFrame, FrameSocket, WrongSecret, answer_challenge, challenge_peer
from laminar.relay.messages import encode, to_failure
from laminar.relay.server import GREETING_S, accept
from laminar.relay.wire import tune
from laminar.schema.errors import LaminarError, PeerLost, UserError
from laminar.telemetry.events import Events

log = logging.getLogger(__name__)

Handler = Callable[[Message, FrameSocket], Awaitable[None]]
"""Serves one connection from its first message on, and closes the frames or hands their socket over."""


@contextlib.contextmanager
def tcp_listener(host: str, port: int) -> Iterator[socket.socket]:
    """Own a listening socket; port 0 lets the system choose one."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise UserError(f"cannot listen at {host}:{port}: {error.strerror}") from None
        listener.listen(128)
        yield listener
    finally:
        listener.close()


async def serve_tcp(
    listener: socket.socket, secret: bytes, handle: Handler, events: Events, congestion: str | None = None
) -> None:
    """Accept connections.

    waits for:  a peer to connect
    blocks on:  nothing; each connection has its own task
    ends:       never; cancelled by its parent, and ends all connections then
    """
    async with asyncio.TaskGroup() as group:
        while True:
            sock = await accept(asyncio.get_running_loop(), listener)
            group.create_task(_serve(sock, secret, handle, events, congestion), name="peer of another machine")


async def dial(host: str, port: int, secret: bytes, connect_s: float, congestion: str | None = None) -> FrameSocket:
    """A connection that has passed the greeting. Raises `PeerLost`, or `UserError` if it is another run's."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    frames = FrameSocket(sock, takes_fds=False)
    try:
        tune(sock, connect_s, congestion)
        async with asyncio.timeout(connect_s):
            await asyncio.get_running_loop().sock_connect(sock, (host, port))
            await answer_challenge(frames, secret)
    except BaseException as error:
        frames.close()
        if isinstance(error, WrongSecret | BadFrame):
            raise UserError(f"{host}:{port} cannot be used: {error}") from None
        if isinstance(error, OSError):  # TimeoutError as well
            raise PeerLost(f"{host}:{port} cannot be reached: {error or 'no answer'}") from None
        raise
    return frames


async def receive(frames: FrameSocket, kind: Any = None) -> Any:
    """The next message, which must be of this kind."""
    try:
        message = decode_message(await frames.receive())
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadFrame(f"not a message: {error}") from None
    if kind is not None and not isinstance(message, kind):
        raise BadFrame(f"{type(message).__name__} where {kind.__name__} was due")
    return message


async def _serve(sock: socket.socket, secret: bytes, handle: Handler, events: Events, congestion: str | None) -> None:
    peer = _name_of(sock)
    frames = FrameSocket(sock, takes_fds=False)
    try:
        tune(sock, GREETING_S, congestion)
        async with asyncio.timeout(GREETING_S):
            await challenge_peer(frames, secret)
            first = await receive(frames)
        await handle(first, frames)
    except (PeerLost, OSError) as error:
        if isinstance(error, TimeoutError):
            _refuse(peer, "it was too slow", events)
        else:
            log.debug("%s: %s", peer, error)
    except (BadFrame, WrongSecret) as error:
        _refuse(peer, str(error), events)
    except LaminarError as error:
        with contextlib.suppress(PeerLost, OSError):
            await frames.send(encode(Denied(to_failure(error))))
        log.debug("%s: %s", peer, error)
    finally:
        frames.close()


def _refuse(peer: str, reason: str, events: Events) -> None:
    log.warning("closed the connection of %s: %s", peer, reason)
    events.emit("peer_refused", peer=peer, reason=reason)


def _name_of(sock: socket.socket) -> str:
    with contextlib.suppress(OSError):
        host, port, *_ = sock.getpeername()
        return f"{host}:{port}"
    return "a peer that is gone"
