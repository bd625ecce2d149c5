"""The journal in one SQLite file in WAL mode, and reading it from outside while the run lives or after it died.

Invariants: one process writes, and holds `<file>.lock` meanwhile; one thread of it owns the connection. Operations are
written in their order, many in one transaction (group commit): `flush_s` after the first, or as soon as somebody awaits
`committed` or `durable`. Only for the latter is the file synced. A killed process loses at most the operations of
`flush_s` that nobody waited for, a power failure at most what was not awaited to be durable; always the newest ones.

The tables are documented in `laminar.data.sqlite_tables`.
"""

import asyncio
import contextlib
import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from msgspec import Struct

from laminar.data.journal import Rows
from laminar.data.rows import Row
from laminar.data.sqlite_tables import PAGE_BYTES, TableRows, TableWriter, check, create
from laminar.schema.errors import RunFailed, UserError

DURABLE_DEADLINE_S = 60.0
"""A disk that does not sync within this is taken for broken; a healthy one takes milliseconds."""

WAL_PAGES = 2048
"""Pages in the WAL before SQLite moves them into the file (16 MiB): fewer means more syncs, more a longer start-up."""


class Waiter(Struct, frozen=True):
    """Somebody who waits until everything up to operation `number` is committed, and synced if `sync` (None: until
    something fails)."""

    number: int | None
    sync: bool
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[None]"


class SqliteJournal:
    """A journal in a file. A context manager: on the way out everything queued is written and the file closed."""

    def __init__(self, path: Path, *, flush_s: float, deadline_s: float = DURABLE_DEADLINE_S) -> None:
        self._path = path
        self._flush_s = flush_s
        self._deadline_s = deadline_s
        self._lock_fd = _lock(path)
        try:
            self._connection = _open_to_write(path, deadline_s)
            self._writer = TableWriter(self._connection)
        except BaseException:
            os.close(self._lock_fd)
            raise
        self._changed = threading.Condition()
        # All below is guarded by _changed.
        self._queue: list[tuple[Row, ...]] = []
        self._num_written = 0
        self._num_committed = 0
        self._num_durable = 0
        self._waiters: list[Waiter] = []
        self._failure: str | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._write_for_ever, name=f"journal {path.name}", daemon=True)
        self._thread.start()

    def __enter__(self) -> "SqliteJournal":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def write(self, rows: tuple[Row, ...]) -> None:
        with self._changed:
            self._raise_failure()
            self._num_written += 1
            self._queue.append(rows)
            if len(self._queue) == 1:
                self._changed.notify()

    async def durable(self) -> None:
        with self._changed:
            self._raise_failure()
            if self._num_durable == self._num_written:
                return
            future = self._wait_for(self._num_written, sync=True)
            self._changed.notify()
        await self._in_time(future)

    async def committed(self) -> None:
        with self._changed:
            self._raise_failure()
            if self._num_committed == self._num_written:
                return
            future = self._wait_for(self._num_written, sync=False)
            self._changed.notify()
        await self._in_time(future)

    async def _in_time(self, future: "asyncio.Future[None]") -> None:
        try:
            async with asyncio.timeout(self._deadline_s):
                await future
        except TimeoutError:
            raise RunFailed(
                f"the disk of {self._path} did not store the journal within {self._deadline_s:g} s; "
                "check it, then resume the run"
            ) from None

    async def failed(self) -> NoReturn:
        with self._changed:
            self._raise_failure()
            future = self._wait_for(None, sync=False)
        await future
        raise AssertionError("only a failure ends this wait")

    @contextlib.contextmanager
    def rows(self) -> Iterator[Rows]:
        with read_journal(self._path) as rows:
            yield rows

    def close(self) -> None:
        """Write what is queued and close; later calls fail. Raises nothing: what failed was raised before."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()
        if self._lock_fd >= 0:
            self._connection.close()
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _wait_for(self, number: int | None, *, sync: bool) -> "asyncio.Future[None]":
        loop = asyncio.get_running_loop()
        waiter = Waiter(number, sync, loop, loop.create_future())
        self._waiters.append(waiter)
        return waiter.future

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RunFailed(self._failure)
        if self._is_closing:
            raise RunFailed(f"the journal {self._path} is closed")

    def _write_for_ever(self) -> None:
        """Write whatever is queued.

        waits for:  an operation, then `flush_s` or somebody who wants it committed
        ends:       when it is closed and nothing is queued, or at the first error
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_awaited() or self._is_closing)
                self._changed.wait_for(lambda: self._is_awaited() or self._is_closing, timeout=self._flush_s)
                operations, self._queue = self._queue, []
                number, sync, is_closing = self._num_written, self._is_sync_awaited(), self._is_closing
            try:
                if operations or sync:
                    self._commit(operations, sync=sync or is_closing)
            except (sqlite3.Error, OSError) as error:
                self._fail(f"the journal {self._path} cannot be written: {error}; make room, then resume the run")
                return
            except BaseException as error:
                self._fail(f"the journal {self._path} cannot be written: {type(error).__name__}: {error}")
                raise
            self._tell(number, synced=sync)
            if is_closing and not self._queue:
                return

    def _is_awaited(self) -> bool:
        return any(waiter.number is not None for waiter in self._waiters)

    def _is_sync_awaited(self) -> bool:
        return any(waiter.number is not None and waiter.sync for waiter in self._waiters)

    def _commit(self, operations: list[tuple[Row, ...]], *, sync: bool) -> None:
        connection = self._connection
        connection.execute(f"PRAGMA synchronous = {'FULL' if sync else 'NORMAL'}")
        connection.execute("BEGIN IMMEDIATE")
        try:
            self._writer.write(operations)
            if sync and not operations:
                # Earlier transactions were not synced, and one without a change would not be either.
                connection.execute("UPDATE position SET now_s = now_s")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def _tell(self, number: int, *, synced: bool) -> None:
        """Wake whoever waited for a commit of operations up to `number`, or for their being synced."""
        with self._changed:
            self._num_committed = number
            if synced:
                self._num_durable = number
            served = [
                w for w in self._waiters if w.number is not None and w.number <= number and (synced or not w.sync)
            ]
            self._waiters = [w for w in self._waiters if w not in served]
        for waiter in served:
            _wake(waiter, None)

    def _fail(self, failure: str) -> None:
        with self._changed:
            self._failure = failure
            self._queue.clear()
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            _wake(waiter, failure)


def _wake(waiter: Waiter, failure: str | None) -> None:
    def resolve() -> None:
        if not waiter.future.done():
            if failure is None:
                waiter.future.set_result(None)
            else:
                waiter.future.set_exception(RunFailed(failure))

    with contextlib.suppress(RuntimeError):  # the loop of the one who waited is closed
        waiter.loop.call_soon_threadsafe(resolve)


def _lock(path: Path) -> int:
    """Keep other writers out; the kernel lets go when the process ends, however it ends."""
    try:
        fd = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(f"the journal {path} cannot be opened: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise UserError(f"the journal {path} is in use by a run that is still alive") from None
    return fd


def _open_to_write(path: Path, deadline_s: float) -> sqlite3.Connection:
    try:
        # The timeout is for tools of the user that lock the file for a moment.
        connection = sqlite3.connect(path, timeout=deadline_s, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise UserError(f"the journal {path} cannot be opened: {error}") from None
    try:
        if not check(connection, path):
            connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            connection.execute("PRAGMA journal_mode = WAL")
            create(connection)
        connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
    except BaseException:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def read_journal(path: Path) -> Iterator[Rows]:
    """Read a journal at one moment, of a live run too, without disturbing it."""
    if not path.is_file():
        raise UserError(f"there is no journal at {path}")
    try:
        connection = sqlite3.connect(f"file:{_quoted(path)}?mode=ro", uri=True, isolation_level=None)
    except sqlite3.Error as error:
        raise UserError(f"the journal {path} cannot be opened: {error}") from None
    with contextlib.closing(connection):
        is_ours = check(connection, path)
        connection.execute("BEGIN")
        yield TableRows(connection, is_empty=not is_ours)


def _quoted(path: Path) -> str:
    return str(path.resolve()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
