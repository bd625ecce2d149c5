"""Lossless changes between two versions: which 16-bit words of a chunk differ, and what they are now.

A chunk of changes is one byte that says how wide gaps are (1 or 2 bytes), four bytes with the number of entries, the
gaps from each changed word to the one before it, then the new words. Where a gap does not fit, an entry in between
repeats a word that has not changed. In bf16 about 1 % of the elements change in one step of RL; a dense chunk is sent
as it is, and an encoder that meets only dense ones stops looking.

Invariant: `apply` gives exactly the bytes that were encoded, or raises `BadFrame`; it never writes outside its chunk.
"""

import struct
import threading
import time

import numpy as np
from numpy.typing import NDArray

from laminar.relay.chain_messages import VersionKey
from laminar.relay.frames import BadFrame

WORD_BYTES = 2
"""bf16 elements, or halves of float32."""

MAX_SHARE = 0.5
"""Changes that take more than this share of the chunk are not worth applying."""

PROBE_BYTES = 4 << 20
"""An encoder gives up after so many dense bytes in a row; comparing them takes under two milliseconds."""

PROBE_S = 0.005
"""It gives up as well when looking for changes has cost so much more than it has saved: over links that are faster than
the search, whole chunks are."""

HEADER = struct.Struct(">BI")
GAP_TYPES: dict[int, type[np.unsignedinteger]] = {1: np.uint8, 2: np.uint16}


def encode(old: memoryview, new: memoryview) -> bytes | None:
    """The changes that make `new` of `old`, or None if they are too many. Both have the same even length."""
    before, after = np.frombuffer(old, np.uint16), np.frombuffer(new, np.uint16)
    changed = np.flatnonzero(before != after)
    if len(changed) * (WORD_BYTES + 1) > MAX_SHARE * len(new):
        return None
    options = [_encode(changed, after, gap_bytes) for gap_bytes in GAP_TYPES]
    best = min(options, key=len)
    return best if len(best) <= MAX_SHARE * len(new) else None


def apply(changes: memoryview, old: memoryview, into: memoryview) -> None:
    """Write to `into` what `old` becomes by these changes."""
    if len(changes) < HEADER.size:
        raise BadFrame("changes without a header")
    gap_bytes, num = HEADER.unpack_from(changes)
    if gap_bytes not in GAP_TYPES or len(changes) != HEADER.size + num * (gap_bytes + WORD_BYTES):
        raise BadFrame(f"changes of {len(changes)} bytes cannot hold {num} entries with gaps of {gap_bytes} bytes")
    gaps = np.frombuffer(changes, GAP_TYPES[gap_bytes], num, HEADER.size)
    words = np.frombuffer(changes, np.uint8, num * WORD_BYTES, HEADER.size + num * gap_bytes).view(np.uint16)
    positions = np.cumsum(gaps, dtype=np.int64) + np.arange(num) if num else np.empty(0, np.int64)
    target = np.frombuffer(into, np.uint16)
    if num and positions[-1] >= len(target):
        raise BadFrame(f"changes reach word {positions[-1]} of {len(target)}")
    np.copyto(target, np.frombuffer(old, np.uint16))
    target[positions] = words


class DeltaEncoder:
    """Changes of one version against one base, chunk by chunk; each is computed or received once and kept.

    `bytes_per_s` is what the slowest link behind takes, 0 if that is not known. Several threads may send from it.
    """

    def __init__(self, base: VersionKey, bytes_per_s: float = 0.0) -> None:
        self.base = base
        self._bytes_per_s = bytes_per_s
        self._balance_s = 0.0
        self._known: dict[int, bytes | None] = {}
        self._num_dense_bytes = 0
        self._lock = threading.Lock()
        self.num_bytes = 0

    def add(self, index: int, changes: bytes | None) -> None:
        """What came from the predecessor; None: it came as it is."""
        with self._lock:
            if index not in self._known:
                self._known[index] = changes
                self.num_bytes += len(changes or b"")

    def get(self, index: int) -> bytes | None:
        """Changes that are known."""
        return self._known.get(index)

    def encode(self, index: int, old: memoryview, new: memoryview) -> bytes | None:
        """Changes of a chunk; None if it is to be sent as it is."""
        with self._lock:
            if index in self._known:
                return self._known[index]
            gave_up = self._num_dense_bytes >= PROBE_BYTES or self._balance_s < -PROBE_S
        if gave_up:
            self.add(index, None)
            return None
        started_s = time.perf_counter()
        changes = encode(old, new)
        worked_s = time.perf_counter() - started_s
        with self._lock:
            self._num_dense_bytes = self._num_dense_bytes + len(new) if changes is None else 0
            if self._bytes_per_s:
                saved_bytes = 0 if changes is None else len(new) - len(changes)
                self._balance_s += saved_bytes / self._bytes_per_s - worked_s
        self.add(index, changes)
        return changes


def _encode(changed: NDArray[np.int64], after: NDArray[np.uint16], gap_bytes: int) -> bytes:
    most = (1 << 8 * gap_bytes) - 1
    positions = _with_fillers(changed, most)
    gaps = np.diff(positions, prepend=-1) - 1
    return b"".join(
        (
            HEADER.pack(gap_bytes, len(positions)),
            gaps.astype(GAP_TYPES[gap_bytes]).tobytes(),
            after[positions].tobytes(),
        )
    )


def _with_fillers(changed: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Positions with more in between, so that no gap is larger than `most`."""
    gaps = np.diff(changed, prepend=-1) - 1
    num_fillers = gaps // (most + 1)
    total = int(num_fillers.sum())
    if not total:
        return changed
    owners = np.repeat(np.arange(len(changed)), num_fillers)
    firsts = np.cumsum(num_fillers) - num_fillers
    steps = np.arange(total) - firsts[owners] + 1
    fillers = changed[owners] - gaps[owners] - 1 + steps * (most + 1)
    return np.sort(np.concatenate((changed, fillers)))
