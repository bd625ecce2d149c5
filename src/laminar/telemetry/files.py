"""Names of the files in a run folder; everything that a person sees of a run comes from these."""

EVENTS = "events.jsonl"
"""What happened, one event a line, appended by all processes of the run that live on the launcher's machine."""


def events_of(machine: str) -> str:
    """What happened on another machine than the launcher's: processes of one machine only append whole lines."""
    return f"events.{machine}.jsonl"


METRICS = "metrics.jsonl"
"""One line per training step."""
CONFIG = "config.yaml"
"""The resolved configuration."""
SUMMARY = "summary.json"
"""The run in some twenty numbers, computed from the events."""
TRACE = "trace.json"
"""The run's timeline for Perfetto (ui.perfetto.dev) or chrome://tracing."""
PLOTS = "plots"
"""Folder of pictures."""
JOURNAL = "journal.sqlite"
"""Prompts, trajectories and experience, and what became of each: the ledger that `laminar inspect` reads."""
