"""Encoded features of the tiles that were built last, kept for their next build, bounded by bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict

from geo_assets.tiles.encode.assembly import EncodedFeatures


class EncodedCache:
    """Encoded features by recipe and tile. When it is full, the tiles go that nobody asked for the longest.

    It may be asked from several threads: what it holds never changes.

    Args:
        max_bytes: Most that it holds. What is larger by itself is not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], tuple[EncodedFeatures, int]] = OrderedDict()
        self._nbytes = 0

    def __len__(self) -> int:
        """How many tiles it holds features of."""
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return self._nbytes

    def get(self, recipe: str, key: str) -> EncodedFeatures | None:
        """The features of a tile as it was built last by this recipe; None where they are not kept.

        Args:
            recipe: How the tile is built: another recipe draws other features.
            key: Partition key of the tile.
        """
        with self._lock:
            found = self._kept.get((recipe, key))
            if found is None:
                return None
            self._kept.move_to_end((recipe, key))
            return found[0]

    def put(self, recipe: str, key: str, features: EncodedFeatures) -> None:
        """Keep the features of a tile, in place of those that were kept of it."""
        size = features.nbytes
        with self._lock:
            self._drop((recipe, key))
            if size > self.max_bytes:
                return
            self._kept[recipe, key] = features, size
            self._nbytes += size
            while self._nbytes > self.max_bytes:
                self._drop(next(iter(self._kept)))

    def discard(self, recipe: str, key: str) -> None:
        """Forget the features of a tile, if they are kept."""
        with self._lock:
            self._drop((recipe, key))

    def _drop(self, place: tuple[str, str]) -> None:
        dropped = self._kept.pop(place, None)
        if dropped is not None:
            self._nbytes -= dropped[1]
