"""One SQLite file used by many threads and processes at once: connections, waiting for locks, what an error means.

The embedded adapters share it. What their tables hold and promise stays with them.
"""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import quote

T = TypeVar("T")

Synchronous = Literal["FULL", "NORMAL"]

# Primary result codes (https://sqlite.org/rescode.html) that pass when somebody else lets go of a lock.
_WAIT = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
# Those that a person or time must mend outside this process: disk, permissions, memory.
_AWAY = {
    sqlite3.SQLITE_READONLY: "is read-only",
    sqlite3.SQLITE_PERM: "may not be opened (permissions)",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened (missing folder or permissions)",
    sqlite3.SQLITE_FULL: "has no room left (disk full)",
    sqlite3.SQLITE_IOERR: "cannot be read or written (disk full or failing)",
    sqlite3.SQLITE_NOMEM: "cannot be used (out of memory)",
}
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT}


class _Connection(sqlite3.Connection):
    """sqlite3's own, with room for a weak reference and for what this module knows of it."""

    synchronous: str = ""


_abandoned: list[object] = []
"""Connections that a fork brought into a child. Using or closing one there would damage the parent's; they are kept."""
VERSION_QUERY = "SELECT max(version) FROM schema_version"
"""Answers the version of a file's schema; an adapter may keep it elsewhere."""

OLDEST_QUERY = "SELECT program FROM schema_oldest"
"""Answers the oldest version whose programs work on a file, where it is not the file's own."""

_open_files: weakref.WeakSet[SqliteFile] = weakref.WeakSet()


def _forget_after_fork() -> None:
    for file in list(_open_files):
        file._after_fork()  # pyright: ignore[reportPrivateUsage]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)


class SqliteFile:
    """A database file in WAL mode, with a connection a thread.

    Args:
        path: The file; its folder is made when it is missing.
        schema: Statements that make the tables; each must bear being run again.
        version: Of the schema. A file of a newer one is refused, one of an older one is brought up to date.
        synchronous: FULL syncs the disk at every commit; NORMAL leaves the last commits to a power failure.
        unavailable: The caller's error for what may pass: disk full, read-only, locked too long.
        failed: The caller's error for what does not: a damaged file, one of a newer version.
        lock_timeout_s: How long another process may hold the write lock before it is `unavailable`.
        steps: By version, the statements that bring a file of the version before to it; a transaction each.
        compatible: By version, the oldest version whose programs still work on such a file, where that is not the
            version itself: its step only adds.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        schema: str,
        version: int,
        synchronous: Synchronous,
        unavailable: type[Exception],
        failed: type[Exception],
        lock_timeout_s: float,
        steps: Mapping[int, Sequence[str]] | None = None,
        compatible: Mapping[int, int] | None = None,
    ) -> None:
        self.path = Path(path).absolute()
        self._compatible = compatible or {}
        self._schema, self._version = schema, version
        self._steps = steps or {}
        self._synchronous: Synchronous = synchronous
        self._unavailable, self._failed = unavailable, failed
        self._lock_timeout_s = lock_timeout_s
        self._local = threading.local()
        self._connections: weakref.WeakSet[_Connection] = weakref.WeakSet()
        self._closed = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unavailable(f"{self.path.parent} cannot be made: {error.strerror}") from error
        self.attempt(self._prepare)
        self._inode = self._identity()
        _open_files.add(self)

    def attempt(self, work: Callable[[sqlite3.Connection], T], connection: sqlite3.Connection | None = None) -> T:
        """Do `work` with this thread's connection or the one given; again while the file is locked, up to the limit."""
        deadline = time.monotonic() + self._lock_timeout_s
        pause = 0.0005
        while True:
            try:
                return work(connection or self.connection())
            except sqlite3.Error as error:
                self._roll_back(connection)
                code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
                if code not in _WAIT or time.monotonic() > deadline:
                    raise self._translated(error, code) from error
            # SQLite's own busy handler sleeps up to 100 ms a time; a commit holds the lock for about one.
            time.sleep(random.uniform(pause / 2, pause))
            pause = min(pause * 1.5, 0.002)

    @contextlib.contextmanager
    def transaction(self, synchronous: Synchronous | None = None) -> Iterator[sqlite3.Connection]:
        """A write transaction: committed at the end, rolled back on any error.

        Args:
            synchronous: For this one, where it differs from the file's own.
        """
        connection = self.attempt(lambda c: self._begin(c, self._synchronous if synchronous is None else synchronous))
        try:
            yield connection
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back()
            raise self._translated(error, (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF) from error
        except BaseException:
            self._roll_back()
            raise

    def connection(self) -> sqlite3.Connection:
        """This thread's connection. Statements outside `attempt` and `transaction` are not retried."""
        connection: _Connection | None = getattr(self._local, "connection", None)
        if self._closed:
            raise self._unavailable(f"{self.path} is closed")
        if connection is None:
            connection = self._local.connection = self._opened()
        return connection

    def own_connection(self) -> sqlite3.Connection:
        """A connection that belongs to one object instead of one thread; its owner lets one thread at a time use it."""
        return self.attempt(lambda _: self._opened())

    def close(self) -> None:
        """Close every thread's connection."""
        self._closed = True
        for connection in list(self._connections):
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def give_back_space(self, pages: int = 200) -> None:
        """Return free pages to the file system when they are over a quarter of the file; the rest is reused.

        Args:
            pages: Of 4 kB, moved in one transaction: with 200, a writer waits some 10 ms.
        """
        free = self.attempt(lambda c: int(c.execute("PRAGMA freelist_count").fetchone()[0]))
        total = self.attempt(lambda c: int(c.execute("PRAGMA page_count").fetchone()[0]))
        while free * 4 > total and free > 256:
            # Not execute(): it takes one step of a statement without columns, which is one page.
            self.attempt(lambda c: c.executescript(f"PRAGMA incremental_vacuum({pages})"))
            before, free = free, self.attempt(lambda c: int(c.execute("PRAGMA freelist_count").fetchone()[0]))
            total = self.attempt(lambda c: int(c.execute("PRAGMA page_count").fetchone()[0]))
            if free >= before:
                return

    def _opened(self) -> _Connection:
        connection = sqlite3.connect(
            self.path, timeout=0, isolation_level=None, check_same_thread=False, factory=_Connection
        )
        # 64 MB: a long reader lets the write-ahead log grow; what is over this is given back at the next reset.
        connection.execute("PRAGMA journal_size_limit = 67108864")
        self._set_synchronous(connection, self._synchronous)
        self._connections.add(connection)
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            # It takes the write lock and counts only before the first table: on any later connection, a thread's first
            # read would wait for whoever writes.
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA journal_mode = WAL")
        found = self._found_version(connection)
        if found is None:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("CREATE TABLE IF NOT EXISTS schema_version (version INTEGER PRIMARY KEY) STRICT")
            # Asked again under the lock: an older program may have made its tables meanwhile.
            if connection.execute("SELECT max(version) FROM schema_version").fetchone()[0] is None:
                for statement in self._schema.split(";"):
                    if statement.strip():
                        connection.execute(statement)
                connection.execute("INSERT INTO schema_version VALUES (?)", (self._version,))
                self._note_oldest(connection, self._oldest_after(self._version))
            connection.execute("COMMIT")
        self._bring_up_to_date(connection)

    def _bring_up_to_date(self, connection: sqlite3.Connection) -> None:
        """Take each step that is missing; a file of a newer version is refused unless it says it is compatible."""
        while (found := self._found_version(connection) or 0) != self._version:
            if found > self._version:
                if (oldest := self._found_oldest(connection) or found) <= self._version:
                    return
                raise self._failed(
                    f"{self.path} has schema version {found}, which works with programs of version {oldest} and newer; "
                    f"this program knows up to {self._version}: use a newer one"
                )
            connection.execute("BEGIN IMMEDIATE")
            # Another process may have taken the step while this one waited for the lock.
            if self._found_version(connection) == found:
                for statement in self._steps[found + 1]:
                    connection.execute(statement)
                self._note_version(connection, found + 1)
                self._note_oldest(connection, self._oldest_after(found + 1))
            connection.execute("COMMIT")

    def _found_version(self, connection: sqlite3.Connection) -> int | None:
        """The file's version; None where it has no tables yet."""
        return _answer(connection, VERSION_QUERY)

    def _note_version(self, connection: sqlite3.Connection, version: int) -> None:
        connection.execute("INSERT INTO schema_version VALUES (?)", (version,))

    def _oldest_after(self, version: int) -> int:
        """The oldest version whose programs work on a file of this one: no step before it may have left them out."""
        return max(self._compatible.get(each, each) for each in range(1, version + 1))

    def _found_oldest(self, connection: sqlite3.Connection) -> int | None:
        """The oldest version whose programs work on the file; None where it does not say, and means its own."""
        return _answer(connection, OLDEST_QUERY)

    def _note_oldest(self, connection: sqlite3.Connection, oldest: int) -> None:
        # Many files are of the version that they work with, and have no such table.
        if oldest == self._found_version(connection):
            connection.execute("DROP TABLE IF EXISTS schema_oldest")
            return
        connection.execute("CREATE TABLE IF NOT EXISTS schema_oldest (program INTEGER NOT NULL) STRICT")
        connection.execute("DELETE FROM schema_oldest")
        connection.execute("INSERT INTO schema_oldest VALUES (?)", (oldest,))

    def _begin(self, connection: sqlite3.Connection, synchronous: Synchronous) -> sqlite3.Connection:
        self._set_synchronous(connection, synchronous)
        connection.execute("BEGIN IMMEDIATE")
        # A deleted or replaced file would take commits that nobody ever reads.
        if self._identity() != self._inode:
            self._roll_back()
            raise self._unavailable(f"{self.path} was removed or replaced while it was open: restart the process")
        return connection

    @staticmethod
    def _set_synchronous(connection: sqlite3.Connection, synchronous: Synchronous) -> None:
        if isinstance(connection, _Connection) and connection.synchronous != synchronous:
            connection.execute(f"PRAGMA synchronous = {synchronous}")
            connection.synchronous = synchronous

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _roll_back(self, connection: sqlite3.Connection | None = None) -> None:
        connection = connection or getattr(self._local, "connection", None)
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def _translated(self, error: sqlite3.Error, code: int) -> Exception:
        if code in _WAIT:
            return self._unavailable(f"{self.path} was locked for more than {self._lock_timeout_s:g} s")
        if code in _AWAY:
            return self._unavailable(f"{self.path} {_AWAY[code]}: {error}")
        if code in _DAMAGED:
            return self._failed(f"{self.path} is damaged or no database of ours: {error}")
        if self._closed:
            return self._unavailable(f"{self.path} is closed")
        return self._failed(f"{self.path}: {error}")

    def _after_fork(self) -> None:
        _abandoned.extend((self._local, *self._connections))
        self._local = threading.local()
        self._connections = weakref.WeakSet()


def file_version(path: Path, query: str = VERSION_QUERY) -> int:
    """The version of a file's schema, without opening it for anything else; 0 where there is no file, or no table.

    Args:
        path: Of the database.
        query: What answers it.
    """
    if not path.exists():
        return 0
    with contextlib.closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as connection:
        return _answer(connection, query) or 0


def _answer(connection: sqlite3.Connection, query: str) -> int | None:
    try:
        row = connection.execute(query).fetchone()
    except sqlite3.OperationalError as error:
        if "no such table" in str(error):
            return None
        raise
    return row[0] if row else None
