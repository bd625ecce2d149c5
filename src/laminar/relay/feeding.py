"""A relay's side towards the next one: send it the newest version, chunk by chunk, while the chunks come in.

Invariant: only chunks that are here and checked are sent, and only those that the next relay lacks.
"""

from collections.abc import Callable

from laminar.relay.arrivals import Arrival, Board
from laminar.relay.chain_messages import (
    Accepted,
    Alive,
    Begin,
    Chunk,
    Dropped,
    Rewound,
    Taken,
    VersionKey,
    Want,
    Whole,
)
from laminar.relay.delta import DeltaEncoder
from laminar.relay.frames import BadFrame
from laminar.relay.links import Link
from laminar.scheduling.chunks import chunks_touching, may_overtake


class Feeder:
    """Feeds one relay for the time of one epoch. `run` blocks: it is for a thread of its own.

    `hold` keeps the memory of a version in place and says whether it is still there, `let_go` ends that; `bytes_per_s`
    is what the slowest link of the chain takes, 0 if unknown.
    """

    def __init__(
        self,
        link: Link,
        board: Board,
        epoch: int,
        *,
        hold: Callable[[Arrival], bool],
        let_go: Callable[[Arrival], None],
        alive_s: float,
        with_deltas: bool,
        bytes_per_s: Callable[[], float],
    ) -> None:
        self._link = link
        self._board = board
        self._epoch = epoch
        self._hold = hold
        self._let_go = let_go
        self._alive_s = alive_s
        self._with_deltas = with_deltas
        self._bytes_per_s = bytes_per_s
        self._overtook = False
        self._fed: VersionKey | None = None
        self._num_rewinds = board.num_rewinds
        self._stopped = False

    def stop(self) -> None:
        """Let `run` return; shut the link down besides, for it may be inside a call."""
        self._stopped = True
        self._board.ring()

    def run(self, held: tuple[VersionKey, ...]) -> None:
        """Feed until stopped; `held` is what the next relay has. Raises `PeerLost` or `DeadlinePassed`.

        waits for:  a newer version on the board, chunks of it  <- the thread that receives them
        blocks on:  the next relay, which may be slow
        """
        self._link.send(Accepted())
        self._unlearn(held)
        while not self._stopped:
            arrival = self._next()
            if arrival is not None and self._hold(arrival):
                try:
                    self._feed(arrival)
                finally:
                    self._let_go(arrival)

    def _unlearn(self, held: tuple[VersionKey, ...]) -> None:
        """Have the next relay forget versions from before the learner went back, if it did not hear of that."""
        back = self._board.rewound_to
        if back is None:
            return
        stale = [key.version for key in held if key.version > back and not self._is_known(key)]
        if stale:
            self._link.send(Rewound(min(stale) - 1))

    def _is_known(self, key: VersionKey) -> bool:
        arrival = self._board.get(key.version)
        return arrival is not None and arrival.key == key

    def _next(self) -> Arrival | None:
        """The newest version, once it is not the one that was fed last; None to look again."""
        with self._board.changed:
            newest = self._board.newest()
            is_news = newest is not None and newest.key != self._fed
            if not is_news and self._num_rewinds == self._board.num_rewinds and not self._stopped:
                self._board.changed.wait(self._alive_s)
        if self._num_rewinds != self._board.num_rewinds:
            self._num_rewinds = self._board.num_rewinds
            self._link.send(Rewound(self._board.rewound_to or 0))
        elif not is_news:
            self._link.send(Alive())
        return newest if is_news else None

    def _feed(self, arrival: Arrival) -> None:
        self._link.send(
            Begin(
                epoch=self._epoch,
                key=arrival.key,
                manifest=arrival.manifest,
                chunk_bytes=arrival.chunk_bytes,
                checksum=arrival.known_checksum,
            )
        )
        want = self._link.receive(Want)
        if want.key != arrival.key:
            raise BadFrame("the answer is about another version")
        if self._send_chunks(arrival, want):
            self._link.send(Whole(arrival.key, arrival.checksum()))
            if self._link.receive(Taken).key != arrival.key:
                raise BadFrame("the answer is about another version")
            arrival.passed_on()
            self._overtook, self._fed = False, arrival.key
        elif not self._stopped:
            self._link.send(Dropped(arrival.key))

    def _send_chunks(self, arrival: Arrival, want: Want) -> bool:
        """Whether all that was wanted was sent; otherwise the version was dropped or overtaken."""
        wanted = chunks_touching(want.missing, arrival.total_bytes, arrival.chunk_bytes)
        num_wanted = len(wanted)
        base = self._base_for(arrival, want.bases)
        if wanted:
            self._link.aim(want.memory, arrival)
        try:
            while wanted:
                num_sent = num_wanted - len(wanted)
                index = self._wait_for_chunk(arrival, wanted, num_sent * arrival.chunk_bytes)
                if index is None:
                    return False
                wanted.remove(index)
                changes = self._changes(arrival, index, base, want.bases)
                if changes is None:
                    self._link.send_plain(arrival, index)
                else:
                    self._send_changes(arrival, index, *changes)
            self._link.flush()
        finally:
            self._link.discard()  # before the memory may be given to another version
            if base is not None:
                self._let_go(base)
        return True

    def _wait_for_chunk(self, arrival: Arrival, wanted: list[int], sent_bytes: int) -> int | None:
        while True:
            with self._board.changed:
                newest = self._board.newest()
                if self._stopped or arrival.is_dropped:
                    return None
                is_old = newest is not None and newest.key.version > arrival.key.version
                if is_old and may_overtake(sent_bytes, arrival.total_bytes, overtook=self._overtook):
                    self._overtook = True
                    return None
                index = arrival.first_ready(wanted)
                if index is not None:
                    return index
                is_news = self._board.changed.wait(self._alive_s)
            if not is_news:
                self._link.send(Alive())

    def _base_for(self, arrival: Arrival, bases: tuple[VersionKey, ...]) -> Arrival | None:
        """A version that both have, held in place, to compute changes against; the one that changes came with."""
        if not self._with_deltas:
            return None
        known = arrival.deltas.base if arrival.deltas is not None else None
        wanted = (known,) if known in bases else bases
        base = self._board.before(arrival, lambda other: other.key in wanted)
        if base is None or not self._hold(base):
            return None
        if arrival.deltas is None:
            arrival.deltas = DeltaEncoder(base.key, self._bytes_per_s())
        return base

    def _changes(
        self, arrival: Arrival, index: int, base: Arrival | None, bases: tuple[VersionKey, ...]
    ) -> tuple[bytes, int] | None:
        """Changes of a chunk and the version that they apply to; None to send it as it is."""
        deltas = arrival.deltas
        if deltas is None or not self._with_deltas or deltas.base not in bases:
            return None
        if base is not None and base.key == deltas.base:
            changes = deltas.encode(index, arrival.chunk_of_base(index, base), arrival.chunk(index))
        else:
            changes = deltas.get(index)
        return None if changes is None else (changes, deltas.base.version)

    def _send_changes(self, arrival: Arrival, index: int, changes: bytes, base: int) -> None:
        chunk = Chunk(index=index, inline=len(changes), digest=arrival.digest(index), base=base)
        self._link.send(chunk, [memoryview(changes)])
