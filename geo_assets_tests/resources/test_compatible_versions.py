"""Expand, then contract: a program works on tables of a later version that say they are compatible with its own."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psycopg
import pytest

from geo_assets_tests.postgres_rooms import PostgresRoom, postgres_room
from resources.feature_store import gpkg_schema, postgis_schema
from resources.feature_store.geopackage import GeoPackageStore
from resources.ledger import postgres_schema, sqlite_schema
from resources.ledger.postgres import PostgresLedger
from resources.ledger.sqlite import SqliteLedger
from resources.migrations import Migration, SchemaTooNew, Standing, check, migrate, standing
from resources.sqlite import SqliteFile

ONE = Migration(1, "things", ("CREATE TABLE thing (id bigint PRIMARY KEY)",))
EXPANDS = Migration(2, "names", ("ALTER TABLE thing ADD COLUMN name text",), compatible_with=1)
CONTRACTS = Migration(3, "no names", ("ALTER TABLE thing DROP COLUMN name",))

TAKES_AWAY = re.compile(
    r"\b(DROP|RENAME|TRUNCATE|DELETE|SET\s+NOT\s+NULL|ALTER\s+COLUMN\s+\w+\s+TYPE)\b", re.IGNORECASE
)


@pytest.fixture
def room() -> Iterator[PostgresRoom]:
    with postgres_room() as one:
        yield one


class Failed(Exception):
    pass


def opened(path: Path, version: int, steps: Mapping[int, Sequence[str]], compatible: Mapping[int, int]) -> SqliteFile:
    schema = "CREATE TABLE thing (id INTEGER PRIMARY KEY" + (", name TEXT)" if version == 2 else ")")
    return SqliteFile(
        path, schema=schema, version=version, synchronous="NORMAL", unavailable=Failed, failed=Failed,
        lock_timeout_s=5, steps=steps, compatible=compatible,
    )  # fmt: skip


STEPS = {2: ("ALTER TABLE thing ADD COLUMN name TEXT",), 3: ("ALTER TABLE thing DROP COLUMN name",)}


# -- Postgres --------------------------------------------------------------------------------------------------------
def test_a_program_works_on_tables_that_were_expanded_for_the_next_one(room: PostgresRoom) -> None:
    migrate(room.url, room.schema, "test", [ONE])
    assert migrate(room.url, room.schema, "test", [ONE, EXPANDS]) == [2]

    with psycopg.connect(room.url) as db:
        assert standing(db, room.schema, "test") == Standing(2, 1)
        check(db, room.schema, "test", [ONE])
        check(db, room.schema, "test", [ONE, EXPANDS])
    assert migrate(room.url, room.schema, "test", [ONE]) == []


def test_a_program_refuses_tables_that_were_contracted(room: PostgresRoom) -> None:
    migrate(room.url, room.schema, "test", [ONE, EXPANDS, CONTRACTS])

    for migrations in ([ONE], [ONE, EXPANDS]):
        with pytest.raises(SchemaTooNew, match=r"version 3, which works with programs of version 3 and newer"):
            migrate(room.url, room.schema, "test", migrations)
        with psycopg.connect(room.url) as db, pytest.raises(SchemaTooNew):
            check(db, room.schema, "test", migrations)


def test_two_expansions_in_a_row_leave_the_first_program_at_work_only_if_both_say_so(room: PostgresRoom) -> None:
    again = Migration(3, "sizes", ("ALTER TABLE thing ADD COLUMN size bigint",), compatible_with=2)
    migrate(room.url, room.schema, "test", [ONE, EXPANDS, again])

    with psycopg.connect(room.url) as db:
        check(db, room.schema, "test", [ONE, EXPANDS])
        with pytest.raises(SchemaTooNew, match="programs of version 2 and newer"):
            check(db, room.schema, "test", [ONE])


def test_tables_of_before_versions_said_so_are_migrated_and_mean_their_own(room: PostgresRoom) -> None:
    migrate(room.url, room.schema, "test", [ONE])
    with psycopg.connect(room.url) as db:
        db.execute(f"ALTER TABLE {room.schema}.schema_versions DROP COLUMN compatible_with")
    with psycopg.connect(room.url) as db:
        assert standing(db, room.schema, "test") == Standing(1, 1)

    assert migrate(room.url, room.schema, "test", [ONE, EXPANDS]) == [2]
    with psycopg.connect(room.url) as db:
        check(db, room.schema, "test", [ONE])


def test_this_ledger_works_while_the_next_release_has_expanded_its_tables(room: PostgresRoom) -> None:
    number = len(postgres_schema.MIGRATIONS)
    statement = "ALTER TABLE tile ADD COLUMN note text DEFAULT 'x'"
    expanded = Migration(number + 1, "a note", (statement,), compatible_with=number)
    migrate(room.url, room.schema, "ledger", [*postgres_schema.MIGRATIONS, expanded])

    ledger = PostgresLedger(room.url, room.schema, pool=1)
    try:
        ledger.mark(["3:120"])
        assert [state.key for state in ledger.dirty(10)] == ["3:120"]
    finally:
        ledger.close()


# -- SQLite ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("made_by", [1, 2])
def test_an_older_program_opens_a_file_that_was_expanded(tmp_path: Path, made_by: int) -> None:
    path = tmp_path / "things.db"
    opened(path, made_by, STEPS, {2: 1}).close()
    opened(path, 2, STEPS, {2: 1}).close()

    older = opened(path, 1, {}, {})
    with older.transaction() as db:
        db.execute("INSERT INTO thing (id) VALUES (1)")
    older.close()
    newer = opened(path, 2, STEPS, {2: 1})
    assert newer.connection().execute("SELECT id, name FROM thing").fetchall() == [(1, None)]
    newer.close()


def test_an_older_program_refuses_a_file_that_was_contracted(tmp_path: Path) -> None:
    path = tmp_path / "things.db"
    opened(path, 1, {}, {}).close()
    opened(path, 3, STEPS, {2: 1}).close()

    for version in (1, 2):
        with pytest.raises(Failed, match="version 3, which works with programs of version 3 and newer"):
            opened(path, version, STEPS, {2: 1})


def test_this_ledger_and_this_feature_store_open_files_that_the_next_release_expanded(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.db"
    SqliteLedger(ledger).close()
    with sqlite3.connect(ledger) as db:
        db.execute("ALTER TABLE tile ADD COLUMN note TEXT")
        db.execute("INSERT INTO schema_version VALUES (?)", (sqlite_schema.VERSION + 1,))
        db.execute("CREATE TABLE schema_oldest (program INTEGER NOT NULL) STRICT")
        db.execute("INSERT INTO schema_oldest VALUES (?)", (sqlite_schema.VERSION,))
    db.close()
    again = SqliteLedger(ledger)
    again.mark(["3:120"])
    assert [state.key for state in again.dirty(10)] == ["3:120"]
    again.close()

    features = tmp_path / "features.gpkg"
    GeoPackageStore(features).close()
    with sqlite3.connect(features) as db:
        db.execute("UPDATE ga_meta SET value = ? WHERE name = 'schema'", (gpkg_schema.VERSION + 1,))
        db.execute("INSERT INTO ga_meta VALUES ('oldest', ?)", (gpkg_schema.VERSION,))
    db.close()
    store = GeoPackageStore(features)
    assert store.counts().outbox == 0
    store.close()


# -- the rule --------------------------------------------------------------------------------------------------------
def test_a_step_that_says_it_is_compatible_takes_nothing_away() -> None:
    for migrations in (postgres_schema.MIGRATIONS, postgis_schema.MIGRATIONS):
        for migration in migrations:
            if migration.oldest < migration.number:
                assert not [one for one in migration.statements if TAKES_AWAY.search(one)], migration.title
    for schema in (sqlite_schema, gpkg_schema):
        for version, oldest in schema.COMPATIBLE.items():
            assert 1 <= oldest < version <= schema.VERSION
            assert not [one for one in schema.STEPS[version] if TAKES_AWAY.search(one)], version


def test_a_step_cannot_be_compatible_with_a_version_that_is_none(room: PostgresRoom) -> None:
    for oldest in (0, 3):
        with pytest.raises(ValueError, match=f"compatible with {oldest}"):
            migrate(room.url, room.schema, "test", [ONE, Migration(2, "odd", (), compatible_with=oldest)])
