"""A relay's part in the chain: follow the relay before it, feed the one behind it, let learners push, report.

Invariant: a link belongs to one epoch. When the chain changes, all links of the old epoch end, and the new ones begin
by saying what is missing; what arrived stays. A relay of an older epoch is refused by one that knows better.

Bytes move in threads (`feeding`, `following`, `receiving`), one for each link; everything else is on the event loop.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct

from laminar.relay.arrivals import Arrival
from laminar.relay.chain_messages import Beat, Follow, Join, Message, Push, Topology, VersionKey
from laminar.relay.feeding import Feeder
from laminar.relay.following import Follower, HopMeter
from laminar.relay.frames import BadFrame, FrameSocket
from laminar.relay.hops import dial, receive, serve_tcp, tcp_listener
from laminar.relay.keeper import connect_to_keeper
from laminar.relay.links import LINKS, Link, check_link
from laminar.relay.manifest import ALIGN_BYTES, Manifest
from laminar.relay.messages import encode
from laminar.relay.receiving import receive_push
from laminar.relay.service import CHUNK_BYTES, RelayService
from laminar.relay.threads import run_until_stopped
from laminar.relay.wire import Wire, rtt_s
from laminar.scheduling.chain import MIN_CHUNK_BYTES, RelayPlace, best_chunk_bytes
from laminar.scheduling.membership import Chain, Member
from laminar.schema.errors import DeadlinePassed, Fenced, LaminarError, PeerLost
from laminar.telemetry.events import Events, NullEvents

log = logging.getLogger(__name__)

MAX_LINKS = 256
"""Threads of one relay: two links of the chain, and the learner's ranks while they push."""

LARGEST_CHUNK_BYTES = 4 << 20
"""Larger ones gain nothing, and after a failure at most one of them is sent again for nothing."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5
"""Between attempts to reach the predecessor, which may learn of a new epoch a little later."""

EPOCH_WAIT_S = 2.0
"""A follower or learner that is ahead of this relay's knowledge waits so long for it to catch up."""

CALL_S = 150.0
"""Threads wait so long for the event loop: longer than a version waits for memory."""

T = TypeVar("T")


class ChainRules(Struct, frozen=True, kw_only=True):
    """Where a relay stands, and how it links. `chunk_bytes` None: chosen from what the links were measured to take."""

    relay_id: str
    rack: str = "rack-0"
    machine: str = "machine-0"
    host: str = "127.0.0.1"
    port: int = 0
    keeper_host: str = "127.0.0.1"
    keeper_port: int
    near_learner: bool = False
    link: str = "tcp"
    congestion: str | None = None
    chunk_bytes: int | None = None
    with_deltas: bool = True
    beat_s: float = 1.0
    deadline_s: float = 5.0
    """A link on which nothing moves for so long has failed."""


class FromThreads:
    """The relay's store, for threads: each call runs on the event loop."""

    def __init__(
        self,
        service: RelayService,
        loop: asyncio.AbstractEventLoop,
        tell: Callable[[Arrival], None],
        has_next: Callable[[], bool],
    ) -> None:
        self._service = service
        self._loop = loop
        self._tell = tell
        self.has_next = has_next

    def arrive(self, key: VersionKey, manifest: Manifest, chunk_bytes: int | None) -> Arrival | None:
        return self._call(self._service.arrive(key, manifest, chunk_bytes))

    def arrived(self, arrival: Arrival, checksum: int) -> None:
        self._call(self._service.arrived(arrival, checksum))
        self._tell(arrival)

    def withdraw(self, arrival: Arrival) -> None:
        self._call(self._service.withdraw(arrival))

    def rewind(self, version: int) -> None:
        self._call(self._service.rewind(version))

    def hold(self, arrival: Arrival) -> bool:
        return self._call(self._service.hold(arrival))

    def let_go(self, arrival: Arrival) -> None:
        self._call(self._service.let_go(arrival))

    def taint(self, arrival: Arrival) -> None:
        self._call(self._service.taint(arrival))

    def _call(self, call: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run_coroutine_threadsafe(call, self._loop).result(CALL_S)
        except (TimeoutError, CancelledError):
            raise DeadlinePassed("the relay's event loop gave no answer") from None


class ChainMember:
    """Call `run` beside the service's own; `address` is known once `listening` is set."""

    def __init__(self, service: RelayService, secret: bytes, rules: ChainRules, events: Events | None = None) -> None:
        self._service = service
        self._secret = secret
        self._rules = rules
        self._events = events or NullEvents()
        self._topology = Topology(chain=Chain())
        self._changed = asyncio.Event()
        self._feeding: dict[str, tuple[int, Callable[[], None]]] = {}
        self._threads = ThreadPoolExecutor(MAX_LINKS, thread_name_prefix=f"links of {rules.relay_id}")
        self.calls: FromThreads
        self.meter = HopMeter()
        self.listening = asyncio.Event()
        self.address = (rules.host, rules.port)
        service.chunk_bytes_of = self._chunk_bytes
        service.refuses_writers = f"relay {rules.relay_id} has not joined its chain yet"
        service.joined = asyncio.Event()

    @property
    def chain(self) -> Chain:
        """As far as it is known here."""
        return self._topology.chain

    async def run(self) -> None:
        """Take part in the chain.

        waits for:  the keeper's word, other relays, learners
        ends:       never; cancelled by its parent, and all its threads end then
        """
        await asyncio.to_thread(check_link, self._rules.link)
        self.calls = FromThreads(self._service, asyncio.get_running_loop(), self._tell_of, self._has_next)
        with tcp_listener(self._rules.host, self._rules.port) as listener:
            self.address = listener.getsockname()[:2]
            self.listening.set()
            async with asyncio.TaskGroup() as group:
                group.create_task(serve_tcp(listener, self._secret, self._serve, self._events, self._rules.congestion))
                group.create_task(self._keep_contact())
                group.create_task(self._follow_for_ever())

    # ---- the keeper

    async def _keep_contact(self) -> None:
        """Report to the keeper and hear of changes.

        waits for:  its word;  ends: never, it joins the keeper's successor when the keeper is lost
        """
        while True:
            try:
                await self._talk_to_keeper()
            except (PeerLost, BadFrame) as error:
                log.info("relay %s: no keeper: %s", self._rules.relay_id, error)
            await asyncio.sleep(LONGEST_PAUSE_S / 5)

    async def _talk_to_keeper(self) -> None:
        rules = self._rules
        place = RelayPlace(relay_id=rules.relay_id, rack=rules.rack, machine=rules.machine)
        host, port = self.address
        member = Member(place=place, host=host, port=port, near_learner=rules.near_learner)
        join = Join(member=member, epoch=self.chain.epoch, newest=await self._service.newest())
        frames = await connect_to_keeper(rules.keeper_host, rules.keeper_port, self._secret, join, rules.deadline_s)
        beating = asyncio.ensure_future(self._beat(frames))
        try:
            while True:
                self._learn(await receive(frames, Topology))
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            frames.close()

    async def _beat(self, frames: FrameSocket) -> None:
        """waits for: the clock, or a new version;  blocks on: the keeper"""
        while True:
            newest = await self._service.newest()
            await frames.send(encode(self._report(newest)))
            await self._service.wait_newer(newest, self._rules.beat_s)

    def _report(self, newest: int | None) -> Beat:
        coming = self._service.board.coming()
        return Beat(
            newest=newest,
            coming=None if coming is None else coming.key.version,
            coming_bytes=0 if coming is None else coming.num_bytes,
            bytes_per_s=self.meter.bytes_per_s,
            startup_s=self.meter.startup_s,
            held_bytes=sum(arrival.total_bytes for arrival in self._service.board.whole()),
            epoch=self.chain.epoch,
        )

    def _learn(self, topology: Topology) -> None:
        """If the chain has changed, links of the old epoch end."""
        if topology.chain.epoch < self.chain.epoch:
            return
        has_changed, self._topology = topology.chain != self.chain, topology
        if not has_changed:
            return
        master = topology.chain.master
        is_master = master is not None and master.relay_id == self._rules.relay_id
        self._service.refuses_writers = (
            None if is_master else f"relay {self._rules.relay_id} does not lead its chain (epoch {self.chain.epoch})"
        )
        if self._service.joined is not None:
            self._service.joined.set()
        for relay_id, (epoch, stop) in list(self._feeding.items()):
            if epoch < topology.chain.epoch:
                self._feeding.pop(relay_id)
                stop()
        self._changed.set()
        self._changed = asyncio.Event()

    # ---- the relay before this one

    async def _follow_for_ever(self) -> None:
        """Follow whoever is before this relay, as long as an epoch lasts.

        waits for:  a new epoch;  ends: never
        """
        while True:
            changed, chain = self._changed, self.chain
            upstream = chain.upstream_of(self._rules.relay_id)
            following = asyncio.ensure_future(self._follow(upstream, chain.epoch)) if upstream else None
            try:
                await changed.wait()
            finally:
                if following is not None:
                    following.cancel()
                    await asyncio.gather(following, return_exceptions=True)

    async def _follow(self, upstream: Member, epoch: int) -> None:
        """Follow one relay, over one link after the other; ends: never, cancelled when the epoch is over."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                follower, link = await self._dial(upstream, epoch)
                await self._in_thread(link, partial(follower.run, self._rules.relay_id, self._rules.link))
            except (LaminarError, BadFrame) as error:
                log.info("relay %s lost its predecessor %s: %s", self._rules.relay_id, upstream.relay_id, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _dial(self, upstream: Member, epoch: int) -> tuple[Follower, Link]:
        rules = self._rules
        frames = await dial(upstream.host, upstream.port, self._secret, rules.deadline_s, rules.congestion)
        wire = Wire(frames.hand_over(), rules.deadline_s)
        self.meter.rtt_s = rtt_s(wire)
        link = LINKS[rules.link](wire, rules.deadline_s)
        return Follower(link, self._service.board, self.calls, epoch, self.meter), link

    # ---- whoever comes

    async def _serve(self, first: Message, frames: FrameSocket) -> None:
        match first:
            case Follow():
                await self._feed(first, frames)
            case Push():
                await self._take_push(first, frames)
            case other:
                raise BadFrame(f"{type(other).__name__} is not for a relay")

    async def _feed(self, follow: Follow, frames: FrameSocket) -> None:
        """Feed the next relay in a thread, until the epoch or the connection ends."""
        await self._check_follower(follow)
        rules = self._rules
        link = self._open(frames)
        feeder = Feeder(
            link,
            self._service.board,
            follow.epoch,
            hold=self.calls.hold,
            let_go=self.calls.let_go,
            alive_s=min(1.0, rules.deadline_s / 4),
            with_deltas=rules.with_deltas,
            bytes_per_s=lambda: self._topology.bytes_per_s,
        )

        def stop() -> None:
            feeder.stop()
            link.shut_down()

        _, stop_before = self._feeding.get(follow.relay_id, (0, None))
        if stop_before is not None:
            stop_before()
        self._feeding[follow.relay_id] = (follow.epoch, stop)
        try:
            await self._in_thread(link, lambda: feeder.run(follow.held), stop)
        finally:
            if self._feeding.get(follow.relay_id) == (follow.epoch, stop):
                del self._feeding[follow.relay_id]

    async def _check_follower(self, follow: Follow) -> None:
        if follow.link != self._rules.link:
            raise Fenced(f"this relay links over {self._rules.link}, the next one over {follow.link}")
        await self._hear_of(follow.epoch)
        if follow.epoch != self.chain.epoch:
            raise Fenced(f"epoch {follow.epoch} is not the one that relay {self._rules.relay_id} is in")
        downstream = self.chain.downstream_of(self._rules.relay_id)
        if downstream is None or downstream.relay_id != follow.relay_id:
            raise Fenced(f"{follow.relay_id} does not follow {self._rules.relay_id} in epoch {follow.epoch}")

    async def _hear_of(self, epoch: int) -> None:
        """Whoever comes may have heard of a new epoch a little earlier; wait to hear of it too."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EPOCH_WAIT_S):
                while self.chain.epoch < epoch:
                    await self._changed.wait()

    async def _take_push(self, push: Push, frames: FrameSocket) -> None:
        await self._hear_of(push.epoch)
        await self._service.admit_writer()
        if push.epoch < self.chain.epoch:
            raise Fenced(f"epoch {push.epoch} is over; it is {self.chain.epoch} now")
        wire = Wire(frames.hand_over(), self._rules.deadline_s)
        await self._in_thread(wire, lambda: receive_push(wire, push, self._service.board, self.calls))

    # ---- inside

    def _has_next(self) -> bool:
        return self.chain.downstream_of(self._rules.relay_id) is not None

    def _tell_of(self, arrival: Arrival) -> None:
        self._events.emit(
            "weights_arrived",
            relay_id=self._rules.relay_id,
            version=arrival.key.version,
            num_bytes=arrival.total_bytes,
            wire_bytes=arrival.wire_bytes,
            chunk_bytes=arrival.chunk_bytes,
            seconds=time.monotonic() - arrival.started_s,
        )

    def _open(self, frames: FrameSocket) -> Link:
        return LINKS[self._rules.link](Wire(frames.hand_over(), self._rules.deadline_s), self._rules.deadline_s)

    async def _in_thread(
        self, link: Link | Wire, function: Callable[[], None], stop: Callable[[], None] | None = None
    ) -> None:
        """Run it in a thread of its own, then close the link."""
        try:
            await run_until_stopped(function, stop or link.shut_down, self._threads)
        finally:
            link.close()

    def _chunk_bytes(self, num_bytes: int) -> int:
        """The size of chunks that fits the slowest hop of this chain."""
        if self._rules.chunk_bytes is not None:
            return self._rules.chunk_bytes
        topology, num_nodes = self._topology, len(self.chain.members)
        if not topology.bytes_per_s or num_nodes <= 2:
            return CHUNK_BYTES
        best = best_chunk_bytes(num_nodes, num_bytes, topology.startup_s, topology.bytes_per_s)
        return max(MIN_CHUNK_BYTES, min(LARGEST_CHUNK_BYTES, -(-best // ALIGN_BYTES) * ALIGN_BYTES))
