"""How long answers are, and how long environments take: functions of a trajectory's seed.

Invariant: what a trajectory's seed says does not depend on replica, attempt or order, so an answer that goes on
elsewhere ends where it would have ended.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import exp, log
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Protocol

import msgspec
from msgspec import Struct

from laminar.scheduling.order import stable_hash

TABLES = Path(__file__).with_name("workload_tables.json")

LENGTH, TURNS, LATENCY = 1, 2, 3
"""What a uniform number is drawn for."""

NUM_STRATA = 4096
"""Points at which the mean of a distribution is taken."""


def uniform(seed: int, *what: int) -> float:
    """A number in (0, 1) of this seed."""
    return (stable_hash(seed, *what) + 0.5) / 2.0**64


class Distribution(Protocol):
    """A positive quantity by its quantiles."""

    def at(self, u: float) -> float:
        """The quantile of 0 < u < 1."""
        ...


class Quantiles(Struct, frozen=True, kw_only=True):
    """A table of quantiles, interpolated linearly."""

    us: tuple[float, ...]
    values: tuple[float, ...]

    def at(self, u: float) -> float:
        """The quantile of u."""
        right = min(max(bisect_right(self.us, u), 1), len(self.us) - 1)
        u0, u1, low, high = self.us[right - 1], self.us[right], self.values[right - 1], self.values[right]
        return low + (high - low) * (u - u0) / (u1 - u0)


class LogNormal(Struct, frozen=True, kw_only=True):
    """By its median and the ratio of its 99th percentile to it, cut at `most`."""

    median: float
    p99_over_median: float
    most: float

    def at(self, u: float) -> float:
        """The quantile of u."""
        normal = NormalDist()
        sigma = log(self.p99_over_median) / normal.inv_cdf(0.99)
        return min(self.most, self.median * exp(sigma * normal.inv_cdf(u)))


class Fixed(Struct, frozen=True, kw_only=True):
    """Always the same."""

    value: float

    def at(self, u: float) -> float:
        """The value."""
        del u
        return self.value


class Turn(Struct, frozen=True, kw_only=True):
    """A turn of the model: ids in the answer when it ends, and whether it is the last one."""

    end_ids: int
    is_last: bool


class Workload(Struct, frozen=True, kw_only=True):
    """Answers of one task.

    With `tool_latency_s` an answer has several turns: after all but the last a tool is called, 1 to `max_calls` times,
    each number equally likely, and replies with `reply_tokens`; the model's tokens are spread evenly over the turns.
    """

    tokens: Distribution
    prompt_tokens: int = 170
    tool_latency_s: Distribution | None = None
    max_calls: int = 1
    reply_tokens: int = 170

    def num_turns(self, seed: int) -> int:
        """Turns of the model in this answer."""
        if self.tool_latency_s is None:
            return 1
        return 2 + int(self.max_calls * uniform(seed, TURNS))

    def turn(self, seed: int, num_answered: int, tokens_per_id: int) -> Turn:
        """The model's present turn, when `num_answered` ids of the answer are there, replies included.

        Lengths are rounded to whole ids, at least one per turn.
        """
        num_turns = self.num_turns(seed)
        num_ids = max(num_turns, round(self.tokens.at(uniform(seed, LENGTH)) / tokens_per_id))
        if num_turns == 1:
            return Turn(end_ids=num_ids, is_last=True)
        reply_ids = max(1, round(self.reply_tokens / tokens_per_id))
        ends = [num_ids * (turn + 1) // num_turns + turn * reply_ids for turn in range(num_turns)]
        turn = next((turn for turn, end in enumerate(ends) if end > num_answered), num_turns - 1)
        return Turn(end_ids=max(ends[turn], num_answered + 1), is_last=turn == num_turns - 1)

    def tool_s(self, call: int) -> float:
        """Seconds that a call of the tool takes; equal calls take equally long."""
        return self.tool_latency_s.at(uniform(call, LATENCY)) if self.tool_latency_s else 0.0

    @property
    def mean_tokens(self) -> float:
        """Mean answer length, replies not counted."""
        return mean(self.tokens)


def mean(distribution: Distribution) -> float:
    """Mean over evenly spread quantiles."""
    return fmean(distribution.at((stratum + 0.5) / NUM_STRATA) for stratum in range(NUM_STRATA))


class Tables(Struct, frozen=True, kw_only=True):
    """What the file holds: quantiles at `quantile_u` of answer lengths by name, and of the sandbox's seconds."""

    quantile_u: tuple[float, ...]
    tokens: dict[str, tuple[float, ...]]
    sandbox_s: tuple[float, ...]


@lru_cache(maxsize=1)
def _tables() -> Tables:
    return msgspec.json.decode(TABLES.read_bytes(), type=Tables)


def published_lengths() -> dict[str, Quantiles]:
    """Answer lengths of the paper's checkpoints (Fig. 17) and of Fig. 2, by name."""
    tables = _tables()
    return {name: Quantiles(us=tables.quantile_u, values=values) for name, values in tables.tokens.items()}


def sandbox_latency() -> Quantiles:
    """Seconds of one interaction with the paper's sandbox (Fig. 2)."""
    tables = _tables()
    return Quantiles(us=tables.quantile_u, values=tables.sandbox_s)


def recorded(values: Sequence[float]) -> Quantiles:
    """The distribution of what was measured; needs at least one value."""
    ordered = sorted(values)
    if len(ordered) == 1:
        ordered *= 2
    # Equal neighbours stay: each stands for its share of the answers.
    us = [number / (len(ordered) - 1) for number in range(len(ordered))]
    assert all(u0 < u1 for u0, u1 in pairwise(us))
    return Quantiles(us=tuple(us), values=tuple(ordered))
