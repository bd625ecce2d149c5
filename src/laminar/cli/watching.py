"""`laminar status` and `laminar plot`: look at a run folder."""

import asyncio
import sys
from pathlib import Path

from laminar.schema.errors import UserError
from laminar.telemetry.files import EVENTS


def status(run: Path, *, follow: bool) -> None:
    """Print where a run stands, or keep showing it."""
    _check(run)
    if follow:
        asyncio.run(_follow(run))
        return
    from laminar.dashboard.status import status as status_of

    sys.stdout.write(status_of(run) + "\n")


def plot(run: Path) -> None:
    """Write summary, metrics, trace and plots of a run anew, and say where they are."""
    _check(run)
    report(run)


def report(run: Path) -> None:
    """What is made of the events when a run has ended."""
    from laminar.dashboard.report import write_report

    summary = write_report(run)
    accuracy = [summary.get(f"heldout_accuracy_{when}") for when in ("start", "final")]
    if None not in accuracy:
        sys.stdout.write(f"held-out accuracy {accuracy[0]:.3f} -> {accuracy[1]:.3f}\n")
    sys.stdout.write(f"summary  {run / 'summary.json'}\nplots    {run / 'plots'}\ntrace    {run / 'trace.json'}\n")


async def _follow(run: Path) -> None:
    from laminar.dashboard.watching import watch

    await watch(run, asyncio.Event(), until_finished=True)


def _check(run: Path) -> None:
    if not (run / EVENTS).is_file():
        raise UserError(f"{run} holds no run ({EVENTS} is missing); give the --out folder of a run")
