"""A linear layer in the memory layout in which this machine multiplies few rows fastest, and RMSNorm.

Axes: R rows, K inputs, N outputs. `weight_NK` is always the checkpoint's matrix; how it lies in memory differs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

CACHED_BYTES = 1 << 20
"""CPU matrices up to this size stay in L2; there x @ W with W stored [K, N] is up to twice as fast as with [N, K]."""

FEW_ROWS = 3
"""Larger CPU matrices: up to this many rows x @ W.T reads W at memory speed; from 4 rows on MKL is 1.3 to 1.7 times
faster at W @ x.T (one core, 576 x 3072). Its result is transposed in memory, which costs nothing downstream."""


class Projection:
    """y = x W^T + b for several matrices that share their input, fused into one."""

    def __init__(
        self, num_inputs: int, num_outputs: Sequence[int], *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        total = sum(num_outputs)
        on_cpu = device.type == "cpu" and dtype == torch.float32
        self._transposed_result = on_cpu and 4 * total * num_inputs > CACHED_BYTES
        if on_cpu and not self._transposed_result:
            self.weight_NK = torch.zeros(num_inputs, total, dtype=dtype, device=device).t()
        else:
            self.weight_NK = torch.zeros(total, num_inputs, dtype=dtype, device=device)
        self.bias_N = torch.zeros(total, dtype=dtype, device=device) if bias else None
        self._sizes = list(num_outputs)

    def weights(self) -> tuple[Tensor, ...]:
        """Writable view of each fused matrix."""
        return torch.split(self.weight_NK, self._sizes)

    def biases(self) -> tuple[Tensor, ...]:
        return () if self.bias_N is None else torch.split(self.bias_N, self._sizes)

    def __call__(self, x_RK: Tensor, onto_RN: Tensor | None = None) -> Tensor:
        """The product, added to `onto_RN` if given; rows need not be contiguous in the result."""
        if self.bias_N is not None:
            onto_RN = self.bias_N.expand(len(x_RK), -1) if onto_RN is None else onto_RN + self.bias_N
        if self._transposed_result and len(x_RK) > FEW_ROWS:
            if onto_RN is None:
                return torch.mm(self.weight_NK, x_RK.t()).t()
            return torch.addmm(onto_RN.t(), self.weight_NK, x_RK.t()).t()
        if onto_RN is None:
            return torch.mm(x_RK, self.weight_NK.t())
        return torch.addmm(onto_RN, x_RK, self.weight_NK.t())


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last axis, in float32 inside, as transformers does; fast for rows and for transposed results alike."""
    wide = x.float()
    return (wide * wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()).to(x.dtype).mul_(weight)
