"""What one rank of the learner writes of a version: found out once, then used for every version that lies as it did.

Invariant: a plan follows from the facts of the tensors alone (`tensors.facts_of`), and is used again only for tensors
of the same facts. It holds addresses and no tensors: it keeps no memory alive, and does not care which slot it fills.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laminar.relay.copying import Move, carry_out, is_plain, moves_of
from laminar.relay.manifest import DTYPE_BYTES, Manifest, ManifestError, Shape, TensorEntry
from laminar.relay.tensors import dtype_name, facts_of, layout_of, view


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Which of the learner's ranks this is, in the order of their parts of a version."""

    index: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A block of a tensor that this rank owns: it begins at `start` and extends as far as `data`."""

    name: str
    start: Shape
    data: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where the blocks of a parcel go: `moves` are plain bytes, `others` the numbers of the blocks left to torch."""

    manifest: Manifest
    blocks: list[tuple[TensorEntry, Shape]]
    moves: list[Move]
    others: list[int]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Tensors and the plan that was made for them; `sources[n]` is what goes into block n."""

    plan: Plan
    sources: Sequence[Tensor]

    @property
    def pieces(self) -> list[Piece]:
        """The same, block by block."""
        blocks = zip(self.plan.blocks, self.sources, strict=True)
        return [Piece(name=entry.name, start=start, data=data) for (entry, start), data in blocks]

    def write(self, memory_bytes: Tensor, num_threads: int = 1) -> int:
        """Copy and cast into the memory of a slot; returns the number of bytes written. Blocks."""
        plan = self.plan
        if len(memory_bytes) < plan.manifest.total_bytes:
            raise ManifestError(f"{plan.manifest.total_bytes} bytes do not fit into a slot of {len(memory_bytes)}")
        pairs = [
            (_block(memory_bytes, *plan.blocks[number], self.sources[number].shape), self.sources[number].detach())
            for number in plan.others
        ]
        carry_out(plan.moves, pairs, base=memory_bytes.data_ptr(), num_threads=num_threads)
        return plan.num_bytes


class Packer:
    """Packs what one of several equal ranks writes; all of them have all tensors.

    `dtype` is `keep`, or what floating-point weights are published as.
    """

    def __init__(self, dtype: str = "keep", part: Part | None = None) -> None:
        self._dtype: torch.dtype | None = None if dtype == "keep" else getattr(torch, dtype)
        self._part = part or Part()
        self._last: tuple[list[Any], Plan] | None = None

    def pack(self, tensors: Mapping[str, Tensor]) -> Parcel:
        """Plan, or look whether everything lies as it did, which takes a tenth of the time."""
        facts = [facts_of(name, tensor) for name, tensor in tensors.items()]
        if self._last is None or self._last[0] != facts:
            manifest = layout_of(tensors, self._dtype)
            mine = share(manifest, self._part)
            pieces = [Piece(name=e.name, start=(0,) * len(e.shape), data=tensors[e.name]) for e in mine]
            self._last = facts, plan_of(manifest, pieces)
        plan = self._last[1]
        return Parcel(plan=plan, sources=[tensors[entry.name] for entry, _ in plan.blocks])


def share(manifest: Manifest, part: Part) -> list[TensorEntry]:
    """The tensors that one of several equal ranks writes: runs of neighbours of about the same size."""
    begin, end = (manifest.total_bytes * k // part.count for k in (part.index, part.index + 1))
    return [entry for entry in manifest.blocks() if begin <= entry.offset < end]


def parcel_of(manifest: Manifest, pieces: Sequence[Piece]) -> Parcel:
    """The blocks that a rank owns. Raises `ManifestError` if one is of no tensor in the manifest."""
    return Parcel(plan=plan_of(manifest, pieces), sources=[piece.data for piece in pieces])


def plan_of(manifest: Manifest, pieces: Sequence[Piece]) -> Plan:
    """Where these pieces go. Raises `ManifestError` if one does not fit in."""
    entries = {entry.name: entry for entry in manifest.entries}
    blocks: list[tuple[TensorEntry, Shape]] = []
    moves: list[Move] = []
    others: list[int] = []
    num_bytes = 0
    for number, piece in enumerate(pieces):
        entry = entries.get(piece.name)
        if entry is None:
            raise ManifestError(f"{piece.name} is not in the manifest")
        offset = _offset_if_in_one_run(entry, piece)
        if offset is not None and is_plain(piece.data) and dtype_name(piece.data.dtype) == entry.dtype:
            moves.extend(moves_of(offset, piece.data))
        else:
            others.append(number)
        blocks.append((entry, piece.start))
        num_bytes += piece.data.numel() * DTYPE_BYTES[entry.dtype]
    return Plan(manifest=manifest, blocks=blocks, moves=moves, others=others, num_bytes=num_bytes)


def _offset_if_in_one_run(entry: TensorEntry, piece: Piece) -> int | None:
    """Where the block begins, if its bytes lie side by side."""
    shape = tuple(piece.data.shape)
    if shape == entry.shape and not any(piece.start) and len(piece.start) == len(shape):
        return entry.offset
    begin, end = next(entry.runs(piece.start, shape), (0, 0))
    return begin if end - begin == piece.data.numel() * DTYPE_BYTES[entry.dtype] else None


def _block(memory_bytes: Tensor, entry: TensorEntry, start: Shape, shape: Shape) -> Tensor:
    block = view(memory_bytes, entry)
    for dim, (first, size) in enumerate(zip(start, shape, strict=True)):
        if size != block.shape[dim]:
            block = block.narrow(dim, first, size)
    return block
