"""The canary: the same answers wherever the release's libraries are, and a table where they are others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from geo_assets.cli import app
from geo_assets.cli.answers import out
from geo_assets.services import canary
from geo_assets.services.canary import Answers, LockError
from geo_assets_tests.world import World, feature
from resources.ledger.protocol import Commit


@pytest.fixture(scope="module")
def found() -> Answers:
    return canary.answers()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("GEO_ASSETS_HOME", str(tmp_path / "home"))
    one = World(tmp_path / "home")
    yield one
    one.close()


def test_these_libraries_give_what_the_release_is_known_to_give(found: Answers) -> None:
    expected = Answers.from_json(canary.lock_file().read_text(encoding="utf-8"))

    assert canary.compare(expected, found) == []


def test_the_sample_has_places_features_and_tiles_that_say_something(found: Answers) -> None:
    kinds = {name.partition(" ")[0] for name in found.answers}
    tiles = [answer for name, answer in found.answers.items() if name.startswith("tile ")]

    assert kinds == {"crs", "feature", "tile"}
    assert not [answer for answer in found.answers.values() if answer.startswith("refused")]
    assert sum(answer != "empty" for answer in tiles) >= 18
    assert len({answer for answer in tiles if answer != "empty"}) == sum(answer != "empty" for answer in tiles)


def test_an_answer_that_differs_is_a_row_of_a_table_and_exit_code_1(
    found: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(out, "width", 200)
    name = next(name for name in found.answers if name.startswith("tile "))
    other = replace(found, answers={**found.answers, name: "0" * 32}, libraries={**found.libraries, "geos": "3.9.0"})
    lock = tmp_path / "other.json"
    lock.write_text(other.to_json())

    told = CliRunner().invoke(app, ["canary", "--against", str(lock)])
    same = CliRunner().invoke(app, ["canary"])

    assert told.exit_code == 1
    assert name in told.stdout
    assert "0" * 32 in told.stdout
    assert "not 3.9.0" in told.stdout
    assert same.exit_code == 0, same.stdout


def test_published_tiles_are_built_again_and_compared(world: World) -> None:
    world.edit(feature(1))
    world.mark_hints()
    world.build_dirty()
    looked, differing = canary.published(world.stack, 50)
    assert (looked > 3, differing) == (True, [])

    # As though other libraries had made it.
    held = next(state for state in world.published().values() if state.content_hash)
    world.stack.ledger.commit(
        [Commit(held.key, held.revision, held.wanted, "0" * 16, "f" * 64, 10, 0, "built", duties=())]
    )

    assert [one.found for one in canary.published(world.stack, 50)[1]] == [(held.content_hash or "")[:32]]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", json.dumps({"libraries": {}, "answers": {}}), '{"answers": {"a": 1}}']
)
def test_what_is_no_lock_is_refused(text: str) -> None:
    with pytest.raises(LockError):
        Answers.from_json(text)
