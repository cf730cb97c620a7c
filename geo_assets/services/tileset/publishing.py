"""Publish a region: pin, read the ledger, claim a version, write and verify its files, and move the pointer.

Until the pointer moves nothing is published, and what a publisher that died left behind is removed by the next one
(`keeping.sweep`) or by housekeeping: its claim says which objects those are.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import platform
import shutil
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata as installed
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import structlog

from geo_assets import __version__
from geo_assets.ports import tile_object
from geo_assets.services import engines, pins
from geo_assets.services.recipe import current_recipe
from geo_assets.services.tileset import keeping, registry
from geo_assets.services.tileset.formats import (
    AT_ONCE,
    FORMATS,
    MbtilesFile,
    PmtilesFile,
    TilesFolder,
    verify_pmtiles,
    verify_same,
)
from geo_assets.services.tileset.registry import File, TilesetError, Version, object_name
from geo_assets.services.tileset.snapshot import Region, Snapshot, judge, take
from geo_assets.tiles.encode import ENCODER_VERSION
from geo_assets.tiles.tile import Box, Tile
from geo_assets.tiles.tileset import Contents, bounds_of, center, check_name, tilejson, vector_layers

if TYPE_CHECKING:
    from geo_assets.stack import Stack
    from resources.tile_store.protocol import TileStore

log = structlog.get_logger()

AHEAD = 64
"""Objects that are fetched before they are written: bounds memory at some MB, and keeps all requests busy."""

DAMAGED_SHOWN = 5

MANIFEST = "manifest.json"
TILEJSON = "tilejson.json"

Progress = Callable[[str, int, int], None]
"""Told what is done (`read`, `write`, `verify pmtiles`, …), how far, and of how much."""


class ObjectsDamaged(TilesetError):
    """Objects that the ledger names are gone or hold other bytes."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to publish and how.

    Args:
        name: Of the tileset.
        region: Which tiles.
        formats: Of `FORMATS`; PMTiles is written in any case.
        floor: Share of the tiles that must be there.
        allow_dirty: Publish tiles that wait for their build as they stand.

    Raises:
        TilesetError: A format that is none, or a floor outside 0..1.
        TilesetNameError: A name that cannot be.
    """

    name: str
    region: Region
    formats: tuple[str, ...] = ("pmtiles",)
    floor: float = 0.995
    allow_dirty: bool = False

    def __post_init__(self) -> None:
        check_name(self.name)
        for one in self.formats:
            if one not in FORMATS:
                raise TilesetError(f"format {one[:40]!r} is none of {', '.join(FORMATS)}")
        if not 0 <= self.floor <= 1:
            raise TilesetError(f"coverage floor {self.floor} is outside 0..1")


@dataclass(frozen=True, slots=True)
class Published:
    """What was published."""

    name: str
    version: Version
    manifest: dict[str, Any]
    in_force: bool
    """Whether the pointer names it: a publication that began later and ended sooner keeps it."""
    swept: int
    """Objects that dead publishers had left and that were removed."""
    seconds: float


@dataclass(slots=True)
class _Content:
    rows: npt.NDArray[Any]
    content_of: npt.NDArray[np.int64]
    first: list[int] = field(default_factory=list[int])
    """Row of each content's first tile."""


def no_progress(what: str, done: int, total: int) -> None:
    """What is told where nobody listens."""


def no_step(name: str) -> None:
    """What is told of each step where nobody listens."""


def publish(
    stack: Stack,
    request: Request,
    *,
    store: TileStore | None = None,
    progress: Progress = no_progress,
    step: Callable[[str], None] = no_step,
    ttl_s: float = pins.PIN_S,
) -> Published:
    """Publish a region of the map as it stands now, however it changes meanwhile.

    Args:
        stack: The ports.
        request: What to publish.
        store: Where to; the stack's own tile store unless given.
        progress: Told how far it is.
        step: Told the name of each step before it is taken; tests crash there.
        ttl_s: How long pin and claim hold without a sign of life.

    Raises:
        BelowFloor, TilesDirty, EmptyRegion: It may not be published.
        ObjectsDamaged: Objects of it are gone or damaged; they are marked and built again.
        Unverified: What was read back is not what was written.
        PinLost, ClaimLost: It was silent for too long.
    """
    started = time.monotonic()
    target = store or stack.tiles
    swept = keeping.sweep(stack, request.name, store=target)
    pin = pins.set_pin(stack.ledger, f"publication of {request.name}: {request.region.title}"[:200], ttl_s=ttl_s)
    try:
        step("snapshot")
        progress("read the ledger", 0, 1)
        snapshot = take(stack, request.region, ahead=not request.allow_dirty)
        progress("read the ledger", 1, 1)
        judge(stack, snapshot, floor=request.floor, allow_dirty=request.allow_dirty)
        step("claim")
        owner = registry.this_process()
        version = registry.claim(stack.ledger, request.name, snapshot.digest, owner=owner, ttl_s=ttl_s)
        publication = _Publication(stack, target, request, snapshot, version, pin, progress, step, ttl_s)
        try:
            record, manifest = publication.write()
            step("publish")
            tileset, in_force = registry.publish(stack.ledger, request.name, record)
        except BaseException:
            # A crash of this process cannot come here: the next publisher sweeps then.
            with contextlib.suppress(Exception):
                keeping.give_up(stack, request.name, version, store=target)
            raise
        finally:
            publication.close()
    finally:
        with contextlib.suppress(Exception):
            pins.drop_pin(stack.ledger, pin)
    log.info("tileset published", name=request.name, version=version, tiles=record.tiles, current=tileset.current)
    return Published(request.name, record, manifest, in_force, swept, time.monotonic() - started)


class _Publication:
    """One version while it is written."""

    def __init__(
        self,
        stack: Stack,
        store: TileStore,
        request: Request,
        snapshot: Snapshot,
        version: str,
        pin: pins.Pin,
        progress: Progress,
        step: Callable[[str], None],
        ttl_s: float,
    ) -> None:
        self._stack, self._store, self._request, self._snapshot = stack, store, request, snapshot
        self._version, self._pin, self._progress, self._step, self._ttl_s = version, pin, progress, step, ttl_s
        self._renewed = time.monotonic()
        self._formats = tuple(one for one in FORMATS if one == "pmtiles" or one in request.formats)
        self._content = _contents_of(snapshot)
        self._folder = keeping.workplace(stack.settings, request.name, version)
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="publish")
        self._open: list[Any] = []

    def close(self) -> None:
        """Release and remove what is local."""
        self._pool.shutdown(cancel_futures=True)
        for one in self._open:
            with contextlib.suppress(Exception):
                one.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _name(self, file: str) -> str:
        return object_name(self._request.name, self._version, file)

    def _alive(self) -> None:
        """Renew pin and claim in time; whoever lost them ends."""
        if time.monotonic() - self._renewed < self._ttl_s / 5:
            return
        self._renewed = time.monotonic()
        pins.renew_pin(self._stack.ledger, self._pin, ttl_s=self._ttl_s)
        registry.renew(self._stack.ledger, self._request.name, self._version, ttl_s=self._ttl_s)

    def write(self) -> tuple[Version, dict[str, Any]]:
        """Write and verify every file, the manifest last."""
        if next(self._store.list(self._name("")), None) is not None:
            raise TilesetError(
                f"{self._name('')} is in the tile store already, and the ledger does not know of it (was it restored "
                "from a backup?): publish again, which takes the next number"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        contents = Contents()
        archive = PmtilesFile(self._folder / "data.pmtiles")
        others: dict[str, Any] = {}
        if "mbtiles" in self._formats:
            others["mbtiles"] = MbtilesFile(self._folder / "tiles.mbtiles")
        if "folder" in self._formats:
            others["folder"] = TilesFolder(self._store, self._name("tiles/"), self._content)
        self._open += [archive, *others.values()]
        self._step("write")
        total = len(self._content.first)
        zooms = _zooms_of(self._content)
        for number, (data, plain) in enumerate(self._fetched()):
            self._alive()
            archive.add(number, data)
            for one in others.values():
                one.add(number, data)
            contents.add(plain, zooms[number])
            self._progress("write", number + 1, total)
        documents = self._documents(contents)
        files = self._send(archive, others, documents)
        self._verify(files, others)
        self._step("manifest")
        manifest = {
            **documents["stamps"],
            "files": {key: {"object": f.object, "bytes": f.bytes, "sha256": f.sha256} for key, f in files.items()},
            "published_at_ms": registry.now_ms(),
        }
        self._store.put(self._name(TILEJSON), _json(documents["tilejson"]))
        self._store.put(self._name(MANIFEST), _json(manifest))
        record = Version(
            version=self._version,
            published_at_ms=manifest["published_at_ms"],
            title=self._request.region.title,
            tiles=len(self._snapshot.rows),
            zooms=documents["zooms"],
            files=files,
            watermark_ms=self._snapshot.watermark_ms,
            commits=self._snapshot.commits,
        )
        return record, manifest

    def _fetched(self) -> Iterator[tuple[bytes, bytes]]:
        """Contents in order: as stored, and unpacked, each compared with the ledger's hash."""
        waiting: deque[tuple[int, Future[tuple[bytes, bytes] | None]]] = deque()
        damaged: list[int] = []
        rows = iter(self._content.first)
        while True:
            while len(waiting) < AHEAD and (row := next(rows, None)) is not None:
                waiting.append((row, self._pool.submit(self._fetch, row)))
            if not waiting:
                break
            row, future = waiting.popleft()
            found = future.result()
            if found is None:
                damaged.append(row)
            if damaged:
                continue  # Nothing is published any more: the rest is looked at, so that all of it is mended at once.
            assert found is not None
            yield found
        if damaged:
            raise self._damaged(damaged)

    def _fetch(self, row: int) -> tuple[bytes, bytes] | None:
        _, z, x, y, revision, content_hash = self._content.rows[row].item()
        data = self._store_of_tiles.get(tile_object(f"{z}/{x}/{y}/{revision}-{content_hash.hex()[:16]}"))
        if data is None:
            return None
        try:
            plain = gzip.decompress(data)
        except (OSError, EOFError, zlib.error):
            return None
        return (data, plain) if hashlib.sha256(plain).digest() == content_hash else None

    @property
    def _store_of_tiles(self) -> TileStore:
        return self._stack.tiles

    def _damaged(self, rows: Sequence[int]) -> ObjectsDamaged:
        """Mark the tiles, as every finder of an integrity fault does, unless they were committed anew meanwhile."""
        facts = {_tile(self._content.rows[row]).key: self._content.rows[row].item() for row in rows}
        states = self._stack.ledger.read(list(facts))
        broken = [
            key
            for key, (*_, revision, content_hash) in facts.items()
            if (states[key].revision, states[key].content_hash) == (revision, content_hash.hex())
        ]
        if broken:
            self._stack.ledger.clear(broken)
        shown = ", ".join(sorted(facts)[:DAMAGED_SHOWN])
        return ObjectsDamaged(
            f"the objects of {len(facts):,} tiles are gone or damaged ({shown}); {len(broken):,} tiles are marked and "
            "built again: publish when geo-assets status shows none waiting"
        )

    def _send(self, archive: PmtilesFile, others: dict[str, Any], documents: dict[str, Any]) -> dict[str, File]:
        self._step("send")
        self._progress("send", 0, len(self._formats))
        files = {
            "pmtiles": archive.send(
                self._store,
                self._name("tiles.pmtiles"),
                self._content,
                metadata=documents["pmtiles"],
                bounds=documents["bounds"],
                center=documents["center"],
                alive=self._alive,
            )
        }
        if "mbtiles" in others:
            files["mbtiles"] = others["mbtiles"].send(
                self._store,
                self._name("tiles.mbtiles"),
                self._content,
                metadata=documents["mbtiles"],
                alive=self._alive,
            )
        if "folder" in others:
            files["folder"] = others["folder"].send(documents["tilejson"])
        self._progress("send", len(self._formats), len(self._formats))
        return files

    def _verify(self, files: dict[str, File], others: dict[str, Any]) -> None:
        self._step("verify")
        total = len(self._content.first)
        verify_pmtiles(
            self._store,
            files["pmtiles"],
            self._content,
            alive=self._alive,
            progress=lambda done: self._progress("verify pmtiles", done, total),
        )
        if "mbtiles" in files:
            self._progress("verify mbtiles", 0, 1)
            verify_same(self._store, files["mbtiles"], alive=self._alive)
            self._progress("verify mbtiles", 1, 1)
        if "folder" in files:
            tiles = len(self._content.rows)
            others["folder"].verify(
                alive=self._alive, progress=lambda done: self._progress("verify folder", done, tiles)
            )

    def _documents(self, contents: Contents) -> dict[str, Any]:
        """Everything that is said of the version."""
        stack, snapshot, request = self._stack, self._snapshot, self._request
        layers = vector_layers(contents, stack.layers)
        spans = snapshot.spans()
        zooms = (min(spans), max(spans))
        bounds = Box(*(round(value, 7) for value in bounds_of(spans, stack.layers)))
        stamps = self._stamps(contents, layers, zooms, bounds)
        title = f"{request.name} {self._version}: {snapshot.region.title}"
        document = tilejson(
            name=request.name,
            version=self._version,
            description=title,
            tiles=f"{stack.settings.tiles_url}/tilesets/{request.name}/{self._version}/{{z}}/{{x}}/{{y}}.mvt",
            attribution=stack.layers.attribution,
            zooms=zooms,
            bounds=bounds,
            layers=layers,
        )
        middle = center(bounds, zooms)
        about = {
            "name": request.name,
            "description": title,
            "attribution": stack.layers.attribution,
            "type": "baselayer",
            "version": str(registry.version_number(self._version)),
        }
        return {
            "stamps": stamps,
            "zooms": zooms,
            "bounds": bounds,
            "center": middle,
            "tilejson": document,
            "pmtiles": {**about, "vector_layers": layers, "geo_assets": stamps},
            "mbtiles": {
                **about,
                "format": "pbf",
                "minzoom": str(zooms[0]),
                "maxzoom": str(zooms[1]),
                "bounds": ",".join(map(str, bounds)),
                "center": ",".join(map(str, middle)),
                "json": json.dumps({"vector_layers": layers}, ensure_ascii=False),
                "geo_assets": json.dumps(stamps, ensure_ascii=False),
            },
        }

    def _stamps(
        self, contents: Contents, layers: Sequence[dict[str, Any]], zooms: tuple[int, int], bounds: Box
    ) -> dict[str, Any]:
        """Where it comes from: recipe, libraries, source, ledger and counts."""
        stack, snapshot, request = self._stack, self._snapshot, self._request
        engine = engines.version(stack)
        by_zoom = {str(z): int((snapshot.rows["z"] == z).sum()) for z in np.unique(snapshot.rows["z"]).tolist()}
        return {
            "tileset": request.name,
            "version": self._version,
            "region": snapshot.region.title,
            "zooms": list(zooms),
            "bounds": list(bounds),
            "digest": snapshot.digest,
            "recipe": current_recipe(stack.layers, engine),
            "libraries": libraries(engine),
            "image_digest": stack.settings.image_digest,
            "source_watermark_ms": snapshot.watermark_ms,
            "newest_event_ms": snapshot.newest_ms,
            "ledger": {"mark": snapshot.mark, "commits": snapshot.commits},
            "coverage": {
                "expected": snapshot.expected,
                "present": snapshot.present,
                "empty": snapshot.empty,
                "missing": len(snapshot.missing),
                "dirty": len(snapshot.dirty),
                "share": round(snapshot.coverage, 6),
                "floor": request.floor,
            },
            "tiles": {"total": len(snapshot.rows), "contents": len(self._content.first), "by_zoom": by_zoom},
            "layers": {
                one["id"]: {"tiles": contents.layers[one["id"]].tiles, "features": contents.layers[one["id"]].features}
                for one in layers
            },
        }


def libraries(engine: str) -> dict[str, str]:
    """Versions of what makes tiles and archives."""
    import pyproj
    import shapely

    return {
        "geo_assets": __version__,
        "encoder": ENCODER_VERSION,
        **({"engine": engine} if engine else {}),
        "geos": ".".join(map(str, shapely.geos_version)),
        "proj": pyproj.proj_version_str,
        **{name: installed.version(name) for name in ("shapely", "pyproj", "numpy", "pyarrow", "pmtiles")},
        "python": platform.python_version(),
    }


def _contents_of(snapshot: Snapshot) -> _Content:
    numbers: dict[bytes, int] = {}
    content_of: list[int] = []
    first: list[int] = []
    for row, content_hash in enumerate(snapshot.rows["hash"].tolist()):
        number = numbers.setdefault(content_hash, len(numbers))
        if number == len(first):
            first.append(row)
        content_of.append(number)
    return _Content(snapshot.rows, np.array(content_of, np.int64), first)


def _zooms_of(content: _Content) -> list[dict[int, int]]:
    """Of each content: zoom -> how many tiles have it."""
    found: list[dict[int, int]] = [{} for _ in content.first]
    for number, zoom in zip(content.content_of.tolist(), content.rows["z"].tolist(), strict=True):
        zooms = found[number]
        zooms[zoom] = zooms.get(zoom, 0) + 1
    return found


def _tile(row: Any) -> Tile:
    return Tile(int(row["z"]), int(row["x"]), int(row["y"]))


def _json(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False, indent=1).encode()
