"""What reading a file gives: features as the events module takes them, a total for progress, and what was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from geo_assets.events.dead_letter import Refused
from geo_assets.events.json_text import shorten

_encode = msgspec.json.Encoder().encode


class ReadingError(Exception):
    """A file that cannot be imported: one line that names it, what is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class Unfit:
    """An object that was to become a feature and cannot: a dead letter of the import."""

    raw: bytes
    """The feature as far as it came."""
    fault: Refused


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a file, as its head describes it."""

    name: str | None
    """None in a format whose one table has no name."""
    columns: frozenset[str]


@dataclass(frozen=True, slots=True)
class Reading:
    """A file that was opened. Iterate it once: features as JSON bytes, in the file's order.

    A feature has `type`, `id`, `layer`, `properties`, `geometry` (an object, or hex WKB), and `version` where the
    file has one. Coordinates are in `crs`, in the file's own axis order as GIS files have it: x (lon, east) first.
    """

    path: Path
    format: str
    """`OpenStreetMap`, `GeoJSON`, `GeoJSONSeq`, `GeoParquet`, or GDAL's name of its driver."""
    crs: str | None
    """The declared CRS of every feature: `EPSG:3067`, WKT or PROJJSON. None: the file declares none."""
    total: int | None
    """Objects in the file; None where only reading it would tell."""
    read: Callable[[Counter[str]], Iterator[bytes | Unfit]] = field(repr=False)
    left_out: Counter[str] = field(default_factory=Counter)
    """Objects that became no feature, by reason; complete when the iteration ended."""
    tables: tuple[Table, ...] = ()
    """The tables that are read; none of a format that has none."""

    def __iter__(self) -> Iterator[bytes | Unfit]:
        """Features as JSON bytes, and what was to be one and cannot.

        Raises:
            ReadingError: The file turns out to be damaged on the way.
        """
        return self.read(self.left_out)


_ALL = frozenset({"point", "line", "area"})
_KINDS = {
    1: frozenset({"point"}),
    2: frozenset({"line"}),
    3: frozenset({"area"}),
    4: frozenset({"point"}),
    5: frozenset({"line"}),
    6: frozenset({"area"}),
}
_NAMES = {"Point": 1, "LineString": 2, "Polygon": 3, "MultiPoint": 4, "MultiLineString": 5, "MultiPolygon": 6}


def kinds_of_wkb(shape: bytes | None) -> frozenset[str]:
    """`point`, `line` or `area` by the type in a WKB's head; all three where that does not say."""
    if shape is None or len(shape) < 5:
        return _ALL
    code = int.from_bytes(shape[1:5], "little" if shape[0] else "big")
    # ISO adds thousands for Z and M (OGC 06-103r4, table 7), EWKB sets the topmost bits.
    return _KINDS.get((code & 0x0FFFFFFF) % 1000, _ALL)


def kinds_of_type(name: str | None) -> frozenset[str]:
    """`point`, `line` or `area` by GeoJSON's name of a geometry type; all three where that does not say."""
    return _KINDS.get(_NAMES.get(name or "", 0), _ALL)


def own_id(value: Any, column: str) -> int | str:
    """The id of a feature as the file's own column has it; a whole number stays one however it is stored.

    Raises:
        Refused: `schema`: it is null, or neither a whole number nor a text.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None or isinstance(value, bool) or not isinstance(value, int | str):
        said = "is empty" if value is None else "holds neither a whole number nor a text"
        shown = None if value is None else shorten(value)
        raise Refused("schema", "id", shown, "integer or text", f"the id column {column!r} {said}")
    return value


def feature_json(
    feature_id: Any, version: Any, layer: str | None, properties: dict[str, Any], geometry: str | None
) -> bytes:
    """One feature as JSON; the geometry as hex WKB, or None. An id or version of None is left out."""
    # The action is said, so that a column of that name is an attribute and deletes nothing.
    feature: dict[str, Any] = {"type": "Feature", "action": "update"}
    if feature_id is not None:
        feature["id"] = feature_id
    if version is not None:
        feature["version"] = version
    if layer is not None:
        feature["layer"] = layer
    feature["properties"] = properties
    feature["geometry"] = geometry
    return _encode(feature)
