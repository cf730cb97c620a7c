"""Versions of a component's tables in Postgres: bringing them up to date, and refusing what this program cannot read.

Which tables there are is each component's own; the SQLite files of the embedded adapters have the same idea in sqlite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    compatible_with: int | None = None
    """The oldest version whose programs still work on the tables; None: this one. A step that only adds says an earlier
    one, and programs of that one go on while those of this one are rolled out."""

    @property
    def oldest(self) -> int:
        """The oldest version whose programs this step leaves at work."""
        return self.number if self.compatible_with is None else self.compatible_with


class Standing(NamedTuple):
    """Tables as they are found."""

    version: int
    """0 when there are none."""
    oldest: int
    """The oldest version whose programs work on them."""


_TABLE = """CREATE TABLE IF NOT EXISTS schema_versions (
    component text NOT NULL, number integer NOT NULL, title text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now(), compatible_with integer, PRIMARY KEY (component, number))"""

# Tables of before there was such a column are read as well: no program but `geo-assets migrate` may change them.
_HAS_COLUMN = """SELECT 1 FROM information_schema.columns
    WHERE table_schema = %s AND table_name = 'schema_versions' AND column_name = 'compatible_with'"""
_ADD_COLUMN = sql.SQL("ALTER TABLE {}.schema_versions ADD COLUMN compatible_with integer")
_STANDING = """SELECT coalesce(max(number), 0),
    coalesce(max(coalesce((to_jsonb(v) ->> 'compatible_with')::integer, number)), 0)
    FROM {}.schema_versions AS v WHERE component = %s"""


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
        SchemaTooNew: The tables are of a later version than the last of these, and not compatible with it. Tables that
            are compatible are left as they are.
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
    return standing(connection, schema, component).version


def standing(connection: psycopg.Connection[Any], schema: str, component: str) -> Standing:
    """The version of a component's tables, and of the oldest programs that work on them."""
    found = connection.execute("SELECT to_regclass(%s)", (f'"{schema}".schema_versions',)).fetchone()
    if found is None or found[0] is None:
        return Standing(0, 0)
    row = connection.execute(sql.SQL(_STANDING).format(sql.Identifier(schema)), (component,)).fetchone()
    return Standing(*map(int, row)) if row else Standing(0, 0)


def check(connection: psycopg.Connection[Any], schema: str, component: str, migrations: Sequence[Migration]) -> None:
    """Refuse tables that a program which knows these migrations does not work with.

    Newer ones that say they are compatible with its version are none of those: they have more than it needs.

    Raises:
        SchemaBehind: They are older or missing.
        SchemaTooNew: They are newer, and not compatible.
    """
    found, known = standing(connection, schema, component), _in_order(component, migrations)
    if found.oldest > known:
        raise _too_new(schema, component, found, known)
    if found.version == 0:
        raise SchemaBehind(f"schema {schema} has no tables of {component}: run `geo-assets migrate`")
    if found.version < known:
        raise SchemaBehind(
            f"{component} in schema {schema} has version {found.version}, this program needs {known}: "
            "run `geo-assets migrate`"
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
        found = standing(connection, schema, component)
        if found.oldest > len(migrations):
            raise _too_new(schema, component, found, len(migrations))
        if found.version >= len(migrations):
            return None
        if connection.execute("SELECT to_regclass(%s)", (f'"{schema}".schema_versions',)).fetchone() == (None,):
            connection.execute(_TABLE)
        elif connection.execute(_HAS_COLUMN, (schema,)).fetchone() is None:
            connection.execute(_ADD_COLUMN.format(sql.Identifier(schema)))
        step = migrations[found.version]
        for statement in step.statements:
            connection.execute(statement.encode())
        connection.execute(
            "INSERT INTO schema_versions (component, number, title, compatible_with) VALUES (%s, %s, %s, %s)",
            (component, step.number, step.title, step.compatible_with),
        )
        return step.number


def _in_order(component: str, migrations: Sequence[Migration]) -> int:
    numbers = [migration.number for migration in migrations]
    if numbers != list(range(1, len(numbers) + 1)):
        raise ValueError(f"migrations of {component} are numbered {numbers}, not from 1 without gaps")
    for migration in migrations:
        if not 1 <= migration.oldest <= migration.number:
            raise ValueError(
                f"migration {migration.number} of {component} is compatible with {migration.oldest}, "
                f"which is no version from 1 to its own"
            )
    return len(numbers)


def _too_new(schema: str, component: str, found: Standing, known: int) -> SchemaTooNew:
    return SchemaTooNew(
        f"{component} in schema {schema} has version {found.version}, which works with programs of version "
        f"{found.oldest} and newer; this program knows up to {known}: use a newer one"
    )
