"""Linear layers whose three products, one forward and two backward, go through oneDNN where that is faster.

Axes: R rows, K inputs, N outputs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from laminar.engines import onednn


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_NK)
        return onednn.product(x, weight_NK, bias_N)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight_NK = ctx.saved_tensors
        x_RK, grad_RN = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            onednn.product(grad, weight_NK.t()) if needs_x else None,
            onednn.product(grad_RN.t(), x_RK.t()) if needs_weight else None,
            grad_RN.sum(0) if needs_bias else None,
        )


_apply_product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = _Product.apply


class FastLinear(nn.Linear):
    """`nn.Linear` in every respect but the time that it takes in float32 on a CPU."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] to [..., N]."""
        return _apply_product(input, self.weight, self.bias) if _suits(input) else super().forward(input)


def _suits(x: Tensor) -> bool:
    """oneDNN knows no empty matrices."""
    is_plain_float32 = x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return x.device.type == "cpu" and is_plain_float32 and x.numel() > 0


def use_fast_linear(model: nn.Module) -> None:
    """Let all linear layers of a model be fast ones; parameters, names and what is saved stay as they are."""
    if not onednn.is_available():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FastLinear
