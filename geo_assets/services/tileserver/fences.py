"""The standing fences as GeoJSON: read from the object that judges positions, by no geometry library.

What a fence is, and how sets of them follow each other, is in geo_assets/geofence/fences.py and services/fences.py;
a set's bytes are read here once more, because the server's image has neither shapely nor numpy.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from geo_assets.events.records import parts_of_key
from geo_assets.tiles.tile import Box
from resources.tile_store.protocol import TileStoreUnavailable

if TYPE_CHECKING:
    from resources.ledger.protocol import Ledger
    from resources.tile_store.protocol import TileStore

STANDING: Final = "geofence.fences"
"""The ledger's named value that says which set is the newest (services/fences.py writes it)."""

SET_VERSION: Final = b"\x01"
"""First byte of a set's object."""

MOST_FENCES: Final = 5_000
"""In one answer, unless fewer are asked for: what a browser draws and moves without jank."""

_POLYGON, _MULTIPOLYGON = 3, 6
_encode = msgspec.json.Encoder().encode


class _Stored(msgspec.Struct, array_like=True):
    """A fence of a set: the members of `geofence.fences` in their order."""

    key: str
    revision: int
    wkb: bytes
    priority: int = 0
    dwell_ms: int = 0
    hysteresis_m: float = 0.0
    schedule: dict[str, Any] | None = None
    name: str | None = None


class _StoredSet(msgspec.Struct, array_like=True):
    revision: int
    fences: list[_Stored]


_decode_set = msgspec.msgpack.Decoder(_StoredSet).decode


@dataclass(frozen=True, slots=True)
class ShownFence:
    """A fence as the map shows it.

    Args:
        key: `source:id`, by which triggers name it.
        revision: Its version.
        name: For people; None where it has none.
        boxes: West, south, east, north of each part, degrees (split at ±180).
        size: Of the parts' boxes, square degrees: the larger is kept where not all can be shown.
        feature: The GeoJSON feature.
    """

    key: str
    revision: int
    name: str | None
    boxes: tuple[Box, ...]
    size: float
    feature: bytes

    @property
    def middle(self) -> tuple[float, float]:
        """Longitude and latitude of the middle of its largest part's box, degrees."""
        west, south, east, north = max(self.boxes, key=_area)
        return (west + east) / 2, (south + north) / 2

    def meets(self, box: Box) -> bool:
        """Whether a part's box meets a box whose west may be above its east (over the date line)."""
        spans = ((box.west, box.east),) if box.west <= box.east else ((box.west, 180.0), (-180.0, box.east))
        return any(
            south <= box.north and north >= box.south and west <= right and east >= left
            for west, south, east, north in self.boxes
            for left, right in spans
        )


@dataclass(frozen=True)
class ShownSet:
    """A set of fences.

    Args:
        name: Of its object; empty for the set without fences that everything begins with.
        revision: Its revision.
        fences: In the order of their keys.
    """

    name: str = ""
    revision: int = 0
    fences: tuple[ShownFence, ...] = ()
    by_key: Mapping[str, ShownFence] = field(default_factory=dict[str, ShownFence])

    def collection(self, box: Box | None, limit: int) -> bytes:
        """A FeatureCollection of the fences that meet a box, the largest ones where they are too many.

        Args:
            box: Degrees; None is the world.
            limit: Most features.
        """
        found = [fence for fence in self.fences if box is None or fence.meets(box)]
        kept = found if len(found) <= limit else sorted(found, key=lambda fence: -fence.size)[:limit]
        head = {"revision": self.revision, "total": len(self.fences), "matched": len(found), "returned": len(kept)}
        return b"".join(
            (b'{"type":"FeatureCollection",', _encode(head)[1:-1], b',"features":[',
             b",".join(fence.feature for fence in kept), b"]}")
        )  # fmt: skip


class FenceMap:
    """The newest set, read again when the ledger names another. Safe from many threads; every method may block.

    Args:
        ledger: Names the set.
        tiles: Holds it.
        editable: Source whose fences may be changed on the page; None where nothing may be.
    """

    def __init__(self, ledger: Ledger, tiles: TileStore, editable: str | None = None) -> None:
        self._ledger, self._tiles, self._editable = ledger, tiles, editable
        self._lock = threading.Lock()
        self._known: dict[str, tuple[_Stored, ShownFence]] = {}
        self._set = ShownSet()

    def current(self) -> ShownSet:
        """The newest set.

        Raises:
            LedgerError, TileStoreError: Not now.
        """
        for _ in range(3):
            text = self._ledger.get_value(STANDING)
            name = json.loads(text)["name"] if text else ""
            if name == self._set.name:
                return self._set
            with self._lock:
                if name == self._set.name:
                    return self._set
                if not name:
                    self._known, self._set = {}, ShownSet()
                    return self._set
                data = self._tiles.get(name)
                if data is not None:
                    self._set = self._read(name, data)
                    return self._set
            # A newer one stands, and this one was cleaned up meanwhile: the ledger names it now.
        raise TileStoreUnavailable("the set of fences that the ledger names is not in the tile store")

    def _read(self, name: str, data: bytes) -> ShownSet:
        if data[:1] != SET_VERSION:
            raise TileStoreUnavailable(f"the set of fences is of version {data[:1].hex()}, not {SET_VERSION.hex()}")
        try:
            stored = _decode_set(memoryview(data)[1:])
            before, self._known = self._known, {}
            for one in stored.fences:
                kept = before.get(one.key)
                # Of thousands of fences one changed: the others are not written out again.
                self._known[one.key] = kept if kept is not None and kept[0] == one else (one, self._shown(one))
        except (msgspec.MsgspecError, struct.error, ValueError) as fault:
            raise TileStoreUnavailable(f"the set of fences cannot be read: {fault}") from None
        fences = tuple(shown for _, shown in self._known.values())
        return ShownSet(name, stored.revision, fences, {fence.key: fence for fence in fences})

    def _shown(self, stored: _Stored) -> ShownFence:
        polygons = list(_polygons(stored.wkb))
        source, identifier = parts_of_key(stored.key)
        properties: dict[str, Any] = {
            "key": stored.key,
            "source": source,
            "id": identifier,
            "revision": stored.revision,
            "priority": stored.priority,
        }
        if stored.name is not None:
            properties["name"] = stored.name
        if stored.dwell_ms:
            properties["dwell_s"] = stored.dwell_ms / 1000
        if stored.hysteresis_m:
            properties["hysteresis_m"] = stored.hysteresis_m
        if stored.schedule is not None:
            properties["schedule"] = stored.schedule
        if source == self._editable:
            properties["editable"] = True
        many = len(polygons) != 1
        geometry = {
            "type": "MultiPolygon" if many else "Polygon",
            "coordinates": polygons if many else polygons[0],
        }
        feature = {"type": "Feature", "id": stored.key, "properties": properties, "geometry": geometry}
        boxes = tuple(_box(polygon[0]) for polygon in polygons if polygon)
        if not boxes:
            raise ValueError(f"the fence {stored.key} has no ground")
        return ShownFence(
            stored.key, stored.revision, stored.name, boxes, sum(_area(box) for box in boxes), _encode(feature)
        )


Ring = Sequence[tuple[float, float]]


def _polygons(wkb: bytes) -> Iterator[list[Ring]]:
    """The polygons of a WKB polygon or multipolygon (little endian, two dimensions; OGC 06-103r4, section 8)."""
    order, kind = struct.unpack_from("<BI", wkb, 0)
    if order != 1 or kind not in (_POLYGON, _MULTIPOLYGON):
        raise ValueError(f"geometry of kind {kind} and byte order {order} is no fence's")
    at = 5
    if kind == _POLYGON:
        yield _rings(wkb, at)[0]
        return
    (count,) = struct.unpack_from("<I", wkb, at)
    at += 4
    for _ in range(count):
        rings, at = _rings(wkb, at + 5)
        yield rings


def _rings(wkb: bytes, at: int) -> tuple[list[Ring], int]:
    (count,) = struct.unpack_from("<I", wkb, at)
    at += 4
    rings: list[Ring] = []
    for _ in range(count):
        (points,) = struct.unpack_from("<I", wkb, at)
        if at + 4 + 16 * points > len(wkb):
            raise ValueError("geometry is cut off")
        numbers = struct.unpack_from(f"<{2 * points}d", wkb, at + 4)
        rings.append(list(zip(numbers[::2], numbers[1::2], strict=True)))
        at += 4 + 16 * points
    return rings, at


def _box(ring: Ring) -> Box:
    lons, lats = [x for x, _ in ring], [y for _, y in ring]
    return Box(min(lons), min(lats), max(lons), max(lats))


def _area(box: Box) -> float:
    return (box.east - box.west) * (box.north - box.south)
