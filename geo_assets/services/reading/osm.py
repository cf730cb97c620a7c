"""OpenStreetMap files (.osm.pbf, .osm): nodes, ways and multipolygon relations as points, lines and areas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from struct import Struct, pack
from typing import Any

import osmium
import osmium.geom
import osmium.io
import osmium.osm
from osmium.filter import EmptyTagFilter

from geo_assets.services.reading.mapping import LayerMapping
from geo_assets.services.reading.reading import Reading, ReadingError, feature_json

_POINT = frozenset({"point"})
_LINE = frozenset({"line"})
_AREA = frozenset({"area"})
_CLOSED = frozenset({"line", "area"})

# The last digit tells the kind, so that ids are unique over the three and stay numbers below 2^53.
_NODE, _WAY, _RELATION = 1, 2, 3

_LINE_WKB = Struct("<BII")
"""Byte order (1: little endian), geometry type (2 line, 5 multiline) and count (OGC 06-103r4, section 8.2)."""


def open_osm(path: Path, mapping: LayerMapping, form: str = "osm.pbf") -> Reading:
    """Read an OpenStreetMap file; ids are the object's times ten plus 1 (node), 2 (way) or 3 (relation).

    Args:
        path: The file.
        mapping: Rules by tags; each must name its layer.
        form: `osm.pbf` or `osm` (XML), whatever the file is called.

    Raises:
        ReadingError: It is no OpenStreetMap file.
    """
    if any(rule.layer is None for rule in mapping.rules):
        raise ReadingError(f"{path}: a rule for OpenStreetMap objects must name its layer")
    file: Any = osmium.io.File(str(path), form.removeprefix("osm."))
    try:
        with osmium.io.Reader(file, osmium.osm.NOTHING) as reader:
            reader.header()
    except RuntimeError as error:
        raise ReadingError(f"{path}: not a readable OpenStreetMap file ({_first_line(error)})") from error
    return Reading(path, "OpenStreetMap", "EPSG:4326", None, lambda left_out: _read(path, file, mapping, left_out))


def _read(path: Path, file: Any, mapping: LayerMapping, left_out: Counter[str]) -> Iterator[bytes]:
    factory = osmium.geom.WKBFactory()
    # Closed ways that a rule wants as an area: what the assembler does not give back is no valid ring.
    awaited: set[int] = set()
    # The same of relations, whose areas may come before or after themselves.
    wanted: set[int] = set()
    assembled: set[int] = set()
    processor: Any = osmium.FileProcessor(file).with_areas().with_filter(EmptyTagFilter())
    try:
        for item in processor:
            tags = {tag.k: tag.v for tag in item.tags}
            kind = item.type_str()
            if kind == "n":
                rule = mapping.rule(tags, _POINT, origin="node")
                if rule is None:
                    left_out["no rule fits"] += 1
                    continue
                if not item.location.valid():
                    left_out["no location"] += 1
                    continue
                number, geometry = item.id * 10 + _NODE, factory.create_point(item)
            elif kind == "w":
                closed = item.is_closed() and len(item.nodes) > 3
                rule = mapping.rule(tags, _CLOSED if closed else _LINE, origin="way")
                if rule is None:
                    left_out["no rule fits"] += 1
                    continue
                if closed and "area" in rule.geometry:
                    awaited.add(item.id)
                    continue
                number, geometry = item.id * 10 + _WAY, _line(item)
                if geometry is None:
                    left_out["nodes of the way are missing"] += 1
                    continue
            elif kind == "a":
                if item.from_way():
                    if item.orig_id() not in awaited:
                        continue
                    awaited.discard(item.orig_id())
                    rule, number = mapping.rule(tags, _CLOSED, origin="way"), item.orig_id() * 10 + _WAY
                else:
                    rule, number = mapping.rule(tags, _AREA, origin="relation"), item.orig_id() * 10 + _RELATION
                    assembled.add(item.orig_id())
                if rule is None:
                    continue  # counted where the relation itself comes
                try:
                    geometry = _area(factory.create_multipolygon(item))
                except RuntimeError:
                    left_out["no valid area"] += 1
                    continue
            else:
                # A relation itself: one that is an area also comes as such, any other is no shape of its own.
                if tags.get("type") not in ("multipolygon", "boundary"):
                    left_out["relation that is no area"] += 1
                elif mapping.rule(tags, _AREA, origin="relation") is None:
                    left_out["no rule fits"] += 1
                else:
                    wanted.add(item.id)
                continue
            yield feature_json(number, item.version or None, rule.layer, rule.properties(tags), geometry)
    except RuntimeError as error:
        raise ReadingError(f"{path}: damaged OpenStreetMap file ({_first_line(error)})") from error
    lost = len(awaited) + len(wanted - assembled)
    if lost:
        left_out["no valid area"] += lost


def _line(way: Any) -> str | None:
    """The way as hex WKB. An extract cuts ways at its edge: what is drawn are the stretches whose nodes are there."""
    stretches: list[list[float]] = [[]]
    for node in way.nodes:
        if not node.location.valid():
            stretches.append([])
            continue
        position = (node.location.lon, node.location.lat)
        if tuple(stretches[-1][-2:]) != position:
            stretches[-1].extend(position)
    lines = [_LINE_WKB.pack(1, 2, len(s) // 2) + pack(f"<{len(s)}d", *s) for s in stretches if len(s) >= 4]
    if not lines:
        return None
    return (lines[0] if len(lines) == 1 else _LINE_WKB.pack(1, 5, len(lines)) + b"".join(lines)).hex().upper()


def _area(multipolygon: str) -> str:
    """A multipolygon of one polygon is that polygon: byte order, type and count (9 bytes) go."""
    return multipolygon[18:] if multipolygon[10:18] == "01000000" else multipolygon


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
