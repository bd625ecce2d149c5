import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from test_dashboard_synthetic import NUM_STEPS, synthetic_events, write_events

from laminar.dashboard.trace import REPLICAS, TRAINER, buffer_levels, trace, write_trace
from laminar.telemetry.reading import read_facts
from laminar.telemetry.vocabulary import Taken, Trajectory, to_facts

REQUIRED = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "ts", "dur", "pid", "tid"},
    "i": {"name", "cat", "ts", "pid", "tid", "s"},
    "C": {"name", "ts", "pid", "args"},
    "s": {"name", "cat", "ts", "pid", "tid", "id"},
    "f": {"name", "cat", "ts", "pid", "tid", "id", "bp"},
}


@pytest.fixture(scope="module")
def entries() -> list[dict]:
    return trace(list(to_facts(synthetic_events())))["traceEvents"]


def _tracks(entries: list[dict]) -> dict[tuple[int, int], list[dict]]:
    tracks = defaultdict(list)
    for entry in entries:
        if entry["ph"] == "X":
            tracks[entry["pid"], entry["tid"]].append(entry)
    return tracks


def test_every_entry_has_the_keys_of_its_phase_and_whole_times(entries: list[dict]):
    assert {entry["ph"] for entry in entries} == REQUIRED.keys()
    for entry in entries:
        assert REQUIRED[entry["ph"]] <= entry.keys(), entry
        assert isinstance(entry["ts"], int), entry
        assert entry["ts"] >= 0, entry
        assert isinstance(entry.get("dur", 0), int), entry
        assert entry.get("dur", 0) >= 0, entry


def test_entries_are_in_order_of_time(entries: list[dict]):
    assert all(a["ts"] <= b["ts"] for a, b in pairwise(entries))


def test_slices_of_one_track_do_not_overlap(entries: list[dict]):
    for track in _tracks(entries).values():
        for one, after in pairwise(track):
            assert one["ts"] + one["dur"] <= after["ts"], (one, after)


def test_every_flow_has_one_start_and_one_end_inside_slices(entries: list[dict]):
    flows = defaultdict(list)
    for entry in entries:
        if entry["ph"] in "sf":
            flows[entry["id"]].append(entry)
    assert len(flows) == sum(event["kind"] == "adopted" for event in synthetic_events())
    tracks = _tracks(entries)
    for start, end in flows.values():
        assert (start["ph"], end["ph"], start["name"]) == ("s", "f", end["name"])
        assert start["ts"] <= end["ts"]
        assert start["tid"] != end["tid"]
        for entry in (start, end):
            track = tracks[entry["pid"], entry["tid"]]
            assert any(one["ts"] <= entry["ts"] < one["ts"] + one["dur"] for one in track), entry
    assert {start["name"] for start, _ in flows.values()} == {"repack", "failover"}


def test_tracks_have_names_and_the_trainer_every_step(entries: list[dict]):
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    tracks = _tracks(entries)
    assert tracks.keys() <= names.keys()
    assert [names[REPLICAS, tid] for tid in (1, 2, 3)] == ["replica-0", "replica-1", "replica-2"]
    steps = [entry["name"] for entry in tracks[TRAINER, 1] if entry["cat"] == "train"]
    assert steps == [f"step {i}" for i in range(1, NUM_STEPS + 1)]


def test_counters_are_numbers(entries: list[dict]):
    counters = [entry for entry in entries if entry["ph"] == "C"]
    assert {"staleness", "answers waiting for the trainer", "KV use replica-0 [%]"} <= {c["name"] for c in counters}
    assert all(isinstance(value, int | float) for counter in counters for value in counter["args"].values())


def test_the_buffer_is_what_finished_and_was_not_taken():
    def answer(t: float, group_id: str, reward: float | None = 1.0) -> Trajectory:
        fields = {"trajectory_id": str(t), "version": 0, "staleness": 0, "tokens": 1}
        return Trajectory(t=t, source="d", group_id=group_id, reward=reward, **fields)

    answers = [answer(1, "a"), answer(2, "a"), answer(3, "b"), answer(4, "b"), answer(5, "c", reward=None)]
    by_name = [*answers, Taken(t=6, source="d", step=1, part=0, groups=["a"])]
    assert buffer_levels(by_name) == [(1, 1), (2, 2), (3, 3), (4, 4), (6, 2)]
    by_number = [*answers, Taken(t=6, source="d", step=1, part=0, groups=2)]
    assert buffer_levels(by_number)[-1] == (6, 0)


def test_the_file_is_json_and_a_run_without_events_has_an_empty_trace(tmp_path: Path):
    write_events(tmp_path, synthetic_events())
    assert json.loads(write_trace(tmp_path).read_text())["displayTimeUnit"] == "ms"
    assert len(read_facts(tmp_path / "events.jsonl")) > 3_000
    assert {entry["ph"] for entry in trace([])["traceEvents"]} == {"M"}
