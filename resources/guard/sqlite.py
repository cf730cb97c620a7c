"""The embedded guard: keys with a time to live and leases, in one SQLite file shared by the processes of a machine."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence

from resources.guard.protocol import GuardUnavailable, Lease
from resources.guard.times import milliseconds
from resources.sqlite import SqliteFile

SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS keys (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL,
    expires_ms INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS keys_by_expiry ON keys (expires_ms);
CREATE TABLE IF NOT EXISTS leases (
    name TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    token INTEGER NOT NULL,
    expires_ms INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT, WITHOUT ROWID;
INSERT OR IGNORE INTO counters VALUES ('token', 0)
"""
_EXPIRE_ROWS = 5_000
"""Keys deleted in one transaction: some 10 ms, so that nobody waits long for the write lock."""


class SqliteGuard:
    """A guard in one SQLite file (`Guard`).

    Keys are written with synchronous=NORMAL: a killed process loses none, a power failure may lose the last ones, and a
    lost key only lets a duplicate through to the durable check behind. A grant is written with FULL, because its token
    is compared in other stores, which would outlive it: tokens come from one counter that never goes back.

    Args:
        path: The database file; its folder is made.
        lock_timeout_s: How long another process may hold the write lock before GuardUnavailable.
        clock: Seconds since the epoch; every process on the file must tell the same time.

    Raises:
        GuardUnavailable: The file cannot be opened, or is damaged: callers go on without the guard.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        lock_timeout_s: float = 2.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._file = SqliteFile(
            path,
            schema=_SCHEMA,
            version=SCHEMA_VERSION,
            synchronous="NORMAL",
            unavailable=GuardUnavailable,
            failed=GuardUnavailable,
            lock_timeout_s=lock_timeout_s,
        )

    def set_if_absent(self, key: str, value: str, ttl_s: float) -> str | None:
        """Set it and return None; when it is there and alive, leave it and return the value it has."""
        ttl_ms = milliseconds(ttl_s)
        # Most duplicates are found here, without the write lock; a living key can only be deleted or expire.
        present = self.get(key)
        if present is not None:
            return present
        with self._file.transaction() as connection:
            now_ms = self._now_ms()
            row = connection.execute(
                "SELECT value FROM keys WHERE key = ? AND expires_ms > ?", (key, now_ms)
            ).fetchone()
            if row is not None:
                return str(row[0])
            connection.execute("INSERT OR REPLACE INTO keys VALUES (?, ?, ?)", (key, value, now_ms + ttl_ms))
        return None

    def get(self, key: str) -> str | None:
        """The value of a key that is alive."""
        row = self._file.attempt(
            lambda c: c.execute(
                "SELECT value FROM keys WHERE key = ? AND expires_ms > ?", (key, self._now_ms())
            ).fetchone()
        )
        return None if row is None else str(row[0])

    def set_many_if_absent(self, values: Mapping[str, str], ttl_s: float) -> dict[str, str]:
        """`set_if_absent` of many in one transaction; those that were there and alive, with the value they have."""
        ttl_ms = milliseconds(ttl_s)
        if not values:
            return {}
        with self._file.transaction() as connection:
            now_ms = self._now_ms()
            present = self._living(connection, list(values), now_ms)
            absent = [[key, value] for key, value in values.items() if key not in present]
            # One statement for all: each gives up the interpreter's lock and waits to have it back.
            connection.execute(
                "INSERT OR REPLACE INTO keys "
                "SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), ? FROM json_each(?)",
                (now_ms + ttl_ms, json.dumps(absent)),
            )
        return present

    def get_many(self, keys: Sequence[str]) -> dict[str, str]:
        """Those of the keys that are alive, with their values, in one query."""
        if not keys:
            return {}
        return self._file.attempt(lambda c: self._living(c, keys, self._now_ms()))

    def delete(self, key: str) -> None:
        """Forget a key."""
        with self._file.transaction() as connection:
            connection.execute("DELETE FROM keys WHERE key = ?", (key,))

    def acquire(self, name: str, owner: str, ttl_s: float) -> Lease | None:
        """Take the lease if it is free, expired or this owner's already (same token then); else None."""
        ttl_ms = milliseconds(ttl_s)
        held = self._file.attempt(
            lambda c: c.execute("SELECT owner, expires_ms FROM leases WHERE name = ?", (name,)).fetchone()
        )
        if held is not None and held[0] != owner and held[1] > self._now_ms():
            return None
        with self._file.transaction("FULL") as connection:
            now_ms = self._now_ms()
            row = connection.execute("SELECT owner, token, expires_ms FROM leases WHERE name = ?", (name,)).fetchone()
            if row is not None and row[2] > now_ms:
                if row[0] != owner:
                    return None
                token = int(row[1])
            else:
                query = "UPDATE counters SET value = value + 1 WHERE name = 'token' RETURNING value"
                token = int(connection.execute(query).fetchone()[0])
            connection.execute(
                "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?)", (name, owner, token, now_ms + ttl_ms)
            )
        return Lease(name, owner, token, now_ms + ttl_ms)

    def renew(self, lease: Lease, ttl_s: float) -> Lease | None:
        """Extend it if its token is still the current one and it has not expired; None when it was lost."""
        ttl_ms = milliseconds(ttl_s)
        with self._file.transaction() as connection:
            now_ms = self._now_ms()
            count = connection.execute(
                "UPDATE leases SET expires_ms = ? WHERE name = ? AND token = ? AND expires_ms > ?",
                (now_ms + ttl_ms, lease.name, lease.token, now_ms),
            ).rowcount
        return Lease(lease.name, lease.owner, lease.token, now_ms + ttl_ms) if count else None

    def release(self, lease: Lease) -> None:
        """Free it if its token is still the current one."""
        with self._file.transaction() as connection:
            connection.execute("DELETE FROM leases WHERE name = ? AND token = ?", (lease.name, lease.token))

    def expire(self) -> int:
        """Delete keys (and leases) that are past their time; how many keys went."""
        now_ms = self._now_ms()
        total = 0
        while True:
            with self._file.transaction() as connection:
                count = connection.execute(
                    "DELETE FROM keys WHERE key IN (SELECT key FROM keys WHERE expires_ms <= ? LIMIT ?)",
                    (now_ms, _EXPIRE_ROWS),
                ).rowcount
                connection.execute("DELETE FROM leases WHERE expires_ms <= ?", (now_ms,))
            total += count
            if count < _EXPIRE_ROWS:
                break
        if total:
            self._file.give_back_space()
        return total

    def close(self) -> None:
        """Close every connection. Calls fail with GuardUnavailable afterwards."""
        self._file.close()

    @staticmethod
    def _living(connection: sqlite3.Connection, keys: Sequence[str], now_ms: int) -> dict[str, str]:
        """Those of the keys that are alive, with their values."""
        query = "SELECT key, value FROM keys WHERE key IN (SELECT value FROM json_each(?)) AND expires_ms > ?"
        return {str(key): str(value) for key, value in connection.execute(query, (json.dumps(list(keys)), now_ms))}

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)
