"""`laminar bench recovery`: how soon a real job notices and mends each kind of failure, medians over several.

Two runs of one recipe, as they would be started by hand. In the first, parts are killed and frozen one after the other;
the second is killed as a whole and resumed. Between two faults the job makes at least one step.
"""

import contextlib
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from laminar.chaos.faults import Fault, FaultKind
from laminar.chaos.recovery import Span, step_spans, touching
from laminar.chaos.session import ChaosSession, Story
from laminar.schema.errors import RunFailed
from laminar.telemetry.files import EVENTS
from laminar.telemetry.reading import Tail
from laminar.telemetry.vocabulary import LearnerLoaded, Step, to_facts

FAULTS: Final = (
    *[Fault(kind=FaultKind.KILL, target=name) for name in ("replica", "relay", "trainer", "manager", "data")],
    Fault(kind=FaultKind.FREEZE, target="replica"),
)
"""`replica` stands for the newest one that is alive. One machine has one relay, which is the master."""

DEADLINE_S: Final = 300.0
POLL_S: Final = 0.05
ENDLESS: Final = 100_000
"""Steps of the runs; they are stopped when enough was measured."""


def bench_recovery(recipe: Path, overrides: Sequence[str], repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure; returns what is printed."""
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as scratch:
        faults = measure_faults(Path(scratch) / "faults", recipe, overrides, repeats, say)
        resumes = measure_resumes(Path(scratch) / "resumes", recipe, overrides, repeats, say)
    return {
        "benchmark": "recovery",
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "load": round(os.getloadavg()[0], 1),
        "setting": {"recipe": str(recipe), "overrides": list(overrides), "repeats": repeats},
        **faults,
        "whole_job": resumes,
    }


def measure_faults(
    run: Path, recipe: Path, overrides: Sequence[str], repeats: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Every fault `repeats` times in one run, in turns; and how long a step takes when nothing is wrong."""
    stories: dict[str, list[Story]] = defaultdict(list)
    steps = (f"trainer.num_steps={ENDLESS}", "manager.max_restarts=1000")
    with _job(run, "train", str(recipe), *overrides, *steps, "--out", str(run)) as process:
        _wait_for_step(run, process, after=0)
        session = ChaosSession(run)
        for _ in range(repeats):
            for template in FAULTS:
                _wait_for_step(run, process, after=_last_step(session))
                fault = _aimed(template, session)
                story = session.follow(fault, *session.strike(fault), deadline_s=DEADLINE_S)
                name = f"{template.target} {template.kind}"
                stories[name].append(story)
                say(f"{name}: noticed {story.recovery.detected_s:.2f} s, works again {story.recovery.working_s:.2f} s")
        _wait_for_step(run, process, after=_last_step(session))
        spans = step_spans(session.facts)
    outages = [_outage(story) for told in stories.values() for story in told]
    quiet = [span for span in spans if not any(touching([span], outage) for outage in outages)]
    medians = {name: _medians(told, spans) for name, told in stories.items()}
    return {"faults": medians, "undisturbed_step_s": _median(_seconds(quiet))}


def measure_resumes(
    run: Path, recipe: Path, overrides: Sequence[str], repeats: int, say: Callable[[str], None]
) -> dict[str, float]:
    """SIGKILL of every process of the job, then `--resume`: seconds until it makes steps again."""
    seconds = []
    command: tuple[str, ...] = ("train", str(recipe), *overrides, f"trainer.num_steps={ENDLESS}", "--out", str(run))
    for number in range(repeats + 1):
        began = time.time()
        with _job(run, *command) as process:
            at = _wait_for_step(run, process, after=0, since=began)
            if number:
                seconds.append(at - began)
                say(f"whole job: a step {at - began:.1f} s after the resume began")
        command = ("train", "--resume", str(run))
    return {"first_step_after_resume_s": round(statistics.median(seconds), 3)}


def _medians(stories: Sequence[Story], steps: Sequence[Span]) -> dict[str, float]:
    """Of the times in seconds, of the steps that the trainer made meanwhile, and of the longest one of each outage."""
    names = ("detected_s", "started_s", "working_s", "steps_meanwhile", "trajectories_adopted", "tokens_kept")
    medians = {name: _median([getattr(story.recovery, name) for story in stories]) for name in names}
    longest = [max(_seconds(touching(steps, _outage(story)))) for story in stories]
    return {**medians, "longest_step_s": _median(longest)}


def _outage(story: Story) -> Span:
    """From the fault until the victim worked again."""
    assert story.recovery.working_s is not None, "a story ends when the victim works again"
    return story.at, story.at + story.recovery.working_s


def _seconds(spans: Sequence[Span]) -> list[float]:
    return [end - begin for begin, end in spans]


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 3)


def _aimed(template: Fault, session: ChaosSession) -> Fault:
    """The fault with the name of a replica instead of `replica`."""
    if template.target != "replica":
        return template
    names = sorted(name for name in session.live if name.startswith("replica-"))
    return Fault(kind=template.kind, target=names[-1])


def _last_step(session: ChaosSession) -> int:
    """Number of the last step since the trainer last began."""
    last = 0
    for fact in session.facts:
        match fact:
            case LearnerLoaded(step=step) | Step(step=step):
                last = step
    return last


@contextlib.contextmanager
def _job(run: Path, *args: str) -> Iterator[subprocess.Popen[bytes]]:
    """`laminar ARGS` until the end of the context, then SIGKILL of the launcher; its guardian ends the rest."""
    log = run.with_suffix(".log")
    command = [sys.executable, "-m", "laminar.cli.main", *args, "--plain"]
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        yield process
    finally:
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        process.wait()
        psutil.wait_procs(family, timeout=DEADLINE_S)


def _wait_for_step(run: Path, process: subprocess.Popen[bytes], *, after: int, since: float = 0.0) -> float:
    """Wall time of the first step beyond `after` that ended after `since`; raises `RunFailed` if the job ends."""
    give_up_s = time.monotonic() + DEADLINE_S
    tail = Tail(run / EVENTS)
    with contextlib.closing(tail):
        while time.monotonic() < give_up_s:
            for fact in to_facts(tail.read_new()):
                if isinstance(fact, Step) and fact.step > after and fact.t >= since:
                    return fact.t
            if process.poll() is not None:
                end = run.with_suffix(".log").read_text(errors="replace")[-500:]
                raise RunFailed(f"the job ended with exit code {process.returncode}: {end}")
            time.sleep(POLL_S)
    raise RunFailed(f"the job made no step within {DEADLINE_S:g} s")
