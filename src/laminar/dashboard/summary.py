"""The run in some twenty numbers, every one computed from events.jsonl.

Invariant: what could not be measured is None, never 0. Times of a resumed run count only while it was alive.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from laminar.dashboard.state import RunView, fold
from laminar.dashboard.timeline import Timeline, build_timeline, without_downtime
from laminar.telemetry.files import EVENTS, SUMMARY
from laminar.telemetry.metrics import metrics_rows
from laminar.telemetry.reading import read_events
from laminar.telemetry.vocabulary import Evaluation, Fact, Trajectory, to_facts, undone_by

ACCURACY_MARKS = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Held-out accuracies whose time is reported."""


def summarise(run_folder: Path) -> dict[str, Any]:
    """The summary of a live or finished run; of a run without events, one of Nones and zeros."""
    return summary_of(read_events(run_folder / EVENTS))


def write_summary(run_folder: Path, events: Sequence[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Write summary.json from these events, or those of the folder, in one go; returns what it holds."""
    summary = summary_of(read_events(run_folder / EVENTS) if events is None else events)
    temporary = run_folder / f".{SUMMARY}.{os.getpid()}"
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    temporary.replace(run_folder / SUMMARY)
    return summary


def summary_of(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The summary of these events."""
    facts = without_downtime(sorted(to_facts(events), key=lambda fact: fact.t))
    view, timeline = fold(RunView(), facts), build_timeline(facts)
    wall_s = timeline.end - timeline.begin
    answers = [fact for fact in facts if isinstance(fact, Trajectory) and fact.purpose == "training"]
    tokens = sum(fact.tokens for fact in answers)
    curve = accuracy_curve(facts)
    return {
        "name": view.name,
        "run_id": view.run_id,
        "exit_reason": view.exit_reason,
        "heldout_accuracy_start": curve[0].accuracy if curve else None,
        "heldout_accuracy_final": curve[-1].accuracy if curve else None,
        "time_to_accuracy": _times_to(curve, timeline.begin),
        "wall_s": round(wall_s, 3),
        "steps": len(metrics_rows(events)),
        "trajectories": len(answers),
        "tokens": tokens,
        "tokens_per_s": round(tokens / wall_s, 2) if wall_s else None,
        "response_tokens_mean": round(tokens / len(answers), 2) if answers else None,
        "staleness_mean": None if view.staleness_mean is None else round(view.staleness_mean, 4),
        "staleness_max": max(view.staleness, default=None),
        "max_versions_apart": max_versions_apart(timeline),
        "repacks": view.num_repacks,
        "moved_trajectories": sum(move.num_trajectories for move in timeline.moves if not move.after_failure),
        "rescued_trajectories": sum(move.num_trajectories for move in timeline.moves if move.after_failure),
        "pulls": view.num_pulls,
        "pulls_after_repack": view.num_pulls_after_repack,
        "failures": view.num_losses,
        "restarts": view.num_restarts,
        "resumes": max(0, sum(undone_by(fact) is not None for fact in facts) - 1),
        "dropped": view.num_dropped,
        "dropped_reasons": dict(view.drop_reasons.most_common()),
        "events_dropped": view.num_events_dropped,
    }


def accuracy_curve(facts: Iterable[Fact]) -> list[Evaluation]:
    """Evaluations in order of versions, the last one of each; a new start takes back those of undone versions."""
    by_version: dict[int, Evaluation] = {}
    for fact in facts:
        if isinstance(fact, Evaluation):
            by_version[fact.version] = fact
        elif (step := undone_by(fact)) is not None:
            by_version = {version: one for version, one in by_version.items() if version <= step}
    return [by_version[version] for version in sorted(by_version)]


def max_versions_apart(timeline: Timeline) -> int | None:
    """Largest difference of the versions under which two replicas generated at one time; None if nobody did."""
    changes = [(batch.start, 1, batch.version) for batch in timeline.batches if batch.end > batch.start]
    changes += [(batch.end, 0, batch.version) for batch in timeline.batches if batch.end > batch.start]
    current: list[int] = []
    widest: int | None = None
    for _, begins, version in sorted(changes):  # at the same instant, ends come first
        if begins:
            current.append(version)
            widest = max(widest or 0, max(current) - min(current))
        else:
            current.remove(version)
    return widest


def _times_to(curve: Sequence[Evaluation], begin: float) -> dict[str, float | None]:
    """Seconds from the start of the run until an evaluation first reached each mark."""
    times: dict[str, float | None] = {}
    for mark in ACCURACY_MARKS:
        reached = next((one.t for one in curve if one.accuracy >= mark), None)
        times[str(mark)] = None if reached is None else round(reached - begin, 3)
    return times
