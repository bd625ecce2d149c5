"""Whatever happens in whatever order, the store keeps what it must and changes nothing that is being read."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.relay.manifest import Manifest, layout
from laminar.relay.slots import PrivateSlot
from laminar.relay.store import Lease, Reservation, VersionStore
from laminar.schema.errors import Fenced, RunFailed, WeightsUnavailable

MANIFEST = layout({"w": ((16,), "uint8")})
OTHER = layout({"w": ((8,), "uint8")})


class Writers:
    """Writers of a store, each in its own words: `reserve` then `write`."""

    def __init__(self, keep_versions: int) -> None:
        self.store = VersionStore(keep_versions)
        self.slot_ids = itertools.count(1)
        self.num_made = 0

    def reserve(
        self, holder: int, version: int, part: int = 0, num_parts: int = 1, manifest: Manifest = MANIFEST
    ) -> Reservation:
        joined = self.store.join(holder, version, manifest, part, num_parts)
        if joined is not None:
            return joined
        slot = self.store.find_slot(version, manifest.total_bytes)
        if slot is None:
            slot = PrivateSlot(next(self.slot_ids), manifest.total_bytes)
            self.store.add_slot(slot)
            self.num_made += 1
        return self.store.begin(holder, version, manifest, part, num_parts, slot)

    def finish(self, holder: int, reservation: Reservation, tag: int) -> None:
        reservation.slot.memory[:16] = bytes([tag]) * 16  # type: ignore[attr-defined]
        written = self.store.commit(holder, reservation.reservation_id, 0, 16)
        assert written is reservation
        self.store.finish(reservation, tag, 0.0)

    def publish(self, version: int, tag: int | None = None, holder: int = 1) -> None:
        self.finish(holder, self.reserve(holder, version), version % 256 if tag is None else tag)


def content(lease: Lease) -> int:
    (value,) = set(lease.held.slot.memory[:16])  # type: ignore[attr-defined]
    return value


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3))
def test_newest_leased_and_pinned_versions_stay_and_memory_is_bounded(seed: int, keep: int) -> None:
    rng = random.Random(seed)
    writers = Writers(keep)
    store = writers.store
    tags: dict[int, int] = {}
    leases: list[tuple[Lease, int]] = []
    pins: set[int] = set()
    writing: dict[int, Reservation] = {}
    version = 0
    for step in range(60):
        match rng.randrange(8):
            case 0 | 1 | 2:
                version += 1
                tags[version] = step
                writers.publish(version, step)
            case 3 if store.newest() is not None:
                lease = store.lease(rng.randrange(4), rng.choice([None, store.newest()]))
                leases.append((lease, tags[lease.held.version]))
            case 4 if leases:
                lease, _ = leases.pop(rng.randrange(len(leases)))
                store.release(lease.holder, lease.lease_id)
            case 5:
                held = {v.version for v in store.status(0.0, 0).versions}
                pins = set(rng.sample(sorted(held), min(len(held), rng.randrange(3))))
                store.pin(pins)
            case 6:
                holder = rng.randrange(4)
                store.drop_holder(holder)
                leases = [(lease, tag) for lease, tag in leases if lease.holder != holder]
                writing.pop(holder, None)
            case 7:
                holder = rng.randrange(4)
                if holder not in writing:
                    writing[holder] = writers.reserve(holder, 1_000 + holder)
        status = store.status(0.0, 0)
        held = {v.version for v in status.versions}
        assert set(sorted(tags)[-keep:]) <= held
        assert pins <= held
        assert len(status.incoming) == len(writing)
        assert all(content(lease) == tag for lease, tag in leases)
        extra = len({lease.held.version for lease, _ in leases} | pins)
        assert status.num_slots <= keep + 1 + extra + len(writing)


def test_a_steady_run_makes_one_slot_more_than_it_keeps() -> None:
    writers = Writers(2)
    for version in range(50):
        writers.publish(version)
        lease = writers.store.lease(7, None)
        assert content(lease) == version
        writers.store.release(7, lease.lease_id)
    assert writers.num_made == 3


def test_a_version_is_unseen_until_it_is_finished() -> None:
    writers = Writers(2)
    reservation = writers.reserve(1, 5)
    assert writers.store.newest() is None
    with pytest.raises(WeightsUnavailable):
        writers.store.lease(2, 5)
    writers.finish(1, reservation, 5)
    assert writers.store.newest() == 5


def test_the_slot_of_a_writer_that_vanished_is_never_used_again() -> None:
    writers = Writers(1)
    torn = writers.reserve(1, 5)
    assert writers.store.drop_holder(1) == [torn.reservation_id]
    assert torn.slot.slot_id not in writers.store.live_slots()
    assert writers.reserve(2, 5).slot is not torn.slot
    with pytest.raises(Fenced):
        writers.store.commit(1, torn.reservation_id, 0, 16)


def test_a_writer_that_vanishes_after_its_commit_takes_nothing_along() -> None:
    writers = Writers(1)
    reservation = writers.reserve(1, 5)
    assert writers.store.commit(1, reservation.reservation_id, 0, 16) is reservation
    assert writers.store.drop_holder(1) == []
    writers.store.finish(reservation, 5, 0.0)
    assert writers.store.newest() == 5


def test_parts_fill_one_reservation_in_any_order() -> None:
    writers = Writers(1)
    parts = {part: writers.reserve(10 + part, 5, part, 3) for part in (2, 0, 1)}
    assert len({reservation.reservation_id for reservation in parts.values()}) == 1
    assert writers.store.commit(12, parts[2].reservation_id, 2, 6) is None
    assert writers.store.commit(10, parts[0].reservation_id, 0, 5) is None
    assert writers.store.commit(12, parts[2].reservation_id, 2, 6) is None
    assert writers.store.commit(11, parts[1].reservation_id, 1, 5) is parts[0]


def test_parts_that_do_not_cover_the_version_never_become_one() -> None:
    writers = Writers(1)
    first, second = writers.reserve(1, 5, 0, 2), writers.reserve(2, 5, 1, 2)
    writers.store.commit(1, first.reservation_id, 0, 8)
    with pytest.raises(RunFailed, match="cover 15 of 16 bytes"):
        writers.store.commit(2, second.reservation_id, 1, 7)
    assert writers.store.status(0.0, 0).incoming == ()


@pytest.mark.parametrize(
    ("part", "num_parts", "manifest"), [(0, 2, MANIFEST), (1, 3, MANIFEST), (1, 2, OTHER), (0, 1, MANIFEST)]
)
def test_a_writer_that_does_not_fit_in_begins_the_version_anew(part: int, num_parts: int, manifest: Manifest) -> None:
    writers = Writers(1)
    old = writers.reserve(1, 5, 0, 2)
    new = writers.reserve(2, 5, part, num_parts, manifest)
    assert new is not old
    with pytest.raises(Fenced, match="begun anew"):
        writers.store.commit(1, old.reservation_id, 0, 8)


def test_a_part_that_cannot_be_is_refused() -> None:
    with pytest.raises(RunFailed, match="part 2 of 2 parts"):
        Writers(1).reserve(1, 5, 2, 2)


def test_nobody_releases_the_lease_of_another() -> None:
    writers = Writers(1)
    writers.publish(1)
    lease = writers.store.lease(1, None)
    with pytest.raises(Fenced):
        writers.store.release(2, lease.lease_id)
    writers.store.release(1, lease.lease_id)
    with pytest.raises(Fenced):
        writers.store.release(1, lease.lease_id)


def test_pins_yield_before_the_run_does() -> None:
    writers = Writers(1)
    writers.store.pin((1,))
    for version in (1, 2):
        writers.publish(version)
    assert writers.store.find_slot(3, 16) is None
    slot = writers.store.find_slot(3, 16, yield_pins=True)
    assert slot is not None
    assert [v.version for v in writers.store.status(0.0, 0).versions] == [2]


def test_slots_that_are_too_small_make_room() -> None:
    writers = Writers(1)
    for version in range(3):
        writers.publish(version)
    large = layout({"w": ((100_000,), "uint8")})
    for version in (3, 4, 5):
        reservation = writers.reserve(1, version, 0, 1, large)
        written = writers.store.commit(1, reservation.reservation_id, 0, 100_000)
        assert written is not None
        writers.store.finish(written, version, 0.0)
    status = writers.store.status(0.0, 0)
    assert status.num_slots == 2
    assert {v.version for v in status.versions} >= {5}
