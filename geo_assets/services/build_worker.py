"""What happens to a tile inside a worker process: read features, encode, apply the rules, put the object.

Nothing here changes the ledger: the process that took the tile commits it. So a worker that dies leaves at most an
object that nobody names, which garbage collection takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from geo_assets.ports import tile_object
from geo_assets.services import engines
from geo_assets.services.outages import OUTAGES
from geo_assets.services.recipe import current_recipe
from geo_assets.settings import Settings
from geo_assets.stack import Stack
from geo_assets.tiles import workkey
from geo_assets.tiles.encode import EncodedTile, TileFeatures
from geo_assets.tiles.rules import rules_before_publishing
from geo_assets.tiles.tile import Tile
from geo_assets.tiles.zooms import tile_boxes
from resources.feature_store.protocol import TileBox, TileFeatureRows
from resources.ledger.protocol import object_name

if TYPE_CHECKING:
    from geo_assets.tiles.layers import LayerSet


@dataclass(frozen=True, slots=True)
class BuildTask:
    """A tile to build, with what the ledger said of it when it was taken."""

    key: str
    revision: int
    work_key: str | None
    content_hash: str | None
    empty: bool
    vertices: int


@dataclass(frozen=True, slots=True)
class Built:
    """What a worker made of a tile. `faults` and `error` mean that it must not be published."""

    key: str
    work_key: str
    content_hash: str | None
    """sha256 hex of the uncompressed bytes; None for an empty tile."""
    bytes: int
    changed: bool
    """The bytes differ from the ledger's, or its object is gone: one was put (or none is due, for an empty tile)."""
    features: int
    vertices: int
    data_time_ms: int
    ms: float
    left_out: tuple[tuple[str, str, str], ...] = ()
    """(source, feature id, reason) of features that could not be encoded here."""
    error: str | None = None


Step = Callable[[str, str], None]


def no_step(name: str, key: str) -> None:
    """What is told of each step where nobody listens."""


_stack: Stack | None = None


def start(settings: Settings, scoped: bool) -> None:
    """Open this process's own ports, with the caller's reach; called once in each worker."""
    global _stack
    _stack = Stack(settings, scoped=scoped)


def boxes_of(keys: Sequence[str], layers: LayerSet) -> list[TileBox]:
    """The questions for the feature store: each tile's buffered box in degrees."""
    boxes = tile_boxes(keys, layers.buffer_fraction)
    return [TileBox(key, int(key.partition(":")[0]), *map(float, box)) for key, box in zip(keys, boxes, strict=True)]


def build(tasks: Sequence[BuildTask]) -> list[Built]:
    """Build tiles in this process, in one batch; where the batch raises, one by one, so a fault costs its own tile."""
    assert _stack is not None, "start() was not called"
    return build_in(_stack, tasks)


def build_unless_away(tasks: Sequence[BuildTask]) -> list[Built]:
    """The same for callers that wait when a port is away: that fault is raised, and no tile is charged with it."""
    assert _stack is not None, "start() was not called"
    return build_in(_stack, tasks, passing=OUTAGES)


def build_in(
    stack: Stack, tasks: Sequence[BuildTask], step: Step = no_step, *, passing: tuple[type[Exception], ...] = ()
) -> list[Built]:
    """The same with the caller's ports.

    Args:
        stack: The ports.
        tasks: Tiles to build.
        step: Told the name of each step before it is taken.
        passing: Faults that are no tile's: they are raised, and nothing is charged.
    """
    try:
        return _build_together(stack, tasks, step)
    except passing:
        raise
    except Exception as fault:
        if len(tasks) == 1:
            return [_failed(tasks[0], f"{type(fault).__name__}: {fault}")]
    return [result for task in tasks for result in build_in(stack, [task], step, passing=passing)]


def _failed(task: BuildTask, error: str) -> Built:
    return Built(task.key, task.work_key or "", None, 0, False, 0, task.vertices, 0, 0.0, error=error[:2_000])


def _build_together(stack: Stack, tasks: Sequence[BuildTask], step: Step) -> list[Built]:
    started = time.perf_counter()
    for task in tasks:
        step("read features", task.key)
    rows = stack.features.features(boxes_of([task.key for task in tasks], stack.layers))
    digests = workkey.source_digests(len(tasks), rows.pair_tile, rows.digest[rows.pair_row])
    tiles = [Tile.from_key(task.key) for task in tasks]
    encoded = engines.encode(stack, _columns(rows, tiles))
    share_ms = (time.perf_counter() - started) * 1000 / len(tasks)
    weights = _weights(rows, len(tasks))
    return [
        _finish(stack, task, tile, digest, one, share_ms, *weight, step)
        for task, tile, digest, one, weight in zip(tasks, tiles, digests, encoded, weights, strict=True)
    ]


def _columns(rows: TileFeatureRows, tiles: list[Tile]) -> TileFeatures:
    return TileFeatures(
        source=rows.source,
        feature_id=rows.feature_id,
        layer=rows.layer,
        geometry=rows.geometry,
        properties=rows.properties,
        tiles=tiles,
        pair_tile=rows.pair_tile,
        pair_row=rows.pair_row,
    )


def _weights(rows: TileFeatureRows, count: int) -> list[tuple[int, int]]:
    """Vertices and newest event time of each tile."""
    import numpy as np

    vertices = np.bincount(rows.pair_tile, weights=rows.vertex_count[rows.pair_row], minlength=count)
    newest = np.zeros(count, dtype=np.int64)
    np.maximum.at(newest, rows.pair_tile, rows.event_time_ms[rows.pair_row])
    return [(int(v), int(t)) for v, t in zip(vertices, newest, strict=True)]


def _finish(
    stack: Stack,
    task: BuildTask,
    tile: Tile,
    digest: str,
    encoded: EncodedTile,
    share_ms: float,
    vertices: int,
    data_time_ms: int,
    step: Step,
) -> Built:
    started = time.perf_counter()
    faults = rules_before_publishing(tile, encoded, stack.layers)
    if faults:
        return _failed(task, "; ".join(str(fault) for fault in faults[:5]))
    content_hash = workkey.tile_hash(encoded.data) if encoded.data else None
    # An integrity fault leaves no hash and the tile not empty: whatever is built then is a change.
    changed = task.empty != (content_hash is None) or task.content_hash != content_hash
    if not changed and content_hash is not None:
        # One question a tile that was encoded anyway: of one whose object is gone, the same bytes are a new revision,
        # so that clients who were told 503 hear of it.
        changed = not stack.tiles.exists(tile_object(object_name(task.key, task.revision, content_hash)))
    work_key = workkey.work_key(tile, digest, current_recipe(stack.layers, engines.version(stack)))
    if changed and content_hash is not None:
        step("put", task.key)
        name = object_name(task.key, task.revision + 1, content_hash)
        # What made the object is written on it, for who finds it in the bucket without the ledger.
        made = {"work-key": work_key, "content-hash": content_hash, "image-digest": stack.settings.image_digest}
        stack.tiles.put(tile_object(name), workkey.compress(encoded.data), metadata=made)
    return Built(
        key=task.key,
        work_key=work_key,
        content_hash=content_hash,
        bytes=len(encoded.data),
        changed=changed,
        features=encoded.features,
        vertices=vertices,
        data_time_ms=data_time_ms,
        ms=share_ms + (time.perf_counter() - started) * 1000,
        left_out=tuple((x.source, x.feature_id, x.reason) for x in encoded.left_out),
    )
