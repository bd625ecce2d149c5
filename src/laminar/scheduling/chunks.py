"""Which bytes of a version have arrived, which are missing, and when a newer version may overtake it.

Ranges are half-open `(start, end)` pairs of byte positions; a set of bytes is a sorted tuple of ranges with gaps
between them. Chunk `i` is the bytes from `i * chunk_bytes` on; the last one may be shorter.
"""

from bisect import bisect_left
from collections.abc import Iterable

Range = tuple[int, int]
Ranges = tuple[Range, ...]

OVERTAKE_BEFORE = 0.5
"""A version of which more has been sent is finished first: sending the rest is less than starting anew."""


def num_chunks(total_bytes: int, chunk_bytes: int) -> int:
    """How many pieces a version is sent in; a version of no bytes has none."""
    return -(-total_bytes // chunk_bytes)


def chunk_range(index: int, total_bytes: int, chunk_bytes: int) -> Range:
    """The bytes of one chunk."""
    start = index * chunk_bytes
    return start, min(start + chunk_bytes, total_bytes)


def with_range(ranges: Ranges, new: Range) -> Ranges:
    """The set with these bytes added."""
    start, end = new
    if start >= end:
        return ranges
    low = bisect_left(ranges, start, key=lambda known: known[1])
    high = low
    while high < len(ranges) and ranges[high][0] <= end:
        start, end = min(start, ranges[high][0]), max(end, ranges[high][1])
        high += 1
    return (*ranges[:low], (start, end), *ranges[high:])


def missing_ranges(ranges: Ranges, total_bytes: int) -> Ranges:
    """What is not in the set."""
    missing, position = [], 0
    for start, end in ranges:
        if start > position:
            missing.append((position, start))
        position = end
    if position < total_bytes:
        missing.append((position, total_bytes))
    return tuple(missing)


def num_covered(ranges: Ranges) -> int:
    """Bytes in the set."""
    return sum(end - start for start, end in ranges)


def is_covered(ranges: Ranges, wanted: Range) -> bool:
    """Whether all of `wanted` is in the set."""
    start, end = wanted
    at = bisect_left(ranges, end, key=lambda known: known[1])
    return start >= end or (at < len(ranges) and ranges[at][0] <= start)


def overlap(ranges: Ranges, window: Range) -> Ranges:
    """What of the set lies in the window."""
    cut = ((max(start, window[0]), min(end, window[1])) for start, end in ranges)
    return tuple((start, end) for start, end in cut if start < end)


def chunks_touching(ranges: Iterable[Range], total_bytes: int, chunk_bytes: int) -> list[int]:
    """Chunks that have a byte in the set, in order; what a relay that lacks these bytes must be sent."""
    found: set[int] = set()
    for start, end in ranges:
        if start < min(end, total_bytes):
            found.update(range(start // chunk_bytes, num_chunks(min(end, total_bytes), chunk_bytes)))
    return sorted(found)


def may_overtake(sent_bytes: int, total_bytes: int, *, overtook: bool) -> bool:
    """Whether a newer version is sent instead of the rest of the one in flight.

    A version that overtook one is itself never overtaken, so that a trainer which publishes faster than the chain
    carries cannot keep it from ever completing one: the last relay gets a version within 1.5 transfer times.
    """
    return not overtook and sent_bytes < OVERTAKE_BEFORE * total_bytes
