import asyncio
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from laminar.telemetry import events as events_module
from laminar.telemetry.events import EventLog, MemoryEvents, NullEvents
from laminar.telemetry.files import events_of
from laminar.telemetry.reading import Tail, read_events, read_facts
from laminar.telemetry.vocabulary import KINDS, Published, problem


def _write_many(path: Path, source: str, num_events: int) -> None:
    with EventLog(path, source) as log:
        for i in range(num_events):
            log.emit("published", version=i, stall_s=0.1, padding="x" * (i % 700))
            if i % 7 == 0:
                log.flush()


def test_an_event_is_one_line_with_time_source_and_kind_first(tmp_path: Path):
    with EventLog(tmp_path / "events.jsonl", "trainer", clock=lambda: 12.5) as log:
        log.emit("published", version=3, stall_s=0.25)
    text = (tmp_path / "events.jsonl").read_text()
    assert text == '{"t":12.5,"source":"trainer","kind":"published","version":3,"stall_s":0.25}\n'
    assert read_facts(tmp_path / "events.jsonl") == [Published(t=12.5, source="trainer", version=3, stall_s=0.25)]


def test_nothing_is_written_before_a_flush(tmp_path: Path):
    with EventLog(tmp_path / "events.jsonl", "trainer") as log:
        log.emit("resumed", step=1)
        assert read_events(tmp_path / "events.jsonl") == []
        log.flush()
        assert len(read_events(tmp_path / "events.jsonl")) == 1


def test_a_full_buffer_is_written_without_a_flush(tmp_path: Path):
    log = EventLog(tmp_path / "events.jsonl", "trainer")
    for i in range(3_000):
        log.emit("resumed", step=i)
    num_written = len(read_events(tmp_path / "events.jsonl"))
    log.close()
    assert 0 < num_written < 3_000
    assert len(read_events(tmp_path / "events.jsonl")) == 3_000


def test_processes_that_append_together_never_tear_or_mix_lines(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(path, f"replica-{i}", 3_000)) for i in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
        assert writer.exitcode == 0
    lines = path.read_bytes().splitlines()
    found = [msgspec.json.decode(line) for line in lines]
    assert len(found) == 4 * 3_000
    for i in range(4):
        versions = [event["version"] for event in found if event["source"] == f"replica-{i}"]
        assert versions == list(range(3_000))


def test_threads_may_emit_while_another_one_flushes(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    with EventLog(path, "trainer") as log:
        threads = [threading.Thread(target=lambda: [log.emit("resumed", step=i) for i in range(2_000)]) for _ in "abc"]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            log.flush()
        for thread in threads:
            thread.join()
    assert len(read_events(path)) == 6_000


def test_emitting_costs_less_than_ten_microseconds(tmp_path: Path):
    with EventLog(tmp_path / "events.jsonl", "replica-0") as log:
        fields = {"phase": "generating", "version": 3, "lease_id": "replica-0/1/3", "num_running": 31, "num_waiting": 0}
        best_s = min(_time_of(log, fields) for _ in range(20))
    assert best_s < 10e-6


def _time_of(log: EventLog, fields: dict, num: int = 2_000) -> float:
    began_s = time.thread_time()
    for _ in range(num):
        log.emit("load", replica_id="replica-0", incarnation=1, num_acting=0, kv_fraction=0.5, **fields)
    return (time.thread_time() - began_s) / num


def test_numbers_of_other_libraries_are_numbers_and_nan_is_null(tmp_path: Path):
    with EventLog(tmp_path / "events.jsonl", "trainer") as log:
        numbers = {"a": np.float32(0.5), "b": np.float64(0.25), "c": np.int64(3), "d": float("nan")}
        log.emit("step", path=Path("/x"), e={1, 2}, **numbers)
    (event,) = read_events(tmp_path / "events.jsonl")
    assert [event[key] for key in "abcd"] == [0.5, 0.25, 3, None]
    assert event["path"] == "/x"
    assert sorted(event["e"]) == [1, 2]


def test_an_event_that_cannot_be_encoded_is_counted_and_reported(tmp_path: Path):
    endless: list = []
    endless.append(endless)
    with EventLog(tmp_path / "events.jsonl", "trainer") as log:
        log.emit("resumed", step=endless)
        log.emit("resumed", step=2)
        assert log.num_dropped == 1
    kinds = [(event["kind"], event.get("num")) for event in read_events(tmp_path / "events.jsonl")]
    assert kinds == [("events_dropped", 1), ("resumed", None)]


def test_a_full_disk_raises_nothing_and_drops_are_reported_when_it_has_room_again(tmp_path: Path, monkeypatch):
    disk = _SmallDisk()
    monkeypatch.setattr(events_module, "os", disk)
    monkeypatch.setattr(events_module, "MAX_PENDING_BYTES", 100_000)
    path = tmp_path / "events.jsonl"
    with EventLog(path, "trainer") as log:
        disk.room_bytes = 1_000
        for i in range(5_000):
            log.emit("resumed", step=i)
        num_dropped = log.num_dropped
        disk.room_bytes = 1 << 30
        log.emit("resumed", step=5_000)
    found = read_events(path)
    steps = [event["step"] for event in found if event["kind"] == "resumed"]
    reported = sum(event["num"] for event in found if event["kind"] == "events_dropped")
    assert num_dropped > 0
    assert reported == num_dropped
    assert steps == sorted(set(steps))
    assert len(steps) + num_dropped == 5_001


def test_a_line_torn_by_a_full_disk_is_written_again_as_a_whole(tmp_path: Path, monkeypatch):
    disk = _SmallDisk()
    monkeypatch.setattr(events_module, "os", disk)
    path = tmp_path / "events.jsonl"
    with EventLog(path, "trainer") as log, EventLog(path, "data") as other:
        for i in range(20):
            log.emit("resumed", step=i)
        disk.room_bytes = 130
        log.flush()
        disk.room_bytes = 1 << 30
        other.emit("resumed", step=99)
        other.flush()
        log.flush()
        assert log.num_dropped == 0
    steps = {source: [e["step"] for e in read_events(path) if e["source"] == source] for source in ("trainer", "data")}
    assert steps == {"trainer": list(range(20)), "data": [99]}


class _SmallDisk:
    """The `os` functions that an event log uses, on a disk with little room left."""

    O_WRONLY, O_APPEND, O_CREAT, O_CLOEXEC = os.O_WRONLY, os.O_APPEND, os.O_CREAT, os.O_CLOEXEC
    open, close = staticmethod(os.open), staticmethod(os.close)

    def __init__(self) -> None:
        self.room_bytes = 1 << 30

    def write(self, fd: int, data: bytes) -> int:
        if not self.room_bytes:
            raise OSError(28, "No space left on device")
        num_written = os.write(fd, data[: self.room_bytes])
        self.room_bytes -= num_written
        return num_written


async def test_the_flusher_writes_regularly_and_once_more_when_cancelled(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    with EventLog(path, "trainer") as log:
        flusher = asyncio.create_task(log.run_flusher(every_s=0.01))
        log.emit("resumed", step=1)
        await asyncio.sleep(0.05)
        assert len(read_events(path)) == 1
        log.emit("resumed", step=2)
        flusher.cancel()
        with pytest.raises(asyncio.CancelledError):
            await flusher
        assert len(read_events(path)) == 2


def test_events_after_close_are_ignored(tmp_path: Path):
    log = EventLog(tmp_path / "events.jsonl", "trainer")
    log.close()
    log.emit("resumed", step=1)
    log.flush()
    log.close()
    assert read_events(tmp_path / "events.jsonl") == []


def test_memory_events_look_like_those_read_from_a_file(tmp_path: Path):
    memory = MemoryEvents("trainer", clock=lambda: 1.0)
    other = MemoryEvents("data", clock=lambda: 2.0, into=memory.events)
    with EventLog(tmp_path / "events.jsonl", "trainer", clock=lambda: 1.0) as log:
        for events in (memory, log, NullEvents()):
            events.emit("resumed", step=4)
    other.emit("dropped", trajectory_id="t", reason="too long")
    assert memory.of("resumed") == read_events(tmp_path / "events.jsonl")
    assert [event["source"] for event in memory.events] == ["trainer", "data"]


def test_a_torn_last_line_is_left_out_until_it_is_whole(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    assert tail.read_new() == []
    path.write_bytes(b'{"t":1,"kind":"a"}\n{"t":2,"ki')
    assert [event["kind"] for event in tail.read_new()] == ["a"]
    assert read_events(path) == [{"t": 1, "kind": "a"}]
    with path.open("ab") as file:
        file.write(b'nd":"b"}\n')
    assert [event["kind"] for event in tail.read_new()] == ["b"]
    assert tail.read_new() == []
    tail.close()


def test_unreadable_lines_are_skipped_and_a_whole_event_at_their_end_is_kept(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"t":1,"kind":"a"}\n\xff\xfe\n[1]\n{"t":2,"ki{"t":3,"kind":"c"}\n\n{"t":4,"kind":"d"}\n')
    tail = Tail(path)
    assert [event["kind"] for event in tail.read_new()] == ["a", "c", "d"]
    assert tail.num_unreadable == 3
    tail.close()


def test_a_tail_begins_again_when_the_file_is_replaced_by_a_shorter_one(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"t":1,"kind":"a"}\n' * 3)
    tail = Tail(path)
    assert len(tail.read_new()) == 3
    path.write_bytes(b'{"t":9,"kind":"z"}\n')
    assert [event["kind"] for event in tail.read_new()] == ["z"]
    tail.close()


def test_facts_come_in_order_of_time_and_unknown_kinds_are_left_out(tmp_path: Path):
    memory = MemoryEvents(clock=iter([3.0, 1.0, 2.0, 4.0]).__next__)
    memory.emit("resumed", step=3)
    memory.emit("resumed", step=1)
    memory.emit("something_new", x=1)
    memory.emit("resumed")
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in memory.events))
    assert [fact.step for fact in read_facts(path)] == [1, 3]
    assert problem(memory.events[0]) is None
    assert problem(memory.events[2]) == "'something_new' is not in the vocabulary"
    assert "missing required field `step`" in problem(memory.events[3])


def test_no_field_hides_time_source_or_kind():
    for name, kind in KINDS.items():
        fields = [field.name for field in msgspec.structs.fields(kind)]
        assert sorted(set(fields)) == sorted(fields), name
        assert {"t", "source"} < set(fields), name
        assert not {"t", "source", "kind"} & kind.__annotations__.keys(), name
    assert len(KINDS) > 25


def test_telemetry_is_light_to_import():
    code = (
        "import sys, laminar.telemetry.waits, laminar.telemetry.metrics, laminar.telemetry.reading;"
        "print([m for m in ('torch', 'ray', 'asyncio', 'numpy', 'rich', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_the_events_of_all_machines_are_read_in_order_of_time_also_of_those_that_come_later(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "events.jsonl")
    with EventLog(tmp_path / "events.jsonl", "trainer", clock=lambda: 2.0) as log:
        log.emit("published", version=1)
    assert [event["t"] for event in tail.read_new()] == [2.0]
    for t, machine in ((3.0, "node-b"), (1.0, "node-c")):
        with EventLog(tmp_path / events_of(machine), "replica-0", clock=lambda t=t: t) as log:
            log.emit("pulled", replica_id="replica-0", incarnation=1, version=1)
    assert [event["t"] for event in tail.read_new()] == [1.0, 3.0]
    tail.close()
    assert [fact.t for fact in read_facts(tmp_path / "events.jsonl")] == [1.0, 2.0, 3.0]
