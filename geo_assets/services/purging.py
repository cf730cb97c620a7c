"""Caches in front of the tile server: what a commit owes them, which URL a tile has there, and making them forget it.

A cache keeps only what it can be told to forget: the tile server lets it keep an answer where the request's URL is
exactly the one that is purged here. When, and in which order with the announcement, is `announce`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import structlog

from geo_assets.tiles.tile import Tile
from resources.ledger.protocol import Duty, Owed

if TYPE_CHECKING:
    from geo_assets.settings import Settings
    from geo_assets.stack import Stack

log = structlog.get_logger()

SHARED_CACHE_S: Final = 3_600
"""How long a cache may keep a tile. Purges make it forget sooner; this is for a purge that never reaches it."""

EMPTY_CACHE_S: Final = 60
"""The same for a tile without content: most of the world is, and should not fill the cache."""

MOOT_MS: Final = 2 * SHARED_CACHE_S * 1000
"""Age at which a purge need not be made any more: no cache has kept what was there before the commit. So a cache that
stays away, or was taken down while its URL is still set, costs the ledger two hours of rows and no more."""


def duties(settings: Settings) -> tuple[Duty, ...]:
    """What every commit owes, in the order in which it is paid."""
    if settings.purge_urls:
        return ("purge", "purge_again", "announce", "catalog")
    return ("announce", "catalog")


def tile_path(tile: Tile) -> str:
    """The path of a tile on the tile server."""
    return f"/tiles/{tile.path}.mvt"


def tile_url(settings: Settings, tile: Tile) -> str:
    """The one URL by which clients ask for a tile."""
    return settings.tiles_url + tile_path(tile)


def purge(stack: Stack, rows: Sequence[Owed], *, now_ms: int | None = None) -> list[Owed]:
    """Make the caches forget the tiles of these rows; the rows that are settled. The others stay owed.

    Args:
        stack: The ports. Without a purge port only what is moot is settled: another process may have one.
        rows: Purge duties, of either kind. Several of one tile are one purge.
        now_ms: Milliseconds since the epoch, to settle rows that are moot; None settles none so.
    """
    if not rows:
        return []
    expired = -1 if now_ms is None else now_ms - MOOT_MS
    moot = [row for row in rows if row.built_at_ms < expired]
    if moot:
        log.warning("purges given up: what caches kept has expired", rows=len(moot))
    waiting = [row for row in rows if row.built_at_ms >= expired]
    if stack.purge is None:
        return moot
    urls = {row.key: tile_url(stack.settings, Tile.from_key(row.key)) for row in waiting}
    failed = set(stack.purge.purge(list(urls.values())))
    if failed:
        log.warning("purges stay owed", tiles=len(failed), of=len(urls))
    return moot + [row for row in waiting if urls[row.key] not in failed]
