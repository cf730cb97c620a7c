"""The feature stores: edits in batches and alone, and the queries for tiles, over the synthetic city.

On both adapters, side by side, where Postgres runs (`scripts/services start postgres`).

    python -m benchmarks.feature_store [--quick] [--json FILE]

The features are made beforehand, so that only the store is measured; nobody plans hints for them. PostGIS is asked
before anything has analyzed its tables, as right after an import. ST_AsMVT as engine is measured against the encoder.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import shapely

from benchmarks.report import Report, parser
from benchmarks.synthetic import LAYERS, ORIGIN, city
from geo_assets.services.build_worker import boxes_of
from geo_assets.services.engines import PostgisDraw
from geo_assets.tiles.encode import TileFeatures, encode_tiles
from geo_assets.tiles.keys import keys_of
from geo_assets.tiles.tile import Box, Tile
from geo_assets.tiles.zooms import zoom_limits
from geo_assets_tests.postgres_rooms import postgres_room
from geo_assets_tests.real_services import NEEDS, found
from resources.feature_store.geopackage import GeoPackageStore
from resources.feature_store.postgis import PostgisStore
from resources.feature_store.postgis_schema import COMPONENT, MIGRATIONS
from resources.feature_store.protocol import Edit, Feature, FeatureStore
from resources.migrations import migrate

BATCH = 2_500
"""Edits a transaction, as the importer has."""

DIGEST_TILES, DIGEST_TARGET_S = 2_000, 1.0
"""The sensor's question: digests of so many tiles over 100,000 features in one query."""

ALONE = 200
"""Edits measured one by one."""


def main() -> None:
    """Measure and print."""
    given = parser(__doc__ or "").parse_args()
    report = Report("feature_store", given.quick)
    edits = city_edits(10_000 if given.quick else 100_000)
    with tempfile.TemporaryDirectory() as folder:
        store = GeoPackageStore(Path(folder) / "features.gpkg")
        _measure("GeoPackage", store, edits, report)
        store.close()
    if NEEDS["postgres"] not in found():
        report.note("PostGIS not measured: no postgres here (scripts/services start postgres)")
    else:
        with own_postgis() as store:
            _measure("PostGIS", store, edits, report)
            _engines(store, report)
    report.finish(given.json)


@contextmanager
def own_postgis() -> Iterator[PostgisStore]:
    """A store in a room of its own; `found()` says whether Postgres runs."""
    with postgres_room() as room:
        migrate(room.url, room.schema, COMPONENT, MIGRATIONS)
        store = PostgisStore(room.url, room.schema)
        yield store
        store.close()


def city_edits(buildings: int) -> list[Edit]:
    """The synthetic city as edits that make its features."""
    features = list(city(buildings))
    geometries = shapely.from_geojson([json.dumps(feature["geometry"]) for feature in features])
    wkb = shapely.to_wkb(geometries, output_dimension=2, byte_order=1).tolist()
    bounds, dimensions = shapely.bounds(geometries).tolist(), shapely.get_dimensions(geometries).tolist()
    counts = shapely.get_num_coordinates(geometries).tolist()
    edits: list[Edit] = []
    for feature, geometry, box, dimension, count in zip(features, wkb, bounds, dimensions, counts, strict=True):
        digest = hashlib.blake2b(geometry, digest_size=16, key=str(feature["id"]).encode()).digest()
        limits = zoom_limits(LAYERS[feature["layer"]], LAYERS, Box(*box), dimension)
        made = Feature(
            source="city", feature_id=str(feature["id"]), layer=feature["layer"], version=1, geometry=geometry,
            bbox=tuple(box), properties=json.dumps(feature["properties"], sort_keys=True), content_hash=digest.hex(),
            digest=digest, min_zoom=limits[0], max_zoom=limits[1], vertex_count=count, event_time_ms=1_000,
        )  # fmt: skip
        edits.append(edit_of(made))
    return edits


def edit_of(made: Feature) -> Edit:
    """The edit that writes a feature."""
    key = hashlib.sha256(f"{made.feature_id} {made.version}".encode()).hexdigest()
    return Edit(key, "bench", "upsert", made.source, made.feature_id, made.version, 1_000, made.content_hash, made)


def _newer(edit: Edit) -> Edit:
    """The same content under the next version."""
    assert edit.feature is not None
    return edit_of(replace(edit.feature, version=edit.version + 1))


def _measure(name: str, store: FeatureStore, edits: Sequence[Edit], report: Report) -> None:
    report.row(f"{name}: {len(edits):,} new features", len(edits) / apply_all(store, edits, BATCH), "features/s")
    boxes = boxes_of(_keys(DIGEST_TILES), LAYERS)
    first, again = _seconds(lambda: store.digests(boxes)), [_seconds(lambda: store.digests(boxes)) for _ in range(4)]
    shown = store.digests(boxes).pair_tile
    said = f"{name}: digests of {len(boxes):,} tiles z14-z18 ({len(shown):,} pairs)"
    target = f"target {DIGEST_TARGET_S:g} s"
    report.row(f"{said}, first question after the import", first, "s", target, DIGEST_TARGET_S / first)
    report.row(f"{said}, best of four more", min(again), "s", target, DIGEST_TARGET_S / min(again))
    started = time.perf_counter()
    rows = store.features(boxes)
    report.row(f"{name}: their {len(rows.source):,} features", time.perf_counter() - started, "s")
    few = [boxes[number] for number in np.unique(shown)[-50:].tolist()]
    alone = float(np.median([_seconds(lambda box=box: store.features([box])) for box in few]))
    report.row(f"{name}: features of a tile of zoom {few[0].zoom} alone, median", alone * 1e3, "ms")
    newer = [_newer(edit) for edit in edits]
    report.row(f"{name}: the same content, newer versions", len(edits) / apply_all(store, newer, BATCH), "features/s")
    single = [_newer(edit) for edit in newer[:ALONE]]
    report.row(f"{name}: one edit a transaction", apply_all(store, single, 1) / len(single) * 1e3, "ms")


def apply_all(store: FeatureStore, edits: Sequence[Edit], batch: int) -> float:
    """Apply all edits; how long it took, in seconds."""
    started = time.perf_counter()
    for start in range(0, len(edits), batch):
        applied = store.apply(edits[start : start + batch], lambda _: [], now_ms=1_000)
        assert {one.outcome for one in applied} == {"applied"}
    return time.perf_counter() - started


def _keys(count: int) -> list[str]:
    """Tiles of the city, half of them at zoom 18, the rest above in falling numbers."""
    random = np.random.default_rng(7)
    keys: dict[str, None] = {}
    for zoom, share in ((14, 0.01), (15, 0.04), (16, 0.15), (17, 0.3), (18, 0.5)):
        side = 1 << (zoom - 14)
        wide, high = 5 * side, 4 * side
        chosen = random.permutation(wide * high)[: round(count * share)]
        keys |= dict.fromkeys(keys_of(zoom, ORIGIN[0] * side + chosen % wide, ORIGIN[1] * side + chosen // wide))
    return list(keys)


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _engines(store: PostgisStore, report: Report) -> None:
    """Tiles of zoom 15 by ST_AsMVT and by the encoder, from the same features."""
    every = [key for key in _keys(DIGEST_TILES) if key.startswith("15:")]
    shown = np.bincount(store.digests(boxes_of(every, LAYERS)).pair_tile, minlength=len(every))
    keys = [every[number] for number in np.argsort(-shown)[:8].tolist()]
    rows = store.features(boxes_of(keys, LAYERS))
    batch = TileFeatures(
        source=rows.source, feature_id=rows.feature_id, layer=rows.layer, geometry=rows.geometry,
        properties=rows.properties, tiles=[Tile.from_key(key) for key in keys], pair_tile=rows.pair_tile,
        pair_row=rows.pair_row,
    )  # fmt: skip
    theirs = min(_seconds(lambda: encode_tiles(batch, LAYERS, PostgisDraw(store))) for _ in range(2))
    ours = min(_seconds(lambda: encode_tiles(batch, LAYERS)) for _ in range(3))
    report.row(f"engine st_asmvt, {len(rows.pair_row) // len(keys):,} features a tile", len(keys) / theirs, "tiles/s")
    report.row("engine numpy, the same tiles", len(keys) / ours, "tiles/s", "st_asmvt", theirs / ours)


if __name__ == "__main__":
    main()
