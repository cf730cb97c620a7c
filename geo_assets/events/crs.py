"""Coordinate reference systems: which one an event declares, whether PROJ is to be trusted, the way to EPSG:4326.

Declared or refused: nothing is guessed from coordinates. Everything leaves here as lon, lat in degrees.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyproj
import pyproj.network
from pyproj.exceptions import CRSError, ProjError
from pyproj.transformer import TransformerGroup

from geo_assets.events.dead_letter import Refused
from geo_assets.events.json_text import shorten

# A grid fetched from a server on one machine and not on another would give the two different coordinates.
pyproj.network.set_network_enabled(False)  # pyright: ignore[reportPrivateImportUsage]

WGS84 = "EPSG:4326"

_CODE = re.compile(r"(EPSG|ESRI|IGNF|IAU_2015|OGC):{1,2}([A-Za-z0-9_]{1,32})", re.IGNORECASE | re.ASCII)
_URN = re.compile(
    r"urn:(?:x-)?ogc:def:crs:([A-Za-z0-9_]{1,16}):[0-9.]{0,12}:([A-Za-z0-9_]{1,32})", re.IGNORECASE | re.ASCII
)
_URL = re.compile(
    r"https?://(?:www\.)?opengis\.net/def/crs/([A-Za-z0-9_]{1,16})/[0-9.]{1,12}/([A-Za-z0-9_]{1,32})",
    re.IGNORECASE | re.ASCII,
)
_LON_LAT = frozenset({"EPSG:4326", "OGC:CRS84", "EPSG:4979", "OGC:CRS84H"})
"""WGS 84, whatever its axis order on paper: GeoJSON, WKT and WKB have x first (GeoJSON 2008, section 2.1.1)."""
_ALIASES = {
    "EPSG:900913": "EPSG:3857",
    "EPSG:3785": "EPSG:3857",
    "EPSG:102100": "EPSG:3857",
    "EPSG:102113": "EPSG:3857",
}
"""What Web Mercator was called before it had its code."""

MAX_COORDINATE = 1e8
"""Metres (or feet, or degrees) from a CRS's origin: twice around the globe, and more than any false easting."""

MIN_MARGIN = 5.0
"""Degrees around a CRS's area of use that are still near it: a national grid is used a little beyond its border."""


class ProbeFailed(RuntimeError):
    """PROJ gave another answer than the known one: its data are missing or damaged, and nothing may be reprojected."""


@dataclass(frozen=True, slots=True)
class Operation:
    """How coordinates came to EPSG:4326."""

    crs: str
    """`AUTHORITY:CODE` of what they were in."""
    name: str
    """PROJ's name of the operation; `none` where they were in lon/lat WGS 84 already."""
    accuracy_m: float | None
    """Metres; None where PROJ knows none."""
    ballpark: bool = False
    """Whether the datum was passed over, which can be off by hundreds of metres."""


@dataclass(frozen=True, slots=True)
class _Probe:
    crs: str
    x: float
    y: float
    lon: float
    lat: float


# Known without PROJ: 6654072.819 m is the meridian arc of WGS 84 (and, to a millimetre, GRS 80) from 0 to 60 degrees.
_PROBES = (
    # x first, degrees unchanged.
    _Probe("EPSG:4258", 24.9384, 60.1699, 24.9384, 60.1699),
    # Half of pi * 6378137, and atan(sinh(pi / 4)).
    _Probe("EPSG:3857", 10018754.171394622, 5009377.085697311, 90.0, 40.97989806962013),
    # On the central meridian of the zone, the arc times 0.9996.
    _Probe("EPSG:32635", 500000.0, 6651411.1904, 27.0, 60.0),
    # Its false origin is its definition: the projection's parameters say 3 degrees east, 46.5 degrees north.
    _Probe("EPSG:2154", 700000.0, 6600000.0, 3.0, 46.5),
    _Probe("EPSG:3067", 500000.0, 6651411.1904, 27.0, 60.0),
    # Northing is this one's first axis on paper; here x is the easting all the same.
    _Probe("EPSG:3879", 25500000.0, 6654072.8194, 25.0, 60.0),
)
_PROBE_TOLERANCE = 1e-8  # degrees, a millimetre


def probe() -> None:
    """Transform known coordinates and compare: run at start-up, before anything is reprojected.

    Raises:
        ProbeFailed: PROJ's answer is another, or it has none.
    """
    for known in _PROBES:
        try:
            found, _ = to_wgs84(known.crs, np.array([[known.x, known.y]]))
        except Refused as fault:
            raise ProbeFailed(f"PROJ cannot transform {known.crs}: {fault}; is its proj.db there?") from None
        lon, lat = found[0]
        if not (abs(lon - known.lon) <= _PROBE_TOLERANCE and abs(lat - known.lat) <= _PROBE_TOLERANCE):
            raise ProbeFailed(
                f"PROJ {pyproj.proj_version_str} puts {known.crs} {known.x}, {known.y} at lon {lon!r}, lat {lat!r}; "
                f"it is at {known.lon}, {known.lat}"
            )


def missing_grids(crs: str) -> tuple[str, ...]:
    """Grids without which PROJ cannot do the best transformation to EPSG:4326 that it knows of.

    Args:
        crs: `AUTHORITY:CODE`.

    Returns:
        Their names; empty where the best one can be done. What is done instead is recorded with its accuracy.

    Raises:
        Refused: `unknown_crs`.
    """
    if crs in _LON_LAT:
        return ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        group = TransformerGroup(_crs(crs), WGS84, always_xy=True)
    if group.best_available or not group.unavailable_operations:
        return ()
    best = group.unavailable_operations[0]
    return tuple(sorted(grid.short_name or grid.full_name for grid in best.grids if not grid.available))


def crs_name(value: object, field: str = "crs") -> str | None:
    """The `AUTHORITY:CODE` of a declared CRS, in any of the forms in use.

    Args:
        value: `EPSG:3067`, `3067`, an OGC URN or URL, `CRS84`, or GeoJSON 2008's named (or `EPSG`) CRS object. PROJ
            strings, WKT and links are no declaration: they may name files and servers.
        field: Where it stood, for messages.

    Returns:
        The name, or None for None: GeoJSON 2008 (section 3) says by null that no CRS can be assumed.

    Raises:
        Refused: `unknown_crs`: another form.
    """
    if isinstance(value, dict):
        value = _from_object(cast(dict[str, Any], value), field)
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or len(value) > 200:
        raise _unknown(field, value, "names no CRS")
    text = value.strip()
    if text.isascii() and text.isdigit():
        text = f"EPSG:{text}"
    elif text.upper() in ("CRS84", "CRS83", "CRS27"):
        text = f"OGC:{text}"
    match = _CODE.fullmatch(text) or _URN.fullmatch(text) or _URL.fullmatch(text)
    if match is None:
        raise _unknown(field, value, "names no CRS as AUTHORITY:CODE, OGC URN or OGC URL")
    name = f"{match[1].upper()}:{match[2].upper()}"
    return _ALIASES.get(name, name)


def _from_object(value: dict[str, Any], field: str) -> object:
    kind: Any = value.get("type")
    properties: Any = value.get("properties")
    if not isinstance(properties, dict):
        raise _unknown(field, value, "has no properties")
    members = cast(dict[str, Any], properties)
    if kind == "name" and isinstance(members.get("name"), str):
        return members["name"]
    if kind in ("EPSG", "epsg") and isinstance(members.get("code"), int):
        return members["code"]
    raise _unknown(field, value, "is no named CRS")


def _unknown(field: str, value: object, explanation: str) -> Refused:
    return Refused("unknown_crs", field, shorten(value), "AUTHORITY:CODE", explanation)


def resolve_crs(declared: Iterable[tuple[str, object]], default: str | None) -> str:
    """The one CRS that an event declares, or else its source's default.

    Args:
        declared: Where a declaration may stand, and what stands there; None where nothing does.
        default: The source's default; it counts only where nothing is declared.

    Returns:
        `AUTHORITY:CODE`, known to PROJ.

    Raises:
        Refused: `unknown_crs`: none at all, one that is not known, or two that differ.
    """
    first: tuple[str, str] | None = None
    for field, value in declared:
        name = None if value is None else crs_name(value, field)
        if name is None:
            continue
        if first is None:
            first = (field, name)
        elif name != first[1] and not _same(first[1], name, field):
            raise Refused(
                "unknown_crs",
                field,
                name,
                first[1],
                f"two declarations differ: {first[0]} says {first[1]}, {field} {name}",
            )
    if first is not None:
        field, name = first
    elif default is not None:
        field, name = "default_crs", crs_name(default, "default_crs") or ""
    else:
        raise Refused(
            "unknown_crs",
            "crs",
            None,
            None,
            "no CRS is declared and the source has no default: add `crs` or X-Source-CRS",
        )
    if name not in _LON_LAT:
        _crs(name, field)
    return name


def is_geographic(crs: str) -> bool:
    """Whether the coordinates of a CRS that `resolve_crs` gave are degrees on the globe, not metres on a map."""
    return crs in _LON_LAT or bool(_crs(crs).is_geographic)


def _same(one: str, other: str, field: str) -> bool:
    if one in _LON_LAT and other in _LON_LAT:
        return True
    return _crs(one, field).equals(_crs(other, field), ignore_axis_order=True)


def _crs(name: str, field: str = "crs") -> pyproj.CRS:
    found = _known(name)
    if isinstance(found, str):
        raise Refused("unknown_crs", field, name, None, found)
    return found


@lru_cache(maxsize=512)
def _known(name: str) -> pyproj.CRS | str:
    """The CRS, horizontal part only, or why there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            crs = pyproj.CRS(name)
            if len(crs.axis_info) > 2 or crs.is_compound:
                crs = crs.to_2d()
            if crs.is_compound:
                crs = crs.sub_crs_list[0]
    except CRSError as fault:
        return str(fault)
    if not (crs.is_geographic or crs.is_projected):
        return f"{name} ({crs.name}) is a {crs.type_name}, neither geographic nor projected"
    return crs


@lru_cache(maxsize=128)
def _transformer(name: str, ballpark: bool) -> pyproj.Transformer:
    with warnings.catch_warnings():
        # The best operation's grid is missing: what is used instead is recorded with its accuracy.
        warnings.simplefilter("ignore")
        return pyproj.Transformer.from_crs(_crs(name), WGS84, always_xy=True, allow_ballpark=ballpark)


def to_wgs84(
    crs: str, coordinates: npt.NDArray[np.float64], *, allow_ballpark: bool = False
) -> tuple[npt.NDArray[np.float64], Operation]:
    """Coordinates in EPSG:4326, lon before lat.

    Args:
        crs: `AUTHORITY:CODE`, as `resolve_crs` gives it.
        coordinates: (n, 2), x (easting, lon) before y (northing, lat), finite.
        allow_ballpark: Take a transformation that passes the datum over, and places far outside the CRS's area of use.

    Returns:
        (n, 2) degrees, and how they were made.

    Raises:
        Refused: `unknown_crs`: PROJ has no operation but a ballpark one, or a place is far outside the CRS's area of
            use; `out_of_range`: the coordinates are none of that CRS.
    """
    if crs in _LON_LAT:
        return coordinates, Operation(crs, "none", 0.0)
    if not len(coordinates):
        return coordinates, Operation(crs, "none", None)
    # PROJ wraps longitudes: 1e300 metres east of nowhere would be a place.
    if (largest := float(np.abs(coordinates).max())) > MAX_COORDINATE:
        raise Refused("out_of_range", "geometry", f"{largest:g}", f"{MAX_COORDINATE:g}", f"no place in {crs}")
    made, fault, transformer = _transform(crs, coordinates, False)
    ballpark = False
    if made is None or transformer is None:
        rough, _, rough_transformer = _transform(crs, coordinates, True)
        if rough is None or rough_transformer is None:
            if transformer is None and rough_transformer is None:
                raise Refused("unknown_crs", "crs", crs, None, f"PROJ cannot transform {crs}: {shorten(fault, 200)}")
            raise Refused("out_of_range", "geometry", None, crs, f"no place in {crs}: {fault}")
        if not allow_ballpark:
            raise Refused("unknown_crs", "crs", crs, None, f"PROJ can transform {crs} only roughly (ballpark): {fault}")
        made, ballpark, transformer = rough, True, rough_transformer
    if not allow_ballpark:
        _near(crs, made)
    return made, _only_operation(crs, ballpark) or _operation(crs, transformer.get_last_used_operation(), ballpark)


def _operation(crs: str, used: pyproj.Transformer, ballpark: bool) -> Operation:
    return Operation(crs, used.description or "unnamed", used.accuracy if used.accuracy >= 0 else None, ballpark)


@lru_cache(maxsize=128)
def _only_operation(crs: str, ballpark: bool) -> Operation | None:
    """The operation of a transformer that has but one, which need not be asked for (0.1 ms) each time."""
    transformer = _transformer(crs, ballpark)
    # PROJ names the operation only once coordinates have chosen it, where there are several.
    return None if transformer.description.startswith("unavailable") else _operation(crs, transformer, ballpark)


def _transform(
    crs: str, coordinates: npt.NDArray[np.float64], ballpark: bool
) -> tuple[npt.NDArray[np.float64] | None, str, pyproj.Transformer | None]:
    transformer = None
    try:
        transformer = _transformer(crs, ballpark)
        x, y = transformer.transform(coordinates[:, 0], coordinates[:, 1], errcheck=True)
    except ProjError as fault:
        return None, str(fault), transformer
    made = np.column_stack((x, y))
    if not np.isfinite(made).all():
        return None, "a coordinate has no image", transformer
    return made, "", transformer


def _near(crs: str, places: npt.NDArray[np.float64]) -> None:
    """Refuse places further from the CRS's area of use than the area is wide (or high), and than five degrees."""
    area = _crs(crs).area_of_use
    if area is None:
        return
    west, south, east, north = area.bounds
    if east < west:
        east += 360
    dx, dy = max(MIN_MARGIN, east - west), max(MIN_MARGIN, north - south)
    # Degrees from the middle of the area, the shorter way around the globe.
    off = np.abs((places[:, 0] - (west + east) / 2 + 180.0) % 360.0 - 180.0)
    far = (off > (east - west) / 2 + dx) | (places[:, 1] < south - dy) | (places[:, 1] > north + dy)
    if far.any():
        lon, lat = places[int(far.argmax())].tolist()
        found = f"lon {lon:.5f}, lat {lat:.5f}"
        limit = ",".join(f"{n:g}" for n in area.bounds)
        raise Refused(
            "unknown_crs", "geometry", found, limit, f"far outside the area of use of {crs} ({shorten(area.name)})"
        )
