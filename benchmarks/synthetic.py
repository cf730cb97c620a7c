"""A synthetic city, the common load of the benchmarks: seeded, so that every run and machine gets the same one.

Buildings (some L-shaped, some with a courtyard), streets and points of interest over about 20 tiles of zoom 14, 5,000
buildings a tile. A smaller city has the same density on a smaller area.

    python -m benchmarks.synthetic --buildings 100000 --out city.geojsonl
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from geo_assets.tiles.layers import Layer, LayerSet

SEED = 20_240_229
ORIGIN = (9326, 4738)
"""Column and row of the zoom 14 tile whose north-west corner is the city's (60.2 N, 24.9 E)."""
BUILDINGS_A_TILE = 5_000
BLOCK = (8, 4)
"""Plots of a block, columns and rows; streets run between blocks."""
STREET = 0.6
"""Width of a street in plots."""
MARGIN = 0.004
"""Free edge of the city in tiles of zoom 14, so that no buffer reaches into a row of tiles beyond it."""

KINDS = ("apartments", "house", "office", "retail", "school", "garage")
PLACES = ("cafe", "pharmacy", "bus_stop", "bench", "restaurant", "kindergarten", "fuel", "atm")

LAYERS = LayerSet(
    layers=(
        Layer("streets", min_zoom=10, min_pixels=0, simplify=0.5),
        Layer("buildings", min_zoom=14, min_pixels=0, simplify=0.25),
        Layer("places", min_zoom=14),
    )
)
"""Every size of a building shows from zoom 14 on: the load is known and does not hang on a visibility rule."""

Array = npt.NDArray[np.float64]


def city(buildings: int = 100_000, seed: int = SEED) -> Iterator[dict[str, Any]]:
    """The city's features as GeoJSON, coordinates in EPSG:4326 lon/lat with 7 decimals.

    Args:
        buildings: How many buildings; streets and points of interest follow from it (about 1 and 10 in 100).
        seed: Another seed is another city.

    Yields:
        Features with `id` (an integer, unique over all layers), `version` 1, `layer` and typed properties.
    """
    random = np.random.default_rng(seed)
    plan = _Plan(buildings)
    yield from _streets(plan, random)
    yield from _buildings(plan, random)
    yield from _places(plan, random)


def write(path: Path, buildings: int = 100_000, seed: int = SEED) -> int:
    """Write the city as GeoJSONSeq, one feature a line; returns how many features."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for feature in city(buildings, seed):
            file.write(json.dumps(feature, ensure_ascii=False, separators=(",", ":")))
            file.write("\n")
            count += 1
    return count


class _Plan:
    """The city's grid of plots; positions are in tiles of zoom 14 from its north-west corner, x east, y south."""

    def __init__(self, buildings: int) -> None:
        if buildings < 1:
            raise ValueError(f"buildings={buildings} is not at least 1")
        self.buildings = buildings
        height = math.sqrt(buildings / BUILDINGS_A_TILE / 1.25)
        self.width, self.height = 1.25 * height, height
        self.columns = math.ceil(math.sqrt(buildings * 1.25))
        self.rows = math.ceil(buildings / self.columns)
        streets_x, streets_y = self.columns // BLOCK[0], self.rows // BLOCK[1]
        self.pitch = min(
            (self.width - 2 * MARGIN) / (self.columns + streets_x * STREET),
            (self.height - 2 * MARGIN) / (self.rows + streets_y * STREET),
        )

    def along(self, plot: npt.NDArray[Any], block: int) -> Array:
        """Where a plot begins along one axis: plots and the streets before it."""
        return MARGIN + self.pitch * (plot + (plot // block) * STREET)

    def position(self, number: npt.NDArray[np.int64]) -> tuple[Array, Array]:
        """The middle of the plots of these numbers."""
        x = self.along(number % self.columns, BLOCK[0]) + self.pitch / 2
        y = self.along(number // self.columns, BLOCK[1]) + self.pitch / 2
        return x, y


def _lon_lat(x: Array, y: Array) -> Array:
    """Positions in tiles of zoom 14 from the city's corner -> lon, lat in degrees, rounded to 7 decimals (1 cm)."""
    side = 1 << 14
    lon = (ORIGIN[0] + x) / side * 360.0 - 180.0
    lat = np.degrees(np.arctan(np.sinh(np.pi * (1.0 - 2.0 * (ORIGIN[1] + y) / side))))
    return np.round(np.stack([lon, lat], axis=-1), 7)


# Outlines on a unit plot, y south, clockwise on the map; the last point is not repeated here.
_RECTANGLE = np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)], float)
_L_SHAPE = np.array([(-1, -1), (1, -1), (1, 0.1), (0.05, 0.1), (0.05, 1), (-1, 1)], float)
_T_SHAPE = np.array([(-1, -1), (1, -1), (1, -0.2), (0.4, -0.2), (0.4, 1), (-0.4, 1), (-0.4, -0.2), (-1, -0.2)], float)
_ROUND = np.array([(math.cos(a), math.sin(a)) for a in np.arange(12) * math.tau / 12], float)
_COURTYARD = np.array([(-0.4, -0.4), (-0.4, 0.4), (0.4, 0.4), (0.4, -0.4)], float)
_OUTLINES: tuple[tuple[Array, Array | None], ...] = (
    (_RECTANGLE, None),
    (_L_SHAPE, None),
    (_T_SHAPE, None),
    (_ROUND, None),
    (_RECTANGLE, _COURTYARD),
)
_SHARES = (0.55, 0.22, 0.1, 0.05, 0.08)


def _buildings(plan: _Plan, random: np.random.Generator) -> Iterator[dict[str, Any]]:
    count = plan.buildings
    outline = random.choice(len(_OUTLINES), size=count, p=_SHARES)
    x, y = plan.position(np.arange(count, dtype=np.int64))
    half_x = plan.pitch * random.uniform(0.22, 0.42, count)
    half_y = plan.pitch * random.uniform(0.22, 0.42, count)
    angle = random.normal(0.0, 0.06, count)
    levels = random.integers(1, 9, count)
    height = np.round(levels * random.uniform(2.8, 3.4, count), 2)
    kind = random.integers(0, len(KINDS), count)
    listed = random.random(count) < 0.03
    named = random.random(count) < 0.05
    year = random.integers(1850, 2024, count)

    def rings(shape: Array, of: npt.NDArray[np.int64]) -> list[Any]:
        closed = np.vstack([shape, shape[:1]])
        u = closed[None, :, 0] * half_x[of, None]
        v = closed[None, :, 1] * half_y[of, None]
        sine, cosine = np.sin(angle[of])[:, None], np.cos(angle[of])[:, None]
        # Outlines wind clockwise on the map; reversed, shells are counter-clockwise (RFC 7946, section 3.1.6).
        ring = _lon_lat(x[of, None] + u * cosine - v * sine, y[of, None] + u * sine + v * cosine)
        return ring[:, ::-1].tolist()

    coordinates: list[list[Any]] = [[] for _ in range(count)]
    for number, (shell, hole) in enumerate(_OUTLINES):
        of = np.flatnonzero(outline == number)
        for part in (shell, hole):
            if part is not None:
                for index, ring in zip(of.tolist(), rings(part, of), strict=True):
                    coordinates[index].append(ring)

    columns = zip(
        coordinates,
        levels.tolist(),
        height.tolist(),
        kind.tolist(),
        listed.tolist(),
        named.tolist(),
        year.tolist(),
        strict=True,
    )
    for number, (rings_, level, metres, kind_, is_listed, is_named, built) in enumerate(columns):
        properties: dict[str, Any] = {"kind": KINDS[kind_], "levels": level, "height": metres, "year": built}
        if is_listed:
            properties["listed"] = True
        if is_named:
            properties["name"] = f"House {number}"
        yield _feature(number + 1, "buildings", "Polygon", rings_, properties)


def _streets(plan: _Plan, random: np.random.Generator) -> Iterator[dict[str, Any]]:
    """One street a gap between blocks, slightly bent, a vertex at every crossing and one between two."""
    first = 1_000_000_001
    number = 0
    for axis, plots, across, block, block_across in (
        ("x", plan.columns, plan.rows, BLOCK[0], BLOCK[1]),
        ("y", plan.rows, plan.columns, BLOCK[1], BLOCK[0]),
    ):
        gaps = np.arange(block, plots, block)
        middle = plan.along(gaps, block) - plan.pitch * STREET / 2
        stops = plan.along(np.arange(0, across + 1, max(1, block_across // 2)), block_across)
        for position in middle.tolist():
            bend = random.normal(0.0, plan.pitch * STREET * 0.1, len(stops))
            line = np.full(len(stops), position) + bend
            points = _lon_lat(line, stops) if axis == "x" else _lon_lat(stops, line)
            properties = {
                "name": f"Street {number + 1}",
                "class": ("primary", "secondary", "residential", "residential")[number % 4],
                "lanes": 1 + number % 4,
                "oneway": number % 3 == 0,
            }
            if len(stops) > 1:
                yield _feature(first + number, "streets", "LineString", points.tolist(), properties)
            number += 1


def _places(plan: _Plan, random: np.random.Generator) -> Iterator[dict[str, Any]]:
    first = 2_000_000_001
    count = max(1, plan.buildings // 10)
    plot = random.integers(0, plan.buildings, count)
    x, y = plan.position(plot)
    points = _lon_lat(
        x + plan.pitch * random.uniform(-0.45, 0.45, count), y + plan.pitch * random.uniform(-0.45, 0.45, count)
    ).tolist()
    kinds = random.integers(0, len(PLACES), count).tolist()
    stars = np.round(random.uniform(1, 5, count), 1).tolist()
    for number, (point, kind, rating) in enumerate(zip(points, kinds, stars, strict=True)):
        properties = {"kind": PLACES[kind], "name": f"Place {number + 1}", "rating": rating}
        yield _feature(first + number, "places", "Point", point, properties)


def _feature(id_: int, layer: str, kind: str, coordinates: Any, properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "Feature",
        "id": id_,
        "version": 1,
        "layer": layer,
        "geometry": {"type": kind, "coordinates": coordinates},
        "properties": properties,
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description="Write the synthetic city as GeoJSONSeq.")
    arguments.add_argument("--buildings", type=int, default=100_000, metavar="N")
    arguments.add_argument("--seed", type=int, default=SEED)
    arguments.add_argument("--out", type=Path, required=True, metavar="FILE")
    chosen = arguments.parse_args()
    count = write(chosen.out, chosen.buildings, chosen.seed)
    print(f"{count:,} features in {chosen.out}")


if __name__ == "__main__":
    main()
