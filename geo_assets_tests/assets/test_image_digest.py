"""GEO_ASSETS_IMAGE_DIGEST: which image made it stands in each tile's metadata, each materialization and each tileset.

What stands on a tile's object in a bucket is in geo_assets_tests/resources/test_object_tile_store.py, with a real one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from geo_assets import catalog
from geo_assets.definitions import defs
from geo_assets.services.build import TileBuilder
from geo_assets.services.tileset import registry
from geo_assets.tiles.tile import Tile
from geo_assets_tests.dagster_world import World, world
from sensors.tile_updates import tick

DIGEST = "sha256:" + "ab" * 32
HERE = Tile(14, 9327, 4741)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("GEO_ASSETS_IMAGE_DIGEST", DIGEST)
    with world(tmp_path, monkeypatch) as made:
        made.put_square("house", HERE)
        yield made


def images_of(here: World) -> dict[str, object]:
    """The image that each tile's newest materialization names."""
    records = here.instance.fetch_materializations(catalog.TILES, limit=100).records
    entries = [record.asset_materialization for record in records]
    return {entry.partition: entry.metadata["image_digest"].value for entry in entries if entry is not None}


def test_each_tile_that_a_run_built_names_the_image_in_its_materialization(here: World) -> None:
    here.hint(HERE.key)
    (request,) = tick(here.stack, here.instance).requests

    assert here.execute(request).success

    assert images_of(here) == {HERE.key: DIGEST}


def test_a_tile_names_the_image_on_its_object_and_the_builders_own_whoever_tells_the_catalog(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, written = here.stack.tiles.put, list[Mapping[str, str] | None]()

    def seen(_: object, name: str, data: bytes, *, metadata: Mapping[str, str] | None = None) -> object:
        written.append(metadata)
        return put(name, data, metadata=metadata)

    monkeypatch.setattr(type(here.stack.tiles), "put", seen)
    here.ledger.mark([HERE.key])
    with TileBuilder(here.stack, "lane", inline=True) as builder:
        list(builder.build([HERE.key]))

    (about,) = written
    assert about is not None
    assert about["image-digest"] == DIGEST
    (owed,) = here.ledger.owed("catalog", limit=10)
    entry = catalog.owed_materialization(owed, tiles_url="http://map", image_digest="sha256:of-the-reporter")
    assert entry.metadata["image_digest"].value == DIGEST


def test_a_published_tileset_names_the_image_in_its_manifest_and_in_its_materialization(here: World) -> None:
    keys = [HERE.ancestor(zoom).key for zoom in range(15)]
    here.ledger.mark(keys)
    with TileBuilder(here.stack, "tests", inline=True) as builder:
        list(builder.build(keys))

    assert defs.resolve_job_def("publish_tileset").execute_in_process(instance=here.instance).success

    version = registry.read(here.ledger, "map").in_force
    assert version is not None
    manifest = here.stack.tiles.get(f"tilesets/map/{version.version}/manifest.json")
    assert json.loads(manifest or b"")["image_digest"] == DIGEST
    event = here.instance.get_latest_materialization_event(catalog.TILESET)
    assert event is not None
    assert event.asset_materialization is not None
    assert event.asset_materialization.metadata["image_digest"].value == DIGEST
