"""Both engines show the same features, ids and attributes; geometry may differ by a unit, and what is no larger."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import shapely
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.synthetic import LAYERS as CITY_LAYERS
from benchmarks.synthetic import city
from geo_assets.configuration import ConfigurationError
from geo_assets.services import engines
from geo_assets.services.build_worker import BuildTask, build_in
from geo_assets.services.engines import PostgisDraw
from geo_assets.services.recipe import current_recipe
from geo_assets.stack import Stack
from geo_assets.tiles.decode import DecodedFeature, decode
from geo_assets.tiles.encode import EncodedTile, TileFeatures, encode_tiles
from geo_assets.tiles.layers import Layer, LayerSet
from geo_assets.tiles.tile import Tile
from geo_assets_tests.mvt_checker import violations
from geo_assets_tests.postgres_rooms import PostgresRoom, postgres_room
from geo_assets_tests.resources.contract_feature_store import feature as stored
from geo_assets_tests.resources.contract_feature_store import no_plan, upsert
from geo_assets_tests.tiles.encoding import ONE_LAYER, as_shape, columns, faults, features_of, lon_lat
from geo_assets_tests.tiles.test_encode import JSON, PROPERTIES
from geo_assets_tests.tiles.test_encode_geometry import ANY, ANY_COLLECTION, TILE
from geo_assets_tests.world import settings_for
from resources.feature_store.postgis import PostgisStore
from resources.feature_store.postgis_schema import COMPONENT, MIGRATIONS
from resources.feature_store.protocol import FeatureStoreError, FeatureStoreUnavailable
from resources.migrations import migrate

Key = tuple[str, Any, str]


@pytest.fixture(scope="module")
def room() -> Iterator[PostgresRoom]:
    with postgres_room() as room:
        migrate(room.url, room.schema, COMPONENT, MIGRATIONS)
        yield room


@pytest.fixture(scope="module")
def store(room: PostgresRoom) -> Iterator[PostgisStore]:
    store = PostgisStore(room.url, room.schema)
    yield store
    store.close()


def both(store: PostgisStore, features: TileFeatures, layers: LayerSet) -> Iterator[tuple[EncodedTile, EncodedTile]]:
    """Each tile by both engines; ST_AsMVT's keeps the specification."""
    ours, theirs = encode_tiles(features, layers), encode_tiles(features, layers, PostgisDraw(store))
    for one, other in zip(ours, theirs, strict=True):
        assert violations(other.data) == []
        assert faults(other.data) == []
        assert other.tile == one.tile
        yield one, other


def by_key(tile: EncodedTile) -> dict[Key, DecodedFeature]:
    """Features by layer, id (or the property in its stead) and geometry type."""
    return {
        (layer.name, f.properties.get("_id") if f.id is None else f.id, f.geometry_type): f
        for layer in decode(tile.data)
        for f in layer.features
    }


def may_be_missing(feature: DecodedFeature, layers: LayerSet) -> bool:
    """Whether one engine may leave out what the other draws so.

    It is a unit or two small, or thinner than a unit on average; or it lies in the last unit of the buffer alone; or it
    is a line that runs there and back.
    """
    shape = as_shape(feature)
    west, north, east, south = shape.bounds
    low, high = 1 - layers.buffer, layers.extent + layers.buffer - 1
    small = max(east - west, south - north) <= 2
    at_edge = west >= high or north >= high or east <= low or south <= low
    thin = feature.geometry_type == "Polygon" and shape.area <= shape.length
    back = feature.geometry_type == "LineString" and any(
        len(set(path)) < len(path) and path[0] == path[-1] for path in feature.paths
    )
    return small or at_edge or thin or back


def agree(one: EncodedTile, other: EncodedTile, layers: LayerSet) -> int:
    """Hold two tiles against each other; how many features one of them lacks."""
    ours, theirs = by_key(one), by_key(other)
    for key in ours.keys() & theirs.keys():
        assert typed(ours[key].properties) == typed(theirs[key].properties)
        if key[2] == "Polygon":
            a, b = as_shape(ours[key]), as_shape(theirs[key])
            assert shapely.symmetric_difference(a, b).area <= 1.5 * max(a.length, b.length) + 4
    lacking = ours.keys() ^ theirs.keys()
    for key in lacking:
        assert may_be_missing((ours | theirs)[key], layers), key
    assert one.left_out == other.left_out
    return len(lacking)


def typed(properties: dict[str, Any]) -> dict[str, str]:
    """With 1, 1.0, true and -0.0 told apart."""
    return {key: f"{type(value).__name__} {value!r}" for key, value in properties.items()}


# -- the same features -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("zoom", [10, 14, 15, 17])
def test_both_engines_show_the_same_city(store: PostgisStore, zoom: int) -> None:
    features = list(city(3_000))
    geometries = [shapely.from_geojson(json.dumps(feature["geometry"])) for feature in features]
    shown: dict[Tile, list[int]] = {}
    for row, geometry in enumerate(geometries):
        if zoom >= 14 or features[row]["layer"] == "streets":
            shown.setdefault(_tile_at(geometry.centroid, zoom), []).append(row)
    tiles = random.Random(1).sample(sorted(shown), min(20, len(shown)))
    batch = columns(
        geometries,
        tiles,
        ids=[feature["id"] for feature in features],
        properties=[feature["properties"] for feature in features],
        layers=[feature["layer"] for feature in features],
        pairs=[(number, row) for number, tile in enumerate(tiles) for row in shown[tile]],
    )
    lacking = sum(agree(one, other, CITY_LAYERS) for one, other in both(store, batch, CITY_LAYERS))
    # Nothing that a person would look for is small enough to be lost.
    assert lacking <= (0 if zoom >= 14 else len(batch.pair_row) // 10)


def _tile_at(point: Any, zoom: int) -> Tile:
    import mercantile

    found = mercantile.tile(point.x, point.y, zoom)
    return Tile(found.z, found.x, found.y)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(ANY | ANY_COLLECTION, min_size=1, max_size=4))
def test_both_engines_show_whatever_valid_geometry_comes_in(store: PostgisStore, geometries: list[Any]) -> None:
    geometries = [lon_lat(TILE, _valid(geometry)) for geometry in geometries]
    tiles = [TILE, Tile(14, 9327, 4738), Tile(13, 4663, 2369), Tile(18, 149216, 75808), Tile(0, 0, 0)]
    for one, other in both(store, columns(geometries, tiles), ONE_LAYER):
        agree(one, other, ONE_LAYER)


def _valid(geometry: Any) -> Any:
    """As ingest leaves it: polygons are valid."""
    if isinstance(geometry, shapely.GeometryCollection):
        return shapely.GeometryCollection([_valid(part) for part in geometry.geoms])
    if isinstance(geometry, shapely.Polygon | shapely.MultiPolygon):
        return shapely.make_valid(geometry, method="structure", keep_collapsed=False)
    return geometry


# -- the same ids and attributes -------------------------------------------------------------------------------------
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.lists(
        st.tuples(
            PROPERTIES,
            st.sampled_from(["a", "b"]),
            st.sampled_from(
                ["0", "7", str((1 << 53) + 1), str((1 << 64) - 1), str(1 << 64), '"x"', "-1", "1.5", "true"]
            )
            | JSON.map(json.dumps),
        ),
        max_size=6,
        unique_by=lambda row: row[2],
    )
)
def test_both_engines_show_the_same_ids_and_attributes(store: PostgisStore, rows: list[Any]) -> None:
    layers = LayerSet((Layer("b", attributes=("a", "name")), Layer("a")))
    batch = columns(
        [lon_lat(TILE, shapely.box(10, 10, 30, 30))] * len(rows),
        [TILE],
        properties=[own for own, _, _ in rows],
        layers=[layer for _, layer, _ in rows],
        ids=[text for _, _, text in rows],
    )
    for one, other in both(store, batch, layers):
        found = [
            [(layer.name, f.id, typed(f.properties)) for layer in decode(tile.data) for f in layer.features]
            for tile in (one, other)
        ]
        assert found[0] == found[1]
        assert one.left_out == other.left_out


def test_what_st_asmvt_itself_would_change_arrives_exactly(store: PostgisStore) -> None:
    values = {"one": 1, "float": 1.0, "true": True, "big": (1 << 64) - 1, "low": -(1 << 63), "zero": -0.0, "text": "1"}
    batch = columns([lon_lat(TILE, shapely.Point(9, 9))], [TILE], ids=[str((1 << 64) - 1)], properties=[values])
    (tile,) = encode_tiles(batch, ONE_LAYER, PostgisDraw(store))
    (found,) = features_of(tile.data)
    assert found.id == (1 << 64) - 1
    assert typed(found.properties) == typed(values)


# -- what cannot be drawn --------------------------------------------------------------------------------------------
class _Refusing:
    """A store whose server cannot draw geometries of one sort; everything else goes to a real one."""

    def __init__(self, store: PostgisStore, fault: type[FeatureStoreError]) -> None:
        self._store, self._fault = store, fault
        self.asked = 0

    def draw(self, geometries: list[bytes], *, extent: int, buffer: int) -> bytes:
        self.asked += 1
        if any(shapely.from_wkb(wkb).area > 1e6 for wkb in geometries):
            raise self._fault("TopologyException: side location conflict")
        return self._store.draw(geometries, extent=extent, buffer=buffer)


def test_a_feature_that_postgis_cannot_draw_costs_nobody_else(store: PostgisStore) -> None:
    refusing = _Refusing(store, FeatureStoreError)
    shapes = [shapely.box(10 * i, 10, 10 * i + 8, 20) for i in range(30)] + [shapely.box(0, 0, 2_000, 2_000)]
    batch = columns([lon_lat(TILE, shape) for shape in shapes], [TILE])
    (tile,) = encode_tiles(batch, ONE_LAYER, PostgisDraw(refusing))  # pyright: ignore[reportArgumentType]
    assert [(left.feature_id, "TopologyException" in left.reason) for left in tile.left_out] == [("31", True)]
    assert [feature.id for feature in features_of(tile.data)] == list(range(1, 31))
    assert refusing.asked <= 12


def test_a_server_that_is_away_leaves_no_feature_out(store: PostgisStore) -> None:
    away = PostgisDraw(_Refusing(store, FeatureStoreUnavailable))  # pyright: ignore[reportArgumentType]
    with pytest.raises(FeatureStoreUnavailable):
        encode_tiles(columns([lon_lat(TILE, shapely.box(0, 0, 2_000, 2_000))], [TILE]), ONE_LAYER, away)


# -- chosen by settings ----------------------------------------------------------------------------------------------
def test_rule_6_the_recipe_names_the_engine_and_its_versions(room: PostgresRoom, tmp_path: Path) -> None:
    chosen = settings_for(tmp_path / "home", engine="st_asmvt", feature_store_url=room.url, postgres_schema=room.schema)
    with Stack(chosen) as stack:
        said = engines.version(stack)
        assert "PostGIS 3" in said
        assert "GEOS 3" in said
        recipes = {
            current_recipe(stack.layers, engine) for engine in ("", said, said.replace("PostGIS 3", "PostGIS 4"))
        }
        assert len(recipes) == 3
    with Stack(settings_for(tmp_path / "home")) as stack:
        assert engines.version(stack) == ""


def test_st_asmvt_without_postgis_is_refused_with_the_settings(tmp_path: Path) -> None:
    said = r"GEO_ASSETS_ENGINE.*GEO_ASSETS_FEATURE_STORE_URL"
    with (
        Stack(settings_for(tmp_path / "home", engine="st_asmvt")) as stack,
        pytest.raises(ConfigurationError, match=said),
    ):
        engines.version(stack)


def test_a_tile_is_built_by_the_engine_that_the_settings_choose(room: PostgresRoom, tmp_path: Path) -> None:
    box = (24.944, 60.169, 24.945, 60.1695)
    made = replace(stored("7", box=box, zooms=(12, 16)), content_hash="x")
    task = BuildTask(_tile_at(shapely.box(*box).centroid, 15).key, 0, None, None, True, 5)
    built = {}
    for engine in ("numpy", "st_asmvt"):
        home = settings_for(
            tmp_path / engine, engine=engine, feature_store_url=room.url, postgres_schema=room.schema, postgres_pool=1
        )
        with Stack(home) as stack:
            stack.features.apply([upsert(made)], no_plan, now_ms=5)
            (built[engine],) = build_in(stack, [task])
    assert built["numpy"].error is built["st_asmvt"].error is None
    assert built["numpy"].features == built["st_asmvt"].features == 1
    assert built["numpy"].bytes == built["st_asmvt"].bytes
    assert built["numpy"].work_key != built["st_asmvt"].work_key
