"""The ledger as a picture: the state of every tile of a box at one zoom, and where the map's data lies at all."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import mercantile

from geo_assets.services.tileserver.models import Coverage, CoveredTile, TileStateName
from geo_assets.tiles.tile import MAX_LATITUDE, Box, Tile

if TYPE_CHECKING:
    from resources.ledger.protocol import Ledger, LedgerCounts, TileState

MOST_TILES = 4_096
"""Tiles of one answer: a 4K screen of 256-pixel tiles has 135; 4,096 are 0.6 MB of JSON."""

WORLD = Box(-180.0, -MAX_LATITUDE, 180.0, MAX_LATITUDE)

BOUNDS_FROM = 3_000
"""Published tiles of a zoom that are looked at for the bounds: the deepest zoom that has no more."""


class TooWide(Exception):
    """The box holds more tiles than one answer gives."""

    def __init__(self, tiles: int) -> None:
        super().__init__(f"{tiles} tiles")
        self.tiles = tiles


def tiles_of(box: Box, zoom: int) -> list[Tile]:
    """Tiles of a zoom that a box in degrees meets, row by row; west above east crosses the date line.

    Raises:
        TooWide: They are more than `MOST_TILES`.
    """
    last = (1 << zoom) - 1
    north = min(MAX_LATITUDE, max(-MAX_LATITUDE, box.north))
    south = min(MAX_LATITUDE, max(-MAX_LATITUDE, box.south))
    spans = [(box.west, box.east)] if box.west <= box.east else [(box.west, 180.0), (-180.0, box.east)]
    columns: dict[int, None] = {}
    for west, east in spans:
        first, final = (min(last, max(0, math.floor((lon + 180) / 360 * (last + 1)))) for lon in (west, east))
        if final - first + len(columns) >= MOST_TILES:
            raise TooWide(final - first + 1 + len(columns))
        columns.update(dict.fromkeys(range(first, final + 1)))
    top, bottom = (min(last, max(0, mercantile.tile(0.0, lat, zoom).y)) for lat in (north, south))
    count = len(columns) * (bottom - top + 1)
    if count > MOST_TILES:
        raise TooWide(count)
    return [Tile(zoom, x, y) for y in range(top, bottom + 1) for x in columns]


def state_name(state: TileState) -> TileStateName:
    """The first that holds of `failed`, `dirty`, `never`, `empty` and `present`.

    `failed` is a dirty tile that was given up, or not published when last tried; `never` is one that nobody built.
    """
    if state.dirty and (state.given_up >= state.wanted or state.error is not None):
        return "failed"
    if state.dirty:
        return "dirty"
    if state.revision == 0 and state.built == 0:
        return "never"
    return "empty" if state.empty else "present"


def coverage(ledger: Ledger, box: Box, zoom: int) -> Coverage:
    """The state of every tile of a zoom that a box in degrees meets.

    Raises:
        TooWide: They are more than `MOST_TILES`.
        LedgerError: The ledger does not answer.
    """
    tiles = tiles_of(box, zoom)
    states = ledger.read([tile.key for tile in tiles])
    covered: list[CoveredTile] = []
    for tile in tiles:
        state = states[tile.key]
        covered.append(
            CoveredTile(
                x=tile.x,
                y=tile.y,
                key=tile.key,
                state=state_name(state),
                revision=state.revision,
                bytes=state.bytes,
                built_at_ms=state.built_at_ms,
                error=None if state.error is None else state.error[:200],
            )
        )
    return Coverage(zoom=zoom, counts=dict(Counter(tile.state for tile in covered)), tiles=covered)


def bounds(ledger: Ledger, counts: LedgerCounts) -> Box | None:
    """The box in degrees of the published tiles, as close as one cheap look shows it; None when there are none."""
    zoom = max((z for z, number in counts.by_zoom.items() if 0 < number <= BOUNDS_FROM), default=None)
    if zoom is None:
        return None
    boxes = [Tile.from_key(state.key).bounds for state in ledger.scan(zooms=[zoom])]
    if not boxes:
        return None
    west, south, east, north = zip(*boxes, strict=True)
    return Box(min(west), min(south), max(east), max(north))


def center(box: Box, max_zoom: int) -> tuple[float, float, float]:
    """Where a map should open: longitude and latitude in degrees of a box's middle, and a zoom.

    At that zoom the box about fills a window of 1,024 by 768 pixels; the world of zoom 0 is 512 pixels wide.
    """
    left, top = _fractions(box.west, box.north)
    right, bottom = _fractions(box.east, box.south)
    zoom = min(math.log2(1024 / 512 / max(right - left, 1e-9)), math.log2(768 / 512 / max(bottom - top, 1e-9)))
    return (
        round((box.west + box.east) / 2, 6),
        round((box.south + box.north) / 2, 6),
        round(min(float(max_zoom), max(0.0, zoom)), 2),
    )


def _fractions(lon: float, lat: float) -> tuple[float, float]:
    """A place in degrees as fractions of the Web Mercator square, from the west and from the north."""
    radians = math.radians(max(-MAX_LATITUDE, min(MAX_LATITUDE, lat)))
    return (lon + 180) / 360, (1 - math.asinh(math.tan(radians)) / math.pi) / 2
