"""One machine of a run, for those who start processes on it and end them."""

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from laminar.telemetry.files import EVENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """`name` is unique in the run, and empty if there is only one machine and will be no other.

    `address` is where others reach it, `sockets` a folder there with a short path, `events` the file of the run folder
    that its processes write to, `options` what Ray must be told to start an actor there, `kill` ends a process there
    even if it is frozen, `leave` makes the run do without the machine, where it can.
    """

    name: str
    host: str
    address: str
    sockets: Path
    num_gpus: float
    kill: Callable[[int], None]
    events: str = EVENTS
    options: Mapping[str, Any] = field(default_factory=dict)
    leave: Callable[[], None] = lambda: None


def this_machine(sockets: Path, num_gpus: float) -> Machine:
    """The only machine of a run that has a Ray instance of its own."""
    return Machine(
        name="", host=socket.gethostname(), address="127.0.0.1", sockets=sockets, num_gpus=num_gpus, kill=kill_here
    )


def kill_here(pid: int) -> None:
    """End a process of this machine; one that is gone already is no mistake."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
