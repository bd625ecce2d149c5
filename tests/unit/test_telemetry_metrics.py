from pathlib import Path

import msgspec

from laminar.telemetry.events import EventLog, MemoryEvents
from laminar.telemetry.metrics import MetricsFile, metrics_rows, write_metrics
from laminar.telemetry.reading import Tail


def _rows(folder: Path) -> list[dict]:
    return [msgspec.json.decode(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]


def test_a_row_has_the_step_the_time_and_every_measure(tmp_path: Path):
    with EventLog(tmp_path / "events.jsonl", "trainer", clock=lambda: 7.0) as log:
        log.emit("step", step=1, wait_s=0.5, reward_mean=0.25, my_metric=3)
        log.emit("checkpoint", step=1, path="x", seconds=1)
    assert write_metrics(tmp_path) == [{"step": 1, "t": 7.0, "wait_s": 0.5, "reward_mean": 0.25, "my_metric": 3}]
    assert _rows(tmp_path) == write_metrics(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "metrics.jsonl"]


def test_after_a_resume_the_later_row_counts_and_what_was_not_redone_is_gone():
    events = MemoryEvents(clock=lambda: 0.0)
    for step in (1, 2, 3, 4):
        events.emit("step", step=step, run=1)
    events.emit("resumed", step=2)
    events.emit("step", step=3, run=2)
    assert [(row["step"], row["run"]) for row in metrics_rows(events.events)] == [(1, 1), (2, 1), (3, 2)]


def test_the_file_grows_by_a_row_per_step_and_is_rewritten_after_a_resume(tmp_path: Path):
    metrics, tail = MetricsFile(tmp_path), Tail(tmp_path / "events.jsonl")
    with EventLog(tmp_path / "events.jsonl", "trainer") as log:
        for step in (1, 2, 3):
            log.emit("step", step=step, run=1)
            log.flush()
            metrics.add(tail.read_new())
            assert [row["step"] for row in _rows(tmp_path)] == list(range(1, step + 1))
        log.emit("resumed", step=1)
        log.emit("step", step=2, run=2)
        log.flush()
        metrics.add(tail.read_new())
        log.emit("step", step=3, run=2)
        log.flush()
        metrics.add(tail.read_new())
    tail.close()
    assert [(row["step"], row["run"]) for row in _rows(tmp_path)] == [(1, 1), (2, 2), (3, 2)]


def test_a_second_process_that_follows_the_same_run_does_not_double_rows(tmp_path: Path):
    with EventLog(tmp_path / "events.jsonl", "trainer") as log:
        for step in (1, 2):
            log.emit("step", step=step)
    for _ in range(2):
        tail = Tail(tmp_path / "events.jsonl")
        MetricsFile(tmp_path).add(tail.read_new())
        tail.close()
    assert [row["step"] for row in _rows(tmp_path)] == [1, 2]
