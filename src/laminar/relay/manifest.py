"""Where every tensor of a version lies in one flat buffer; needs no torch, so that the relay process needs none.

Invariant: two entries either name the very same bytes (tied tensors) or have no byte in common, every entry starts at a
multiple of `ALIGN_BYTES`, and nothing but padding up to there is unused. Sizes are Python integers: nothing here is
limited to 32 bits.
"""

import itertools
import math
from collections.abc import Iterator, Mapping

import xxhash
from msgspec import Struct, msgpack

ALIGN_BYTES = 64
"""A cache line; also enough for any dtype and for vector loads."""

MAX_DIMS = 64
"""What torch allows."""

DTYPE_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Bytes per element by torch's name of the dtype."""

Shape = tuple[int, ...]


class ManifestError(ValueError):
    """A manifest contradicts itself; the text says where."""


class TensorEntry(Struct, frozen=True, array_like=True):
    """One name and the bytes it stands for."""

    name: str
    dtype: str
    shape: Shape
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes

    def runs(self, start: Shape, shape: Shape) -> Iterator[tuple[int, int]]:
        """Where the block of this shape that begins at `start` lies: runs of bytes in the order of its elements.

        Raises `ManifestError` if the tensor has no such block.
        """
        if not len(start) == len(shape) == len(self.shape) or any(
            not 0 <= first <= first + size <= whole for first, size, whole in zip(start, shape, self.shape, strict=True)
        ):
            raise ManifestError(f"{self.name}: no block of shape {shape} at {start} in a tensor of shape {self.shape}")
        if not math.prod(shape):
            return
        split = max((dim for dim in range(len(shape)) if shape[dim] != self.shape[dim]), default=0)
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(shape))]
        size = DTYPE_BYTES[self.dtype]
        run_bytes = math.prod(shape[split:]) * size
        for outer in itertools.product(*(range(f, f + n) for f, n in zip(start[:split], shape[:split], strict=True))):
            index = (*outer, *start[split:])
            begin = self.offset + sum(i * stride for i, stride in zip(index, strides, strict=True)) * size
            yield begin, begin + run_bytes


class Manifest(Struct, frozen=True, kw_only=True):
    """The layout of one version."""

    total_bytes: int
    entries: tuple[TensorEntry, ...]

    def blocks(self) -> list[TensorEntry]:
        """One entry for each run of bytes, in order: tied names count once, empty tensors not at all."""
        by_offset = {entry.offset: entry for entry in reversed(self.entries) if entry.num_bytes}
        return [by_offset[offset] for offset in sorted(by_offset)]

    @property
    def payload_bytes(self) -> int:
        """Bytes that carry weights: all but the padding."""
        return sum(entry.num_bytes for entry in self.blocks())

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Start and end of all padding; it must be zero for equal weights to have equal checksums."""
        position = 0
        for block in self.blocks():
            if block.offset > position:
                yield position, block.offset
            position = block.end
        if self.total_bytes > position:
            yield position, self.total_bytes

    def digest(self) -> int:
        """Equal for equal layouts."""
        return int(xxhash.xxh3_64_intdigest(msgpack.encode(self)))

    def validate(self) -> None:
        """Raise `ManifestError` unless the invariant holds; for manifests that came over a socket."""
        names = {entry.name for entry in self.entries}
        if len(names) < len(self.entries):
            raise ManifestError("two entries have the same name")
        for entry in self.entries:
            _validate_entry(entry, self.total_bytes)
        _validate_overlaps(self.entries)
        for start, end in self.gaps():
            if end - start >= ALIGN_BYTES:
                raise ManifestError(f"bytes {start} to {end} belong to nothing")


def layout(tensors: Mapping[str, tuple[Shape, str]], ties: Mapping[str, str] | None = None) -> Manifest:
    """Place tensors of these shapes and dtypes one after the other, in the order given.

    `ties` maps a name to another one whose bytes it shares; both must have the same shape and dtype.
    """
    ties = ties or {}
    placed: dict[str, TensorEntry] = {}
    position = 0
    for name, (shape, dtype) in tensors.items():
        if name not in ties:
            placed[name] = TensorEntry(name, dtype, tuple(shape), position)
            position = _aligned(placed[name].end)
    entries = []
    for name, (shape, dtype) in tensors.items():
        home = placed[ties.get(name, name)]
        if (home.shape, home.dtype) != (tuple(shape), dtype):
            raise ManifestError(f"{name} is tied to {home.name} but has another shape or dtype")
        entries.append(TensorEntry(name, dtype, home.shape, home.offset))
    return Manifest(total_bytes=position, entries=tuple(entries))


def _aligned(position: int) -> int:
    return -(-position // ALIGN_BYTES) * ALIGN_BYTES


def _validate_entry(entry: TensorEntry, total_bytes: int) -> None:
    if not entry.name:
        raise ManifestError("an entry has no name")
    if entry.dtype not in DTYPE_BYTES:
        raise ManifestError(f"{entry.name}: unknown dtype {entry.dtype!r}")
    if len(entry.shape) > MAX_DIMS or any(size < 0 for size in entry.shape):
        raise ManifestError(f"{entry.name}: impossible shape {entry.shape}")
    if entry.offset < 0 or entry.offset % ALIGN_BYTES:
        raise ManifestError(f"{entry.name}: offset {entry.offset} is not a multiple of {ALIGN_BYTES}")
    if entry.end > total_bytes:
        raise ManifestError(f"{entry.name}: ends at byte {entry.end} of {total_bytes}")


def _validate_overlaps(entries: tuple[TensorEntry, ...]) -> None:
    ordered = sorted((entry for entry in entries if entry.num_bytes), key=lambda entry: entry.offset)
    for first, second in itertools.pairwise(ordered):
        tied = (first.offset, first.shape, first.dtype) == (second.offset, second.shape, second.dtype)
        if second.offset < first.end and not tied:
            raise ManifestError(f"{first.name} and {second.name} overlap")
