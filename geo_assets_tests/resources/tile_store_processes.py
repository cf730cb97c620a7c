"""What the tile store's suite runs in processes of their own. Imports no test library, so that they start at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from geo_assets_tests.resources.hardship import fill_the_disk, free_the_disk, obey_permissions
from resources.tile_store.folder import FolderTileStore
from resources.tile_store.protocol import TileStore, TileStoreUnavailable


def put_and_delete(open_store: Callable[[], TileStore], name: str, count: int) -> None:
    store = open_store()
    for n in range(count):
        store.put(f"shared/deep/{name}-{n}", b"x")
        assert store.get(f"shared/deep/{name}-{n}") == b"x"
        assert store.delete([f"shared/deep/{name}-{n}"]) == 1
    store.put(f"shared/deep/{name}-kept", b"x")


def put_large_ones_until_killed(open_store: Callable[[], TileStore], name: str, going: Any) -> None:
    store = open_store()
    for n in itertools.count():
        store.put(f"{name}/{n}", b"x" * 1_000_000)
        going.set()


def put_on_a_full_disk(root: str, results: Any) -> None:
    store = FolderTileStore(root)
    store.put("before", b"x")
    fill_the_disk(10_000)
    try:
        store.put("a/too-large", b"x" * 50_000)
        results.put("stored")
    except TileStoreUnavailable as error:
        results.put(str(error))
    free_the_disk()
    store.put("a/after", b"x" * 50_000)


def put_without_permission(root: str, results: Any) -> None:
    if not obey_permissions():
        results.put("cannot")
        return
    try:
        FolderTileStore(root).put("a/b", b"x")
        results.put("stored")
    except TileStoreUnavailable as error:
        results.put(str(error))
