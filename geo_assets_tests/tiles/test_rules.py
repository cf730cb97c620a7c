from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import replace

import mapbox_vector_tile
import numpy as np
import pytest
import shapely
from hypothesis import given
from hypothesis import strategies as st

from geo_assets.tiles.encode import EncodedTile, TileFeatures, encode_tiles
from geo_assets.tiles.layers import Layer, LayerSet
from geo_assets.tiles.rules import (
    MAX_TILE_BYTES,
    Fault,
    coverage,
    crs_faults,
    freshness,
    integrity,
    probe_faults,
    rate,
    rules_before_publishing,
    skip_rate,
    topology_faults,
)
from geo_assets.tiles.tile import Tile
from geo_assets.tiles.workkey import compress, tile_hash

LAYERS = LayerSet((Layer("water"), Layer("roads")))
TILE = Tile(14, 9327, 4741)


def encoded(*geometries: shapely.Geometry, tile: Tile = TILE, layer: str = "water") -> EncodedTile:
    """The tile with these geometries in it, by the product's own encoder."""
    count = len(geometries)
    features = TileFeatures(
        ["test"] * count,
        [str(number) for number in range(count)],
        [layer] * count,
        [shapely.to_wkb(geometry) for geometry in geometries],
        [json.dumps({"n": number}) for number in range(count)],
        [tile],
        np.zeros(count, dtype=np.int64),
        np.arange(count),
    )
    return encode_tiles(features, LAYERS)[0]


def inside(tile: Tile = TILE) -> shapely.Geometry:
    west, south, east, north = tile.bounds
    return shapely.box(west, south, (west + east) / 2, (south + north) / 2)


def foreign(*geometries: shapely.Geometry, extent: int = 4096, name: str = "water") -> bytes:
    """A tile in tile units by another encoder, which takes whatever it is given."""
    features = [{"geometry": geometry, "properties": {}, "id": i + 1} for i, geometry in enumerate(geometries)]
    options = {"y_coord_down": True, "extents": extent, "check_winding_order": False}
    return mapbox_vector_tile.encode([{"name": name, "features": features}], default_options=options)


def rules_of(faults: list[Fault]) -> set[str]:
    return {fault.rule for fault in faults}


# -- before publishing -------------------------------------------------------------------------------------------------


def test_a_tile_of_the_encoder_may_be_published() -> None:
    tile = encoded(inside(), shapely.Point(inside().centroid))
    assert tile.data
    assert rules_before_publishing(TILE, tile, LAYERS) == []
    assert rules_before_publishing(TILE, encoded(), LAYERS) == []


def test_coordinates_outside_of_the_buffered_box_forbid_publishing() -> None:
    tile = encoded(inside())
    assert rules_before_publishing(TILE, replace(tile, extent=(-64, -64, 4160, 4160)), LAYERS) == []
    for extent in ((-65, 0, 10, 10), (0, 0, 4161, 10), (0, -65, 10, 10), (0, 0, 10, 4161)):
        (fault,) = rules_before_publishing(TILE, replace(tile, extent=extent), LAYERS)
        assert (fault.rule, fault.subject, fault.limit) == ("box", "14/9327/4741", "-64..4160")
        assert fault.value == str(extent)


def test_a_tile_that_is_too_large_says_what_to_do() -> None:
    tile = encoded(inside())
    (fault,) = rules_before_publishing(TILE, tile, LAYERS, max_bytes=len(tile.data) - 1)
    assert (fault.rule, fault.value, fault.limit) == ("size", len(tile.data), len(tile.data) - 1)
    assert "min_zoom" in fault.problem
    assert rules_before_publishing(TILE, tile, LAYERS, max_bytes=len(tile.data)) == []
    assert MAX_TILE_BYTES == 5_000_000


def test_a_layer_the_map_does_not_have_forbids_publishing() -> None:
    (fault,) = rules_before_publishing(TILE, encoded(inside()), LayerSet((Layer("roads"),)))
    assert (fault.rule, fault.value, fault.limit) == ("layers", "water", "roads")


def test_a_layer_twice_and_bytes_that_are_no_tile_forbid_publishing() -> None:
    tile = encoded(inside())
    (fault,) = rules_before_publishing(TILE, replace(tile, data=tile.data * 2), LAYERS)
    assert (fault.rule, fault.value) == ("layers", 2)
    for data in (tile.data[:-1], b"\x1a", b"\x08\x01", b"\x1a\x80\x80", b"\x1a\x02\x78\x02", b"no tile"):
        assert rules_of(rules_before_publishing(TILE, replace(tile, data=data), LAYERS)) == {"format"}


@given(st.binary(min_size=1, max_size=40))
def test_no_bytes_break_the_rules_themselves(data: bytes) -> None:
    tile = EncodedTile(TILE, data, 1, (), (0, 0, 1, 1))
    assert isinstance(rules_before_publishing(TILE, tile, LAYERS), list)


def test_another_tile_and_one_that_is_empty_and_is_not_forbid_publishing() -> None:
    tile = encoded(inside())
    assert rules_of(rules_before_publishing(Tile(14, 1, 1), tile, LAYERS)) == {"tile"}
    assert rules_of(rules_before_publishing(TILE, replace(tile, features=0), LAYERS)) == {"empty"}
    assert rules_of(rules_before_publishing(TILE, replace(tile, data=b""), LAYERS)) == {"empty"}
    assert rules_of(rules_before_publishing(TILE, replace(tile, extent=None), LAYERS)) == {"empty"}


def test_a_fault_reads_as_one_line() -> None:
    assert str(Fault("size", "1/0/0", "too large", 7, 5)) == "size: 1/0/0: too large (7, limit 5)"
    assert str(Fault("size", "1/0/0", "too large", 7)) == "size: 1/0/0: too large (7)"
    assert str(Fault("crs", "PROJ", "wrong")) == "crs: PROJ: wrong"


# -- topology ----------------------------------------------------------------------------------------------------------


def test_a_stored_tile_of_the_encoder_has_no_fault() -> None:
    tile = encoded(
        inside().difference(inside().centroid.buffer(0.001)),
        inside().boundary,
        shapely.MultiPoint(inside().exterior.coords),
    )
    assert topology_faults(TILE, tile.data) == []
    assert crs_faults(TILE, tile.data, LAYERS) == []
    assert topology_faults(TILE, b"") == crs_faults(TILE, b"", LAYERS) == []


def test_invalid_polygons_are_counted_by_reason_with_the_first_named() -> None:
    bow_tie = shapely.Polygon([(0, 0), (90, 100), (90, 0), (0, 200)])
    data = foreign(bow_tie, shapely.affinity.translate(bow_tie, 500, 500), shapely.Point(5, 5))
    (fault,) = topology_faults(TILE, data)
    assert fault == Fault(
        "topology", "14/9327/4741", "layer water: polygons are invalid: self-intersection; first id 1", 2, 0
    )


def test_bytes_that_cannot_be_read_are_a_fault_of_either_audit() -> None:
    assert rules_of(topology_faults(TILE, b"\x1a\x7f")) == {"topology"}
    assert rules_of(crs_faults(TILE, b"\x1a\x7f", LAYERS)) == {"crs"}


@pytest.mark.parametrize(
    ("commands", "kind", "problem"),
    [
        ((9, 0, 0, 18, 10, 10, 10, 10, 15), 3, "rings have no area"),
        ((9, 0, 0, 10, 10, 10, 15), 3, "fewer than 3"),
        ((9, 0, 0, 18, 0, 20, 20, 0, 15), 3, "the first ring is an interior one"),
        ((9, 0, 0, 10, 0, 0), 2, "fewer than 2 distinct points"),
        ((9, 0, 0), 0, "no geometry"),
        ((), 1, "no geometry"),
    ],
)
def test_shapes_that_are_none_are_faults(commands: tuple[int, ...], kind: int, problem: str) -> None:
    geometry = bytes([0x22, len(commands), *commands])
    feature = bytes([0x18, kind]) + geometry
    body = b"\x78\x02\x0a\x05water\x12" + bytes([len(feature)]) + feature + b"\x28\x80\x20"
    (fault,) = topology_faults(TILE, b"\x1a" + bytes([len(body)]) + body)
    assert problem in fault.problem


# -- CRS ---------------------------------------------------------------------------------------------------------------


def test_coordinates_outside_of_the_tile_are_a_fault() -> None:
    (fault,) = crs_faults(TILE, foreign(shapely.Point(5000, 5), shapely.Point(5, 5)), LAYERS)
    assert (fault.value, fault.limit) == (1, 0)
    assert "buffered box" in fault.problem


def test_another_grid_is_a_fault() -> None:
    (fault,) = crs_faults(TILE, foreign(shapely.Point(5, 5), extent=512), LAYERS)
    assert (fault.value, fault.limit) == (512, 4096)


@pytest.mark.parametrize("tile", [Tile(0, 0, 0), Tile(6, 32, 32), Tile(6, 31, 32), Tile(14, 8192, 8191)])
def test_a_cluster_around_null_island_is_a_fault(tile: Tile) -> None:
    near = [shapely.Point(0.0001 * i, 0) for i in range(-2, 2)]
    (fault,) = crs_faults(tile, encoded(*near, tile=tile).data, LAYERS)
    assert (fault.value, fault.limit) == (4, 3)
    assert "0, 0" in fault.problem
    assert crs_faults(tile, encoded(*near[:3], tile=tile).data, LAYERS) == [], "one buoy and its neighbours"


def test_features_elsewhere_in_the_tile_of_null_island_are_no_cluster() -> None:
    far = [shapely.Point(0.1 + i / 100, 0.1) for i in range(20)]
    line = [shapely.LineString([(0, 0), (1, 1)])] * 5
    assert crs_faults(Tile(6, 32, 31), encoded(*far, *line, tile=Tile(6, 32, 31)).data, LAYERS) == []


def test_a_probe_that_failed_is_a_fault() -> None:
    assert probe_faults(None) == []
    assert probe_faults("PROJ answers 1, 2")[0].problem == "PROJ answers 1, 2"


# -- integrity ---------------------------------------------------------------------------------------------------------


def test_an_object_is_what_the_ledger_says_or_a_fault() -> None:
    data = b"a tile" * 100
    good = compress(data)
    assert integrity(TILE, tile_hash(data), good) == []
    assert integrity(TILE, None, None) == []
    missing, damaged, cut, other = (
        integrity(TILE, tile_hash(data), stored)
        for stored in (None, bytes([good[0] ^ 1]) + good[1:], good[:-9], gzip.compress(b"another"))
    )
    assert (missing[0].value, damaged[0].value, cut[0].value) == ("missing", "unreadable", "unreadable")
    assert other[0].value == hashlib.sha256(b"another").hexdigest()
    assert {fault.subject for (fault,) in (missing, damaged, cut, other)} == {"14/9327/4741"}


def test_every_flipped_byte_of_an_object_is_found_or_harmless() -> None:
    data = b"some tile, with some text in it" * 5
    good = compress(data)
    for place in range(len(good)):
        flipped = good[:place] + bytes([good[place] ^ 0x10]) + good[place + 1 :]
        if not integrity(TILE, tile_hash(data), flipped):
            assert gzip.decompress(flipped) == data


# -- over many things --------------------------------------------------------------------------------------------------


def test_rule_7_an_empty_manifest_is_never_covered() -> None:
    verdict = coverage([], [])
    assert not verdict.passed
    assert verdict.faults[0].problem == "the manifest is empty"


def test_coverage_passes_at_its_floor_and_names_what_is_missing() -> None:
    manifest = [f"5:{i:05b}" for i in range(32)]
    assert coverage(manifest, manifest).passed
    verdict = coverage([*manifest[:-1], "0:"], manifest, floor=31 / 32)
    assert verdict.passed
    assert verdict.value == 31 / 32
    assert [fault.subject for fault in verdict.faults] == ["5/31/0"]
    assert not coverage(manifest[:-2], manifest, floor=31 / 32).passed


def test_a_rate_passes_up_to_its_limit() -> None:
    assert rate(1, 100).passed
    assert not rate(2, 100).passed
    assert rate(0, 0).passed
    assert not rate(1, 0).passed
    assert rate(2, 100).faults[0].limit == 0.01


def test_a_lag_passes_up_to_a_share_of_the_retention() -> None:
    assert freshness(0, 10_000, 1).passed, "nothing waits"
    assert freshness(300, 1000, 1000).passed
    late = freshness(299, 1000, 1000)
    assert (late.passed, late.value, late.limit) == (False, 701, 700)
    assert "lost" in late.faults[0].problem
    early = freshness(500, 1000, 1000, limit_ms=400)
    assert (early.passed, early.limit) == (False, 400)
    assert "lost" not in early.faults[0].problem
    assert freshness(2000, 1000, 10).value == 0, "a clock that runs behind is no lag"


def test_a_sudden_fall_of_the_skip_rate_to_zero_is_a_fault() -> None:
    assert not skip_rate([(90, 100), (80, 100), (0, 100)]).passed
    assert skip_rate([(90, 100), (80, 100), (1, 100)]).passed
    assert skip_rate([(0, 100), (0, 100), (0, 100)]).passed, "it never skipped anything"
    assert skip_rate([(90, 100), (0, 10)]).passed, "too small a run to say"
    assert skip_rate([(0, 100)]).passed
    assert skip_rate([]).passed
