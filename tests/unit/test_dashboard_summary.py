from pathlib import Path

import msgspec
from test_dashboard_synthetic import NUM_STEPS, synthetic_events, write_events

from laminar.dashboard.report import write_report
from laminar.dashboard.summary import max_versions_apart, summarise, summary_of, write_summary
from laminar.dashboard.timeline import build_timeline
from laminar.telemetry.vocabulary import to_facts


def _event(t: float, kind: str, **fields) -> dict:
    return {"t": t, "source": "test", "kind": kind, **fields}


def _start(t: float, kind: str = "run_started", **fields) -> dict:
    return _event(t, kind, run_id="r", name="n", num_replicas=2, num_steps=10, **fields)


def _evaluation(t: float, version: int, accuracy: float) -> dict:
    return _event(t, "evaluation", version=version, accuracy=accuracy, num=64)


def _answer(t: float, staleness: int, tokens: int = 100, purpose: str = "training") -> dict:
    fields = {"trajectory_id": f"t{t}", "group_id": "g", "version": 0, "reward": 1.0}
    return _event(t, "trajectory", staleness=staleness, tokens=tokens, purpose=purpose, **fields)


def _claimed(t: float, lease_id: str, version: int) -> dict:
    return _event(t, "claimed", lease_id=lease_id, version=version, num_trajectories=8, purpose="training")


def _done(t: float, lease_id: str, version: int) -> dict:
    fields = {"replica_id": lease_id.split("/")[0], "incarnation": 1, "lease_id": lease_id, "version": version}
    return _event(t, "batch_done", num_trajectories=8, seconds=1, **fields)


def _step(t: float, step: int) -> dict:
    return _event(t, "step", step=step, wait_s=0, train_s=1, publish_s=0)


def _apart(events: list[dict]) -> int | None:
    return max_versions_apart(build_timeline(to_facts(events)))


def test_every_number_is_computed_from_the_events():
    events = [
        _start(100),
        _evaluation(110, 0, 0.1),
        *(_answer(111 + i, staleness=i) for i in range(4)),
        _answer(116, staleness=9, tokens=5_000, purpose="evaluation"),
        _event(117, "dropped", trajectory_id="x", reason="too long"),
        _step(118, 1),
        _evaluation(120, 5, 0.55),
        _evaluation(130, 10, 0.52),
        _event(131, "pulled", replica_id="replica-0", incarnation=1, version=3, seconds=0.1, freed_by_repack=True),
        _event(132, "pulled", replica_id="replica-1", incarnation=1, version=3, seconds=0.1, freed_by_repack=False),
        _claimed(120, "replica-0/1/1", 3),
        _claimed(121, "replica-1/1/1", 3),
        _event(134, "adopted", from_lease="replica-0/1/1", to_lease="replica-1/1/1", version=3, num_trajectories=6),
        _event(133, "repack", version=3, moves=[{"source": "a", "target": "b", "num_trajectories": 7}], num_released=1),
        _event(150, "run_finished", reason="finished"),
    ]
    summary = summary_of(events)
    assert summary["wall_s"] == 50
    assert (summary["heldout_accuracy_start"], summary["heldout_accuracy_final"]) == (0.1, 0.52)
    assert summary["time_to_accuracy"] == {"0.5": 20, "0.6": None, "0.7": None, "0.8": None, "0.9": None}
    assert (summary["trajectories"], summary["tokens"], summary["tokens_per_s"]) == (4, 400, 8)
    assert (summary["staleness_mean"], summary["staleness_max"]) == (1.5, 3)
    assert (summary["repacks"], summary["moved_trajectories"]) == (1, 6)
    assert (summary["pulls"], summary["pulls_after_repack"]) == (2, 1)
    assert (summary["dropped"], summary["dropped_reasons"]) == (1, {"too long": 1})
    assert (summary["steps"], summary["exit_reason"], summary["resumes"]) == (1, "finished", 0)


def test_a_resumed_run_counts_only_the_time_it_was_alive_and_what_was_not_undone():
    events = [
        _start(100),
        _evaluation(105, 0, 0.1),
        *(_step(106 + i, i + 1) for i in range(4)),
        _evaluation(112, 4, 0.7),
        _start(1_000, "resumed", step=2),
        _evaluation(1_008, 4, 0.6),
        _step(1_009, 3),
        _event(1_010, "run_finished", reason="stopped by SIGINT"),
    ]
    summary = summary_of(events)
    assert summary["wall_s"] == 12 + 10
    assert (summary["steps"], summary["resumes"], summary["exit_reason"]) == (3, 1, "stopped by SIGINT")
    assert summary["heldout_accuracy_final"] == 0.6
    assert summary["time_to_accuracy"]["0.6"] == 12 + 8


def test_what_went_on_elsewhere_after_a_failure_is_counted_apart():
    lost = _event(3, "replica_lost", replica_id="replica-0", incarnation=1, reason="killed")
    adopted = {"from_lease": "replica-0/1/1", "to_lease": "replica-1/1/1", "version": 1, "num_trajectories": 5}
    summary = summary_of([_claimed(1, "replica-0/1/1", 1), lost, _event(4, "adopted", **adopted)])
    assert (summary["moved_trajectories"], summary["rescued_trajectories"]) == (0, 5)
    assert (summary["failures"], summary["restarts"]) == (1, 0)


def test_a_run_without_events_has_a_summary_without_numbers(tmp_path: Path):
    summary = summarise(tmp_path)
    assert summary["trajectories"] == 0
    for key in ("heldout_accuracy_start", "tokens_per_s", "staleness_mean", "staleness_max", "max_versions_apart"):
        assert summary[key] is None
    assert summary["exit_reason"] is None


def test_versions_apart_are_those_of_replicas_that_generate_at_one_time():
    first = [_claimed(1, "replica-0/1/1", 3), _done(5, "replica-0/1/1", 3)]
    assert _apart(first) == 0
    assert _apart([*first, _claimed(5, "replica-1/1/1", 9), _done(6, "replica-1/1/1", 9)]) == 0
    assert _apart([first[0], _claimed(4, "replica-1/1/1", 7), first[1], _done(6, "replica-1/1/1", 7)]) == 4
    assert _apart([]) is None


def test_the_file_is_replaced_as_a_whole_and_holds_what_was_returned(tmp_path: Path):
    write_events(tmp_path, synthetic_events())
    summary = write_summary(tmp_path)
    assert msgspec.json.decode((tmp_path / "summary.json").read_bytes()) == summary
    assert write_summary(tmp_path) == summary
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "summary.json"]
    assert summary["steps"] == NUM_STEPS
    assert summary["max_versions_apart"] >= 2
    assert summary["restarts"] == summary["failures"] == 1


def test_a_report_is_everything_but_the_pictures_if_so_asked(tmp_path: Path):
    write_events(tmp_path, synthetic_events())
    write_report(tmp_path, plots=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "events.jsonl",
        "metrics.jsonl",
        "summary.json",
        "trace.json",
    ]
