"""Versions of a component's tables in Postgres: bringing them up to date, and refusing what this program cannot read.

Which tables there are is each component's own; the SQLite files of the embedded adapters have the same idea in sqlite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from resources.postgres import conninfo


class SchemaError(Exception):
    """The tables of a component are not the ones this program works with."""


class SchemaBehind(SchemaError):
    """They are of an older version, or missing: `geo-assets migrate` brings them up to date."""


class SchemaTooNew(SchemaError):
    """They are of a version that this program does not know: a newer program is needed."""


@dataclass(frozen=True, slots=True)
class Migration:
    """One step of a component's tables from version `number - 1` to `number`."""

    number: int
    """From 1, without gaps."""
    title: str
    statements: tuple[str, ...]
    """SQL, in order; names without a schema are of the component's own."""


_TABLE = """CREATE TABLE IF NOT EXISTS schema_versions (
    component text NOT NULL, number integer NOT NULL, title text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (component, number))"""


def migrate(url: str, schema: str, component: str, migrations: Sequence[Migration]) -> list[int]:
    """Apply what is missing, each step in one transaction; two at once wait for each other.

    Args:
        url: `postgresql://…` of a user who may create tables, and the schema itself where it is missing.
        schema: Made when it is missing.
        component: What the tables belong to, such as `ledger`.
        migrations: All of the component's, from number 1 on.

    Returns:
        Numbers of the steps applied, none when it was up to date.

    Raises:
        SchemaTooNew: The tables are of a later version than the last of these.
        psycopg.Error: The server is away or refuses a statement; steps before that one stay.
    """
    _in_order(component, migrations)
    applied: list[int] = []
    with psycopg.connect(conninfo(url, schema), autocommit=True) as connection:
        while (number := _next(connection, schema, component, migrations)) is not None:
            applied.append(number)
    return applied


def version(connection: psycopg.Connection[Any], schema: str, component: str) -> int:
    """The version of a component's tables; 0 when there are none."""
    found = connection.execute("SELECT to_regclass(%s)", (f'"{schema}".schema_versions',)).fetchone()
    if found is None or found[0] is None:
        return 0
    query = sql.SQL("SELECT coalesce(max(number), 0) FROM {}.schema_versions WHERE component = %s")
    row = connection.execute(query.format(sql.Identifier(schema)), (component,)).fetchone()
    return int(row[0]) if row else 0


def check(connection: psycopg.Connection[Any], schema: str, component: str, migrations: Sequence[Migration]) -> None:
    """Refuse tables of any other version than the last of these.

    Raises:
        SchemaBehind: They are older or missing.
        SchemaTooNew: They are newer.
    """
    found, known = version(connection, schema, component), _in_order(component, migrations)
    if found > known:
        raise _too_new(schema, component, found, known)
    if found == 0:
        raise SchemaBehind(f"schema {schema} has no tables of {component}: run `geo-assets migrate`")
    if found < known:
        raise SchemaBehind(
            f"{component} in schema {schema} has version {found}, this program needs {known}: run `geo-assets migrate`"
        )


def _next(
    connection: psycopg.Connection[Any], schema: str, component: str, migrations: Sequence[Migration]
) -> int | None:
    with connection.transaction():
        # Of this database and schema alone, and let go when the transaction ends, however it ends.
        connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"migrations of {schema}",))
        # Not IF NOT EXISTS: that asks for the right to create one even where it is there.
        if connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (schema,)).fetchone() is None:
            connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
        found = version(connection, schema, component)
        if found > len(migrations):
            raise _too_new(schema, component, found, len(migrations))
        if found == len(migrations):
            return None
        if connection.execute("SELECT to_regclass(%s)", (f'"{schema}".schema_versions',)).fetchone() == (None,):
            connection.execute(_TABLE)
        step = migrations[found]
        for statement in step.statements:
            connection.execute(statement.encode())
        connection.execute(
            "INSERT INTO schema_versions (component, number, title) VALUES (%s, %s, %s)",
            (component, step.number, step.title),
        )
        return step.number


def _in_order(component: str, migrations: Sequence[Migration]) -> int:
    numbers = [migration.number for migration in migrations]
    if numbers != list(range(1, len(numbers) + 1)):
        raise ValueError(f"migrations of {component} are numbered {numbers}, not from 1 without gaps")
    return len(numbers)


def _too_new(schema: str, component: str, found: int, known: int) -> SchemaTooNew:
    return SchemaTooNew(
        f"{component} in schema {schema} has version {found}, this program knows up to {known}: use a newer one"
    )
