"""Keeps the chain of relays: who takes part, in which order, under which master and epoch; and tells all of them.

Invariant: every change of the chain is one decision of `scheduling.membership`, made here and nowhere else, and every
relay and learner hears of it over the connection that it holds to the keeper. A relay is lost when that connection
ends, or when it has not sent a beat for `dead_after_s`.

A keeper that dies takes nothing with it: relays go on in the chain that they know, and join its successor with the
epoch that they have seen.
"""

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import dataclass, field

from msgspec import Struct

from laminar.relay.chain_messages import Beat, ChainStatus, Join, Look, Message, RelayReport, Topology, Watch
from laminar.relay.frames import BadFrame, FrameSocket
from laminar.relay.hops import receive, serve_tcp, tcp_listener
from laminar.relay.messages import encode
from laminar.scheduling.membership import Chain, Member, Progress, demoted, joined, left, slow_relay
from laminar.schema.errors import PeerLost
from laminar.telemetry.events import Events, NullEvents

log = logging.getLogger(__name__)

SLOW_FRACTION = 0.05
"""Of the typical rate; links of one chain differ by less than 20 times."""

SLACK_BYTES = 8 << 20
"""What the buffers of two sockets hold: a predecessor is always so much ahead."""


class KeeperRules(Struct, frozen=True, kw_only=True):
    """`slow_window_s` is how long a relay must have been slow before it goes to the end of the chain."""

    dead_after_s: float = 5.0
    slow_window_s: float = 3.0


DRIFT = 1.5
"""Chunks that are so much too large or too small cost next to nothing."""


@dataclass(slots=True)
class _Life:
    """One connection of a relay, and what it told of late."""

    member: Member
    beat: Beat | None = None
    at_s: float = 0.0
    recent: deque[tuple[float, int | None, int]] = field(default_factory=deque)


class ChainKeeper:
    """Call `run`; `address` is known once `listening` is set."""

    def __init__(
        self, *, host: str, port: int, secret: bytes, rules: KeeperRules | None = None, events: Events | None = None
    ) -> None:
        self._host = host
        self._port = port
        self._secret = secret
        self._rules = rules or KeeperRules()
        self._events = events or NullEvents()
        self._lives: dict[str, _Life] = {}
        self._changed = asyncio.Event()
        self._told = Topology(chain=Chain())
        self.chain = Chain()
        self.listening = asyncio.Event()
        self.address = (host, port)

    async def run(self) -> None:
        """Keep the chain.

        waits for:  relays and watchers
        ends:       never; cancelled by its parent
        """
        with tcp_listener(self._host, self._port) as listener:
            self.address = listener.getsockname()[:2]
            self.listening.set()
            await serve_tcp(listener, self._secret, self._serve, self._events)

    def status(self) -> ChainStatus:
        """The chain at this instant."""
        now_s = asyncio.get_running_loop().time()
        lives = [self._lives[member.relay_id] for member in self.chain.members]
        reports = (RelayReport(member=life.member, beat=life.beat, silent_s=now_s - life.at_s) for life in lives)
        return ChainStatus(self.chain.epoch, tuple(reports))

    async def _serve(self, first: Message, frames: FrameSocket) -> None:
        match first:
            case Join():
                await self._serve_relay(first, frames)
            case Watch():
                await self._until_closed(frames, self._expect_nothing(frames))
            case Look():
                await frames.send(encode(self.status()))
            case other:
                raise BadFrame(f"{type(other).__name__} is not for the keeper of the chain")

    async def _serve_relay(self, join: Join, frames: FrameSocket) -> None:
        life = _Life(join.member, at_s=asyncio.get_running_loop().time())
        relay_id = join.member.relay_id
        self._lives[relay_id] = life
        newest = self._newest() | {relay_id: join.newest}
        self._change(joined(self.chain, join.member, newest, join.epoch), f"{relay_id} joined")
        reason = "its connection ended"
        try:
            await self._until_closed(frames, self._hear_beats(life, frames))
        except TimeoutError:
            reason = f"it was silent for {self._rules.dead_after_s:g} s"
            log.warning("relay %s is lost: %s", relay_id, reason)
        finally:
            if self._lives.get(relay_id) is life:  # it may have come back over another connection
                newest = self._newest()
                del self._lives[relay_id]
                self._change(left(self.chain, {relay_id}, newest), f"{relay_id} was lost: {reason}")

    async def _until_closed(self, frames: FrameSocket, hearing) -> None:  # type: ignore[no-untyped-def]
        """Tell of changes while the other side is there."""
        telling = asyncio.ensure_future(self._tell(frames))
        hearing = asyncio.ensure_future(hearing)
        try:
            await asyncio.wait([telling, hearing], return_when=asyncio.FIRST_COMPLETED)
            for done in (hearing, telling):
                if done.done():
                    await done
        finally:
            for task in (telling, hearing):
                task.cancel()
            await asyncio.gather(telling, hearing, return_exceptions=True)

    async def _tell(self, frames: FrameSocket) -> None:
        """Send the chain, now and after every change.

        waits for:  changes;  blocks on: the peer, for as long as a relay may be silent
        """
        told = None
        while True:
            if told is self._told:
                await self._changed.wait()
            told = self._told
            async with asyncio.timeout(self._rules.dead_after_s):
                await frames.send(encode(told))

    async def _hear_beats(self, life: _Life, frames: FrameSocket) -> None:
        """waits for: beats; ends: with the connection, or with TimeoutError when they stay away."""
        clock = asyncio.get_running_loop().time
        while True:
            async with asyncio.timeout(self._rules.dead_after_s):
                life.beat = await receive(frames, Beat)
            life.at_s = clock()
            life.recent.append((life.at_s, life.beat.coming, life.beat.coming_bytes))
            while life.recent[0][0] < life.at_s - self._rules.slow_window_s and len(life.recent) > 2:
                life.recent.popleft()
            self._look_for_slow_ones()
            if _differ(self._topology(), self._told):
                self._announce()

    async def _expect_nothing(self, frames: FrameSocket) -> None:
        await frames.receive()
        raise BadFrame("a watcher has nothing to say")

    def _look_for_slow_ones(self) -> None:
        typical = max((life.beat.bytes_per_s for life in self._lives.values() if life.beat is not None), default=0.0)
        progress = {relay_id: p for relay_id, life in self._lives.items() if (p := self._progress(life)) is not None}
        slow = slow_relay(self.chain, progress, typical, SLOW_FRACTION, SLACK_BYTES)
        if slow is not None:
            for life in self._lives.values():
                life.recent.clear()
            self._change(demoted(self.chain, slow), f"{slow} is slow and goes to the end")

    def _progress(self, life: _Life) -> Progress | None:
        """What a relay has had to do all through the window; None if that cannot be told yet."""
        if life.beat is None or not life.recent:
            return None
        since_s, version, num_bytes = life.recent[0]
        span_s = life.at_s - since_s
        if life.beat.coming is None:
            return Progress(version=None, num_bytes=0, bytes_per_s=0.0)
        if version != life.beat.coming or span_s < self._rules.slow_window_s * 0.8:
            return None
        rate = (life.beat.coming_bytes - num_bytes) / span_s
        return Progress(version=version, num_bytes=life.beat.coming_bytes, bytes_per_s=rate)

    def _topology(self) -> Topology:
        beats = [life.beat for life in self._lives.values() if life.beat is not None]
        rates = [beat.bytes_per_s for beat in beats if beat.bytes_per_s]
        return Topology(
            chain=self.chain,
            startup_s=max((beat.startup_s for beat in beats), default=0.0),
            bytes_per_s=min(rates, default=0.0),
        )

    def _newest(self) -> dict[str, int | None]:
        return {relay_id: life.beat.newest if life.beat else None for relay_id, life in self._lives.items()}

    def _change(self, chain: Chain, why: str) -> None:
        if chain.epoch == self.chain.epoch:
            return
        self.chain = chain
        order = [member.relay_id for member in chain.members]
        log.info("epoch %d: %s; the chain is %s", chain.epoch, why, " > ".join(order) or "empty")
        self._events.emit("chain_changed", epoch=chain.epoch, order=order, reason=why)
        self._announce()

    def _announce(self) -> None:
        self._told = self._topology()
        self._changed.set()
        self._changed = asyncio.Event()


def _differ(new: Topology, old: Topology) -> bool:
    """Whether the links are measured to be so different now that versions should be cut differently."""
    pairs = ((new.startup_s, old.startup_s), (new.bytes_per_s, old.bytes_per_s))
    return any(not 1 / DRIFT <= a / b <= DRIFT if a and b else a != b for a, b in pairs)


class ChainWatch:
    """What a learner or a user knows of the chain, from the keeper. `run` keeps it up to date."""

    def __init__(self, host: str, port: int, secret: bytes, *, retry_s: float = 0.1, connect_s: float = 5.0) -> None:
        self._address = (host, port)
        self._secret = secret
        self._retry_s = retry_s
        self._connect_s = connect_s
        self._changed = asyncio.Event()
        self.chain = Chain()

    async def run(self) -> None:
        """waits for: the keeper's word; ends: never, it asks the keeper's successor when the keeper is lost."""
        while True:
            with contextlib.suppress(PeerLost):
                frames = await connect_to_keeper(*self._address, self._secret, Watch(), self._connect_s)
                try:
                    while True:
                        self.chain = (await receive(frames, Topology)).chain
                        self._changed.set()
                        self._changed = asyncio.Event()
                finally:
                    frames.close()
            await asyncio.sleep(self._retry_s)

    async def master(self, after_epoch: int, wait_s: float) -> tuple[Member, int] | None:
        """Who leads, and in which epoch: of an epoch after this one if that comes within `wait_s`, else of now."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self.chain.master is None or self.chain.epoch <= after_epoch:
                    await self._changed.wait()
        return None if self.chain.master is None else (self.chain.master, self.chain.epoch)

    async def newest(self) -> int | None:
        """The newest version that the master holds, as the keeper heard last. Raises `PeerLost` if nobody leads."""
        status = await look(*self._address, self._secret, self._connect_s)
        if not status.relays:
            raise PeerLost("the chain has no relays")
        beat = status.relays[0].beat
        return None if beat is None else beat.newest

    async def until_deposed(self, relay_id: str) -> None:
        """Return when another relay leads."""
        while self.chain.master is None or self.chain.master.relay_id == relay_id:
            await self._changed.wait()


async def connect_to_keeper(host: str, port: int, secret: bytes, first: Message, connect_s: float) -> FrameSocket:
    """A connection over which the first thing was said."""
    from laminar.relay.hops import dial

    frames = await dial(host, port, secret, connect_s)
    try:
        await frames.send(encode(first))
    except BaseException:
        frames.close()
        raise
    return frames


async def look(host: str, port: int, secret: bytes, wait_s: float = 5.0) -> ChainStatus:
    """The chain at this instant. Raises `PeerLost` if there is no keeper."""
    frames = await connect_to_keeper(host, port, secret, Look(), wait_s)
    try:
        async with asyncio.timeout(wait_s):
            status: ChainStatus = await receive(frames, ChainStatus)
            return status
    except TimeoutError:
        raise PeerLost(f"the keeper of the chain at {host}:{port} does not answer") from None
    finally:
        frames.close()
