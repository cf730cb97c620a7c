"""The encoder against mapbox-vector-tile 2.2 and, where scripts/services runs a PostGIS, against ST_AsMVT.

    python -m benchmarks.encoder [--quick] [--json FILE]

Every encoder gets the same features (WKB in EPSG:4326 and JSON properties, read from memory; PostGIS: from an indexed
table in EPSG:3857) of the same tiles, and does the whole way to the tile: project, clip, round, attributes, bytes.
Every tile that ours makes goes through the checker that knows nothing of the encoder. `GEO_ASSETS_BENCH_POSTGIS` names
another PostGIS.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, LiteralString, cast

import mapbox_vector_tile
import mapbox_vector_tile.encoder
import mercantile
import numpy as np
import numpy.typing as npt
import psutil
import shapely

from benchmarks.report import Report, parser
from benchmarks.synthetic import LAYERS, city
from geo_assets.tiles.encode import EncodedTile, TileFeatures, encode_tiles
from geo_assets.tiles.layers import LayerSet
from geo_assets.tiles.tile import HALF_WORLD, Tile
from geo_assets_tests.mvt_checker import violations
from geo_assets_tests.real_services import found

SMALL_ALONE, SMALL_BATCHED, PEER, POSTGIS = 1_500, 2_500, 15.0, 1.2
"""Targets: tiles/s a core of ~20 features, alone and in batches; ratios to mapbox-vector-tile and ST_AsMVT."""

PLAIN = LayerSet(tuple(replace(layer, simplify=0.0) for layer in LAYERS.layers))
"""Without simplification, which the peers do not do."""

COLUMNS = ("kind", "levels", "height", "year", "listed", "name", "class", "lanes", "oneway", "rating")


@dataclass(frozen=True, slots=True)
class City:
    """The city as columns, and which feature's box meets which tile's buffered box."""

    features: list[dict[str, Any]]
    wkb: npt.NDArray[Any]
    properties: list[str]
    tree: shapely.STRtree

    @classmethod
    def build(cls, buildings: int) -> City:
        """A city of so many buildings."""
        features = list(city(buildings))
        geometries = shapely.from_geojson([json.dumps(feature["geometry"]) for feature in features])
        properties = [json.dumps(feature["properties"], sort_keys=True) for feature in features]
        return cls(features, shapely.to_wkb(geometries), properties, shapely.STRtree(geometries))

    def tiles(self, zoom: int) -> list[Tile]:
        """Tiles of a zoom that the city lies in."""
        bounds = shapely.total_bounds(self.tree.geometries)
        return [Tile(each.z, each.x, each.y) for each in mercantile.tiles(*bounds, zoom)]

    def near(self, zoom: int, wanted: int, count: int) -> list[Tile]:
        """Those tiles of a zoom whose number of features is nearest to the wanted one."""
        tiles = self.tiles(zoom)
        features = np.bincount(self.load(tiles, PLAIN).pair_tile, minlength=len(tiles))
        return [tiles[number] for number in np.argsort(np.abs(features - wanted), kind="stable")[:count]]

    def load(self, tiles: Sequence[Tile], layers: LayerSet) -> TileFeatures:
        """The columns of a batch."""
        boxes: list[Any] = []
        for tile in tiles:
            west, south, east, north = tile.bounds
            x, y = (east - west) * layers.buffer_fraction, (north - south) * layers.buffer_fraction
            boxes.append(shapely.box(west - x, south - y, east + x, north + y))
        pair_tile, pair = self.tree.query(boxes)
        rows, pair_row = np.unique(pair, return_inverse=True)
        return TileFeatures(
            source=["city"] * len(rows),
            feature_id=[str(self.features[row]["id"]) for row in rows],
            layer=[self.features[row]["layer"] for row in rows],
            geometry=[self.wkb[row] for row in rows],
            properties=[self.properties[row] for row in rows],
            tiles=tiles,
            pair_tile=pair_tile.astype(np.int64),
            pair_row=pair_row.astype(np.int64),
        )


def mapbox(features: TileFeatures, layers: LayerSet) -> list[bytes]:
    """The same with mapbox-vector-tile: projection and clipping vectorised for it, the rest as its README says."""
    result: list[bytes] = []
    geometries = shapely.transform(shapely.from_wkb(np.array(features.geometry, object)), _mercator)
    properties = [json.loads(text) for text in features.properties]
    for number, tile in enumerate(features.tiles):
        rows = features.pair_row[features.pair_tile == number]
        bounds = tile.bounds_3857
        margin = (bounds.east - bounds.west) * layers.buffer_fraction
        clipped = shapely.clip_by_rect(
            geometries[rows], bounds.west - margin, bounds.south - margin, bounds.east + margin, bounds.north + margin
        )
        parts: dict[str, list[dict[str, Any]]] = {name: [] for name in layers.names}
        for row, geometry in zip(rows.tolist(), clipped, strict=True):
            if not geometry.is_empty:
                parts[features.layer[row]].append(
                    {"geometry": geometry, "properties": properties[row], "id": int(features.feature_id[row])}
                )
        result.append(
            mapbox_vector_tile.encode(
                [{"name": name, "features": these} for name, these in parts.items() if these],
                default_options={
                    "quantize_bounds": bounds,
                    "extents": layers.extent,
                    "on_invalid_geometry": mapbox_vector_tile.encoder.on_invalid_geometry_make_valid,
                },
            )
        )
    return result


def _mercator(lon_lat: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    x = lon_lat[:, 0] / 180 * HALF_WORLD
    y = np.arcsinh(np.tan(np.radians(lon_lat[:, 1]))) / np.pi * HALF_WORLD
    return np.stack([x, y], axis=1)


class Postgis:
    """The city in a database of its own schema, and tiles by ST_AsMVT over one connection."""

    def __init__(self, dsn: str, town: City) -> None:
        import psycopg

        self.connection = psycopg.connect(dsn, autocommit=True)
        run = self.connection.execute
        run("CREATE EXTENSION IF NOT EXISTS postgis")
        self.version = ".".join(map(str, run("SELECT postgis_lib_version()").fetchone() or ()))
        for layer in LAYERS.names:
            run(_sql(f"DROP TABLE IF EXISTS pg_temp.{layer}"))
            run(
                _sql(
                    f"CREATE TEMP TABLE {layer} (id bigint PRIMARY KEY, kind text, levels int, height float8, "
                    'year int, listed bool, name text, "class" text, lanes int, oneway bool, rating float8, '
                    "geom geometry(Geometry, 3857))"
                )
            )
            names = ", ".join(f'"{column}"' for column in COLUMNS)
            with self.connection.cursor().copy(_sql(f"COPY {layer} (id, {names}, geom) FROM STDIN")) as copy:
                for feature, wkb in zip(town.features, town.wkb, strict=True):
                    if feature["layer"] == layer:
                        geometry = shapely.transform(shapely.from_wkb(wkb), _mercator)
                        copy.write_row(
                            [
                                feature["id"],
                                *(feature["properties"].get(column) for column in COLUMNS),
                                shapely.to_wkb(shapely.set_srid(geometry, 3857), hex=True, include_srid=True),
                            ]
                        )
            run(_sql(f"CREATE INDEX ON {layer} USING gist (geom)"))
            run(_sql(f"ANALYZE {layer}"))
        self.queries = {layer: self._query(town, layer) for layer in LAYERS.names}

    @staticmethod
    def _query(town: City, layer: str) -> LiteralString:
        own = {key for feature in town.features if feature["layer"] == layer for key in feature["properties"]}
        names = ", ".join(f'"{column}"' for column in COLUMNS if column in own)
        return _sql(
            f"WITH box AS (SELECT ST_TileEnvelope(%(z)s, %(x)s, %(y)s) AS tile, "
            f"ST_TileEnvelope(%(z)s, %(x)s, %(y)s, margin => %(margin)s) AS buffered), "
            f"rows AS (SELECT id, {names}, ST_AsMVTGeom(geom, box.tile, %(extent)s, %(buffer)s) AS geom "
            f"FROM {layer}, box WHERE geom && box.buffered) "
            f"SELECT ST_AsMVT(rows, '{layer}', %(extent)s, 'geom', 'id') FROM rows WHERE geom IS NOT NULL"
        )

    def clock(self) -> float:
        """CPU seconds of the server process of this connection, where it runs on this machine; else the wall's."""
        pid = self.connection.info.backend_pid
        if not (psutil.pid_exists(pid) and "postgres" in psutil.Process(pid).name()):
            return time.perf_counter()
        times = psutil.Process(pid).cpu_times()
        return times.user + times.system

    def encode(self, tiles: Sequence[Tile], layers: LayerSet) -> list[bytes]:
        """Tiles by one query a layer."""
        result: list[bytes] = []
        for tile in tiles:
            parameters = {"z": tile.z, "x": tile.x, "y": tile.y, "extent": layers.extent, "buffer": layers.buffer}
            parameters["margin"] = layers.buffer_fraction  # pyright: ignore[reportArgumentType]
            parts = [self.connection.execute(query, parameters).fetchone() for query in self.queries.values()]
            result.append(b"".join(bytes(part[0]) for part in parts if part is not None and part[0] is not None))
        return result


def _sql(text: str) -> LiteralString:
    """Statements made of this module's own constants."""
    return cast(LiteralString, text)


def measure(
    function: Callable[[], Any], seconds: float, clock: Callable[[], float] = time.process_time, warm: bool = True
) -> float:
    """Seconds of one call: the best of as many as fit and at least one, after one to warm up.

    CPU seconds of this process by default, so that neighbours on the machine count less; where another process does
    the work, the clock has to be the wall's.
    """
    if warm:
        function()
    best, begin = float("inf"), time.perf_counter()
    while best == float("inf") or time.perf_counter() - begin < seconds:
        start, calls = clock(), 0
        # A server's clock ticks in hundredths: as many calls as make it move well.
        while not calls or (clock is not time.process_time and clock() - start < 0.2):
            function()
            calls += 1
        best = min(best, (clock() - start) / calls)
    return best


def main() -> None:
    arguments = parser(__doc__ or "").parse_args()
    quick: bool = arguments.quick
    report = Report("encoder", quick)
    budget = 0.8 if quick else 4.0
    town = City.build(25_000 if quick else 100_000)
    gc.freeze()
    checked: list[EncodedTile] = []

    # Tiles of about 1,000 features, against mapbox-vector-tile.
    # (A tile inside a large city has 1,600; those of a quarter of it, a part of which is beside it, have a thousand.)
    quarter = City.build(25_000)
    middle = quarter.near(15, 1_000, 4)
    load = quarter.load(middle, PLAIN)
    per_tile = len(load.pair_row) / len(middle)
    ours = measure(lambda: encode_tiles(load, PLAIN), budget) / len(middle)
    alone = [quarter.load([tile], PLAIN) for tile in middle]
    ours_alone = measure(lambda: [encode_tiles(each, PLAIN) for each in alone], budget) / len(middle)
    peer = measure(lambda: mapbox(load, PLAIN), budget, warm=False) / len(middle)
    report.row(f"mapbox-vector-tile, {per_tile:,.0f} features a tile", 1 / peer, "tiles/s")
    report.row(
        f"one by one, {per_tile:,.0f} features a tile",
        1 / ours_alone,
        "tiles/s",
        "mapbox-vector-tile",
        peer / ours_alone,
    )
    report.row(f"one batch, {per_tile:,.0f} features a tile", 1 / ours, "tiles/s", "mapbox-vector-tile", peer / ours)
    report.row("a feature in such a tile", ours * 1e6 / per_tile, "µs")
    simplified = measure(lambda: encode_tiles(load, LAYERS), budget) / len(middle)
    report.row("the same, simplified for its zoom", 1 / simplified, "tiles/s", "not simplified", ours / simplified)
    checked += encode_tiles(load, PLAIN) + encode_tiles(load, LAYERS)

    # Small tiles: the fixed cost of a tile.
    small = town.near(18, 20, 60 if quick else 400)
    small_alone = [town.load([tile], PLAIN) for tile in small]
    small_together = town.load(small, PLAIN)
    per_small = len(small_together.pair_row) / len(small)
    took = measure(lambda: [encode_tiles(each, PLAIN) for each in small_alone], budget) / len(small)
    report.row(
        f"one by one, {per_small:.0f} features a tile",
        1 / took,
        "tiles/s",
        f"target {SMALL_ALONE:,}",
        1 / took / SMALL_ALONE,
    )
    took = measure(lambda: encode_tiles(small_together, PLAIN), budget) / len(small)
    report.row(
        f"batch of {len(small)}, {per_small:.0f} features a tile",
        1 / took,
        "tiles/s",
        f"target {SMALL_BATCHED:,}",
        1 / took / SMALL_BATCHED,
    )
    checked += encode_tiles(small_together, PLAIN)

    # A large tile: what a feature costs when nothing else does.
    large = town.tiles(14)[: 1 if quick else 4]
    load = town.load(large, PLAIN)
    took = measure(lambda: encode_tiles(load, PLAIN), budget)
    per_large = len(load.pair_row) / len(large)
    report.row(f"one batch, {per_large:,.0f} features a tile", len(large) / took, "tiles/s")
    report.row("a feature in such a tile", took * 1e6 / len(load.pair_row), "µs")
    checked += encode_tiles(load, PLAIN)

    dsn = os.environ.get("GEO_ASSETS_BENCH_POSTGIS") or found().get("GEO_ASSETS_POSTGRES_URL")
    if dsn:
        database = Postgis(dsn, town)
        for name, tiles in (("zoom 14", large), ("zoom 15", middle), ("zoom 16", town.tiles(16)[::4][:20])):
            theirs = measure(lambda tiles=tiles: database.encode(tiles, PLAIN), budget, database.clock) / len(tiles)
            batch = town.load(tiles, PLAIN)
            took = measure(lambda batch=batch: encode_tiles(batch, PLAIN), budget) / len(tiles)
            report.row(f"ST_AsMVT (PostGIS {database.version}), {name}", 1 / theirs, "tiles/s")
            report.row(f"one batch, {name}", 1 / took, "tiles/s", f"ST_AsMVT, target {POSTGIS}", theirs / took)
    else:
        report.note("PostGIS: skipped, neither scripts/services nor GEO_ASSETS_BENCH_POSTGIS names a database")

    checked = checked[::3] if quick else checked
    wrong = sum(bool(violations(tile.data)) for tile in checked)
    left = sum(len(tile.left_out) for tile in checked)
    report.row("tiles checked against the specification", len(checked), "tiles")
    report.row("tiles with a violation", wrong, "tiles")
    report.row("features left out", left, "features")
    report.note(
        f"Targets: {PEER:.0f}× mapbox-vector-tile at ~1,000 features, {POSTGIS}× ST_AsMVT. "
        "Best of several runs, CPU seconds of one core (ST_AsMVT: the server's)."
    )
    report.finish(arguments.json)
    if wrong or left:
        raise SystemExit(f"{wrong} tiles break the specification, {left} features were left out")


if __name__ == "__main__":
    main()
