from __future__ import annotations

import numpy as np
import pytest
import shapely
from hypothesis import given, settings
from hypothesis import strategies as st
from pyproj import Transformer

from geo_assets.tiles.layers import Layer, LayerSet
from geo_assets.tiles.tile import HALF_WORLD, Box, Tile
from geo_assets.tiles.zooms import (
    buffered_boxes,
    tile_box,
    tile_boxes,
    to_degrees,
    to_mercator,
    visible,
    zoom_limits,
)

LAYERS = LayerSet((Layer("parcels"), Layer("towns", min_zoom=5, max_zoom=12), Layer("all", min_pixels=0)), max_zoom=19)
PARCELS, TOWNS, ALL = LAYERS.layers
METRE = 360 / 40_075_016.68557849  # a metre of EPSG:3857 at the equator, in degrees


def square(side: float, lon: float = 0, lat: float = 0) -> Box:
    return Box(lon, lat, lon + side * METRE, lat + side * METRE)


def test_the_projection_is_that_of_proj() -> None:
    lonlat = np.random.default_rng(1).uniform((-180, -85), (180, 85), (500, 2))
    x, y = Transformer.from_crs(4326, 3857, always_xy=True).transform(lonlat[:, 0], lonlat[:, 1])
    assert np.allclose(to_mercator(lonlat), np.stack((x, y), axis=1), rtol=0, atol=1e-6)
    assert np.allclose(to_degrees(to_mercator(lonlat)), lonlat, rtol=0, atol=1e-11)


def test_latitudes_beyond_the_square_are_its_edge() -> None:
    beyond = to_mercator([(0, 90), (0, 85.06), (0, -85.06), (180, -90)])
    assert beyond.tolist() == [[0, HALF_WORLD], [0, HALF_WORLD], [0, -HALF_WORLD], [HALF_WORLD, -HALF_WORLD]]


def test_a_parcel_shows_from_zoom_15_on() -> None:
    assert zoom_limits(PARCELS, LAYERS, square(30), 2) == (15, 19)


def test_a_boundary_of_a_municipality_shows_from_zoom_8_on() -> None:
    assert zoom_limits(PARCELS, LAYERS, square(4_000), 2) == (8, 19)


def test_a_polygon_counts_by_area_and_a_line_by_its_longer_side() -> None:
    strip = Box(0, 0, 4_000 * METRE, 40 * METRE)
    assert zoom_limits(PARCELS, LAYERS, strip, 2) == zoom_limits(PARCELS, LAYERS, square(400), 2) == (11, 19)
    assert zoom_limits(PARCELS, LAYERS, strip, 1) == (8, 19)


def test_points_are_limited_by_their_layer_alone() -> None:
    assert zoom_limits(PARCELS, LAYERS, Box(1, 1, 1, 1), 0) == (0, 19)
    assert zoom_limits(TOWNS, LAYERS, Box(1, 1, 1, 1), 0) == (5, 12)


def test_a_layer_without_a_size_limit_shows_every_size() -> None:
    assert zoom_limits(ALL, LAYERS, square(0.1), 2) == (0, 19)


def test_the_smallest_things_show_at_the_last_zoom_that_is_built() -> None:
    assert zoom_limits(PARCELS, LAYERS, square(0.5), 2) == (19, 19)
    assert zoom_limits(PARCELS, LAYERS, Box(0, 0, 1, 0), 2) == (19, 19)
    assert zoom_limits(TOWNS, LAYERS, square(10), 2) == (1, 0), "its layer ends before, and deeper zooms do not show it"


def test_what_has_no_geometry_or_no_zoom_shows_nowhere() -> None:
    assert zoom_limits(PARCELS, LAYERS, None, 2) == (1, 0)
    deep = LayerSet((Layer("deep", min_zoom=17),), max_zoom=16)
    assert zoom_limits(deep["deep"], deep, square(100), 2) == (1, 0)
    assert not any(visible(1, 0, zoom) for zoom in range(23))


@given(st.floats(0.01, 1e7), st.integers(0, 2), st.floats(-80, 80))
@settings(max_examples=200)
def test_a_larger_thing_never_shows_later(side: float, dimension: int, lat: float) -> None:
    first, last = zoom_limits(PARCELS, LAYERS, square(side, 0, min(lat, 70)), dimension)
    larger, _ = zoom_limits(PARCELS, LAYERS, square(side * 1.5, 0, min(lat, 70)), dimension)
    assert larger <= first <= last == 19
    assert [visible(first, last, zoom) for zoom in range(20)] == [zoom >= first for zoom in range(20)]


def test_buffered_boxes_are_the_bounds_grown_by_a_fraction_of_the_side() -> None:
    tile = Tile(9, 291, 148)
    west, south, east, north = tile.bounds_3857
    grow = (east - west) / 64
    assert buffered_boxes(9, [291], [148], 1 / 64)[0] == pytest.approx(
        (west - grow, south - grow, east + grow, north + grow), abs=1e-8
    )
    assert tuple(buffered_boxes(9, [291], [148], 0)[0].tolist()) == tuple(tile.bounds_3857)


@given(st.integers(0, 22), st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True), st.floats(0, 0.5))
@settings(max_examples=300)
def test_the_box_of_a_tile_lies_in_that_of_its_parent(zoom: int, u: float, v: float, buffer: float) -> None:
    if not zoom:
        return
    x, y = int(u * (1 << zoom)), int(v * (1 << zoom))
    child, parent = buffered_boxes(zoom, [x], [y], buffer)[0], buffered_boxes(zoom - 1, [x >> 1], [y >> 1], buffer)[0]
    assert (child[:2] >= parent[:2]).all()
    assert (child[2:] <= parent[2:]).all()


@given(
    st.integers(0, 22),
    st.floats(0, 1, exclude_max=True),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([0, 1 / 64, 0.5]),
)
@settings(max_examples=200)
def test_the_box_in_degrees_holds_what_the_box_in_metres_touches(zoom: int, u: float, v: float, buffer: float) -> None:
    tile = Tile(zoom, int(u * (1 << zoom)), int(v * (1 << zoom)))
    box = tile_box(tile, buffer)
    west, south, east, north = buffered_boxes(tile.z, [tile.x], [tile.y], buffer)[0]
    edge = to_degrees(
        [(max(west, -HALF_WORLD), max(south, -HALF_WORLD)), (min(east, HALF_WORLD), min(north, HALF_WORLD))]
    )
    assert box.west <= edge[0, 0] < edge[1, 0] <= box.east
    assert box.south <= edge[0, 1] < edge[1, 1] <= box.north
    assert box.west >= -180
    assert box.east <= 180
    assert abs(box.west - edge[0, 0]) < 2e-9, "and by no more than a hair"


def test_the_first_and_the_last_row_reach_the_poles() -> None:
    assert tile_box(Tile(3, 0, 0), 1 / 64).north == 90
    assert tile_box(Tile(3, 0, 7), 1 / 64).south == -90
    assert tile_box(Tile(3, 0, 1), 1 / 64).north < 85
    assert tuple(tile_box(Tile(0, 0, 0), 1 / 64)) == (-180, -90, 180, 90)


def test_boxes_of_many_tiles_are_those_of_one_to_the_bit() -> None:
    tiles = [Tile(0, 0, 0), Tile(18, 149_000, 75_000), Tile(4, 15, 0), Tile(4, 0, 15)]
    boxes = tile_boxes([tile.key for tile in tiles], 1 / 64)
    assert [tuple(box) for box in boxes.tolist()] == [tuple(tile_box(tile, 1 / 64)) for tile in tiles]
    assert tile_boxes([], 1 / 64).shape == (0, 4)
    assert shapely.box(*boxes[1]).is_valid
