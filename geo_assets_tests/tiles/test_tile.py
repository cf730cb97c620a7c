from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError

import mercantile
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets.tiles.tile import HALF_WORLD, MAX_LATITUDE, MAX_ZOOM, Tile, TileError


@st.composite
def tiles(draw: st.DrawFn) -> Tile:
    z = draw(st.integers(0, MAX_ZOOM))
    last = (1 << z) - 1
    return Tile(z, draw(st.integers(0, last)), draw(st.integers(0, last)))


def test_the_key_of_a_tile_is_its_zoom_and_quadkey() -> None:
    assert Tile(14, 9327, 4741).key == "14:" + mercantile.quadkey(9327, 4741, 14)
    assert Tile(0, 0, 0).key == "0:"


@given(tiles())
@settings(max_examples=200)
def test_a_tile_survives_its_key_its_path_and_its_quadkey(tile: Tile) -> None:
    assert Tile.from_key(tile.key) == Tile.from_path(tile.path) == Tile.from_quadkey(tile.quadkey) == tile


@given(tiles())
@settings(max_examples=200)
def test_key_and_bounds_are_those_of_mercantile(tile: Tile) -> None:
    assert tile.quadkey == mercantile.quadkey(tile.x, tile.y, tile.z)
    assert tuple(tile.bounds) == tuple(mercantile.bounds(tile.x, tile.y, tile.z))
    assert tuple(tile.bounds_3857) == pytest.approx(tuple(mercantile.xy_bounds(tile.x, tile.y, tile.z)), abs=1e-6)


@given(tiles().filter(lambda tile: tile.z < MAX_ZOOM))
@settings(max_examples=200)
def test_children_tile_their_parent_to_the_bit(tile: Tile) -> None:
    north_west, north_east, south_west, south_east = tile.children()
    box = tile.bounds_3857
    assert (north_west.bounds_3857.west, north_west.bounds_3857.north) == (box.west, box.north)
    assert (south_east.bounds_3857.east, south_east.bounds_3857.south) == (box.east, box.south)
    assert north_west.bounds_3857.east == north_east.bounds_3857.west
    assert north_west.bounds_3857.south == south_west.bounds_3857.north
    assert [child.quadkey[-1] for child in tile.children()] == ["0", "1", "2", "3"]
    assert all(child.ancestor(tile.z) == tile for child in tile.children())


def test_the_tile_of_zoom_0_is_the_square_of_web_mercator() -> None:
    assert tuple(Tile(0, 0, 0).bounds_3857) == (-HALF_WORLD, -HALF_WORLD, HALF_WORLD, HALF_WORLD)
    assert tuple(Tile(0, 0, 0).bounds) == pytest.approx((-180, -MAX_LATITUDE, 180, MAX_LATITUDE))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((23, 0, 0), r"zoom 23 is outside 0\.\.22"),
        ((-1, 0, 0), r"zoom -1 is outside"),
        ((2, 4, 0), r"x=4 is outside 0\.\.3 at zoom 2"),
        ((2, 0, -1), r"y=-1 is outside 0\.\.3"),
        ((2, 0.5, 0), r"x=0.5 is not an integer"),
        ((True, 0, 0), r"z=True is not an integer"),
    ],
)
def test_a_tile_outside_the_grid_is_refused_by_field_value_and_limit(
    values: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(TileError, match=message):
        Tile(*values)


@pytest.mark.parametrize(
    "key", ["", ":", "1:", "1:4", "2:0", "02:00", "0:0", "1:0 ", "１:0", "23:" + "0" * 23, "a:b", "1:٠"]
)
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(TileError):
        Tile.from_key(key)


@pytest.mark.parametrize(
    "path", ["", "1/2", "1/2/0", "1/0/0/0", "/1/0/0", "-1/0/0", "1/0/0 ", "1/0/0\n", "١/0/0", "99/0/0"]
)
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(TileError):
        Tile.from_path(path)


def test_an_ancestor_deeper_than_the_tile_is_refused() -> None:
    assert Tile(5, 17, 9).ancestor(0) == Tile(0, 0, 0)
    with pytest.raises(TileError, match=r"zoom 6 is outside 0\.\.5"):
        Tile(5, 17, 9).ancestor(6)


def test_a_tile_is_a_value() -> None:
    tile = Tile(3, 1, 2)
    assert pickle.loads(pickle.dumps(tile)) == tile
    assert len({tile, Tile(3, 1, 2)}) == 1
    with pytest.raises(FrozenInstanceError):
        tile.x = 2  # type: ignore[misc]
