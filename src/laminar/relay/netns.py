"""Several machines on one: network namespaces, joined by links of a given rate. For tests and benchmarks.

Invariant: everything is named after the process that made it; it goes with the context, and what a killed process left
behind is swept at the next start. Needs Linux, root, and the programs `ip` and `tc`.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

PREFIX = "laminar"
SUBNET = "10.77.0"
BURST = "128kb"
QUEUE = "60ms"
"""Of the shaper: enough for full rate at 400 Mbit/s and more; packets wait no longer than this."""

MAX_MACHINES = 200
COMMAND_S = 20.0


@dataclass(frozen=True, slots=True)
class Machine:
    """One namespace: its address, and what to put before a command that runs in it."""

    name: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)


class Lab:
    """Machines that are joined by one switch; link `i` leads to machine `i`."""

    def __init__(self, machines: list[Machine], hub: str) -> None:
        self.machines = machines
        self._hub = hub

    def cut(self, index: int) -> None:
        """Pull a machine's cable: packets vanish, nobody is told."""
        _ip("-n", self._hub, "link", "set", f"port{index}", "down")

    def throttle(self, index: int, mbit_per_s: float) -> None:
        """Let a shaped link carry so much from now on, each way."""
        for namespace, device in ((self._hub, f"port{index}"), (self.machines[index].name, "eth0")):
            _shape("change", namespace, device, mbit_per_s)

    def mend(self, index: int) -> None:
        """Plug it in again."""
        _ip("-n", self._hub, "link", "set", f"port{index}", "up")


def missing() -> str | None:
    """Why there can be no namespaces here; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if absent:
        return f"{' and '.join(absent)} not found; install iproute2"
    probe = f"{PREFIX}-{os.getpid()}-probe"
    try:
        _ip("netns", "add", probe)
        _ip("netns", "del", probe)
    except subprocess.CalledProcessError as error:
        return f"ip netns add: {error.stderr.decode().strip()}"
    return None


@contextlib.contextmanager
def lab(num_machines: int, *, mbit_per_s: float | None = None) -> Iterator[Lab]:
    """So many machines on one switch; with a rate, each link carries that much each way."""
    if not 0 < num_machines <= MAX_MACHINES:
        raise ValueError(f"{num_machines} machines; 1 to {MAX_MACHINES} can be made")
    _sweep()
    base = f"{PREFIX}-{os.getpid()}"
    machines = [Machine(f"{base}-{at}", f"{SUBNET}.{at + 1}") for at in range(num_machines)]
    hub = f"{base}-hub"
    try:
        _ip("netns", "add", hub)
        _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge", "up")
        for index, machine in enumerate(machines):
            _add(machine, hub, index, mbit_per_s)
        yield Lab(machines, hub)
    finally:
        for name in (hub, *(machine.name for machine in machines)):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)


def _add(machine: Machine, hub: str, index: int, mbit_per_s: float | None) -> None:
    port = f"port{index}"
    _ip("netns", "add", machine.name)
    _ip("-n", hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", machine.name)
    _ip("-n", hub, "link", "set", port, "master", "bridge", "up")
    _ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        _ip("-n", machine.name, "link", "set", device, "up")
    if mbit_per_s is not None:
        for namespace, device in ((hub, port), (machine.name, "eth0")):
            _shape("add", namespace, device, mbit_per_s)


def _shape(verb: str, namespace: str, device: str, mbit_per_s: float) -> None:
    shape = ("tbf", "rate", f"{mbit_per_s:g}mbit", "burst", BURST, "latency", QUEUE)
    _run("tc", "-n", namespace, "qdisc", verb, "dev", device, "root", *shape)


def _sweep() -> None:
    """Remove what processes that are gone have left."""
    listed = _run("ip", "netns", "list").decode().split("\n")
    for name in (line.split()[0] for line in listed if line.startswith(f"{PREFIX}-")):
        pid = name.split("-")[1]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)


def _ip(*arguments: str) -> bytes:
    return _run("ip", *arguments)


def _run(*command: str) -> bytes:
    return subprocess.run(command, check=True, capture_output=True, timeout=COMMAND_S).stdout
