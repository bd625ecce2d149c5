"""Which sequences go through the model together, and where each of their tokens lies.

Invariant: every sequence is in exactly one micro-batch, and no micro-batch exceeds the token budget unless it is one
longer sequence alone. Planning is pure; `pack` turns one planned micro-batch into tensors.

Axes: S tokens of the stream (all sequences of a micro-batch one after another, no padding), T trained tokens,
P places of the padded buckets.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from laminar.trainer.sequences import TrainSequence

MIN_BUCKET_FILL = 0.75
"""A bucket's shortest sequence has at least this share of its longest. Attention is a tenth of the work at 55 tokens,
so the padding costs a few per cent; lengths of 20 to 300 make ten buckets, and each costs one call per layer."""


def plan_micro_batches(num_tokens: Sequence[int], *, budget_tokens: int, multiple_of: int = 1) -> list[tuple[int, ...]]:
    """Deal sequences (by index) to as few balanced micro-batches as the budget allows; longest first in each.

    The number of micro-batches is a multiple of `multiple_of` (ranks that must run equally many); micro-batches are
    empty only where there are fewer sequences than that asks for.
    """
    if not num_tokens:
        return []
    order = sorted(range(len(num_tokens)), key=lambda index: (-num_tokens[index], index))
    wanted = min(-(-sum(num_tokens) // budget_tokens), len(num_tokens))
    while True:
        num_bins = -(-wanted // multiple_of) * multiple_of
        bins = _deal(order, num_tokens, num_bins, budget_tokens)
        if len(bins) == num_bins:
            return [tuple(members) for members in bins]
        wanted = len(bins)


def _deal(order: Sequence[int], num_tokens: Sequence[int], num_bins: int, budget_tokens: int) -> list[list[int]]:
    """Longest first into the emptiest micro-batch; one more micro-batch is opened where even that has no room."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    fill = [(0, index) for index in range(num_bins)]
    for sequence in order:
        used, index = fill[0]
        if used and used + num_tokens[sequence] > budget_tokens:
            heapq.heappush(fill, (num_tokens[sequence], len(bins)))
            bins.append([sequence])
        else:
            heapq.heapreplace(fill, (used + num_tokens[sequence], index))
            bins[index].append(sequence)
    return bins


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of similar length that attention computes in one call, padded to the longest."""

    num_sequences: int
    max_tokens: int

    @property
    def num_places(self) -> int:
        return self.num_sequences * self.max_tokens


def plan_buckets(num_tokens: Sequence[int], *, min_fill: float = MIN_BUCKET_FILL) -> list[Bucket]:
    """Cut sequences, sorted longest first, where the next one would fill less than `min_fill` of its bucket."""
    buckets = []
    start = 0
    for index in range(1, len(num_tokens) + 1):
        if index == len(num_tokens) or num_tokens[index] < min_fill * num_tokens[start]:
            buckets.append(Bucket(index - start, num_tokens[start]))
            start = index
    return buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the tokens of the stream lie when the buckets are padded; `places_S` holds each place at most once."""

    buckets: tuple[Bucket, ...]
    places_S: Tensor

    @property
    def num_places(self) -> int:
        return sum(bucket.num_places for bucket in self.buckets)

    @property
    def max_tokens(self) -> int:
        return self.buckets[0].max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """One micro-batch on the learner's device. The token at `predictors_T` in the stream predicts `targets_T`."""

    input_ids_S: Tensor
    position_ids_S: Tensor
    layout: Layout
    predictors_T: Tensor
    targets_T: Tensor
    behaviour_logprobs_T: Tensor
    advantages_T: Tensor
    weights_T: Tensor


def pack(sequences: Sequence[TrainSequence], device: torch.device | str) -> Pack:
    """Lay sequences, given longest first, one after another."""
    num_inputs = np.array([sequence.num_inputs for sequence in sequences])
    buckets = plan_buckets(num_inputs.tolist())
    positions_S = np.concatenate([np.arange(count) for count in num_inputs])
    rows_S = np.repeat(_first_places(buckets), num_inputs)
    trained_S = np.concatenate([sequence.trained[1:] for sequence in sequences])
    num_trained = [sequence.num_trained for sequence in sequences]

    def of_trained(values: Sequence[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), num_trained)).to(device)

    def of_stream(parts: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)[trained_S]).to(device)

    return Pack(
        input_ids_S=torch.from_numpy(np.concatenate([s.token_ids[:-1] for s in sequences]).astype(np.int64)).to(device),
        position_ids_S=torch.from_numpy(positions_S).to(device),
        layout=Layout(buckets=tuple(buckets), places_S=torch.from_numpy(rows_S + positions_S).to(device)),
        predictors_T=torch.from_numpy(np.flatnonzero(trained_S)).to(device),
        targets_T=of_stream([s.token_ids[1:] for s in sequences]).long(),
        behaviour_logprobs_T=of_stream([s.behaviour_logprobs[1:] for s in sequences]),
        advantages_T=of_trained([s.advantage for s in sequences]),
        weights_T=of_trained([s.weight for s in sequences]),
    )


def _first_places(buckets: Sequence[Bucket]) -> np.ndarray:
    """Place of the first token of every sequence."""
    rows, start = [], 0
    for bucket in buckets:
        rows.append(start + bucket.max_tokens * np.arange(bucket.num_sequences))
        start += bucket.num_places
    return np.concatenate(rows)
