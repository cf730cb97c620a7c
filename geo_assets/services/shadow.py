"""Shadow diff: build a sample or a region by another recipe beside the map, and tell which tiles differ and how.

What is built lies below `shadow/<id>/` in the tile store: no ledger names it, nothing serves or announces it, and it
can be removed at any time.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geo_assets import configuration
from geo_assets.links import map_url
from geo_assets.ports import SHADOW_FOLDER
from geo_assets.services import engines
from geo_assets.services.recipe import current_recipe
from geo_assets.services.shadow_build import CHUNK_TILES, Other, ShadowError, TilePair, pairs, plain_layers
from geo_assets.services.shadow_picture import Picture, page, svg
from geo_assets.services.shadow_worker import hello
from geo_assets.services.tileset.snapshot import Region
from geo_assets.stack import Stack
from geo_assets.tiles.difference import TileDifference, difference
from geo_assets.tiles.workkey import compress, tile_hash

if TYPE_CHECKING:
    from resources.tile_store.protocol import TileStore

SAMPLE = 500
"""Tiles of a sample where no region is named: some seconds, and a change that shows anywhere mostly shows in it."""

FEW = 100
"""Tiles that are built in this process: another interpreter takes a second and a half to start."""

CHANGES_SHOWN = 20
"""Features of a tile that are named in the report; their numbers by layer are complete."""

WORST = 6
"""Tiles in the picture."""

PUTS_AT_ONCE = 16
KEPT_MS = 7 * 86_400_000
"""Shadows are removed after a week by whoever makes the next one."""

PAGE = 1_000


@dataclass(frozen=True, slots=True)
class TileReport:
    """A tile that differs."""

    tile: str
    key: str
    map: str
    before_hash: str | None
    after_hash: str | None
    before_bytes: int
    after_bytes: int
    published: bool
    """`before` is what is published; else what is published is out of date, and it was built now."""
    layers: dict[str, dict[str, int]]
    """Layer -> added, removed, changed features."""
    changes: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]

    @property
    def weight(self) -> tuple[int, int]:
        """How much differs: features, then bytes."""
        features = sum(sum(kinds.values()) for kinds in self.layers.values())
        return features, abs(self.after_bytes - self.before_bytes)


@dataclass(slots=True)
class Report:
    """What a shadow diff found."""

    id: str
    region: str
    before: dict[str, Any]
    after: dict[str, Any]
    tiles: int = 0
    out_of_date: int = 0
    """Tiles whose published version is not of these features and this recipe; compared with one built now."""
    before_bytes: int = 0
    after_bytes: int = 0
    differing: list[TileReport] = field(default_factory=list[TileReport])
    features: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    """Layer -> added, removed, changed, over all tiles; a feature in two tiles counts twice."""
    left_out: list[str] = field(default_factory=list[str])
    """Tile and feature that the other recipe could not encode."""
    faults: list[str] = field(default_factory=list[str])
    """Rules that its tiles break: they would not be published."""
    seconds: float = 0.0
    worst: list[tuple[TileReport, TileDifference]] = field(default_factory=list[tuple[TileReport, TileDifference]])
    prefix: str | None = None
    """Where its tiles are; None where they were not kept."""

    @property
    def differs(self) -> bool:
        """Whether anything does."""
        return bool(self.differing)

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        names = ("id", "region", "before", "after", "tiles", "out_of_date", "before_bytes", "after_bytes", "features")
        return {
            **{name: getattr(self, name) for name in names},
            "differing": [asdict(one) for one in self.differing],
            "left_out": self.left_out[:1_000],
            "faults": self.faults[:1_000],
            "seconds": round(self.seconds, 2),
            "prefix": self.prefix,
        }

    def summary(self) -> str:
        """One line."""
        total: Counter[str] = Counter()
        for kinds in self.features.values():
            total.update(kinds)
        return (
            f"{len(self.differing):,} of {self.tiles:,} tiles differ: {total['added']:,} features added, "
            f"{total['removed']:,} removed, {total['changed']:,} changed; {self.before_bytes:,} bytes became "
            f"{self.after_bytes:,}"
        )


def sample_of(stack: Stack, region: Region, size: int | None) -> list[str]:
    """The tiles to compare: all of a region, or so many of it, spread evenly and the same each time.

    Raises:
        ShadowError: There are none.
    """
    if region.keys is None:
        found: Iterator[str] = (state.key for state in stack.ledger.scan(zooms=region.zooms))
        size = SAMPLE if size is None else size
    else:
        found = iter(region.keys)
    # By a hash of the key: no zoom and no corner of the region is preferred, and memory is the sample's.
    chosen = list(found) if size is None else heapq.nsmallest(size, found, key=_spread)
    if not chosen:
        raise ShadowError(f"{region.title}: no tile to compare")
    return chosen


def _spread(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def shadow(
    stack: Stack,
    region: Region,
    *,
    sample: int | None = None,
    layers_file: Path | None = None,
    engine: str | None = None,
    python: Path | None = None,
    worst: int = WORST,
    keep: bool = True,
    store: TileStore | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Build tiles by another recipe or with other libraries, and compare them with the map's.

    Args:
        stack: The ports.
        region: Which tiles.
        sample: At most so many of them; default: all of a region, `SAMPLE` of the whole map.
        layers_file: YAML with other layers.
        engine: Another engine: `numpy` or `st_asmvt`.
        python: Interpreter with other libraries, such as that of another virtual environment.
        worst: Tiles in the picture.
        keep: Leave what was built in the tile store.
        store: Where to; the stack's own unless given.
        progress: Told how many tiles are done, of how many.

    Raises:
        ShadowError: The other side cannot build.
        ConfigurationError: The layers file or the engine cannot be used.
    """
    started = time.monotonic()
    keys = sample_of(stack, region, sample)
    target = store or stack.tiles
    layers = stack.layers if layers_file is None else configuration.load_layers(_with(stack, layers_file=layers_file))
    own_engine = engines.version(stack)
    settings = _with(stack, layers_file=layers_file, engine=engine)
    in_database = settings.engine != "numpy"
    if in_database and python is not None:
        raise ShadowError("the engine st_asmvt draws in the database: it cannot be had in another interpreter")
    in_process = in_database or (python is None and len(keys) <= FEW)
    workers = 1 if in_process else min(stack.settings.build_workers, len(keys) // CHUNK_TILES + 1)
    other_stack = Stack(settings) if in_process else None
    others: list[Other] = []
    try:
        for _ in range(workers):
            others.append(Other(layers, python=python or Path(sys.executable), stack=other_stack))
        said = hello(plain_layers(stack.layers))
        before = {"recipe": current_recipe(stack.layers, own_engine), "libraries": said["libraries"]}
        before["libraries"] |= {"engine": own_engine} if own_engine else {}
        report = Report(uuid.uuid4().hex[:10], region.title, before, others[0].says)
        report.prefix = f"{SHADOW_FOLDER}{report.id}/" if keep else None
        with ThreadPoolExecutor(PUTS_AT_ONCE, thread_name_prefix="shadow-put") as pool:
            puts: list[Any] = []
            for pair in pairs(stack, others, keys):
                _count(report, pair, stack.settings.tiles_url, worst)
                if keep and pair.after:
                    name = f"{report.prefix}{pair.tile.path}.mvt.gz"
                    puts.append(pool.submit(target.put, name, compress(pair.after)))
                progress(report.tiles, len(keys))
            for put in puts:
                put.result()
    finally:
        for other in others:
            other.close()
        if other_stack is not None:
            other_stack.close()
    report.differing.sort(key=lambda one: (-one.weight[0], -one.weight[1], one.key))
    report.worst.sort(key=lambda one: (-one[0].weight[0], -one[0].weight[1], one[0].key))
    report.left_out.sort()
    report.faults.sort()
    report.seconds = time.monotonic() - started
    if keep:
        target.put(f"{report.prefix}report.json", json.dumps(report.plain(), ensure_ascii=False, indent=1).encode())
        target.put(f"{report.prefix}report.html", html_of(report).encode())
        remove_old(target, now_ms=time.time_ns() // 1_000_000)
    return report


def _with(stack: Stack, *, layers_file: Path | None = None, engine: str | None = None) -> Any:
    changes: dict[str, Any] = {}
    if layers_file is not None:
        changes["layers_file"] = layers_file
    if engine is not None:
        if engine not in ("numpy", "st_asmvt"):
            raise ShadowError(f"engine {engine[:40]!r} is neither numpy nor st_asmvt")
        changes["engine"] = engine
    return stack.settings.model_copy(update=changes)


def _count(report: Report, pair: TilePair, tiles_url: str, worst: int) -> None:
    report.tiles += 1
    report.out_of_date += not pair.published
    report.before_bytes += len(pair.before)
    report.after_bytes += len(pair.after)
    report.left_out += [f"{pair.tile.path} {one}" for one in pair.left_out]
    report.faults += [f"{pair.tile.path} {one}" for one in pair.faults]
    if pair.before == pair.after:
        return
    found = difference(pair.before, pair.after)
    for layer, kinds in found.counts().items():
        total = report.features.setdefault(layer, {"added": 0, "removed": 0, "changed": 0})
        for kind, count in kinds.items():
            total[kind] += count
    one = TileReport(
        tile=pair.tile.path,
        key=pair.tile.key,
        map=map_url(tiles_url, pair.tile),
        before_hash=tile_hash(pair.before) if pair.before else None,
        after_hash=tile_hash(pair.after) if pair.after else None,
        before_bytes=len(pair.before),
        after_bytes=len(pair.after),
        published=pair.published,
        layers=found.counts(),
        changes=tuple(
            {"layer": change.layer, "id": _browser_safe(change.id), "kind": change.kind, "what": list(change.what)}
            for change in found.changes[:CHANGES_SHOWN]
        ),
        notes=found.notes,
    )
    report.differing.append(one)
    report.worst.append((one, found))
    if len(report.worst) > 4 * worst + 4:
        report.worst.sort(key=lambda each: each[0].weight, reverse=True)
        del report.worst[worst:]


def _browser_safe(number: int | str) -> int | str:
    """Integers above 2^53 as text: JSON readers in browsers would round them."""
    return str(number) if isinstance(number, int) and number > 2**53 else number


# -- pictures ---------------------------------------------------------------------------------------------------------
def pictures_of(report: Report, most: int = WORST) -> list[Picture]:
    """The worst tiles, worst first."""
    return [
        Picture(
            f"{one.tile}",
            f"{_layers_text(one)}{_what_text(found)}{one.before_bytes:,} → {one.after_bytes:,} bytes"
            + (f"; {'; '.join(one.notes)}" if one.notes else ""),
            found,
        )
        for one, found in report.worst[:most]
    ]


def _layers_text(one: TileReport) -> str:
    parts = [
        f"{layer}: " + ", ".join(f"{count:,} {kind}" for kind, count in kinds.items() if count)
        for layer, kinds in one.layers.items()
    ]
    return "; ".join(parts) + ("; " if parts else "")


def _what_text(found: TileDifference) -> str:
    """What changed most often in features that are on both sides."""
    counted = Counter(name for change in found.changes for name in change.what)
    return f"{', '.join(name for name, _ in counted.most_common(5))} changed; " if counted else ""


def html_of(report: Report, most: int = WORST) -> str:
    """The page: what was compared, and the worst tiles."""
    return page(f"Shadow diff {report.id}", facts_of(report), pictures_of(report, most))


def svg_of(report: Report, *, most: int = WORST, limit_bytes: int) -> str | None:
    """The worst tiles as one SVG, as many as fit into so many bytes; None where nothing differs or none fits."""
    for count in range(min(most, len(report.worst)), 0, -1):
        for steps in (2, 1):
            drawn = svg(pictures_of(report, count), steps=steps)
            if len(drawn.encode()) <= limit_bytes:
                return drawn
    return None


def facts_of(report: Report) -> list[tuple[str, str]]:
    """What was compared and found, for people."""
    sides = [
        (name, f"recipe {side['recipe']}; " + ", ".join(f"{key} {value}" for key, value in side["libraries"].items()))
        for name, side in (("before", report.before), ("after", report.after))
    ]
    layers = [
        (f"layer {layer}", ", ".join(f"{count:,} {kind}" for kind, count in kinds.items()))
        for layer, kinds in sorted(report.features.items())
    ]
    return [
        ("region", report.region),
        ("result", report.summary()),
        *layers,
        *sides,
        ("out of date", f"{report.out_of_date:,} tiles, compared with what they would be now"),
        ("left out", f"{len(report.left_out):,} features cannot be encoded by the other recipe"),
        ("faults", "; ".join(report.faults[:5]) or "none"),
        ("colours", "red: gone; green: come; of a feature that moved both; blue: other attributes; grey: the same"),
    ]


# -- removing ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Kept:
    """A shadow in the tile store."""

    id: str
    objects: int
    bytes: int
    newest_ms: int


def kept(store: TileStore) -> list[Kept]:
    """Shadows that are in the tile store."""
    found: dict[str, Kept] = {}
    for one in store.list(SHADOW_FOLDER):
        name = one.name.split("/")[1]
        before = found.get(name, Kept(name, 0, 0, 0))
        newest = max(before.newest_ms, one.modified_ms)
        found[name] = Kept(name, before.objects + 1, before.bytes + one.size, newest)
    return list(found.values())


def remove(store: TileStore, shadow_id: str) -> int:
    """Remove a shadow; objects removed.

    Raises:
        ShadowError: An id that is none.
    """
    if not shadow_id.isalnum() or len(shadow_id) > 40:
        raise ShadowError(f"{shadow_id[:40]!r} is no shadow")
    names = (one.name for one in store.list(f"{SHADOW_FOLDER}{shadow_id}/"))
    removed = 0
    while batch := list(islice(names, PAGE)):
        removed += store.delete(batch)
    return removed


def remove_old(store: TileStore, *, now_ms: int) -> int:
    """Remove shadows older than a week; objects removed."""
    old: Sequence[Kept] = [one for one in kept(store) if one.newest_ms + KEPT_MS < now_ms and one.id.isalnum()]
    return sum(remove(store, one.id) for one in old)
