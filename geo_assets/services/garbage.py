"""Collect objects that nothing names: superseded revisions of tiles, and bodies in the inbox past their retention.

An object goes only after a grace, only if its revision is at or below the ledger's, only if it is not the current
one, and only if no reader has pinned it (`pins`). A name of another form and a tile that the ledger does not know are
left alone: not to know is no reason to delete.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

import structlog

from geo_assets.ports import tile_object
from geo_assets.services.pins import pinned_since
from geo_assets.tiles.tile import Tile, TileError

if TYPE_CHECKING:
    from geo_assets.stack import Stack
    from resources.tile_store.protocol import StoredObject

log = structlog.get_logger()

PAGE = 2_000
_NAME = re.compile(r"tiles/(\d{1,2}/\d{1,7}/\d{1,7})/(\d+)-([0-9a-f]{16})\.mvt\.gz")


def collect_objects(stack: Stack, *, now_ms: int) -> int:
    """Delete superseded objects; how many. A list that fails deletes nothing more."""
    grace_ms = int(stack.settings.garbage_grace_s * 1000)
    deleted = 0
    objects = stack.tiles.list("tiles/")
    while page := list(islice(objects, PAGE)):
        old = [(o, *parsed) for o in page if o.modified_ms + grace_ms <= now_ms and (parsed := _parse(o)) is not None]
        states = stack.ledger.read(sorted({key for _, key, _ in old}))
        # After the states, never before: see `pins`.
        pinned = pinned_since(stack.ledger)
        doomed: list[str] = []
        for stored, key, revision in old:
            state = states[key]
            current = tile_object(state.object_name) if state.object_name else None
            # After an integrity fault the ledger names no object although one may still be served: it stays.
            cleared = state.content_hash is None and not state.empty and revision == state.revision
            # What was superseded before the oldest pin is in nobody's snapshot; a tile committed since may be.
            held = pinned is not None and state.built_at_ms >= pinned
            if revision <= state.revision and stored.name != current and not cleared and not held:
                doomed.append(stored.name)
        if doomed:
            deleted += stack.tiles.delete(doomed)
    return deleted


def _parse(stored: StoredObject) -> tuple[str, int] | None:
    match = _NAME.fullmatch(stored.name)
    if match is None:
        return None
    try:
        return Tile.from_path(match[1]).key, int(match[2])
    except TileError:
        return None


def collect_inbox(stack: Stack, *, now_ms: int) -> int:
    """Delete bodies that are older than any record or dead letter that could point to them; how many."""
    keep_ms = stack.settings.retention_s * 1000 * 4
    doomed: Iterator[str] = (o.name for o in stack.tiles.list("inbox/") if o.modified_ms + keep_ms < now_ms)
    deleted = 0
    while page := list(islice(doomed, PAGE)):
        deleted += stack.tiles.delete(page)
    return deleted
