"""Find the tightest bin that still takes a load, in about the square root of the number of bins.

Invariant: every open bin is found under its present room, and `put` chooses what a scan over all bins would.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

BUCKET_LENGTH = 64
"""Keys per bucket; the fastest of 32, 48, 64 and 100 for 10,000 bins with random loads."""

CLOSED = -1
"""Room for trajectories of a bin that takes nothing any more; less than any load needs."""


class BestFit:
    """Bins, each with room for some tokens and some trajectories.

    Keys (free tokens x number of bins + bin number) lie in sorted buckets. Each bucket has an upper bound of its bins'
    room for trajectories, so that buckets whose bins are all full in that respect are skipped unseen. A closed bin's
    key stays where it is until its bucket is searched in vain; then the bucket is swept and its bound tightened.
    """

    def __init__(self, token_room: Sequence[int], count_room: Sequence[int]) -> None:
        self._stride = max(1, len(token_room))
        self._counts = list(count_room)
        keys = sorted([room * self._stride + number for number, room in enumerate(token_room)])
        self._buckets = [keys[at : at + BUCKET_LENGTH] for at in range(0, len(keys), BUCKET_LENGTH)] or [[]]
        self._firsts = [bucket[0] if bucket else 0 for bucket in self._buckets]
        self._bounds = [self._largest_count(bucket) for bucket in self._buckets]

    def put(self, source: int, tokens: int, count: int) -> int | None:
        """Move bin `source`, which holds this load, into the tightest other open bin that takes it; then close it.

        Tightest: the least room for tokens, of equal ones the lowest number. Returns its number, or None, and then
        nothing has changed.
        """
        stride, counts, bounds = self._stride, self._counts, self._bounds
        lowest_key = tokens * stride
        first = max(0, bisect_right(self._firsts, lowest_key) - 1)
        for at in range(first, len(bounds)):
            if bounds[at] < count:
                continue
            bucket = self._buckets[at]
            start = bisect_left(bucket, lowest_key) if at == first else 0
            for key in bucket[start:]:
                target = key % stride
                if counts[target] >= count and target != source:
                    counts[source] = CLOSED
                    counts[target] -= count
                    del bucket[bucket.index(key, start)]
                    self._insert(key - lowest_key, at)
                    return target
            bounds[at] = self._largest_count(bucket)
        return None

    def _insert(self, key: int, at: int) -> None:
        """File the key of a bin that has just shrunk and came from bucket `at`."""
        firsts, count = self._firsts, self._counts[key % self._stride]
        if key < firsts[at]:
            at = bisect_right(firsts, key) - 1
            if at < 0:
                at, firsts[0] = 0, key
        bucket = self._buckets[at]
        insort(bucket, key)
        if count > self._bounds[at]:
            self._bounds[at] = count
        if len(bucket) > 2 * BUCKET_LENGTH:
            halves = [bucket[:BUCKET_LENGTH], bucket[BUCKET_LENGTH:]]
            self._buckets[at : at + 1] = halves
            self._firsts[at : at + 1] = [self._firsts[at], halves[1][0]]
            self._bounds[at : at + 1] = [self._largest_count(half) for half in halves]

    def _largest_count(self, bucket: list[int]) -> int:
        """The true bound of a bucket, which is rid of its closed bins on the way."""
        counts, stride = self._counts, self._stride
        bucket[:] = [key for key in bucket if counts[key % stride] != CLOSED]
        return max([counts[key % stride] for key in bucket], default=CLOSED)
