"""Which weight versions stay, and which slot the next one takes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.scheduling.retention import MakeSlot, Slot, UseSlot, slot_for_new_version, versions_to_evict

versions = st.sets(st.integers(0, 15), max_size=8)


@settings(deadline=None)
@given(versions, versions, versions, st.integers(0, 5))
def test_exactly_the_old_versions_that_nobody_needs_go_oldest_first(complete, in_use, pinned, keep_newest):
    evicted = versions_to_evict(complete, in_use, pinned, keep_newest)
    newest = set(sorted(complete)[len(complete) - keep_newest :]) if keep_newest < len(complete) else complete
    assert list(evicted) == sorted(complete - in_use - pinned - newest)


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["free", "filling", "complete"]), max_size=8),
    st.lists(st.sampled_from([50, 100, 200]), min_size=8, max_size=8),
    versions,
    versions,
    st.integers(1, 3),
)
def test_a_new_version_never_takes_the_place_of_one_that_is_needed(states, sizes, in_use, pinned, keep_newest):
    slots = [
        Slot(slot_id=n, capacity_bytes=size, state=state, version=None if state == "free" else n)
        for n, (state, size) in enumerate(zip(states, sizes, strict=False))
    ]
    choice = slot_for_new_version(99, 100, slots, in_use=in_use, pinned=pinned, keep_newest=keep_newest)
    complete = {slot.slot_id for slot in slots if slot.state == "complete"}
    may_go = set(versions_to_evict(complete, in_use, pinned, keep_newest))
    usable = [s for s in slots if s.capacity_bytes >= 100 and (s.state == "free" or s.slot_id in may_go)]
    if isinstance(choice, MakeSlot):
        assert not usable
        assert choice.capacity_bytes == 100
    else:
        slot = slots[choice.slot_id]
        assert slot in usable
        assert choice.evicted == slot.version
        assert slot.state == "free" or not any(s.state == "free" for s in usable)


def test_the_smallest_free_slot_that_fits_is_taken():
    slots = [Slot(slot_id=n, capacity_bytes=size, state="free", version=None) for n, size in enumerate([300, 50, 100])]
    assert slot_for_new_version(1, 80, slots, in_use=(), pinned=(), keep_newest=2) == UseSlot(slot_id=2)


def test_a_version_that_is_there_in_part_is_resumed_where_it_is():
    slots = [
        Slot(slot_id=0, capacity_bytes=100, state="free", version=None),
        Slot(slot_id=1, capacity_bytes=100, state="filling", version=7),
    ]
    choice = slot_for_new_version(7, 100, slots, in_use=(), pinned=(), keep_newest=2)
    assert choice == UseSlot(slot_id=1, resumes=True)


def test_a_relay_settles_at_one_slot_more_than_the_versions_it_keeps():
    slots: list[Slot] = []
    for version in range(10):
        choice = slot_for_new_version(version, 100, slots, in_use=(), pinned=(), keep_newest=2)
        number = len(slots) if isinstance(choice, MakeSlot) else choice.slot_id
        slots[number : number + 1] = [Slot(slot_id=number, capacity_bytes=100, state="complete", version=version)]
    assert len(slots) == 3
