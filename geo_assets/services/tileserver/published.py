"""Published tilesets over HTTP: TileJSON, tiles out of the archive, and the archive itself with ranges.

What a version holds never changes and may be kept for good; which version is in force is asked of the ledger again
after a second, and told to caches for half a minute.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from geo_assets.services import problems
from geo_assets.services.tileserver.http import IMMUTABLE, accepts_gzip, conditional, etag_matches
from geo_assets.services.tileserver.serving import ObjectCache
from geo_assets.services.tileset import registry
from geo_assets.services.tileset.reading import Archive, ArchiveError
from geo_assets.services.tileset.registry import Tileset, UnknownTileset, Version, object_name
from geo_assets.tiles.tile import Tile, TileError
from geo_assets.tiles.tileset import TilesetNameError

if TYPE_CHECKING:
    from geo_assets.settings import Settings
    from resources.ledger.protocol import Ledger
    from resources.tile_store.protocol import TileStore

MVT: Final = "application/vnd.mapbox-vector-tile"
FILES: Final = {"pmtiles": "application/vnd.pmtiles", "mbtiles": "application/vnd.sqlite3"}

POINTER: Final = "public, max-age=30"
"""How long a cache may answer by itself which version is in force: a roll-back reaches every map within that time."""

POINTER_KEPT_S: Final = 1.0
"""How long this process does: the ledger is asked once a second and tileset, however many tiles are asked for."""

POINTERS_KEPT: Final = 1_000
ARCHIVES_KEPT: Final = 32
"""Open archives: a root directory each, and some leaf directories of those that are read."""

CACHE_BYTES: Final = 32_000_000
PIECE_BYTES: Final = 1_000_000
"""Of an archive that is sent whole: what is in memory of it."""

_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})", re.ASCII)

K = TypeVar("K")
V = TypeVar("V")


class _Recent(OrderedDict[K, V]):
    """A few values, the longest unused out first. The caller holds a lock."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def keep(self, key: K, value: V) -> None:
        self[key] = value
        self.move_to_end(key)
        while len(self) > self._most:
            self.popitem(last=False)


class PublishedTilesets:
    """The handlers. Blocking work is done in threads.

    Args:
        ledger: Which version is in force.
        store: Where the archives are.
        settings: Public URLs.
    """

    def __init__(self, ledger: Ledger, store: TileStore, settings: Settings) -> None:
        self._ledger, self._store, self._settings = ledger, store, settings
        self._lock = threading.Lock()
        self._pointers: _Recent[str, tuple[float, Tileset]] = _Recent(POINTERS_KEPT)
        self._archives: _Recent[str, Archive] = _Recent(ARCHIVES_KEPT)
        self._documents: _Recent[str, bytes] = _Recent(ARCHIVES_KEPT)
        self._tiles = ObjectCache(CACHE_BYTES)

    def handlers(self) -> dict[str, Callable[[Request], Any]]:
        """Path to handler. The pointer's paths have no version in them."""
        handlers: dict[str, Callable[[Request], Any]] = {
            "/tilesets/{name}.json": self.tilejson,
            "/tilesets/{name}/{z}/{x}/{y}.mvt": self.tile,
            "/tilesets/{name}/{version}.json": self.tilejson,
            "/tilesets/{name}/{version}/{z}/{x}/{y}.mvt": self.tile,
        }
        for kind in FILES:
            handlers[f"/tilesets/{{name}}.{kind}"] = handlers[f"/tilesets/{{name}}/{{version}}.{kind}"] = self.file
        return handlers

    # -- handlers ----------------------------------------------------------------------------------------------------
    async def tilejson(self, request: Request) -> Response:
        """TileJSON 3.0. Its tiles are those of the version, so that no map shows two versions at once."""
        version, kept = await self._asked(request)
        name = request.path_params["name"]
        body = await anyio.to_thread.run_sync(self._document, name, version)
        etag = f'W/"{hashlib.sha256(body).hexdigest()[:32]}"'
        return conditional(request, body, "application/json", etag, headers={"Cache-Control": kept})

    async def tile(self, request: Request) -> Response:
        """A tile of a version, or of the one in force; 204 where it has none."""
        tile = _tile_of(request)
        version, kept = await self._asked(request)
        data = await anyio.to_thread.run_sync(self._tile, request.path_params["name"], version, tile)
        headers = {"Cache-Control": kept, "X-Tileset-Version": version.version}
        if data is None:
            return Response(status_code=204, headers=headers)
        headers |= {"ETag": f'W/"{hashlib.sha256(data).hexdigest()[:32]}"', "Vary": "Accept-Encoding"}
        if etag_matches(request.headers.get("if-none-match"), headers["ETag"]):
            return Response(status_code=304, headers=headers)
        if accepts_gzip(request.headers.get("accept-encoding")):
            return Response(data, media_type=MVT, headers={**headers, "Content-Encoding": "gzip"})
        return Response(gzip.decompress(data), media_type=MVT, headers=headers)

    async def file(self, request: Request) -> Response:
        """An archive, whole or a range of it (RFC 9110, section 14): PMTiles readers ask for what they need."""
        version, kept = await self._asked(request)
        kind = request.url.path.rpartition(".")[2]
        file = version.files.get(kind)
        if file is None:
            there = ", ".join(version.files)
            raise problems.ProblemError(
                404, "tileset", f"This version was published as {there}.", field="format", value=kind, limit=there
            )
        headers = {
            "Cache-Control": kept,
            "ETag": f'"{file.sha256}"',
            "Accept-Ranges": "bytes",
            "X-Tileset-Version": version.version,
            "Access-Control-Expose-Headers": "ETag, Accept-Ranges, Content-Range, Content-Length, X-Tileset-Version",
        }
        if etag_matches(request.headers.get("if-none-match"), headers["ETag"]):
            return Response(status_code=304, headers=headers)
        start, length, status = 0, file.bytes, 200
        wanted = request.headers.get("range")
        # A range of another archive than the client has the rest of is worse than the whole.
        same = request.headers.get("if-range") in (None, headers["ETag"])
        if wanted is not None and same and (match := _RANGE.fullmatch(wanted)) and any(match.groups()):
            part = _part(match[1], match[2], file.bytes)
            if part is None:
                unsatisfied = {"Content-Range": f"bytes */{file.bytes}"}
                raise problems.ProblemError(
                    416, "range", "The range begins behind the end of the archive, or is upside down.",
                    field="Range", value=wanted, limit=file.bytes, headers=unsatisfied,
                )  # fmt: skip
            start, length = part
            status = 206
            headers["Content-Range"] = f"bytes {start}-{start + length - 1}/{file.bytes}"
        headers["Content-Length"] = str(length)
        if request.method == "HEAD":
            return Response(status_code=status, media_type=FILES[kind], headers=headers)
        if length <= PIECE_BYTES:
            data = await anyio.to_thread.run_sync(self._piece, file.object, start, length)
            return Response(data, status_code=status, media_type=FILES[kind], headers=headers)
        pieces = self._pieces(file.object, start, length)
        return StreamingResponse(pieces, status_code=status, media_type=FILES[kind], headers=headers)

    # -- what they share ---------------------------------------------------------------------------------------------
    async def _asked(self, request: Request) -> tuple[Version, str]:
        """The version that a request is for, and how long its answer may be kept."""
        name, wanted = request.path_params["name"], request.path_params.get("version")
        try:
            tileset = await anyio.to_thread.run_sync(self._pointer, name)
            if wanted is not None:
                version = tileset.version(wanted)
                if version.version != wanted:
                    raise UnknownTileset(f"tileset {name} has no version {wanted[:40]}; {version.version} is meant?")
                return version, IMMUTABLE
        except (UnknownTileset, TilesetNameError) as fault:
            said = str(fault)
            raise problems.ProblemError(
                404, "tileset", f"{said[0].upper()}{said[1:]}.", field="version" if wanted else "name",
                value=wanted or name,
            ) from None  # fmt: skip
        if tileset.in_force is None:
            raise problems.ProblemError(404, "tileset", "No version of it was published yet.", field="name", value=name)
        return tileset.in_force, POINTER

    def _pointer(self, name: str) -> Tileset:
        now = time.monotonic()
        with self._lock:
            kept = self._pointers.get(name)
        if kept is not None and now < kept[0]:
            return kept[1]
        tileset = registry.read(self._ledger, name)
        with self._lock:
            self._pointers.keep(name, (now + POINTER_KEPT_S, tileset))
        return tileset

    def _document(self, name: str, version: Version) -> bytes:
        stored = object_name(name, version.version, "tilejson.json")
        with self._lock:
            body = self._documents.get(stored)
        if body is None:
            data = self._store.get(stored)
            if data is None:
                raise _gone(stored)
            document: dict[str, Any] = json.loads(data)
            # The address is this server's, whoever published.
            base = f"{self._settings.tiles_url}/tilesets/{name}/{version.version}"
            document["tiles"] = [base + "/{z}/{x}/{y}.mvt"]
            body = json.dumps(document, ensure_ascii=False).encode()
            with self._lock:
                self._documents.keep(stored, body)
        return body

    def _tile(self, name: str, version: Version, tile: Tile) -> bytes | None:
        stored = version.files["pmtiles"].object
        key = f"{stored}/{tile.path}"
        data = self._tiles.get(key)
        if data is not None:
            return data
        try:
            with self._lock:
                archive = self._archives.get(stored)
            if archive is None:
                archive = Archive(self._store, stored)
                with self._lock:
                    self._archives.keep(stored, archive)
            data = archive.get(tile.z, tile.x, tile.y)
        except ArchiveError as error:
            raise _gone(str(error)) from None
        if data is not None:
            self._tiles.put(key, data)
        return data

    def _piece(self, stored: str, start: int, length: int) -> bytes:
        data = self._store.get_range(stored, start, length)
        if data is None or len(data) != length:
            raise _gone(stored)
        return data

    async def _pieces(self, stored: str, start: int, length: int) -> AsyncIterator[bytes]:
        end = start + length
        while start < end:
            size = min(PIECE_BYTES, end - start)
            yield await anyio.to_thread.run_sync(self._piece, stored, start, size)
            start += size


def _part(first: str, last: str, size: int) -> tuple[int, int] | None:
    """Start and length of a range of an object, or None where it has no byte of it (RFC 9110, section 14.1.2)."""
    if not first:
        length = min(int(last), size)
        return (size - length, length) if length else None
    start, end = int(first), min(int(last), size - 1) if last else size - 1
    return (start, end - start + 1) if start <= end else None


def _tile_of(request: Request) -> Tile:
    numbers = [request.path_params[part] for part in "zxy"]
    for part, text in zip("zxy", numbers, strict=True):
        if not _NUMBER.fullmatch(text):
            raise problems.ProblemError(404, "tile", f"{part} is not a whole number.", field=part, value=text)
    try:
        return Tile(*map(int, numbers))
    except TileError as error:
        raise problems.ProblemError(404, "tile", f"There is no such tile: {error}.") from None


def _gone(what: str) -> problems.ProblemError:
    return problems.ProblemError(
        503, "tileset", f"The archive of this version cannot be read: {what}.", headers={"Retry-After": "10"}
    )
