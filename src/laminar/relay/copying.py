"""Copies of tensors: plain bytes go through the C library, everything else through torch.

Invariant: every byte is copied once, and only between equal shapes.
"""

import ctypes
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

PIECE_BYTES = 32 << 20
"""Large tensors are copied in pieces, so that several threads share them evenly."""

Move = tuple[int, int, int]
"""Bytes that are copied as they are: where to, counted from a base; where from, an address; how many."""

Pair = tuple[Tensor, Tensor]
"""A target and a source of the same shape, for what has to be cast, gathered or brought from another device."""


def copy_all(pairs: Iterable[Pair], num_threads: int = 1) -> None:
    """Copy each second tensor into the first one of its pair, casting where dtypes differ. Blocks."""
    moves: list[Move] = []
    others: list[Pair] = []
    for target, source in pairs:
        if target.shape != source.shape:
            raise ValueError(f"a tensor of shape {tuple(source.shape)} where {tuple(target.shape)} was due")
        if target.dtype == source.dtype and is_plain(target) and is_plain(source):
            moves.extend(moves_of(target.data_ptr(), source))
        else:
            others.append((target, source.detach()))
    carry_out(moves, others, num_threads=num_threads)


def carry_out(moves: Iterable[Move], pairs: Iterable[Pair], *, base: int = 0, num_threads: int = 1) -> None:
    """Make these copies. Blocks.

    With hundreds of tensors of a few hundred KB, whatever is done for each of them shows: torch and numpy, and every
    look at a tensor, take a microsecond or more, copying such a tensor some 20.
    """
    if num_threads == 1:
        _work(base, iter(moves), iter(pairs))
        return
    shared_moves, shared_pairs = iter(list(moves)), iter([part for pair in pairs for part in _parts(*pair)])
    with ThreadPoolExecutor(num_threads) as pool:  # each takes the next copy when it is done with one
        for done in [pool.submit(_work, base, shared_moves, shared_pairs) for _ in range(num_threads)]:
            done.result()


def moves_of(target: int, source: Tensor) -> Iterator[Move]:
    """How the bytes of a plain tensor get to `target`."""
    address, num_bytes = source.data_ptr(), source.nbytes
    for start in range(0, num_bytes, PIECE_BYTES):
        yield target + start, address + start, min(PIECE_BYTES, num_bytes - start)


def is_plain(tensor: Tensor) -> bool:
    """Whether its bytes lie in host memory in the order of its elements, and mean what they are."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _work(base: int, moves: Iterator[Move], pairs: Iterator[Pair]) -> None:
    for target, source, num_bytes in moves:
        ctypes.memmove(base + target, source, num_bytes)
    for to, data in pairs:
        to.copy_(data)


def _parts(target: Tensor, source: Tensor) -> Iterator[Pair]:
    if target.nbytes <= PIECE_BYTES or not target.dim():
        yield target, source
        return
    num_rows = max(1, PIECE_BYTES * len(target) // target.nbytes)
    for first in range(0, len(target), num_rows):
        size = min(num_rows, len(target) - first)
        yield target.narrow(0, first, size), source.narrow(0, first, size)
