"""Regions as people say them: what each form covers, and that what is none is refused with a line that says why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h3
import pytest
import shapely
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets.services.backfills import plan_region
from geo_assets.services.regions import (
    MOST_TILES,
    RegionError,
    box_region,
    feature_region,
    file_region,
    geojson_region,
    h3_region,
    parse_zooms,
    zooms_text,
)
from geo_assets.services.tileset.regions import region_of
from geo_assets_tests.world import World, feature

RING = [[24.9, 60.1], [24.95, 60.15], [24.95, 60.1], [24.9, 60.1]]


def polygon(*rings: Any) -> dict[str, Any]:
    return {"type": "Polygon", "coordinates": list(rings)}


def collection(*geometries: Any, **members: Any) -> dict[str, Any]:
    features = [{"type": "Feature", "properties": {}, "geometry": one} for one in geometries]
    return {"type": "FeatureCollection", "features": features, **members}


def read(document: Any) -> Any:
    text = document if isinstance(document, str | bytes) else json.dumps(document)
    return geojson_region(text, "city.geojson")[0]


# -- zooms -----------------------------------------------------------------------------------------------------------
@given(st.sets(st.integers(0, 22), min_size=1))
def test_zooms_are_read_as_they_are_written(zooms: set[int]) -> None:
    assert parse_zooms(zooms_text(sorted(zooms))) == sorted(zooms)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "form"), (",", "form"), ("0-", "form"), ("-1", "form"), ("a", "form"), ("3.5", "form"), ("٣", "form"),
        ("1-2-3", "form"), ("9" * 30, "form"), ("23", "0..22"), ("0-99999999", "0..22"), ("5-3", "5 is above 3"),
    ],
)  # fmt: skip
def test_zooms_that_are_none_are_refused_at_once(text: str, said: str) -> None:
    with pytest.raises(RegionError, match=said):
        parse_zooms(text)


# -- boxes -----------------------------------------------------------------------------------------------------------
def test_a_box_over_the_date_line_says_how_wide_it_is() -> None:
    shape, title = box_region("170,-10,-170,10")
    assert shape.area == pytest.approx(400)
    assert title == "bbox 170,-10,-170,10 (over the date line, 20° wide)"
    assert "359.97° wide" in box_region("24.96,60.16,24.93,60.18")[1], "swapped by mistake"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not west,south,east,north"), ("1,2,3", "is not"), ("a,b,c,d", "is not"), ("1,2,3,4,5", "is not"),
        ("nan,0,1,1", "outside"), ("-1e300,0,1e300,1", "outside"), ("-200,0,10,10", "outside"),
        ("0,10,10,0", "its south is above its north"), ("0,86,10,89", "where the map ends"),
        ("0,-89,10,-86", "where the map ends"), ("1" * 500, "is not"),
    ],
)  # fmt: skip
def test_a_box_that_is_none_is_refused(text: str, said: str) -> None:
    with pytest.raises(RegionError, match=said) as raised:
        box_region(text)
    assert len(str(raised.value)) < 200


# -- H3 --------------------------------------------------------------------------------------------------------------
def test_the_base_cells_share_out_the_world() -> None:
    """Oracle: 122 cells, some over the date line, two around a pole, cover every degree once."""
    shapes = [h3_region([cell])[0] for cell in h3.get_res0_cells()]
    assert all(shape.is_valid for shape in shapes)
    assert sum(shape.area for shape in shapes) == pytest.approx(360 * 180, rel=1e-6)
    assert shapely.union_all(shapes).bounds == pytest.approx((-180, -90, 180, 90))
    assert h3_region(sorted(h3.get_res0_cells()))[0].area == pytest.approx(360 * 180, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.floats(-180, 180), st.floats(-84, 84), st.integers(1, 15))
def test_a_cell_holds_its_middle_and_is_no_wider_than_a_cell(lon: float, lat: float, resolution: int) -> None:
    cell = h3.latlng_to_cell(lat, lon, resolution)
    shape, title = h3_region([cell])
    middle = h3.cell_to_latlng(cell)
    assert shape.buffer(1e-5).contains(shapely.Point(middle[1], middle[0]))
    west, south, east, north = shape.bounds
    assert -180 <= west <= east <= 180
    assert -90 <= south <= north <= 90
    assert cell in title


@pytest.mark.parametrize(
    "cell", ["", "zzz", "0", "-1", "0x891126d3623ffff", "891126d3623fff", "f" * 16, "f" * 60, "8​9"]
)
def test_a_cell_that_is_none_is_refused(cell: str) -> None:
    with pytest.raises(RegionError, match="is no H3 cell, such as"):
        h3_region(["891126d3623ffff", cell])


# -- GeoJSON ---------------------------------------------------------------------------------------------------------
def test_polygons_are_taken_however_deep_they_stand_and_mended() -> None:
    plain = read(polygon(RING))
    assert plain.area == pytest.approx(0.00125)
    assert read(collection(None, {"type": "Point", "coordinates": [1, 2]}, polygon(RING))).equals(plain)
    inner = {"type": "GeometryCollection", "geometries": [polygon(RING)]}
    assert read({"type": "GeometryCollection", "geometries": [inner]}).equals(plain)
    assert read({"type": "Feature", "properties": None, "geometry": polygon(RING)}).equals(plain)
    assert read(("﻿" + json.dumps(polygon(RING))).encode("utf-8")).equals(plain), "as Windows writes it"
    bow_tie = [[24.9, 60.1], [24.95, 60.15], [24.95, 60.1], [24.9, 60.15], [24.9, 60.1]]
    assert read(polygon(bow_tie)).is_valid


def test_a_declared_crs_is_obeyed() -> None:
    for name in ("EPSG:4326", "urn:ogc:def:crs:OGC:1.3:CRS84"):
        declared = {"type": "name", "properties": {"name": name}}
        assert read(collection(polygon(RING), crs=declared)).equals(read(polygon(RING)))
    square = [[385_000, 6_670_000], [386_000, 6_670_000], [386_000, 6_671_000], [385_000, 6_670_000]]
    shape = read(collection(polygon(square), crs={"type": "name", "properties": {"name": "EPSG:3067"}}))
    assert shape.bounds == pytest.approx((24.93, 60.15, 24.95, 60.16), abs=0.01)


def test_longitudes_may_go_on_past_the_date_line() -> None:
    shape = read(polygon([[179, 10], [181, 10], [181, 11], [179, 11], [179, 10]]))
    assert shape.bounds == (-180, 10, 180, 11)
    assert shape.area == pytest.approx(2)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("", "not GeoJSON"),
        ("not json", "not GeoJSON"),
        (b"\x7fELF\xff\xfe\x00", "not GeoJSON"),
        ("[" * 100_000, "not GeoJSON"),
        ("[1,2]", "an object with a type is expected"),
        ("{}", "an object with a type is expected"),
        ('{"type":"FeatureCollection"}', "list of features"),
        ('{"type":"Polygon","coordinates":[[[24.9,NaN],[24.95,60.15],[24.9,60.15],[24.9,60.1]]]}', "not"),
        ('{"type":"Polygon","coordinates":[[[24.9,1e400],[24.95,60.15],[24.9,60.15],[24.9,1e400]]]}', "not"),
        (polygon([["a", 60.1], *RING[1:]]), "not GeoJSON"),
        (polygon(RING[:2]), "not GeoJSON"),
        ({"type": "Topology"}, "not GeoJSON"),
        (polygon(), "has no polygon with an area"),
        (polygon([]), "has no polygon with an area"),
        (polygon([[24.9, 60.1]] * 4), "has no polygon with an area"),
        (collection(), "has no polygon with an area"),
        (collection(None), "has no polygon with an area"),
        (collection({"type": "Point", "coordinates": [24, 60]}), "has no polygon with an area"),
        (polygon([[2_750_000, 8_430_000], [2_760_000, 8_430_000], [2_760_000, 8_440_000], [2_750_000, 8_430_000]]),
         "are no degrees"),
        (collection(polygon(RING), crs={"type": "name", "properties": {"name": "EPSG:99999"}}), "unknown_crs"),
        (collection(polygon(RING), crs={"type": "link", "properties": {"href": "http://x"}}), "unknown_crs"),
        (polygon([[0, 86], [1, 86], [1, 87], [0, 86]]), "where the map ends"),
    ],
)  # fmt: skip
def test_geojson_without_a_region_is_refused(document: Any, said: str) -> None:
    with pytest.raises(RegionError, match=said) as raised:
        read(document)
    assert str(raised.value).startswith("region city.geojson")
    assert len(str(raised.value)) < 400


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path, said in ((tmp_path, "Is a directory"), (tmp_path / "none.geojson", "No such file")):
        with pytest.raises(RegionError, match=said):
            file_region(path)
    large = tmp_path / "large.geojson"
    with large.open("wb") as out:
        out.truncate(60_000_000)
    with pytest.raises(RegionError, match="more than 50,000,000 bytes"):
        file_region(large)
    # What has no size has no end either.
    with pytest.raises(RegionError, match="more than 50,000,000 bytes"):
        file_region(Path("/dev/zero"))


# -- against a map ---------------------------------------------------------------------------------------------------
@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "home")
    world.edit(feature(1, 1, name="depot"))
    yield world
    world.close()


def test_a_feature_that_is_not_there_is_refused_by_what_is(world: World) -> None:
    store = world.stack.features
    assert feature_region(store, "buildings/name=depot")[1] == "depot (city:1)"
    for text, said in (
        ("elsewhere:1", "no source elsewhere ever wrote here; there are city"),
        ("city:2", "'city:2' is not in the store"),
        ("parcels/name=depot", "no feature is in a layer parcels; there are buildings"),
        ("buildings/name=nowhere", "no feature of layer buildings has name = nowhere"),
        ("buildings", "neither SOURCE:ID nor LAYER/ATTRIBUTE=VALUE"),
        ("/=", "neither"),
        (":", "neither"),
    ):
        with pytest.raises(RegionError, match=said):
            feature_region(store, text)


def test_rule_7_a_region_is_never_wider_than_fits_into_memory_whatever_cap_is_asked_for(world: World) -> None:
    shape, title = box_region("-180,-85,180,85")
    with pytest.raises(RegionError, match="at zooms 0-16, above the cap of 20,000: take fewer zooms"):
        plan_region(world.stack, shape, title, range(17))
    for cap in (MOST_TILES, 10**30):
        with pytest.raises(RegionError, match=r"above 5,000,000, the most .* in pieces"):
            plan_region(world.stack, shape, title, range(17), cap=cap)
        with pytest.raises(RegionError, match=r"above 5,000,000, the most .* in pieces"):
            region_of(world.stack, bbox="-180,-85,180,85", zooms="0-16", cap=cap)
