"""What happens to a tile inside a worker process: read features, encode, apply the rules, put the object.

Nothing here changes the ledger: the process that took the tile commits it. So a worker that dies leaves at most an
object that nobody names, which garbage collection takes.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from geo_assets.ports import tile_object
from geo_assets.services import encoding, engines
from geo_assets.services.encoding import Made, Match, Shown
from geo_assets.services.outages import OUTAGES
from geo_assets.services.recipe import current_recipe
from geo_assets.settings import Settings
from geo_assets.stack import Stack
from geo_assets.tiles import workkey
from geo_assets.tiles.encode.cache import EncodedCache
from geo_assets.tiles.rules import rules_before_publishing
from geo_assets.tiles.tile import Tile
from geo_assets.tiles.zooms import tile_boxes
from resources.feature_store.protocol import TileBox
from resources.ledger.protocol import object_name

if TYPE_CHECKING:
    from geo_assets.tiles.layers import LayerSet

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class BuildTask:
    """A tile to build, with what the ledger said of it when it was taken."""

    key: str
    revision: int
    work_key: str | None
    content_hash: str | None
    empty: bool
    vertices: int
    shown: Shown | None = None
    """What it shows, where that is known already: it is then made of that, if its features are kept."""
    match: Match | None = None
    """What is kept of it, held against that."""
    fresh: bool = False
    """Read and encode everything, whatever is kept."""


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
_cache: EncodedCache | None = None


def start(settings: Settings, scoped: bool, cache_bytes: int = 0) -> None:
    """Open this process's own ports, with the caller's reach; called once in each worker.

    Args:
        settings: Which ports.
        scoped: As for `Stack`.
        cache_bytes: Bytes of encoded features that this process keeps for the next build of their tile.
    """
    global _stack, _cache
    _stack = Stack(settings, scoped=scoped)
    _cache = EncodedCache(cache_bytes) if cache_bytes else None


BOXES_KEPT = 10_000
"""Boxes that are remembered: what is built again and again is asked for again and again, and one box costs as much as
some hundred at once."""
_boxes: dict[tuple[str, float], TileBox] = {}


def boxes_of(keys: Sequence[str], layers: LayerSet) -> list[TileBox]:
    """The questions for the feature store: each tile's buffered box in degrees."""
    buffer = layers.buffer_fraction
    if len(keys) > BOXES_KEPT // 10:
        return _new_boxes(keys, buffer)
    found = {key: _boxes.get((key, buffer)) for key in keys}
    new = [key for key, box in found.items() if box is None]
    if new:
        boxes = dict(zip(new, _new_boxes(new, buffer), strict=True))
        found |= boxes
        if len(_boxes) > BOXES_KEPT:
            _boxes.clear()
        _boxes.update({(key, buffer): box for key, box in boxes.items()})
    return [box for key in keys if (box := found[key]) is not None]


def _new_boxes(keys: Sequence[str], buffer: float) -> list[TileBox]:
    boxes = tile_boxes(keys, buffer)
    return [TileBox(key, int(key.partition(":")[0]), *map(float, box)) for key, box in zip(keys, boxes, strict=True)]


def build(tasks: Sequence[BuildTask]) -> list[Built]:
    """Build tiles in this process, in one batch; where the batch raises, one by one, so a fault costs its own tile."""
    assert _stack is not None, "start() was not called"
    return build_in(_stack, tasks, cache=_cache)


def build_unless_away(tasks: Sequence[BuildTask]) -> list[Built]:
    """The same for callers that wait when a port is away: that fault is raised, and no tile is charged with it."""
    assert _stack is not None, "start() was not called"
    return build_in(_stack, tasks, passing=OUTAGES, cache=_cache)


def build_in(
    stack: Stack,
    tasks: Sequence[BuildTask],
    step: Step = no_step,
    *,
    passing: tuple[type[Exception], ...] = (),
    cache: EncodedCache | None = None,
) -> list[Built]:
    """The same with the caller's ports.

    Args:
        stack: The ports.
        tasks: Tiles to build.
        step: Told the name of each step before it is taken.
        passing: Faults that are no tile's: they are raised, and nothing is charged.
        cache: Encoded features of tiles built before: of those tiles only what changed is read and encoded. Not used
            by engines other than the encoder itself.
    """
    if cache is not None and (stack.settings.engine != "numpy" or not cache.max_bytes):
        cache = None
    try:
        return _build_together(stack, tasks, step, cache)
    except passing:
        raise
    except Exception as fault:
        if len(tasks) == 1 and cache is None:
            return [_failed(tasks[0], f"{type(fault).__name__}: {fault}")]
        if cache is not None:
            # A tile is never lost to what is kept of it: each is tried again as if nothing were.
            log.warning("built again without what was kept", tiles=len(tasks), error=f"{type(fault).__name__}: {fault}")
            for task in tasks:
                cache.discard(current_recipe(stack.layers), task.key)
    return [result for task in tasks for result in build_in(stack, [task], step, passing=passing)]


def _failed(task: BuildTask, error: str) -> Built:
    return Built(task.key, task.work_key or "", None, 0, False, 0, task.vertices, 0, 0.0, error=error[:2_000])


def _build_together(stack: Stack, tasks: Sequence[BuildTask], step: Step, cache: EncodedCache | None) -> list[Built]:
    started = time.perf_counter()
    for task in tasks:
        step("read features", task.key)
    boxes = boxes_of([task.key for task in tasks], stack.layers)
    tiles = [Tile.from_key(task.key) for task in tasks]
    if cache is None:
        made = encoding.anew(stack, boxes, tiles)
    else:
        shown = {number: task.shown for number, task in enumerate(tasks) if task.shown is not None}
        fresh = {number for number, task in enumerate(tasks) if task.fresh}
        matches = {number: task.match for number, task in enumerate(tasks) if task.match is not None}
        made = encoding.again(stack, boxes, tiles, cache, shown=shown, matches=matches, fresh=fresh)
    share_ms = (time.perf_counter() - started) * 1000 / len(tasks)
    done = [_judge(stack, task, tile, one, share_ms) for task, tile, one in zip(tasks, tiles, made, strict=True)]
    puts = [(task, built, one) for task, built, one in zip(tasks, done, made, strict=True) if built.changed]
    puts = [put for put in puts if put[1].content_hash is not None]
    for task, _, _ in puts:
        step("put", task.key)
    if len(puts) == 1:
        _put(stack, *puts[0])
    elif puts:
        # Each waits for a disk or a network: together they take as long as the slowest.
        for future in [_putting().submit(_put, stack, *put) for put in puts]:
            future.result()
    return done


PUTS_AT_ONCE = 8
"""Objects of one process that are put at the same time."""


@functools.cache
def _putting() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(PUTS_AT_ONCE, thread_name_prefix="put")


def _put(stack: Stack, task: BuildTask, built: Built, made: Made) -> None:
    assert built.content_hash is not None
    name = object_name(task.key, task.revision + 1, built.content_hash)
    # What made the object is written on it, for who finds it in the bucket without the ledger.
    about = {
        "work-key": built.work_key,
        "content-hash": built.content_hash,
        "image-digest": stack.settings.image_digest,
    }
    stack.tiles.put(tile_object(name), workkey.compress(made.encoded.data), metadata=about)


def _judge(stack: Stack, task: BuildTask, tile: Tile, made: Made, share_ms: float) -> Built:
    started = time.perf_counter()
    encoded = made.encoded
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
    work_key = workkey.work_key(tile, made.source_digest, current_recipe(stack.layers, engines.version(stack)))
    return Built(
        key=task.key,
        work_key=work_key,
        content_hash=content_hash,
        bytes=len(encoded.data),
        changed=changed,
        features=encoded.features,
        vertices=made.vertices,
        data_time_ms=made.data_time_ms,
        ms=share_ms + (time.perf_counter() - started) * 1000,
        left_out=tuple((x.source, x.feature_id, x.reason) for x in encoded.left_out),
    )
