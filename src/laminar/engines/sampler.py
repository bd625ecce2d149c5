"""Draw one token per row, reproducibly: row r's token i depends on (seed, i) and its own logits, on nothing else.

One uniform number per token comes from a counter-based hash; the token is where the cumulative distribution passes it.
Axes: N rows, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

INCREMENT = -7046029254386353131  # 0x9E3779B97F4A7C15, as are the next two constants of splitmix64, as signed integers
MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
MIX_2 = -7723592293110705685  # 0x94D049BB133111EB

SPLIT_VOCAB = 2048
"""From here on the cumulative sum is taken in two levels (blocks, then inside one): half the time at 49,152."""

FILTER_CANDIDATES = 512
"""Top-p looks at this many candidates first; sorting a whole vocabulary costs 50 times more than finding these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawTensors:
    """`decode_rows.Draws` on the device."""

    seeds: Tensor
    indices: Tensor
    temperatures: Tensor
    top_ps: Tensor
    top_ks: Tensor
    all_unit: bool
    any_greedy: bool
    any_filtered: bool


def _mix(bits: Tensor) -> Tensor:
    """The finaliser of splitmix64; int64 wraps, and masks turn arithmetic shifts into logical ones."""
    bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * MIX_1
    bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * MIX_2
    return bits ^ ((bits >> 31) & 0x1FFFFFFFF)


def uniforms(seeds: Tensor, indices: Tensor) -> Tensor:
    """float64 in [0, 1) from int64 (seed, index); seeds are mixed first, so that neighbours do not overlap."""
    bits = _mix(_mix(seeds + INCREMENT) + (indices + 1) * INCREMENT)
    return ((bits >> 11) & 0x1FFFFFFFFFFFFF).double() * 2.0**-53


def _invert(weights_NV: Tensor, targets_N: Tensor) -> Tensor:
    """First place where the cumulative sum of weights exceeds the target, which is below the sum up to rounding."""
    sums = weights_NV.cumsum(-1, dtype=torch.float64)
    reachable = torch.minimum(targets_N, sums[:, -1] * (1.0 - 2.0**-50))
    return torch.searchsorted(sums, reachable.unsqueeze(1), right=True).squeeze(1)


def draw(weights_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """Inverse-CDF sampling from unnormalised weights."""
    num_rows, vocab = weights_NV.shape
    block = 256
    if vocab < SPLIT_VOCAB:
        return _invert(weights_NV, uniforms_N * weights_NV.sum(-1, dtype=torch.float64)).clamp_(max=vocab - 1)
    if vocab % block:
        weights_NV = torch.nn.functional.pad(weights_NV, (0, -vocab % block))
    blocks = weights_NV.view(num_rows, -1, block)
    sums = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    targets = uniforms_N * sums[:, -1]
    index = torch.searchsorted(sums, targets.unsqueeze(1), right=True).clamp_(max=sums.shape[1] - 1)
    before = sums.gather(1, index) - blocks.sum(-1).gather(1, index)
    rows = torch.arange(num_rows, device=index.device)
    inside = _invert(blocks[rows, index.squeeze(1)], (targets - before.squeeze(1)).clamp_(min=0.0))
    return (index.squeeze(1) * block + inside).clamp_(max=vocab - 1)


def draw_filtered(probs_NV: Tensor, uniforms_N: Tensor, top_ks_N: Tensor, top_ps_N: Tensor) -> Tensor:
    """Top-k, then top-p of what is left; the likeliest token always stays."""
    vocab = probs_NV.shape[1]
    limits_N = torch.where(top_ks_N > 0, top_ks_N.clamp(max=vocab), vocab)
    most = int(limits_N.max())
    values, ids = probs_NV.topk(min(most, max(FILTER_CANDIDATES, int(top_ks_N.max())), vocab))
    total_N1 = probs_NV.sum(-1, keepdim=True)
    unlimited_N = (limits_N > values.shape[1]) & (values.sum(-1) < top_ps_N * total_N1.squeeze(1))
    if bool(unlimited_N.any()):
        values, ids = probs_NV.sort(-1, descending=True, stable=True)
    rank = torch.arange(values.shape[1], device=values.device)
    values = values * (rank < limits_N.unsqueeze(1))
    limited_N1 = (limits_N <= values.shape[1]).unsqueeze(1)
    total_N1 = torch.where(limited_N1, values.sum(-1, keepdim=True), total_N1)
    before = values.cumsum(-1) - values
    values = values * ((before < top_ps_N.unsqueeze(1) * total_N1) | (rank == 0))
    return ids.gather(1, draw(values, uniforms_N).unsqueeze(1)).squeeze(1)


def sample(logits_NV: Tensor, draws: DrawTensors) -> tuple[Tensor, Tensor]:
    """Token ids and their log-probs under softmax(logits / temperature), before top-k and top-p; [N] each."""
    logits_NV = logits_NV.float()
    greedy_N = draws.temperatures == 0.0
    if not draws.all_unit:
        logits_NV = logits_NV / torch.where(greedy_N, 1.0, draws.temperatures).unsqueeze(1)
    probs_NV = logits_NV.softmax(-1)
    numbers_N = uniforms(draws.seeds, draws.indices)
    tokens_N = draw(probs_NV, numbers_N)
    if draws.any_filtered:
        rows = ((draws.top_ks > 0) | (draws.top_ps < 1.0)).nonzero().squeeze(1)
        tokens_N[rows] = draw_filtered(probs_NV[rows], numbers_N[rows], draws.top_ks[rows], draws.top_ps[rows])
    if draws.any_greedy:
        tokens_N = torch.where(greedy_N, logits_NV.argmax(-1), tokens_N)
    return tokens_N, probs_NV.gather(1, tokens_N.unsqueeze(1)).squeeze(1).log()
