"""Everything that is made of a run's events after it ended, in one go: metrics, summary, trace, pictures."""

from pathlib import Path
from typing import Any

from laminar.dashboard.summary import write_summary
from laminar.dashboard.trace import write_trace
from laminar.telemetry.files import EVENTS
from laminar.telemetry.metrics import write_metrics
from laminar.telemetry.reading import read_events
from laminar.telemetry.vocabulary import to_facts


def write_report(run_folder: Path, *, plots: bool = True) -> dict[str, Any]:
    """Write metrics.jsonl, summary.json, trace.json and plots/; returns the summary. May be repeated at any time."""
    events = read_events(run_folder / EVENTS)
    facts = sorted(to_facts(events), key=lambda fact: fact.t)
    write_metrics(run_folder, events)
    summary = write_summary(run_folder, events)
    write_trace(run_folder, facts)
    if plots:
        from laminar.dashboard.plots import write_plots  # on use: matplotlib

        write_plots(run_folder, facts)
    return summary
