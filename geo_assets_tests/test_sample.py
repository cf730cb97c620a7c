"""The sample city: imported for real, built at every zoom, looked at by a checker that does not know the encoder."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geo_assets import configuration
from geo_assets.events import topics
from geo_assets.services import engines
from geo_assets.services.build import TileBuilder
from geo_assets.services.build_worker import boxes_of
from geo_assets.services.fences import FenceBook
from geo_assets.services.sample import IMPORTED, ensure
from geo_assets.tiles.encode import TileFeatures, encode_tiles
from geo_assets.tiles.tile import Tile
from geo_assets_tests.mvt_checker import violations
from geo_assets_tests.world import World


class SampleWorld(World):
    """A home with the sample's own layers and sources."""

    def __init__(self, home: Path, **changes: Any) -> None:
        home.mkdir(parents=True, exist_ok=True)
        (home / "layers.yaml").write_text(configuration.sample_layers_text())
        (home / "sources.yaml").write_text(configuration.new_sources_text())
        super().__init__(home, **changes)
        ensure(self.settings, lambda _: None, threading.Event())

    def build_all(self) -> None:
        manifest = self.stack.ledger.get_value(IMPORTED)
        assert manifest
        with TileBuilder(self.stack, "sample") as builder:
            outcomes = {r.outcome for r in builder.build(self.stack.ledger.manifest_keys(manifest))}
        assert outcomes <= {"built", "unchanged"}

    def hashes(self) -> dict[str, str | None]:
        return {state.key: state.content_hash for state in self.stack.ledger.scan()}


@pytest.fixture(scope="module")
def city(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SampleWorld]:
    world = SampleWorld(tmp_path_factory.mktemp("sample") / "home")
    world.build_all()
    yield world
    world.close()


def test_every_object_of_the_file_is_a_feature_or_counted(city: SampleWorld) -> None:
    counts = city.stack.features.counts()
    assert sum(counts.by_layer.values()) > 5_000
    assert counts.by_layer["buildings"] > 400
    assert {"roads", "water", "landuse", "pois"} <= set(counts.by_layer)
    assert city.letters() == []


def test_the_sample_breaks_no_rule_of_the_vector_tile_specification_at_any_zoom(city: SampleWorld) -> None:
    tiles = city.published()
    assert {int(key.partition(":")[0]) for key in tiles} == set(range(19))
    found = {key: wrong for key in tiles if (wrong := violations(city.tile(key)))}
    assert found == {}


def test_rule_6_bytes_are_the_same_with_four_processes_and_over_another_import(
    city: SampleWorld, tmp_path: Path
) -> None:
    other = SampleWorld(tmp_path / "home", build_workers=4, ingest_workers=3)
    try:
        other.build_all()
        first, second = city.hashes(), other.hashes()
        assert len(first) >= 440
        assert first == second
    finally:
        other.close()


def test_rule_6_bytes_are_the_same_when_rows_are_shuffled(city: SampleWorld) -> None:
    chance = random.Random(7)
    keys = sorted(city.published())
    for start in range(0, len(keys), 100):
        part = keys[start : start + 100]
        rows = city.stack.features.features(boxes_of(part, city.stack.layers))
        order = list(range(len(rows.source)))
        chance.shuffle(order)
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        pairs = list(zip(rows.pair_tile.tolist(), place[rows.pair_row].tolist(), strict=True))
        chance.shuffle(pairs)
        pairs.sort(key=lambda pair: pair[0])
        shuffled = TileFeatures(
            source=[rows.source[i] for i in order],
            feature_id=[rows.feature_id[i] for i in order],
            layer=[rows.layer[i] for i in order],
            geometry=[rows.geometry[i] for i in order],
            properties=[rows.properties[i] for i in order],
            tiles=[Tile.from_key(key) for key in part],
            pair_tile=np.array([t for t, _ in pairs], dtype=np.int64),
            pair_row=np.array([r for _, r in pairs], dtype=np.int64),
        )
        for key, encoded in zip(part, encode_tiles(shuffled, city.stack.layers), strict=True):
            assert encoded.data == city.tile(key), key


def test_the_fences_of_the_sample_are_features_and_in_force(city: SampleWorld) -> None:
    assert city.stack.features.counts().by_layer["fences"] == 16
    assert FenceBook(city.stack).fold().fences == 16
    assert city.letters() == []


def test_a_home_whose_layers_know_no_fences_gets_those_of_the_sample_once(tmp_path: Path) -> None:
    world = World(tmp_path / "home")
    world.stack.ledger.set_value(IMPORTED, "")
    for _ in range(2):
        ensure(world.settings, lambda _: None, threading.Event())
    assert sum(extent.end for extent in world.stack.log.extents(topics.FENCES).values()) == 16
    assert FenceBook(world.stack).fold().fences == 16
    world.close()


def test_importing_the_sample_again_changes_nothing(city: SampleWorld) -> None:
    before = city.hashes()
    city.stack.ledger.set_value(IMPORTED, None)
    said: list[str] = []
    ensure(city.settings, said.append, threading.Event())
    assert any("0 of" in line and "duplicate" in line for line in said)
    assert city.stack.ledger.dirty(10) == []
    assert city.hashes() == before


def test_a_second_build_of_everything_encodes_nothing(city: SampleWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("the encoder was called")

    monkeypatch.setattr(engines, "encode_tiles", never)
    with TileBuilder(city.stack, "again", inline=True) as builder:
        outcomes = [r.outcome for r in builder.build(sorted(city.published()))]
        assert (set(outcomes), builder.encoded) == ({"skipped"}, 0)
