"""Draw one token per row: the one where the row's cumulative distribution passes its uniform number.

A row's token depends on its own logits and number, on nothing else in the batch. Axes: N rows, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

SPLIT_VOCAB = 2048
"""From here on the cumulative sum has two levels, blocks and inside one: a plain one costs as much as the softmax."""

BLOCK = 256
"""Tokens per block of the two-level sum."""

FILTER_CANDIDATES = 512
"""Top-p looks at this many candidates first; on CPU sorting a vocabulary of 49,152 costs 40 times as much as topk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """How each row draws; the flags choose the code path without looking at rows. Temperature 0 is greedy."""

    temperatures_N: Tensor
    top_ps_N: Tensor
    top_ks_N: Tensor
    all_unit: bool
    any_greedy: bool
    any_filtered: bool


def _invert(weights_NV: Tensor, targets_N: Tensor) -> Tensor:
    """First place whose cumulative sum exceeds the target; it never has weight 0. Targets stop short of the sum."""
    sums = weights_NV.cumsum(-1, dtype=torch.float64)
    reachable = torch.minimum(targets_N, sums[:, -1] * (1.0 - 2.0**-50)).unsqueeze(1)
    return torch.searchsorted(sums, reachable, right=True).squeeze(1).clamp_(max=weights_NV.shape[1] - 1)


def draw(weights_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """Inverse-CDF sampling from unnormalised weights."""
    num_rows, vocab = weights_NV.shape
    if vocab < SPLIT_VOCAB:
        return _invert(weights_NV, uniforms_N * weights_NV.sum(-1, dtype=torch.float64))
    if vocab % BLOCK:
        weights_NV = pad(weights_NV, (0, -vocab % BLOCK))
    blocks = weights_NV.view(num_rows, -1, BLOCK)
    weights = blocks.sum(-1)
    targets = uniforms_N * weights.sum(-1, dtype=torch.float64)
    index = _invert(weights, targets)
    rows = torch.arange(num_rows, device=index.device)
    before = weights.cumsum(-1, dtype=torch.float64)[rows, index] - weights[rows, index]
    inside = _invert(blocks[rows, index], (targets - before).clamp_(min=0.0))
    return index * BLOCK + inside


def draw_filtered(probs_NV: Tensor, uniforms_N: Tensor, top_ks_N: Tensor, top_ps_N: Tensor) -> Tensor:
    """Top-k, then top-p of what is left, as transformers and vLLM do; the likeliest token always stays."""
    vocab = probs_NV.shape[1]
    limits_N = torch.where(top_ks_N > 0, top_ks_N.clamp(max=vocab), vocab)
    values, ids = probs_NV.topk(min(vocab, max(FILTER_CANDIDATES, int(top_ks_N.max()))))
    totals_N = probs_NV.sum(-1)
    if bool(((limits_N > values.shape[1]) & (values.sum(-1) < top_ps_N * totals_N)).any()):
        values, ids = probs_NV.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(values.shape[1], device=values.device)
    values = values * (rank < limits_N.unsqueeze(1))
    totals_N = torch.where(limits_N <= values.shape[1], values.sum(-1), totals_N)
    before = values.cumsum(-1) - values
    values = values * ((before < (top_ps_N * totals_N).unsqueeze(1)) | (rank == 0))
    return ids.gather(1, draw(values, uniforms_N).unsqueeze(1)).squeeze(1)


def sample(logits_NV: Tensor, uniforms_N: Tensor, rows: RowSampling) -> tuple[Tensor, Tensor]:
    """Token ids and their log-probs under softmax(logits / temperature), before top-k and top-p; [N] each."""
    logits_NV = logits_NV.float()
    greedy_N = rows.temperatures_N == 0.0
    if not rows.all_unit:
        logits_NV = logits_NV / torch.where(greedy_N, 1.0, rows.temperatures_N).unsqueeze(1)
    probs_NV = logits_NV.softmax(-1)
    tokens_N = draw(probs_NV, uniforms_N)
    if rows.any_filtered:
        some = ((rows.top_ks_N > 0) | (rows.top_ps_N < 1.0)).nonzero().squeeze(1)
        tokens_N[some] = draw_filtered(probs_NV[some], uniforms_N[some], rows.top_ks_N[some], rows.top_ps_N[some])
    if rows.any_greedy:
        tokens_N = torch.where(greedy_N, logits_NV.argmax(-1), tokens_N)
    return tokens_N, probs_NV.gather(1, tokens_N.unsqueeze(1)).squeeze(1).log()
