"""What a relay holds: complete versions, versions on their way in, who uses which, and the slots they lie in.

Invariants:
- A version is seen only after all its parts were committed and its checksum taken.
- A slot is written only between `begin` and the last `commit`, and never while anybody leases what lies in it.
- A slot whose writer vanished is never used again: that process, or a child of it, might still write. Its memory goes
  when the last map of it does. What this process itself was writing is withdrawn instead, and its slot used again.
- A slot that a thread of this process reads (`use`) is not written either.

Which versions go is decided in `scheduling.retention`, when their memory is needed: a version that nobody needs any
more can still be leased until the next one comes in. Nothing here waits, and nothing here is slow.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from laminar.relay.manifest import Manifest
from laminar.relay.messages import RelayStatus, VersionStatus
from laminar.relay.slots import SlotMemory
from laminar.scheduling.retention import Slot, SlotState, UseSlot, slot_for_new_version, versions_to_evict
from laminar.schema.errors import Fenced, RunFailed, WeightsUnavailable


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A complete version."""

    version: int
    manifest: Manifest
    checksum: int
    slot: SlotMemory
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A complete version in the hands of a reader."""

    lease_id: int
    holder: int
    held: Held


@dataclass(slots=True, kw_only=True, eq=False)
class Reservation:
    """A version on its way in: who writes which part, and how many bytes each committed part had."""

    reservation_id: int
    version: int
    manifest: Manifest
    num_parts: int
    slot: SlotMemory
    content: int | None = None
    writers: dict[int, int] = field(default_factory=dict)
    committed: dict[int, int] = field(default_factory=dict)

    @property
    def is_written(self) -> bool:
        return len(self.committed) == self.num_parts

    def can_join(self, manifest: Manifest, part: int, num_parts: int) -> bool:
        """Whether this writer fills in what is missing; otherwise it begins anew."""
        return (
            not self.is_written
            and part not in self.writers
            and num_parts == self.num_parts
            and manifest == self.manifest
        )


class VersionStore:
    """`holder` is a number that stands for one connection; everything it holds goes with `drop_holder`."""

    def __init__(self, keep_versions: int) -> None:
        self._keep_versions = keep_versions
        self._held: dict[int, Held] = {}
        self._leaving: list[Held] = []
        self._leases: dict[int, Lease] = {}
        self._incoming: dict[int, Reservation] = {}
        self._pins: frozenset[int] = frozenset()
        self._slots: dict[int, SlotMemory] = {}
        self._free: list[SlotMemory] = []
        self._layouts: dict[int, int] = {}
        self._users: Counter[int] = Counter()
        self._tainted: set[int] = set()
        self._last_id = 0

    # ---- readers

    def newest(self) -> int | None:
        """Newest complete version."""
        return max(self._held, default=None)

    def lease(self, holder: int, version: int | None) -> Lease:
        """Keep a version (None: the newest) as it is until the lease is released."""
        chosen = self.newest() if version is None else version
        if chosen is None:
            raise WeightsUnavailable("the relay holds no weights yet")
        if chosen not in self._held:
            raise WeightsUnavailable(f"the relay does not hold version {chosen}; it has {sorted(self._held)}")
        lease = Lease(lease_id=self._new_id(), holder=holder, held=self._held[chosen])
        self._leases[lease.lease_id] = lease
        return lease

    def release(self, holder: int, lease_id: int) -> None:
        """The reader is done."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.holder != holder:
            raise Fenced(f"lease {lease_id} is not held")
        del self._leases[lease_id]
        self._tidy()

    # ---- writers

    def join(self, holder: int, version: int, manifest: Manifest, part: int, num_parts: int) -> Reservation | None:
        """The reservation that other parts of this version are being written to; None: `begin` one.

        A writer that does not fit in starts the version anew: the last one wins, its forerunners are fenced.
        """
        if part >= num_parts:
            raise RunFailed(f"part {part} of {num_parts} parts of version {version} cannot be")
        for reservation in self._incoming_of(version):
            if reservation.can_join(manifest, part, num_parts):
                reservation.writers[part] = holder
                return reservation
        for reservation in self._incoming_of(version):
            if not reservation.is_written:
                self.abandon(reservation.reservation_id)
        return None

    def begin(
        self, holder: int, version: int, manifest: Manifest, part: int, num_parts: int, slot: SlotMemory
    ) -> Reservation:
        """Give a free slot to a new version."""
        self._free.remove(slot)
        if self._layouts.get(slot.slot_id) != manifest.digest():
            slot.clear(manifest)
            self._layouts[slot.slot_id] = manifest.digest()
        reservation = Reservation(
            reservation_id=self._new_id(),
            version=version,
            manifest=manifest,
            num_parts=num_parts,
            slot=slot,
            writers={part: holder},
        )
        self._incoming[reservation.reservation_id] = reservation
        return reservation

    def commit(self, holder: int, reservation_id: int, part: int, num_bytes: int) -> Reservation | None:
        """A part is written; its writer writes no more. Returns the reservation if this was the last part."""
        reservation = self._incoming.get(reservation_id)
        if reservation is None or reservation.writers.get(part) != holder:
            raise Fenced("this version was begun anew by another writer, or a writer of another part of it was lost")
        if part in reservation.committed:
            return None
        reservation.committed[part] = num_bytes
        if not reservation.is_written:
            return None
        self._check_coverage(reservation)
        return reservation

    def finish(self, reservation: Reservation, checksum: int, now_s: float) -> None:
        """Make a written version visible. Raises `RunFailed` if it is held already, with other weights."""
        del self._incoming[reservation.reservation_id]
        before = self._held.get(reservation.version)
        if before is None:
            version = reservation.version
            self._held[version] = Held(version, reservation.manifest, checksum, reservation.slot, now_s)
            self._tidy()
            return
        self._free.append(reservation.slot)
        self._tidy()
        if (before.checksum, before.manifest) != (checksum, reservation.manifest):
            raise RunFailed(
                f"version {reservation.version} is held already, with other weights: versions never change; "
                "a learner that goes back must rewind the relay first"
            )

    def abandon(self, reservation_id: int) -> None:
        """Drop a version on its way in, and its slot with it."""
        reservation = self._incoming.pop(reservation_id, None)
        if reservation is not None:
            self._retire(reservation.slot)

    def withdraw(self, reservation: Reservation) -> None:
        """Drop a version on its way in whose only writer is a thread of this process, which writes no more."""
        if self._incoming.pop(reservation.reservation_id, None) is not None:
            self._leaving.append(Held(reservation.version, reservation.manifest, 0, reservation.slot, 0.0))
            self._tidy()

    def is_writing(self, holder: int, reservation_id: int) -> bool:
        """Whether parts of this reservation are missing and this holder is one of its writers."""
        reservation = self._incoming.get(reservation_id)
        return reservation is not None and not reservation.is_written and holder in reservation.writers.values()

    # ---- both

    def drop_holder(self, holder: int) -> list[int]:
        """A connection is gone: free its leases, drop what it was writing; returns the reservations dropped."""
        for lease_id in [lease_id for lease_id, lease in self._leases.items() if lease.holder == holder]:
            del self._leases[lease_id]
        torn = [
            reservation.reservation_id
            for reservation in self._incoming.values()
            if any(w == holder and part not in reservation.committed for part, w in reservation.writers.items())
        ]
        for reservation_id in torn:
            self.abandon(reservation_id)
        self._tidy()
        return torn

    def pin(self, versions: Iterable[int]) -> None:
        """Keep these whatever their age; replaces the previous pins."""
        self._pins = frozenset(versions)
        self._tidy()

    def rewind(self, version: int) -> None:
        """Forget all versions after this one: the learner will make them again, and differently."""
        for newer in [held for held in self._held.values() if held.version > version]:
            self._drop(newer)
        for reservation in [r for r in self._incoming.values() if r.version > version]:
            self.abandon(reservation.reservation_id)
        self._tidy()

    # ---- slots

    def use(self, slot: SlotMemory) -> None:
        """A thread of this process reads the slot: keep what lies in it, also when its version goes."""
        self._users[slot.slot_id] += 1

    def unuse(self, slot: SlotMemory) -> None:
        """It reads the slot no more."""
        self._users[slot.slot_id] -= 1
        if not self._users[slot.slot_id]:
            del self._users[slot.slot_id]
        self._tidy()

    def taint(self, slot: SlotMemory) -> None:
        """Never give this slot to another version."""
        self._tainted.add(slot.slot_id)

    def held(self, version: int) -> Held | None:
        """A complete version."""
        return self._held.get(version)

    def places(self) -> dict[int, SlotMemory]:
        """Where each complete version lies."""
        return {version: held.slot for version, held in self._held.items()}

    def add_slot(self, slot: SlotMemory) -> None:
        """A new slot, free."""
        self._slots[slot.slot_id] = slot
        self._free.append(slot)

    def find_slot(self, version: int, num_bytes: int, *, yield_pins: bool = False) -> SlotMemory | None:
        """A free slot for a version, which may cost an old version its place; None: one more slot is needed.

        With `yield_pins` a version that only pins keep is given up too.
        """
        choice = self._choose_slot(version, num_bytes, () if yield_pins else self._pins)
        if choice is None:
            return None
        if choice.evicted is not None:
            self._drop(self._held[choice.evicted])
            self._tidy()
        if choice.slot_id not in self._slots:  # it was tainted
            return self.find_slot(version, num_bytes, yield_pins=yield_pins)
        return self._slots[choice.slot_id]

    def wants_slot(self, num_bytes: int) -> bool:
        """Whether the next version would find no slot, or fewer are there than a steady run needs."""
        num_fitting = sum(slot.num_bytes >= num_bytes for slot in self._slots.values())
        next_version = (self.newest() or 0) + 1
        return num_fitting <= self._keep_versions or self._choose_slot(next_version, num_bytes, self._pins) is None

    def close_small_slots(self, num_bytes: int) -> None:
        """Give back the memory of free slots that are too small for what comes now."""
        for slot in [slot for slot in self._free if slot.num_bytes < num_bytes]:
            self._free.remove(slot)
            self._retire(slot)

    def live_slots(self) -> tuple[int, ...]:
        """Slots that may be handed out again."""
        return tuple(self._slots)

    # ---- looking

    def status(self, now_s: float, num_peers: int) -> RelayStatus:
        """What is held now; versions oldest first."""
        versions = tuple(
            VersionStatus(
                version=held.version,
                num_bytes=held.manifest.total_bytes,
                age_s=now_s - held.since_s,
                num_leases=self._num_leases(held),
                pinned=held.version in self._pins,
            )
            for _, held in sorted(self._held.items())
        )
        return RelayStatus(
            newest=self.newest(),
            versions=versions,
            incoming=tuple(sorted(reservation.version for reservation in self._incoming.values())),
            pinned=tuple(sorted(self._pins)),
            num_slots=len(self._slots),
            num_free_slots=len(self._free),
            slot_bytes=sum(slot.num_bytes for slot in self._slots.values()),
            num_peers=num_peers,
        )

    def reservation_ids(self) -> frozenset[int]:
        """Reservations that were not dropped."""
        return frozenset(self._incoming)

    def close(self) -> None:
        """Let go of all memory."""
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()
        self._free.clear()

    def _choose_slot(self, version: int, num_bytes: int, pins: Iterable[int]) -> UseSlot | None:
        choice = slot_for_new_version(
            version,
            num_bytes,
            [slot for slot in self._slot_states() if slot.version != version],
            in_use=self._in_use(),
            pinned=frozenset(pins),
            keep_newest=self._keep_versions,
        )
        return choice if isinstance(choice, UseSlot) else None

    def _slot_states(self) -> list[Slot]:
        """The slots as retention sees them. What has left but is still leased counts as being filled: hands off."""
        complete = {held.slot.slot_id: held.version for held in self._held.values()}
        busy = {held.slot.slot_id: held.version for held in self._leaving}
        busy |= {reservation.slot.slot_id: reservation.version for reservation in self._incoming.values()}
        states = []
        for slot_id, slot in self._slots.items():
            version = complete.get(slot_id, busy.get(slot_id))
            state: SlotState = "complete" if slot_id in complete else "filling" if slot_id in busy else "free"
            states.append(Slot(slot_id=slot_id, capacity_bytes=slot.num_bytes, state=state, version=version))
        return states

    def _in_use(self) -> frozenset[int]:
        used = (held.version for held in self._held.values() if held.slot.slot_id in self._users)
        return frozenset(lease.held.version for lease in self._leases.values()) | frozenset(used)

    def _tidy(self) -> None:
        """Free the slots of what has left and is leased no more; close all but one spare slot beyond a steady run's."""
        idle = [h for h in self._leaving if not self._num_leases(h) and h.slot.slot_id not in self._users]
        for held in idle:
            self._leaving.remove(held)
            if held.slot.slot_id in self._tainted:
                self._tainted.discard(held.slot.slot_id)
                self._retire(held.slot)
            else:
                self._free.append(held.slot)
        unneeded = list(versions_to_evict(self._held, self._in_use(), self._pins, self._keep_versions))
        while len(self._slots) > self._keep_versions + 1 and len(self._free) + len(unneeded) > 1:
            if not self._free:
                held = self._held.pop(unneeded.pop(0))
                self._free.append(held.slot)
            self._retire(self._free.pop(0))

    def _drop(self, held: Held) -> None:
        del self._held[held.version]
        self._leaving.append(held)

    def _retire(self, slot: SlotMemory) -> None:
        del self._slots[slot.slot_id]
        self._layouts.pop(slot.slot_id, None)
        slot.close()

    def _num_leases(self, held: Held) -> int:
        return sum(lease.held is held for lease in self._leases.values())

    def _incoming_of(self, version: int) -> list[Reservation]:
        return [reservation for reservation in self._incoming.values() if reservation.version == version]

    def _check_coverage(self, reservation: Reservation) -> None:
        written, due = sum(reservation.committed.values()), reservation.manifest.payload_bytes
        if written != due:
            self.abandon(reservation.reservation_id)
            raise RunFailed(f"the parts of version {reservation.version} cover {written} of {due} bytes")

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id
