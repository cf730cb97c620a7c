"""What every part of the Postgres ledger shares: connections, the transaction, the order of locks, rows as records."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import psycopg

from resources.ledger.postgres_schema import COMPONENT, MIGRATIONS
from resources.ledger.protocol import LedgerUnavailable, TileState
from resources.migrations import SchemaError, check
from resources.postgres import explained, open_pool, repeatable, where, with_retries

T = TypeVar("T")
Row = tuple[Any, ...]
Connection = psycopg.Connection[Row]

SETTING = "GEO_ASSETS_LEDGER_URL or GEO_ASSETS_POSTGRES_URL"

STATE = """key, revision, work_key, content_hash, bytes, empty, built_at_ms, data_time_ms, wanted_live,
    wanted_backfill, greatest(forced_live, forced_backfill), built, dirty_since_ms, attempts, given_up, error, lease,
    lease_until_ms, manifest"""


def now_ms() -> int:
    """Milliseconds since the epoch, UTC, by this machine's clock."""
    return time.time_ns() // 1_000_000


class LedgerTables:
    """Connections to the ledger's tables. READ COMMITTED throughout, and still compare-and-set is exact.

    Every transaction that changes tiles locks their rows first, in key order, by a statement of its own (`lock`). Each
    later statement of it has a snapshot taken after the locks were given: it sees what the last holder committed, and
    nobody changes those rows before the transaction ends. So transactions over common tiles follow one another as if
    alone, which is all that a condition on a revision, a mark as read or a lease needs; a stricter isolation would
    refuse some of them for what they never read. The same order for all means that none waits in a circle.

    Args:
        url: `postgresql://user:password@host:port/database`.
        schema: Holds the tables; `geo-assets migrate` makes it.
        pool: Most connections of this process.
        clock_ms: Milliseconds since the epoch, UTC, for leases and stamps; no key or revision depends on it.

    Raises:
        LedgerUnavailable: The server cannot be reached, or refuses the user; the message says why.
        SchemaBehind: Its tables are missing or older than this program's.
        SchemaTooNew: They are newer.
    """

    def __init__(
        self, url: str, schema: str = "geo_assets", pool: int = 4, clock_ms: Callable[[], int] = now_ms
    ) -> None:
        self._url = url
        self._now = clock_ms
        with self._explained():
            self._pool = open_pool(url, schema, pool, autocommit=True)
        try:
            with self._explained(), self._pool.connection() as connection:
                check(connection, schema, COMPONENT, MIGRATIONS)
        except SchemaError as error:
            self._pool.close()
            raise type(error)(f"Postgres at {where(url)} ({SETTING}): {error}") from None
        except BaseException:
            self._pool.close()
            raise

    def rows(self, query: str, parameters: Sequence[object] | dict[str, object] = ()) -> list[Row]:
        """All rows of one reading statement, which is one snapshot."""
        with self._explained(), self._pool.connection() as connection:
            return fetched(connection, query, parameters)

    def write(self, work: Callable[[Connection], T], *, again: bool = False) -> T:
        """Do `work` in one transaction; again from its start when it was the victim of a deadlock.

        Args:
            work: What is to be done.
            again: It is done again when a crash of the server takes it back, so nobody waits for the server's disk:
                hints are read again from the position in the same transaction, a lease is nobody's any more, a settle
                finds the same, a duty is paid twice.
        """

        def once() -> T:
            with self._pool.connection() as connection, (repeatable if again else _transaction)(connection):
                return work(connection)

        with self._explained():
            return with_retries(once)

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()

    def _explained(self) -> AbstractContextManager[None]:
        return explained(LedgerUnavailable, SETTING, self._url)


def _transaction(connection: Connection) -> AbstractContextManager[object]:
    return connection.transaction()


def fetched(connection: Connection, query: str, parameters: Sequence[object] | dict[str, object] = ()) -> list[Row]:
    """Run a statement and read its rows."""
    return connection.execute(query.encode(), parameters).fetchall()


def changed(connection: Connection, query: str, parameters: Sequence[object] | dict[str, object] = ()) -> int:
    """Run a statement without rows; how many it changed."""
    return connection.execute(query.encode(), parameters).rowcount


def number(connection: Connection, query: str, parameters: Sequence[object] | dict[str, object] = ()) -> int:
    """Run a statement that answers one number."""
    return int(fetched(connection, query, parameters)[0][0])


def storable(keys: Iterable[str]) -> list[str]:
    """The distinct keys that a row can have, sorted: no partition key has other characters than ASCII, or a NUL."""
    return sorted({key for key in keys if is_storable(key)})


def is_storable(key: str) -> bool:
    """Whether a row can have this key."""
    return key.isascii() and "\0" not in key


def plain(text: str) -> str:
    """Text as Postgres can hold it: without NUL and lone surrogates, which an error's message may quote."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def make(connection: Connection, keys: Iterable[str]) -> None:
    """Make the rows of tiles that have none, in key order and before any lock.

    Whoever waits here for another's new row then holds nothing that the other still needs.
    """
    wanted = storable(keys)
    if wanted:
        changed(
            connection,
            """INSERT INTO tile (key) SELECT k FROM unnest(%s::text[]) AS k ORDER BY k COLLATE "C"
               ON CONFLICT DO NOTHING""",
            (wanted,),
        )


def lock(connection: Connection, keys: Iterable[str], *, new: bool = False) -> list[str]:
    """Lock the rows of these tiles until the transaction ends, in key order; the keys, sorted and distinct.

    With `new`, rows that are missing are made first.
    """
    wanted = storable(keys)
    if wanted:
        if new:
            make(connection, wanted)
        fetched(
            connection,
            "SELECT count(*) FROM (SELECT FROM tile WHERE key = ANY(%s) ORDER BY key FOR NO KEY UPDATE) AS locked",
            (wanted,),
        )
    return wanted


def next_mark(connection: Connection) -> int:
    """A new value of the counter of marks, to be taken under the locks of the tiles it is for.

    Each tile then sees values that only grow, in the order of the commits: a value taken before the lock could be
    overtaken by a larger one that is committed, read and built for first, and what it stands for (a fault that was
    cleared) would look answered. Between tiles there is no order to keep, and markers of different tiles do not wait
    for each other. A transaction that fails leaves a gap, which means nothing.
    """
    return number(connection, "SELECT nextval('mark_counter')")


def state(row: Row) -> TileState:
    """A row of the columns STATE."""
    return TileState(*row)
