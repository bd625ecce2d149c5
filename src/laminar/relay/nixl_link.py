"""Chunks written straight into the next relay's memory, by NIXL over UCX: RDMA where there is such a network.

`rdma` allows UCX nothing but reliable RDMA transports, so that it fails where there is none instead of quietly taking
another way. `nixl-tcp` is the same code over UCX's TCP transport, which runs on any machine.

Invariants: a chunk's message is sent only after the library says that its bytes have arrived; a transfer that makes no
progress within the deadline has failed, for the library itself never gives up on a frozen peer.
"""

import contextlib
import importlib
import itertools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import Struct

from laminar.relay.arrivals import Arrival
from laminar.relay.chain_messages import Chunk, Message
from laminar.relay.frames import BadFrame
from laminar.relay.wire import Wire
from laminar.scheduling.chunks import Range
from laminar.schema.errors import DeadlinePassed, PeerLost, UserError

M = TypeVar("M")

TRANSPORTS = {"rdma": "rc", "nixl-tcp": "tcp"}
"""What UCX may use for each kind of link."""

PACKAGES = ("nixl_cu12", "nixl_cu13")
"""One package for each generation of CUDA; neither needs a GPU."""

WINDOW = 8
"""Transfers under way at once: one after the other, each would wait for the one before."""

POLL_S = 50e-6
"""Between two looks at a transfer; a chunk takes some ten times as long."""

MAX_REGISTERED = 4
"""Slots that one link keeps registered: those of a steady run."""


class Exposed(Struct, frozen=True, array_like=True):
    """Memory that the other side may write to."""

    metadata: bytes
    address: int
    num_bytes: int


class Agent:
    """The library's end of this process for one direction; `lock` is held for each call, since threads share it.

    One that `receives` has a thread of the library's own, which UCX needs where the network card does not write by
    itself; one that sends is moved on by whoever waits for its transfers.
    """

    def __init__(self, kind: str, *, receives: bool) -> None:
        api = _library()
        self.name = f"laminar-{secrets.token_hex(8)}"
        self.lock = threading.RLock()
        self.nixl = api.nixl_agent(self.name, api.nixl_agent_config(enable_prog_thread=receives, backends=[]))
        try:
            self.nixl.create_backend("UCX", {"engine_config": f"TLS={TRANSPORTS[kind]}"})
        except api.nixlBind.nixlBackendError as error:
            raise UserError(
                f"link {kind} was asked for, but UCX finds no {TRANSPORTS[kind]} transport on this machine ({error}); "
                "use link tcp, or install the drivers of the RDMA network card"
            ) from None

    def register(self, memory: memoryview) -> tuple[Any, int]:
        """Make memory known to the network card; returns what `deregister` takes, and the address."""
        address = int(np.frombuffer(memory, np.uint8).ctypes.data)
        with self.lock:
            return self.nixl.register_memory([(address, len(memory), 0, "")], "DRAM"), address


_agents: dict[tuple[str, bool], Agent] = {}
_starting = threading.Lock()


def agent(kind: str, *, receives: bool) -> Agent:
    """The agent of this process for links of this kind, made on first use, which takes half a second."""
    with _starting:
        if (kind, receives) not in _agents:
            _agents[kind, receives] = Agent(kind, receives=receives)
        return _agents[kind, receives]


def check(kind: str) -> None:
    """Raise `UserError` if links of this kind cannot work on this machine."""
    agent(kind, receives=True)


class NixlLink:
    """Messages go over the hop's TCP connection, plain chunks around it. See `links.Link`."""

    def __init__(self, wire: Wire, kind: str, deadline_s: float) -> None:
        self._kind = kind
        self._agent: Agent  # whether this end sends or receives shows with its first version
        self._deadline_s = deadline_s
        self._wire = wire
        self._registered: dict[int, tuple[Any, memoryview, int]] = {}
        self._remote: str | None = None
        self._lists: tuple[Any, Any] | None = None
        self._under_way: deque[tuple[Any, int, int]] = deque()
        self.receive_into = wire.receive_into
        self.shut_down = wire.shut_down

    one_sided = True

    def send(self, message: Message, payload: Sequence[memoryview] = ()) -> None:
        self._wire.send(message, payload)

    def receive(self, kind: type[M] | None = None) -> M:
        return self._wire.receive(kind)

    def expose(self, arrival: Arrival) -> bytes:
        self._agent = agent(self._kind, receives=True)
        address = self._register(arrival)
        with self._agent.lock:
            metadata = self._agent.nixl.get_agent_metadata()
        return msgspec.msgpack.encode(Exposed(metadata, address, arrival.total_bytes))

    def aim(self, memory: bytes, arrival: Arrival) -> None:
        try:
            target = msgspec.msgpack.decode(memory, type=Exposed)
        except msgspec.DecodeError as error:
            raise BadFrame(f"no memory to write to: {error}") from None
        if target.num_bytes != arrival.total_bytes:
            raise BadFrame(f"{target.num_bytes} bytes of memory for a version of {arrival.total_bytes}")
        self._agent = agent(self._kind, receives=False)
        address = self._register(arrival)
        ranges = [arrival.range_of(index) for index in range(arrival.num_chunks)]
        with self._agent.lock:
            self._forget_target()
            self._remote = self._call(lambda: self._agent.nixl.add_remote_agent(target.metadata))
            self._lists = (
                self._chunks("NIXL_INIT_AGENT", address, ranges),
                self._chunks(self._remote, target.address, ranges),
            )

    def send_plain(self, arrival: Arrival, index: int) -> None:
        if self._lists is None:
            raise BadFrame("the next relay gave no memory to write to")
        local, remote = self._lists
        with self._agent.lock:
            nixl = self._agent.nixl
            handle = self._call(lambda: nixl.make_prepped_xfer("WRITE", local, [index], remote, [index]))
            self._call(lambda: nixl.transfer(handle))
        self._under_way.append((handle, index, arrival.digest(index)))
        while len(self._under_way) >= WINDOW:
            self._finish_first()

    def flush(self) -> None:
        while self._under_way:
            self._finish_first()

    def discard(self) -> None:
        if self._remote is None:
            return
        with self._agent.lock:
            while self._under_way:
                handle, _, _ = self._under_way.popleft()
                self._release(handle)
            self._forget_target()

    def _release(self, handle: Any) -> None:
        self._quietly(lambda: self._agent.nixl.release_xfer_handle(handle))

    def close(self) -> None:
        self.discard()
        for slot_id in list(self._registered):
            self._deregister(slot_id)
        self._wire.close()

    def _register(self, arrival: Arrival) -> int:
        slot_id = arrival.slot.slot_id
        known = self._registered.get(slot_id)
        if known is None:
            if len(self._registered) >= MAX_REGISTERED:
                self._deregister(next(iter(self._registered)))
            memory = arrival.slot.view()
            registration, address = self._agent.register(memory)
            known = self._registered[slot_id] = (registration, memory, address)
        return known[2]

    def _chunks(self, name: str | None, address: int, ranges: list[Range]) -> Any:
        """The library's list of all chunks, here or there."""
        places = [(address + start, end - start, 0) for start, end in ranges]
        return self._call(lambda: self._agent.nixl.prep_xfer_dlist(name, places, "DRAM"))

    def _deregister(self, slot_id: int) -> None:
        registration, _, _ = self._registered.pop(slot_id)
        with self._agent.lock:
            self._quietly(lambda: self._agent.nixl.deregister_memory(registration))

    def _finish_first(self) -> None:
        handle, index, digest = self._under_way[0]
        started_s = time.monotonic()
        for attempt in itertools.count():
            with self._agent.lock:
                state = self._call(lambda: self._agent.nixl.check_xfer_state(handle))
            if state == "DONE":
                break
            if state != "PROC":
                raise PeerLost("the transfer of a chunk failed")
            if attempt % 100 == 99 and time.monotonic() - started_s > self._deadline_s:
                raise DeadlinePassed(f"a chunk was under way for {self._deadline_s:g} s")
            time.sleep(POLL_S)
        self._under_way.popleft()
        with self._agent.lock:
            self._agent.nixl.release_xfer_handle(handle)
        self.send(Chunk(index=index, inline=0, digest=digest))

    def _forget_target(self) -> None:
        self._lists = None
        if self._remote is not None:
            name, self._remote = self._remote, None
            self._quietly(lambda: self._agent.nixl.remove_remote_agent(name))

    def _call(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except _errors() as error:
            raise PeerLost(f"NIXL: {error}") from None

    def _quietly(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except _errors():
            return  # the peer is gone, and with it what was to be released


def _library() -> Any:
    for package in PACKAGES:
        with contextlib.suppress(ImportError):
            api = importlib.import_module(f"{package}._api")
            api.logger.setLevel(logging.WARNING)  # it would print to standard output
            return api
    raise UserError(
        "a link other than tcp needs NIXL: pip install 'laminar-rl[rdma]', or pip install --no-deps nixl-cu12"
    )


def _errors() -> tuple[type[BaseException], ...]:
    bindings = _library().nixlBind
    return tuple(vars(bindings)[name] for name in dir(bindings) if name.startswith("nixl") and name.endswith("Error"))
