"""Which crossings positions must give, one at a time and with plain shapely: what a test counts against."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import shapely


class Crossing(NamedTuple):
    """A device has come into a fence, or gone from it."""

    device: str
    fence: str
    state: Literal["ENTER", "EXIT"]
    time_ms: int


class Fix(NamedTuple):
    """A position that counts: no late one, no repetition, no jump."""

    device: str
    time_ms: int
    lon: float
    lat: float
    accuracy_m: float = 0.0


@dataclass(frozen=True, slots=True)
class Ground:
    """A fence as far as crossings go.

    Args:
        shape: Polygon or MultiPolygon, EPSG:4326 lon/lat.
        hysteresis_m: Metres beyond its border until EXIT.
        in_force: Whether it is at an event time (milliseconds since the epoch); None: always.
    """

    shape: Any
    hysteresis_m: float = 0.0
    in_force: Callable[[int], bool] | None = None


def expected_crossings(fixes: Iterable[Fix], fences: Mapping[str, Ground]) -> list[Crossing]:
    """The ENTERs and EXITs of fixes, each device's in the order of its fixes.

    ENTER: the fix is in the fence, its border included. EXIT: the fix is farther from it than its hysteresis and than
    the fix's own radius. Where the fence is not in force nobody is in it.

    Args:
        fixes: In the order of each device's event times.
        fences: Id -> fence.

    Returns:
        By fix; of one fix the EXITs first, then by fence id.
    """
    fixes = list(fixes)
    points = shapely.points([(fix.lon, fix.lat) for fix in fixes])
    flat = [
        (name, ground, *_flat(ground.shape), shapely.covers(ground.shape, points).tolist())
        for name, ground in sorted(fences.items())
    ]
    inside: dict[str, set[str]] = {}
    found: list[Crossing] = []
    for number, fix in enumerate(fixes):
        stays = inside.setdefault(fix.device, set())
        left: list[Crossing] = []
        entered: list[Crossing] = []
        for name, ground, shape, scale, covers in flat:
            if not covers[number] and name not in stays:
                continue
            force = ground.in_force is None or ground.in_force(fix.time_ms)
            if name not in stays:
                if force:
                    stays.add(name)
                    entered.append(Crossing(fix.device, name, "ENTER", fix.time_ms))
                continue
            reach = max(ground.hysteresis_m, fix.accuracy_m)
            point = shapely.Point(fix.lon * scale[0], fix.lat * scale[1])
            if not force or (not covers[number] and shapely.distance(shape, point) > reach):
                stays.discard(name)
                left.append(Crossing(fix.device, name, "EXIT", fix.time_ms))
        found += left + entered
    return found


def _flat(shape: Any) -> tuple[Any, tuple[float, float]]:
    """A shape in metres around its middle, and the metres a degree of lon and lat there (WGS 84)."""
    _, south, _, north = shapely.bounds(shape).tolist()
    lat = np.radians((south + north) / 2)
    # Radii of curvature of the ellipsoid: a = 6,378,137 m, e² = 0.00669438.
    root = np.sqrt(1 - 0.00669438 * np.sin(lat) ** 2)
    scale = (
        float(np.radians(1) * 6_378_137.0 * np.cos(lat) / root),
        float(np.radians(1) * 6_378_137.0 * (1 - 0.00669438) / root**3),
    )
    return shapely.transform(shape, lambda points: points * scale), scale
