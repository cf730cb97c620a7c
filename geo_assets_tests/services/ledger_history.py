"""Every value that a named value of the ledger ever had: the database itself writes them down, so none is missed."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from geo_assets.settings import Settings
from geo_assets_tests.waiting import patient

_SQLITE = """
CREATE TABLE test_history (at INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, value TEXT NOT NULL);
CREATE TRIGGER test_history_put AFTER INSERT ON named_value
BEGIN INSERT INTO test_history (name, value) VALUES (new.name, new.value); END;
CREATE TRIGGER test_history_moved AFTER UPDATE ON named_value
BEGIN INSERT INTO test_history (name, value) VALUES (new.name, new.value); END;
"""

_POSTGRES = """
CREATE TABLE test_history (at bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text NOT NULL, value text NOT NULL);
CREATE FUNCTION test_history() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN INSERT INTO {schema}.test_history (name, value) VALUES (new.name, new.value); RETURN new; END $$;
CREATE TRIGGER test_history AFTER INSERT OR UPDATE ON named_value FOR EACH ROW EXECUTE FUNCTION test_history();
"""


class LedgerHistory:
    """What the ledger's named values were, one after the other, from the moment this is made.

    Args:
        settings: Of the ledger, whose tables are there.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        with self._open() as db:
            if isinstance(db, sqlite3.Connection):
                db.executescript(_SQLITE)
            else:
                db.execute(_POSTGRES.format(schema=settings.postgres_schema))

    def of(self, name: str) -> list[str]:
        """All values of one, the oldest first."""
        with self._open() as db:
            rows = db.execute("SELECT name, value FROM test_history ORDER BY at").fetchall()
        return [value for of, value in rows if of == name]

    @contextmanager
    def _open(self) -> Iterator[Any]:
        url = self._settings.ledger_url or self._settings.postgres_url
        if url is None:
            file = sqlite3.connect(self._settings.home / "ledger.db", timeout=patient(30))
            try:
                yield file
            finally:
                file.close()
            return
        import psycopg

        with psycopg.connect(url.get_secret_value(), autocommit=True) as server:
            server.execute(
                "SELECT set_config('search_path', %s, false)", (f"{self._settings.postgres_schema}, public",)
            )
            yield server
