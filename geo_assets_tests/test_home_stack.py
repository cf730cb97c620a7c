"""A home and its stack: a terminal without the services' settings is refused instead of finding an empty map."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from geo_assets import home_stack
from geo_assets.cli.answers import CliError
from geo_assets.cli.up import check_leaving
from geo_assets.services import sample
from geo_assets.settings import Settings
from geo_assets_tests.stacks import environment_of
from geo_assets_tests.test_cli import Terminal, write
from geo_assets_tests.world import feature

PRODUCTION: dict[str, Any] = {
    "stack": "production",
    "kafka_servers": "a:9092,b:9092",
    "kafka_topic_prefix": "city.",
    "redis_url": "redis://:hidden@cache/0",
    "postgres_url": "postgresql://me:hidden@db/map",
    "postgres_schema": "city",
    "tile_store_url": "s3://tiles/city",
}


@pytest.fixture
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(tmp_path / "home", monkeypatch, capsys)


def settings(home: Path, **changes: Any) -> Settings:
    home.mkdir(exist_ok=True)
    return Settings(home=home, **changes)


def test_every_command_on_a_home_of_production_is_refused_where_the_services_are_not_named(
    terminal: Terminal, tmp_path: Path
) -> None:
    home_stack.write(settings(terminal.home, **PRODUCTION))
    edit = write(tmp_path / "edit.geojson", feature())
    for command in (
        ["status"],
        ["import", edit],
        ["post", edit],
        ["erase", "--source", "city", "--yes"],
        ["backfill", "--bbox", "24.9,60.1,25,60.2", "--zooms", "12"],
        ["backup", str(tmp_path / "a.backup")],
        ["restore", str(tmp_path / "a.backup"), "--yes"],
        ["restored"],
        ["migrate"],
        ["dead-letters", "list"],
        ["tiles"],
        ["up"],
    ):
        line = terminal.refused(*command)
        assert "production" in line, command
        assert "GEO_ASSETS_KAFKA_SERVERS" in line, command
        assert "--switch-stack" in line, command
        assert "hidden" not in line
    assert not [path for path in terminal.home.iterdir() if path.suffix in (".db", ".gpkg")]
    assert not (tmp_path / "a.backup").exists()


def test_the_same_stack_another_broker_of_it_and_a_home_without_the_file_are_let_in(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert terminal("status").code == 0
    home_stack.write(settings(terminal.home))
    assert terminal("status").code == 0
    known = home_stack.places_of(settings(terminal.home, **PRODUCTION))
    for same in ({"kafka_servers": "b:9092,c:9092"}, {"tile_store_url": "s3://tiles/city/"}, {"postgres_pool": 7}):
        assert home_stack.other(known, home_stack.places_of(settings(terminal.home, **{**PRODUCTION, **same}))) == []
    for name, value in (("kafka_servers", "c:9092"), ("kafka_topic_prefix", "x."), ("postgres_schema", "town")):
        changed = home_stack.places_of(settings(terminal.home, **{**PRODUCTION, name: value}))
        assert home_stack.other(known, changed) == [name]
    monkeypatch.setenv("GEO_ASSETS_TILE_STORE_URL", "s3://elsewhere/x")
    assert "GEO_ASSETS_TILE_STORE_URL" in terminal.refused("status")


def test_up_takes_a_home_to_other_services_but_leaves_none_without_the_flag(tmp_path: Path) -> None:
    production = settings(tmp_path, **PRODUCTION)
    embedded = settings(tmp_path)
    check_leaving(embedded, False)
    home_stack.write(embedded)
    check_leaving(production, False)
    home_stack.write(production)
    check_leaving(settings(tmp_path, **{**PRODUCTION, "postgres_schema": "town"}), False)
    with pytest.raises(CliError, match="--switch-stack"):
        check_leaving(embedded, False)
    check_leaving(embedded, True)


def test_the_file_says_where_things_are_and_no_secret(tmp_path: Path) -> None:
    home_stack.write(settings(tmp_path, **PRODUCTION))
    text = (tmp_path / home_stack.NAME).read_text()
    assert json.loads(text)["kafka_servers"] == "a:9092,b:9092"
    assert "hidden" not in text
    assert [path.name for path in tmp_path.iterdir()] == [home_stack.NAME]


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"'])
def test_a_damaged_file_is_one_line_that_names_it(terminal: Terminal, text: str) -> None:
    (terminal.home / home_stack.NAME).write_text(text)
    assert home_stack.NAME in terminal.refused("status")


def test_a_terminal_with_the_services_settings_sees_what_is_there(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    with environment_of("production") as environment:
        from geo_assets.services.migrating import migrate_all
        from geo_assets_tests.stacks import settings_from

        current = settings_from(environment)
        migrate_all(current)
        home_stack.write(current.model_copy(update={"home": terminal.home}))
        assert "production" in terminal.refused("status")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert terminal("status").code == 0


def test_the_command_to_paste_names_an_edge_that_is_not_the_default_one(tmp_path: Path) -> None:
    for changes, expected in (
        ({}, []),
        ({"edge_port": 9999}, ["--url", "http://127.0.0.1:9999"]),
        ({"public_edge_url": "https://edge.city/"}, ["--url", "https://edge.city"]),
    ):
        current = settings(tmp_path, **changes)
        sample.edit_file(current).write_text("{}")
        words = (sample.edit_command(current) or "").split()
        assert words[words.index("post") + 1 : -1] == expected
        assert words[0].endswith("geo-assets")
    assert Settings().edge_url == sample.DEFAULT_EDGE
