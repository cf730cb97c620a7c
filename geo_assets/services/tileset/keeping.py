"""Removing what is no published version: what dead publishers left, and versions that were pruned.

Only what a void claim names is deleted, by its name; what nobody knows of is left alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from geo_assets.services.tileset import registry
from geo_assets.services.tileset.registry import Version, object_name

if TYPE_CHECKING:
    from geo_assets.settings import Settings
    from geo_assets.stack import Stack
    from resources.tile_store.protocol import TileStore

log = structlog.get_logger()

PAGE = 1_000


def workplace(settings: Settings, name: str, version: str) -> Path:
    """Folder of a version's files while they grow, on the publisher's own disk."""
    return settings.home / "publishing" / f"{name}-{version}"


def sweep(stack: Stack, name: str, *, store: TileStore | None = None, grace_ms: int | None = None) -> int:
    """Remove what publishers of a tileset that died left, and what a prune that was cut short did; objects removed.

    Args:
        stack: The ports.
        name: Of the tileset; one that is none has nothing to sweep.
        store: Where its files are; the stack's own tile store unless given.
        grace_ms: How long ago a claim must have run out; None: at once, also where its process is known to be gone.
    """
    if name not in registry.names(stack.ledger) or stack.ledger.get_value(registry.value_name(name)) is None:
        return 0
    at_ms = registry.now_ms()
    return _remove(stack, name, registry.void(stack.ledger, name, at_ms, grace_ms=grace_ms), at_ms, store)


def sweep_all(stack: Stack, *, grace_ms: int) -> int:
    """Sweep every tileset of what was begun and whose claim ran out before the grace; objects removed.

    By time alone: whoever does this every few minutes must not take a process that it cannot see, in a container whose
    host has the same name, for a dead one.
    """
    return sum(sweep(stack, name, grace_ms=grace_ms) for name in registry.names(stack.ledger))


def give_up(stack: Stack, name: str, version: str, *, store: TileStore | None = None) -> int:
    """Void a claim of one's own and remove its objects."""
    at_ms = registry.now_ms()
    registry.void(stack.ledger, name, at_ms, version)
    return _remove(stack, name, [version], at_ms, store)


def prune(stack: Stack, name: str, keep: int) -> list[Version]:
    """Remove all but the newest `keep` versions, the one in force, and those that a reader pinned; what went."""
    gone = registry.prune(stack.ledger, name, keep)
    sweep(stack, name)
    return gone


def whole(stack: Stack, name: str, version: Version) -> bool:
    """Whether the files of a version are in the tile store."""
    names = [object_name(name, version.version, "manifest.json")]
    names += [file.object for kind, file in version.files.items() if kind != "folder"]
    return all(map(stack.tiles.exists, names))


def _remove(stack: Stack, name: str, versions: list[str], at_ms: int, store: TileStore | None) -> int:
    place = store or stack.tiles
    removed = 0
    for version in versions:
        # The manifest first: it says that a version is whole.
        removed += place.delete([object_name(name, version, "manifest.json")])
        objects: Iterator[str] = (one.name for one in place.list(object_name(name, version, "")))
        while page := list(islice(objects, PAGE)):
            removed += place.delete(page)
        shutil.rmtree(workplace(stack.settings, name, version), ignore_errors=True)
    if removed:
        log.info("tileset swept", name=name, versions=versions, objects=removed)
    if versions:
        registry.forget(stack.ledger, name, at_ms)
    return removed
