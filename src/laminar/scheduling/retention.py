"""Which weight versions a relay keeps, and where the next one goes.

Invariants: a version that is mapped by an engine (`in_use`), that the manager wants kept for trajectories under way
(`pinned`), or that is among the `keep_newest` newest complete ones is never given up; slots are reused before new ones
are made, because the first write to fresh shared memory was measured at 1.1 s per GiB and a rewrite at 0.07 s.

A relay thus settles at `keep_newest` + 1 slots: the complete versions and the one that arrives.
"""

from collections.abc import Collection, Sequence
from typing import Literal

from msgspec import Struct

SlotState = Literal["free", "filling", "complete"]


class Slot(Struct, frozen=True, kw_only=True):
    """A pre-faulted piece of shared memory and what it holds; `version` is None exactly if it is free."""

    slot_id: int
    capacity_bytes: int
    state: SlotState
    version: int | None


class UseSlot(Struct, frozen=True, kw_only=True):
    """Write into this slot; `evicted` is the version that it held until now, None if it was free.

    If the slot already holds the version that is to come, `resumes` is set and only missing chunks are needed.
    """

    slot_id: int
    evicted: int | None = None
    resumes: bool = False


class MakeSlot(Struct, frozen=True, kw_only=True):
    """Nothing can be given up: make a slot of this size."""

    capacity_bytes: int


def versions_to_evict(
    complete: Collection[int], in_use: Collection[int], pinned: Collection[int], keep_newest: int
) -> tuple[int, ...]:
    """Complete versions that nobody needs, oldest first."""
    newest_first = sorted(set(complete), reverse=True)
    needed = set(in_use) | set(pinned)
    return tuple(version for version in reversed(newest_first[keep_newest:]) if version not in needed)


def slot_for_new_version(
    version: int,
    num_bytes: int,
    slots: Sequence[Slot],
    *,
    in_use: Collection[int],
    pinned: Collection[int],
    keep_newest: int,
) -> UseSlot | MakeSlot:
    """Where `version` goes: the slot that has it already, the smallest free one that fits, the slot of the oldest
    version that may go, or a new slot."""
    for slot in slots:
        if slot.version == version and slot.capacity_bytes >= num_bytes:
            return UseSlot(slot_id=slot.slot_id, resumes=True)
    fitting = [slot for slot in slots if slot.capacity_bytes >= num_bytes]
    free = [slot for slot in fitting if slot.state == "free"]
    if free:
        return UseSlot(slot_id=min(free, key=lambda slot: (slot.capacity_bytes, slot.slot_id)).slot_id)
    complete = [slot.version for slot in slots if slot.state == "complete" and slot.version is not None]
    slot_of = {slot.version: slot for slot in fitting if slot.state == "complete"}
    for old in versions_to_evict(complete, in_use, pinned, keep_newest):
        if old in slot_of:
            return UseSlot(slot_id=slot_of[old].slot_id, evicted=old)
    return MakeSlot(capacity_bytes=num_bytes)
