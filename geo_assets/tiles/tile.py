"""The tile: an immutable z/x/y in WebMercatorQuad, its partition key and its boxes. Nothing about features or bytes."""

# mercantile ships without types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import mercantile

MAX_ZOOM = 22
"""Deepest zoom of a tile: 2^22 tiles a side are 9.6 m on the equator; below that, clients overzoom."""

HALF_WORLD = 20037508.342789244
"""Half the side of the EPSG:3857 square in metres, pi * 6378137 (OGC Two Dimensional Tile Matrix Set 2.0, D.1)."""

MAX_LATITUDE = 85.0511287798066
"""Latitude in degrees at which Web Mercator is square, atan(sinh(pi))."""

_KEY = re.compile(r"(0|[1-9][0-9]?):([0-3]*)", re.ASCII)
_PATH = re.compile(r"([0-9]{1,2})/([0-9]{1,7})/([0-9]{1,7})", re.ASCII)


class TileError(ValueError):
    """A tile that does not exist: a zoom, column, row, quadkey or partition key outside WebMercatorQuad."""


class Box(NamedTuple):
    """An axis-aligned box, x before y: degrees (lon, lat) in EPSG:4326 or metres in EPSG:3857, as its maker says."""

    west: float
    south: float
    east: float
    north: float


@dataclass(frozen=True, slots=True, order=True)
class Tile:
    """One tile of WebMercatorQuad, row 0 at the top (XYZ, not TMS).

    Args:
        z: Zoom, 0 to 22.
        x: Column from the west, 0 to 2^z - 1.
        y: Row from the north, 0 to 2^z - 1.

    Raises:
        TileError: A value is no integer or lies outside its range.
    """

    z: int
    x: int
    y: int

    def __post_init__(self) -> None:
        for name in ("z", "x", "y"):
            value = getattr(self, name)
            if type(value) is not int:
                raise TileError(f"{name}={value!r} is not an integer")
        if not 0 <= self.z <= MAX_ZOOM:
            raise TileError(f"zoom {self.z} is outside 0..{MAX_ZOOM}")
        last = (1 << self.z) - 1
        for name, value in (("x", self.x), ("y", self.y)):
            if not 0 <= value <= last:
                raise TileError(f"{name}={value} is outside 0..{last} at zoom {self.z}")

    @classmethod
    def from_quadkey(cls, quadkey: str) -> Self:
        """The tile of a quadkey of 0 to 22 digits 0-3; the empty quadkey is the tile of zoom 0.

        Raises:
            TileError: Another digit, or more than 22 of them.
        """
        if len(quadkey) > MAX_ZOOM or quadkey.strip("0123"):
            raise TileError(f"quadkey {quadkey[:40]!r} is not 0..{MAX_ZOOM} digits 0-3")
        x = y = 0
        for digit in quadkey:
            value = ord(digit) - 48
            x = x << 1 | value & 1
            y = y << 1 | value >> 1
        return cls(len(quadkey), x, y)

    @classmethod
    def from_key(cls, key: str) -> Self:
        """The tile of a partition key `zoom:quadkey`, such as `14:12020013321101` or `0:`.

        Raises:
            TileError: The key has another form, or its zoom is not the quadkey's length.
        """
        match = _KEY.fullmatch(key)
        if match is None or int(match[1]) != len(match[2]):
            raise TileError(f"{key[:60]!r} is not a partition key zoom:quadkey, such as 14:12020013321101")
        return cls.from_quadkey(match[2])

    @classmethod
    def from_path(cls, path: str) -> Self:
        """The tile of a path `z/x/y`, such as `14/9327/4741`.

        Raises:
            TileError: The path has another form or names no tile.
        """
        match = _PATH.fullmatch(path)
        if match is None:
            raise TileError(f"{path[:60]!r} is not a tile z/x/y, such as 14/9327/4741")
        return cls(int(match[1]), int(match[2]), int(match[3]))

    @property
    def quadkey(self) -> str:
        """The quadkey: one digit 0-3 a zoom, the north-west first; empty at zoom 0 (Bing Maps Tile System)."""
        return mercantile.quadkey(self.x, self.y, self.z)

    @property
    def key(self) -> str:
        """The partition key `zoom:quadkey`."""
        return f"{self.z}:{self.quadkey}"

    @property
    def path(self) -> str:
        """The path `z/x/y`."""
        return f"{self.z}/{self.x}/{self.y}"

    @property
    def bounds(self) -> Box:
        """West, south, east, north in degrees, EPSG:4326 lon/lat."""
        return Box(*mercantile.bounds(self.x, self.y, self.z))

    @property
    def bounds_3857(self) -> Box:
        """West, south, east, north in metres, EPSG:3857. Neighbours share their edges to the bit."""
        side = 1 << self.z
        return Box(
            (2 * self.x - side) / side * HALF_WORLD,
            (side - 2 * (self.y + 1)) / side * HALF_WORLD,
            (2 * (self.x + 1) - side) / side * HALF_WORLD,
            (side - 2 * self.y) / side * HALF_WORLD,
        )

    def ancestor(self, zoom: int) -> Self:
        """The tile at `zoom`, not above this one's, that holds this one.

        Raises:
            TileError: `zoom` is negative or deeper than this tile's.
        """
        if not 0 <= zoom <= self.z:
            raise TileError(f"zoom {zoom} is outside 0..{self.z}, the zooms of {self.path} and its ancestors")
        shift = self.z - zoom
        return type(self)(zoom, self.x >> shift, self.y >> shift)

    def children(self) -> tuple[Self, Self, Self, Self]:
        """The four tiles of the next zoom, in quadkey order: north-west, north-east, south-west, south-east."""
        z, x, y = self.z + 1, self.x * 2, self.y * 2
        make = type(self)
        return make(z, x, y), make(z, x + 1, y), make(z, x, y + 1), make(z, x + 1, y + 1)

    def __str__(self) -> str:
        return self.path


def common_prefix(quadkeys: Sequence[str]) -> str:
    """The quadkey of the smallest tile that holds all of them; empty for the world, and of none."""
    first, last = min(quadkeys, default=""), max(quadkeys, default="")
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:length]
