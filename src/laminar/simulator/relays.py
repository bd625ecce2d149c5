"""Relays of all machines: the shipped store, retention and chain, over emulated links and without bytes.

Invariant: a machine shows a version only after its last byte would have arrived.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from laminar.engines.calibration import LinkConstants
from laminar.engines.protocol import Weights
from laminar.relay.manifest import Manifest, layout
from laminar.relay.slots import SlotMemory
from laminar.relay.store import Reservation, VersionStore
from laminar.scheduling.chain import best_chunk_bytes, broadcast_s
from laminar.schema.errors import PeerLost
from laminar.simulator.lines import Host

HOLDER = 0
"""The store tells connections apart; here a machine is one."""


class _Slot:
    """A slot that holds nothing."""

    def __init__(self, slot_id: int, num_bytes: int) -> None:
        self.slot_id = slot_id
        self.num_bytes = num_bytes

    def view(self) -> memoryview:
        """Nothing to see."""
        return memoryview(b"")

    def checksum(self, num_bytes: int) -> int:
        """Nothing to sum."""
        return num_bytes

    def clear(self, manifest: Manifest) -> None:
        """Nothing to clear."""

    def close(self) -> None:
        """Nothing to close."""


class MachineRelay:
    """The relay of one machine; fulfils `rollout.ports.WeightSource`."""

    def __init__(self, machine: str, manifest: Manifest, keep_versions: int) -> None:
        self.host = Host(f"relay of {machine}")
        self.store = VersionStore(keep_versions)
        self.arrives_s: dict[int, float] = {}
        """When the last byte of each version is here, by the speed of the links."""
        self._manifest = manifest
        self._slot_ids = itertools.count(1)
        self._changed = asyncio.Event()

    async def newest(self) -> int | None:
        """Newest complete version, None before the first."""
        newest: int | None = await self.host.serve(self._newest)
        return newest

    async def wait_newer(self, than: int | None, wait_s: float) -> int | None:
        """Newest complete version as soon as it is newer than `than`, or what there is after `wait_s`."""
        newest: int | None = await self.host.serve(lambda: self._wait_newer(than, wait_s))
        return newest

    @contextlib.asynccontextmanager
    async def lease(self, version: int | None = None) -> AsyncIterator[Weights]:
        """Keep a version while an engine reads it."""
        await self.host.awake()
        if self.host.is_over:
            raise PeerLost(f"{self.host.name} is gone")
        lease = self.store.lease(HOLDER, version)
        try:
            yield Weights(lease.held.version, {})
        finally:
            self.store.release(HOLDER, lease.lease_id)

    def begin(self, version: int) -> Reservation:
        """The first byte of a version comes in."""
        num_bytes = self._manifest.total_bytes
        slot = self.store.find_slot(version, num_bytes)
        if slot is None:
            slot = _fresh_slot(next(self._slot_ids), num_bytes)
            self.store.add_slot(slot)
        return self.store.begin(HOLDER, version, self._manifest, 0, 1, slot)

    def complete(self, reservation: Reservation) -> None:
        """The last byte is here."""
        now_s = asyncio.get_running_loop().time()
        self.store.commit(HOLDER, reservation.reservation_id, 0, self._manifest.payload_bytes)
        self.store.finish(reservation, checksum=reservation.version, now_s=now_s)
        self._changed.set()
        self._changed = asyncio.Event()

    async def _newest(self) -> int | None:
        return self.store.newest()

    async def _wait_newer(self, than: int | None, wait_s: float) -> int | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while (newest := self.store.newest()) is None or (than is not None and newest <= than):
                    await self._changed.wait()
        return self.store.newest()


class LocalRelay:
    """The way of a replica to whatever relay its machine has; `last` is the one that it took weights from."""

    def __init__(self, relays: "Relays", machine: str) -> None:
        self._relays = relays
        self._machine = machine
        self.last: MachineRelay | None = None

    async def newest(self) -> int | None:
        """Newest complete version."""
        return await self._relay().newest()

    async def wait_newer(self, than: int | None, wait_s: float) -> int | None:
        """As `MachineRelay.wait_newer`."""
        return await self._relay().wait_newer(than, wait_s)

    def lease(self, version: int | None = None) -> AbstractAsyncContextManager[Weights]:
        """As `MachineRelay.lease`."""
        self.last = self._relay()
        return self.last.lease(version)

    def _relay(self) -> MachineRelay:
        return self._relays.machines[self._machine]


def _fresh_slot(slot_id: int, num_bytes: int) -> SlotMemory:
    return _Slot(slot_id, num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A version that has left the learner."""

    version: int
    stall_s: float


class Relays:
    """All relays as the trainer and the manager see them; fulfils `WeightSink` and `RelayPort`."""

    def __init__(self, machines: Sequence[str], weight_bytes: float, links: LinkConstants, keep_versions: int) -> None:
        self._manifest = layout({"weights": ((int(weight_bytes),), "uint8")})
        self._links = links
        self._keep_versions = keep_versions
        self._pins: tuple[int, ...] = ()
        self.slowness = 1.0
        """All transfers that begin now take so many times as long."""
        self._relays = {machine: self._new(machine) for machine in machines}
        self._group: asyncio.TaskGroup | None = None

    @property
    def machines(self) -> Mapping[str, MachineRelay]:
        """The relay that each machine has now."""
        return self._relays

    async def run(self) -> None:
        """Deliver what is published; until cancelled."""
        async with asyncio.TaskGroup() as self._group:
            await asyncio.get_running_loop().create_future()

    async def newest(self) -> int | None:
        """Newest version that any relay holds."""
        versions = [relay.store.newest() for relay in self._alive()]
        return max((version for version in versions if version is not None), default=None)

    async def publish(self, version: int, tensors: Mapping[str, Any]) -> float:
        """Copy the weights to the first relay; the others get them down the chain while the learner goes on."""
        written = await self.write(version, tensors)
        await self.complete(written)
        return written.stall_s

    async def write(self, version: int, tensors: Mapping[str, Any]) -> Written:
        """Only the copy."""
        began_s = asyncio.get_running_loop().time()
        await asyncio.sleep(self._transfer_s(self._links.learner_to_relay_bytes_per_s))
        self._alive()
        return Written(version=version, stall_s=asyncio.get_running_loop().time() - began_s)

    async def complete(self, written: Written) -> None:
        """Show it, and send it down the chain."""
        chain = self._alive()
        assert self._group is not None, "publish works while run does"
        for relay, arrival_s in zip(chain, self.arrival_s(len(chain)), strict=True):
            self._group.create_task(self._deliver(relay, written.version, self.slowness * arrival_s))
        await asyncio.sleep(0)  # the master, which has it already, shows it before anybody is told

    async def pin(self, versions: Iterable[int]) -> None:
        """Keep these versions on every machine."""
        self._pins = tuple(versions)
        for relay in self._relays.values():
            relay.store.pin(self._pins)

    async def pull(self) -> None:
        """Bring a version from the relay into the engine of a replica on its machine."""
        await asyncio.sleep(self._transfer_s(self._links.relay_to_engine_bytes_per_s))

    def arrival_s(self, num_relays: int) -> list[float]:
        """Seconds from the master's having a version to each relay's, in chain order."""
        num_bytes, links = self._manifest.total_bytes, self._links
        startup_s = links.chain_startup_s_per_byte * num_bytes
        chunk_bytes = best_chunk_bytes(num_relays, num_bytes, startup_s, links.chain_bytes_per_s)
        return [0.0] + [
            broadcast_s(position, num_bytes, chunk_bytes, startup_s, links.chain_bytes_per_s)
            for position in range(2, num_relays + 1)
        ]

    def kill(self, machine: str) -> None:
        """The relay of a machine is gone with all that it held."""
        self._relays[machine].host.end()

    async def restart(self, machine: str) -> None:
        """A new, empty relay on this machine, which then gets the newest version from another one, if there is one."""
        others = [other.store.newest() for other in self._relays.values() if not other.host.is_over]
        newest = max((version for version in others if version is not None), default=None)
        relay = self._relays[machine] = self._new(machine)
        relay.store.pin(self._pins)
        if newest is not None:
            await self._deliver(relay, newest, self._transfer_s(self._links.chain_bytes_per_s))

    def _transfer_s(self, bytes_per_s: float) -> float:
        return self.slowness * self._manifest.total_bytes / bytes_per_s

    def _alive(self) -> list[MachineRelay]:
        """In chain order; raises `PeerLost` if there is none."""
        alive = [relay for relay in self._relays.values() if not relay.host.is_over]
        if not alive:
            raise PeerLost("no relay is up")
        return alive

    def _new(self, machine: str) -> MachineRelay:
        return MachineRelay(machine, self._manifest, self._keep_versions)

    async def _deliver(self, relay: MachineRelay, version: int, after_s: float) -> None:
        if relay.host.is_over:
            return
        reservation = relay.begin(version)
        # A trainer that goes on from its checkpoint publishes a version that is held already.
        relay.arrives_s.setdefault(version, asyncio.get_running_loop().time() + after_s)
        if after_s:
            await asyncio.sleep(after_s)
        await relay.host.awake()
        if not relay.host.is_over:
            relay.complete(reservation)
