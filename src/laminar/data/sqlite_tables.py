"""The journal's tables in SQLite: create, check, write, read.

Schema, version 1. The file carries `application_id` 0x4C4D4E52 ("LMNR") and `user_version` 1. One table per kind of row
in `laminar.data.rows`, with the fields as columns and their meaning documented there:

    position      one row: how far the shard has come
    groups        one row per prompt drawn
    trajectories  one row per trajectory ever issued: its state, and what remains of it
    leases        one row per batch that was ever in somebody's hands
    stints        one row per attempt of a trajectory
    evaluations   one row per evaluation asked for
    pieces        tokens (int32) and log-probs (float32) that may still be needed, in the order in which they came;
                  those of a trajectory that is trained, dropped or evaluated are deleted

`pieces` is keyed by arrival and has no index: appends of thousands of trajectories fill whole pages, where an order by
trajectory would rewrite one page for each. Who deletes knows the keys.
"""

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct, convert, structs

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
from laminar.schema.errors import UserError
from laminar.schema.trajectories import Piece

APPLICATION_ID = 0x4C4D4E52
SCHEMA_VERSION = 1

PAGE_BYTES = 8192
"""Seven appends of 128 tokens fill one page; three would leave a quarter of 4,096 bytes empty."""

SCHEMA = """
CREATE TABLE position (
    cursor INTEGER NOT NULL, num_groups INTEGER NOT NULL, num_trajectories INTEGER NOT NULL,
    num_leases INTEGER NOT NULL, num_dead_leases INTEGER NOT NULL, num_completed INTEGER NOT NULL,
    learner_version INTEGER NOT NULL, committed_step INTEGER NOT NULL, now_s REAL NOT NULL
);
CREATE TABLE groups (
    num INTEGER PRIMARY KEY, group_id TEXT NOT NULL, purpose TEXT NOT NULL, prompt_id TEXT NOT NULL,
    prompt_index INTEGER NOT NULL, position INTEGER NOT NULL, first_trajectory INTEGER NOT NULL,
    num_members INTEGER NOT NULL, issued_s REAL NOT NULL, asked_version INTEGER, completed INTEGER,
    completed_s REAL, step INTEGER, part INTEGER, place INTEGER, taken_s REAL, settled INTEGER NOT NULL
);
CREATE TABLE trajectories (
    num INTEGER PRIMARY KEY, trajectory_id TEXT NOT NULL, "group" INTEGER NOT NULL, member INTEGER NOT NULL,
    state TEXT NOT NULL, issued_s REAL NOT NULL, attempt INTEGER NOT NULL, lease INTEGER, adopted_from INTEGER,
    version INTEGER,
    infrastructure_failures INTEGER NOT NULL, data_failures INTEGER NOT NULL, reason TEXT, reward REAL,
    metrics TEXT NOT NULL, stop_reason TEXT,
    num_tokens INTEGER NOT NULL, num_generated INTEGER NOT NULL, learner_version INTEGER, staleness INTEGER,
    step INTEGER, finished_s REAL, settled_s REAL
);
CREATE TABLE leases (
    num INTEGER PRIMARY KEY, lease_id TEXT NOT NULL, version INTEGER NOT NULL, purpose TEXT NOT NULL,
    opened_s REAL NOT NULL
);
CREATE TABLE stints (
    trajectory INTEGER NOT NULL, attempt INTEGER NOT NULL, lease INTEGER NOT NULL, num_tokens INTEGER NOT NULL,
    began_s REAL NOT NULL, ended_s REAL, "end" TEXT, PRIMARY KEY (trajectory, attempt)
) WITHOUT ROWID;
CREATE TABLE evaluations (
    asked_version INTEGER NOT NULL, round INTEGER NOT NULL, version INTEGER, done INTEGER NOT NULL,
    void INTEGER NOT NULL, accuracy REAL, num INTEGER NOT NULL, mean_tokens REAL, PRIMARY KEY (asked_version, round)
) WITHOUT ROWID;
CREATE TABLE pieces (
    num INTEGER PRIMARY KEY, trajectory INTEGER NOT NULL, generated INTEGER NOT NULL, version INTEGER NOT NULL,
    token_ids BLOB NOT NULL, logprobs BLOB NOT NULL
);
"""

TABLES: dict[type[Struct], str] = {
    GroupRow: "groups",
    TrajectoryRow: "trajectories",
    LeaseRow: "leases",
    StintRow: "stints",
    EvaluationRow: "evaluations",
}
"""Tables whose columns are the fields of their row, in order."""

METRICS_AT = TrajectoryRow.__struct_fields__.index("metrics")

AnyRow = TypeVar("AnyRow", bound=Struct)


def columns(row_type: type[Struct]) -> str:
    """Column names of a row type, quoted and in order."""
    return ", ".join(f'"{name}"' for name in row_type.__struct_fields__)


def replacement(row_type: type[Struct]) -> str:
    """The statement that writes one row."""
    marks = ", ".join("?" * len(row_type.__struct_fields__))
    return f"INSERT OR REPLACE INTO {TABLES[row_type]} ({columns(row_type)}) VALUES ({marks})"


REPLACE = {row_type: replacement(row_type) for row_type in TABLES}
POSITION_MARKS = ", ".join("?" * len(PositionRow.__struct_fields__))
REPLACE_POSITION = f"INSERT OR REPLACE INTO position (rowid, {columns(PositionRow)}) VALUES (1, {POSITION_MARKS})"
INSERT_PIECE = "INSERT INTO pieces VALUES (?, ?, ?, ?, ?, ?)"
DELETE_PIECE = "DELETE FROM pieces WHERE num = ?"
LOSE_TRAJECTORIES = "UPDATE trajectories SET state = 'dropped', reason = ? WHERE state = 'trained' AND step > ?"
LOSE_GROUPS = "UPDATE groups SET step = NULL, part = NULL, place = NULL WHERE settled AND step > ?"


def check(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the file holds our tables; False if it is empty. Raises `UserError` if it is somebody else's."""
    try:
        application_id = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        num_tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    except sqlite3.DatabaseError as error:
        raise UserError(f"{path} is not a journal of Laminar: {error}") from None
    if application_id == 0 and num_tables == 0:
        return False
    if application_id != APPLICATION_ID:
        raise UserError(f"{path} is a database of another program, not a journal of Laminar")
    if version != SCHEMA_VERSION:
        made_by = "newer" if version > SCHEMA_VERSION else "older"
        raise UserError(
            f"{path} was written by a {made_by} Laminar (journal version {version}, this one reads {SCHEMA_VERSION})"
        )
    return True


def create(connection: sqlite3.Connection) -> None:
    """Make the tables, all or none of them."""
    pragmas = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION};"
    connection.executescript(f"BEGIN IMMEDIATE; {SCHEMA} {pragmas} COMMIT;")


class TableWriter:
    """Writes operations; call inside a transaction. Knows the keys of all pieces that are kept."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._piece_numbers: dict[int, list[int]] = {}
        self._next_piece = 1
        for number, trajectory in connection.execute("SELECT num, trajectory FROM pieces ORDER BY num"):
            self._piece_numbers.setdefault(trajectory, []).append(number)
            self._next_piece = number + 1

    def write(self, operations: list[tuple[Row, ...]]) -> None:
        """Write operations in order; tables do not refer to each other, so each gets its rows in one go."""
        inserts: list[tuple[Any, ...]] = []
        deletes: list[tuple[int]] = []
        latest: dict[type[Struct], dict[Any, Struct]] = {row_type: {} for row_type in TABLES}
        position: PositionRow | None = None
        for operation in operations:
            for row in operation:
                match row:
                    case PieceRow():
                        inserts.append(self._insert(row))
                    case ForgetTokens():
                        deletes.extend((number,) for number in self._piece_numbers.pop(row.trajectory, ()))
                    case PositionRow():
                        position = row
                    case LoseSteps():
                        self._write_latest(latest)
                        self._connection.execute(LOSE_TRAJECTORIES, (row.reason, row.after_step))
                        self._connection.execute(LOSE_GROUPS, (row.after_step,))
                    case _:
                        latest[type(row)][_key(row)] = row
        self._write_latest(latest)
        self._connection.executemany(INSERT_PIECE, inserts)
        self._connection.executemany(DELETE_PIECE, deletes)
        if position is not None:
            self._connection.execute(REPLACE_POSITION, structs.astuple(position))

    def _insert(self, row: PieceRow) -> tuple[Any, ...]:
        number, piece = self._next_piece, row.piece
        self._next_piece = number + 1
        self._piece_numbers.setdefault(row.trajectory, []).append(number)
        return number, row.trajectory, piece.generated, piece.version, piece.token_ids, piece.logprobs

    def _write_latest(self, latest: dict[type[Struct], dict[Any, Struct]]) -> None:
        for row_type, rows in latest.items():
            if rows:
                self._connection.executemany(REPLACE[row_type], [_values(row) for row in rows.values()])
                rows.clear()


def _key(row: Struct) -> Any:
    match row:
        case StintRow():
            return row.trajectory, row.attempt
        case EvaluationRow():
            return row.asked_version, row.round
        case _:
            return structs.astuple(row)[0]


def _values(row: Struct) -> tuple[Any, ...]:
    values = structs.astuple(row)
    if type(row) is TrajectoryRow:
        return (*values[:METRICS_AT], json.dumps(row.metrics), *values[METRICS_AT + 1 :])
    return values


class TableRows:
    """`Rows` of one connection; begin a transaction before, to see one moment."""

    def __init__(self, connection: sqlite3.Connection, *, is_empty: bool = False) -> None:
        self._connection = connection
        self._is_empty = is_empty

    def position(self) -> PositionRow:
        return next(self._select(PositionRow, "position"), PositionRow())

    def groups(self, *, open_only: bool = False, prompt_id: str | None = None) -> Iterator[GroupRow]:
        where, arguments = ["TRUE"], []
        if open_only:
            where.append("NOT settled")
        if prompt_id is not None:
            where.append("prompt_id = ?")
            arguments.append(prompt_id)
        return self._select(GroupRow, f"groups WHERE {' AND '.join(where)} ORDER BY num", *arguments)

    def trajectories(self, within: range | None = None, state: State | None = None) -> Iterator[TrajectoryRow]:
        where, arguments = _span("num", within)
        if state is not None:
            where += " AND state = ?"
            arguments.append(state)
        return self._select(TrajectoryRow, f"trajectories WHERE {where} ORDER BY num", *arguments)

    def stints(self, within: range | None = None) -> Iterator[StintRow]:
        where, arguments = _span("trajectory", within)
        return self._select(StintRow, f"stints WHERE {where} ORDER BY trajectory, attempt", *arguments)

    def leases(self) -> Iterator[LeaseRow]:
        return self._select(LeaseRow, "leases ORDER BY num")

    def evaluations(self) -> Iterator[EvaluationRow]:
        return self._select(EvaluationRow, "evaluations ORDER BY asked_version, round")

    def pieces(self) -> Iterator[PieceRow]:
        if self._is_empty:
            return
        query = "SELECT trajectory, generated, version, token_ids, logprobs FROM pieces ORDER BY num"
        for trajectory, generated, version, token_ids, logprobs in self._connection.execute(query):
            piece = Piece(token_ids=token_ids, logprobs=logprobs, generated=bool(generated), version=version)
            yield PieceRow(trajectory=trajectory, piece=piece)

    def counts(self) -> Counter[State]:
        return self._count("SELECT state, count(*) FROM trajectories GROUP BY state")

    def trained_by_step(self) -> Counter[int]:
        return self._count("SELECT step, count(*) FROM trajectories WHERE state = 'trained' GROUP BY step")

    def trained_groups_by_step(self) -> Counter[int]:
        return self._count("SELECT step, count(*) FROM groups WHERE settled AND step IS NOT NULL GROUP BY step")

    def _count(self, query: str) -> Counter[Any]:
        return Counter() if self._is_empty else Counter(dict(self._connection.execute(query).fetchall()))

    def _select(self, row_type: type[AnyRow], what: str, *arguments: Any) -> Iterator[AnyRow]:
        if self._is_empty:
            return
        names = row_type.__struct_fields__
        for values in self._connection.execute(f"SELECT {columns(row_type)} FROM {what}", arguments):
            fields = dict(zip(names, values, strict=True))
            if "metrics" in fields:
                # json, not msgspec: a metric may be NaN
                fields["metrics"] = {} if fields["metrics"] == "{}" else json.loads(fields["metrics"])
            yield convert(fields, row_type, strict=False)


def _span(column: str, within: range | None) -> tuple[str, list[Any]]:
    if within is None:
        return "TRUE", []
    return f"{column} >= ? AND {column} < ?", [within.start, within.stop]
