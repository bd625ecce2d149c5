"""Rotary position embedding as one complex multiplication.

Checkpoints pair dimension i with i + head_dim / 2. `interleave` reorders rows of the query and key matrices so that the
partners lie side by side; attention scores do not change, and rotating a pair is then a complex product.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Parameters = Mapping[str, Any]


def rope_parameters(config: Parameters) -> dict[str, Any]:
    """What config.json says about RoPE, in the wording of transformers 5, older files included."""
    if config.get("rope_parameters"):
        return dict(config["rope_parameters"])
    older = dict(config.get("rope_scaling") or {})
    kind = older.pop("rope_type", None) or older.pop("type", None) or "default"
    return {"rope_type": kind, "rope_theta": config.get("rope_theta", 10_000.0), **older}


def _default(inverse_D: Tensor, rope: Parameters) -> Tensor:
    return inverse_D


def _linear(inverse_D: Tensor, rope: Parameters) -> Tensor:
    return inverse_D / float(rope["factor"])


def _llama3(inverse_D: Tensor, rope: Parameters) -> Tensor:
    """Slow rotations are stretched by `factor`, fast ones kept, those between are blended."""
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    turns_D = inverse_D * (float(rope["original_max_position_embeddings"]) / (2 * math.pi))
    keep_D = ((turns_D - low) / (high - low)).clamp(0.0, 1.0)
    return inverse_D * (keep_D + (1.0 - keep_D) / float(rope["factor"]))


SCALINGS = {"default": _default, "linear": _linear, "llama3": _llama3}


def rotations(head_dim: int, num_positions: int, rope: Parameters) -> Tensor:
    """Unit complex numbers [position, head_dim / 2]."""
    kind = rope.get("rope_type", "default")
    if kind not in SCALINGS:
        raise ValueError(f"RoPE variant {kind!r} is not supported; the torch engine knows {', '.join(SCALINGS)}")
    base = float(rope["rope_theta"])
    inverse_D = 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles_TD = torch.outer(torch.arange(num_positions, dtype=torch.float32), SCALINGS[kind](inverse_D, rope))
    return torch.polar(torch.ones_like(angles_TD), angles_TD)


def interleave(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder dim 0, [heads * head_dim, ...], so that each head's partners (i, i + head_dim / 2) become neighbours."""
    return torch.unflatten(rows, 0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def rotate(x_RHD: Tensor, rotations_RD: Tensor) -> Tensor:
    """Turn interleaved heads to their positions; in float32 whatever the dtype."""
    pairs = torch.view_as_complex(torch.unflatten(x_RHD.float(), -1, (-1, 2)))
    return torch.view_as_real(pairs * rotations_RD.unsqueeze(1)).flatten(-2).to(x_RHD.dtype)
