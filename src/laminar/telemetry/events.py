"""Append what happened to the event file of this machine.

Invariant: a line in the file is one whole event. Processes of a run append to the same file at the same time; each
flush is one `write` of whole lines on an O_APPEND descriptor, which the kernel does not interleave on a local file
system. Telemetry never fails its service: what cannot be written is counted, and reported when writing works again.

Over NFS appends of several machines are not kept apart, so each machine has a file of its own (`files.events_of`).
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import msgspec

FLUSH_BYTES = 64 * 1024
"""A buffer this full is written at once; one such write into the page cache takes some 20 us."""

MAX_PENDING_BYTES = 4 * 1024 * 1024
"""While the disk is full so much is kept in memory, and events beyond it are dropped."""


class Events(Protocol):
    """What a service needs to say what happened; `telemetry.vocabulary` lists the kinds and their fields."""

    def emit(self, kind: str, **fields: Any) -> None:
        """Record one event; cheap, never raises, never waits for anything."""
        ...


def _plain(value: Any) -> Any:
    """Numbers of other libraries (numpy, torch) as numbers, anything else as text."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


class EventLog:
    """The events of one process, buffered; close it, or use it as a context manager.

    `emit` may be called from any thread. `clock` gives wall seconds since the epoch.
    """

    def __init__(self, path: Path, source: str, clock: Callable[[], float] = time.time) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._source = source
        self._clock = clock
        self._encode = msgspec.json.Encoder(enc_hook=_plain).encode
        self._lock = threading.Lock()
        self._pending = bytearray()
        self._torn = False
        self._num_unreported = 0
        self.num_dropped = 0

    def emit(self, kind: str, **fields: Any) -> None:
        """Buffer one event; written by the next flush, or at once when the buffer is full."""
        event = {"t": self._clock(), "source": self._source, "kind": kind, **fields}
        try:
            line = self._encode(event)
        except (TypeError, ValueError, OverflowError, RecursionError):
            self._count_drops(1)
            return
        with self._lock:
            self._pending += line
            self._pending += b"\n"
            full = len(self._pending) >= FLUSH_BYTES
        if full:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered; on a full disk keep it for the next flush, up to MAX_PENDING_BYTES."""
        with self._lock:
            if self._fd >= 0 and (self._pending or self._num_unreported):
                self._write()
            if len(self._pending) > MAX_PENDING_BYTES:
                self._count_drops(self._pending.count(b"\n"))
                self._pending.clear()

    async def run_flusher(self, every_s: float = 0.5) -> None:
        """Flush regularly.

        waits for:    the clock
        blocks on:    nothing
        ends:         never; cancelled by its parent, and flushes once more then
        """
        import asyncio  # on use: processes without an event loop log events too

        try:
            while True:
                await asyncio.sleep(every_s)
                self.flush()
        finally:
            self.flush()

    def close(self) -> None:
        """Flush and let go of the file; later events are dropped."""
        self.flush()
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _write(self) -> None:
        """Write as much as the disk takes, and keep the rest from the beginning of the line that was torn."""
        # If a line of ours was torn, end it first, so that it spoils nothing but itself.
        head = (b"\n" if self._torn else b"") + self._drop_report()
        data = head + self._pending
        try:
            num_written = os.write(self._fd, data)
        except OSError:
            return
        num_whole = data.rfind(b"\n", 0, num_written) + 1
        self._torn = num_whole < num_written if num_written else self._torn
        if num_whole >= len(head):
            self._num_unreported = 0
            del self._pending[: num_whole - len(head)]

    def _count_drops(self, num: int) -> None:
        self.num_dropped += num
        self._num_unreported += num

    def _drop_report(self) -> bytes:
        if not self._num_unreported:
            return b""
        event = {"t": self._clock(), "source": self._source, "kind": "events_dropped", "num": self._num_unreported}
        return self._encode(event) + b"\n"


class NullEvents:
    """Records nothing."""

    def emit(self, kind: str, **fields: Any) -> None:
        """Do nothing."""


class MemoryEvents:
    """Keeps events in a list, as `read_events` would give them back; for tests and simulation.

    Give several of them the same `into` to collect the events of several sources in one list.
    """

    def __init__(
        self,
        source: str = "memory",
        clock: Callable[[], float] = time.time,
        into: list[dict[str, Any]] | None = None,
    ) -> None:
        self._source = source
        self._clock = clock
        self.events: list[dict[str, Any]] = [] if into is None else into

    def emit(self, kind: str, **fields: Any) -> None:
        """Append one event."""
        self.events.append({"t": self._clock(), "source": self._source, "kind": kind, **fields})

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        """Events of these kinds, in order."""
        return [event for event in self.events if event["kind"] in kinds]
