"""Versions as the chain sees them, complete or on their way in: what threads that receive share with those that send.

Invariant: a chunk is handed on only after all its bytes are in memory and agree with their digest; what a thread may
read stays as it is until the thread has let go of the slot (`VersionStore.use`).
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping

import xxhash

from laminar.relay.chain_messages import VersionKey
from laminar.relay.delta import DeltaEncoder
from laminar.relay.manifest import Manifest
from laminar.relay.slots import SlotMemory
from laminar.scheduling.chunks import (
    Range,
    Ranges,
    chunk_range,
    chunks_touching,
    is_covered,
    missing_ranges,
    num_chunks,
    num_covered,
    with_range,
)


class Arrival:
    """One version in one slot. `changed` wakes whoever waits for chunks of it.

    States: coming, then whole (all bytes are there) or dropped (no more will come).
    """

    def __init__(
        self, key: VersionKey, manifest: Manifest, slot: SlotMemory, chunk_bytes: int, changed: threading.Condition
    ) -> None:
        self.key = key
        self.manifest = manifest
        self.slot = slot
        self.chunk_bytes = chunk_bytes
        self.total_bytes = manifest.total_bytes
        self.num_chunks = num_chunks(self.total_bytes, chunk_bytes)
        self.is_whole = False
        self.is_dropped = False
        self.is_passed_on = False
        self._is_claimed = False
        self.started_s = time.monotonic()
        self.wire_bytes = 0
        self.memory = slot.view()[: self.total_bytes]
        self.deltas: DeltaEncoder | None = None
        self._changed = changed
        self._covered: Ranges = ()
        self._digests: list[int | None] = [None] * self.num_chunks
        self._ready: set[int] = set()
        self.known_checksum: int | None = None
        self._hashing = threading.Lock()
        self._hash = xxhash.xxh3_64()
        self._num_hashed = 0

    @classmethod
    def held(
        cls,
        key: VersionKey,
        manifest: Manifest,
        slot: SlotMemory,
        chunk_bytes: int,
        changed: threading.Condition,
        checksum: int,
    ) -> "Arrival":
        """A version that came through local memory and is complete."""
        arrival = cls(key, manifest, slot, chunk_bytes, changed)
        arrival.known_checksum = checksum
        arrival._covered = ((0, arrival.total_bytes),) if arrival.total_bytes else ()
        arrival._ready.update(range(arrival.num_chunks))
        arrival.is_whole = True
        return arrival

    # ---- for who receives

    def missing(self) -> Ranges:
        """Bytes that have not arrived."""
        with self._changed:
            return missing_ranges(self._covered, self.total_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes that have arrived."""
        return num_covered(self._covered)

    def is_ready(self, index: int) -> bool:
        """Whether a chunk is there."""
        return index in self._ready

    def range_of(self, index: int) -> Range:
        """The bytes of a chunk."""
        return chunk_range(index, self.total_bytes, self.chunk_bytes)

    def landed(self, ranges: Iterable[Range]) -> None:
        """These bytes are in memory and were checked; chunks that they complete can be handed on."""
        with self._changed:
            for new in ranges:
                self._covered = with_range(self._covered, new)
                for index in chunks_touching([new], self.total_bytes, self.chunk_bytes):
                    if index not in self._ready and is_covered(self._covered, self.range_of(index)):
                        self._ready.add(index)
            self._changed.notify_all()
        self._hash_on(wait=False)

    def landed_chunk(self, index: int, digest: int) -> None:
        """A whole chunk is in memory, and this is its digest."""
        self._digests[index] = digest
        self.landed([self.range_of(index)])

    def checksum(self) -> int:
        """Over all bytes, which must all be there. Taken where the version enters the chain, while its bytes arrive;
        further down every chunk is checked, and the whole need not be hashed again."""
        if self.known_checksum is not None:
            return self.known_checksum
        self._hash_on(wait=True)
        return int(self._hash.intdigest())

    def claim(self) -> bool:
        """Whether the caller is the first who wants to complete it."""
        with self._changed:
            was_claimed, self._is_claimed = self._is_claimed, True
            return not was_claimed

    def complete(self) -> None:
        """All bytes are there and can be seen."""
        with self._changed:
            self.is_whole = True
            self._changed.notify_all()

    def passed_on(self) -> None:
        """The next relay can show it."""
        with self._changed:
            self.is_passed_on = True
            self._changed.notify_all()

    def drop(self) -> None:
        """No more bytes will come."""
        with self._changed:
            self.is_dropped = not self.is_whole
            self._changed.notify_all()

    # ---- for who sends

    def first_ready(self, wanted: Iterable[int]) -> int | None:
        """The first of these chunks that is there; call it under `changed`."""
        return next((index for index in wanted if index in self._ready), None)

    def chunk(self, index: int) -> memoryview:
        """The bytes of a chunk."""
        start, end = self.range_of(index)
        return self.memory[start:end]

    def chunk_of_base(self, index: int, base: "Arrival") -> memoryview:
        """The bytes of a chunk of ours in another version of the same layout, which may be cut otherwise."""
        start, end = self.range_of(index)
        return base.memory[start:end]

    def digest(self, index: int) -> int:
        """xxh3_64 of a chunk that is there."""
        known = self._digests[index]
        if known is None:
            known = self._digests[index] = int(xxhash.xxh3_64_intdigest(self.chunk(index)))
        return known

    def _hash_on(self, *, wait: bool) -> None:
        """Extend the running checksum over the chunks that follow it without a gap, while they are in the cache."""
        if self.known_checksum is not None or not self._hashing.acquire(blocking=wait):
            return  # no need; or another thread is at it, and the last call waits
        try:
            while self._num_hashed in self._ready:
                self._hash.update(self.chunk(self._num_hashed))
                self._num_hashed += 1
        finally:
            self._hashing.release()


class Board:
    """The versions that a relay can hand on, and a bell that rings whenever there is more to hand on.

    Methods may be called from any thread.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self._arrivals: dict[int, Arrival] = {}
        self._rewound_to: int | None = None
        self.num_rewinds = 0

    def add(self, arrival: Arrival) -> None:
        """One more; another one of the same version is replaced."""
        with self.changed:
            before = self._arrivals.get(arrival.key.version)
            if before is not None and before is not arrival:
                before.drop()
            self._arrivals[arrival.key.version] = arrival
            self.changed.notify_all()

    def remove(self, arrival: Arrival) -> None:
        """It cannot be handed on (any more)."""
        with self.changed:
            arrival.drop()
            if self._arrivals.get(arrival.key.version) is arrival:
                del self._arrivals[arrival.key.version]
            self.changed.notify_all()

    def keep(self, places: Mapping[int, SlotMemory]) -> None:
        """Forget complete versions that do not lie there any more."""
        with self.changed:
            for version, arrival in list(self._arrivals.items()):
                if arrival.is_whole and places.get(version) is not arrival.slot:
                    del self._arrivals[version]

    def clear(self) -> None:
        """Forget all, and with them the maps of their memory."""
        with self.changed:
            for arrival in self._arrivals.values():
                arrival.drop()
            self._arrivals.clear()

    def rewind(self, version: int) -> None:
        """Forget all versions after this one, and have the others forget them."""
        with self.changed:
            self._rewound_to = version
            self.num_rewinds += 1
            for newer in [arrival for number, arrival in self._arrivals.items() if number > version]:
                newer.drop()
                del self._arrivals[newer.key.version]
            self.changed.notify_all()

    @property
    def rewound_to(self) -> int | None:
        """Where the learner went back to the last time."""
        return self._rewound_to

    def newest(self) -> Arrival | None:
        """Complete or not."""
        with self.changed:
            return self._arrivals[max(self._arrivals)] if self._arrivals else None

    def get(self, version: int) -> Arrival | None:
        """What there is of a version."""
        return self._arrivals.get(version)

    def coming(self) -> Arrival | None:
        """The newest one of which bytes are missing."""
        with self.changed:
            coming = [arrival for arrival in self._arrivals.values() if not arrival.is_whole]
            return max(coming, key=lambda arrival: arrival.key.version, default=None)

    def before(self, arrival: Arrival, accept: Callable[[Arrival], bool]) -> Arrival | None:
        """The newest complete version before this one that is laid out the same and acceptable; a base of changes."""
        with self.changed:
            candidates = [
                other
                for version, other in self._arrivals.items()
                if version < arrival.key.version and other.is_whole and other.manifest == arrival.manifest
            ]
        return max((c for c in candidates if accept(c)), key=lambda c: c.key.version, default=None)

    def whole(self) -> list[Arrival]:
        """All complete ones."""
        with self.changed:
            return [arrival for arrival in self._arrivals.values() if arrival.is_whole]

    def ring(self) -> None:
        """Wake all who wait: something else changed that they look at."""
        with self.changed:
            self.changed.notify_all()
