"""`laminar chaos`: break a live run and tell how it recovers."""

import sys
from pathlib import Path

from laminar.chaos.faults import Fault, FaultKind, RandomFaults
from laminar.chaos.processes import Process
from laminar.chaos.recovery import Recovery, recovery
from laminar.chaos.session import ChaosSession, random_session
from laminar.schema.errors import UserError

FOLLOW_S = 300.0
"""A model of many gigabytes takes minutes to load."""

SLOW_S = 10.0
"""Default length of a slow-down."""


def one_fault(run: Path, kind: FaultKind | None, target: str | None, seconds: float | None) -> None:
    """Do one thing and follow what happens."""
    if kind is None or target is None:
        raise UserError("give what to do and to whom, e.g. laminar chaos RUN kill replica-0, or --random")
    if kind is FaultKind.KILL and seconds is not None:
        raise UserError("--seconds goes with freeze and slow; a killed process stays dead")
    if kind is FaultKind.SLOW and seconds is None:
        seconds = SLOW_S
    session = ChaosSession(run)
    fault = Fault(kind=kind, target=target, seconds=seconds)
    victim, at = session.strike(fault)
    _say(_what(fault, victim))
    story = session.follow(fault, victim, at, deadline_s=FOLLOW_S)
    _say(*recovery_lines(story.recovery))


def random_faults(run: Path, *, seed: int, num: int, every_s: float) -> None:
    """Do so many things at random and sum up."""
    session = ChaosSession(run)
    struck = random_session(session, RandomFaults(seed, every_s), num, lambda fault, victim: _say(_what(fault, victim)))
    stories = [recovery(victim, at, session.facts) for _, victim, at in struck]
    noticed = [story for story in stories if story.detected_s is not None]
    mended = sum(story.working_s is not None for story in noticed)
    adopted, kept = sum(s.trajectories_adopted for s in stories), sum(s.tokens_kept for s in stories)
    _say(
        f"{len(struck)} faults, {len(noticed)} ended a process, {mended} of those work again; {adopted} trajectories "
        f"went on elsewhere with {kept} tokens, {sum(s.steps_redone for s in stories)} steps were done again"
    )


def recovery_lines(told: Recovery) -> list[str]:
    """A recovery as a person reads it."""
    if told.detected_s is None:
        return ["it was not given up: the run waited for it"]
    lines = [f"  noticed after {told.detected_s:.2f} s"]
    if told.started_s is not None:
        lines.append(f"  a new process after {told.started_s:.2f} s")
    if told.working_s is not None:
        lines.append(f"  works again after {told.working_s:.2f} s, {told.steps_meanwhile} training steps meanwhile")
    if told.trajectories_adopted:
        lines.append(f"  {told.trajectories_adopted} trajectories went on elsewhere, with {told.tokens_kept} tokens")
    if told.steps_redone:
        lines.append(f"  {told.steps_redone} training steps were done again, with the same experience")
    return lines


def _what(fault: Fault, victim: Process) -> str:
    for_ = "" if fault.seconds is None else f" for {fault.seconds:.1f} s"
    return f"{fault.kind} {victim.name} (life {victim.incarnation}, process {victim.pid}){for_}"


def _say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
