from itertools import pairwise

from test_dashboard_synthetic import synthetic_events

from laminar.dashboard.timeline import Timeline, build_timeline, replica_of, without_downtime
from laminar.telemetry.vocabulary import to_facts


def _line(*events: tuple) -> Timeline:
    return build_timeline(to_facts({"t": t, "source": "test", "kind": kind, **fields} for t, kind, fields in events))


def _claimed(t: float, lease_id: str, version: int = 1) -> tuple:
    return t, "claimed", {"lease_id": lease_id, "version": version, "num_trajectories": 8, "purpose": "training"}


def _done(t: float, lease_id: str) -> tuple:
    me = {"replica_id": lease_id.split("/")[0], "incarnation": 1}
    return t, "batch_done", {**me, "lease_id": lease_id, "version": 1, "num_trajectories": 8, "seconds": 1.0}


def _released(t: float, lease_id: str) -> tuple:
    me = {"replica_id": lease_id.split("/")[0], "incarnation": 1}
    return t, "released", {**me, "lease_id": lease_id, "num_trajectories": 3}


def _adopted(t: float, source: str, target: str) -> tuple:
    return t, "adopted", {"from_lease": source, "to_lease": target, "version": 1, "num_trajectories": 3}


def _lost(t: float, replica_id: str) -> tuple:
    return t, "replica_lost", {"replica_id": replica_id, "incarnation": 1, "reason": "killed"}


def _start(t: float, kind: str = "run_started", **fields) -> tuple:
    return t, kind, {"run_id": "r", "name": "n", "num_replicas": 2, "num_steps": 3, **fields}


def test_a_batch_lasts_from_its_claim_to_its_end():
    line = _line(_claimed(1, "replica-1/1/1"), _done(4, "replica-1/1/1"), _claimed(5, "replica-1/1/2"), _start(9))
    spans = [(batch.start, batch.end, batch.outcome) for batch in line.batches]
    assert spans == [(1, 4, "done"), (5, 5, "open")]


def test_a_repack_ends_one_batch_and_adds_to_another():
    a, b = "replica-0/1/1", "replica-1/1/1"
    line = _line(_claimed(1, a), _claimed(2, b), _released(5, a), _done(5.1, a), _adopted(5.2, a, b), _done(9, b))
    assert [(batch.end, batch.outcome, batch.num_trajectories) for batch in line.batches] == [
        (5, "moved", 8),
        (9, "done", 11),
    ]
    (move,) = line.moves
    assert (move.source, move.target, move.departed, move.arrived) == ("replica-0", "replica-1", 5, 5.2)
    assert not move.after_failure


def test_a_death_ends_the_batch_and_an_idle_replica_that_takes_over_begins_one():
    a, b = "replica-0/1/1", "replica-1/1/7"
    line = _line(_claimed(1, a), _lost(4, "replica-0"), _adopted(6, a, b), _done(8, b))
    assert [(batch.lease_id, batch.start, batch.end, batch.outcome) for batch in line.batches] == [
        (a, 1, 4, "lost"),
        (b, 6, 8, "done"),
    ]
    assert line.moves[0].after_failure
    assert (line.moves[0].departed, line.moves[0].arrived) == (4, 6)
    assert [(mark.what, mark.reason) for mark in line.marks] == [("lost", "killed")]


def test_an_adoption_of_nothing_leaves_no_trace():
    nothing = {"from_lease": "replica-0/1/1", "to_lease": "replica-1/1/1", "version": 1, "num_trajectories": 0}
    line = _line((1, "adopted", nothing))
    assert (line.moves, line.batches) == ([], [])


def test_what_a_crash_left_open_ends_with_the_last_event_before_the_next_start():
    line = _line(_start(0), _claimed(1, "replica-0/1/1"), _lost(3, "replica-1"), _start(100, "resumed", step=0))
    assert [(batch.end, batch.outcome) for batch in line.batches] == [(3, "open")]


def test_a_batch_whose_end_was_never_told_ends_when_the_next_one_begins():
    line = _line(_claimed(1, "replica-0/1/1"), _claimed(5, "replica-0/1/2"), _done(7, "replica-0/1/2"))
    assert [(batch.start, batch.end) for batch in line.batches] == [(1, 5), (5, 7)]


def test_the_parts_of_a_step_lie_before_its_end_and_never_overlap():
    step = {"wait_s": 2.0, "train_s": 3.0, "publish_s": 1.0}
    line = _line((0, "resumed", {"step": 0}), (10, "step", {"step": 1, **step}), (14, "step", {"step": 2, **step}))
    spans = [(part.phase, part.start, part.end) for part in line.trainer]
    assert spans[:3] == [("wait", 4, 6), ("train", 6, 9), ("publish", 9, 10)]
    assert spans[3:] == [("wait", 10, 10), ("train", 10, 13), ("publish", 13, 14)]


def test_slices_of_one_replica_never_overlap_in_a_whole_run():
    line = build_timeline(to_facts(synthetic_events()))
    assert line.replicas == ["replica-0", "replica-1", "replica-2"]
    for replica_id in line.replicas:
        batches = [batch for batch in line.batches if batch.replica_id == replica_id]
        for one, after in pairwise(batches):
            assert one.start <= one.end <= after.start
    assert line.begin < min(batch.start for batch in line.batches)
    assert max(batch.end for batch in line.batches) <= line.end


def test_time_away_between_two_starts_is_left_out():
    events = [_start(0), _claimed(1, "replica-0/1/1"), _start(100, "resumed", step=0), _claimed(103, "replica-0/2/1")]
    facts = list(to_facts({"t": t, "source": "test", "kind": kind, **fields} for t, kind, fields in events))
    assert [fact.t for fact in without_downtime(facts)] == [0, 1, 1, 4]
    assert without_downtime([]) == []


def test_replicas_come_in_the_order_of_their_numbers():
    line = _line(*(_claimed(1, f"replica-{i}/1/1") for i in (10, 9, 2)))
    assert line.replicas == ["replica-2", "replica-9", "replica-10"]
    assert replica_of("replica-10/2/37") == ("replica-10", 2)
