"""The rules a tile keeps: judged before it is published, and again by audits of what is stored.

Pure functions of what they are given: faults and verdicts come back as plain records, and whoever asked decides what a
fault costs. Rules of what may come in stand with the events.
"""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import shapely

from geo_assets.tiles.decode import DecodedFeature, DecodedLayer, DecodeError, Path, decode, polygons, ring_area
from geo_assets.tiles.layers import LayerSet
from geo_assets.tiles.tile import Tile
from geo_assets.tiles.workkey import tile_hash

if TYPE_CHECKING:
    from geo_assets.tiles.encode import EncodedTile

Scalar = str | int | float

MAX_TILE_BYTES = 5_000_000
"""Largest uncompressed tile that is published. Tilers of the field stop at 500 kB compressed, which is 1 to 2 MB;
this leaves room above. What is larger shows too much at its zoom: its layers say from where on."""

COVERAGE_FLOOR = 0.995
DEAD_LETTER_RATE = 0.01
RETENTION_SHARE = 0.7
"""Share of the log's retention that a lag may reach: beyond, records could be deleted before they are read."""

NULL_ISLAND_DEGREES = 0.01
"""Around 0, 0, about a kilometre: where missing coordinates land, and one weather buoy lies."""
NULL_ISLAND_FEATURES = 3
"""Features there that one tile may have: the buoy and its neighbours on a map of the sea."""

SKIP_RATE_TILES = 50
"""A run of fewer tiles says nothing of the skip rate."""
SKIP_RATE_BEFORE = 0.2
"""Mean skip rate of the runs before, from which a fall to zero is sudden."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is not as it should be: a row of a check's table.

    Args:
        rule: Which rule.
        subject: What breaks it: a tile as `z/x/y`, a manifest, a topic.
        problem: What is wrong, and what to do where that is known.
        value: What was found.
        limit: What would have been right.
    """

    rule: str
    subject: str
    problem: str
    value: Scalar | None = None
    limit: Scalar | None = None

    def __str__(self) -> str:
        numbers = (
            ""
            if self.value is None
            else f" ({self.value}" + (f", limit {self.limit})" if self.limit is not None else ")")
        )
        return f"{self.rule}: {self.subject}: {self.problem}{numbers}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a rule over many things says: a number against its limit, and what stands behind it.

    Args:
        rule: Which rule.
        passed: Whether it holds. Faults alone do not break it: a coverage above its floor has some, too.
        value: The number found.
        limit: What it may be.
        summary: One line for people.
        faults: What stands behind the number.
    """

    rule: str
    passed: bool
    value: float
    limit: float
    summary: str
    faults: tuple[Fault, ...] = ()


# -- before publishing -----------------------------------------------------------------------------------------------


def rules_before_publishing(
    tile: Tile, encoded: EncodedTile, layers: LayerSet, *, max_bytes: int = MAX_TILE_BYTES
) -> list[Fault]:
    """What forbids publishing a tile. Cheap: geometry is judged by its box, the bytes by their outermost frames.

    Args:
        tile: The tile that was asked for.
        encoded: What the encoder made.
        layers: The map's layers and grid.
        max_bytes: Most uncompressed bytes.

    Returns:
        The faults; empty when it may be published.
    """
    faults: list[Fault] = []

    def fault(rule: str, problem: str, value: Scalar | None = None, limit: Scalar | None = None) -> None:
        faults.append(Fault(rule, tile.path, problem, value, limit))

    if encoded.tile != tile:
        fault("tile", "the encoder made another tile", encoded.tile.path, tile.path)
    if bool(encoded.data) != bool(encoded.features) or bool(encoded.data) != (encoded.extent is not None):
        fault("empty", "bytes, features and coordinates do not agree on whether it is empty", len(encoded.data))
    if len(encoded.data) > max_bytes:
        fault(
            "size",
            "too much shows at this zoom: raise min_zoom or min_pixels of its layers",
            len(encoded.data),
            max_bytes,
        )
    low, high = -layers.buffer, layers.extent + layers.buffer
    if encoded.extent is not None and not low <= min(encoded.extent) <= max(encoded.extent) <= high:
        fault("box", "coordinates lie outside of its buffered box", str(encoded.extent), f"{low}..{high}")
    try:
        names = Counter(_layer_names(encoded.data))
    except DecodeError as error:
        fault("format", str(error))
        return faults
    for name, times in names.items():
        if name not in layers:
            fault("layers", "a layer is in it that the map does not have", name, ", ".join(layers.names))
        if times > 1:
            fault("layers", f"layer {name} is in it more than once", times, 1)
    return faults


def _layer_names(data: bytes) -> Iterator[str]:
    """The names of a tile's layers, read without reading the layers."""
    at = 0
    while at < len(data):
        at, end = _frame(data, at, 3, len(data))
        found = None
        while at < end and found is None:
            tag = data[at]
            if tag & 7 == 0:  # a number: on to its last byte
                at += 1
                while at < end and data[at] & 0x80:
                    at += 1
                at += 1
            else:
                inner, inner_end = _frame(data, at, tag >> 3, end)
                if tag >> 3 == 1:
                    found = data[inner:inner_end]
                at = inner_end
        if found is None:
            raise DecodeError("tile: a layer has no name")
        yield found.decode("utf-8", "replace")
        at = end


def _frame(data: bytes, at: int, field: int, limit: int) -> tuple[int, int]:
    """Begin and end of the message or text of `field` that starts at `at`."""
    tag, length, shift, start = data[at], 0, 0, at
    at += 1
    while at < limit and shift < 35:
        byte = data[at]
        at += 1
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80 and tag == (field << 3 | 2) and at + length <= limit:
            return at, at + length
        if byte < 0x80:
            break
    raise DecodeError(f"tile: field {field} at byte {start} is cut off or of another kind")


# -- audits of one stored tile ---------------------------------------------------------------------------------------


def topology_faults(tile: Tile, data: bytes, *, decoder: Callable[[bytes], list[DecodedLayer]] = decode) -> list[Fault]:
    """What is wrong with the shapes in a stored tile (Mapbox Vector Tile 2.1, section 4.3.4).

    Args:
        tile: The tile.
        data: Its uncompressed bytes.
        decoder: Reads them.

    Returns:
        One fault a layer and problem, with how many features have it and the first of them.
    """
    try:
        layers = decoder(data)
    except DecodeError as error:
        return [Fault("topology", tile.path, f"it cannot be read: {error}")]
    faults: list[Fault] = []
    for layer in layers:
        problems: dict[str, list[str]] = {}
        shapes: list[shapely.Geometry] = []
        numbers: list[int] = []
        for number, feature in enumerate(layer.features):
            problem = _path_problem(feature)
            if problem is not None:
                problems.setdefault(problem, []).append(_called(feature, number))
            elif feature.geometry_type == "Polygon":
                shapes.append(shapely.MultiPolygon([(rings[0], rings[1:]) for rings in polygons(feature)]))
                numbers.append(number)
        valid: npt.NDArray[np.bool_] = shapely.is_valid(np.array(shapes, dtype=object))
        for index in map(int, np.flatnonzero(~valid)):
            reason: str = shapely.is_valid_reason(shapes[index]).split("[")[0].strip().lower()
            name = _called(layer.features[numbers[index]], numbers[index])
            problems.setdefault(f"polygons are invalid: {reason}", []).append(name)
        faults += [
            Fault("topology", tile.path, f"layer {layer.name}: {problem}; first {names[0]}", len(names), 0)
            for problem, names in problems.items()
        ]
    return faults


def _called(feature: DecodedFeature, number: int) -> str:
    return f"feature {number}" if feature.id is None else f"id {feature.id}"


def _path_problem(feature: DecodedFeature) -> str | None:
    """What is wrong with the points, lines or rings of a feature, each by itself."""
    if not feature.paths:
        return "features have no geometry"
    if feature.geometry_type == "Unknown":
        return "features have no geometry type"
    if feature.geometry_type == "LineString" and any(len(set(path)) < 2 for path in feature.paths):
        return "lines have fewer than 2 distinct points"
    if feature.geometry_type == "Polygon":
        if any(len(set(path)) < 3 or path[0] != path[-1] for path in feature.paths):
            return "rings have fewer than 3 distinct points or are not closed"
        if any(ring_area(path) == 0 for path in feature.paths):
            return "rings have no area"
        if ring_area(feature.paths[0]) < 0:
            return "the first ring is an interior one"
    return None


def crs_faults(
    tile: Tile,
    data: bytes,
    layers: LayerSet,
    *,
    decoder: Callable[[bytes], list[DecodedLayer]] = decode,
    null_island_features: int = NULL_ISLAND_FEATURES,
) -> list[Fault]:
    """Signs in a stored tile that coordinates were taken for what they are not.

    Args:
        tile: The tile.
        data: Its uncompressed bytes.
        layers: The map's layers and grid.
        decoder: Reads them.
        null_island_features: Features that may lie around 0, 0.

    Returns:
        A fault for a layer on another grid, one for coordinates outside of the tile's buffered box, and one for a
        cluster of features around 0, 0.
    """
    try:
        decoded = decoder(data)
    except DecodeError as error:
        return [Fault("crs", tile.path, f"it cannot be read: {error}")]
    faults: list[Fault] = []
    low, high = -layers.buffer, layers.extent + layers.buffer
    side = 1 << tile.z
    origin = ((side / 2 - tile.x) * layers.extent, (side / 2 - tile.y) * layers.extent)
    holds_origin = low <= min(origin) <= max(origin) <= high
    radius = max(1.0, NULL_ISLAND_DEGREES / 360 * side * layers.extent)
    for layer in decoded:
        if layer.extent != layers.extent:
            faults.append(
                Fault("crs", tile.path, f"layer {layer.name} is on another grid", layer.extent, layers.extent)
            )
            continue
        outside = clustered = 0
        for feature in layer.features:
            points = _points(feature.paths)
            if points.size and (points.min() < low or points.max() > high):
                outside += 1
            if holds_origin and points.size and bool((np.abs(points - origin) <= radius).all()):
                clustered += 1
        if outside:
            problem = f"layer {layer.name}: features lie outside of the tile's buffered box"
            faults.append(Fault("crs", tile.path, problem, outside, 0))
        if clustered > null_island_features:
            problem = f"layer {layer.name}: features lie around 0, 0, as missing coordinates do"
            faults.append(Fault("crs", tile.path, problem, clustered, null_island_features))
    return faults


def _points(paths: tuple[Path, ...]) -> npt.NDArray[np.int64]:
    return np.array([point for path in paths for point in path], dtype=np.int64).reshape(-1, 2)


def probe_faults(problem: str | None) -> list[Fault]:
    """The fault of a coordinate probe that failed.

    Args:
        problem: What the probe said; None when PROJ answered as it should.
    """
    return [] if problem is None else [Fault("crs", "PROJ", problem)]


def integrity(tile: Tile, expected: str | None, stored: bytes | None) -> list[Fault]:
    """Whether the store holds what the ledger says.

    Args:
        tile: The tile.
        expected: The ledger's content hash; None for a tile without an object, of which nothing is expected.
        stored: The object as the store has it, compressed with gzip; None when it is not there.

    Returns:
        No fault, or the one that it has.
    """
    if expected is None:
        return []
    if stored is None:
        return [Fault("integrity", tile.path, "its object is not in the store", "missing", expected)]
    try:
        found = tile_hash(gzip.decompress(stored))
    except (OSError, EOFError, zlib.error) as error:
        return [Fault("integrity", tile.path, f"its object is damaged: {error}", "unreadable", expected)]
    if found != expected:
        return [Fault("integrity", tile.path, "its object is another than the ledger names", found, expected)]
    return []


# -- audits over many things -----------------------------------------------------------------------------------------


def coverage(
    present: Collection[str], manifest: Collection[str], floor: float = COVERAGE_FLOOR, *, subject: str = "manifest"
) -> Verdict:
    """How much of a manifest is there.

    Args:
        present: Partition keys that are answered, whether with an object or as empty; others are ignored.
        manifest: Partition keys that should be.
        floor: Share of them that must be, 0 to 1.
        subject: Whose manifest it is.

    Returns:
        The share, with one fault a missing tile. An empty manifest never passes (rule 7).
    """
    wanted = set(manifest)
    if not wanted:
        nothing = Fault("coverage", subject, "the manifest is empty", 0, 1)
        return Verdict("coverage", False, 0.0, floor, f"{subject}: the manifest is empty", (nothing,))
    missing = sorted(wanted.difference(present))
    there = len(wanted) - len(missing)
    share = there / len(wanted)
    return Verdict(
        "coverage",
        share >= floor,
        share,
        floor,
        f"{subject}: {there:,} of {len(wanted):,} tiles are there ({share:.2%}, floor {floor:.2%})",
        tuple(Fault("coverage", Tile.from_key(key).path, "not built") for key in missing),
    )


def rate(part: int, whole: int, limit: float = DEAD_LETTER_RATE, *, subject: str = "dead letters") -> Verdict:
    """A share that should stay low: dead letters among all records.

    Args:
        part: How many of them are bad.
        whole: How many there are, the bad ones included.
        limit: Share that is still borne, 0 to 1.
        subject: Of what.

    Returns:
        The share; bad ones of nothing at all are all of it.
    """
    share = min(1.0, part / whole) if whole > 0 else float(part > 0)
    passed = share <= limit
    summary = f"{subject}: {part:,} of {whole:,} ({share:.2%}, limit {limit:.2%})"
    faults = () if passed else (Fault("rate", subject, f"{part:,} of {whole:,}", round(share, 6), limit),)
    return Verdict("rate", passed, share, limit, summary, faults)


def freshness(
    oldest_ms: int,
    watermark_ms: int,
    retention_ms: int,
    *,
    share: float = RETENTION_SHARE,
    limit_ms: int | None = None,
    subject: str = "tiles",
) -> Verdict:
    """How far what is shown lags behind what is known.

    Args:
        oldest_ms: Since when the oldest thing waits, milliseconds since the epoch, UTC; 0 when nothing waits.
        watermark_ms: The newest that is known, or now, on the same clock.
        retention_ms: How long the log keeps records.
        share: Share of the retention that the lag may reach.
        limit_ms: A tighter limit in milliseconds, where there is one.
        subject: What lags.

    Returns:
        The lag in milliseconds.
    """
    lag = max(0, watermark_ms - oldest_ms) if oldest_ms else 0
    limit = retention_ms * share if limit_ms is None else min(limit_ms, retention_ms * share)
    passed = lag <= limit
    summary = f"{subject}: {lag / 1000:,.1f} s behind (limit {limit / 1000:,.1f} s)"
    problem = "it lags, and beyond the retention records are lost" if lag > retention_ms * share else "it lags"
    faults = () if passed else (Fault("freshness", subject, problem, lag, limit),)
    return Verdict("freshness", passed, float(lag), float(limit), summary, faults)


def skip_rate(runs: Sequence[tuple[int, int]], *, subject: str = "tiles") -> Verdict:
    """Whether the skip rate fell to zero at once: then the work key moves without a reason, and all is built anew.

    Args:
        runs: Skipped and targeted tiles of each run, oldest first; the last one is judged. Runs of fewer than 50 tiles
            say nothing and are left out.
        subject: Of what.

    Returns:
        The last run's skip rate; the limit is 0 exclusive when the runs before skipped a fifth or more.
    """
    rates = [skipped / targeted for skipped, targeted in runs if targeted >= SKIP_RATE_TILES]
    if len(rates) < 2 or (runs and runs[-1][1] < SKIP_RATE_TILES):
        return Verdict("skip_rate", True, rates[-1] if rates else 0.0, 0.0, f"{subject}: too few runs to compare")
    before, last = rates[-6:-1], rates[-1]
    mean = sum(before) / len(before)
    passed = not (last == 0 and mean >= SKIP_RATE_BEFORE)
    summary = f"{subject}: skip rate {last:.2%}, {mean:.2%} over the {len(before)} runs before"
    problem = "the skip rate fell to zero: did the recipe or the order of something change?"
    faults = () if passed else (Fault("skip_rate", subject, problem, last, round(mean, 4)),)
    return Verdict("skip_rate", passed, last, 0.0, summary, faults)
