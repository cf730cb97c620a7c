"""A published tileset as values: its name and versions, what its layers hold, and the documents that describe it.

Pure: bytes and numbers in, plain values out. Archives, stores and the ledger are in geo_assets/services/tileset.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from geo_assets.tiles.decode import DecodeError, decode
from geo_assets.tiles.layers import LayerSet
from geo_assets.tiles.tile import MAX_LATITUDE, Box

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}", re.ASCII)
_VERSION = re.compile(r"([1-9][0-9]{0,8})-([0-9a-f]{12})", re.ASCII)


class TilesetNameError(ValueError):
    """A name or version of a tileset that cannot be."""


def check_name(name: str) -> str:
    """The name, if a tileset can have it: it stands in paths and addresses.

    Raises:
        TilesetNameError: It is not 1 to 63 of `a-z 0-9 _ -`, or does not begin with a letter or digit.
    """
    if not _NAME.fullmatch(name):
        raise TilesetNameError(
            f"tileset name {name[:80]!r} is not 1..63 characters of a-z, 0-9, _ and -, the first a letter or digit"
        )
    return name


def version_name(number: int, digest: str) -> str:
    """`<number>-<first 12 hex digits of the digest>`: numbers never come again, the same tiles end alike."""
    return f"{number}-{digest[:12]}"


def version_number(version: str) -> int:
    """The number of a version.

    Raises:
        TilesetNameError: It is none.
    """
    match = _VERSION.fullmatch(version)
    if match is None:
        raise TilesetNameError(f"version {version[:40]!r} is not of the form 7-3fa94c1b02de")
    return int(match[1])


# -- what the layers hold ---------------------------------------------------------------------------------------------
@dataclass(slots=True)
class LayerHolds:
    """What a layer of a tileset holds.

    Args:
        min_zoom: First zoom with anything of it.
        max_zoom: Last zoom with anything of it.
        tiles: Tiles with anything of it.
        features: Features of it in all tiles; one that lies in two tiles counts twice.
        fields: Attribute to `Number`, `Boolean` or `String`; None where no value of it was looked at.
    """

    min_zoom: int
    max_zoom: int
    tiles: int = 0
    features: int = 0
    fields: dict[str, str | None] = field(default_factory=dict[str, str | None])


def glance(data: bytes) -> list[tuple[str, list[str], int]]:
    """Name, keys and number of features of each layer of a tile, without a look at any feature.

    Args:
        data: Uncompressed MVT (Mapbox Vector Tile 2.1, section 4.1: layer fields 1 name, 2 features, 3 keys).

    Raises:
        DecodeError: The bytes are no tile.
    """
    found: list[tuple[str, list[str], int]] = []
    try:
        for number, start, end in _parts(data, 0, len(data)):
            if number != 3:
                continue
            name, features, keys = "", 0, list[str]()
            for inner, first, last in _parts(data, start, end):
                if inner == 2:
                    features += 1
                elif inner == 3:
                    keys.append(data[first:last].decode())
                elif inner == 1:
                    name = data[first:last].decode()
            found.append((name, keys, features))
    except (IndexError, UnicodeDecodeError) as error:
        raise DecodeError(f"tile: {error}") from error
    return found


def layer_messages(data: bytes) -> list[bytes]:
    """The layers of a tile as they are in it, each a tile of its own.

    Args:
        data: Uncompressed MVT.

    Raises:
        DecodeError: The bytes are no tile.
    """
    try:
        ends = [end for number, _, end in _parts(data, 0, len(data)) if number == 3]
    except IndexError as error:
        raise DecodeError(f"tile: {error}") from error
    # Fields that are no layer stay with the layer behind them, as part of what tells two tiles apart.
    return [data[start:end] for start, end in zip([0, *ends], [*ends[:-1], len(data)], strict=False)] if ends else []


def _parts(data: bytes, position: int, end: int) -> Iterable[tuple[int, int, int]]:
    """Field number, first and last byte of each length-delimited field of a message; others are passed over.

    A loop of its own beside `decode`: with features of a few dozen bytes it is the whole cost of a glance.
    """
    while position < end:
        key = data[position]
        position += 1
        if key & 0x80:  # A field above 15: two bytes or more.
            shift = 7
            key &= 0x7F
            while True:
                byte = data[position]
                position += 1
                key |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    break
        wire = key & 7
        if wire == 5 or wire == 1:
            position += 4 if wire == 5 else 8
            continue
        value = data[position]
        position += 1
        if value & 0x80:
            shift = 7
            value &= 0x7F
            while True:
                byte = data[position]
                position += 1
                value |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    break
        if wire == 2:
            first, position = position, position + value
            if position > end:
                raise DecodeError(f"tile: field {key >> 3} wants {value} bytes, {end - first} are left")
            yield key >> 3, first, position
        elif wire != 0:
            raise DecodeError(f"tile: wire type {wire} at byte {position}")


class Contents:
    """Collects what the layers of a tileset hold, tile by tile."""

    def __init__(self) -> None:
        self.layers: dict[str, LayerHolds] = {}

    def add(self, data: bytes, zooms: Mapping[int, int]) -> None:
        """Take one content.

        Args:
            data: Uncompressed MVT.
            zooms: Zoom -> how many tiles have just these bytes.
        """
        unseen = False
        first, last, tiles = min(zooms), max(zooms), sum(zooms.values())
        for name, keys, features in glance(data):
            holds = self.layers.get(name)
            if holds is None:
                holds = self.layers[name] = LayerHolds(first, last)
            holds.min_zoom, holds.max_zoom = min(holds.min_zoom, first), max(holds.max_zoom, last)
            holds.tiles += tiles
            holds.features += features * tiles
            for key in keys:
                # A whole decode costs a hundred times a glance: only for what no value was seen of yet.
                unseen |= holds.fields.setdefault(key, None) is None
        if unseen:
            self._look(data)

    def _look(self, data: bytes) -> None:
        for layer in decode(data):
            fields = self.layers[layer.name].fields
            for feature in layer.features:
                for key, value in feature.properties.items():
                    kind = "Boolean" if isinstance(value, bool) else "String" if isinstance(value, str) else "Number"
                    known = fields[key]
                    # What holds several kinds is told as text: every value can be read as one.
                    fields[key] = kind if known in (None, kind) else "String"


# -- documents --------------------------------------------------------------------------------------------------------
def vector_layers(contents: Contents, layers: LayerSet) -> list[dict[str, Any]]:
    """`vector_layers` as TileJSON 3.0 (section 3.3), MBTiles 1.3 and PMTiles 3 have it: layers that hold something."""
    ordered = sorted(contents.layers, key=lambda name: (_position(layers, name), name))
    return [
        {
            "id": name,
            "description": layers[name].description if name in layers else "",
            "minzoom": contents.layers[name].min_zoom,
            "maxzoom": contents.layers[name].max_zoom,
            "fields": {key: kind or "String" for key, kind in sorted(contents.layers[name].fields.items())},
        }
        for name in ordered
    ]


def _position(layers: LayerSet, name: str) -> int:
    return layers.names.index(name) if name in layers else len(layers.names)


def tilejson(
    *,
    name: str,
    version: str,
    description: str,
    tiles: str,
    attribution: str,
    zooms: tuple[int, int],
    bounds: Box,
    layers: list[dict[str, Any]],
) -> dict[str, Any]:
    """TileJSON 3.0.0 of a tileset.

    Args:
        name: Of the tileset.
        version: Of the tileset; TileJSON's own is `<number>.0.0`.
        description: One line for people.
        tiles: URL with `{z}`, `{x}` and `{y}`.
        attribution: HTML.
        zooms: First and last zoom that holds a tile.
        bounds: Degrees, EPSG:4326.
        layers: As `vector_layers` gives them.
    """
    return {
        "tilejson": "3.0.0",
        "name": name,
        "description": description,
        "version": f"{version_number(version)}.0.0",
        "scheme": "xyz",
        "tiles": [tiles],
        "minzoom": zooms[0],
        "maxzoom": zooms[1],
        "bounds": list(bounds),
        "center": list(center(bounds, zooms)),
        "attribution": attribution,
        "vector_layers": layers,
    }


def center(bounds: Box, zooms: tuple[int, int]) -> tuple[float, float, int]:
    """Where a map should open: middle of the box in degrees, and the whole zoom at which it about fills a window.

    Of 1,024 by 768 pixels, where the world of zoom 0 is 512 pixels wide; a zoom of those that hold tiles.
    """
    (left, top), (right, bottom) = _fractions(bounds.west, bounds.north), _fractions(bounds.east, bounds.south)
    zoom = min(math.log2(1024 / 512 / max(right - left, 1e-9)), math.log2(768 / 512 / max(bottom - top, 1e-9)))
    return (
        round((bounds.west + bounds.east) / 2, 6),
        round((bounds.south + bounds.north) / 2, 6),
        min(zooms[1], max(zooms[0], math.floor(zoom))),
    )


def _fractions(lon: float, lat: float) -> tuple[float, float]:
    radians = math.radians(max(-MAX_LATITUDE, min(MAX_LATITUDE, lat)))
    return (lon + 180) / 360, (1 - math.asinh(math.tan(radians)) / math.pi) / 2


def joined(boxes: Iterable[Box]) -> Box:
    """The box around boxes.

    Raises:
        ValueError: There is none.
    """
    west, south, east, north = zip(*boxes, strict=True)
    return Box(min(west), min(south), max(east), max(north))


def bounds_of(spans: Mapping[int, Box], layers: LayerSet) -> Box:
    """The box in degrees of what a tileset shows.

    Args:
        spans: Zoom -> the box around its tiles.
        layers: The layers. Everything still shows at the last zoom of its layer, and tiles are smallest there: so
            the boxes of those zooms, as far as there are tiles, hold everything and little more.
    """
    last = max(spans)
    wanted = {min(layer.max_zoom, layers.max_zoom, last) for layer in layers.layers}
    return joined([spans[zoom] for zoom in wanted if zoom in spans] or [spans[last]])
