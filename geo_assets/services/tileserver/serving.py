"""From a tile to its bytes: what the ledger names, out of the store, checked, through a small cache.

Objects are immutable and their names never used again, so a cached one is never stale; the ledger is asked each time.
"""

from __future__ import annotations

import gzip
import hashlib
import threading
import time
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from geo_assets.ports import tile_object
from geo_assets.services.tileserver.http import etag_matches
from resources.ledger.protocol import LedgerError

if TYPE_CHECKING:
    from geo_assets.services.tileserver.metrics import Metrics
    from geo_assets.tiles.tile import Tile
    from resources.ledger.protocol import Ledger, TileState
    from resources.tile_store.protocol import TileStore

READS = 3
"""How often the ledger is read when an object is gone. Garbage is collected after a grace of minutes, so a second read
nearly always names the newer object; a third covers a tile that is committed at that very moment."""

CLEAR_AGAIN_S = 60.0
"""A tile is cleared once in this time. Cleared, it has no hash and no new fault until it is built; a server that looks
into the wrong bucket must not have its builder at work without end."""

CLEARED_KEPT = 10_000
"""Tiles whose last clearing is remembered."""


class IntegrityFault(Exception):
    """The object of a tile's current revision is missing, or its bytes are not those that were committed."""


@dataclass(frozen=True, slots=True)
class Served:
    """A tile as it is served: its state, and its bytes (None when there are none, or the client has them)."""

    state: TileState
    data: bytes | None


class ObjectCache:
    """Objects by name, least recently used out first. Bounded by bytes; an object larger than the bound is not kept."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._bytes = 0
        self._objects: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: str) -> bytes | None:
        """The object, or None when it is not kept."""
        with self._lock:
            data = self._objects.get(name)
            if data is not None:
                self._objects.move_to_end(name)
            return data

    def put(self, name: str, data: bytes) -> None:
        """Keep the object; the longest unused go."""
        if len(data) > self._limit:
            return
        with self._lock:
            replaced = self._objects.pop(name, None)
            self._bytes += len(data) - (len(replaced) if replaced is not None else 0)
            self._objects[name] = data
            while self._bytes > self._limit:
                _, old = self._objects.popitem(last=False)
                self._bytes -= len(old)

    @property
    def bytes(self) -> int:
        """Bytes kept now."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._objects)


class TileReader:
    """Reads tiles as they are published. Blocking and safe to call from many threads."""

    def __init__(self, ledger: Ledger, store: TileStore, metrics: Metrics, cache_bytes: int) -> None:
        self._ledger, self._store, self._metrics = ledger, store, metrics
        self._cache = ObjectCache(cache_bytes)
        self._cleared: OrderedDict[str, float] = OrderedDict()
        self._clearing = threading.Lock()

    def read(self, tile: Tile, have: str | None = None, gzipped: bool = True) -> Served:
        """The tile's state and bytes, of one and the same revision.

        Args:
            tile: Which tile.
            have: An If-None-Match header: what it names is not read.
            gzipped: Whether the bytes may be gzip, as they are stored.

        Returns:
            The state, with bytes unless the tile is empty (no content hash) or the client has it.

        Raises:
            IntegrityFault: The ledger names an object that is not there or is damaged. It was counted, and the tile
                cleared and marked, so that it is built again.
            LedgerError: The ledger does not answer.
            TileStoreError: The store does not answer.
        """
        tried: TileState | None = None
        for _ in range(READS):
            state = self._ledger.read([tile.key])[tile.key]
            name = state.object_name
            if name is None or state.content_hash is None:
                if not state.empty:
                    # An integrity fault has cleared the hash and marked the tile: something belongs here.
                    raise IntegrityFault(f"tile {tile.path} was found damaged and waits for its next build")
                return Served(state, None)
            if etag_matches(have, entity_tag(state.content_hash)):
                return Served(state, None)
            if tried is not None and name == tried.object_name:
                break
            data = self._object(name, state)
            if data is not None:
                return Served(state, data if gzipped else gzip.decompress(data))
            tried = state
        assert tried is not None
        self._metrics.integrity.labels("missing").inc()
        missing = tried.object_name
        structlog.get_logger().error("object of a current revision is missing", tile=tile.path, object=missing)
        self._clear(tried)
        raise IntegrityFault(f"the object of tile {tile.path} is missing")

    def _object(self, name: str, state: TileState) -> bytes | None:
        data = self._cache.get(name)
        if data is not None:
            self._metrics.cache.labels("hit").inc()
            return data
        self._metrics.cache.labels("miss").inc()
        data = self._store.get(tile_object(name))
        if data is None:
            return None
        try:
            sound = hashlib.sha256(gzip.decompress(data)).hexdigest() == state.content_hash
        except (OSError, EOFError, zlib.error):
            sound = False
        if not sound:
            self._metrics.integrity.labels("damaged").inc()
            structlog.get_logger().error("object is damaged", tile=state.key, object=name)
            self._clear(state)
            raise IntegrityFault(f"the object of tile {state.key} is damaged")
        self._cache.put(name, data)
        self._metrics.cache_bytes.set(self._cache.bytes)
        return data

    def _clear(self, state: TileState) -> None:
        """Have the tile built again: one short write, once a tile and minute; the answer never depends on it."""
        now = time.monotonic()
        with self._clearing:
            if now < self._cleared.get(state.key, -CLEAR_AGAIN_S) + CLEAR_AGAIN_S:
                return
            self._cleared[state.key] = now
            self._cleared.move_to_end(state.key)
            while len(self._cleared) > CLEARED_KEPT:
                self._cleared.popitem(last=False)
        try:
            present = self._ledger.read([state.key])[state.key]
            if (present.revision, present.content_hash) == (state.revision, state.content_hash):
                self._ledger.clear([state.key])
        except LedgerError as fault:
            with self._clearing:
                self._cleared.pop(state.key, None)  # The next request tries again.
            structlog.get_logger().warning("damaged tile could not be marked", tile=state.key, error=str(fault))


def entity_tag(content_hash: str) -> str:
    """The tile's ETag. Weak: the gzip and the plain form share it, and If-None-Match is compared weakly anyway."""
    return f'W/"{content_hash}"'
