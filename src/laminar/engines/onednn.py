"""oneDNN's matrix product, which torch has but does not choose for float32 on a CPU.

On one Zen 5 core it is about twice as fast as MKL, which torch would take. The ops are private ones of torch, so that
whoever uses them asks `is_available` first.
"""

import torch
from torch import Tensor


def is_available() -> bool:
    """Whether this torch has the ops."""
    return torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def pack(weight_NK: Tensor) -> Tensor:
    """The matrix in the order in which this machine multiplies it fastest; opaque to everything but `product`."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_NK)
    return packed


def product(x_RK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, onto_RN: Tensor | None = None) -> Tensor:
    """x W^T + b, added to `onto_RN` if given; the weight packed or not, and also a transposed view."""
    linear = torch.ops.mkldnn._linear_pointwise
    result: Tensor = (
        linear(x_RK, weight_NK, bias_N, "none", [], "")
        if onto_RN is None
        else linear.binary(x_RK, onto_RN, weight_NK, bias_N, "add")
    )
    return result
