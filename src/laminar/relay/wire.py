"""A TCP connection for threads: whole messages, and bytes straight into and out of mapped memory.

Invariants: every call ends within the deadline, or while bytes keep coming; after any error the connection is unusable.
The kernel keeps the deadline (SO_RCVTIMEO, SO_SNDTIMEO), so that one call can wait for a whole chunk without waking
Python for every packet.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from laminar.relay.chain_messages import Message, decode_message
from laminar.relay.frames import HEADER_BYTES, MAX_FRAME_BYTES, BadFrame
from laminar.relay.messages import encode
from laminar.schema.errors import DeadlinePassed, PeerLost

KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_PROBES = 2, 1, 3
"""A machine that vanished sends no error; these are noticed after 5 s even where nobody writes."""

USER_TIMEOUT = getattr(socket, "TCP_USER_TIMEOUT", None)
CONGESTION = getattr(socket, "TCP_CONGESTION", None)

M = TypeVar("M")


class Wire:
    """One thread sends and one receives at a time; `shut_down` may be called from any."""

    def __init__(self, sock: socket.socket, deadline_s: float) -> None:
        self._sock = sock
        self._header = bytearray(HEADER_BYTES)
        self._closing = threading.Lock()
        self._closed = False
        sock.setblocking(True)
        self.set_deadline(deadline_s)

    def set_deadline(self, deadline_s: float) -> None:
        """How long either direction may stand still."""
        timeval = struct.pack("@ll", int(deadline_s), int(deadline_s % 1 * 1e6))
        self._deadline_s = deadline_s
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._sock.setsockopt(socket.SOL_SOCKET, option, timeval)

    def get_option(self, level: int, option: int, num_bytes: int) -> bytes:
        """What the kernel knows of the connection."""
        return self._sock.getsockopt(level, option, num_bytes)

    def send(self, message: Message, payload: Sequence[memoryview] = ()) -> None:
        """Send a message and the bytes that belong to it, with as few copies and calls as can be."""
        frame = encode(message)
        self._send_all([memoryview(len(frame).to_bytes(HEADER_BYTES, "big") + frame), *payload])

    def receive(self, kind: type[M] | None = None) -> M:
        """The next message, which must be of this kind."""
        self.receive_into(memoryview(self._header))
        size = int.from_bytes(self._header, "big")
        if size > MAX_FRAME_BYTES:
            raise BadFrame(f"a message of {size} bytes; {MAX_FRAME_BYTES} are allowed")
        frame = bytearray(size)
        self.receive_into(memoryview(frame))
        try:
            message = decode_message(frame)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise BadFrame(f"not a message: {error}") from None
        if kind is not None and not isinstance(message, kind):
            raise BadFrame(f"{type(message).__name__} where {kind.__name__} was due")
        return message  # type: ignore[return-value]

    def receive_into(self, view: memoryview) -> None:
        """Fill these bytes."""
        position = 0
        while position < len(view):
            try:
                num = self._sock.recv_into(view[position:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise DeadlinePassed(f"nothing came for {self._deadline_s:g} s") from None
            except OSError as error:
                raise PeerLost(f"the connection broke: {error.strerror}") from None
            if not num:
                raise PeerLost("the connection was closed" + (" in the middle of a message" if position else ""))
            position += num

    def shut_down(self) -> None:
        """End the connection in both directions; whoever is inside a call gets `PeerLost`."""
        with self._closing, contextlib.suppress(OSError):
            if not self._closed:
                self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Nobody may be inside a call."""
        with self._closing:
            self._closed = True
            self._sock.close()

    def _send_all(self, parts: list[memoryview]) -> None:
        while parts:
            try:
                num = self._sock.sendmsg(parts)
            except BlockingIOError:
                raise DeadlinePassed(f"the peer took nothing for {self._deadline_s:g} s") from None
            except OSError as error:
                raise PeerLost(f"the connection broke: {error.strerror}") from None
            while parts and num >= len(parts[0]):
                num -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][num:]


def tune(sock: socket.socket, deadline_s: float, congestion: str | None = None) -> None:
    """Send at once, and notice a machine that vanished. Raises OSError if the kernel knows no such `congestion`."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_EVERY_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    if USER_TIMEOUT is not None:
        sock.setsockopt(socket.IPPROTO_TCP, USER_TIMEOUT, int(deadline_s * 1000))
    if congestion is not None and CONGESTION is not None:
        sock.setsockopt(socket.IPPROTO_TCP, CONGESTION, congestion.encode())


TCP_INFO_MIN_RTT = 148
"""Where Linux puts `tcpi_min_rtt`, microseconds, in the answer to TCP_INFO."""


def rtt_s(wire: Wire) -> float:
    """Shortest round trip of this connection that the kernel has seen; 0 where it does not tell."""
    with contextlib.suppress(OSError, AttributeError, struct.error):
        info = wire.get_option(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_MIN_RTT + 4)
        return float(struct.unpack_from("@I", info, TCP_INFO_MIN_RTT)[0]) * 1e-6
    return 0.0
