"""What would be published of a region: the ledger's rows as they stand, and whether they may be published so.

Nothing is written here. Whoever goes on to read the objects has set a pin before (`services/pins.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import shapely
from pmtiles.tile import zxy_to_tileid

from geo_assets.events import topics
from geo_assets.services import build_worker
from geo_assets.services.hints import read_slice
from geo_assets.services.tileset.registry import TilesetError
from geo_assets.tiles.tile import Box, Tile
from geo_assets.tiles.tileset import joined
from geo_assets.tiles.zooms import to_mercator

if TYPE_CHECKING:
    from geo_assets.stack import Stack
    from resources.feature_store.protocol import TileBox
    from resources.ledger.protocol import TileState

PIECE = 100_000
"""Tiles of one read of the ledger, which is one snapshot: a region under the manifest cap is read at one moment."""

BOXES = 5_000
"""Boxes of one question to the feature store."""

SHAPES = 500
"""Boxes whose features are read whole at once."""

PEEKED = 50_000
"""Hints that nobody has marked yet and that are looked at; with more, the marks lag far behind."""

ROW = np.dtype([("id", "<u8"), ("z", "u1"), ("x", "<u4"), ("y", "<u4"), ("revision", "<u8"), ("hash", "V32")])
"""A tile that has an object: id as in PMTiles 3 (section 4.2), and what names the object. 57 bytes a tile."""


class EmptyRegion(TilesetError):
    """A region of which there is nothing to publish."""


class BelowFloor(TilesetError):
    """Too many tiles of the region are missing."""

    def __init__(self, message: str, missing: Sequence[tuple[str, str]]) -> None:
        super().__init__(message)
        self.missing = list(missing)
        """Partition key and why, of every missing tile."""


class TilesDirty(TilesetError):
    """Tiles of the region wait for their build."""

    def __init__(self, message: str, dirty: Sequence[str]) -> None:
        super().__init__(message)
        self.dirty = list(dirty)
        """Partition keys."""


@dataclass(frozen=True, slots=True)
class Region:
    """What is to be published.

    Args:
        title: For people.
        zooms: Ascending.
        keys: Partition keys; None is every tile that the ledger knows at these zooms.
    """

    title: str
    zooms: tuple[int, ...]
    keys: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The ledger's rows of a region at one moment."""

    region: Region
    rows: npt.NDArray[Any]
    """Tiles with an object, of `ROW`, by id."""
    expected: int
    """Tiles that should be there: known to the ledger, or with a feature in them."""
    empty: int
    """Of those, tiles that are there as empty."""
    missing: tuple[tuple[str, str], ...]
    """Partition key and why."""
    dirty: tuple[str, ...]
    """Partition keys of tiles that wait for their build."""
    newest_ms: int
    """Newest event time of any feature in them."""
    mark: int
    """Highest mark that a tile of them was built for: the ledger's counter as this snapshot knows it."""
    commits: int
    """Commits of all tiles so far, read before the rows."""
    watermark_ms: int
    """Newest event time applied to the feature store, read before the rows."""

    @property
    def present(self) -> int:
        """Tiles that are there, with an object or as empty."""
        return self.expected - len(self.missing)

    @property
    def coverage(self) -> float:
        """Present of expected."""
        return self.present / self.expected if self.expected else 0.0

    @property
    def digest(self) -> str:
        """sha256 hex over place and content hash of every tile: the same tiles, the same digest."""
        together = np.empty(len(self.rows), np.dtype([("id", ">u8"), ("hash", "V32")]))
        together["id"], together["hash"] = self.rows["id"], self.rows["hash"]
        return hashlib.sha256(together.tobytes()).hexdigest()

    def spans(self) -> dict[int, Box]:
        """Zoom -> the box in degrees around its tiles."""
        found: dict[int, Box] = {}
        for zoom in np.unique(self.rows["z"]).tolist():
            rows = self.rows[self.rows["z"] == zoom]
            corners = [(int(rows["x"].min()), int(rows["y"].min())), (int(rows["x"].max()), int(rows["y"].max()))]
            found[zoom] = joined(Tile(zoom, x, y).bounds for x, y in corners)
        return found


def take(stack: Stack, region: Region, *, ahead: bool = True) -> Snapshot:
    """Read the ledger's rows of a region. Set a pin first, if objects are to be read after.

    A tile that nobody ever wanted is not expected if no feature shows in it, and missing if one does.

    Args:
        stack: The ports.
        region: Which tiles.
        ahead: Count as waiting also what is wanted on `[tiles]` and not marked yet.

    Raises:
        EmptyRegion: Nothing is expected there.
        TilesDirty: More waits on `[tiles]` than is looked at.
    """
    watermark = stack.features.counts().watermark_ms
    unread = _unread_hints(stack) if ahead else set[str]()
    commits = stack.ledger.counts().revision_sum
    taken = _Taken(stack, unread)
    for keys in _pieces(_keys(stack, region), PIECE):
        taken.add(stack.ledger.read(keys))
    if not taken.expected:
        raise EmptyRegion(
            f"{region.title}: no tile is known there and no feature shows at zooms {_zooms(region.zooms)}: "
            "there is nothing to publish"
        )
    rows = np.array(taken.rows, ROW)
    rows.sort(order="id")
    return Snapshot(
        region=region,
        rows=rows,
        expected=taken.expected,
        empty=taken.empty,
        missing=tuple(sorted(taken.missing)),
        dirty=tuple(sorted(taken.dirty)),
        newest_ms=taken.newest_ms,
        mark=taken.mark,
        commits=commits,
        watermark_ms=watermark,
    )


def judge(stack: Stack, snapshot: Snapshot, *, floor: float, allow_dirty: bool) -> None:
    """Whether it may be published.

    Args:
        stack: For links to the map.
        snapshot: What would be.
        floor: Share of the expected tiles that must be there, 0 to 1.
        allow_dirty: Publish tiles that wait for their build as they stand.

    Raises:
        BelowFloor: Less is there.
        TilesDirty: Tiles wait for their build, and that is not allowed.
        EmptyRegion: None of its tiles shows anything.
    """
    title = snapshot.region.title
    if snapshot.dirty and not allow_dirty:
        raise TilesDirty(
            f"{title}: {len(snapshot.dirty):,} of {snapshot.expected:,} tiles wait for their build, such as "
            f"{_links(stack, snapshot.dirty[:3])}: publish when geo-assets status shows none, or as they stand with "
            "--allow-dirty",
            snapshot.dirty,
        )
    if snapshot.coverage < floor:
        raise BelowFloor(
            f"{title}: {snapshot.present:,} of {snapshot.expected:,} tiles are present, {snapshot.coverage:.2%}, below "
            f"the floor of {floor:.2%}; missing are {_links(stack, [key for key, _ in snapshot.missing[:3]])}"
            f"{' and more' if len(snapshot.missing) > 3 else ''}: geo-assets backfill builds them",
            snapshot.missing,
        )
    if not len(snapshot.rows):
        raise EmptyRegion(f"{title}: all of its {snapshot.expected:,} tiles are empty: there is nothing to publish")


def map_link(tiles_url: str, key: str) -> str:
    """Link to the map page, centred on a tile at its zoom (`#zoom/lat/lon`)."""
    tile = Tile.from_key(key)
    box = tile.bounds
    return f"{tiles_url}/#{tile.z}/{(box.south + box.north) / 2:.5f}/{(box.west + box.east) / 2:.5f}"


def _links(stack: Stack, keys: Sequence[str]) -> str:
    return ", ".join(f"{key} {map_link(stack.settings.tiles_url, key)}" for key in keys)


def _zooms(zooms: Sequence[int]) -> str:
    return f"{zooms[0]}-{zooms[-1]}" if len(zooms) > 1 else str(zooms[0])


def _keys(stack: Stack, region: Region) -> Iterator[str]:
    if region.keys is not None:
        return iter(region.keys)
    return (state.key for state in stack.ledger.scan(zooms=region.zooms, published=False))


def _pieces(keys: Iterator[str], size: int) -> Iterator[list[str]]:
    piece: list[str] = []
    for key in keys:
        piece.append(key)
        if len(piece) == size:
            yield piece
            piece = []
    if piece:
        yield piece


class _Taken:
    """Rows as they are sorted into present, empty, missing and dirty."""

    def __init__(self, stack: Stack, unread: set[str]) -> None:
        self._stack, self._unread = stack, unread
        self.rows: list[tuple[int, int, int, int, int, bytes]] = []
        self.expected = self.empty = self.newest_ms = self.mark = 0
        self.missing: list[tuple[str, str]] = []
        self.dirty: list[str] = []

    def add(self, states: dict[str, TileState]) -> None:
        never: list[str] = []
        for key, state in states.items():
            given_up = state.dirty and state.given_up >= state.wanted
            if (state.dirty and not given_up) or key in self._unread:
                self.dirty.append(key)
            self.newest_ms = max(self.newest_ms, state.data_time_ms)
            self.mark = max(self.mark, state.built)
            if state.content_hash is not None:
                z, _, _ = key.partition(":")
                x, y = _place(key)
                self.rows.append(
                    (
                        zxy_to_tileid(int(z), x, y),
                        int(z),
                        x,
                        y,
                        state.revision,
                        bytes.fromhex(state.content_hash),
                    )
                )
            if given_up:
                why = f"its builds failed: {state.error or 'see geo-assets dead-letters'}"
                self.missing.append((key, why[:300]))
            elif state.content_hash is not None:
                pass
            elif not state.empty:
                self.missing.append((key, "its object was found damaged; it waits for its next build"))
            elif state.revision or state.built:
                self.empty += 1
            elif state.dirty:
                self.missing.append((key, "not built yet"))
            else:
                never.append(key)
                continue
            self.expected += 1
        for start in range(0, len(never), BOXES):
            self._look(never[start : start + BOXES])

    def _look(self, keys: list[str]) -> None:
        """Tiles that nobody ever wanted: those without a feature are not missing, nor expected."""
        boxes = build_worker.boxes_of(keys, self._stack.layers)
        near = [boxes[index] for index in np.unique(self._stack.features.digests(boxes).pair_tile).tolist()]
        for start in range(0, len(near), SHAPES):
            for key in self._met(near[start : start + SHAPES]):
                self.missing.append((key, "features show in it, and it was never built"))
                self.expected += 1

    def _met(self, boxes: Sequence[TileBox]) -> list[str]:
        """Keys of those boxes that a feature itself meets, as with an edit's cover: a diagonal's own box meets more."""
        rows = self._stack.features.features(boxes)
        shapes = shapely.transform(shapely.from_wkb(list(rows.geometry)), to_mercator)
        shapely.prepare(shapes)
        low = to_mercator([(box.west, box.south) for box in boxes])
        high = to_mercator([(box.east, box.north) for box in boxes])
        squares = shapely.box(low[:, 0], low[:, 1], high[:, 0], high[:, 1])
        meets = shapely.intersects(shapes[rows.pair_row], squares[rows.pair_tile])
        return [boxes[index].key for index in np.unique(rows.pair_tile[meets]).tolist()]


def _place(key: str) -> tuple[int, int]:
    quadkey = key.partition(":")[2]
    x = y = 0
    for digit in quadkey:
        x, y = x << 1 | int(digit) & 1, y << 1 | int(digit) >> 1
    return x, y


def _unread_hints(stack: Stack) -> set[str]:
    """Tiles that somebody wants looked at and of which the ledger does not know yet. Nothing is marked or moved."""
    found: set[str] = set()
    log, left = stack.log, PEEKED
    positions = {topic: stack.ledger.positions(log.topic_id(topic)) for topic in topics.TILE_HINTS}
    parts = [(topic, *part) for topic in topics.TILE_HINTS for part in log.extents(topic).items()]
    for topic, partition, extent in parts:
        start = max(extent.begin, positions[topic].get(partition, extent.begin))
        while left > 0 and start < extent.end:
            records = log.read(topic, partition, start, min(left, 5_000))
            if not records:
                break
            piece = read_slice(records, start)
            found.update(hint.key for hint in piece.hints)
            start, left = piece.next_offset, left - len(records)
    if left <= 0:
        raise TilesDirty(
            f"more than {PEEKED:,} edits of tiles wait to be marked: publish when geo-assets status shows no lag", []
        )
    return found
