import random

import pytest
from test_dashboard_synthetic import GROUP_SIZE, NUM_STEPS, synthetic_events

from laminar.dashboard.state import NOTICES, WINDOW_S, RunView, fold
from laminar.telemetry.vocabulary import (
    Dropped,
    Evaluation,
    Load,
    ReplicaLost,
    ReplicaRetired,
    ReplicaStarted,
    ReplicaSuspect,
    Resumed,
    RunFinished,
    RunStarted,
    ServiceLost,
    ServiceReady,
    Step,
    Trajectory,
    WaitStarted,
    to_facts,
)


def _load(t: float, replica_id: str = "replica-0", incarnation: int = 1, **changes) -> Load:
    values = {
        "phase": "generating",
        "version": 3,
        "lease_id": None,
        "num_running": 5,
        "num_waiting": 2,
        "num_acting": 1,
        "kv_fraction": 0.5,
    }
    return Load(t=t, source=replica_id, replica_id=replica_id, incarnation=incarnation, **(values | changes))


def _started(t: float = 0.0) -> RunStarted:
    return RunStarted(t=t, source="launcher", run_id="r", name="n", num_replicas=2, num_steps=10)


def _life(kind, t: float, incarnation: int, reason: str = "", replica_id: str = "replica-0"):
    return kind(t=t, source="manager", replica_id=replica_id, incarnation=incarnation, reason=reason)


def _step(t: float, step: int, **values) -> Step:
    return Step(t=t, source="trainer", step=step, wait_s=0.1, train_s=0.2, publish_s=0.01, **values)


def _answer(t: float, tokens: int, **values) -> Trajectory:
    fields = {"trajectory_id": "t", "group_id": "g", "version": 0, "staleness": 0, "reward": 1.0} | values
    return Trajectory(t=t, source="data", tokens=tokens, **fields)


def test_the_view_of_a_whole_run_has_the_totals_of_its_events():
    events = synthetic_events()
    view = fold(RunView(), to_facts(events))
    answers = [e for e in events if e["kind"] == "trajectory" and e["purpose"] == "training"]
    assert (view.step, view.version, view.num_steps, view.exit_reason) == (NUM_STEPS, NUM_STEPS, NUM_STEPS, "finished")
    assert view.num_trajectories == view.staleness.total() == len(answers)
    assert view.num_trajectories >= NUM_STEPS * GROUP_SIZE
    assert view.num_repacks == sum(e["kind"] == "repack" for e in events)
    assert view.num_moved == sum(m["num_trajectories"] for e in events if e["kind"] == "repack" for m in e["moves"])
    assert view.num_pulls_after_repack == sum(e["freed_by_repack"] for e in events if e["kind"] == "pulled")
    assert (view.num_losses, view.num_restarts, view.replicas["replica-1"].num_restarts) == (1, 1, 1)
    assert [one.version for one in view.accuracies] == sorted(e["version"] for e in events if e["kind"] == "evaluation")


def test_events_in_pieces_give_the_same_view_as_all_at_once():
    facts = list(to_facts(synthetic_events()))
    pieces, at = RunView(), 0
    while at < len(facts):
        size = random.Random(at).randint(1, 200)
        fold(pieces, facts[at : at + size])
        at += size
    assert pieces == fold(RunView(), facts)


def test_any_order_and_any_gap_gives_a_view():
    facts = list(to_facts(synthetic_events()))
    rng = random.Random(3)
    for _ in range(5):
        rng.shuffle(facts)
        view = fold(RunView(), facts[: len(facts) // 2])
        assert view.tokens_per_s >= 0
        assert view.num_losses <= 1


def test_tokens_per_second_are_those_of_the_last_seconds():
    view = fold(RunView(), [_started(0), _answer(5, 1_000), _answer(10, 500)])
    assert view.tokens_per_s == 150
    fold(view, [_load(100)])
    assert view.tokens_per_s == 0
    fold(view, [_answer(100, 300), _answer(101, 300, purpose="evaluation")])
    assert view.tokens_per_s == 600 / WINDOW_S
    assert view.num_trajectories == 3


def test_a_replica_is_shown_as_it_reported_last_and_is_lost_when_it_is():
    view = fold(RunView(), [_started(), _life(ReplicaStarted, 1, 1)])
    assert view.replicas["replica-0"].state == "starting"
    fold(view, [_load(2, kv_fraction=0.25)])
    replica = view.replicas["replica-0"]
    assert (replica.state, replica.version, replica.kv_fraction, replica.num_running) == ("generating", 3, 0.25, 5)
    fold(view, [_life(ReplicaSuspect, 5, 1, "no heartbeat")])
    assert replica.state == "suspect"
    fold(view, [_load(6)])
    assert replica.state == "generating"
    fold(view, [_life(ReplicaLost, 7, 1, "killed")])
    assert (replica.state, replica.num_running, replica.kv_fraction) == ("lost", 0, 0.0)
    assert view.notices[-1].text == "replica-0 lost: killed"


def test_last_words_of_a_life_that_is_over_change_nothing():
    lost = _life(ReplicaLost, 7, 1)
    view = fold(RunView(), [_started(), _load(2), lost, _load(7.1)])
    assert view.replicas["replica-0"].state == "lost"
    fold(view, [_life(ReplicaStarted, 9, 2), _load(9.5, incarnation=2, version=8), _load(9.6, incarnation=1)])
    assert view.replicas["replica-0"].version == 8
    fold(view, [_life(ReplicaRetired, 10, 2, "fails at every start")])
    assert view.replicas["replica-0"].state == "retired"


@pytest.mark.parametrize("seed", range(6))
def test_a_restart_is_counted_once_in_whatever_order_its_events_are_read(seed: int):
    facts = [_life(ReplicaLost, 7, 1), _life(ReplicaStarted, 8, 2), _load(8.5, incarnation=2)]
    random.Random(seed).shuffle(facts)
    view = fold(RunView(), [_started(), _load(2), *facts])
    assert (view.num_restarts, view.num_losses) == (1, 1)
    assert view.replicas["replica-0"].num_restarts == 1
    assert view.replicas["replica-0"].state == "generating"


def test_services_are_told_when_they_are_lost_and_back_but_not_when_they_first_start():
    view = fold(RunView(), [_started(), ServiceReady(t=1, source="launcher", service="relay")])
    assert not view.notices
    fold(view, [ServiceLost(t=2, source="l", service="relay", reason="signal 9")])
    fold(view, [ServiceReady(t=3, source="l", service="relay")])
    assert [notice.text for notice in view.notices] == ["relay lost: signal 9", "relay is back"]
    assert (view.num_losses, view.num_restarts) == (1, 1)


def test_a_resumed_run_takes_back_what_was_undone():
    accuracy = [Evaluation(t=t, source="data", version=v, accuracy=0.1 * v) for t, v in ((1, 0), (2, 5), (3, 10))]
    view = fold(RunView(), [_started(), *accuracy, _step(4, 11), RunFinished(t=5, source="l", reason="stopped")])
    fold(view, [Resumed(t=100, source="launcher", step=7, run_id="r", name="n", num_replicas=2, num_steps=10)])
    assert (view.step, view.version, view.started, view.exit_reason) == (7, 7, 100, None)
    assert [one.version for one in view.accuracies] == [0, 5]
    assert view.seconds_left is None
    fold(view, [_step(110, 8), _step(114, 9)])
    assert view.seconds_left == 4
    fold(view, [_started(200)])
    assert (view.step, view.accuracies) == (0, [])


def test_memory_stays_bounded():
    facts = [_step(t, t, reward_mean=0.5) for t in range(5_000)]
    facts += [_life(ReplicaLost, t, t) for t in range(500)]
    facts += [_answer(t, 1) for t in range(5_000)]
    view = fold(RunView(), facts)
    assert len(view.rewards) < 1_000
    assert len(view.notices) == NOTICES
    assert len(view.recent_tokens) < 100


def test_waits_and_drops_are_kept_by_what_they_are_for():
    wait = WaitStarted(t=12, source="trainer", wait_id="a", waiter="trainer", what="3 groups", waited_s=1)
    drops = [Dropped(t=1, source="d", trajectory_id=str(i), reason=r) for i, r in enumerate(["too long", "no", "no"])]
    view = fold(RunView(), [_started(), wait, *drops])
    assert [one.what for one in view.waits_of("trainer")] == ["3 groups"]
    assert view.waits_of("data") == []
    assert (view.num_dropped, view.drop_reasons["no"]) == (3, 2)
