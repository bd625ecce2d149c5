"""metrics.jsonl: one row per training step, in order, made from `step` events alone.

Invariant: a step has one row. A step that was done again after a resume has the row of the last time.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from laminar.telemetry.files import EVENTS, METRICS
from laminar.telemetry.reading import read_events

Row = dict[str, Any]


def step_row(event: dict[str, Any]) -> Row:
    """The row of one `step` event: the step, the time of its end, then everything that was measured."""
    rest = {key: value for key, value in event.items() if key not in ("t", "source", "kind", "step")}
    return {"step": event["step"], "t": event["t"], **rest}


def metrics_rows(events: Iterable[dict[str, Any]]) -> list[Row]:
    """Rows in order of steps; a new start of the run takes back what came after the step that it begins at."""
    rows: dict[int, Row] = {}
    for event in events:
        match event:
            case {"kind": "step", "step": int(step)}:
                rows[step] = step_row(event)
            case {"kind": "run_started"}:
                rows.clear()
            case {"kind": "resumed", "step": int(resumed)}:
                rows = {step: row for step, row in rows.items() if step <= resumed}
    return [rows[step] for step in sorted(rows)]


def write_metrics(run_folder: Path, events: Iterable[dict[str, Any]] | None = None) -> list[Row]:
    """Write metrics.jsonl as a whole, from these events or those of the folder; it is replaced in one go."""
    rows = metrics_rows(read_events(run_folder / EVENTS) if events is None else events)
    encode = msgspec.json.encode
    temporary = run_folder / f".{METRICS}.{os.getpid()}"
    temporary.write_bytes(b"".join(encode(row) + b"\n" for row in rows))
    temporary.replace(run_folder / METRICS)
    return rows


class MetricsFile:
    """Keeps metrics.jsonl up to date while the run goes on; one per run, in the process that started it.

    Appends a row per step; writes the file as a whole at the first step it sees and after a resume.
    """

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder
        self._last_step: int | None = None

    def add(self, events: Iterable[dict[str, Any]]) -> None:
        """Take in events that were just read from the folder's event file."""
        fresh: list[bytes] = []
        for event in events:
            match event:
                case {"kind": "run_started" | "resumed"}:
                    fresh.clear()
                    self._write_all()
                case {"kind": "step", "step": int(step)}:
                    if self._last_step is None:
                        self._write_all()
                    elif step > self._last_step:  # else it was in the file already when that was written as a whole
                        fresh.append(msgspec.json.encode(step_row(event)) + b"\n")
                        self._last_step = step
        if fresh:
            with (self._folder / METRICS).open("ab") as file:
                file.write(b"".join(fresh))

    def _write_all(self) -> None:
        rows = write_metrics(self._folder)
        self._last_step = rows[-1]["step"] if rows else -1
