"""Heat: where tiles were built in the last hour, counted by H3 cell out of `[tile-updated]`.

The log is read when somebody asks, from where the last answer ended, and never otherwise. Neither shapely nor numpy is
loaded: a tile counts in the cell that its middle lies in, of the finest resolution whose cells are no smaller than it.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from geo_assets.events.topics import TILE_UPDATED
from geo_assets.services.cells import h3_of_integers, ring_of
from geo_assets.tiles.tile import Box
from resources.event_log.protocol import OffsetOutOfRange

if TYPE_CHECKING:
    from resources.event_log.protocol import EventLog, Extent, Record

HOUR_MINUTES: Final = 60
"""How far back heat goes."""
LOOK_BACK: Final = 20_000
"""Records, over all partitions, that one look reads at most: some 0.3 s of a thread. What lies before is left out, and
the answer says since when it is complete."""
READ_RECORDS: Final = 5_000
MOST_COUNTS: Final = 20_000
"""Counts of a cell and minute that are kept, some 3 MB. Beyond, the fullest minute gets coarser: no tile is lost."""
REMEMBERED_TILES: Final = 20_000
"""Tiles whose newest revision is known: an announcement that comes again is counted once."""
KEEP_S: Final = 2.0
"""How long an answer stands, however many ask."""
MOST_CELLS: Final = 1_000
"""Cells of one answer, the hottest ones: some 300 kB of JSON."""
CELL_PX: Final = 56.0
"""About how wide a cell is on the screen."""
SHARE: Final = 0.25
"""Of the tiles built, so many are in a cell: cells are wider than `CELL_PX` where it takes that. An edit reaches tiles
of all zooms, of which the deepest quarter say best where it was."""

WORLD_CELL: Final = 0
"""In place of a cell: tiles wider than any."""

# Average lengths of an edge in km at resolutions 0 to 15, h3geo.org "Tables of cell statistics across resolutions".
_EDGES_KM: Final = (
    1281.256011, 483.0568391, 182.5129565, 68.97922179, 26.07175968, 9.85409099, 3.724532667, 1.406475763,
    0.53141401, 0.200786148, 0.075863783, 0.028663897, 0.010830188, 0.00409201, 0.0015461, 0.000584169,
)  # fmt: skip
_WIDTHS_M: Final = tuple(math.sqrt(3) * 1000 * edge for edge in _EDGES_KM)
_EQUATOR_M: Final = 40_075_016.686


def resolution_of_tiles(side_m: float) -> int:
    """Finest resolution whose cells are no smaller than a tile; -1 where the tile is wider than any cell.

    Args:
        side_m: Length of the tile's side on the ground in metres.
    """
    return sum(width >= side_m for width in _WIDTHS_M) - 1


def resolution_of_view(zoom: int, latitude: float) -> int:
    """Resolution whose cells are about `CELL_PX` wide on a map.

    Args:
        zoom: The map's zoom, at which the world is 512 * 2^zoom pixels wide.
        latitude: Of its middle in degrees.
    """
    wanted = CELL_PX * _EQUATOR_M * max(0.05, math.cos(math.radians(latitude))) / 512 / 2**zoom
    return min(range(len(_WIDTHS_M)), key=lambda res: abs(math.log(_WIDTHS_M[res] / wanted)))


def _latitude(row: float, side: int) -> float:
    return math.degrees(math.atan(math.sinh(math.pi * (1 - 2 * row / side))))


@lru_cache(maxsize=4_096)
def _resolution_of_row(z: int, y: int) -> int:
    latitude = _latitude(y + 0.5, 1 << z)
    return resolution_of_tiles(_EQUATOR_M * math.cos(math.radians(latitude)) / (1 << z))


def cell_of(z: int, x: int, y: int) -> int:
    """The cell in which a tile counts, as a 64-bit integer; `WORLD_CELL` where it is wider than any."""
    resolution = _resolution_of_row(z, y)
    if resolution < 0:
        return WORLD_CELL
    side = 1 << z
    return h3_of_integers().latlng_to_cell(_latitude(y + 0.5, side), (x + 0.5) / side * 360 - 180, resolution)


class HotCell(NamedTuple):
    """A cell of an answer: how many tiles were built in it, and its middle in degrees."""

    tiles: int
    cell: int
    lon: float
    lat: float


class Heat(NamedTuple):
    """Where tiles were built in a window."""

    resolution: int
    minutes: int
    since_ms: int
    """From then on every tile is counted: the window's begin, or later where more was built than is read."""
    complete: bool
    """Whether that is the window's begin."""
    cells: Sequence[HotCell]
    """Hottest first."""
    wider: int
    """Tiles that are wider than a cell."""

    @property
    def tiles(self) -> int:
        """All that were built."""
        return self.wider + sum(cell.tiles for cell in self.cells)


class Counts:
    """Tiles by minute and cell, for an hour. Bounded: what is too much gets coarser, and stays counted.

    Args:
        most: Counts kept.
    """

    def __init__(self, most: int = MOST_COUNTS) -> None:
        self._most = most
        self._minutes: dict[int, dict[int, int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._minutes.values()))

    def add(self, at_ms: int, cell: int) -> None:
        """Count one tile. Call `trim` after a batch."""
        minute = self._minutes.setdefault(at_ms // 60_000, {})
        minute[cell] = minute.get(cell, 0) + 1

    def trim(self, now_ms: int) -> None:
        """Forget what is older than an hour, and keep to the bound."""
        oldest = now_ms // 60_000 - HOUR_MINUTES
        for minute in [minute for minute in self._minutes if minute <= oldest]:
            del self._minutes[minute]
        kept = len(self)
        while kept > self._most:
            fullest = max(self._minutes, key=lambda minute: len(self._minutes[minute]))
            before = self._minutes[fullest]
            if before.keys() == {WORLD_CELL}:
                return  # An hour's minutes, one count each.
            self._minutes[fullest] = _coarser(before)
            kept += len(self._minutes[fullest]) - len(before)

    def finest(self, now_ms: int, minutes: int) -> int:
        """Finest resolution of which a share of the tiles of the last minutes are no wider than a cell; at least 0."""
        h3 = h3_of_integers()
        tiles = [0] * 16
        total = 0
        oldest = now_ms // 60_000 - minutes
        for minute, counts in self._minutes.items():
            if minute > oldest:
                for cell, number in counts.items():
                    total += number
                    if cell != WORLD_CELL:
                        tiles[h3.get_resolution(cell)] += number
        found = 0
        for resolution in range(15, 0, -1):
            found += tiles[resolution]
            if found >= SHARE * total:
                return resolution
        return 0

    def within(self, now_ms: int, minutes: int, resolution: int) -> tuple[dict[int, int], int]:
        """Tiles by cell of a resolution in the last minutes, and how many are wider than such a cell."""
        h3 = h3_of_integers()
        parents: dict[int, int] = {}
        found: dict[int, int] = {}
        wider = 0
        oldest = now_ms // 60_000 - minutes
        for minute, counts in self._minutes.items():
            if minute <= oldest:
                continue
            for cell, tiles in counts.items():
                parent = parents.get(cell)
                if parent is None:
                    fine = cell != WORLD_CELL and h3.get_resolution(cell) >= resolution
                    parent = parents[cell] = h3.cell_to_parent(cell, resolution) if fine else WORLD_CELL
                if parent == WORLD_CELL:
                    wider += tiles
                else:
                    found[parent] = found.get(parent, 0) + tiles
        return found, wider


def _coarser(counts: dict[int, int]) -> dict[int, int]:
    """The finest cells as their parents."""
    h3 = h3_of_integers()
    resolutions = {cell: h3.get_resolution(cell) if cell != WORLD_CELL else -1 for cell in counts}
    finest = max(resolutions.values())
    result: dict[int, int] = {}
    for cell, tiles in counts.items():
        if resolutions[cell] == finest:
            cell = h3.cell_to_parent(cell, finest - 1) if finest > 0 else WORLD_CELL
        result[cell] = result.get(cell, 0) + tiles
    return result


class _Built(msgspec.Struct, frozen=True, gc=False):
    """What heat needs of an announcement's value."""

    z: int
    x: int
    y: int
    revision: int
    built_at_ms: int = 0


_built = msgspec.json.Decoder(_Built).decode


class HeatMap:
    """Answers where tiles were built. Blocking: ask it in a thread; one look at a time.

    Args:
        log: The event log.
        clock_ms: Milliseconds since the epoch, UTC.
        keep_s: How long an answer stands.
        look_back: Records that one look reads at most.
        most_counts: Counts kept.
    """

    def __init__(
        self,
        log: EventLog,
        *,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        keep_s: float = KEEP_S,
        look_back: int = LOOK_BACK,
        most_counts: int = MOST_COUNTS,
    ) -> None:
        self._log, self._clock_ms = log, clock_ms
        self._keep_s, self._look_back = keep_s, look_back
        self._lock = threading.Lock()
        self._counts = Counts(most_counts)
        self._positions: dict[int, int] = {}
        self._told: OrderedDict[tuple[int, int, int], int] = OrderedDict()
        self._complete_ms = 0
        self._until = 0.0
        self._answers: dict[tuple[int, int], Heat] = {}
        self._finest: dict[int, int] = {}

    def collection(self, box: Box | None, zoom: int, minutes: int) -> dict[str, Any]:
        """Cells of a box as a GeoJSON FeatureCollection.

        Args:
            box: West, south, east, north in degrees; west above east crosses the date line; None is the world.
            zoom: Of the map that will show them.
            minutes: How far back, 1 to 60.

        Raises:
            LogError: The log does not answer.
        """
        latitude = 0.0 if box is None else max(-85.0, min(85.0, (box.south + box.north) / 2))
        heat = self.look(resolution_of_view(zoom, latitude), minutes)
        inside = [cell for cell in heat.cells if _meets(cell, heat.resolution, box)]
        name = h3_of_integers().int_to_str
        return {
            "type": "FeatureCollection",
            "resolution": heat.resolution,
            "minutes": heat.minutes,
            "since_ms": heat.since_ms,
            "complete": heat.complete,
            "tiles": heat.tiles,
            "wider": heat.wider,
            "matched": len(inside),
            "returned": min(len(inside), MOST_CELLS),
            "features": [
                {
                    "type": "Feature",
                    "properties": {"cell": name(cell.cell), "tiles": cell.tiles},
                    "geometry": {"type": "Polygon", "coordinates": [ring_of(cell.cell)]},
                }
                for cell in inside[:MOST_CELLS]
            ],
        }

    def look(self, resolution: int, minutes: int) -> Heat:
        """Where tiles were built in the last minutes, by cells of a resolution, or wider ones where tiles are.

        Raises:
            LogError: The log does not answer.
        """
        with self._lock:
            now_ms = self._clock_ms()
            if time.monotonic() >= self._until:
                self._catch_up(now_ms)
                self._answers.clear()
                self._finest.clear()
                self._until = time.monotonic() + self._keep_s
            if minutes not in self._finest:
                self._finest[minutes] = self._counts.finest(now_ms, minutes)
            resolution = min(resolution, self._finest[minutes])
            answer = self._answers.get((resolution, minutes))
            if answer is None:
                answer = self._answers[resolution, minutes] = self._sum_up(now_ms, resolution, minutes)
            return answer

    def _sum_up(self, now_ms: int, resolution: int, minutes: int) -> Heat:
        found, wider = self._counts.within(now_ms, minutes, resolution)
        h3 = h3_of_integers()
        cells: list[HotCell] = []
        for cell, tiles in sorted(found.items(), key=lambda item: (-item[1], item[0])):
            lat, lon = h3.cell_to_latlng(cell)
            cells.append(HotCell(tiles, cell, lon, lat))
        begin_ms = (now_ms // 60_000 - minutes + 1) * 60_000
        since_ms = max(begin_ms, self._complete_ms)
        return Heat(resolution, minutes, since_ms, since_ms == begin_ms, cells, wider)

    def _catch_up(self, now_ms: int) -> None:
        """Count what was announced since the last look, or the newest of it where that is too much."""
        extents = self._log.extents(TILE_UPDATED)
        share = max(1, self._look_back // max(1, len(extents)))
        for partition, extent in extents.items():
            self._read(partition, extent, share, now_ms)
        while len(self._told) > REMEMBERED_TILES:
            self._told.popitem(last=False)
        self._counts.trim(now_ms)

    def _read(self, partition: int, extent: Extent, share: int, now_ms: int) -> None:
        position = self._positions.get(partition, extent.begin)
        if position > extent.end:  # The log was set up anew, or restored: revisions begin again.
            self._told.clear()
            position = extent.begin
        start = max(position, extent.begin, extent.end - share)
        missing = start > position
        while start < extent.end:
            try:
                records = self._log.read(
                    TILE_UPDATED, partition, start, max_records=min(READ_RECORDS, extent.end - start)
                )
            except OffsetOutOfRange as gone:
                start, missing = max(start + 1, gone.begin), True
                continue
            if not records:
                break
            if missing:
                self._complete_ms, missing = max(self._complete_ms, records[0].timestamp_ms), False
            for record in records:
                self._count(record, now_ms)
            start = records[-1].offset + 1
            self._counts.trim(now_ms)
        self._positions[partition] = start

    def _count(self, record: Record, now_ms: int) -> None:
        try:
            built = _built(record.value or b"")
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return  # The change stream counts what cannot be read.
        z, x, y = tile = (built.z, built.x, built.y)
        at_ms = min(now_ms, built.built_at_ms or record.timestamp_ms)
        if not (0 <= z <= 22 and 0 <= x < 1 << z and 0 <= y < 1 << z):
            return
        if built.revision <= self._told.get(tile, 0):
            return
        self._told[tile] = built.revision
        self._told.move_to_end(tile)
        if at_ms > now_ms - HOUR_MINUTES * 60_000:
            self._counts.add(at_ms, cell_of(z, x, y))


def _meets(cell: HotCell, resolution: int, box: Box | None) -> bool:
    """Whether a cell may reach into a box: by its middle and the radius of the largest cell of its resolution."""
    if box is None:
        return True
    # Cells differ in size: the largest ones have edges a third longer than the average.
    reach = 1.4 * _EDGES_KM[resolution] / 111.2
    if not box.south - reach <= cell.lat <= box.north + reach:
        return False
    widest = min(89.0, max(abs(cell.lat), 0.0) + reach)
    sideways = min(180.0, reach / math.cos(math.radians(widest)))
    width = box.east - box.west if box.west <= box.east else box.east - box.west + 360
    return width + 2 * sideways >= 360 or (cell.lon - (box.west - sideways)) % 360 <= width + 2 * sideways
