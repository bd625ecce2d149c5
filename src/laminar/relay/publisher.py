"""The learner's end: weights go from its tensors straight into the relay's memory.

Invariants: every byte is copied once, in a thread, cast on the way; the connection stays open until the thread is done,
so the relay never takes a slot from a writer that still writes.
"""

import asyncio
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from laminar.relay.client import ClientRules, Connection, RelayClient
from laminar.relay.manifest import Manifest, ManifestError, TensorEntry
from laminar.relay.messages import Abandon, Commit, Done, Newest, Reserve, Reserved, Version
from laminar.relay.slots import populate
from laminar.relay.tensors import copy_all, layout_of, view, whole
from laminar.relay.threads import run_in_thread
from laminar.schema.errors import PortError

MAX_COPY_THREADS = 8
"""A server's memory takes about ten times what one thread copies; a desktop's is full with two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Which of the learner's ranks this is, in the order of their parts of a version."""

    index: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A block of a tensor that this rank owns: it begins at `start` and extends as far as `data`."""

    name: str
    start: tuple[int, ...]
    data: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A version (or a part of one) has left the learner: `stall_s` is how long its tensors were being read."""

    version: int
    stall_s: float
    reserve_s: float
    num_bytes: int
    reservation_id: int
    connection: Connection


class WeightPublisher:
    """Fulfils `trainer.ports.WeightSink`. `dtype` is `keep`, or what floating-point weights are published as.

    With several ranks each has a publisher with its own part, and a version is complete when all have published it.
    """

    def __init__(
        self,
        socket_path: Path,
        secret: bytes,
        dtype: str = "keep",
        *,
        part: Part | None = None,
        num_threads: int | None = None,
        rules: ClientRules | None = None,
    ) -> None:
        self._client = RelayClient(socket_path, secret, rules or ClientRules())
        self._dtype: torch.dtype | None = None if dtype == "keep" else getattr(torch, dtype)
        self._part = part or Part()
        self._num_threads = num_threads or max(1, min(MAX_COPY_THREADS, _num_cores() // 2))
        self._writing = asyncio.Lock()

    async def publish(self, version: int, tensors: Mapping[str, Any]) -> float:
        """Copy the weights out and wait until the version can be seen; returns `Written.stall_s`.

        Idempotent: again with the same weights does nothing, with others raises `RunFailed`. If there are several
        parts, every rank has all tensors and writes its share of them; see `write_pieces` for sharded ones.
        """
        written = await self.write(version, tensors)
        await self.complete(written)
        return written.stall_s

    async def newest(self) -> int | None:
        """Newest complete version that the relay holds; None if it holds none."""
        return (await self._client.call(Newest(), Version)).version

    async def write(self, version: int, tensors: Mapping[str, Tensor]) -> Written:
        """Only the first half of `publish`: when it returns, the learner may change its tensors."""
        manifest = layout_of(tensors, self._dtype)
        mine = share(manifest, self._part)
        pieces = [Piece(name=e.name, start=(0,) * len(e.shape), data=tensors[e.name]) for e in mine]
        return await self.write_pieces(version, manifest, pieces)

    async def write_pieces(
        self, version: int, manifest: Manifest, pieces: Iterable[Piece], content: int | None = None
    ) -> Written:
        """Write the blocks that this rank owns. All ranks give the same manifest, and together all blocks once.

        `content` names these weights where they may also reach a relay another way; see `relay.pushing`.
        """
        async with self._writing:
            clock = asyncio.get_running_loop().time
            started_s = clock()
            connection = await self._client.connection()
            request = Reserve(version, manifest, self._part.index, self._part.count, content)
            deadline_s = self._client.rules.by_size_s(manifest.total_bytes)
            reserved = await connection.call(request, Reserved, deadline_s)
            try:
                memory, is_new = connection.maps.map(reserved.memory)
                if is_new:
                    await run_in_thread(populate, memory)
                reserved_s = clock()
                num_bytes = await run_in_thread(self._copy, whole(memory), manifest, pieces)
            except BaseException:
                await self._abandon(connection, reserved.reservation_id)
                raise
            return Written(
                version=version,
                stall_s=clock() - reserved_s,
                reserve_s=reserved_s - started_s,
                num_bytes=num_bytes,
                reservation_id=reserved.reservation_id,
                connection=connection,
            )

    async def complete(self, written: Written) -> None:
        """The second half: returns when the version can be seen, which takes all its parts."""
        request = Commit(written.reservation_id, self._part.index, written.num_bytes)
        await written.connection.call(request, Done, self._client.rules.by_size_s(written.num_bytes))

    async def close(self) -> None:
        """Close the connection, after what is being written."""
        async with self._writing:
            await self._client.close()

    async def __aenter__(self) -> "WeightPublisher":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    def _copy(self, memory_bytes: Tensor, manifest: Manifest, pieces: Iterable[Piece]) -> int:
        """In a thread. Returns the number of bytes written."""
        entries = {entry.name: entry for entry in manifest.entries}
        pairs = [(_block(memory_bytes, entries, piece), piece.data) for piece in pieces]
        copy_all(pairs, self._num_threads)
        return sum(target.nbytes for target, _ in pairs)

    async def _abandon(self, connection: Connection, reservation_id: int) -> None:
        try:
            await connection.call(Abandon(reservation_id), Done, self._client.rules.call_s)
        except PortError:  # the relay drops it with the connection
            await self._client.close()


def share(manifest: Manifest, part: Part) -> list[TensorEntry]:
    """The tensors that one of several equal ranks writes: runs of neighbours of about the same size."""
    begin, end = (manifest.total_bytes * k // part.count for k in (part.index, part.index + 1))
    return [entry for entry in manifest.blocks() if begin <= entry.offset < end]


def _block(memory_bytes: Tensor, entries: Mapping[str, TensorEntry], piece: Piece) -> Tensor:
    if piece.name not in entries:
        raise ManifestError(f"{piece.name} is not in the manifest")
    block = view(memory_bytes, entries[piece.name])
    if len(piece.start) != block.dim() or piece.data.dim() != block.dim():
        raise ManifestError(f"{piece.name}: a piece must have as many dimensions as the tensor, {block.dim()}")
    if piece.data.shape == block.shape and not any(piece.start):
        return block
    for dim, (start, size) in enumerate(zip(piece.start, piece.data.shape, strict=True)):
        block = block.narrow(dim, start, size)
    return block


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
