"""trace.json: the run's timeline for ui.perfetto.dev or chrome://tracing, in the trace-event format.

Invariant: events are in order of time, slices of one track do not overlap, and every flow has one start and one end,
each inside a slice. Times are whole microseconds since the run began.

Tracks: the trainer (wait, train, publish), the relay (publishes), one per replica (batches named by version, with pulls
and deaths as instants). Counters: KV use and running trajectories per replica, answers that wait for the trainer,
staleness of the answers that finish.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from laminar.dashboard.timeline import BatchSlice, Timeline, WorkMove, build_timeline
from laminar.telemetry.files import EVENTS, TRACE
from laminar.telemetry.reading import read_facts
from laminar.telemetry.vocabulary import Checkpoint, Evaluation, Fact, Load, Taken, Trajectory

TRAINER, RELAY, REPLICAS, COUNTERS = 1, 2, 3, 4
"""Process ids in the trace; Perfetto shows a process as a group of tracks."""

STALENESS_WINDOW = 64
"""The counter of staleness is a mean over so many answers."""

Entry = dict[str, Any]


def write_trace(run_folder: Path, facts: Sequence[Fact] | None = None) -> Path:
    """Write trace.json from these facts, or those of the folder, in one go."""
    facts = read_facts(run_folder / EVENTS) if facts is None else facts
    temporary = run_folder / f".{TRACE}.{os.getpid()}"
    temporary.write_bytes(msgspec.json.encode(trace(facts)))
    return temporary.replace(run_folder / TRACE)


def trace(facts: Sequence[Fact]) -> dict[str, Any]:
    """The trace as plain values; facts must be in order of time."""
    timeline = build_timeline(facts)
    clock = _Clock(timeline.begin)
    tids = {replica_id: i + 1 for i, replica_id in enumerate(timeline.replicas)}
    entries = [
        *_trainer(timeline, clock),
        *_relay(timeline, clock),
        *_batches(timeline, clock, tids),
        *_lives(timeline, clock, tids),
        *_flows(timeline, clock, tids),
        *_milestones(facts, clock),
        *_counters(facts, clock),
    ]
    entries.sort(key=lambda entry: entry["ts"])
    return {"traceEvents": [*_names(tids), *entries], "displayTimeUnit": "ms"}


class _Clock:
    """Wall seconds to whole microseconds since the beginning."""

    def __init__(self, begin: float) -> None:
        self._begin = begin

    def __call__(self, t: float) -> int:
        return max(0, round((t - self._begin) * 1e6))


def _names(tids: dict[str, int]) -> list[Entry]:
    def name(kind: str, pid: int, tid: int, **args: Any) -> Entry:
        return {"ph": "M", "name": kind, "ts": 0, "pid": pid, "tid": tid, "args": args}

    entries = []
    for pid, text in ((TRAINER, "trainer"), (RELAY, "relay"), (REPLICAS, "replicas"), (COUNTERS, "counters")):
        entries += [name("process_name", pid, 0, name=text), name("process_sort_index", pid, 0, sort_index=pid)]
    entries += [name("thread_name", TRAINER, 1, name="trainer"), name("thread_name", RELAY, 1, name="relay")]
    for replica_id, tid in tids.items():
        entries += [
            name("thread_name", REPLICAS, tid, name=replica_id),
            name("thread_sort_index", REPLICAS, tid, sort_index=tid),
        ]
    return entries


def _slice(name: str, category: str, start: int, end: int, pid: int, tid: int, **args: Any) -> Entry:
    return {
        "ph": "X", "name": name, "cat": category, "ts": start, "dur": max(0, end - start), "pid": pid, "tid": tid,
        "args": args,
    }  # fmt: skip


def _instant(name: str, category: str, ts: int, pid: int, tid: int, **args: Any) -> Entry:
    return {"ph": "i", "s": "t", "name": name, "cat": category, "ts": ts, "pid": pid, "tid": tid, "args": args}


def _counter(name: str, ts: int, **values: float) -> Entry:
    return {"ph": "C", "name": name, "ts": ts, "pid": COUNTERS, "tid": 0, "args": values}


def _trainer(timeline: Timeline, clock: _Clock) -> Iterator[Entry]:
    for part in timeline.trainer:
        name = f"step {part.step}" if part.phase == "train" else part.phase
        yield _slice(name, part.phase, clock(part.start), clock(part.end), TRAINER, 1, step=part.step)


def _relay(timeline: Timeline, clock: _Clock) -> Iterator[Entry]:
    last_end = 0
    for published in timeline.publishes:
        end = clock(published.t)
        start = max(last_end, clock(published.t - published.stall_s))
        args = {"version": published.version, "stall_s": published.stall_s}
        yield _slice(f"version {published.version}", "publish", min(start, end), end, RELAY, 1, **args)
        last_end = end


def _batches(timeline: Timeline, clock: _Clock, tids: dict[str, int]) -> Iterator[Entry]:
    for batch in timeline.batches:
        name = f"version {batch.version}" if batch.purpose == "training" else f"evaluation, version {batch.version}"
        yield _slice(
            name,
            batch.purpose,
            clock(batch.start),
            clock(batch.end),
            REPLICAS,
            tids[batch.replica_id],
            lease_id=batch.lease_id,
            num_trajectories=batch.num_trajectories,
            outcome=batch.outcome,
        )


def _lives(timeline: Timeline, clock: _Clock, tids: dict[str, int]) -> Iterator[Entry]:
    for pull in timeline.pulls:
        name = f"pulled version {pull.version}{' after a repack' if pull.freed_by_repack else ''}"
        yield _instant(name, "pull", clock(pull.t), REPLICAS, tids[pull.replica_id], seconds=pull.seconds)
    for mark in timeline.marks:
        yield _instant(mark.what, "life", clock(mark.t), REPLICAS, tids[mark.replica_id], reason=mark.reason)


def _flows(timeline: Timeline, clock: _Clock, tids: dict[str, int]) -> Iterator[Entry]:
    """An arrow per move, from the slice that lost the trajectories to the one that took them over."""
    for number, move in enumerate(timeline.moves):
        source = _slice_at(timeline.batches, move.source, move.departed, ends=True)
        target = _slice_at(timeline.batches, move.target, move.arrived, ends=False)
        if source is None or target is None:
            continue
        name = "failover" if move.after_failure else "repack"
        # A flow belongs to the slice around it, and the end of a slice is outside: step back by a microsecond.
        departs = max(clock(source.start), min(clock(move.departed), clock(source.end) - 1))
        arrives = max(departs, clock(target.start), min(clock(move.arrived), clock(target.end) - 1))
        common = {"name": name, "cat": "move", "id": number + 1, "pid": REPLICAS, "args": _move_args(move)}
        yield {"ph": "s", "ts": departs, "tid": tids[move.source], **common}
        yield {"ph": "f", "bp": "e", "ts": arrives, "tid": tids[move.target], **common}


def _move_args(move: WorkMove) -> dict[str, Any]:
    return {"num_trajectories": move.num_trajectories, "version": move.version}


def _slice_at(batches: Iterable[BatchSlice], replica_id: str, t: float, *, ends: bool) -> BatchSlice | None:
    """The last batch of a replica around `t`; with `ends`, one that ended just then counts too."""
    found = None
    for batch in batches:
        if batch.replica_id == replica_id and batch.start <= t and (t <= batch.end if ends else t < batch.end):
            found = batch if not (ends and found is not None and t == found.end) else found
    return found


def _milestones(facts: Sequence[Fact], clock: _Clock) -> Iterator[Entry]:
    for fact in facts:
        match fact:
            case Evaluation():
                text = f"held-out accuracy {fact.accuracy:.3f} at version {fact.version}"
                yield _instant(text, "evaluation", clock(fact.t), TRAINER, 1, num=fact.num)
            case Checkpoint():
                text = f"checkpoint of step {fact.step}"
                yield _instant(text, "checkpoint", clock(fact.t), TRAINER, 1, seconds=fact.seconds, path=fact.path)


def _counters(facts: Sequence[Fact], clock: _Clock) -> Iterator[Entry]:
    for fact in facts:
        if isinstance(fact, Load):
            ts = clock(fact.t)
            yield _counter(f"KV use {fact.replica_id} [%]", ts, used=round(100 * fact.kv_fraction, 1))
            running = fact.num_running + fact.num_acting
            yield _counter(f"trajectories {fact.replica_id}", ts, running=running, waiting=fact.num_waiting)
    for t, level in buffer_levels(facts):
        yield _counter("answers waiting for the trainer", clock(t), answers=level)
    recent: list[int] = []
    for fact in facts:
        if isinstance(fact, Trajectory) and fact.purpose == "training":
            recent = [*recent[-STALENESS_WINDOW + 1 :], fact.staleness]
            yield _counter("staleness", clock(fact.t), mean=round(sum(recent) / len(recent), 3))


def buffer_levels(facts: Iterable[Fact]) -> list[tuple[float, int]]:
    """Training answers that are finished and not yet drawn, after each event that changed their number.

    If a draw does not name its groups, they are taken to be of the size that is the most common.
    """
    finished: Counter[str] = Counter()
    level = 0
    levels: list[tuple[float, int]] = []
    for fact in facts:
        if isinstance(fact, Trajectory) and fact.purpose == "training" and fact.reward is not None:
            finished[fact.group_id] += 1
            level += 1
        elif isinstance(fact, Taken):
            level -= _num_taken(fact, finished)
        else:
            continue
        levels.append((fact.t, max(0, level)))
    return levels


def _num_taken(taken: Taken, finished: Counter[str]) -> int:
    if isinstance(taken.groups, int):
        sizes = Counter(finished.values())
        return taken.groups * (sizes.most_common(1)[0][0] if sizes else 0)
    return sum(finished.pop(group_id, 0) for group_id in taken.groups)
