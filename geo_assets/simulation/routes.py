"""Routes: closed ways through a street network with places to stop at, as a file keeps them.

Which streets there are, and how a route is found in them, is the matter of `scripts/sample_city.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

Kind = Literal["pedestrian", "bicycle", "car"]
KINDS: tuple[Kind, ...] = ("pedestrian", "bicycle", "car")

PRECISION = 1e6
"""Steps a degree of the encoded lines: a tenth of a metre."""

METRES_A_DEGREE = 111_195.0
"""Of latitude on the mean sphere; enough for a city, whose devices need not be where they are to the millimetre."""


class RouteError(ValueError):
    """A file of routes that cannot be used; the message names the route, the member and what is wrong."""


@dataclass(frozen=True, slots=True)
class Route:
    """A way that ends where it begins.

    Args:
        kind: Who goes there.
        lon: (n) degrees, the first and the last are one place.
        lat: (n) degrees.
        stops: Numbers of the points at which a device stops, ascending; the first is 0.
    """

    kind: Kind
    lon: Floats
    lat: Floats
    stops: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.lon) < 3 or len(self.lon) != len(self.lat):
            raise RouteError(f"route: {len(self.lon)} points, 3 are needed")
        if self.lon[0] != self.lon[-1] or self.lat[0] != self.lat[-1]:
            raise RouteError("route: does not end where it begins")
        if not self.stops or self.stops[0] != 0 or list(self.stops) != sorted(set(self.stops)):
            raise RouteError("route: stops are not ascending from 0")
        if self.stops[-1] >= len(self.lon) - 1:
            raise RouteError(f"route: stop {self.stops[-1]} is not before the last of {len(self.lon)} points")

    @property
    def distance_m(self) -> Floats:
        """(n) metres along the route from its first point."""
        east = np.diff(self.lon) * np.cos(np.radians((self.lat[1:] + self.lat[:-1]) / 2))
        return np.concatenate(([0.0], np.cumsum(np.hypot(east, np.diff(self.lat)) * METRES_A_DEGREE)))


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    kind: Kind
    stops: list[int]
    line: str


class _File(msgspec.Struct):
    routes: list[_Stored]


def read_routes(data: bytes) -> list[Route]:
    """The routes of a file.

    Args:
        data: JSON: `{"routes": [{"kind", "stops", "line"}]}`, the line in the polyline encoding with six digits.

    Raises:
        RouteError: It is none, or a route in it is at fault.
    """
    try:
        stored = msgspec.json.decode(data, type=_File).routes
    except msgspec.MsgspecError as fault:
        raise RouteError(f"routes: {fault}") from None
    if not stored:
        raise RouteError("routes: there is none in the file")
    found: list[Route] = []
    for number, entry in enumerate(stored):
        try:
            lon, lat = decode_line(entry.line)
            found.append(Route(entry.kind, lon, lat, tuple(entry.stops)))
        except RouteError as fault:
            raise RouteError(f"routes[{number}]: {fault}") from None
    return found


def write_routes(routes: Sequence[Route], **about: Any) -> bytes:
    """The file of `read_routes`, one route a line.

    Args:
        routes: The routes.
        about: Members that stand before them, such as `attribution`.
    """
    head = msgspec.json.encode(about)[:-1] + (b"," if about else b"")
    lines = [
        msgspec.json.encode(_Stored(route.kind, list(route.stops), encode_line(route.lon, route.lat)))
        for route in routes
    ]
    return head + b'"routes":[\n' + b",\n".join(lines) + b"\n]}\n"


def encode_line(lon: Floats, lat: Floats) -> str:
    """A line as text: the polyline encoding (lat before lon, deltas, five bits a character) with six digits."""
    steps = np.rint(np.column_stack((lat, lon)) * PRECISION).astype(np.int64)
    deltas = np.diff(steps, axis=0, prepend=np.zeros((1, 2), np.int64))
    out = bytearray()
    for delta in deltas.ravel().tolist():
        value = ~(delta << 1) if delta < 0 else delta << 1
        while value >= 0x20:
            out.append((0x20 | (value & 0x1F)) + 63)
            value >>= 5
        out.append(value + 63)
    return out.decode("ascii")


def decode_line(text: str) -> tuple[Floats, Floats]:
    """Lon and lat, degrees, of `encode_line`'s text.

    Raises:
        RouteError: The text is none.
    """
    deltas: list[int] = []
    value = shift = 0
    for character in text.encode("ascii", "replace"):
        bits = character - 63
        if not 0 <= bits < 64:
            raise RouteError(f"line: {chr(character)!r} is no character of a polyline")
        value |= (bits & 0x1F) << shift
        shift += 5
        if bits < 0x20:
            deltas.append(~(value >> 1) if value & 1 else value >> 1)
            value = shift = 0
    if shift or len(deltas) % 2:
        raise RouteError("line: ends in the middle of a point")
    steps = np.cumsum(np.array(deltas, np.int64).reshape(-1, 2), axis=0)
    return steps[:, 1] / PRECISION, steps[:, 0] / PRECISION
