"""Start the real command line on a small job, look at its processes, kill some of them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from laminar.telemetry.files import EVENTS
from laminar.telemetry.reading import read_events

RECIPE = Path(__file__).parents[2] / "recipes" / "gcd.yaml"

SMALL = (
    "trainer.num_steps=6",
    "trainer.groups_per_step=4",
    "trainer.checkpoint.every_steps=2",
    "data.group_size=8",
    "rollout.batch_trajectories=16",
    "evaluation.every_steps=3",
    "evaluation.num_prompts=16",
    "manager.backoff_s=0.2",
)
"""A job of seconds with every part of the real one."""

DEADLINE_S = 180.0


def laminar(*args: str) -> list[str]:
    """The command line of this environment."""
    return [sys.executable, "-m", "laminar.cli.main", *args]


@contextmanager
def training(*args: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`laminar train ARGS` in a process group of its own, killed at the end if it still runs."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            laminar("train", *args, "--plain"), stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(DEADLINE_S)


def events(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Events of a run so far, on all its machines; a torn last line is left out."""
    return [event for event in read_events(run / EVENTS) if kind is None or event["kind"] == kind]


def wait_for(what: str, condition: Callable[[], Any], process: subprocess.Popen[bytes], log: Path) -> Any:
    """Poll until the condition holds; fails with the log if the process ends or time runs out."""
    give_up_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < give_up_s:
        if found := condition():
            return found
        assert process.poll() is None, f"ended before {what}:\n{log.read_text()}"
        time.sleep(0.05)
    raise AssertionError(f"no {what} within {DEADLINE_S:g} s:\n{log.read_text()}")


def last_step(run: Path) -> int:
    """The last training step that was finished."""
    return max((event["step"] for event in events(run, "step")), default=0)


def finish(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for the run to end by itself, well."""
    code = process.wait(DEADLINE_S)
    assert code == 0, f"exit code {code}:\n{log.read_text()}"


def family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The process and all its descendants."""
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the process and all its descendants; returns when they are gone."""
    processes = family(process)
    for victim in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    process.wait(DEADLINE_S)
    assert survivors(processes, within_s=10.0) == []


def survivors(processes: list[psutil.Process], within_s: float) -> list[psutil.Process]:
    """Those still alive after `within_s`; zombies that nobody reaped are dead."""
    give_up_s = time.monotonic() + within_s
    while True:
        alive = [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        if not alive or time.monotonic() > give_up_s:
            return alive
        time.sleep(0.05)


def audit(run: Path) -> dict[str, Any]:
    """`laminar inspect RUN audit --json`; fails if the audit finds anything."""
    done = subprocess.run(
        laminar("inspect", str(run), "audit", "--json"), capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def summary(run: Path) -> dict[str, Any]:
    """What the run says of itself."""
    return json.loads((run / "summary.json").read_text())
