"""Random numbers without state: one uniform per (seed, index), whoever asks and in whatever company."""

import numpy as np
from numpy.typing import NDArray

INCREMENT = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64; products wrap."""
    bits = (bits ^ (bits >> np.uint64(30))) * MIX_1
    bits = (bits ^ (bits >> np.uint64(27))) * MIX_2
    return bits ^ (bits >> np.uint64(31))


def uniforms(seeds: NDArray[np.int64], indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """Numbers in [0, 1), one per pair. Seeds are mixed before they meet the index, so neighbours do not overlap."""
    streams = _mix(seeds.view(np.uint64) + INCREMENT)
    bits = _mix(streams + (indices + 1).view(np.uint64) * INCREMENT)
    return np.ldexp((bits >> np.uint64(11)).astype(np.float64), -53)


def fold_seed(seed: int) -> int:
    """Any Python integer as the int64 with the same low 64 bits."""
    return (seed + 2**63) % 2**64 - 2**63
