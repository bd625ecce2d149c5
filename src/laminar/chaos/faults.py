"""What can be done to a process, and random sequences of it that a seed repeats exactly."""

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from random import Random
from typing import Final

from msgspec import Struct

from laminar.chaos.processes import Process

SLOW_PERIOD_S: Final = 0.2
"""A slowed process is stopped and woken once in this time."""

SLOW_SHARE: Final = 0.9
"""Share of the time for which a slowed process is stopped."""


class FaultKind(StrEnum):
    """`kill` is SIGKILL, `freeze` is SIGSTOP, `slow` leaves the process a tenth of its time."""

    KILL = "kill"
    FREEZE = "freeze"
    SLOW = "slow"


class Fault(Struct, frozen=True, kw_only=True):
    """One thing to do; `seconds` is how long a slow process stays slow, or a frozen one frozen (None: until somebody
    kills it)."""

    kind: FaultKind
    target: str
    seconds: float | None = None


class RandomFaults:
    """Faults that depend on the seed and on who is alive when their time has come.

    The pauses are exponential around `every_s`, so that some faults hit a recovery that is under way.
    """

    def __init__(self, seed: int, every_s: float) -> None:
        self._random = Random(seed)
        self._every_s = every_s

    def pause_s(self) -> float:
        """How long until the next one."""
        return self._random.expovariate(1.0 / self._every_s)

    def pick(self, names: Sequence[str]) -> Fault:
        """The next one, on one of `names`."""
        kind = self._random.choice(list(FaultKind))
        target = sorted(names)[int(self._random.random() * len(names))]
        slow_s = self._random.uniform(1.0, 4.0)
        return Fault(kind=kind, target=target, seconds=slow_s if kind is FaultKind.SLOW else None)


def inject(fault: Fault, live: Mapping[str, Process]) -> Process | None:
    """Do it, for as long as it takes; returns whom it hit, None if that process is gone already."""
    process = live.get(fault.target)
    if process is None:
        return None
    with contextlib.suppress(ProcessLookupError):
        match fault.kind:
            case FaultKind.KILL:
                os.kill(process.pid, signal.SIGKILL)
            case FaultKind.FREEZE:
                os.kill(process.pid, signal.SIGSTOP)
                if fault.seconds is not None:
                    time.sleep(fault.seconds)
                    os.kill(process.pid, signal.SIGCONT)
            case FaultKind.SLOW:
                _slow_down(process.pid, fault.seconds or 0.0)
        return process
    return None


def _slow_down(pid: int, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    try:
        while time.monotonic() < until_s:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(SLOW_PERIOD_S * SLOW_SHARE)
            os.kill(pid, signal.SIGCONT)
            time.sleep(SLOW_PERIOD_S * (1.0 - SLOW_SHARE))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
