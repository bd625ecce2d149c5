"""Faults on a live run, one after the other, each with its story from the event file."""

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from msgspec import Struct

from laminar.chaos.faults import Fault, FaultKind, RandomFaults, inject
from laminar.chaos.processes import Process, live_processes
from laminar.chaos.recovery import Recovery, recovery
from laminar.schema.errors import RunFailed, UserError
from laminar.telemetry.files import EVENTS
from laminar.telemetry.reading import Tail
from laminar.telemetry.vocabulary import Fact, RunFinished, to_facts

POLL_S: Final = 0.02
"""Between two looks at the event file; services flush theirs every 0.2 s."""


class Story(Struct, frozen=True, kw_only=True):
    """What was done to whom, and what came of it."""

    fault: Fault
    victim: Process
    at: float
    recovery: Recovery


class ChaosSession:
    """A run's event file, followed; raises `UserError` if the run is not alive."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._tail = Tail(run / EVENTS)
        self._facts: list[Fact] = []
        if not self.live:
            raise UserError(f"{run} is not a run that is alive; start it with laminar train, or give its --out folder")

    @property
    def facts(self) -> list[Fact]:
        """All events so far, in order of time."""
        fresh = list(to_facts(self._tail.read_new()))
        if fresh:
            self._facts = sorted([*self._facts, *fresh], key=lambda fact: fact.t)
        return self._facts

    @property
    def live(self) -> dict[str, Process]:
        """Processes by name."""
        return dict(live_processes(self.facts))

    @property
    def here(self) -> dict[str, Process]:
        """Those on this machine; only they can be hit from here."""
        return {name: process for name, process in self.live.items() if process.host in ("", socket.gethostname())}

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return bool(self.facts) and isinstance(self.facts[-1], RunFinished)

    def strike(self, fault: Fault) -> tuple[Process, float]:
        """Carry a fault out; returns the victim and when. Raises `UserError` if no such part is alive, or not here."""
        live = self.live
        if fault.target in live and fault.target not in self.here:
            raise UserError(f"{fault.target} runs on {live[fault.target].host}; run laminar chaos {self._run} there")
        at = time.time()
        victim = inject(fault, live)
        if victim is None:
            names = ", ".join(sorted(live)) or "nothing"
            raise UserError(f"{fault.target} is not alive in {self._run}; alive: {names}")
        return victim, at

    def follow(self, fault: Fault, victim: Process, at: float, *, deadline_s: float) -> Story:
        """Wait until the victim works again, or, after a fault that need not be noticed, until that was harmless.

        waits for:  events of the run; ends: when it works again, when the run is over, or after `deadline_s`
        """
        give_up_s = time.monotonic() + deadline_s
        while True:
            told = recovery(victim, at, self.facts)
            survived = fault.kind is not FaultKind.KILL and fault.seconds is not None and told.detected_s is None
            if told.working_s is not None or survived or self.is_over:
                return Story(fault=fault, victim=victim, at=at, recovery=told)
            if time.monotonic() > give_up_s:
                raise RunFailed(f"{victim.name} did not work again within {deadline_s:g} s after a {fault.kind}")
            time.sleep(POLL_S)


def random_session(
    session: ChaosSession, faults: RandomFaults, num_faults: int, tell: Callable[[Fault, Process], None]
) -> list[tuple[Fault, Process, float]]:
    """Faults at their times, whether or not the last one is mended, until there were so many or the run is over.

    waits for:  time
    """
    struck: list[tuple[Fault, Process, float]] = []
    while len(struck) < num_faults and not session.is_over:
        time.sleep(faults.pause_s())
        live = sorted(session.here)
        if not live:
            continue  # the run is over, or all that could be hit is being started
        fault = faults.pick(live)
        try:
            victim, at = session.strike(fault)
        except UserError:  # it ended in this instant
            continue
        tell(fault, victim)
        struck.append((fault, victim, at))
    return struck
