"""Tell map clients of committed tiles: the ledger's announce duties become records of `[tile-updated]`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog

from geo_assets.events import topics
from geo_assets.tiles.tile import Tile
from resources.event_log.protocol import LogUnavailable, NewRecord
from resources.ledger.protocol import Owed

if TYPE_CHECKING:
    from geo_assets.stack import Stack

log = structlog.get_logger()

SWEEP_AGE_MS = 5_000
"""How old an unpaid announcement is before somebody else pays it: its committer needs milliseconds."""


def announcement(row: Owed) -> NewRecord:
    """The record that tells clients of one commit."""
    tile = Tile.from_key(row.key)
    value = {
        "z": tile.z,
        "x": tile.x,
        "y": tile.y,
        "hash": row.content_hash,
        "revision": row.revision,
        "outcome": row.outcome,
        "bytes": row.bytes,
        "built_at_ms": row.built_at_ms,
        "data_time_ms": row.data_time_ms,
    }
    return NewRecord(topics.TILE_UPDATED, row.key, json.dumps(value, separators=(",", ":")).encode())


def announce(stack: Stack, rows: Sequence[Owed]) -> int:
    """Announce these commits and pay the rows. A log that cannot take them leaves them owed; returns how many went."""
    if not rows:
        return 0
    try:
        stack.log.append([announcement(row) for row in rows])
    except LogUnavailable as fault:
        log.warning("announcements stay owed", rows=len(rows), error=str(fault))
        return 0
    stack.ledger.pay([row.id for row in rows])
    return len(rows)


def sweep_announcements(stack: Stack, *, min_age_ms: int = SWEEP_AGE_MS) -> int:
    """Pay what a dead process left. Twice is harmless: clients ignore a revision not above the one they have."""
    paid = 0
    while rows := stack.ledger.owed("announce", 1_000, min_age_ms=min_age_ms):
        sent = announce(stack, rows)
        paid += sent
        if not sent:
            break
    return paid
