"""Relay, publisher and reader in one object, for one process: no sockets, no threads, no other memory than its own.

Invariant: the same store, layout and rules as the relay's, so what holds here holds there; time comes from the event
loop only, so it runs on a virtual clock.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from laminar.engines.protocol import Weights
from laminar.relay.messages import RelayStatus
from laminar.relay.parcels import Packer
from laminar.relay.slots import PrivateSlot
from laminar.relay.store import Reservation, VersionStore
from laminar.relay.tensors import MappedTensors, Selection, whole

HOLDER = 0
"""There is one process, which holds everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """A version that has left the learner and is not seen yet."""

    stall_s: float
    num_bytes: int
    reservation: Reservation


class MemoryLink:
    """Fulfils `trainer.ports.WeightSink`, `rollout.ports.WeightSource` and `manager.ports.RelayPort`."""

    def __init__(self, dtype: str = "keep", *, keep_versions: int = 2) -> None:
        self._packer = Packer(dtype)
        self._store = VersionStore(keep_versions)
        self._slot_ids = itertools.count(1)
        self._changed = asyncio.Event()

    async def publish(self, version: int, tensors: Mapping[str, Any]) -> float:
        """Copy the weights; returns the seconds that it took. Idempotent per version."""
        written = await self.write(version, tensors)
        await self.complete(written)
        return written.stall_s

    async def write(self, version: int, tensors: Mapping[str, Any]) -> Filled:
        """Only the first half: nobody sees the version yet."""
        started_s = asyncio.get_running_loop().time()
        parcel = self._packer.pack(tensors)
        manifest = parcel.plan.manifest
        self._store.join(HOLDER, version, manifest, 0, 1)  # drops what another write of this version has left
        slot = self._store.find_slot(version, manifest.total_bytes)
        if slot is None:
            slot = PrivateSlot(next(self._slot_ids), manifest.total_bytes)
            self._store.add_slot(slot)
        reservation = self._store.begin(HOLDER, version, manifest, 0, 1, slot)
        try:
            num_bytes = parcel.write(whole(cast(PrivateSlot, slot).memory))
        except BaseException:
            self._store.abandon(reservation.reservation_id)
            raise
        stall_s = asyncio.get_running_loop().time() - started_s
        return Filled(stall_s=stall_s, num_bytes=num_bytes, reservation=reservation)

    async def complete(self, filled: Filled) -> None:
        """The second half: show it."""
        reservation = filled.reservation
        self._store.commit(HOLDER, reservation.reservation_id, 0, filled.num_bytes)
        checksum = reservation.slot.checksum(reservation.manifest.total_bytes)
        self._store.finish(reservation, checksum, asyncio.get_running_loop().time())
        self._announce()

    async def newest(self) -> int | None:
        """Newest version, None before the first publish."""
        return self._store.newest()

    async def wait_newer(self, than: int | None, wait_s: float) -> int | None:
        """Newest version as soon as it is newer than `than`, or what there is after `wait_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while (newest := self._store.newest()) is None or (than is not None and newest <= than):
                    await self._changed.wait()
        return self._store.newest()

    @contextlib.asynccontextmanager
    async def lease(
        self, version: int | None = None, slices: Mapping[str, Selection] | None = None
    ) -> AsyncIterator[Weights]:
        """Show a version (None: the newest one), kept while the context is open."""
        lease = self._store.lease(HOLDER, version)
        held = lease.held
        tensors = MappedTensors(cast(PrivateSlot, held.slot).memory, held.manifest, held.checksum, slices or {})
        try:
            yield Weights(held.version, tensors)
        finally:
            tensors.end()
            self._store.release(HOLDER, lease.lease_id)

    async def pin(self, versions: Iterable[int]) -> None:
        """Keep these versions whatever their age; replaces the previous pins."""
        self._store.pin(versions)

    async def rewind(self, version: int) -> None:
        """Forget all versions after this one."""
        self._store.rewind(version)

    async def status(self) -> RelayStatus:
        """What is held now."""
        return self._store.status(asyncio.get_running_loop().time(), num_peers=0)

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
