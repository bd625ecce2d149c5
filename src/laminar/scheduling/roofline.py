"""How many trajectories may decode together before each of them gets noticeably slower (B of the paper, §5.2).

Invariant: B is at least 1, and depends on the machine and the number format only, not on the model.
"""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct


class Hardware(Struct, frozen=True, kw_only=True):
    """One accelerator by its data sheet: peak of dense bf16 products, bandwidth and size of its memory."""

    flops_per_s: float
    bandwidth_bytes_per_s: float
    memory_bytes: int


HARDWARE: Final[Mapping[str, Hardware]] = {
    "H800": Hardware(flops_per_s=989.5e12, bandwidth_bytes_per_s=3.35e12, memory_bytes=80 * 10**9),
    "H100": Hardware(flops_per_s=989.5e12, bandwidth_bytes_per_s=3.35e12, memory_bytes=80 * 10**9),
    "H200": Hardware(flops_per_s=989.5e12, bandwidth_bytes_per_s=4.8e12, memory_bytes=141 * 10**9),
    "A100-80G": Hardware(flops_per_s=312e12, bandwidth_bytes_per_s=2.039e12, memory_bytes=80 * 10**9),
    "RTX 4090": Hardware(flops_per_s=165.2e12, bandwidth_bytes_per_s=1.008e12, memory_bytes=24 * 10**9),
}
"""SXM variants; products without structured sparsity, accumulated in 32 bits."""

FLOPS_PER_WEIGHT = 2
"""One multiplication and one addition per weight and sequence."""


def max_useful_batch(flops_per_s: float, bandwidth_bytes_per_s: float, bytes_per_weight: float = 2.0) -> int:
    """The batch at which decode turns from memory-bound to compute-bound.

    A step reads each weight once, for all sequences together, and computes with it once per sequence. Below
    `flops_per_s * bytes_per_weight / (2 * bandwidth)` sequences the reading takes longer, so one more sequence is
    nearly free. With bf16 on an H800 that is 295; model size and tensor parallelism cancel out. Traffic of the KV cache
    is not counted, so measured latency rises earlier (`max_measured_batch`).
    """
    ridge = flops_per_s * bytes_per_weight / (FLOPS_PER_WEIGHT * bandwidth_bytes_per_s)
    return max(1, int(ridge))


def max_measured_batch(step_s_by_batch: Mapping[int, float], tolerance: float = 1.0) -> int:
    """The largest measured batch up to which every step takes at most (1 + tolerance) x that of the smallest batch.

    `step_s_by_batch` holds measured seconds of one decode step per batch size. With the default a step may take twice
    as long as for the smallest batch: until then at least half of it is work that all sequences share. A single
    outlier below the limit at a large batch does not count, since all smaller ones must be within it too.
    """
    if not step_s_by_batch:
        raise ValueError("no decode step was measured; give at least one batch size")
    batches = sorted(step_s_by_batch)
    limit_s = step_s_by_batch[batches[0]] * (1.0 + tolerance)
    largest = batches[0]
    for batch in batches[1:]:
        if step_s_by_batch[batch] > limit_s:
            break
        largest = batch
    return largest
