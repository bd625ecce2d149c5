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

    def greeting(self) -> bytes:
        """What the sender tells the receiver about itself when the link begins."""
        ...

    def meet(self, greeting: bytes) -> None:
        """The receiver hears it."""
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

    def greeting(self) -> bytes:
        return b""

    def meet(self, greeting: bytes) -> None:
        """Nothing to know."""

    def expose(self, arrival: Arrival) -> bytes:
        return b""

    def aim(self, memory: bytes, arrival: Arrival) -> None:
        """Nothing to aim: the receiver knows where the chunks of the last `Begin` go."""

    def send_plain(self, arrival: Arrival, index: int) -> None:
        view = arrival.chunk(index)
        self.send(Chunk(index=index, inline=len(view), digest=arrival.digest(index)), [view])

    def flush(self) -> None:
        """The kernel has all of it."""


LINKS: dict[str, Callable[[Wire], Link]] = {"tcp": TcpLink}
"""Kinds of links by the name they have in the configuration."""
