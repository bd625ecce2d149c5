"""A chain of relays and its keeper, each a process of its own, to be killed, frozen and cut."""

import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from laminar.relay.keeper import KeeperRules
from laminar.relay.member import ChainRules
from laminar.relay.process import KeepOrder, RelayOrder

SECRET = b"a secret of the chain tests"
START_S = 30.0


class Process:
    """One process that prints events; it ends with the test at the latest, since it watches our end of its input."""

    def __init__(self, order: KeepOrder | RelayOrder, prefix: tuple[str, ...] = ()) -> None:
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        self.seen: list[dict[str, Any]] = []
        self._child = subprocess.Popen(
            [*prefix, sys.executable, "-m", "laminar.relay.process"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._child.stdin is not None
        self._child.stdin.write(msgspec.json.encode(order) + b"\n")
        self._child.stdin.flush()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        listening = self.expect(lambda event: event["kind"] == "listening", START_S)
        self.address = (listening["host"], listening["port"])

    @property
    def pid(self) -> int:
        return self._child.pid

    def expect(self, condition: Callable[[dict[str, Any]], bool], wait_s: float) -> dict[str, Any]:
        """The first event, of those seen or those to come, that fulfils the condition."""
        deadline_s = time.monotonic() + wait_s
        for at in itertools.count():
            if at == len(self.seen):
                try:
                    self.seen.append(self.events.get(timeout=max(0.0, deadline_s - time.monotonic())))
                except queue.Empty:
                    raise AssertionError(f"not within {wait_s:g} s; events: {self.seen[-5:]}") from None
            if condition(self.seen[at]):
                return self.seen[at]
        raise AssertionError

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()

    def freeze(self) -> None:
        """Returns when it stands still: a signal is acted on at the next time slice."""
        self._child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._child.pid, os.WSTOPPED)

    def thaw(self) -> None:
        self._child.send_signal(signal.SIGCONT)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._child.send_signal(signal.SIGCONT)
        self._child.kill()
        self._child.wait()
        self._reader.join()
        for stream in (self._child.stdin, self._child.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self.events.put(json.loads(line))


@dataclass
class ChainOfProcesses:
    """Start relays one by one; a name is used again for a relay that comes back."""

    folder: Path
    rules: KeeperRules
    prefix: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    options: dict[str, Any] = field(default_factory=dict)
    relays: dict[str, Process] = field(default_factory=dict)
    keeper: Process = field(init=False)

    def __post_init__(self) -> None:
        self.keeper = Process(KeepOrder(secret=SECRET, host=self.host, rules=self.rules), self.prefix)

    def start(self, relay_id: str, *, prefix: tuple[str, ...] = (), **options: Any) -> Process:
        host, port = self.keeper.address
        rules = ChainRules(
            relay_id=relay_id, keeper_host=host, keeper_port=port, **{"machine": relay_id, **self.options, **options}
        )
        order = RelayOrder(secret=SECRET, socket_path=str(self.socket(relay_id)), rules=rules)
        if relay_id in self.relays:
            self.relays.pop(relay_id).close()
        self.relays[relay_id] = Process(order, prefix)
        self.await_chain(lambda order: relay_id in order)
        return self.relays[relay_id]

    def socket(self, relay_id: str) -> Path:
        return self.folder / relay_id

    def await_chain(self, condition: Callable[[list[str]], bool], wait_s: float = 20.0) -> list[str]:
        """The order of the chain once it is as wanted, looking only at changes from the last one on."""
        event = self.keeper.expect(lambda e: e["kind"] == "chain_changed" and condition(e["order"]), wait_s)
        return event["order"]

    def order(self) -> list[str]:
        """The last known order."""
        while not self.keeper.events.empty():
            self.keeper.seen.append(self.keeper.events.get())
        changes = [event for event in self.keeper.seen if event["kind"] == "chain_changed"]
        return changes[-1]["order"] if changes else []

    def close(self) -> None:
        for process in (*self.relays.values(), self.keeper):
            process.close()


@contextlib.contextmanager
def chain_of_processes(
    folder: Path,
    names: tuple[str, ...],
    rules: KeeperRules | None = None,
    *,
    prefix: tuple[str, ...] = (),
    keeper_host: str = "127.0.0.1",
    **options: Any,
) -> Iterator[ChainOfProcesses]:
    """A chain in this order; `options` are those of `ChainRules` for all, `prefix` goes before the keeper's command."""
    chain = ChainOfProcesses(folder, rules or KeeperRules(), prefix, keeper_host, options)
    try:
        for name in names:
            chain.start(name)
        yield chain
    finally:
        chain.close()


def num_weight_maps(pid: int) -> int:
    """Pieces of weight memory that a process has mapped or open."""
    with contextlib.suppress(OSError):
        return sum("laminar-weights" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    return 0


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
