"""Torch tensors in and out of flat memory.

Invariant: a tensor made here shows the memory itself; it is never a copy.
"""

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laminar.relay.manifest import Manifest, Shape, TensorEntry, layout
from laminar.relay.slots import checksum

CAST_FROM = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""What a published dtype replaces: 8-bit floats belong to scales and stay, integers and masks stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """The part of a tensor that one of `world_size` tensor-parallel workers needs: an equal share along `dim`."""

    dim: int
    rank: int
    world_size: int

    def of(self, tensor: Tensor) -> Tensor:
        """The share, as a view: other bytes are not touched."""
        size, rest = divmod(tensor.shape[self.dim], self.world_size)
        if rest:
            raise ValueError(
                f"dimension {self.dim} of shape {tuple(tensor.shape)} has no {self.world_size} equal parts"
            )
        return tensor.narrow(self.dim, self.rank * size, size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The part of a tensor from `start` to before `stop` along `dim`, for shares that are not equal."""

    dim: int
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """That part, as a view: other bytes are not touched."""
        if not 0 <= self.start <= self.stop <= tensor.shape[self.dim]:
            raise ValueError(
                f"no elements {self.start} to {self.stop} along dimension {self.dim} of shape {tuple(tensor.shape)}"
            )
        return tensor.narrow(self.dim, self.start, self.stop - self.start)


Selection = Slice | Rows
"""What of a tensor is shown."""


class MappedTensors(Mapping[str, Tensor]):
    """The tensors of a leased version by name, made when asked for; `checksum` is what the relay took of all bytes.

    They are read-only memory: writing to one kills the process. They must not be used after the lease.
    """

    def __init__(self, memory: mmap.mmap, manifest: Manifest, checksum: int, slices: Mapping[str, Selection]) -> None:
        self.checksum = checksum
        self._memory: mmap.mmap | None = memory
        self._bytes = whole(memory)
        self._typed: dict[str, Tensor] = {}
        self._entries = {entry.name: entry for entry in manifest.entries}
        self._total_bytes = manifest.total_bytes
        self._slices = slices

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        self._open_memory()
        typed = self._typed.get(entry.dtype)
        if typed is None:
            typed = self._typed[entry.dtype] = self._bytes.view(getattr(torch, entry.dtype))
        tensor = typed.as_strided(entry.shape, _strides(entry.shape), entry.offset // typed.itemsize)
        return self._slices[name].of(tensor) if name in self._slices else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def compute_checksum(self) -> int:
        """Of the bytes as they are now; blocks for 0.1 s per GiB."""
        return checksum(self._open_memory(), self._total_bytes)

    def end(self) -> None:
        """The lease is over: no further tensors."""
        self._memory = None
        self._typed.clear()
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def _open_memory(self) -> mmap.mmap:
        if self._memory is None:
            raise RuntimeError("the lease of these weights is over")
        return self._memory


class _Window:
    """Tells numpy that memory may be written, although the kernel will not allow it, and keeps the memory alive.

    Torch has no read-only tensors and warns about read-only arrays.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._kept = np.frombuffer(memory, np.uint8)
        address = self._kept.__array_interface__["data"][0]
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (len(memory),), "data": (address, False)}


def whole(memory: mmap.mmap) -> Tensor:
    """All bytes of a map as one tensor, which keeps the map alive."""
    return torch.from_numpy(np.asarray(_Window(memory)))


def view(memory_bytes: Tensor, entry: TensorEntry) -> Tensor:
    """The tensor that lies in these bytes."""
    flat = memory_bytes[entry.offset : entry.end]
    return flat.view(getattr(torch, entry.dtype)).reshape(entry.shape)


def _strides(shape: Shape) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return strides[::-1]


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def layout_of(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> Manifest:
    """Layout of these tensors as published in `dtype` (None: as they are); tied ones share their bytes."""
    homes: dict[Any, str] = {}
    ties: dict[str, str] = {}
    shapes = {}
    for name, tensor in tensors.items():
        _, *identity = facts_of(name, tensor)
        shapes[name] = (tuple(tensor.shape), dtype_name(published_dtype(tensor.dtype, dtype)))
        if tensor.numel():
            home = homes.setdefault(tuple(identity), name)
            if home != name:
                ties[name] = home
    return layout(shapes, ties)


def published_dtype(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """What a tensor of `dtype` is published as."""
    return wanted if wanted is not None and dtype in CAST_FROM else dtype


def facts_of(name: str, tensor: Tensor) -> tuple[Any, ...]:
    """All that layout and copies depend on, but not what is in the tensor; all but the name are equal for tied ones."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(f"{name}: only dense tensors can be published")
    return (
        name,
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.device,
        tensor.data_ptr(),
        tensor.is_conj(),
        tensor.is_neg(),
    )
