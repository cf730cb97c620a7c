"""Erase the features of a source: deletes through the store's own transaction, so that tiles follow as for any edit."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from geo_assets.events.validate import DELETED
from geo_assets.services import outbox
from geo_assets.services.dead_letters import now_ms
from geo_assets.services.dirty import DirtyPlan
from resources.feature_store.protocol import Edit, Feature

if TYPE_CHECKING:
    from geo_assets.stack import Stack

BATCH = 1_000


def count_features(stack: Stack, source: str, layer: str | None) -> int:
    """Features of a source, of one layer or all."""
    return sum(1 for _ in stack.features.scan(source=source, layer=layer))


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
    return erased
