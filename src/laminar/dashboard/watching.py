"""Follow a run folder and show it: a live view on a terminal, plain lines elsewhere.

Invariant: reads files only. Everything written before `stop` is set is shown before `watch` returns.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TextIO

from laminar.dashboard.plain import PlainLines
from laminar.dashboard.state import RunView, fold
from laminar.telemetry.files import EVENTS
from laminar.telemetry.metrics import MetricsFile
from laminar.telemetry.reading import Tail
from laminar.telemetry.vocabulary import Fact, to_facts

EVERY_S = 0.5
"""Time between two looks; four a second look no smoother and cost twice as much."""


class Screen(Protocol):
    """Where a run is shown."""

    def update(self, view: RunView, facts: Sequence[Fact], now: float) -> None:
        """Fold new events into the view and show what changed."""
        ...

    def close(self) -> None:
        """Leave the last state standing."""
        ...


async def watch(
    run_folder: Path,
    stop: asyncio.Event,
    *,
    out: TextIO | None = None,
    live: bool | None = None,
    since: float = 0.0,
    until_finished: bool = False,
    keep_metrics: bool = False,
    every_s: float = EVERY_S,
    clock: Callable[[], float] = time.time,
) -> RunView:
    """Show the run until `stop` is set, or with `until_finished` until it ends; returns its last state.

    `live`: None means if `out` (standard output) is a terminal. Plain lines are written for events from `since` on,
    so that a resumed run does not repeat its past. `keep_metrics` is for the process that started the run.

    waits for:  time, or `stop`
    ends:       then; also when cancelled
    """
    out = sys.stdout if out is None else out
    screen = _screen(out, out.isatty() if live is None else live, since)
    tail, view = Tail(run_folder / EVENTS), RunView()
    metrics = MetricsFile(run_folder) if keep_metrics else None
    try:
        while True:
            is_last_look = stop.is_set()
            events = tail.read_new()
            screen.update(view, sorted(to_facts(events), key=lambda fact: fact.t), clock())
            if metrics is not None:
                metrics.add(events)
            if is_last_look or (until_finished and view.exit_reason is not None):
                return view
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), every_s)
    finally:
        tail.close()
        screen.close()


class PlainScreen:
    """Plain lines, each written once."""

    def __init__(self, out: TextIO, since: float) -> None:
        self._out = out
        self._since = since
        self._lines = PlainLines()

    def update(self, view: RunView, facts: Sequence[Fact], now: float) -> None:
        texts: list[str] = []
        for fact in facts:
            fold(view, [fact])
            lines = self._lines.lines(view, fact)
            texts += lines if fact.t >= self._since else []
        texts += self._lines.waiting(view, now)
        if texts:
            self._out.write("\n".join(texts) + "\n")
            self._out.flush()

    def close(self) -> None:
        """Nothing is pending."""


class _Live:
    """The live view; drawn when something happened, and once a second so that its clocks go on."""

    def __init__(self, out: TextIO) -> None:
        from laminar.dashboard.live import LiveScreen  # on use: rich

        self._screen = LiveScreen(out)
        self._drawn = 0.0

    def update(self, view: RunView, facts: Sequence[Fact], now: float) -> None:
        fold(view, facts)
        if facts or now - self._drawn >= 1.0:
            self._screen.show(view, now)
            self._drawn = now

    def close(self) -> None:
        self._screen.close()


def _screen(out: TextIO, live: bool, since: float) -> Screen:
    return _Live(out) if live else PlainScreen(out, since)
