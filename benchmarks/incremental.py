"""Building a dense tile again after an edit of one feature: from what is kept of it, against a full build.

On both feature stores, where Postgres runs (`scripts/services start postgres`).

    python -m benchmarks.incremental [--quick] [--json FILE]

Each build is one by itself, after another connection changed a feature, as ingest does: a house moved, or another
height, which changes the numbers of half the values. Tiles from what is kept are held against full builds of the same
run. Figures are the best of many, CPU seconds of this process; with PostGIS the wall's, because its server works too.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import shapely

from benchmarks.city_home import city_settings
from benchmarks.feature_store import BATCH, apply_all, city_edits, edit_of, own_postgis
from benchmarks.report import Report, parser
from benchmarks.synthetic import ORIGIN
from geo_assets.services.build_worker import boxes_of
from geo_assets.services.encoding import again, anew, shown_of
from geo_assets.services.following import Follower
from geo_assets.services.recipe import current_recipe
from geo_assets.stack import Stack
from geo_assets.tiles import workkey
from geo_assets.tiles.encode import TileFeatures, encode_tiles
from geo_assets.tiles.encode.assembly import EncodedFeatures, encode_features
from geo_assets.tiles.encode.cache import EncodedCache
from geo_assets.tiles.keys import keys_of
from geo_assets.tiles.tile import Tile
from geo_assets_tests.real_services import NEEDS, found
from resources.feature_store.geopackage import GeoPackageStore
from resources.feature_store.protocol import Feature, FeatureStore

SIZES = ((17, 100), (15, 1_000), (14, 5_000))
"""Zoom at which to look for a tile, and features that it should show."""

TARGET_MS = 3.0
"""A tile of 1,000 features, one of them changed, from the question for its digests to its bytes."""

Clock = Callable[[], float]


def main() -> None:
    """Measure and print."""
    given = parser(__doc__ or "").parse_args()
    report = Report("incremental", given.quick)
    edits = city_edits(25_000)
    rounds = 12 if given.quick else 60
    with tempfile.TemporaryDirectory() as folder:
        stack = Stack(city_settings(Path(folder) / "home"))
        path = Path(folder) / "features.gpkg"
        ours, others = GeoPackageStore(path), GeoPackageStore(path)
        apply_all(others, edits, BATCH)
        with _with_store(stack, ours):
            _measure("GeoPackage", stack, others, rounds, time.process_time, report)
        for store in (ours, others):
            store.close()
        if NEEDS["postgres"] not in found():
            report.note("PostGIS not measured: no postgres here (scripts/services start postgres)")
        else:
            with own_postgis() as store:
                apply_all(store, edits, BATCH)
                with _with_store(stack, store):
                    _measure("PostGIS", stack, store, rounds, time.perf_counter, report)
    report.finish(given.json)


@contextmanager
def _with_store(stack: Stack, store: FeatureStore) -> Iterator[None]:
    stack.__dict__["features"] = store
    try:
        yield
    finally:
        del stack.__dict__["features"]


@dataclass(frozen=True, slots=True)
class Change:
    """An edit of one feature, again and again."""

    name: str
    of: Callable[[Feature, int], Feature]


def _moved(feature: Feature, turn: int) -> Feature:
    geometry = shapely.transform(shapely.from_wkb(feature.geometry), lambda xy: xy + 1e-6 * (1 - 2 * (turn % 2)))
    return _changed(feature, shapely.to_wkb(geometry), feature.properties)


def _taller(feature: Feature, turn: int) -> Feature:
    properties = json.dumps({**json.loads(feature.properties), "height": 12 + turn / 1_000}, sort_keys=True)
    return _changed(feature, feature.geometry, properties)


CHANGES = (Change("moved", _moved), Change("with another height", _taller))


def _changed(feature: Feature, geometry: bytes | None, properties: str) -> Feature:
    content = hashlib.blake2b((geometry or b"") + properties.encode(), digest_size=16).digest()
    return replace(
        feature, geometry=geometry, properties=properties, version=feature.version + 1, digest=content,
        content_hash=content.hex(),
    )  # fmt: skip


def _measure(name: str, stack: Stack, editor: FeatureStore, rounds: int, clock: Clock, report: Report) -> None:
    for zoom, wanted in SIZES:
        tile, count = _tile_of(stack, zoom, wanted)
        boxes = boxes_of([tile.key], stack.layers)
        full = _best(lambda boxes=boxes, tile=tile: anew(stack, boxes, [tile]), max(4, rounds // 4), clock)
        said = f"{name}, {count:,} features"
        report.row(f"{said}: full build, features read", full, "ms")
        cache = EncodedCache(100_000_000)
        keeping = _best(lambda: anew(stack, boxes, [tile], cache), max(4, rounds // 4), clock)  # noqa: B023
        report.row(f"{said}: the same, keeping what it encodes", keeping, "ms", "full build", full / keeping)
        for change in CHANGES:
            asked = _rebuilds(stack, editor, tile, cache, change, rounds, clock, followed=False)
            report.row(f"{said}: again, one {change.name}, digests asked for", asked, "ms", "full build", full / asked)
            took = _rebuilds(stack, editor, tile, cache, change, rounds, clock, followed=True)
            report.row(f"{said}: again, one {change.name}, followed in the log", took, "ms", "full build", full / took)
            if wanted == 1_000:
                report.row(f"{said}: of the target of {TARGET_MS:g} ms", took, "ms", "target", TARGET_MS / took)
        kept = cache.get(current_recipe(stack.layers), tile.key)
        assert kept is not None
        report.row(f"{said}: kept", kept.nbytes / count, "bytes/feature")
        if name == "GeoPackage":
            _steps(stack, tile, kept, rounds, said, clock, report)


def _rebuilds(
    stack: Stack,
    editor: FeatureStore,
    tile: Tile,
    cache: EncodedCache,
    change: Change,
    rounds: int,
    clock: Clock,
    *,
    followed: bool,
) -> float:
    """The best of many builds, each after an edit, from the question what the tile shows to its bytes; milliseconds."""
    boxes = boxes_of([tile.key], stack.layers)
    rows = stack.features.features(boxes)
    middle = next(row for row in range(len(rows.source) // 2, len(rows.source)) if rows.layer[row] == "buildings")
    feature = editor.get(rows.source[middle], rows.feature_id[middle])
    assert feature is not None
    follower = Follower(stack, cache.max_bytes) if followed else None
    if follower is not None:
        follower.shown([tile.key])
    best = float("inf")
    for turn in range(rounds):
        feature = change.of(feature, turn)
        apply_all(editor, [edit_of(feature)], 1)
        started = clock()
        shown = {} if follower is None else {0: follower.shown([tile.key])[0]}
        made = again(stack, boxes, [tile], cache, shown=shown)
        best = min(best, clock() - started)
        if turn % 6 == 0 and made != anew(stack, boxes, [tile]):
            raise SystemExit(f"the tile {tile.path} differs from a full build")
    return best * 1e3


def _steps(
    stack: Stack, tile: Tile, kept: EncodedFeatures, rounds: int, said: str, clock: Clock, report: Report
) -> None:
    """What each step of such a build takes, and what comes after it, whoever built the tile."""
    store, layers = stack.features, stack.layers
    boxes = boxes_of([tile.key], layers)
    digests = store.digests(boxes)
    (seen,), position = shown_of(digests), digests.position
    middle = len(seen.number) // 2
    one = store.rows(seen.number[middle : middle + 1].tolist())
    other = _flipped(one.digest)
    now = seen.digest.copy()
    now[middle] = other[0]
    keep, _ = kept.match(now)
    columns = TileFeatures(
        one.source, one.feature_id, one.layer, one.geometry, one.properties, [tile], np.zeros(1, np.int64),
        np.zeros(1, np.int64),
    )  # fmt: skip
    (more,) = encode_features(columns, other, layers)
    changed = kept.changed(keep, more)
    encoded = changed.assembled(tile, layers)
    steps: Sequence[tuple[str, Callable[[], Any]]] = (
        ("ask for digests", lambda: store.digests(boxes)),
        ("ask the log", lambda: store.changes(position, 100)),
        ("find what changed", lambda: kept.match(now)),
        ("read it", lambda: store.rows(seen.number[middle : middle + 1].tolist())),
        ("encode it", lambda: encode_features(columns, other, layers)),
        ("exchange it", lambda: kept.changed(keep, more)),
        ("put the tile together", lambda: changed.assembled(tile, layers)),
        ("hash it", lambda: workkey.tile_hash(encoded.data)),
        ("compress it, as it is stored", lambda: workkey.compress(encoded.data)),
    )
    for step, work in steps:
        report.row(f"{said}: {step}", _best(work, rounds, clock), "ms")
    whole = store.features(boxes)
    everything = TileFeatures(
        whole.source, whole.feature_id, whole.layer, whole.geometry, whole.properties, [tile], whole.pair_tile,
        whole.pair_row,
    )  # fmt: skip
    report.row(f"{said}: read all", _best(lambda: store.features(boxes), max(4, rounds // 4), clock), "ms")
    report.row(f"{said}: encode all", _best(lambda: encode_tiles(everything, layers), max(4, rounds // 4), clock), "ms")


def _flipped(digest: Any) -> Any:
    result = digest.copy()
    result[0, 0] ^= 1
    return result


def _tile_of(stack: Stack, zoom: int, wanted: int) -> tuple[Tile, int]:
    """The tile of a zoom whose number of features is nearest to the wanted one, and that number."""
    side = 1 << (zoom - 14)
    x, y = np.meshgrid(np.arange(3 * side), np.arange(2 * side))
    keys = list(keys_of(zoom, (ORIGIN[0] * side + x).ravel(), (ORIGIN[1] * side + y).ravel()))
    shown = stack.features.digests(boxes_of(keys, stack.layers)).pair_tile
    counts = np.bincount(shown, minlength=len(keys))
    nearest = int(np.abs(counts - wanted).argmin())
    return Tile.from_key(keys[nearest]), int(counts[nearest])


def _best(work: Callable[[], Any], rounds: int, clock: Clock) -> float:
    """Milliseconds of the fastest of many."""
    best = float("inf")
    for _ in range(rounds):
        started = clock()
        work()
        best = min(best, clock() - started)
    return best * 1e3


if __name__ == "__main__":
    main()
