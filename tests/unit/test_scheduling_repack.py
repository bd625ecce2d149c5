"""Repack plans against Algorithm 1 written out literally, and the idleness of replicas."""

from time import process_time

from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.scheduling.best_fit import BestFit
from laminar.scheduling.repack import (
    IdleState,
    RepackCandidate,
    RepackRules,
    plan_repack,
    repack_candidates,
    update_idleness,
)
from laminar.schema.fleet import ReplicaLoad

CAPACITY = 1_000


def a_candidate(
    number: int, kv_used: int, num_trajectories: int, version: int = 1, capacity: int = CAPACITY
) -> RepackCandidate:
    return RepackCandidate(
        replica_id=f"replica-{number:05d}",
        version=version,
        lease_id=f"replica-{number:05d}/1/1",
        kv_used_tokens=kv_used,
        kv_capacity_tokens=capacity,
        num_trajectories=num_trajectories,
    )


@st.composite
def fleets(draw, max_size=40, one_size=True):
    loads = draw(
        st.lists(
            st.tuples(
                st.integers(0, CAPACITY),
                st.integers(0, 20),
                st.integers(1, 3),
                st.just(CAPACITY) if one_size else st.sampled_from([500, CAPACITY, 2_000]),
            ),
            max_size=max_size,
        )
    )
    return [a_candidate(n, kv, count, version, capacity) for n, (kv, count, version, capacity) in enumerate(loads)]


def algorithm_1(group: list[RepackCandidate], rules: RepackRules) -> list[tuple[str, str]]:
    """The paper's pseudo code, sums recomputed each time, with the guard against releasing a destination."""
    c_max = rules.max_kv_fill * CAPACITY
    s_set = sorted(
        (r for r in group if r.kv_used_tokens < c_max and 0 < r.num_trajectories < rules.max_running),
        key=lambda r: (r.kv_used_tokens, r.replica_id),
    )
    plan: list[tuple[RepackCandidate, RepackCandidate]] = []
    emptied: list[RepackCandidate] = []

    def c_load(d):
        return d.kv_used_tokens + sum(source.kv_used_tokens for source, target in plan if target is d)

    def n_load(d):
        return d.num_trajectories + sum(source.num_trajectories for source, target in plan if target is d)

    for s in s_set:
        if s in emptied or any(target is s for _, target in plan):
            continue
        d_s = [
            d
            for d in s_set
            if d is not s
            and d not in emptied
            and c_load(d) + s.kv_used_tokens <= c_max
            and n_load(d) + s.num_trajectories <= rules.max_running
        ]
        if d_s:
            plan.append((s, max(d_s, key=c_load)))
            emptied.append(s)
    return [(s.replica_id, d.replica_id) for s, d in plan]


@settings(deadline=None)
@given(fleets(), st.integers(2, 30), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_the_plan_is_that_of_the_guarded_algorithm_1(fleet, max_running, max_kv_fill):
    rules = RepackRules(max_running=max_running, max_kv_fill=max_kv_fill)
    expected = []
    for version in (1, 2, 3):
        expected += algorithm_1([c for c in fleet if c.version == version], rules)
    assert [(m.source, m.destination) for m in plan_repack(fleet, rules).moves] == expected


@settings(deadline=None)
@given(fleets(one_size=False), st.integers(2, 30), st.sampled_from([0.5, 0.99]))
def test_no_plan_overfills_mixes_versions_or_releases_a_destination(fleet, max_running, max_kv_fill):
    plan = plan_repack(fleet, RepackRules(max_running=max_running, max_kv_fill=max_kv_fill))
    by_id = {c.replica_id: c for c in fleet}
    kv_used = {c.replica_id: c.kv_used_tokens for c in fleet}
    count = {c.replica_id: c.num_trajectories for c in fleet}
    for move in plan.moves:
        source = by_id[move.source]
        assert source.version == by_id[move.destination].version == move.version
        assert (move.num_trajectories, move.reprefill_tokens) == (source.num_trajectories, source.kv_used_tokens)
        kv_used[move.destination] += kv_used.pop(move.source)
        count[move.destination] += count.pop(move.source)
        assert kv_used[move.destination] <= max_kv_fill * by_id[move.destination].kv_capacity_tokens
        assert count[move.destination] <= max_running
    assert not set(plan.released) & {m.destination for m in plan.moves}
    assert len(set(plan.released)) == len(plan.moves), "every move releases one replica"
    assert plan.reprefill_tokens == sum(by_id[r].kv_used_tokens for r in plan.released)


@settings(deadline=None)
@given(fleets(max_size=15), st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_the_order_of_the_candidates(fleet, random):
    rules = RepackRules(max_running=16)
    shuffled = list(fleet)
    random.shuffle(shuffled)
    assert plan_repack(shuffled, rules) == plan_repack(fleet, rules)


@settings(deadline=None)
@given(fleets(max_size=15))
def test_after_the_moves_no_replica_without_a_part_in_them_could_still_have_been_released_for_free(fleet):
    rules = RepackRules(max_running=12)
    plan = plan_repack(fleet, rules)
    touched = {m.source for m in plan.moves} | {m.destination for m in plan.moves}
    untouched = [c for c in fleet if c.replica_id not in touched]
    assert plan_repack(untouched, rules).moves == ()


def test_the_example_on_which_the_printed_algorithm_releases_a_destination():
    plan = plan_repack([a_candidate(n, kv, 1) for n, kv in enumerate([100, 450, 500])], RepackRules(max_running=10))
    assert [(m.source, m.destination) for m in plan.moves] == [("replica-00000", "replica-00002")]


def test_empty_and_full_replicas_take_no_part():
    rules = RepackRules(max_running=10)
    assert plan_repack([a_candidate(0, 0, 0), a_candidate(1, 10, 1)], rules).moves == ()
    assert plan_repack([a_candidate(0, 995, 1), a_candidate(1, 0, 1)], rules).moves == ()
    assert plan_repack([a_candidate(0, 10, 10), a_candidate(1, 10, 1)], rules).moves == ()


def test_one_replica_alone_stays_where_it_is():
    assert plan_repack([a_candidate(0, 1, 1)], RepackRules(max_running=10)).moves == ()


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), min_size=100, max_size=300),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 6)), max_size=300),
)
def test_best_fit_finds_what_a_scan_over_all_bins_finds(bins, loads):
    index = BestFit([tokens for tokens, _ in bins], [count for _, count in bins])
    room = dict(enumerate(bins))
    for source, (tokens, count) in enumerate(loads[: len(bins)]):
        if source not in room:
            continue
        fitting = [n for n, (t, c) in room.items() if n != source and t >= tokens and c >= count]
        expected = min(fitting, key=lambda n: (room[n][0], n), default=None)
        assert index.put(source, tokens, count) == expected
        if expected is not None:
            del room[source]
            room[expected] = (room[expected][0] - tokens, room[expected][1] - count)


def test_ten_thousand_replicas_are_planned_in_far_less_than_a_look_takes():
    fleet = [a_candidate(n, n * 7_919 % 700_000, 1 + n * 104_729 % 290, capacity=772_000) for n in range(10_000)]
    began_s = process_time()
    plan = plan_repack(fleet, RepackRules(max_running=295))
    assert process_time() - began_s < 1.0
    assert len(plan.moves) > 1_000


RULES = RepackRules(max_running=295)
STRICT = RepackRules(max_running=295, strict_idleness=True)


def a_load(
    kv_used: int, running: int, *, waiting: int = 0, acting: int = 0, lease: str | None = "r/1/1", incarnation: int = 1
) -> ReplicaLoad:
    return ReplicaLoad(
        replica_id="r",
        incarnation=incarnation,
        phase="generating" if lease else "idle",
        version=3,
        lease_id=lease,
        num_running=running,
        num_waiting=waiting,
        num_acting=acting,
        kv_used_tokens=kv_used,
        kv_capacity_tokens=CAPACITY,
    )


def fold(loads: list[ReplicaLoad], rules: RepackRules) -> list[bool]:
    state: IdleState | None = None
    seen = []
    for load in loads:
        state = update_idleness(state, load, rules)
        seen.append(state.is_idle)
    return seen


def test_a_batch_that_fits_whole_is_not_idle_while_its_kv_use_grows():
    loads = [a_load(100, 64), a_load(200, 64), a_load(300, 62), a_load(380, 60)]
    assert fold(loads, RULES) == [False] * 4


def test_plateau_is_not_idle_and_ramp_down_is():
    loads = [a_load(990, 60, waiting=40), a_load(990, 55, waiting=20), a_load(960, 50), a_load(900, 45)]
    assert fold(loads, RULES) == [False, False, True, True]


def test_growth_in_the_deep_tail_ends_idleness_only_if_strict():
    loads = [a_load(900, 50), a_load(200, 10), a_load(220, 10), a_load(240, 10), a_load(230, 9)]
    assert fold(loads, RULES) == [False, True, True, True, True]
    assert fold(loads, STRICT) == [False, True, False, False, True]


def test_a_dip_because_trajectories_act_is_not_idleness_before_one_has_finished():
    assert fold([a_load(500, 10), a_load(300, 5, acting=5)], RULES) == [False, False]


def test_a_new_batch_and_a_new_life_start_without_idleness():
    tail = [a_load(500, 10), a_load(300, 5)]
    assert fold([*tail, a_load(100, 4, lease="r/1/2")], RULES)[-1] is False
    assert fold([*tail, a_load(100, 4, incarnation=2)], RULES)[-1] is False
    assert fold([*tail, a_load(0, 0, lease=None)], RULES)[-1] is False


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, CAPACITY), st.integers(0, 20), st.integers(0, 3)), min_size=1, max_size=20))
def test_the_latch_holds_until_the_batch_ends_and_strict_implies_latched(looks):
    loads = [a_load(kv, running, waiting=waiting) for kv, running, waiting in looks]
    latched, strict = fold(loads, RULES), fold(loads, STRICT)
    assert latched == sorted(latched), "once idle, always idle"
    assert all(now or not once for now, once in zip(latched, strict, strict=True))


def test_candidates_are_idle_generating_replicas_that_hold_something_and_queue_nothing():
    idle = IdleState(incarnation=1, lease_id="r/1/1", most_trajectories=10, kv_used_tokens=500, is_idle=True)

    def num_candidates(load: ReplicaLoad, state: IdleState = idle) -> int:
        return len(repack_candidates([load], {"r": state}))

    assert num_candidates(a_load(100, 3)) == 1
    assert num_candidates(a_load(100, 3, waiting=1)) == 0
    assert num_candidates(a_load(0, 0)) == 0
    assert num_candidates(a_load(100, 3, lease="r/1/2")) == 0
    assert num_candidates(a_load(100, 3, incarnation=2)) == 0
    assert repack_candidates([a_load(100, 3)], {}) == ()
