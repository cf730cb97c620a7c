"""Partition keys of many tiles at once: the vectorised twin of `Tile.key` and `Tile.from_key`.

What a tile is, and every rule for one, stands in `tile`; here are only arrays of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from geo_assets.tiles.tile import MAX_ZOOM, Tile, TileError

Integers = npt.NDArray[np.int64]

_COLON, _ZERO = ord(":"), ord("0")
_LONGEST = len(f"{MAX_ZOOM}:") + MAX_ZOOM


def keys_of(zoom: int, x: npt.ArrayLike, y: npt.ArrayLike) -> list[str]:
    """The partition keys `zoom:quadkey` of tiles of one zoom.

    Args:
        zoom: 0 to 22.
        x: Columns from the west, shape (n,).
        y: Rows from the north, shape (n,).

    Returns:
        One key a tile, in order.

    Raises:
        TileError: The zoom, a column or a row lies outside WebMercatorQuad.
    """
    if not 0 <= zoom <= MAX_ZOOM:
        raise TileError(f"zoom {zoom} is outside 0..{MAX_ZOOM}")
    columns = np.asarray(x, dtype=np.int64).reshape(-1)
    rows = np.asarray(y, dtype=np.int64).reshape(-1)
    if columns.shape != rows.shape:
        raise TileError(f"{columns.size} columns and {rows.size} rows are not as many")
    last = (1 << zoom) - 1
    for name, values in (("x", columns), ("y", rows)):
        outside = (values < 0) | (values > last)
        if outside.any():
            raise TileError(f"{name}={int(values[outside][0])} is outside 0..{last} at zoom {zoom}")
    prefix = f"{zoom}:"
    width = len(prefix) + zoom
    text = np.empty((columns.size, width), dtype=np.uint8)
    text[:, : len(prefix)] = np.frombuffer(prefix.encode(), dtype=np.uint8)
    for place in range(zoom):
        shift = zoom - 1 - place
        text[:, len(prefix) + place] = _ZERO + ((columns >> shift & 1) | (rows >> shift & 1) << 1)
    joined = text.tobytes().decode("ascii")
    return [joined[start : start + width] for start in range(0, len(joined), width)]


def key_of(zoom: int, x: int, y: int) -> str:
    """The partition key of one tile that is known to be one: `Tile(zoom, x, y).key` without its checks, in 1 µs."""
    if zoom == 0:
        return "0:"
    # Read as decimals, the bits of a column and twice those of a row add up to the quadkey without a carry.
    return f"{zoom}:{int(f'{x:b}') + 2 * int(f'{y:b}'):0{zoom}d}"


def coordinates_of(keys: Sequence[str]) -> tuple[Integers, Integers, Integers]:
    """The zooms, columns and rows of partition keys, which may be of different zooms.

    Args:
        keys: Partition keys `zoom:quadkey`.

    Returns:
        z, x and y, each of shape (n,), in the order of the keys.

    Raises:
        TileError: The first key that is none.
    """
    count = len(keys)
    lengths = np.fromiter(map(len, keys), dtype=np.int64, count=count)
    if not count:
        return lengths, lengths.copy(), lengths.copy()
    longest = int(lengths.argmax())
    if lengths[longest] > _LONGEST or not "".join(keys).isascii():
        _refuse(keys)
    text = np.array(keys, dtype=f"S{_LONGEST}").view(np.uint8).reshape(count, _LONGEST).astype(np.int64)
    # The colon stands second or third; whatever has it elsewhere fails one of the tests below.
    two_digits = text[:, 1] != _COLON
    tens, ones = text[:, 0] - _ZERO, text[:, 1] - _ZERO
    z = np.where(two_digits, tens * 10 + ones, tens)
    start = np.where(two_digits, 3, 2)
    good = (z >= 0) & (z <= MAX_ZOOM) & (lengths == start + z) & (tens >= 0) & (tens <= 9)
    good &= ~two_digits | ((text[:, 2] == _COLON) & (tens >= 1) & (ones >= 0) & (ones <= 9))
    x, y = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    for place in range(2, _LONGEST):
        within = (place >= start) & (place < lengths)
        digit = text[:, place] - _ZERO
        good &= ~within | ((digit >= 0) & (digit <= 3))
        x = np.where(within, x << 1 | digit & 1, x)
        y = np.where(within, y << 1 | digit >> 1, y)
    if not good.all():
        _refuse(keys)
    return z, x, y


def _refuse(keys: Sequence[str]) -> None:
    """Raise what `Tile.from_key` says of the first key that is none."""
    for key in keys:
        Tile.from_key(key)
