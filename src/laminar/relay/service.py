"""The relay of one machine: holds weight versions in host memory and serves them to local processes.

Invariant: a version is seen completely or not at all; whoever dies, the others go on.

Two-phase publish: a writer reserves a slot, fills it through shared memory, commits; the relay takes the checksum in a
thread; then the pointer moves. Readers lease versions; a lease ends with its connection.

Versions that other machines send land in slots of the same store (`arrive`, `arrived`), and what is on `board` can be
passed on while it comes in; `chain_member` does both.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from laminar.relay.arrivals import Arrival, Board
from laminar.relay.chain_messages import VersionKey
from laminar.relay.manifest import Manifest, ManifestError
from laminar.relay.memory import available_bytes, gib
from laminar.relay.messages import RelayStatus, Reserve
from laminar.relay.server import serve_peers, unix_listener
from laminar.relay.slots import SharedSlot, SlotMemory
from laminar.relay.store import Lease, Reservation, VersionStore
from laminar.relay.threads import run_in_thread
from laminar.schema.errors import Fenced, LaminarError, RunFailed
from laminar.telemetry.events import Events, NullEvents

log = logging.getLogger(__name__)

SLOT_WAIT_S = 60.0
"""While memory is short, a writer waits so long for readers to finish; swapping weights in takes seconds."""

KEEP_READ_S = 10.0
"""What a reader read last is kept so long after its end: whoever watches it orders by then to keep it, or not."""

CHUNK_BYTES = 1 << 20
"""Of what a relay sends before the links of its chain were measured."""

JOIN_S = 5.0
"""A writer that comes while the relay joins its chain waits so long; joining takes milliseconds."""

CHAIN = 0
"""Stands for the chain among those who write to the store; local peers are counted from 1."""

SPARE_FRACTION = 0.05
"""Share of the available memory that the relay leaves to the others on its machine."""


class RelayService:
    """Call `run`; the other methods work while it runs. `available` says how many bytes may be taken."""

    def __init__(
        self,
        *,
        socket_path: Path,
        secret: bytes,
        keep_versions: int,
        events: Events | None = None,
        available: Callable[[], int] = available_bytes,
        slot_wait_s: float = SLOT_WAIT_S,
        keep_read_s: float = KEEP_READ_S,
    ) -> None:
        if not secret:
            raise ValueError("an empty secret keeps nobody out")
        self._socket_path = socket_path
        self._secret = secret
        self._keep_versions = keep_versions
        self._events = events or NullEvents()
        self._available = available
        self._slot_wait_s = slot_wait_s
        self._keep_read_s = keep_read_s
        self._store = VersionStore(keep_versions)
        self._sound_manifest: Manifest | None = None
        self._changed = asyncio.Event()
        self._growing = asyncio.Lock()
        self._outcomes: dict[int, asyncio.Future[None]] = {}
        self._coming: dict[Arrival, Reservation] = {}
        self.board = Board()
        self.chunk_bytes_of: Callable[[int], int] = lambda num_bytes: CHUNK_BYTES
        self.joined: asyncio.Event | None = None
        self.refuses_writers: str | None = None
        self._peers: set[int] = set()
        self._ordered_pins: frozenset[int] = frozenset()
        self._read_last: dict[int, int] = {}
        self._slot_ids = itertools.count(1)
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Serve local peers.

        waits for:  connections to the socket
        ends:       never; cancelled by its parent, and frees all memory then
        """
        with unix_listener(self._socket_path) as listener:
            try:
                async with asyncio.TaskGroup() as self._tasks:
                    await serve_peers(listener, self._secret, self, self._events)
            finally:
                self._tasks = None
                self.board.clear()
                self._coming.clear()
                self._store.close()

    # ---- for everybody

    async def newest(self) -> int | None:
        """Newest complete version, None before the first one."""
        return self._store.newest()

    async def wait_newer(self, than: int | None, wait_s: float) -> int | None:
        """Newest complete version as soon as it is newer than `than`, or what there is after `wait_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while (newest := self._store.newest()) is None or (than is not None and newest <= than):
                    await self._changed.wait()
        return self._store.newest()

    async def pin(self, versions: Iterable[int]) -> None:
        """Keep these versions whatever their age; replaces the previous pins."""
        self._ordered_pins = frozenset(versions)
        self._pin()

    async def rewind(self, version: int) -> None:
        """Forget all versions after this one; for a learner that restarts from an older checkpoint."""
        self._store.rewind(version)
        self.board.rewind(version)
        self._coming = {arrival: r for arrival, r in self._coming.items() if not arrival.is_dropped}
        self._fail_torn()
        self._announce()

    async def status(self) -> RelayStatus:
        """What is held now."""
        return self._store.status(asyncio.get_running_loop().time(), self.num_peers)

    @property
    def num_peers(self) -> int:
        """Open connections."""
        return len(self._peers)

    # ---- for one connection; `peer` is its number

    def connected(self, peer: int) -> None:
        """A peer has shown that it knows the secret."""
        self._peers.add(peer)

    def disconnected(self, peer: int) -> None:
        """Its connection is gone, and with it all that it held."""
        self._peers.discard(peer)
        asyncio.get_running_loop().call_later(self._keep_read_s, self._forget_reader, peer)
        self._store.drop_holder(peer)
        self._fail_torn()
        self._announce()

    def live_slots(self) -> tuple[int, ...]:
        """Slots that may be handed out again."""
        return self._store.live_slots()

    async def lease(self, peer: int, version: int | None) -> Lease:
        """A version for reading; raises `WeightsUnavailable`."""
        lease = self._store.lease(peer, version)
        self._read_last[peer] = lease.held.version
        self._pin()
        return lease

    async def release(self, peer: int, lease_id: int) -> None:
        """The lease was held until now; raises `Fenced` if it was not."""
        self._store.release(peer, lease_id)
        self._announce()

    async def reserve(self, peer: int, request: Reserve) -> Reservation:
        """Memory for one part of a version; waits for some to be free. Raises `Fenced` if this is not the master."""
        await self.admit_writer()
        version, manifest = request.version, request.manifest
        self._check(manifest, version)
        async with self._growing:
            await self._withdraw_all()
            reservation = self._store.join(peer, version, manifest, request.part, request.num_parts)
            self._fail_torn()
            if reservation is None:
                slot = await self._slot_for(version, manifest.total_bytes)
                reservation = self._store.begin(peer, version, manifest, request.part, request.num_parts, slot)
                reservation.content = request.content
                self._outcomes[reservation.reservation_id] = asyncio.get_running_loop().create_future()
        return reservation

    async def admit_writer(self) -> None:
        """Raise `Fenced` if weights are to go to another relay; a relay that has just started joins its chain first."""
        if self.joined is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(JOIN_S):
                    await self.joined.wait()
        if self.refuses_writers is not None:
            raise Fenced(self.refuses_writers)

    async def commit(self, peer: int, reservation_id: int, part: int, num_bytes: int) -> None:
        """A part is written; returns when the whole version can be seen."""
        try:
            written = self._store.commit(peer, reservation_id, part, num_bytes)
        finally:
            self._fail_torn()
        outcome = self._outcomes[reservation_id]
        if written is not None:
            self._background().create_task(self._finish(written), name=f"checksum of version {written.version}")
        await asyncio.shield(outcome)

    async def abandon(self, peer: int, reservation_id: int) -> None:
        """The writer gives up."""
        if self._store.is_writing(peer, reservation_id):
            self._store.abandon(reservation_id)
            self._fail_torn()

    # ---- for the chain

    async def arrive(self, key: VersionKey, manifest: Manifest, chunk_bytes: int | None) -> Arrival | None:
        """Where a version goes that another machine sends; None if it is held. Again under the same key: what came
        before is kept. A version of the same number with other weights is forgotten, and so are later ones; and if the
        learner itself brings an older version than the newest, it went back.

        `chunk_bytes` None: this relay is the first to have it, and cuts it as its chain wants it.
        """
        self._check(manifest, key.version)
        async with self._growing:
            known = self.board.get(key.version)
            if known is not None and known.key == key and not known.is_dropped:
                if known.manifest != manifest:
                    raise RunFailed(f"version {key.version} is held already, with other weights: versions never change")
                if known.is_whole:
                    return None
                if chunk_bytes in (None, known.chunk_bytes):
                    return known
            await self._withdraw_all()
            newest = self._store.newest()
            is_behind = chunk_bytes is None and newest is not None and newest > key.version
            if is_behind or self._store.held(key.version) is not None:
                log.info("version %d comes with other weights; the learner went back", key.version)
                await self.rewind(key.version - 1)
            slot = await self._slot_for(key.version, manifest.total_bytes)
            reservation = self._store.begin(CHAIN, key.version, manifest, 0, 1, slot)
            size = chunk_bytes or self.chunk_bytes_of(manifest.total_bytes)
            arrival = Arrival(key, manifest, slot, size, self.board.changed)
            arrival.landed(manifest.gaps())
            self._coming[arrival] = reservation
            self.board.add(arrival)
        return arrival

    async def arrived(self, arrival: Arrival, checksum: int) -> None:
        """All its bytes are there and agree with `checksum`: show it. Raises `Fenced` if it was dropped meanwhile."""
        reservation = self._coming.pop(arrival, None)
        if reservation is None:
            raise Fenced(f"version {arrival.key.version} was dropped while it came in")
        self._store.finish(reservation, checksum, asyncio.get_running_loop().time())
        arrival.known_checksum = checksum
        arrival.complete()
        self._announce()
        self._background().create_task(self._warm_up(arrival.total_bytes), name="slots for the next version")

    async def withdraw(self, arrival: Arrival) -> None:
        """No more of it will come, and nobody writes to it any more."""
        self.board.remove(arrival)
        reservation = self._coming.pop(arrival, None)
        if reservation is not None:
            self._store.withdraw(reservation)
            self._announce()

    async def _withdraw_all(self) -> None:
        """There is one learner, and it brings one version at a time: what else was coming will never be complete."""
        for arrival in list(self._coming):
            await self.withdraw(arrival)

    async def hold(self, arrival: Arrival) -> bool:
        """Keep its memory as it is while a thread sends from it; False if it is gone. Then call `let_go`."""
        held = self._store.held(arrival.key.version)
        is_here = arrival in self._coming or (held is not None and held.slot is arrival.slot)
        if is_here:
            self._store.use(arrival.slot)
        else:
            self.board.remove(arrival)
        return is_here

    async def let_go(self, arrival: Arrival) -> None:
        """The thread is done."""
        self._store.unuse(arrival.slot)
        self._announce()

    async def taint(self, arrival: Arrival) -> None:
        """A one-sided link to its memory broke: what the other side had under way may still land there. That is what
        belongs there; but no other version may ever use this memory."""
        self._store.taint(arrival.slot)

    # ---- inside

    def _check(self, manifest: Manifest, version: int) -> None:
        """Raise `RunFailed` if it contradicts itself. Most are equal to the last one, and comparing is fast."""
        if manifest == self._sound_manifest:
            return
        try:
            manifest.validate()
        except ManifestError as error:
            raise RunFailed(f"the manifest of version {version} is wrong: {error}") from None
        self._sound_manifest = manifest

    def _forget_reader(self, peer: int) -> None:
        if self._read_last.pop(peer, None) is not None and self._tasks is not None:
            self._pin()

    def _pin(self) -> None:
        """Keep what was ordered, and what each peer read last: it generates under that, and when it dies somebody else
        must be able to load the same."""
        self._store.pin(self._ordered_pins.union(self._read_last.values()))
        self._announce()

    async def _finish(self, reservation: Reservation) -> None:
        """Second phase: checksum, then pointer."""
        checksum = await run_in_thread(reservation.slot.checksum, reservation.manifest.total_bytes)
        outcome = self._outcomes.pop(reservation.reservation_id, None)
        if outcome is None:  # rewound meanwhile
            return
        try:
            self._store.finish(reservation, checksum, asyncio.get_running_loop().time())
        except RunFailed as error:
            _fail(outcome, error)
        else:
            outcome.set_result(None)
            self._post(reservation, checksum)
        self._announce()
        await self._warm_up(reservation.manifest.total_bytes)

    def _post(self, reservation: Reservation, checksum: int) -> None:
        """What was published here can be passed on."""
        held = self._store.held(reservation.version)
        if held is None or held.slot is not reservation.slot:
            return  # it was held before
        content = checksum if reservation.content is None else reservation.content
        key, chunk_bytes = VersionKey(held.version, content), self.chunk_bytes_of(held.manifest.total_bytes)
        self.board.add(Arrival.held(key, held.manifest, held.slot, chunk_bytes, self.board.changed, checksum))

    async def _slot_for(self, version: int, num_bytes: int) -> SlotMemory:
        """A free slot; makes one if there is memory, else waits for readers to let go of one."""
        deadline_s = asyncio.get_running_loop().time() + self._slot_wait_s
        self._store.close_small_slots(num_bytes)
        while (slot := self._store.find_slot(version, num_bytes)) is None:
            if self._has_room(num_bytes):
                await self._grow(num_bytes)
            elif slot := self._store.find_slot(version, num_bytes, yield_pins=True):
                log.warning("memory is short: gave up a pinned version for version %d", version)
                return slot
            else:
                await self._wait_for_readers(version, num_bytes, deadline_s)
        return slot

    def _has_room(self, num_bytes: int) -> bool:
        """Whether one more slot fits; raises `RunFailed` if not even the slots of a run without readers do."""
        room = int(self._available() * (1 - SPARE_FRACTION))
        num_slots = len(self._store.live_slots())
        num_missing = max(1, self._keep_versions + 1 - num_slots)
        if num_slots <= self._keep_versions and num_missing * num_bytes > room:
            raise RunFailed(
                f"Keeping {self._keep_versions} weight versions while one more comes in takes "
                f"{num_slots + num_missing} x {gib(num_bytes)} of memory: {gib(num_missing * num_bytes)} more than the "
                f"relay has now, and {gib(room)} can be had. Lower relay.keep_versions (now {self._keep_versions}), "
                "publish a smaller relay.dtype, or use a machine with more memory."
            )
        return num_bytes <= room

    async def _wait_for_readers(self, version: int, num_bytes: int, deadline_s: float) -> None:
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._changed.wait()
        except TimeoutError:
            held = ", ".join(f"{v.version} ({v.num_leases} readers)" for v in self._store.status(0.0, 0).versions)
            raise RunFailed(
                f"There is no memory for weight version {version}: it needs {gib(num_bytes)}, {gib(self._available())} "
                f"are available, and the versions held were not let go within {self._slot_wait_s:g} s: {held}. "
                f"Lower relay.keep_versions (now {self._keep_versions}) or use a machine with more memory."
            ) from None

    async def _grow(self, num_bytes: int) -> None:
        """One more free slot, its pages made."""
        slot = SharedSlot(next(self._slot_ids), num_bytes)
        try:
            await run_in_thread(slot.prefault)
        except OSError as error:
            slot.close()
            raise RunFailed(f"The system refused {gib(num_bytes)} of memory for weights: {error}") from None
        except BaseException:
            slot.close()
            raise
        self._store.add_slot(slot)

    async def _warm_up(self, num_bytes: int) -> None:
        """Make the slots that the next versions will need while nobody waits for them."""
        while self._store.wants_slot(num_bytes):
            async with self._growing:
                if not self._store.wants_slot(num_bytes):
                    return
                try:
                    if not self._has_room(num_bytes):
                        return
                    await self._grow(num_bytes)
                except RunFailed as error:
                    log.warning("no slot for the next version yet: %s", error)
                    return

    def _background(self) -> asyncio.TaskGroup:
        if self._tasks is None:
            raise RuntimeError("the relay does not run")
        return self._tasks

    def _announce(self) -> None:
        """Wake all who wait for a version or a slot."""
        self.board.keep(self._store.places())
        self._changed.set()
        self._changed = asyncio.Event()

    def _fail_torn(self) -> None:
        """Tell writers whose reservation was dropped."""
        for reservation_id in self._outcomes.keys() - self._store.reservation_ids():
            error = Fenced("this version was begun anew by another writer, or a writer of another part of it was lost")
            _fail(self._outcomes.pop(reservation_id), error)


def _fail(outcome: "asyncio.Future[None]", error: LaminarError) -> None:
    outcome.set_exception(error)
    outcome.exception()  # seen, even if no writer waits any more
