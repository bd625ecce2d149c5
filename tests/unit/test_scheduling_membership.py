"""Who is in the chain, who leads it, and who holds it up."""

from hypothesis import given
from hypothesis import strategies as st

from laminar.scheduling.chain import RelayPlace
from laminar.scheduling.membership import Chain, Member, Progress, demoted, joined, left, slow_relay

MIB = 1 << 20


def member(number: int, rack: int = 0, machine: int | None = None, *, near_learner: bool = False) -> Member:
    spot = f"machine-{number if machine is None else machine}"
    place = RelayPlace(relay_id=f"r{number}", rack=f"rack-{rack}", machine=f"{rack}/{spot}")
    return Member(place=place, host="127.0.0.1", port=1000 + number, near_learner=near_learner)


def ids(chain: Chain) -> list[str]:
    return [m.relay_id for m in chain.members]


def chain_of(*numbers: int) -> Chain:
    chain = Chain()
    for number in numbers:
        chain = joined(chain, member(number), {})
    return chain


step = st.tuples(st.sampled_from(["join", "leave", "demote"]), st.integers(0, 7), st.integers(0, 2))


@given(st.lists(step, max_size=30), st.dictionaries(st.integers(0, 7).map(lambda n: f"r{n}"), st.integers(0, 5)))
def test_epochs_only_grow_and_who_stays_keeps_its_place(history, newest):
    chain = Chain()
    for what, number, rack in history:
        before = chain
        relay_id = f"r{number}"
        if what == "join":
            chain = joined(chain, member(number, rack), newest)
        elif what == "leave":
            chain = left(chain, {relay_id}, newest)
        elif relay_id in ids(chain):
            chain = demoted(chain, relay_id)
        assert len(set(ids(chain))) == len(chain.members)
        if ids(chain) != ids(before):
            assert chain.epoch > before.epoch
        master_lost = what != "demote" and ids(before)[:1] == [relay_id]
        elected = ids(chain)[:2] if master_lost else []
        stayed = [r for r in ids(before) if r != relay_id and r not in elected]
        assert [r for r in ids(chain) if r in stayed] == stayed


@given(st.lists(st.integers(0, 9), unique=True, min_size=2), st.data())
def test_the_master_s_successor_has_the_newest_version_and_of_equals_is_the_next(numbers, data):
    chain = chain_of(*numbers)
    newest = {relay_id: data.draw(st.none() | st.integers(0, 3)) for relay_id in ids(chain)}
    after = left(chain, {ids(chain)[0]}, newest)
    versions = [-1 if newest[r] is None else newest[r] for r in ids(chain)[1:]]
    assert ids(after)[0] == ids(chain)[1:][versions.index(max(versions))]


def test_neighbours_are_the_relay_before_and_behind():
    chain = chain_of(1, 2, 3)
    assert chain.upstream_of("r1") is None
    assert chain.upstream_of("r9") is None
    assert chain.upstream_of("r3").relay_id == "r2"
    assert chain.downstream_of("r2").relay_id == "r3"
    assert chain.downstream_of("r3") is None
    assert chain.master.relay_id == "r1"


def test_a_late_relay_stands_beside_its_machine_or_rack():
    chain = Chain()
    for new in (
        member(1, rack=0),
        member(2, rack=1),
        member(3, rack=0),
        member(4, rack=1),
        member(5, rack=1, machine=2),
    ):
        chain = joined(chain, new, {})
    assert ids(chain) == ["r1", "r3", "r2", "r5", "r4"]


def test_the_relay_near_the_learner_leads_unless_there_are_weights_already():
    near = member(9, near_learner=True)
    assert ids(joined(chain_of(1, 2), near, {})) == ["r9", "r1", "r2"]
    assert ids(joined(chain_of(1, 2), near, {"r1": 4})) == ["r1", "r2", "r9"]


def test_a_relay_that_alone_has_the_newest_version_leads_when_it_comes_back():
    held = {"r1": 4, "r2": 4}
    assert ids(joined(chain_of(1, 2), member(3), held | {"r3": 5})) == ["r3", "r1", "r2"]
    assert ids(joined(chain_of(1, 2), member(3), held | {"r3": 4})) == ["r1", "r2", "r3"]
    assert ids(joined(chain_of(1, 2), member(3), {"r3": 0})) == ["r3", "r1", "r2"]
    assert ids(joined(Chain(), member(3), {"r3": 5})) == ["r3"]


def test_a_keeper_that_starts_anew_goes_on_from_the_epoch_that_relays_have_seen():
    assert joined(Chain(), member(1), {}, known_epoch=17).epoch == 18


def test_a_relay_that_comes_back_is_in_the_chain_once():
    assert ids(joined(chain_of(1, 2, 3), member(2), {})) == ["r1", "r3", "r2"]


def progress(*numbers: tuple[int | None, int, float]) -> dict[str, Progress]:
    return {
        f"r{at}": Progress(version=version, num_bytes=num_bytes, bytes_per_s=rate)
        for at, (version, num_bytes, rate) in enumerate(numbers, start=1)
    }


def test_the_relay_that_is_far_behind_its_predecessor_and_slow_is_the_one_that_holds_up():
    chain = chain_of(1, 2, 3, 4, 5)
    crawl = 1e6
    seen = progress((None, 0, 0), (7, 90 * MIB, 1e9), (7, 5 * MIB, crawl), (7, 5 * MIB, crawl), (7, 4 * MIB, crawl))
    assert slow_relay(chain, seen, 1e9, 0.05, 8 * MIB) == "r3"
    fast = progress((None, 0, 0), (7, 90 * MIB, 1e9), (7, 5 * MIB, 1e9), (7, 5 * MIB, 1e9), (7, 4 * MIB, 1e9))
    assert slow_relay(chain, fast, 1e9, 0.05, 8 * MIB) is None
    assert slow_relay(chain_of(1, 2, 3), seen, 1e9, 0.05, 8 * MIB) is None, "the last holds up nobody"
    idle = progress((None, 0, 0), (None, 0, 0), (None, 0, 0), (None, 0, 0), (None, 0, 0))
    assert slow_relay(chain, idle, 1e9, 0.05, 8 * MIB) is None
    done = progress((None, 0, 0), (7, 5 * MIB, crawl), (7, 5 * MIB, crawl))
    assert slow_relay(chain, done, 1e9, 0.05, 8 * MIB) == "r2", "its predecessor has all of it"


def test_a_demoted_relay_is_last_and_everybody_hears_of_it():
    chain = chain_of(1, 2, 3)
    after = demoted(chain, "r2")
    assert ids(after) == ["r1", "r3", "r2"]
    assert after.epoch == chain.epoch + 1
