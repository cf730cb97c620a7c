"""`geo-assets migrate`, `backup` and `restore` on the command line: from version to version, one line a refusal."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from geo_assets.services.migrating import migrate_all, pending, versions
from geo_assets.settings import Settings
from geo_assets_tests.postgres_rooms import PostgresRoom, postgres_room
from geo_assets_tests.test_cli import Terminal
from geo_assets_tests.world import World, feature
from resources.feature_store import postgis_schema
from resources.ledger import postgres_schema
from resources.ledger.postgres import PostgresLedger
from resources.migrations import migrate


@pytest.fixture
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(tmp_path / "home", monkeypatch, capsys)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Iterator[PostgresRoom]:
    with postgres_room() as room:
        monkeypatch.setenv("GEO_ASSETS_POSTGRES_URL", room.url)
        monkeypatch.setenv("GEO_ASSETS_POSTGRES_SCHEMA", room.schema)
        yield room


def rows_of(text: str) -> dict[str, list[str]]:
    """Component to its cells."""
    found = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if "│" in line]
    return {cells[0]: cells[1:] for cells in found}


def test_tables_of_the_version_before_are_brought_up_to_date_with_what_is_in_them(
    terminal: Terminal, room: PostgresRoom
) -> None:
    known = len(postgres_schema.MIGRATIONS)
    migrate(room.url, room.schema, postgres_schema.COMPONENT, postgres_schema.MIGRATIONS[:-1])
    with psycopg.connect(room.url) as db:
        insert = sql.SQL("INSERT INTO {}.tile (key, revision, wanted_live) VALUES ('0:', 3, 9)")
        db.execute(insert.format(sql.Identifier(room.schema)))
    checked = terminal("migrate", "--check")
    assert checked.code == 1
    assert rows_of(checked.out)["ledger"][1:] == [str(known - 1), str(known)]
    assert rows_of(checked.out)["feature_store"][1:] == ["none yet", str(len(postgis_schema.MIGRATIONS))]
    assert "geo-assets migrate" in checked.err

    answer = terminal("migrate")
    assert answer.code == 0
    assert rows_of(answer.out)["ledger"] == [str(known - 1), str(known)]
    assert terminal("migrate", "--check").code == 0
    ledger = PostgresLedger(room.url, room.schema)
    assert ledger.read(["0:"])["0:"].revision == 3
    ledger.close()


def test_tables_of_a_later_version_are_refused_in_one_line(terminal: Terminal, room: PostgresRoom) -> None:
    terminal("migrate")
    with psycopg.connect(room.url) as db:
        insert = sql.SQL("INSERT INTO {}.schema_versions VALUES ('ledger', 99, 'of the future', now())")
        db.execute(insert.format(sql.Identifier(room.schema)))
    for arguments in (("migrate",), ("migrate", "--check"), ("status",)):
        assert "version 99" in terminal.refused(*arguments)


def test_a_wrong_password_is_one_line_that_names_the_setting(
    terminal: Terminal, room: PostgresRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, _, tail = room.url.partition("@")
    wrong = f"{head.rpartition(':')[0]}:secret-word@{tail}"
    monkeypatch.setenv("GEO_ASSETS_POSTGRES_URL", wrong)
    line = terminal.refused("migrate")
    assert "GEO_ASSETS_POSTGRES_URL" in line
    assert "password" in line
    assert "secret-word" not in line


def test_an_older_file_is_brought_up_to_date_when_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from resources.feature_store import geopackage, gpkg_schema
    from resources.ledger import sqlite as ledger_of_sqlite
    from resources.ledger import sqlite_schema

    home = tmp_path / "home"
    world = World(home)
    world.edit(feature(1))
    world.build_dirty()
    published = set(world.published())
    world.close()
    settings = Settings(home=home)
    assert pending(settings) == {"feature_store": 0, "ledger": 0}

    # The next version of each file, as a later release would have it.
    step = ("CREATE TABLE of_the_next (id INTEGER)",)
    later = {ledger_of_sqlite: sqlite_schema.VERSION + 1, geopackage: gpkg_schema.VERSION + 1}
    for module, number in later.items():
        monkeypatch.setattr(module, "VERSION", number)
        monkeypatch.setattr(module, "STEPS", {number: step})
    monkeypatch.setattr(sqlite_schema, "VERSION", later[ledger_of_sqlite])
    monkeypatch.setattr(gpkg_schema, "VERSION", later[geopackage])
    assert pending(settings) == {"feature_store": 1, "ledger": 1}
    assert [(m.before, m.after) for m in migrate_all(settings)] == [
        (n - 1, n) for n in (later[geopackage], later[ledger_of_sqlite])
    ]
    assert pending(settings) == {"feature_store": 0, "ledger": 0}
    world = World(home)
    assert set(world.published()) == published
    assert world.stack.features.counts().by_layer == {"buildings": 1}
    world.close()
    for name in ("ledger.db", "features.gpkg"):
        with sqlite3.connect(home / name) as db:
            assert db.execute("SELECT count(*) FROM of_the_next").fetchone() == (0,)

    monkeypatch.undo()
    assert [version.found - version.known for version in versions(settings)] == [1, 1]


def test_a_home_without_data_has_nothing_to_migrate(terminal: Terminal) -> None:
    answer = terminal("migrate", "--check")
    assert answer.code == 0
    assert rows_of(answer.out)["ledger"][1] == "none yet"
    assert terminal("migrate").code == 0
    assert not (terminal.home / "ledger.db").exists()


def test_a_backup_and_a_restore_on_the_command_line(terminal: Terminal, tmp_path: Path) -> None:
    file = str(tmp_path / "city.backup")
    world = World(terminal.home)
    world.edit(feature(1))
    world.build_dirty()
    world.close()
    answer = terminal("backup", file)
    assert answer.code == 0
    assert "feature_store, ledger" in answer.out
    assert "already" in terminal.refused("backup", file)
    assert "--yes" in terminal.refused("restore", file)
    answer = terminal("restore", file, "--yes")
    assert answer.code == 0, answer.err
    assert "tiles marked" in answer.out
    answer = terminal("restored", file)
    assert answer.code == 0, answer.err
    assert "no backup" in terminal.refused("restore", str(terminal.home / "layers.yaml"), "--yes")
    assert "no-such-file" in terminal.refused("restore", str(tmp_path / "no-such-file"), "--yes")


def test_a_restore_beside_a_log_made_anew_says_that_edits_are_gone_and_fails(
    terminal: Terminal, tmp_path: Path
) -> None:
    file = str(tmp_path / "city.backup")
    world = World(terminal.home)
    world.edit(feature(1))
    world.close()
    assert terminal("backup", file).code == 0
    for path in terminal.home.glob("event-log.db*"):
        path.unlink()
    answer = terminal("restore", file, "--yes")
    assert answer.code == 1
    assert "another topic" in answer.err
    assert "cannot be told" in answer.err
