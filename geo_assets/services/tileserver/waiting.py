"""What waits where: the ledger's dirty tiles by quadkey prefix, as boxes with their number and the oldest age.

The ledger is asked when somebody looks, and never otherwise.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from geo_assets.services.tileserver.stream import Filter
from geo_assets.tiles.tile import Box, Tile

if TYPE_CHECKING:
    from resources.ledger.protocol import Lag, Ledger

KEEP_S: Final = 2.0
"""How long an answer stands, however many ask."""
SHARE: Final = 0.1
"""Of one core's time that may go into answers: with 90,000 dirty tiles at as many prefixes one takes half a second."""
MOST_BOXES: Final = 1_000
"""Boxes of one answer, those that wait the longest: some 250 kB of JSON."""
DEEPER: Final = 2
"""Zooms from the view's to its boxes: 128 to 256 pixels wide."""
SHALLOWER: Final = 3
"""Zooms above the boxes of which tiles are still shown: at the fourth they are wider than the screen."""
_LENGTHS_KEPT: Final = 4

_COLUMNS = str.maketrans("0123", "0101")
_ROWS = str.maketrans("0123", "0011")


class Waiting(NamedTuple):
    """Dirty tiles below one prefix."""

    oldest_ms: int
    prefix: str
    tiles: int
    zooms: tuple[int, int]
    """First and last."""

    @property
    def place(self) -> tuple[int, int, int]:
        """The prefix as z, x, y."""
        if not self.prefix:
            return 0, 0, 0
        return len(self.prefix), int(self.prefix.translate(_COLUMNS), 2), int(self.prefix.translate(_ROWS), 2)


def by_prefix(lags: Sequence[Lag]) -> list[Waiting]:
    """Lag by zoom and prefix as lag by prefix, the longest-waiting first."""
    found: dict[str, Waiting] = {}
    for lag in lags:
        known = found.get(lag.prefix)
        if known is None:
            found[lag.prefix] = Waiting(lag.oldest_ms, lag.prefix, lag.tiles, (lag.zoom, lag.zoom))
        else:
            zooms = min(known.zooms[0], lag.zoom), max(known.zooms[1], lag.zoom)
            oldest_ms = min(known.oldest_ms, lag.oldest_ms)
            found[lag.prefix] = Waiting(oldest_ms, lag.prefix, known.tiles + lag.tiles, zooms)
    return sorted(found.values())


class WaitingMap:
    """Answers what waits where. Blocking: ask it in a thread; one look at a time.

    Args:
        ledger: Whose tiles.
        max_zoom: Last zoom that is built.
        clock_ms: Milliseconds since the epoch, UTC.
        keep_s: How long an answer stands at least.
    """

    def __init__(
        self,
        ledger: Ledger,
        max_zoom: int,
        *,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        keep_s: float = KEEP_S,
    ) -> None:
        self._ledger, self._max_zoom, self._clock_ms, self._keep_s = ledger, max_zoom, clock_ms, keep_s
        self._lock = threading.Lock()
        self._kept: dict[int, tuple[float, list[Waiting]]] = {}

    def collection(self, box: Box | None, zoom: int) -> dict[str, Any]:
        """Prefixes of a box under which tiles wait, as a GeoJSON FeatureCollection.

        Args:
            box: West, south, east, north in degrees; west above east crosses the date line; None is the world.
            zoom: Of the map that will show them; it decides how large they are.

        Raises:
            LedgerError: The ledger does not answer.
        """
        depth = min(zoom + DEEPER, self._max_zoom)
        waiting = self.look(depth)
        now_ms = self._clock_ms()
        meets = Filter(bbox=box)
        inside: list[Waiting] = []
        wider = wider_oldest_ms = 0
        for one in waiting:
            if not meets(*one.place):
                continue
            if len(one.prefix) >= depth - SHALLOWER:
                inside.append(one)
            else:
                wider += one.tiles
                wider_oldest_ms = min(wider_oldest_ms or one.oldest_ms, one.oldest_ms)
        return {
            "type": "FeatureCollection",
            "depth": depth,
            "tiles": sum(one.tiles for one in waiting),
            "age_s": _age_s(waiting[0].oldest_ms if waiting else 0, now_ms),
            "wider": wider,
            "wider_age_s": _age_s(wider_oldest_ms, now_ms),
            "matched": len(inside),
            "returned": min(len(inside), MOST_BOXES),
            "features": [_feature(one, now_ms) for one in inside[:MOST_BOXES]],
        }

    def look(self, length: int) -> list[Waiting]:
        """What waits by prefixes of at most a length, the longest-waiting first.

        Raises:
            LedgerError: The ledger does not answer.
        """
        with self._lock:
            until, waiting = self._kept.get(length, (0.0, []))
            began = time.monotonic()
            if began >= until:
                waiting = by_prefix(self._ledger.lag(length))
                ended = time.monotonic()
                until = ended + max(self._keep_s, (ended - began) / SHARE)
                self._kept.pop(length, None)
                self._kept[length] = until, waiting
                while len(self._kept) > _LENGTHS_KEPT:
                    del self._kept[next(iter(self._kept))]
            return waiting


def _age_s(oldest_ms: int, now_ms: int) -> float:
    return round(max(0.0, (now_ms - oldest_ms) / 1000), 1) if oldest_ms else 0.0


def _feature(one: Waiting, now_ms: int) -> dict[str, Any]:
    west, south, east, north = Tile(*one.place).bounds
    ring = [(west, south), (east, south), (east, north), (west, north), (west, south)]
    return {
        "type": "Feature",
        "properties": {
            "prefix": one.prefix,
            "depth": len(one.prefix),
            "tiles": one.tiles,
            "min_zoom": one.zooms[0],
            "max_zoom": one.zooms[1],
            "age_s": _age_s(one.oldest_ms, now_ms),
        },
        "geometry": {"type": "Polygon", "coordinates": [ring]},
    }
