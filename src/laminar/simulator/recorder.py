"""What a simulated run says of itself: events in order, with virtual times, in tokens rather than emulated ids.

Invariant: the same events in the same order give the same bytes.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

Event = dict[str, Any]
Observer = Callable[[Event], None]

IN_IDS: Final[Mapping[str, tuple[str, ...]]] = {
    "trajectory": ("tokens",),
    "step": ("tokens", "response_tokens_mean", "response_tokens_max"),
    "adopted": ("num_tokens",),
}
"""Fields that the services count in token ids, each of which stands for several tokens here."""


class Recorder:
    """Keeps events of the kinds that are wanted (None: of all), and shows every event to the observers first."""

    def __init__(self, tokens_per_id: int, *, kinds: frozenset[str] | None = None) -> None:
        self._tokens_per_id = tokens_per_id
        self._kinds = kinds
        self._encode = msgspec.json.Encoder().encode
        self.observers: list[Observer] = []
        self.events: list[Event] = []
        self.num_emitted = 0

    def emit(self, kind: str, **fields: Any) -> None:
        """Record one event of the simulated run as a whole."""
        self.record("world", kind, fields)

    def source(self, name: str) -> "SourceEvents":
        """The events of one process."""
        return SourceEvents(self, name)

    def record(self, source: str, kind: str, fields: Event) -> None:
        """Record one event of a source."""
        self.num_emitted += 1
        if self._kinds is not None and kind not in self._kinds and not self.observers:
            return
        for name in IN_IDS.get(kind, ()):
            if name in fields:
                fields[name] *= self._tokens_per_id
        event = {"t": round(asyncio.get_running_loop().time(), 6), "source": source, "kind": kind, **fields}
        for observer in self.observers:
            observer(event)
        if self._kinds is None or kind in self._kinds:
            self.events.append(event)

    def lines(self) -> bytes:
        """The events as the lines of an events.jsonl."""
        return b"".join(self._encode(event) + b"\n" for event in self.events)


class SourceEvents:
    """Fulfils `telemetry.events.Events` for one process."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder = recorder
        self._name = name

    def emit(self, kind: str, **fields: Any) -> None:
        """Record one event."""
        self._recorder.record(self._name, kind, fields)
