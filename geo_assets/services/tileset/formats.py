"""The files of a version: PMTiles 3, MBTiles 1.3 and a plain folder. Each is written from contents as they come.

Contents come once each, gzip as the tile store has them, in the order of PMTiles' tile ids; which tiles have which
content is known before. Files grow on disk and go to the store in pieces: memory does not grow with their size.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
from pmtiles.tile import Compression, Entry, TileType
from pmtiles.writer import finalize_header

from geo_assets.services.tileset.reading import Archive, ArchiveError
from geo_assets.services.tileset.registry import File, TilesetError

if TYPE_CHECKING:
    from geo_assets.tiles.tile import Box
    from resources.tile_store.protocol import TileStore

FORMATS = ("pmtiles", "mbtiles", "folder")
"""PMTiles is always written: it is what the tile server serves."""

PIECE_BYTES = 8_000_000
"""Read or sent at once."""

AT_ONCE = 16
"""Requests under way: 16 at a time an object store answers 2,000 a second, one at a time some 200."""

APPLICATION_ID = 0x4D504258
"""`MPBX`, by which `file` and others know an MBTiles (MBTiles 1.3, section "Database")."""


class Unverified(TilesetError):
    """What was read back is not what was written."""


class Content(Protocol):
    """Who has which content."""

    rows: npt.NDArray[Any]
    """Tiles, of `snapshot.ROW`, by id."""
    content_of: npt.NDArray[np.int64]
    """Index of each row's content; contents are numbered as they first come in the order of rows."""


class PmtilesFile:
    """A clustered PMTiles archive: contents in the order of tile ids, each once.

    Args:
        path: Its content is collected here; header and directories come to it on the way to the store.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "wb")  # noqa: SIM115
        self._offsets: list[int] = []
        self._lengths: list[int] = []
        self._end = 0

    def add(self, number: int, data: bytes) -> None:
        """Take the next content."""
        assert number == len(self._offsets)
        self._file.write(data)
        self._offsets.append(self._end)
        self._lengths.append(len(data))
        self._end += len(data)

    def close(self) -> None:
        """Release the file."""
        self._file.close()

    def send(
        self,
        store: TileStore,
        name: str,
        content: Content,
        *,
        metadata: Mapping[str, Any],
        bounds: Box,
        center: tuple[float, float, int],
        alive: Callable[[], None],
    ) -> File:
        """Put the archive under its name; its size and sha256."""
        self._file.flush()
        entries = self._entries(content)
        degrees = dict(
            zip(("min_lon_e7", "min_lat_e7", "max_lon_e7", "max_lat_e7"), (_e7(v) for v in bounds), strict=True)
        )
        header = {
            "tile_compression": Compression.GZIP,
            "tile_type": TileType.MVT,
            **degrees,
            "center_zoom": center[2],
            "center_lon_e7": _e7(center[0]),
            "center_lat_e7": _e7(center[1]),
        }
        first = finalize_header(header, len(content.rows), entries, len(self._offsets), metadata, True, self._end)
        return send_pieces(store, name, _chain(first, self._path), alive=alive)

    def _entries(self, content: Content) -> list[Entry]:
        entries: list[Entry] = []
        last: Entry | None = None
        for tile_id, number in zip(content.rows["id"].tolist(), content.content_of.tolist(), strict=True):
            offset = self._offsets[number]
            if last is not None and tile_id == last.tile_id + last.run_length and offset == last.offset:
                last.run_length += 1
                continue
            last = Entry(tile_id, offset, self._lengths[number], 1)
            entries.append(last)
        return entries


def _e7(degrees: float) -> int:
    return round(degrees * 10_000_000)


def _chain(first: Sequence[bytes], path: Path) -> Iterator[bytes]:
    yield b"".join(first)
    yield from pieces_of(path)


def pieces_of(path: Path) -> Iterator[bytes]:
    """A file, piece by piece."""
    with open(path, "rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def send_pieces(store: TileStore, name: str, pieces: Iterator[bytes], *, alive: Callable[[], None]) -> File:
    """Put an object from pieces; its size and sha256."""
    state, size = hashlib.sha256(), 0

    def watched() -> Iterator[bytes]:
        nonlocal size
        for piece in pieces:
            alive()
            state.update(piece)
            size += len(piece)
            yield piece

    store.put_stream(name, watched())
    return File(name, size, state.hexdigest())


def verify_pmtiles(
    store: TileStore, file: File, content: Content, *, alive: Callable[[], None], progress: Callable[[int], None]
) -> None:
    """Read an archive back, tile by tile, and compare it with the ledger's hashes.

    Raises:
        Unverified: A tile is missing, is too many, or has another hash.
    """
    try:
        archive = Archive(store, file.object)
        ids: list[int] = []
        offsets: list[int] = []
        lengths: dict[int, int] = {}
        for entry in archive.entries():
            ids.extend(range(entry.tile_id, entry.tile_id + entry.run_length))
            offsets.extend([entry.offset] * entry.run_length)
            lengths[entry.offset] = entry.length
        found, wanted = np.array(ids, np.uint64), content.rows["id"]
        if not np.array_equal(found, wanted):
            both = np.setxor1d(found, wanted)
            raise Unverified(f"{file.object}: {len(both):,} tiles are missing or too many, or out of order")
        hashes: dict[int, bytes] = {}
        for offset, data in _contents(archive, sorted(lengths.items()), alive):
            hashes[offset] = hashlib.sha256(_unzipped(data, file.object)).digest()
            progress(len(hashes))
    except ArchiveError as error:
        raise Unverified(str(error)) from None
    read_back = np.array([hashes[offset] for offset in offsets], "V32")
    wrong = np.flatnonzero(read_back != content.rows["hash"])
    if len(wrong):
        raise Unverified(
            f"{file.object}: {len(wrong):,} tiles are not those of the ledger, first {_path(content, wrong)}"
        )


def _contents(
    archive: Archive, places: Sequence[tuple[int, int]], alive: Callable[[], None]
) -> Iterator[tuple[int, bytes]]:
    """Contents in the order of the archive, read in large pieces."""
    base = archive.header["tile_data_offset"]
    start = 0
    while start < len(places):
        end = start
        first = places[start][0]
        while end < len(places) and places[end][0] + places[end][1] - first <= max(PIECE_BYTES, places[start][1]):
            end += 1
        length = places[end - 1][0] + places[end - 1][1] - first
        alive()
        piece = archive.piece(base + first, length)
        for offset, size in places[start:end]:
            yield offset, piece[offset - first : offset - first + size]
        start = end


def _unzipped(data: bytes, name: str) -> bytes:
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise Unverified(f"{name}: a tile cannot be unpacked: {error}") from None


def _path(content: Content, wrong: npt.NDArray[np.int64]) -> str:
    row = content.rows[int(wrong[0])]
    return f"{row['z']}/{row['x']}/{row['y']}"


class MbtilesFile:
    """An MBTiles: contents once each, and a view `tiles` over them as MBTiles 1.3 allows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db = sqlite3.connect(path, isolation_level=None)
        # A file nobody else reads yet: what a crash leaves of it is thrown away.
        self._db.executescript(
            f"""PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA application_id = {APPLICATION_ID};
            CREATE TABLE metadata (name TEXT NOT NULL, value TEXT);
            CREATE UNIQUE INDEX metadata_name ON metadata (name);
            CREATE TABLE images (tile_id INTEGER PRIMARY KEY, tile_data BLOB NOT NULL);
            CREATE TABLE map (zoom_level INTEGER NOT NULL, tile_column INTEGER NOT NULL, tile_row INTEGER NOT NULL,
                              tile_id INTEGER NOT NULL, PRIMARY KEY (zoom_level, tile_column, tile_row)) WITHOUT ROWID;
            CREATE VIEW tiles AS
                SELECT zoom_level, tile_column, tile_row, tile_data FROM map JOIN images USING (tile_id);
            BEGIN"""
        )

    def add(self, number: int, data: bytes) -> None:
        """Take the next content."""
        self._db.execute("INSERT INTO images VALUES (?, ?)", (number, data))

    def close(self) -> None:
        """Release the file."""
        self._db.close()

    def send(
        self,
        store: TileStore,
        name: str,
        content: Content,
        *,
        metadata: Mapping[str, str],
        alive: Callable[[], None],
    ) -> File:
        """Put the file under its name; its size and sha256.

        Args:
            store: Where to.
            name: Of the object.
            content: Which tile has which content.
            metadata: Rows of the table `metadata`.
            alive: Called between pieces.

        Raises:
            Unverified: What it holds, read through its own view, is not what the ledger says.
        """
        rows, number = content.rows, content.content_of
        z, x, y = (rows[part].astype(np.int64) for part in ("z", "x", "y"))
        south = (np.int64(1) << z) - 1 - y  # MBTiles counts rows from the south (TMS).
        self._db.executemany(
            "INSERT INTO map VALUES (?, ?, ?, ?)",
            zip(z.tolist(), x.tolist(), south.tolist(), number.tolist(), strict=True),
        )
        self._db.executemany("INSERT INTO metadata VALUES (?, ?)", metadata.items())
        self._db.execute("COMMIT")
        self._verify(name, content, alive)
        self._db.close()
        return send_pieces(store, name, pieces_of(self._path), alive=alive)

    def _verify(self, name: str, content: Content, alive: Callable[[], None]) -> None:
        seen: dict[int, bytes] = {}
        for number, data in self._db.execute("SELECT tile_id, tile_data FROM images"):
            seen[number] = hashlib.sha256(_unzipped(data, name)).digest()
            if number % 1_000 == 0:
                alive()
        hashes = np.array([seen.get(number, b"") for number in content.content_of.tolist()], "V32")
        (count,) = self._db.execute("SELECT count(*) FROM tiles").fetchone()
        wrong = np.flatnonzero(hashes != content.rows["hash"])
        if count != len(content.rows) or len(wrong):
            raise Unverified(
                f"{name}: it holds {count:,} tiles, {len(wrong):,} of them wrong, not {len(content.rows):,}"
            )


def verify_same(store: TileStore, file: File, *, alive: Callable[[], None]) -> None:
    """Read a file back and compare it with what was sent.

    Raises:
        Unverified: It is another.
    """
    state, start = hashlib.sha256(), 0
    while start < file.bytes:
        alive()
        piece = store.get_range(file.object, start, PIECE_BYTES)
        if not piece:
            raise Unverified(f"{file.object} ends at byte {start} of {file.bytes}")
        state.update(piece)
        start += len(piece)
    if state.hexdigest() != file.sha256:
        raise Unverified(f"{file.object} is not what was sent")


class TilesFolder:
    """A plain folder `z/x/y.mvt` of gzip tiles, with a TileJSON, for any static server that sets Content-Encoding.

    Args:
        store: Where to.
        name: Prefix of the objects, with a slash at the end.
        content: Which tile has which content.
    """

    def __init__(self, store: TileStore, name: str, content: Content) -> None:
        self._store, self._name, self._content = store, name, content
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="tileset")
        self._bytes = 0
        order = np.argsort(content.content_of, kind="stable")
        self._rows_of = np.split(order, np.flatnonzero(np.diff(content.content_of[order])) + 1)

    def add(self, number: int, data: bytes) -> None:
        """Take the next content: every tile that has it is an object of its own."""
        names = [self._object(int(row)) for row in self._rows_of[number]]
        list(self._pool.map(lambda name: self._store.put(name, data), names))
        self._bytes += len(data) * len(names)

    def _object(self, row: int) -> str:
        _, z, x, y, *_ = self._content.rows[row].item()
        return f"{self._name}{z}/{x}/{y}.mvt"

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def send(self, tilejson: Mapping[str, Any]) -> File:
        """Put the TileJSON beside the tiles; the folder's size."""
        document = json.dumps(tilejson, ensure_ascii=False).encode()
        self._store.put(f"{self._name}tiles.json", document)
        rows = self._content.rows
        state = hashlib.sha256(rows["id"].tobytes() + rows["hash"].tobytes())
        return File(self._name, self._bytes + len(document), state.hexdigest())

    def verify(self, *, alive: Callable[[], None], progress: Callable[[int], None]) -> None:
        """Read every tile back and compare it with the ledger's hash.

        Raises:
            Unverified: One is missing or has another.
        """

        def look(row: int) -> bool:
            data = self._store.get(self._object(row))
            return data is not None and hashlib.sha256(_unzipped(data, self._name)).digest() == wanted[row]

        wanted: list[bytes] = [bytes(one) for one in self._content.rows["hash"].tolist()]
        for start in range(0, len(wanted), 1_000):
            alive()
            numbers = range(start, min(start + 1_000, len(wanted)))
            wrong = [row for row, right in zip(numbers, self._pool.map(look, numbers), strict=True) if not right]
            if wrong:
                raise Unverified(f"{self._object(wrong[0])} is missing or is not the ledger's tile")
            progress(numbers[-1] + 1)
