"""A relay's side towards the one before it: take what it sends, check it, and let it be handed on at once.

Invariant: no chunk counts as arrived before it agrees with its digest, no version before it agrees with its checksum.
"""

import time
from typing import Protocol

import xxhash

from laminar.relay import delta
from laminar.relay.arrivals import Arrival, Board
from laminar.relay.chain_messages import (
    MAX_CHUNKS,
    Accepted,
    Alive,
    Begin,
    Chunk,
    Denied,
    Dropped,
    Follow,
    Rewound,
    Taken,
    VersionKey,
    Want,
    Whole,
)
from laminar.relay.delta import DeltaEncoder
from laminar.relay.frames import BadFrame
from laminar.relay.links import Link
from laminar.relay.manifest import ALIGN_BYTES, Manifest
from laminar.relay.messages import to_error
from laminar.scheduling.chunks import Ranges

SMOOTHING = 0.2
"""Weight of the newest chunk in the mean of what chunks cost besides their bytes."""


class Inbox(Protocol):
    """Where versions go, and whether another relay is behind this one; calls wait for the relay's event loop."""

    def arrive(self, key: VersionKey, manifest: Manifest, chunk_bytes: int | None) -> Arrival | None: ...
    def arrived(self, arrival: Arrival, checksum: int) -> None: ...
    def withdraw(self, arrival: Arrival) -> None: ...
    def rewind(self, version: int) -> None: ...
    def hold(self, arrival: Arrival) -> bool: ...
    def let_go(self, arrival: Arrival) -> None: ...
    def taint(self, arrival: Arrival) -> None: ...
    def has_next(self) -> bool: ...


class HopMeter:
    """What the link to the predecessor takes: `startup_s` for every chunk, and `bytes_per_s` of the last version."""

    def __init__(self) -> None:
        self.rtt_s = 0.0
        self.bytes_per_s = 0.0
        self._chunk_s = 0.0
        self._received_bytes = 0
        self._since_s = 0.0

    @property
    def startup_s(self) -> float:
        """Seconds that a chunk takes besides its bytes: half a round trip, the work of taking it, and as much again of
        sending it on."""
        return self.rtt_s / 2 + 2 * self._chunk_s

    def begin(self, now_s: float) -> None:
        """The first chunk of a version is about to come."""
        self._received_bytes, self._since_s = 0, now_s

    def chunk(self, num_bytes: int, worked_s: float) -> None:
        """A chunk came as it is, and took so long to check and to book."""
        self._received_bytes += num_bytes
        self._chunk_s = worked_s if not self._chunk_s else self._chunk_s + SMOOTHING * (worked_s - self._chunk_s)

    def end(self, total_bytes: int, now_s: float) -> None:
        """The version is complete; one that came mostly as changes, or mostly before, says nothing about the rate."""
        if 2 * self._received_bytes > total_bytes:
            self.bytes_per_s = self._received_bytes / max(1e-6, now_s - self._since_s)


class Follower:
    """Follows one predecessor for the time of one epoch. `run` blocks: it is for a thread of its own."""

    def __init__(self, link: Link, board: Board, inbox: Inbox, epoch: int, meter: HopMeter) -> None:
        self._link = link
        self._board = board
        self._inbox = inbox
        self._epoch = epoch
        self._meter = meter
        self._coming: Arrival | None = None
        self._base: Arrival | None = None

    def run(self, relay_id: str, kind: str) -> None:
        """Take what comes, until the link breaks or misbehaves: raises `PeerLost`, `DeadlinePassed`, `BadFrame`, or
        what the predecessor answered. What came of a version stays for the next link.

        waits for:  the predecessor, which says `Alive` when it has nothing
        """
        held = tuple(arrival.key for arrival in self._board.whole())
        self._link.send(Follow(relay_id=relay_id, epoch=self._epoch, link=kind, held=held))
        answer: Accepted | Denied = self._link.receive()
        if isinstance(answer, Denied):
            raise to_error(answer.failure)
        if not isinstance(answer, Accepted):
            raise BadFrame(f"{type(answer).__name__} where Accepted was due")
        try:
            while True:
                self._take(self._link.receive())
        finally:
            self._use_base(None)
            if self._link.one_sided and self._coming is not None:
                self._inbox.taint(self._coming)
            self._receive_to(None)

    def _take(self, message: object) -> None:
        match message:
            case Chunk():
                self._chunk(message)
            case Begin():
                self._begin(message)
            case Whole():
                self._whole(message)
            case Dropped():
                arrival = self._coming
                self._receive_to(None)
                if arrival is not None and arrival.key == message.key:
                    self._inbox.withdraw(arrival)
            case Rewound(version):
                self._receive_to(None)
                self._inbox.rewind(version)
            case Alive():
                pass
            case other:
                raise BadFrame(f"{type(other).__name__} was not due")

    def _begin(self, begin: Begin) -> None:
        if begin.epoch != self._epoch:
            raise BadFrame(f"a version of epoch {begin.epoch}; it is {self._epoch} now")
        if begin.chunk_bytes % ALIGN_BYTES or begin.manifest.total_bytes > begin.chunk_bytes * MAX_CHUNKS:
            raise BadFrame(f"chunks of {begin.chunk_bytes} bytes for {begin.manifest.total_bytes} bytes")
        self._use_base(None)
        self._receive_to(self._inbox.arrive(begin.key, begin.manifest, begin.chunk_bytes))
        missing: Ranges = ()
        memory = b""
        if self._coming is not None:
            self._coming.known_checksum = begin.checksum
            missing, memory = self._coming.missing(), self._link.expose(self._coming)
        bases = tuple(a.key for a in self._board.whole() if a.manifest == begin.manifest and a.key != begin.key)
        self._meter.begin(time.monotonic())
        self._link.send(Want(key=begin.key, missing=missing, bases=bases, memory=memory))

    def _chunk(self, chunk: Chunk) -> None:
        arrival = self._coming
        if arrival is None or chunk.index >= arrival.num_chunks:
            raise BadFrame(f"chunk {chunk.index} of a version that has not that many, or of none")
        if arrival.is_ready(chunk.index):
            raise BadFrame(f"chunk {chunk.index} is here, and may have been handed on: it is not written again")
        view, changes = arrival.chunk(chunk.index), None
        if chunk.base is not None:
            changes = bytearray(chunk.inline)
        elif chunk.inline not in (0, len(view)):
            raise BadFrame(f"{chunk.inline} bytes for a chunk of {len(view)}")
        self._link.receive_into(view[: chunk.inline] if changes is None else memoryview(changes))
        started_s = time.perf_counter()
        if changes is not None and chunk.base is not None:
            base = self._base_of(arrival, chunk.base)
            delta.apply(memoryview(changes), arrival.chunk_of_base(chunk.index, base), view)
        if xxhash.xxh3_64_intdigest(view) != chunk.digest:
            raise BadFrame(f"chunk {chunk.index} of version {arrival.key.version} does not agree with its digest")
        if arrival.deltas is not None:
            arrival.deltas.add(chunk.index, None if changes is None else bytes(changes))
        arrival.wire_bytes += chunk.inline or len(view)
        arrival.landed_chunk(chunk.index, chunk.digest)
        if changes is None:
            self._meter.chunk(len(view), time.perf_counter() - started_s)

    def _whole(self, whole: Whole) -> None:
        arrival = self._coming
        self._use_base(None)
        if arrival is not None and arrival.key == whole.key:
            self._complete(arrival, whole)
        self._link.send(Taken(whole.key))  # just now, or it was here before

    def _complete(self, arrival: Arrival, whole: Whole) -> None:
        if arrival.missing():
            raise BadFrame(f"version {arrival.key.version} is said to be complete, but bytes are missing")
        if arrival.checksum() != whole.checksum:
            self._inbox.withdraw(arrival)
            raise BadFrame(f"version {arrival.key.version} does not agree with its checksum")
        self._meter.end(arrival.total_bytes, time.monotonic())
        self._inbox.arrived(arrival, whole.checksum)
        self._receive_to(None)

    def _base_of(self, arrival: Arrival, version: int) -> Arrival:
        """What the changes are to be applied to; held in place while they come."""
        if self._base is None or self._base.key.version != version:
            base = self._board.before(arrival, lambda other: other.key.version == version)
            if base is None or not self._inbox.hold(base):
                raise BadFrame(f"changes of version {version}, which is not here")
            self._use_base(base)
            if arrival.deltas is None or arrival.deltas.base != base.key:
                arrival.deltas = DeltaEncoder(base.key)
        return self._base  # type: ignore[return-value]

    def _receive_to(self, arrival: Arrival | None) -> None:
        """Chunks go there from now on. Its memory is held in place: others may end the version, but nobody may get the
        memory while this thread can still write to it."""
        if self._coming is not None:
            self._inbox.let_go(self._coming)
        self._coming = arrival if arrival is not None and self._inbox.hold(arrival) else None

    def _use_base(self, base: Arrival | None) -> None:
        if self._base is not None:
            self._inbox.let_go(self._base)
        self._base = base
