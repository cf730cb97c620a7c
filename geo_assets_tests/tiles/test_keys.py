from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets.tiles.keys import coordinates_of, keys_of
from geo_assets.tiles.tile import MAX_ZOOM, Tile, TileError


@given(st.integers(0, MAX_ZOOM), st.integers(0, 2**32 - 1))
@settings(max_examples=100)
def test_many_keys_are_those_of_the_tiles_one_by_one(zoom: int, seed: int) -> None:
    x, y = np.random.default_rng(seed).integers(0, 1 << zoom, (2, 20))
    keys = keys_of(zoom, x, y)
    assert keys == [Tile(zoom, column, row).key for column, row in zip(x.tolist(), y.tolist(), strict=True)]
    z, columns, rows = coordinates_of(keys)
    assert (z == zoom).all()
    assert (columns == x).all()
    assert (rows == y).all()


def test_keys_of_different_zooms_are_read_in_one_call() -> None:
    tiles = [Tile(0, 0, 0), Tile(22, 4194303, 0), Tile(9, 1, 511), Tile(10, 1023, 2), Tile(1, 1, 1)]
    z, x, y = coordinates_of([tile.key for tile in tiles])
    assert [Tile(*values) for values in zip(z.tolist(), x.tolist(), y.tolist(), strict=True)] == tiles


def test_no_keys_are_no_tiles() -> None:
    assert [array.tolist() for array in coordinates_of([])] == [[], [], []]
    assert keys_of(7, [], []) == []


NO_KEYS = [
    "",
    ":",
    "0",
    "1:",
    "1:4",
    "2:0",
    "02:00",
    "0:0",
    "１:0",
    "x:0",
    "1x:0",
    "::",
    "::0",
    "1::",
    "/:0",
    "1/:0123",
    "10:012301230",
    "-1:0",
    "+1:0",
    "1:٠",
]


@pytest.mark.parametrize("key", [*NO_KEYS, "1:0 ", "1:0\x00", "0:\x00", "23:" + "0" * 23, "1:0" * 100])
def test_one_bad_key_among_good_ones_is_refused(key: str) -> None:
    with pytest.raises(TileError):
        coordinates_of(["3:012", key, "0:"])


@given(st.lists(st.text(alphabet="0123456:/ \x00é", max_size=5), min_size=1, max_size=5))
@settings(max_examples=300)
def test_what_is_a_key_is_the_same_for_one_and_for_many(keys: list[str]) -> None:
    try:
        tiles = [Tile.from_key(key) for key in keys]
    except TileError:
        with pytest.raises(TileError):
            coordinates_of(keys)
    else:
        z, x, y = coordinates_of(keys)
        assert [Tile(*values) for values in zip(z.tolist(), x.tolist(), y.tolist(), strict=True)] == tiles


@pytest.mark.parametrize(
    ("zoom", "x", "y", "message"),
    [
        (23, 0, 0, "zoom 23"),
        (2, 4, 0, r"x=4 is outside 0\.\.3"),
        (2, 0, -1, "y=-1"),
        (2, [1, 2], [1], "2 columns and 1 rows"),
    ],
)
def test_tiles_outside_the_grid_have_no_key(zoom: int, x: object, y: object, message: str) -> None:
    with pytest.raises(TileError, match=message):
        keys_of(zoom, x, y)  # type: ignore[arg-type]
