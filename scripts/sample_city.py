#!/usr/bin/env python3
"""Makes the sample's routes and fences of its OpenStreetMap extract: `python -m scripts.sample_city [--check]`.

Nothing in them is by chance: the same extract gives the same bytes. `--check` compares with what is there.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import osmium
import osmium.geom
import shapely

from geo_assets.simulation.routes import KINDS, METRES_A_DEGREE, Kind, Route, write_routes

FOLDER = Path(__file__).resolve().parents[1] / "geo_assets" / "sample"
EXTRACT = FOLDER / "helsinki.osm.pbf"
ATTRIBUTION = "© OpenStreetMap contributors, ODbL 1.0"

ROUTES: Mapping[Kind, int] = {"pedestrian": 60, "bicycle": 30, "car": 30}
STOPS = 5
"""Places of a route at which a device stops."""

_ROADS = frozenset(
    {
        "primary", "primary_link", "secondary", "secondary_link", "tertiary", "tertiary_link", "unclassified",
        "residential", "living_street", "service",
    }
)  # fmt: skip
_WALKS = _ROADS | {"footway", "pedestrian", "path", "steps", "cycleway"}
_RIDES = _ROADS | {"cycleway", "path", "pedestrian"}
_CLOSED = frozenset({"no", "private", "use_sidepath", "service"})

SQUARES = {
    "rautatientori": ("r2919118", {"dwell_s": 60, "hysteresis_m": 5, "priority": 3}),
    "senaatintori": ("r2919121", {"dwell_s": 45, "hysteresis_m": 5, "priority": 4}),
    "kasarmitori": ("r8924786", {"hysteresis_m": 5}),
    "lasipalatsinaukio": ("r8513460", {"hysteresis_m": 5}),
    "kaivopiha": ("w122595203", {"hysteresis_m": 5}),
    "elielinaukio": ("r116162", {"hysteresis_m": 5}),
    "esplanadinpuisto": (
        "w28328802",
        {"dwell_s": 60, "hysteresis_m": 5, "priority": 5,
         "schedule": {"zone": "Europe/Helsinki", "windows": ["Mo-Su 06:00-24:00"]}},
    ),
    "kaisaniemen-puisto": ("r6627217", {"dwell_s": 120, "hysteresis_m": 10}),
    "vanha-kirkkopuisto": ("w28238099", {"dwell_s": 60, "hysteresis_m": 5}),
    "kolmikulma": ("w123911186", {"hysteresis_m": 5}),
    "simonpuistikko": ("w8042613", {"hysteresis_m": 5}),
    "varsapuistikko": ("w22103315", {"hysteresis_m": 5}),
    "rautatieasema": ("w122595198", {"dwell_s": 30, "hysteresis_m": 10, "priority": 6}),
}  # fmt: skip
"""Fences whose ground is an object of the extract: `w` a way, `r` a relation, and the number."""

TRAMS = (
    ("raitiotie-mannerheimintie", "Mannerheimintie", {"radius_m": 12, "hysteresis_m": 5, "priority": 2}),
    (
        "raitiotie-aleksanterinkatu",
        "Aleksanterinkatu",
        {"radius_m": 12, "hysteresis_m": 5, "priority": 2,
         "schedule": {"zone": "Europe/Helsinki", "windows": ["Mo-Sa 05:30-24:00", "Su 07:00-24:00"]}},
    ),
)  # fmt: skip
"""Corridors along the tram tracks in a street."""

HARBOUR = ("kolera-allas", "n1815986142", {"radius_m": 120, "dwell_s": 60, "hysteresis_m": 15, "priority": 7})
"""A circle around a pier."""


@dataclass
class Streets:
    """The network of one kind of traffic: nodes of the extract, and where one gets from each."""

    lon: dict[int, float] = field(default_factory=dict)
    lat: dict[int, float] = field(default_factory=dict)
    ways: dict[int, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, one: tuple[int, float, float], other: tuple[int, float, float], both: bool) -> None:
        """A stretch between two nodes (id, lon, lat)."""
        for node, lon, lat in (one, other):
            self.lon[node], self.lat[node] = lon, lat
        metres = _metres(one[1:], other[1:])
        self.ways[one[0]].append((other[0], metres))
        if both:
            self.ways[other[0]].append((one[0], metres))

    def core(self) -> list[int]:
        """The nodes from which one gets to all the others of them and back: the largest such set, ascending."""
        back: dict[int, list[int]] = defaultdict(list)
        for node, edges in self.ways.items():
            for target, _ in edges:
                back[target].append(node)
        forward = {node: [target for target, _ in edges] for node, edges in self.ways.items()}
        left, best = set(self.lon), set[int]()
        while len(left) > len(best):
            start = min(left)
            both = _reached(start, forward) & _reached(start, back)
            best = both if len(both) > len(best) else best
            left -= both
        return sorted(best)

    def shortest(self, start: int, end: int) -> list[int]:
        """The nodes of the shortest way (Dijkstra); both are in the core."""
        reached: dict[int, float] = {}
        before: dict[int, int] = {}
        queue: list[tuple[float, int, int]] = [(0.0, start, start)]
        while queue:
            metres, node, previous = heapq.heappop(queue)
            if node in reached:
                continue
            reached[node], before[node] = metres, previous
            if node == end:
                break
            for target, length in self.ways[node]:
                if target not in reached:
                    heapq.heappush(queue, (metres + length, target, node))
        nodes = [end]
        while nodes[-1] != start:
            nodes.append(before[nodes[-1]])
        return nodes[::-1]

    def lines(self) -> Iterator[shapely.LineString]:
        """Every stretch, lon/lat."""
        for node, edges in self.ways.items():
            for target, _ in edges:
                yield shapely.LineString([(self.lon[node], self.lat[node]), (self.lon[target], self.lat[target])])


def _metres(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    east = (one[0] - other[0]) * float(np.cos(np.radians((one[1] + other[1]) / 2)))
    return float(np.hypot(east, one[1] - other[1])) * METRES_A_DEGREE


def _reached(start: int, edges: Mapping[int, list[int]]) -> set[int]:
    found, todo = {start}, [start]
    while todo:
        for target in edges.get(todo.pop(), ()):
            if target not in found:
                found.add(target)
                todo.append(target)
    return found


def open_to(tags: Mapping[str, str], kind: Kind) -> bool:
    """Whether a way may be used: by its class, by who may, and by the sky above it (no fix under ground)."""
    if tags.get("area") == "yes" or "indoor" in tags or "level" in tags or tags.get("tunnel", "no") not in (
        "no", "building_passage",
    ):  # fmt: skip
        return False
    classes = {"pedestrian": _WALKS, "bicycle": _RIDES, "car": _ROADS}[kind]
    if tags.get("highway") not in classes:
        return kind == "bicycle" and tags.get("bicycle") in ("yes", "designated") and tags.get("highway") == "footway"
    names = {
        "pedestrian": ("access", "foot"),
        "bicycle": ("access", "vehicle", "bicycle"),
        "car": ("access", "vehicle", "motor_vehicle", "motorcar"),
    }[kind]
    said = [tags[name] for name in names if name in tags]
    return not said or said[-1] not in _CLOSED


def both_ways(tags: Mapping[str, str], kind: Kind) -> bool:
    """Whether a way may be used against its direction."""
    if kind == "pedestrian" or tags.get("oneway", "no") == "no":
        return True
    return kind == "bicycle" and tags.get("oneway:bicycle") == "no"


def read_streets(path: Path = EXTRACT) -> dict[Kind, Streets]:
    """The three networks of an extract."""
    networks: dict[Kind, Streets] = {kind: Streets() for kind in KINDS}
    processor: Any = osmium.FileProcessor(str(path)).with_locations()
    for item in processor:
        if not item.is_way() or "highway" not in item.tags:
            continue
        tags = {tag.k: tag.v for tag in item.tags}
        nodes = [
            (node.ref, node.location.lon, node.location.lat) if node.location.valid() else None for node in item.nodes
        ]
        if tags.get("oneway") == "-1":
            nodes.reverse()
        for kind, streets in networks.items():
            if not open_to(tags, kind):
                continue
            for one, other in pairwise(nodes):
                if one is not None and other is not None:
                    streets.add(one, other, both_ways(tags, kind))
    return networks


def make_routes(networks: Mapping[Kind, Streets]) -> list[Route]:
    """Closed routes between places drawn by a fixed seed."""
    chance = random.Random(20_260_501)
    found: list[Route] = []
    for kind in KINDS:
        streets = networks[kind]
        core = streets.core()
        while sum(route.kind == kind for route in found) < ROUTES[kind]:
            places = [core[int(chance.random() * len(core))] for _ in range(STOPS)]
            nodes, stops = [places[0]], []
            for start, end in zip(places, [*places[1:], places[0]], strict=True):
                stops.append(len(nodes) - 1)
                nodes += streets.shortest(start, end)[1:]
            if len(set(stops)) < STOPS:
                continue
            route = Route(
                kind,
                np.array([streets.lon[node] for node in nodes]),
                np.array([streets.lat[node] for node in nodes]),
                tuple(stops),
            )
            if route.distance_m[-1] >= 1_500:
                found.append(route)
    return found


def make_fences(path: Path = EXTRACT) -> dict[str, Any]:
    """The fences as a FeatureCollection, ready to be imported, or to be posted one by one."""
    wanted = {where: (name, members) for name, (where, members) in SQUARES.items()}
    areas: dict[str, tuple[str, Any]] = {}
    streets: dict[str, list[Any]] = defaultdict(list)
    tracks: list[Any] = []
    harbour: tuple[str, Any] | None = None
    factory = osmium.geom.WKBFactory()
    processor: Any = osmium.FileProcessor(str(path)).with_areas()
    for item in processor:
        tags = {tag.k: tag.v for tag in item.tags}
        if item.is_area():
            where = f"{'w' if item.from_way() else 'r'}{item.orig_id()}"
            if where in wanted:
                areas[where] = tags["name"], shapely.from_wkb(factory.create_multipolygon(item))
        elif item.is_node() and f"n{item.id}" == HARBOUR[1]:
            harbour = tags["name"], shapely.Point(item.location.lon, item.location.lat)
        elif item.is_way() and (tags.get("railway") == "tram" or "highway" in tags):
            line = [(node.location.lon, node.location.lat) for node in item.nodes if node.location.valid()]
            if len(line) < 2:
                continue
            if tags.get("railway") == "tram":
                tracks.append(shapely.LineString(line))
            elif "name" in tags:
                streets[tags["name"]].append(shapely.LineString(line))
    features = [
        _fence(name, areas[where][0], _plain(areas[where][1]), members) for where, (name, members) in wanted.items()
    ]
    for name, street, members in TRAMS:
        # 10 m to either side, in degrees of latitude; tracks run in the street or on a bed beside it.
        beside = shapely.union_all(streets[street]).buffer(10 / METRES_A_DEGREE)
        pieces = shapely.intersection(np.array(tracks), beside)
        merged = shapely.line_merge(shapely.union_all(shapely.set_precision(pieces, 1e-7)))
        lines: list[Any] = [line for line in shapely.get_parts(merged).tolist() if line.length * METRES_A_DEGREE > 60]
        line: Any = shapely.MultiLineString(sorted(lines, key=_start)).simplify(0.00001)
        features.append(_fence(name, f"Tram, {street}", line, members))
    assert harbour is not None
    features.append(_fence(HARBOUR[0], harbour[0], harbour[1], HARBOUR[2]))
    return {"type": "FeatureCollection", "attribution": ATTRIBUTION, "features": features}


def _start(line: Any) -> tuple[float, ...]:
    return line.coords[0]


def _plain(shape: Any) -> Any:
    return shape.geoms[0] if shape.geom_type == "MultiPolygon" and len(shape.geoms) == 1 else shape


def _fence(name: str, said: str, shape: Any, members: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "Feature",
        "id": name,
        "version": 1,
        "layer": "fences",
        "properties": {"name": said, **members},
        "geometry": json.loads(shapely.to_geojson(shapely.set_precision(shape, 1e-7))),
    }


def files() -> dict[Path, bytes]:
    """What is made: path -> bytes."""
    fences = make_fences()
    features = ",\n".join(json.dumps(feature, ensure_ascii=False) for feature in fences["features"])
    head = json.dumps({**fences, "features": None}, ensure_ascii=False).replace("null", f"[\n{features}\n]")
    return {
        FOLDER / "routes.json": write_routes(make_routes(read_streets()), attribution=ATTRIBUTION),
        FOLDER / "fences.geojson": (head + "\n").encode(),
    }


def main() -> int:
    """Write the files, or compare them."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--check", action="store_true", help="compare with the files that are there")
    check = options.parse_args().check
    different = 0
    for path, data in files().items():
        if not check:
            path.write_bytes(data)
            print(f"{path.name}: {len(data):,} bytes")
        elif not path.exists() or path.read_bytes() != data:
            print(f"{path.name} is not what the extract gives")
            different = 1
    return different


if __name__ == "__main__":
    sys.exit(main())
