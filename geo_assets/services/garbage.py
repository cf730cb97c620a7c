"""Collect objects that nothing names: superseded revisions of tiles, and bodies in the inbox past their retention.

An object goes only after a grace, only if its revision is at or below the ledger's, only if it is not the current
one, and only if no reader has pinned it (`pins`). A name of another form and a tile that the ledger does not know are
left alone: not to know is no reason to delete.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import structlog

from geo_assets.ports import TILES_FOLDER, tile_object
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
    objects = stack.tiles.list(TILES_FOLDER)
    while page := list(islice(objects, PAGE)):
        doomed = [one.stored.name for one in superseded(stack, page) if one.since_ms + grace_ms <= now_ms]
        if doomed:
            deleted += stack.tiles.delete(doomed)
    return deleted


class Superseded(NamedTuple):
    """An object that may go, and since when nothing names it: milliseconds since the epoch, UTC, or later than that."""

    stored: StoredObject
    key: str
    since_ms: int


def superseded(stack: Stack, page: Iterable[StoredObject]) -> list[Superseded]:
    """Objects of committed revisions that are not current and that nobody has pinned.

    Since when, the next revision's object says: it was put just before its commit. Where there is none in the page,
    the current revision's commit is the latest that it can be.
    """
    found = [(stored, *parsed) for stored in page if (parsed := parse(stored)) is not None]
    states = stack.ledger.read(sorted({key for _, key, _ in found}))
    # After the states, never before: see `pins`.
    pinned = pinned_since(stack.ledger)
    put: dict[str, list[tuple[int, int]]] = {}
    for stored, key, revision in found:
        put.setdefault(key, []).append((revision, stored.modified_ms))
    gone: list[Superseded] = []
    for stored, key, revision in found:
        state = states[key]
        current = tile_object(state.object_name) if state.object_name else None
        # After an integrity fault the ledger names no object although one may still be served: it stays.
        cleared = state.content_hash is None and not state.empty and revision == state.revision
        # What was superseded before the oldest pin is in nobody's snapshot; a tile committed since may be.
        held = pinned is not None and state.built_at_ms >= pinned
        if revision > state.revision or stored.name == current or cleared or held:
            continue
        after = [at for other, at in put[key] if revision < other <= state.revision]
        since = min([*after, state.built_at_ms]) if after else state.built_at_ms
        gone.append(Superseded(stored, key, max(since, stored.modified_ms)))
    return gone


def parse(stored: StoredObject) -> tuple[str, int] | None:
    """Tile and revision of an object; None for one whose name is no tile's."""
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
