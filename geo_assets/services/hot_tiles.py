"""Which tiles are hot, and to which topic their hints go: what one process has sent says it.

A hint carries no order and no content, so a tile may change its topic at any time, and two processes may see it
otherwise: whoever reads both topics by the ledger's positions marks the same tiles.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import structlog

from geo_assets.events import topics
from geo_assets.flow.hot_regions import HOT_A_S, Changes, HotRegions

log = structlog.get_logger()


class HotTiles:
    """Sends the hints of hot tiles to a topic of their own, and back when they have cooled. For one thread.

    Args:
        hot_a_s: Hints a second from which a tile is hot; 0: none ever is.
        clock: Seconds that only go forward.
    """

    def __init__(self, hot_a_s: float = HOT_A_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._regions = HotRegions(hot_a_s) if hot_a_s else None
        self._clock = clock

    def __len__(self) -> int:
        """Tiles that are hot."""
        return len(self._regions.hot) if self._regions else 0

    def topic_of(self, key: str) -> str:
        """The topic of a tile's hints."""
        return topics.TILES_HOT if self._regions and self._regions.is_hot(key) else topics.TILES

    def sent(self, keys: Sequence[str]) -> None:
        """Hints of these tiles were sent."""
        if self._regions:
            self._tell(self._regions.see(keys, self._clock()))

    def look(self) -> None:
        """Time went on: tiles cool."""
        if self._regions:
            self._tell(self._regions.look(self._clock()))

    def _tell(self, changes: Changes) -> None:
        for key in changes.heated:
            log.info("a tile is hot: its hints go to a topic of their own", tile=key, topic=topics.TILES_HOT)
        for key in changes.cooled:
            log.info("a tile has cooled", tile=key, topic=topics.TILES)
