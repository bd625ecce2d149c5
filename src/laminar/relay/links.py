"""How the bytes of a chunk get from one relay to the next: one Protocol, one implementation per kind of network.

Messages always travel over the hop's TCP connection. A link decides how plain chunks travel: behind their message, or
written straight into the next relay's memory. Every call ends within a deadline.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from laminar.relay.arrivals import Arrival
from laminar.relay.chain_messages import Chunk, Message
from laminar.relay.wire import Wire

M = TypeVar("M")


class Link(Protocol):
    """One hop. One thread sends and one receives at a time; `shut_down` may be called from any."""

    def send(self, message: Message, payload: Sequence[memoryview] = ()) -> None:
        """A message, and bytes that follow it."""
        ...

    def receive(self, kind: type[M] | None = None) -> M:
        """The next message."""
        ...

    @property
    def one_sided(self) -> bool:
        """Whether the sender writes into the receiver's memory by itself, so that it may do so late."""
        ...

    def expose(self, arrival: Arrival) -> bytes:
        """Receiver: let the sender reach the memory of this version; the sender needs the result to `aim`."""
        ...

    def aim(self, memory: bytes, arrival: Arrival) -> None:
        """Sender: plain chunks of this version go there now."""
        ...

    def send_plain(self, arrival: Arrival, index: int) -> None:
        """Sender: one chunk as it is. It may still be under way until `flush`."""
        ...

    def flush(self) -> None:
        """Sender: return when all chunks have left."""
        ...

    def discard(self) -> None:
        """Sender: give up on chunks under way; when it returns, their memory is read no more."""
        ...

    def receive_into(self, view: memoryview) -> None:
        """Receiver: the bytes that follow the last message."""
        ...

    def shut_down(self) -> None:
        """End it; whoever is inside a call gets `PeerLost`."""
        ...

    def close(self) -> None:
        """Free what it holds. Nobody may be inside a call."""
        ...


class TcpLink:
    """Chunks follow their message: received straight into mapped memory, sent straight from it."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.send = wire.send
        self.receive = wire.receive
        self.receive_into = wire.receive_into
        self.shut_down = wire.shut_down
        self.close = wire.close

    one_sided = False

    def expose(self, arrival: Arrival) -> bytes:
        return b""

    def aim(self, memory: bytes, arrival: Arrival) -> None:
        """Nothing to aim: the receiver knows where the chunks of the last `Begin` go."""

    def send_plain(self, arrival: Arrival, index: int) -> None:
        view = arrival.chunk(index)
        self.send(Chunk(index=index, inline=len(view), digest=arrival.digest(index)), [view])

    def flush(self) -> None:
        """The kernel has a copy of all of it."""

    def discard(self) -> None:
        """Nothing is under way that is not the kernel's."""


def _tcp(wire: Wire, deadline_s: float) -> Link:
    return TcpLink(wire)


def _nixl(kind: str) -> "MakeLink":
    def make(wire: Wire, deadline_s: float) -> Link:
        from laminar.relay.nixl_link import NixlLink  # an optional library, on use

        return NixlLink(wire, kind, deadline_s)

    return make


MakeLink = Callable[[Wire, float], Link]

LINKS: dict[str, MakeLink] = {"tcp": _tcp, "rdma": _nixl("rdma"), "nixl-tcp": _nixl("nixl-tcp")}
"""Kinds of links by the name they have in the configuration."""


def check_link(kind: str) -> None:
    """Raise `UserError` if links of this kind cannot work on this machine."""
    if kind != "tcp":
        from laminar.relay.nixl_link import check

        check(kind)
