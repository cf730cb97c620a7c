"""Reading a PMTiles archive where it lies, a range at a time: what the tile server does, and who verifies."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from pmtiles.tile import (
    Entry,
    deserialize_directory,
    deserialize_header,
    find_tile,
    zxy_to_tileid,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resources.tile_store.protocol import TileStore

HEADER_BYTES = 127
FIRST_BYTES = 16_384
"""Header and root directory fit into these (PMTiles 3, section 2): one request opens an archive."""

DIRECTORIES_KEPT = 64
"""Leaf directories of 4,096 tiles each in memory: half a MB each as Python has them."""


class ArchiveError(Exception):
    """An archive that is gone or no PMTiles."""


class Archive:
    """A PMTiles archive in the tile store. Safe for many threads.

    Args:
        store: Where it is.
        name: Of the object.

    Raises:
        ArchiveError: It is not there, or no PMTiles of version 3.
    """

    def __init__(self, store: TileStore, name: str) -> None:
        self._store, self.name = store, name
        self._kept: OrderedDict[int, list[Entry]] = OrderedDict()
        self._lock = threading.Lock()
        first = store.get_range(name, 0, FIRST_BYTES)
        if first is None:
            raise ArchiveError(f"{name} is not in the tile store")
        try:
            self.header: dict[str, Any] = dict(deserialize_header(first[:HEADER_BYTES]))
            start, length = self.header["root_offset"], self.header["root_length"]
            self._root = deserialize_directory(first[start : start + length])
        except Exception as error:
            raise ArchiveError(f"{name} is no PMTiles archive: {type(error).__name__} {error}") from None

    def get(self, z: int, x: int, y: int) -> bytes | None:
        """A tile's bytes as they are stored (gzip), or None where the archive has none.

        Raises:
            ArchiveError: The archive is gone or damaged.
        """
        tile_id = zxy_to_tileid(z, x, y)
        entries = self._root
        for _ in range(4):  # Directories are at most three deep (PMTiles 3, section 4).
            entry = find_tile(entries, tile_id)
            if entry is None:
                return None
            if entry.run_length:
                return self.piece(self.header["tile_data_offset"] + entry.offset, entry.length)
            entries = self._leaf(entry)
        return None

    def entries(self) -> Iterator[Entry]:
        """Every entry with tiles, in order."""
        return self._below(self._root)

    def _below(self, entries: list[Entry]) -> Iterator[Entry]:
        for entry in entries:
            if entry.run_length:
                yield entry
            else:
                yield from self._below(self._leaf(entry))

    def metadata(self) -> bytes:
        """The metadata as stored (gzip JSON)."""
        return self.piece(self.header["metadata_offset"], self.header["metadata_length"])

    def _leaf(self, entry: Entry) -> list[Entry]:
        with self._lock:
            found = self._kept.get(entry.offset)
            if found is not None:
                self._kept.move_to_end(entry.offset)
                return found
        data = self.piece(self.header["leaf_directory_offset"] + entry.offset, entry.length)
        try:
            leaf = deserialize_directory(data)
        except Exception as error:
            raise ArchiveError(f"a directory of {self.name} is damaged: {error}") from None
        with self._lock:
            self._kept[entry.offset] = leaf
            while len(self._kept) > DIRECTORIES_KEPT:
                self._kept.popitem(last=False)
        return leaf

    def piece(self, start: int, length: int) -> bytes:
        """Bytes of the archive.

        Raises:
            ArchiveError: There are not so many.
        """
        data = self._store.get_range(self.name, start, length)
        if data is None:
            raise ArchiveError(f"{self.name} is not in the tile store any more")
        if len(data) != length:
            raise ArchiveError(f"{self.name} ends at byte {start + len(data)}, before {start + length}")
        return data
