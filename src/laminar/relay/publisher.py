"""The learner's end: weights go from its tensors straight into the relay's memory.

Invariants: every byte is copied once, in a thread, cast on the way; the connection stays open until the thread is done,
so the relay never takes a slot from a writer that still writes.
"""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from laminar.relay.client import ClientRules, Connection, RelayClient
from laminar.relay.manifest import Manifest
from laminar.relay.messages import Abandon, Commit, Done, Newest, Reserve, Reserved, Version
from laminar.relay.parcels import Packer, Parcel, Part, Piece, parcel_of
from laminar.relay.slots import populate
from laminar.relay.tensors import whole
from laminar.relay.threads import run_in_thread
from laminar.schema.errors import PortError

MAX_COPY_THREADS = 8
"""A server's memory takes about ten times what one thread copies; a desktop's is full with two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A version (or a part of one) has left the learner.

    `stall_s` is how long its tensors were looked at and read, `reserve_s` how long the relay took to give memory.
    """

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
        self._part = part or Part()
        self._packer = Packer(dtype, self._part)
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
        return await self._pack_and_write(version, lambda: self._packer.pack(tensors))

    async def write_pieces(
        self, version: int, manifest: Manifest, pieces: Sequence[Piece], content: int | None = None
    ) -> Written:
        """Write the blocks that this rank owns. All ranks give the same manifest, and together all blocks once."""
        return await self._pack_and_write(version, lambda: parcel_of(manifest, pieces), content)

    async def write_parcel(self, version: int, parcel: Parcel, content: int | None = None) -> Written:
        """The same for what is packed already.

        `content` names these weights where they may also reach a relay another way; see `relay.pushing`.
        """
        async with self._writing:
            clock = asyncio.get_running_loop().time
            started_s, manifest = clock(), parcel.plan.manifest
            connection = await self._client.connection()
            request = Reserve(version, manifest, self._part.index, self._part.count, content)
            deadline_s = self._client.rules.by_size_s(manifest.total_bytes)
            reserved = await connection.call(request, Reserved, deadline_s)
            try:
                memory, is_new = connection.maps.map(reserved.memory)
                if is_new:
                    await run_in_thread(populate, memory)
                reserved_s = clock()
                num_bytes = await run_in_thread(parcel.write, whole(memory), self._num_threads)
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

    async def _pack_and_write(self, version: int, pack: Callable[[], Parcel], content: int | None = None) -> Written:
        clock = asyncio.get_running_loop().time
        started_s = clock()
        parcel = pack()
        packed_s = clock() - started_s
        written = await self.write_parcel(version, parcel, content)
        return replace(written, stall_s=packed_s + written.stall_s)

    async def _abandon(self, connection: Connection, reservation_id: int) -> None:
        try:
            await connection.call(Abandon(reservation_id), Done, self._client.rules.call_s)
        except PortError:  # the relay drops it with the connection
            await self._client.close()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
