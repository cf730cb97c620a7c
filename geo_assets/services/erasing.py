"""Erase the features and fences of a source.

Features are deleted through the store's own transaction, so that tiles follow as for any edit; fences that were posted
as such by a record of `[fences]`, and whoever is in one leaves it.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from geo_assets.events.records import feature_key, parts_of_key
from geo_assets.events.validate import DELETED
from geo_assets.services import outbox
from geo_assets.services.dead_letters import now_ms
from geo_assets.services.dirty import DirtyPlan
from geo_assets.services.event_records import headers_of
from geo_assets.services.fence_features import encode_fence, fence_record, removal, send_fences
from geo_assets.services.fences import FenceBook
from resources.feature_store.protocol import Edit, Feature

if TYPE_CHECKING:
    from geo_assets.stack import Stack

BATCH = 1_000


def count_features(stack: Stack, source: str, layer: str | None) -> int:
    """Features of a source, of one layer or all."""
    return sum(1 for _ in stack.features.scan(source=source, layer=layer))


def fences_of(stack: Stack, source: str) -> list[tuple[str, int]]:
    """Ids (JSON text) and versions of the fences that a source has now, features or not."""
    book = FenceBook(stack)
    fences = book.index(book.fold().name).fence_set.fences
    return [(parts_of_key(f.id)[1], f.revision) for f in fences if parts_of_key(f.id)[0] == source]


def erase_fences(stack: Stack, source: str) -> int:
    """Delete the fences of a source, each by a version one above the one that stands; how many.

    Raises:
        LogError, LedgerUnavailable, TileStoreError: Not now; giving it again is harmless.
    """
    found = fences_of(stack, source)
    headers = headers_of("fences", source, f"erase-{uuid.uuid4().hex[:12]}", now_ms())
    stack.log.append(
        [
            fence_record(
                stack, feature_key(source, fence_id), encode_fence(removal(fence_id, version + 1)), headers, now_ms()
            )
            for fence_id, version in found
        ]
    )
    return len(found)


def erase_features(stack: Stack, source: str, layer: str | None) -> int:
    """Delete them, each by a version one above the one that stands; how many went. Their tiles become one manifest."""
    run = f"erase-{uuid.uuid4().hex[:12]}"
    plan = DirtyPlan(stack.layers, stack.settings.edit_cap, manifest=run)
    erased = 0
    batch: list[Feature] = []

    def flush() -> None:
        nonlocal erased
        edits = [
            Edit(f"{run}-{f.feature_id}", run, "delete", f.source, f.feature_id, f.version + 1, now_ms(), DELETED)
            for f in batch
        ]
        erased += sum(one.outcome == "applied" for one in stack.features.apply(edits, plan, now_ms=now_ms()))
        plan.known |= plan.fresh
        batch.clear()

    try:
        for feature in list(stack.features.scan(source=source, layer=layer)):
            batch.append(feature)
            if len(batch) >= BATCH:
                flush()
        if batch:
            flush()
    finally:
        outbox.finish_manifest(stack, run, f"erase {source}" + (f" {layer}" if layer else ""), "repair")
        outbox.plan_wide(stack)
        send_fences(stack)
    return erased
