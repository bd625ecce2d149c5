"""The broadcast chain: its order, its repair, its master and its chunks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.scheduling.chain import (
    MIN_CHUNK_BYTES,
    RelayPlace,
    RelayState,
    best_chunk_bytes,
    broadcast_s,
    elect_master,
    plan_chain,
    repair_chain,
)

places = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=20).map(
    lambda spots: [
        RelayPlace(relay_id=f"relay-{n}", rack=f"rack-{rack}", machine=f"rack-{rack}-machine-{machine}")
        for n, (rack, machine) in enumerate(spots)
    ]
)


@settings(deadline=None)
@given(places, st.data())
def test_a_chain_starts_with_the_master_and_enters_every_rack_and_machine_once(relays, data):
    master = data.draw(st.sampled_from([place.relay_id for place in relays]))
    chain = plan_chain(relays, master)
    assert chain[0] == master
    assert sorted(chain) == sorted(place.relay_id for place in relays)
    place_of = {place.relay_id: place for place in relays}
    for spots in ([place_of[r].rack for r in chain], [place_of[r].machine for r in chain]):
        entered = [spot for spot, before in zip(spots, [None, *spots], strict=False) if spot != before]
        assert len(entered) == len(set(spots))


@settings(deadline=None)
@given(places)
def test_a_chain_does_not_depend_on_the_order_in_which_relays_registered(relays):
    assert plan_chain(relays, "relay-0") == plan_chain(relays[::-1], "relay-0")


def test_a_master_outside_the_chain_is_refused():
    with pytest.raises(ValueError, match="relay-9"):
        plan_chain([RelayPlace(relay_id="relay-0", rack="a", machine="a")], "relay-9")


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), unique=True), st.sets(st.integers(0, 30)))
def test_repair_removes_the_lost_and_moves_nobody(numbers, lost_numbers):
    chain = [f"relay-{n}" for n in numbers]
    lost = {f"relay-{n}" for n in lost_numbers}
    assert list(repair_chain(chain, lost)) == [relay for relay in chain if relay not in lost]


def test_the_newest_version_leads_and_of_equals_the_first_in_the_chain():
    states = [RelayState(relay_id=f"relay-{n}", newest_version=v) for n, v in enumerate([None, 4, 5, 5])]
    elected = elect_master(states, epoch=6)
    assert elected is not None
    assert (elected.relay_id, elected.epoch) == ("relay-2", 7)
    fresh = elect_master([RelayState(relay_id=name, newest_version=None) for name in "ab"], epoch=0)
    assert fresh is not None
    assert fresh.relay_id == "a"
    assert elect_master([], epoch=0) is None


@settings(deadline=None)
@given(
    st.integers(2, 2_000), st.integers(1, 200 * 10**9), st.floats(1e-6, 1e-2), st.floats(1e8, 2e11), st.integers(1, 500)
)
def test_no_other_number_of_chunks_beats_the_best_one(num_nodes, num_bytes, startup_s, bytes_per_s, num_chunks):
    def total_s(chunk_bytes: int) -> float:
        return broadcast_s(num_nodes, num_bytes, chunk_bytes, startup_s, bytes_per_s)

    best = best_chunk_bytes(num_nodes, num_bytes, startup_s, bytes_per_s)
    assert 1 <= best <= num_bytes
    other = -(-num_bytes // num_chunks)
    if other >= MIN_CHUNK_BYTES:
        assert total_s(best) <= total_s(other) * 1.001


def test_the_paper_s_broadcast_of_32b_to_128_machines_is_met_within_7_percent():
    chunk_bytes = best_chunk_bytes(128, 65_500_000_000, startup_s=0.45e-3, bytes_per_s=159e9)
    assert broadcast_s(128, 65_500_000_000, chunk_bytes, 0.45e-3, 159e9) == pytest.approx(0.730, rel=0.07)


def test_free_start_up_makes_chunks_as_small_as_allowed():
    assert best_chunk_bytes(8, 2**30, startup_s=0.0, bytes_per_s=1e9) == MIN_CHUNK_BYTES
