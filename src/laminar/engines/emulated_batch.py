"""Continuous batching over a KV budget, in closed form: between two events nothing is computed per token.

All running sequences gain one token per decode step, and a step takes a time that grows with the number of sequences
and with the KV that they hold (`emulated_pace`). So between two events the time for x steps is a quadratic in x, and
what happens next, an answer that ends or a cache that is full, follows without looking at any sequence but the first
to end: one heap operation per event.

Invariants: KV in use never exceeds the budget; the oldest running sequence is never pushed out, so it ends; the queue
is first in, first out; time only goes forward.

One id stands for `tokens_per_id` tokens: lengths are counted in ids, KV and time in tokens.
"""

import heapq
from collections import Counter, OrderedDict
from math import sqrt

from laminar.engines.protocol import Request
from laminar.engines.rules import EmulatedEngineRules

SAME_S = 1e-7
"""Events so close together are one: timers and sums of seconds are rounded."""

SAME_IDS = 1e-6
"""Fractions of an id that are rounding."""

ADMISSION_RESERVE = 0.01
"""Share of the cache left free by an admission, or the newcomer would be pushed out at once (vLLM's watermark)."""


class Sequence:
    """One request, which draws `num_due` ids; the last one is `stop_token_id`, or any if that is None.

    `num_drawn` is up to date while it waits, and computed from the batch's progress while it runs.
    """

    __slots__ = ("admission", "num_drawn", "num_due", "num_reported", "request", "start_ids", "stop_token_id")

    def __init__(self, request: Request, num_due: int, stop_token_id: int | None) -> None:
        self.request = request
        self.num_due = num_due
        self.stop_token_id = stop_token_id
        self.num_drawn = 0
        self.num_reported = 0
        self.admission = 0
        self.start_ids = 0.0

    @property
    def num_ids(self) -> int:
        """Ids in the context while it waits."""
        return len(self.request.token_ids) + self.num_drawn


class EmulatedBatch:
    """Who runs, who waits, and how far everybody is; `advance` lets time pass."""

    def __init__(self, rules: EmulatedEngineRules) -> None:
        self._rules = rules
        self._pace = rules.pace
        self._capacity = float(rules.kv_capacity_tokens)
        self._now_s = 0.0
        self._done_ids = 0.0
        self._kv_tokens = 0.0
        self._prefill_s = 0.0
        self._num_admissions = 0
        self._running: dict[str, Sequence] = {}
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()
        self._ends: list[tuple[float, int, Sequence]] = []
        self._resident_groups: Counter[str] = Counter()
        self._ended: list[Sequence] = []
        self.num_preempted = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_used_tokens(self) -> int:
        return min(int(self._kv_tokens), self._rules.kv_capacity_tokens)

    @property
    def has_ended(self) -> bool:
        """Whether sequences have ended that `take_ended` has not handed out."""
        return bool(self._ended)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence; it is admitted by the next `advance` that finds room."""
        self._waiting[sequence.request.request_id] = sequence

    def take_ended(self) -> list[Sequence]:
        """Sequences that have drawn their last id."""
        ended, self._ended = self._ended, []
        return ended

    def running(self) -> list[Sequence]:
        """Sequences in the cache, oldest first, with what they have drawn until now."""
        for sequence in self._running.values():
            sequence.num_drawn = self._drawn(sequence)
        return list(self._running.values())

    def remove(self, request_id: str) -> None:
        """Forget a sequence, wherever it is; what it has drawn until now is noted in it."""
        sequence = self._running.get(request_id)
        if sequence is not None:
            self._leave(sequence)
        elif self._waiting.pop(request_id, None) is None:
            self._ended = [ended for ended in self._ended if ended.request.request_id != request_id]

    def next_event_s(self) -> float | None:
        """When something happens if nobody interferes; None if nothing runs."""
        if not self._running:
            return None
        return self._now_s + self._prefill_s + self._seconds(self._ids_to_event())

    def advance(self, now_s: float) -> None:
        """Let everything happen that happens until `now_s`."""
        if not self._running:
            self._now_s = max(self._now_s, now_s)
        self._admit()
        while self._running and now_s > self._now_s:
            left_s = now_s - self._now_s
            if self._prefill_s > 0.0:
                spent_s = min(self._prefill_s, left_s)
                self._now_s += spent_s
                self._prefill_s = self._prefill_s - spent_s if spent_s < self._prefill_s - SAME_S else 0.0
                continue
            num_ids = self._ids_to_event()
            seconds = self._seconds(num_ids)
            if seconds > left_s + SAME_S:
                self._decode(self._ids_in(left_s), left_s)
                return
            self._decode(num_ids, seconds)
            self._take_out_ended()
            self._make_room()
            self._admit()
        self._now_s = max(self._now_s, now_s)

    # ---- events

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._rules.max_running:
            sequence = next(iter(self._waiting.values()))
            kv_tokens = sequence.num_ids * self._rules.tokens_per_id
            reserve = ADMISSION_RESERVE * self._capacity
            if self._running and self._kv_tokens + kv_tokens + reserve > self._capacity:
                return
            del self._waiting[sequence.request.request_id]
            self._enter(sequence, kv_tokens)

    def _enter(self, sequence: Sequence, kv_tokens: float) -> None:
        request = sequence.request
        self._num_admissions += 1
        sequence.admission = self._num_admissions
        sequence.start_ids = self._done_ids - sequence.num_drawn
        self._running[request.request_id] = sequence
        heapq.heappush(self._ends, (sequence.start_ids + sequence.num_due, sequence.admission, sequence))
        self._kv_tokens += kv_tokens
        # The prompt of a group is computed once for all its members (prefix caching).
        num_shared = request.num_shared if self._resident_groups[request.group_id] else 0
        self._resident_groups[request.group_id] += 1
        num_computed = (sequence.num_ids - num_shared) * self._rules.tokens_per_id
        self._prefill_s += num_computed / self._pace.prefill_tokens_per_s

    def _leave(self, sequence: Sequence) -> None:
        request = sequence.request
        progress_ids = self._done_ids - sequence.start_ids
        sequence.num_drawn = self._drawn(sequence)
        del self._running[request.request_id]
        self._resident_groups[request.group_id] -= 1
        if not self._resident_groups[request.group_id]:
            del self._resident_groups[request.group_id]
        self._kv_tokens -= (len(request.token_ids) + progress_ids) * self._rules.tokens_per_id
        sequence.admission = 0
        if not self._running:
            self._kv_tokens = self._prefill_s = 0.0
            self._ends.clear()

    def _take_out_ended(self) -> None:
        while (first := self._first_to_end()) is not None and first[0] <= self._done_ids + SAME_IDS:
            sequence = heapq.heappop(self._ends)[2]
            self._leave(sequence)
            sequence.num_drawn = sequence.num_due
            self._ended.append(sequence)

    def _make_room(self) -> None:
        """The cache is full: the newest sequence leaves it, and is the next to be admitted."""
        while len(self._running) > 1 and self._kv_tokens + SAME_IDS >= self._capacity:
            sequence = self._running[next(reversed(self._running))]
            self._leave(sequence)
            self._waiting[sequence.request.request_id] = sequence
            self._waiting.move_to_end(sequence.request.request_id, last=False)
            self.num_preempted += 1

    def _first_to_end(self) -> tuple[float, int, Sequence] | None:
        while self._ends and self._ends[0][1] != self._ends[0][2].admission:
            heapq.heappop(self._ends)
        return self._ends[0] if self._ends else None

    # ---- time and progress

    def _drawn(self, sequence: Sequence) -> int:
        return min(sequence.num_due, int(self._done_ids - sequence.start_ids + SAME_IDS))

    def _ids_to_event(self) -> float:
        first = self._first_to_end()
        assert first is not None, "whoever runs will end"
        to_end = first[0] - self._done_ids
        growth = len(self._running) * self._rules.tokens_per_id
        to_full = (self._capacity - self._kv_tokens) / growth if len(self._running) > 1 else to_end
        return max(0.0, min(to_end, to_full))

    def _decode(self, num_ids: float, seconds: float) -> None:
        self._now_s += seconds
        self._done_ids += num_ids
        self._kv_tokens += num_ids * len(self._running) * self._rules.tokens_per_id

    def _seconds(self, num_ids: float) -> float:
        """Time of so many ids for everybody: the integral of the step time over the growing cache."""
        flat_ids, flat_s = self._flat_part()
        per_id = self._rules.tokens_per_id
        if num_ids <= flat_ids:
            return num_ids * flat_s
        linear_s, quadratic_s = self._growing_part(flat_ids)
        rest = num_ids - flat_ids
        return flat_ids * flat_s + per_id * rest * (linear_s + per_id * rest * quadratic_s)

    def _ids_in(self, seconds: float) -> float:
        """Inverse of `_seconds`."""
        flat_ids, flat_s = self._flat_part()
        if seconds <= flat_ids * flat_s:
            return seconds / flat_s
        linear_s, quadratic_s = self._growing_part(flat_ids)
        rest_s = seconds - flat_ids * flat_s
        root = sqrt(linear_s * linear_s + 4.0 * quadratic_s * rest_s)
        return flat_ids + 2.0 * rest_s / (linear_s + root) / self._rules.tokens_per_id

    def _flat_part(self) -> tuple[float, float]:
        """Ids until the cache is so full that a step takes longer than the floor; and seconds of each until then."""
        floor_s = self._pace.floor_s
        if floor_s <= 0.0:
            return 0.0, 0.0
        num = len(self._running)
        kv_at_floor = (floor_s - self._pace.step_s(num, 0.0)) / self._pace.per_kv_token_s
        per_id = self._rules.tokens_per_id
        return max(0.0, (kv_at_floor - self._kv_tokens) / (num * per_id)), floor_s * per_id

    def _growing_part(self, after_ids: float) -> tuple[float, float]:
        """Step time after so many ids, and half of what every further step adds to it."""
        num = len(self._running)
        kv_tokens = self._kv_tokens + after_ids * num * self._rules.tokens_per_id
        return self._pace.step_s(num, kv_tokens), 0.5 * self._pace.per_kv_token_s * num
