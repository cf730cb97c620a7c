"""What a shadow diff builds: each tile as it stands and as another recipe makes it, from one reading of the features.

Nothing of the map changes: no ledger row, no object of a tile, no announcement.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import shapely

import geo_assets
from geo_assets.ports import tile_object
from geo_assets.services import build_worker, engines
from geo_assets.services.recipe import current_recipe
from geo_assets.services.shadow_worker import encode, hello, read_message, write_message
from geo_assets.tiles import workkey
from geo_assets.tiles.encode import TileFeatures
from geo_assets.tiles.layers import Layer
from geo_assets.tiles.rules import rules_before_publishing
from geo_assets.tiles.tile import Box, Tile
from geo_assets.tiles.zooms import NOWHERE, tile_boxes, visible, zoom_limits
from resources.feature_store.protocol import TileBox, TileFeatureRows

if TYPE_CHECKING:
    from geo_assets.stack import Stack
    from geo_assets.tiles.layers import LayerSet

CHUNK_TILES = 64
"""Tiles of one reading of the features: both workers get some even of a small sample."""


class ShadowError(Exception):
    """A shadow that cannot be built; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class TilePair:
    """A tile as it stands and as the other recipe makes it. b"" is an empty tile."""

    tile: Tile
    before: bytes
    after: bytes
    published: bool
    """`before` is what is published; else it was built now, because what is published is out of date."""
    left_out: tuple[str, ...]
    """Features that the other recipe could not encode, and why."""
    faults: tuple[str, ...]
    """Rules that the other recipe's tile breaks: it would not be published."""


class Other:
    """The other side: encodes batches. One of these for each worker.

    Args:
        layers: The layers to build with.
        python: Interpreter to build in, with its own libraries.
        stack: Builds in this process instead, with that stack's settings: for an engine that needs a store, and for so
            few tiles that another process would take longer to start.
    """

    def __init__(self, layers: LayerSet, *, python: Path, stack: Stack | None = None) -> None:
        self.layers, self._stack = layers, stack
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        if stack is not None:
            engine = engines.version(stack)
            said = hello(plain_layers(layers))
            self.says = {"recipe": current_recipe(layers, engine), "libraries": said["libraries"]}
            self.says["libraries"] |= {"engine": engine} if engine else {}
            return
        self._process = _start(python, self._errors)
        self.says = self._ask({"layers": plain_layers(layers)})

    def encode(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        """Encode a batch, as `shadow_worker.encode` takes and gives it."""
        if self._stack is not None:
            return _encode_here(self._stack, self.layers, batch)
        return self._ask(batch)["tiles"]

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write_message(process.stdin, message)
            answer = read_message(process.stdout)
        except BrokenPipeError:
            # It ended before it had read the message: the same as before its answer.
            raise ShadowError(f"the other interpreter ended: {self._said()}") from None
        except (OSError, ValueError) as fault:
            raise ShadowError(f"the other interpreter broke off: {fault}; {self._said()}") from None
        if answer is None:
            raise ShadowError(f"the other interpreter ended: {self._said()}")
        if "error" in answer:
            raise ShadowError(f"the other interpreter cannot build: {answer['error']}")
        return answer

    def _said(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process is not None:
                self._process.wait(timeout=2)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it said nothing"

    def close(self) -> None:
        """End the other interpreter."""
        if self._process is not None:
            for stream in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):
                    if stream is not None:
                        stream.close()
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._errors.close()


def _start(python: Path, errors: Any) -> subprocess.Popen[bytes]:
    """The worker in another interpreter: its own geo_assets where it has one, else this source with its libraries."""
    environment = dict(os.environ)
    module = "geo_assets.services.shadow_worker"
    try:
        own = python == Path(sys.executable)
        if own or not _imports(python, module):
            here = str(Path(geo_assets.__file__).parents[1])
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (here, environment.get("PYTHONPATH"))))
        return subprocess.Popen(
            [python, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=tempfile.gettempdir(),
            env=environment,
        )
    except OSError as fault:
        raise ShadowError(f"python {python}: {fault.strerror or fault}") from None
    except subprocess.TimeoutExpired as fault:
        raise ShadowError(f"python {python}: {fault}") from None


def _imports(python: Path, module: str) -> bool:
    found = subprocess.run(
        [python, "-c", f"import {module}"], cwd=tempfile.gettempdir(), capture_output=True, timeout=120
    )
    return found.returncode == 0


def _encode_here(stack: Stack, layers: LayerSet, batch: dict[str, Any]) -> list[dict[str, Any]]:
    if stack.settings.engine == "numpy":
        return encode(batch, plain_layers(layers))
    tiles = [Tile(*place) for place in batch["tiles"]]
    features = TileFeatures(
        source=batch["source"],
        feature_id=batch["feature_id"],
        layer=batch["layer"],
        geometry=batch["geometry"],
        properties=batch["properties"],
        tiles=tiles,
        pair_tile=np.frombuffer(batch["pair_tile"], np.int64),
        pair_row=np.frombuffer(batch["pair_row"], np.int64),
    )
    return [
        {
            "data": one.data,
            "features": one.features,
            "left_out": [f"{left.source} {left.feature_id}: {left.reason}" for left in one.left_out],
            "faults": [str(fault) for fault in rules_before_publishing(tile, one, layers)],
        }
        for tile, one in zip(tiles, engines.encode(stack, features), strict=True)
    ]


def plain_layers(layers: LayerSet) -> dict[str, Any]:
    """Layers as plain values, without what is as by default: an older geo_assets must not stumble over it."""
    plain: list[dict[str, Any]] = []
    for layer in layers.layers:
        one: dict[str, Any] = {}
        for field in fields(Layer):
            value = getattr(layer, field.name)
            if field.default is MISSING or value != field.default:
                one[field.name] = list(value) if isinstance(value, tuple) else value
        plain.append(one)
    return {
        "layers": plain,
        "buffer": layers.buffer,
        "extent": layers.extent,
        "max_zoom": layers.max_zoom,
        "attribution": layers.attribution,
    }


def pairs(stack: Stack, others: Sequence[Other], keys: Sequence[str]) -> Iterator[TilePair]:
    """Build every tile on both sides.

    Features are read once a batch, in one snapshot for both sides unless buffer or zooms differ; a tile that is
    published from just these features is not built again.

    Args:
        stack: The ports.
        others: The other side, one a worker: so many batches are under way.
        keys: Partition keys.
    """
    ordered = sorted(keys, key=lambda key: key.partition(":")[2])
    chunks = [ordered[start : start + CHUNK_TILES] for start in range(0, len(ordered), CHUNK_TILES)]
    waiting: Queue[tuple[_Before, dict[str, Any]] | None] = Queue(len(others) + 1)
    done: Queue[list[TilePair] | BaseException | None] = Queue(len(others) + 1)
    stopped = threading.Event()

    def put(queue: Queue[Any], item: Any) -> None:
        while not stopped.is_set():
            with contextlib.suppress(Exception):
                queue.put(item, timeout=0.2)
                return

    def read() -> None:
        try:
            for chunk in chunks:
                put(waiting, _read(stack, others[0].layers, chunk))
                if stopped.is_set():
                    return
        except BaseException as fault:
            put(done, fault)
        for _ in others:
            put(waiting, None)

    def work(other: Other) -> None:
        try:
            while not stopped.is_set() and (item := waiting.get()) is not None:
                before, batch = item
                put(done, before.with_after(other.encode(batch)))
        except BaseException as fault:
            put(done, fault)
        put(done, None)

    threads = [threading.Thread(target=read, daemon=True, name="shadow-read")]
    threads += [threading.Thread(target=work, args=(other,), daemon=True, name="shadow-work") for other in others]
    for thread in threads:
        thread.start()
    try:
        left = len(others)
        while left:
            item = done.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield from item
    finally:
        stopped.set()
        with contextlib.suppress(Exception):
            for _ in others:
                waiting.put_nowait(None)


@dataclass(frozen=True, slots=True)
class _Before:
    tiles: list[Tile]
    data: list[bytes]
    published: list[bool]

    def with_after(self, encoded: list[dict[str, Any]]) -> list[TilePair]:
        return [
            TilePair(tile, before, one["data"], published, tuple(one["left_out"]), tuple(one["faults"]))
            for tile, before, published, one in zip(self.tiles, self.data, self.published, encoded, strict=True)
        ]


def _read(stack: Stack, layers: LayerSet, keys: list[str]) -> tuple[_Before, dict[str, Any]]:
    """A batch's tiles as they stand, and its features for the other side."""
    states = stack.ledger.read(keys)
    rows = stack.features.features(build_worker.boxes_of(keys, stack.layers))
    digests = workkey.source_digests(len(keys), rows.pair_tile, rows.digest[rows.pair_row])
    recipe = current_recipe(stack.layers, engines.version(stack))
    tiles = [Tile.from_key(key) for key in keys]
    data: list[bytes | None] = []
    for key, digest in zip(keys, digests, strict=True):
        state = states[key]
        current = state.work_key == workkey.work_key(key, digest, recipe)
        if current and state.empty:
            data.append(b"")
        elif current and state.object_name is not None:
            data.append(_stored(stack, state.object_name, state.content_hash))
        else:
            data.append(None)
    stale = [index for index, one in enumerate(data) if one is None]
    if stale:
        _build(stack, rows, tiles, stale, data)
    shown = [states[key].content_hash for key in keys]
    published = [(workkey.tile_hash(one) if one else None) == there for one, there in zip(data, shown, strict=True)]
    if _shows_alike(stack.layers, layers):
        if layers.buffer_fraction != stack.layers.buffer_fraction:
            rows = stack.features.features(build_worker.boxes_of(keys, layers))
        pair_tile, pair_row = rows.pair_tile, rows.pair_row
    else:
        rows, pair_tile, pair_row = _shown_by(stack, layers, keys, tiles)
    batch = {
        "tiles": [(tile.z, tile.x, tile.y) for tile in tiles],
        "source": list(rows.source),
        "feature_id": list(rows.feature_id),
        "layer": list(rows.layer),
        "geometry": [bytes(one) for one in rows.geometry],
        "properties": list(rows.properties),
        "pair_tile": pair_tile.astype(np.int64).tobytes(),
        "pair_row": pair_row.astype(np.int64).tobytes(),
    }
    return _Before(tiles, [one or b"" for one in data], published), batch


def _stored(stack: Stack, name: str, content_hash: str | None) -> bytes | None:
    stored = stack.tiles.get(tile_object(name))
    if stored is None:
        return None
    with contextlib.suppress(OSError, EOFError, zlib.error):
        plain = gzip.decompress(stored)
        if workkey.tile_hash(plain) == content_hash:
            return plain
    return None


def _build(stack: Stack, rows: TileFeatureRows, tiles: list[Tile], wanted: list[int], data: list[bytes | None]) -> None:
    """Build what is not published from these features, as this process would."""
    place = np.full(len(tiles), -1, np.int64)
    place[wanted] = np.arange(len(wanted))
    chosen = place[rows.pair_tile] >= 0
    features = TileFeatures(
        source=rows.source,
        feature_id=rows.feature_id,
        layer=rows.layer,
        geometry=rows.geometry,
        properties=rows.properties,
        tiles=[tiles[index] for index in wanted],
        pair_tile=place[rows.pair_tile[chosen]],
        pair_row=rows.pair_row[chosen],
    )
    for index, one in zip(wanted, engines.encode(stack, features), strict=True):
        data[index] = one.data


def _shows_alike(one: LayerSet, other: LayerSet) -> bool:
    """Whether every feature shows at the same zooms with both."""

    def zooms(layers: LayerSet) -> set[tuple[Any, ...]]:
        return {(layer.name, layer.min_zoom, layer.max_zoom, layer.min_pixels) for layer in layers.layers}

    return one.max_zoom == other.max_zoom and zooms(one) == zooms(other)


def _shown_by(
    stack: Stack, layers: LayerSet, keys: list[str], tiles: list[Tile]
) -> tuple[TileFeatureRows, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """What shows by other layers, although the store filters by the zooms that it has of these.

    Everything that shows at all shows at the last zoom of its layer: so the store is asked for each tile at those
    zooms too, and what comes is judged by the other layers.
    """
    here = stack.layers
    last = {min(layer.max_zoom, here.max_zoom) for layer in here.layers}
    boxes: list[TileBox] = []
    of_tile: list[int] = []
    for index, (key, box) in enumerate(zip(keys, tile_boxes(keys, layers.buffer_fraction), strict=True)):
        for zoom in sorted({tiles[index].z, *last}):
            boxes.append(TileBox(key, zoom, *map(float, box)))
            of_tile.append(index)
    rows = stack.features.features(boxes)
    found = np.unique(np.column_stack([np.array(of_tile, np.int64)[rows.pair_tile], rows.pair_row]), axis=0)
    limits = np.array([_limits(layers, *one) for one in zip(rows.layer, rows.geometry, strict=True)], np.int64)
    zooms = np.array([tile.z for tile in tiles], np.int64)
    if not len(found):
        return rows, np.zeros(0, np.int64), np.zeros(0, np.int64)
    first, final, zoom = limits[found[:, 1], 0], limits[found[:, 1], 1], zooms[found[:, 0]]
    shown = np.array([visible(*one) for one in zip(first.tolist(), final.tolist(), zoom.tolist(), strict=True)])
    return rows, found[shown, 0], found[shown, 1]


def _limits(layers: LayerSet, name: str, geometry: bytes) -> tuple[int, int]:
    if name not in layers:
        return NOWHERE
    shape = shapely.from_wkb(geometry)
    west, south, east, north = shapely.bounds(shape).tolist()
    if west == -180.0 and east == 180.0:
        # Split at the date line: as large as it was before.
        parts = [shapely.bounds(part).tolist() for part in shapely.get_parts(shape)]
        sides = [(w + 360, e + 360) if e <= 0 else (w, e) for w, _, e, _ in parts]
        west, east = min(w for w, _ in sides), max(e for _, e in sides)
    return zoom_limits(layers[name], layers, Box(west, south, east, north), int(shapely.get_dimensions(shape)))
