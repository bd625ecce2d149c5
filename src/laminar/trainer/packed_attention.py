"""Causal attention over a packed stream of sequences, as an attention implementation of transformers.

Invariant: no token sees another sequence, and nothing of size S x S exists. Sequences of similar length are padded to
one another and computed by one call of torch's scaled_dot_product_attention: padding is on the right, so under the
causal mask no real token sees any of it.

Axes: S tokens of the stream, P places of the padded buckets, B sequences of a bucket, L tokens of its longest, H heads,
D channels of a head.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from laminar.schema.errors import UserError
from laminar.trainer.packing import Layout

PACKED_ATTENTION = "laminar_packed"
"""Name under which transformers finds this implementation."""


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_S: Tensor, places_S: Tensor, num_places: int) -> Tensor:
        ctx.save_for_backward(places_S)
        return rows_S.new_zeros(num_places, *rows_S.shape[1:]).index_copy_(0, places_S, rows_S)

    @staticmethod
    def backward(ctx: Any, grad_P: Tensor) -> tuple[Tensor, None, None]:
        return grad_P.index_select(0, ctx.saved_tensors[0]), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_P: Tensor, places_S: Tensor) -> Tensor:
        ctx.save_for_backward(places_S)
        ctx.num_places = len(rows_P)
        return rows_P.index_select(0, places_S)

    @staticmethod
    def backward(ctx: Any, grad_S: Tensor) -> tuple[Tensor, None]:
        grad_P = grad_S.new_zeros(ctx.num_places, *grad_S.shape[1:])
        return grad_P.index_copy_(0, ctx.saved_tensors[0], grad_S), None


_apply_spread: Callable[[Tensor, Tensor, int], Tensor] = _Spread.apply
_apply_gather: Callable[[Tensor, Tensor], Tensor] = _Gather.apply


def spread(rows_S: Tensor, places_S: Tensor, num_places: int) -> Tensor:
    """Put rows at their places among `num_places`, zeros elsewhere. Places are unique: no atomics either way."""
    return _apply_spread(rows_S, places_S, num_places)


def gather(rows_P: Tensor, places_S: Tensor) -> Tensor:
    """Take the rows at unique places: the inverse of `spread`."""
    return _apply_gather(rows_P, places_S)


def packed_attention(
    module: nn.Module,
    query_1HSD: Tensor,
    key_1HSD: Tensor,
    value_1HSD: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_layout: Layout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of every sequence of the stream to itself; returns [1, S, H, D]."""
    if softcap is not None or (sliding_window is not None and sliding_window < packed_layout.max_tokens):
        raise UserError(
            f"{type(module).__name__} limits attention (sliding window {sliding_window}, soft cap {softcap}), which "
            f"the learner cannot compute for sequences of {packed_layout.max_tokens} tokens"
        )
    # Under autocast the rotation has made queries and keys float32 again.
    same_dtype = (query_1HSD.to(value_1HSD.dtype), key_1HSD.to(value_1HSD.dtype), value_1HSD)
    padded = [_spread(heads_1HSD, packed_layout) for heads_1HSD in same_dtype]
    sizes = [bucket.num_places for bucket in packed_layout.buckets]
    outputs = []
    for bucket, *parts in zip(
        packed_layout.buckets, *(torch.split(heads_PHD, sizes) for heads_PHD in padded), strict=True
    ):
        query, key, value = (
            part.view(bucket.num_sequences, bucket.max_tokens, *part.shape[1:]).transpose(1, 2) for part in parts
        )
        output_BHLD = causal_attention(query, key, value, scaling, kernel_groups_heads=_kernel_groups_heads(value))
        outputs.append(output_BHLD.transpose(1, 2).flatten(0, 1))
    return gather(torch.cat(outputs), packed_layout.places_S).unsqueeze(0), None


def causal_attention(
    query_BHLD: Tensor, key_BHLD: Tensor, value_BHLD: Tensor, scale: float | None, *, kernel_groups_heads: bool
) -> Tensor:
    """Queries of several heads may share a head of keys and values; if the kernel cannot do that, repeat those."""
    num_sharing = query_BHLD.shape[1] // key_BHLD.shape[1]
    if num_sharing > 1 and not kernel_groups_heads:
        key_BHLD, value_BHLD = (heads.repeat_interleave(num_sharing, dim=1) for heads in (key_BHLD, value_BHLD))
    return scaled_dot_product_attention(
        query_BHLD,
        key_BHLD,
        value_BHLD,
        is_causal=True,
        scale=scale,
        enable_gqa=num_sharing > 1 and kernel_groups_heads,
    )


def _kernel_groups_heads(tensor: Tensor) -> bool:
    """On CUDA only the half-precision kernel groups heads; torch would fall back to one that stores L x L scores."""
    return tensor.device.type == "cpu" or tensor.dtype in (torch.bfloat16, torch.float16)


def _spread(heads_1HSD: Tensor, layout: Layout) -> Tensor:
    rows_SHD = heads_1HSD.squeeze(0).transpose(0, 1)
    return spread(rows_SHD, layout.places_S, layout.num_places)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
