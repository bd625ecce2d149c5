"""A dictionary of which older versions stay as they were, and of which the newest one changes in constant time.

Invariant: a table never changes; `with_entry` makes another one, in which a replaced entry keeps its place and a new
one comes last.

All tables of one history share one dictionary, that of the newest of them; an older one knows in which entry it differs
from the one after it (Baker, "Shallow binding makes functional arrays fast", 1991). Whoever reads an older one gets
it a dictionary of its own. So a table that is kept keeps alive what came after it: keep few, or read them.
"""

from collections.abc import Iterator, Mapping
from typing import Final, Generic, TypeVar

Value = TypeVar("Value")

ABSENT: Final = object()
"""What an older table has under a key that it lacks."""


class Table(Mapping[str, Value], Generic[Value]):
    """See the module."""

    __slots__ = ("_entries", "_key", "_newer", "_value")

    def __init__(self, entries: Mapping[str, Value] | None = None) -> None:
        self._entries: dict[str, Value] | None = dict(entries or {})
        self._newer: Table[Value] | None = None
        self._key = ""
        self._value: object = ABSENT

    def with_entry(self, key: str, value: Value) -> "Table[Value]":
        """This table with one entry set."""
        entries = self._dictionary()
        newer: Table[Value] = Table.__new__(Table)
        newer._entries, newer._newer, newer._key, newer._value = entries, None, "", ABSENT
        self._newer, self._key, self._value = newer, key, entries.get(key, ABSENT)
        self._entries = None
        entries[key] = value
        return newer

    def __getitem__(self, key: str) -> Value:
        return self._dictionary()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._dictionary())

    def __len__(self) -> int:
        return len(self._dictionary())

    def __repr__(self) -> str:
        return f"Table({self._dictionary()!r})"

    def _dictionary(self) -> dict[str, Value]:
        if self._entries is None:
            self._entries = self._rebuilt()
            self._newer, self._value = None, ABSENT
        return self._entries

    def _rebuilt(self) -> dict[str, Value]:
        """The newest dictionary, with the changes since this table undone."""
        since: list[Table[Value]] = []
        table = self
        while table._entries is None:
            since.append(table)
            assert table._newer is not None, "a table without a dictionary has one after it"
            table = table._newer
        entries = dict(table._entries)
        for older in reversed(since):
            if older._value is ABSENT:
                del entries[older._key]
            else:
                entries[older._key] = older._value  # type: ignore[assignment]
        return entries
