"""Read events back, of a finished run or while they are being written.

Invariant: no state of the file raises. A line that is torn or not JSON is left out; if a whole event hangs on its end
(a writer died or found the disk full in the middle of a line), that one is kept.

The events of a run on several machines lie in one file for each (`files.events_of`); whoever names the launcher's,
EVENTS, gets all of them.
"""

import os
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from laminar.telemetry.vocabulary import Fact, to_facts

Event = dict[str, Any]

_LINE_START = b'{"t":'
_READ_BYTES = 1 << 20

_decode = msgspec.json.Decoder(dict[str, Any]).decode


def read_events(path: Path) -> list[Event]:
    """All whole events of a run, in the order of the file, or by time if there are several; none if there is none."""
    tail = Tail(path)
    try:
        return tail.read_new()
    finally:
        tail.close()


def read_facts(path: Path) -> list[Fact]:
    """All events of known kinds, typed, in order of time."""
    return sorted(to_facts(read_events(path)), key=lambda fact: fact.t)


class Tail:
    """Follows the events of a run while files grow and machines come; keeps only unfinished last lines in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = {path: _FileTail(path)}

    def read_new(self) -> list[Event]:
        """Events whose lines were completed since the last call; [] while there is no file."""
        for path in self._path.parent.glob(f"{self._path.stem}.*{self._path.suffix}"):
            if path not in self._files:
                self._files[path] = _FileTail(path)
        parts = [events for file in self._files.values() if (events := file.read_new())]
        return parts[0] if len(parts) == 1 else sorted(chain(*parts), key=lambda event: event.get("t", 0.0))

    def close(self) -> None:
        """Let go of the files."""
        for file in self._files.values():
            file.close()

    @property
    def num_unreadable(self) -> int:
        """Lines that were left out."""
        return sum(file.num_unreadable for file in self._files.values())


class _FileTail:
    """Follows one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._rest = b""
        self._offset = 0
        self.num_unreadable = 0

    def read_new(self) -> list[Event]:
        """Events whose lines were completed since the last call; [] while the file does not exist."""
        if self._fd < 0:
            try:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return []
        if os.fstat(self._fd).st_size < self._offset:
            self._offset, self._rest = 0, b""  # somebody began the file anew
        events: list[Event] = []
        while chunk := os.pread(self._fd, _READ_BYTES, self._offset):
            self._offset += len(chunk)
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            events.extend(event for line in lines if (event := self._event(line)) is not None)
        return events

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _event(self, line: bytes) -> Event | None:
        if not line.strip():
            return None
        try:
            return _decode(line)
        except msgspec.DecodeError:
            self.num_unreadable += 1
        start = line.rfind(_LINE_START, 1)
        if start > 0:
            try:
                return _decode(line[start:])
            except msgspec.DecodeError:
                return None
        return None
