"""What makes a data shard durable: rows, written in the order of the operations.

Invariant: one `write` is one operation, kept whole or not at all, and never without those before it. So whatever
happens, what is left is a prefix of the history.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn, Protocol

from msgspec.structs import replace

from laminar.data.rows import (
    EvaluationRow,
    ForgetTokens,
    GroupRow,
    LeaseRow,
    LoseSteps,
    PieceRow,
    PositionRow,
    Row,
    State,
    StintRow,
    TrajectoryRow,
)


class Rows(Protocol):
    """Reading what was written, at one moment. Iterators go by number."""

    def position(self) -> PositionRow:
        """How far the shard has come; all zeros before its first operation."""
        ...

    def groups(self, *, open_only: bool = False, prompt_id: str | None = None) -> Iterator[GroupRow]:
        """All groups, or those that are not settled, or those of one prompt."""
        ...

    def trajectories(self, within: range | None = None, state: State | None = None) -> Iterator[TrajectoryRow]:
        """All trajectories, or those with a number in `within`, or those in one state."""
        ...

    def stints(self, within: range | None = None) -> Iterator[StintRow]:
        """All stints, by trajectory and attempt, or those of the trajectories in `within`."""
        ...

    def leases(self) -> Iterator[LeaseRow]:
        """All leases there ever were."""
        ...

    def evaluations(self) -> Iterator[EvaluationRow]:
        """All evaluations, by asked version and round."""
        ...

    def pieces(self) -> Iterator[PieceRow]:
        """Tokens that are still kept, those of one trajectory in the order in which they came."""
        ...

    def counts(self) -> Counter[State]:
        """Trajectories per state."""
        ...

    def trained_by_step(self) -> Counter[int]:
        """Trajectories in state `trained`, by the step that took them."""
        ...

    def trained_groups_by_step(self) -> Counter[int]:
        """Settled groups that a step took, by that step."""
        ...


class Journal(Protocol):
    """Writing. Every call raises `RunFailed` once something could not be written."""

    def write(self, rows: tuple[Row, ...]) -> None:
        """Queue one operation; returns at once."""
        ...

    async def durable(self) -> None:
        """Return when everything written so far survives the loss of this process and of power."""
        ...

    async def committed(self) -> None:
        """Return when everything written so far survives the loss of this process; power may still take it."""
        ...

    async def failed(self) -> NoReturn:
        """Wait until something could not be written, and raise it."""
        ...

    def close(self) -> None:
        """Write what is queued and let go of everything; may be called again."""
        ...

    def rows(self) -> AbstractContextManager[Rows]:
        """Read what is written. A journal of a dead run is read before the first `write`."""
        ...


class MemoryJournal:
    """A journal that lives as long as its process, and can say what a crash would have left."""

    MAX_PENDING = 1024
    """Operations that a crash can lose; enough for a test, and few to keep twice."""

    def __init__(self, rows: "MemoryRows | None" = None) -> None:
        self._rows = rows or MemoryRows()
        self._pending: list[tuple[Row, ...]] = []

    @property
    def num_pending(self) -> int:
        """Operations that a crash may lose."""
        return len(self._pending)

    def write(self, rows: tuple[Row, ...]) -> None:
        self._pending.append(rows)
        if len(self._pending) > self.MAX_PENDING:
            self._settle()

    async def durable(self) -> None:
        self._settle()

    async def committed(self) -> None:
        self._settle()

    async def failed(self) -> NoReturn:
        """Memory does not fail. Waits for ever by design: it is what an endless loop waits for."""
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nothing sets this future")

    def close(self) -> None:
        self._settle()

    def rows(self) -> AbstractContextManager[Rows]:
        self._settle()
        return nullcontext(self._rows)

    def after_crash(self, num_kept: int) -> "MemoryJournal":
        """The journal that is found when all but the first `num_kept` pending operations are lost."""
        rows = self._rows.copy()
        for operation in self._pending[:num_kept]:
            rows.apply(operation)
        return MemoryJournal(rows)

    def _settle(self) -> None:
        for operation in self._pending:
            self._rows.apply(operation)
        self._pending.clear()


class MemoryRows:
    """Tables as dictionaries."""

    def __init__(self) -> None:
        self._position = PositionRow()
        self._groups: dict[int, GroupRow] = {}
        self._trajectories: dict[int, TrajectoryRow] = {}
        self._stints: dict[int, dict[int, StintRow]] = {}
        self._leases: dict[int, LeaseRow] = {}
        self._evaluations: dict[tuple[int, int], EvaluationRow] = {}
        self._pieces: dict[int, list[PieceRow]] = {}

    def copy(self) -> "MemoryRows":
        """Rows are frozen, so only the tables are copied."""
        twin = MemoryRows()
        twin._position = self._position
        twin._groups = dict(self._groups)
        twin._trajectories = dict(self._trajectories)
        twin._stints = {number: dict(stints) for number, stints in self._stints.items()}
        twin._leases = dict(self._leases)
        twin._evaluations = dict(self._evaluations)
        twin._pieces = {number: list(pieces) for number, pieces in self._pieces.items()}
        return twin

    def apply(self, operation: tuple[Row, ...]) -> None:
        """Take in one operation."""
        for row in operation:
            match row:
                case PieceRow():
                    self._pieces.setdefault(row.trajectory, []).append(row)
                case ForgetTokens():
                    self._pieces.pop(row.trajectory, None)
                case LoseSteps():
                    self._lose(row)
                case _:
                    self._replace(row)

    def _replace(self, row: Row) -> None:
        match row:
            case TrajectoryRow():
                self._trajectories[row.num] = row
            case StintRow():
                self._stints.setdefault(row.trajectory, {})[row.attempt] = row
            case GroupRow():
                self._groups[row.num] = row
            case LeaseRow():
                self._leases[row.num] = row
            case EvaluationRow():
                self._evaluations[row.asked_version, row.round] = row
            case PositionRow():
                self._position = row

    def _lose(self, lost: LoseSteps) -> None:
        for number, row in self._trajectories.items():
            if row.state == "trained" and row.step is not None and row.step > lost.after_step:
                self._trajectories[number] = replace(row, state="dropped", reason=lost.reason)
        for number, group in self._groups.items():
            if group.settled and group.step is not None and group.step > lost.after_step:
                self._groups[number] = replace(group, step=None, part=None, place=None)

    def position(self) -> PositionRow:
        return self._position

    def groups(self, *, open_only: bool = False, prompt_id: str | None = None) -> Iterator[GroupRow]:
        for row in list(self._groups.values()):
            if not (open_only and row.settled) and prompt_id in (None, row.prompt_id):
                yield row

    def trajectories(self, within: range | None = None, state: State | None = None) -> Iterator[TrajectoryRow]:
        numbers = list(self._trajectories) if within is None else within
        for number in numbers:
            row = self._trajectories[number]
            if state in (None, row.state):
                yield row

    def stints(self, within: range | None = None) -> Iterator[StintRow]:
        for number in sorted(self._stints) if within is None else within:
            yield from (stint for _, stint in sorted(self._stints.get(number, {}).items()))

    def leases(self) -> Iterator[LeaseRow]:
        return iter(list(self._leases.values()))

    def evaluations(self) -> Iterator[EvaluationRow]:
        return iter([row for _, row in sorted(self._evaluations.items())])

    def pieces(self) -> Iterator[PieceRow]:
        for pieces in list(self._pieces.values()):
            yield from pieces

    def counts(self) -> Counter[State]:
        return Counter(row.state for row in self._trajectories.values())

    def trained_by_step(self) -> Counter[int]:
        return Counter(
            row.step for row in self._trajectories.values() if row.state == "trained" and row.step is not None
        )

    def trained_groups_by_step(self) -> Counter[int]:
        return Counter(row.step for row in self._groups.values() if row.settled and row.step is not None)
