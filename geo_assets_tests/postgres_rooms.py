"""Rooms in the real Postgres for tests: a schema of one's own, the backends that work in it, and its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import quote

import psycopg
from psycopg import sql

from geo_assets_tests.real_services import room, settings_of
from geo_assets_tests.waiting import until


@dataclass(frozen=True, slots=True)
class PostgresRoom:
    """A schema that no other test knows, and a URL whose sessions carry its name."""

    url: str
    schema: str

    def backends(self) -> list[int]:
        """Process ids of the server's sessions of this room's URL, whoever opened them, but for this one's own."""
        with psycopg.connect(self.url) as db:
            rows = db.execute(
                "SELECT pid FROM pg_stat_activity WHERE application_name = %s AND pid <> pg_backend_pid()",
                (self.schema,),
            ).fetchall()
        return [row[0] for row in rows]

    def wait_until_idle(self) -> None:
        """Wait until no session of this room runs a statement: a killed client's last one may still be at it."""
        with psycopg.connect(self.url, autocommit=True) as db:

            def idle() -> bool:
                (busy,) = db.execute(
                    """SELECT count(*) FROM pg_stat_activity
                       WHERE application_name = %s AND pid <> pg_backend_pid() AND state <> 'idle'""",
                    (self.schema,),
                ).fetchone() or (0,)
                return not busy

            until(idle, why=f"sessions of {self.schema} are idle")


@contextmanager
def postgres_room() -> Iterator[PostgresRoom]:
    """A room; what was made in its schema is dropped at the end."""
    url = settings_of("postgres")["GEO_ASSETS_POSTGRES_URL"]
    schema = room()
    separator = "&" if "?" in url else "?"
    try:
        yield PostgresRoom(f"{url}{separator}application_name={quote(schema)}", schema)
    finally:
        with psycopg.connect(url, autocommit=True) as db:
            db.execute(
                sql.SQL("SET client_min_messages = error; DROP SCHEMA IF EXISTS {} CASCADE").format(
                    sql.Identifier(schema)
                )
            )
