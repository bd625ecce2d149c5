"""A linear layer whose weights lie in memory as this machine multiplies them fastest, and RMSNorm.

Axes: R rows, K inputs, N outputs. A checkpoint's matrix is [N, K].
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from laminar.engines import onednn

CACHED_BYTES = 1 << 20
"""CPU matrices up to this size stay in L2: there the fixed cost of a oneDNN call counts (about 10 us)."""

FEW_ROWS = 16
"""Up to this many rows, a cached matrix is multiplied faster by a plain GEMM with W stored [K, N]."""


class Projection:
    """y = x W^T + b for several matrices that share their input, fused into one.

    float32 on a CPU goes through oneDNN with weights reordered once per version. On one Zen 5 core that is 1.2 to 6
    times as fast as MKL from 1 to 256 rows, and a row's result does not depend on how many rows are with it.
    """

    def __init__(
        self, num_inputs: int, num_outputs: Sequence[int], *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._num_inputs, self._num_outputs = num_inputs, list(num_outputs)
        total = sum(num_outputs)
        self._weight_NK = torch.zeros(total, num_inputs, dtype=dtype, device=device)
        self._bias_N = torch.zeros(total, dtype=dtype, device=device) if bias else None
        self._packs = device.type == "cpu" and dtype == torch.float32 and onednn.is_available()
        self._few_KN = self._weight_NK.t() if self._packs and self._weight_NK.nbytes <= CACHED_BYTES else None

    @property
    def plain_NK(self) -> Tensor | None:
        """The matrices as the checkpoint has them, for others to read in place; None if they lie in another order."""
        return None if self._packs else self._weight_NK

    @property
    def weight_shapes(self) -> list[tuple[int, ...]]:
        """Of each matrix that `load_weights` takes."""
        return [(size, self._num_inputs) for size in self._num_outputs]

    @property
    def bias_shapes(self) -> list[tuple[int, ...]]:
        """Of each vector that `load_biases` takes."""
        return [] if self._bias_N is None else [(size,) for size in self._num_outputs]

    def load_weights(self, weights: Sequence[Tensor]) -> None:
        """Take the matrices of a version; what was there before is gone."""
        if not self._packs:
            _copy(weights, self._weight_NK)
            return
        fused_NK = torch.cat([weight.float() for weight in weights])
        self._weight_NK = onednn.pack(fused_NK)
        if self._few_KN is not None:
            self._few_KN = fused_NK.t().contiguous()

    def load_biases(self, biases: Sequence[Tensor]) -> None:
        """Take the vectors of a version."""
        assert self._bias_N is not None
        _copy(biases, self._bias_N)

    def __call__(self, x_RK: Tensor, onto_RN: Tensor | None = None) -> Tensor:
        """The product [R, N], added to `onto_RN` if given."""
        if self._packs and (self._few_KN is None or len(x_RK) > FEW_ROWS):
            return onednn.product(x_RK, self._weight_NK, self._bias_N, onto_RN)
        weight_KN = self._weight_NK.t() if self._few_KN is None else self._few_KN
        if self._bias_N is not None:
            onto_RN = self._bias_N if onto_RN is None else onto_RN + self._bias_N
        return torch.mm(x_RK, weight_KN) if onto_RN is None else torch.addmm(onto_RN, x_RK, weight_KN)


def _copy(sources: Sequence[Tensor], fused: Tensor) -> None:
    for source, target in zip(sources, torch.split(fused, [len(source) for source in sources]), strict=True):
        target.copy_(source)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last axis, in float32 inside, as transformers does."""
    wide = x.float()
    return (wide * wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()).to(x.dtype).mul_(weight)
