"""Circles and corridors on the ellipsoid (WGS 84) as polygons in lon/lat, and how far a point is from an edge.

The polygons may reach over ±180 or a pole: they come back split and closed as every stored geometry is. What a fence is
stands in `fences`.
"""

# Functions of shapely that take one geometry or an array have partly unknown types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyproj
import shapely
from shapely.geometry.base import BaseGeometry

from geo_assets.events.dead_letter import Refused
from geo_assets.events.geometry import brought_back, unrolled

Floats = npt.NDArray[np.float64]

POINTS = 128
"""Corners of a circle. They lie a hair outside and the middles of its sides a hair inside: at most 1.6e-4 of the radius
((1 - cos(pi/n)) / (1 + cos(pi/n))); with sides straight in lon/lat instead of on the ellipsoid, at most `ERROR`."""

ERROR = 1e-3
"""How far the edge of a circle or corridor may be from the true one, as a fraction of its radius or half width, between
85 degrees north and south. Near a pole, where a side that is straight in lon/lat bends on the ground, it is more."""

MAX_PIECES = 20_000
"""Pieces into which the line of a corridor may have to be cut to keep `ERROR`."""

EARTH_RADIUS_M = 6_371_008.8
"""Mean radius of the ellipsoid, (2 a + b) / 3."""

_A, _F = 6_378_137.0, 1 / 298.257223563
"""WGS 84: semi-major axis in metres, flattening."""

_GEOD = pyproj.Geod(ellps="WGS84")


def circle(lon: float, lat: float, radius_m: float) -> BaseGeometry:
    """The ground within a distance of a point.

    Args:
        lon: Degrees; may go on past ±180.
        lat: Degrees.
        radius_m: Metres on the ellipsoid.

    Returns:
        A polygon, or several where ±180 splits it; EPSG:4326 lon/lat.
    """
    azimuths = -np.arange(POINTS) * (360.0 / POINTS)
    reach = 2.0 * radius_m / (1.0 + math.cos(math.pi / POINTS))
    start = np.full(POINTS, ((lon + 180.0) % 360.0) - 180.0), np.full(POINTS, lat)
    x, y, _ = _GEOD.fwd(*start, azimuths, np.full(POINTS, reach))
    return _closed(np.stack((x, y), axis=1))


def corridor(line: Floats, half_width_m: float) -> BaseGeometry:
    """The ground within a distance of a line, with round ends.

    Args:
        line: (n, 2) lon, lat in degrees; straight in lon/lat from point to point, as GeoJSON has it.
        half_width_m: Metres on the ellipsoid to each side.

    Returns:
        Polygons in EPSG:4326 lon/lat, split at ±180.

    Raises:
        Refused: `too_large`, where the line is too long for so narrow a corridor.
    """
    pieces = [circle(float(lon), float(lat), half_width_m) for lon, lat in line]
    pieces += _strips(line, half_width_m)
    return shapely.union_all(pieces)


def _strips(line: Floats, half_width_m: float) -> Iterator[BaseGeometry]:
    steepest = math.tan(math.radians(min(85.0, max(1.0, float(np.abs(line[:, 1]).max())))))
    # A side of length L that is straight in lon/lat leaves the true one by L^2 tan(lat) / (8 R) at most.
    longest = math.sqrt(8.0 * EARTH_RADIUS_M * ERROR / 4 * half_width_m / steepest)
    lengths = np.atleast_1d(_GEOD.line_lengths(line[:, 0], line[:, 1]))[: len(line) - 1]
    counts = np.maximum(1, np.ceil(lengths / longest)).astype(np.int64)
    if counts.sum() > MAX_PIECES:
        raise Refused(
            "too_large", "geometry", f"{lengths.sum():.0f} m", f"{MAX_PIECES} pieces of {longest:.0f} m",
            "the line is too long for a corridor as narrow",
        )  # fmt: skip
    for (start, end), count, length in zip(pairwise(line), counts, lengths, strict=True):
        if length == 0.0:
            continue
        points = start + (end - start) * np.linspace(0.0, 1.0, int(count) + 1)[:, None]
        ahead, behind, _ = _GEOD.inv(points[:-1, 0], points[:-1, 1], points[1:, 0], points[1:, 1])
        ahead, behind = np.asarray(ahead), np.asarray(behind) + 180.0
        # Of the two courses at a point between pieces, the mean: both pieces then share its corners.
        course = np.concatenate((ahead[:1], behind[:-1] + _turn(ahead[1:] - behind[:-1]) / 2, behind[-1:]))
        reach = np.full(len(points), half_width_m)
        left = _GEOD.fwd(points[:, 0], points[:, 1], course - 90.0, reach)[:2]
        right = _GEOD.fwd(points[:, 0], points[:, 1], course + 90.0, reach)[:2]
        yield _closed(np.concatenate((np.stack(right, axis=1), np.stack(left, axis=1)[::-1])))


def _turn(degrees: Floats) -> Floats:
    return (degrees + 180.0) % 360.0 - 180.0


def _closed(ring: Floats) -> BaseGeometry:
    made = cast(Any, shapely).polygons(np.concatenate((ring, ring[:1])))
    return brought_back(unrolled(made, projected=True))


def metres_apart(lon: Floats, lat: Floats, other_lon: Floats, other_lat: Floats) -> Floats:
    """Metres between points on a sphere (haversine); within 0.6 % of the ellipsoid's.

    Args:
        lon: (n) degrees.
        lat: (n) degrees.
        other_lon: (n) degrees.
        other_lat: (n) degrees.
    """
    phi, other_phi = np.radians(lat), np.radians(other_lat)
    half = np.sin((other_phi - phi) / 2) ** 2
    half += np.cos(phi) * np.cos(other_phi) * np.sin(np.radians(other_lon - lon) / 2) ** 2
    return 2.0 * EARTH_RADIUS_M * np.arcsin(np.sqrt(np.minimum(half, 1.0)))


def metres_a_degree(lat: Floats) -> tuple[Floats, Floats]:
    """Metres a degree of longitude and of latitude on the ellipsoid (WGS 84) at a latitude.

    A plane scaled so is right at its point; at a distance d it is wrong by d tan(lat) / (2 R) of itself: 1 % at 10 km
    and 85 degrees, 0.14 % at 10 km and 60.

    Args:
        lat: (n) degrees.
    """
    phi = np.radians(lat)
    e2 = _F * (2.0 - _F)
    w2 = 1.0 - e2 * np.sin(phi) ** 2
    normal = _A / np.sqrt(w2)
    return np.radians(normal * np.cos(phi)), np.radians(normal * (1.0 - e2) / w2)
