"""H3 cells as they are drawn: rings in degrees, over the date line and around the poles. Loads no geometry library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def h3_of_integers() -> Any:
    """H3's plain interface over integers; loaded when it is first asked for, as it takes a fifth of a second."""
    import h3.api.basic_int as cells

    return cells


def ring_of(cell: int) -> list[tuple[float, float]]:
    """A cell's closed ring for a Mercator map: longitude, latitude in degrees.

    Over the date line longitudes go on past ±180. Around a pole the ring is closed over it, as wide as the world.

    Args:
        cell: As a 64-bit integer.
    """
    corners: Sequence[tuple[float, float]] = h3_of_integers().cell_to_boundary(cell)
    around = [(lon, lat) for lat, lon in corners]
    ring = [around[0]]
    for lon, lat in (*around[1:], around[0]):
        before = ring[-1][0]
        ring.append((before + (lon - before + 180) % 360 - 180, lat))
    turn = ring[-1][0] - ring[0][0]
    if abs(turn) > 180:
        pole = math.copysign(90.0, sum(lat for _, lat in around))
        ring += [(ring[-1][0], pole), (ring[0][0], pole), ring[0]]
    middle = (min(lon for lon, _ in ring) + max(lon for lon, _ in ring)) / 2
    shift = -360 if middle > 180 else 360 if middle < -180 else 0
    return [(round(lon + shift, 6), round(lat, 6)) for lon, lat in ring]
