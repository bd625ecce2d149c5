"""A job under random faults beside the same job undisturbed: does it end well, with the same result?

Starts the recipe twice, one run after the other: the first is hit by faults drawn from a seed (kill, freeze, slow, on
any of its processes, some while the last one is being mended). Prints one JSON line: what was done, what became of it,
what the audit says, what was left of processes and shared memory, and the held-out accuracies of both runs.

    python benchmarks/chaos.py                          # 50 faults in about ten minutes
    python benchmarks/chaos.py --faults 5 --steps 40    # a look
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from laminar.chaos.faults import Fault, RandomFaults
from laminar.chaos.processes import Process
from laminar.chaos.recovery import recovery
from laminar.chaos.session import ChaosSession, random_session
from laminar.dashboard.summary import summarise
from laminar.data.audit import audit
from laminar.data.sqlite_journal import read_journal
from laminar.schema.errors import UserError
from laminar.telemetry.files import JOURNAL

RECIPE = Path(__file__).parents[1] / "recipes" / "gcd.yaml"
DEADLINE_S = 3_600.0
START_S = 120.0
BINOMIAL_SIGMAS = 3.0
"""Accuracies that differ by less than this many standard deviations of their sampling are taken as equal."""


def train(run: Path, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start the job."""
    overrides = [
        f"trainer.num_steps={options.steps}",
        "manager.max_restarts=50",
        f"evaluation.every_steps={options.steps}",
    ]
    command = [sys.executable, "-m", "laminar.cli.main", "train", str(RECIPE), *overrides, "--out", str(run), "--plain"]
    with run.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def wait_until_alive(run: Path) -> ChaosSession:
    """The run's processes are there."""
    give_up_s = time.monotonic() + START_S
    while True:
        try:
            return ChaosSession(run)
        except UserError:
            if time.monotonic() > give_up_s:
                raise
            time.sleep(0.2)


def disturbed(run: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The job with faults."""
    shm_before = set(os.listdir("/dev/shm"))
    process = train(run, options)
    session = wait_until_alive(run)
    family = {process.pid}

    def tell(fault: Fault, victim: Process) -> None:
        family.update(child.pid for child in psutil.Process(process.pid).children(recursive=True))
        print(f"{fault.kind} {victim.name}/{victim.incarnation}", file=sys.stderr, flush=True)

    struck = random_session(session, RandomFaults(options.seed, options.every), options.faults, tell)
    code = process.wait(DEADLINE_S)
    stories = [(fault, recovery(victim, at, session.facts)) for fault, victim, at in struck]
    return {
        "exit_code": code,
        "faults": Counter(f"{fault.kind} {victim.name.partition('-')[0]}" for fault, victim, _ in struck),
        "ended_a_process": sum(told.detected_s is not None for _, told in stories),
        "trajectories_adopted": sum(told.trajectories_adopted for _, told in stories),
        "steps_redone": sum(told.steps_redone for _, told in stories),
        "processes_left": [pid for pid in family if psutil.pid_exists(pid)],
        "shared_memory_left": sorted(set(os.listdir("/dev/shm")) - shm_before),
        **outcome(run),
    }


def undisturbed(run: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The job without."""
    code = train(run, options).wait(DEADLINE_S)
    return {"exit_code": code, **outcome(run)}


def outcome(run: Path) -> dict[str, Any]:
    """What the run says of itself, and what its ledger says."""
    summary, report = summarise(run), audit(run / JOURNAL)
    with read_journal(run / JOURNAL) as rows:
        unversioned = sum(row.version is None for row in rows.trajectories(state="trained"))
    names = ("exit_reason", "steps", "wall_s", "restarts", "heldout_accuracy_start", "heldout_accuracy_final")
    told = {name: summary[name] for name in names}
    counts = {str(state): num for state, num in report.counts.items()}
    return told | {"audit_problems": report.num_problems, "ledger": counts, "trained_without_a_version": unversioned}


def main() -> None:
    """Both runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=50, help="how many")
    parser.add_argument("--every", type=float, default=5.0, help="mean seconds between two")
    parser.add_argument("--steps", type=int, default=340, help="length of the job")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="laminar-chaos-") as scratch:
        hit = disturbed(Path(scratch) / "disturbed", options)
        calm = undisturbed(Path(scratch) / "undisturbed", options)
    final, other = hit["heldout_accuracy_final"], calm["heldout_accuracy_final"]
    sigma = ((final * (1 - final) + other * (1 - other)) / 256) ** 0.5
    result = {
        "benchmark": "chaos",
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "load": round(os.getloadavg()[0], 1),
        "setting": vars(options),
        "disturbed": hit,
        "undisturbed": calm,
        "accuracy_difference": round(final - other, 4),
        "within_noise": abs(final - other) <= BINOMIAL_SIGMAS * max(sigma, 1 / 256),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
