"""A SqliteFile whose readers see one snapshot and whose connections are prepared: what the bulk adapters need besides.

Ledger and feature store share it; what their tables hold and promise stays with them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from resources.sqlite import SqliteFile

LOCK_TIMEOUT_S = 30.0
"""How long to wait for another process's transaction: a bulk one of 20,000 rows takes a few seconds at most."""

CACHE_KIB = 16_384
"""Page cache of one connection: the inner pages of every table and index of a city stay in it."""


class SnapshotFile(SqliteFile):
    """A SqliteFile with read transactions; a subclass prepares each new connection."""

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A read transaction on this thread's connection: everything read comes from one snapshot."""
        connection = self.attempt(_begin_reading)
        try:
            yield connection
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back()
            raise self._translated(error, (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF) from error
        except BaseException:
            self._roll_back()
            raise

    def prepare_connection(self, connection: sqlite3.Connection) -> None:
        """Called once for each new connection, outside a transaction: scratch tables and settings."""
        connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        connection.execute("PRAGMA temp_store = MEMORY")

    def _opened(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        connection = super()._opened()
        self.prepare_connection(connection)
        return connection


def _begin_reading(connection: sqlite3.Connection) -> sqlite3.Connection:
    connection.execute("BEGIN")
    # A deferred transaction has no snapshot before its first read, and only here is a locked file waited for.
    connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
    return connection
