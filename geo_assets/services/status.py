"""One snapshot of everything an operator asks for first, as plain JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from geo_assets.events import topics
from geo_assets.services import currency
from geo_assets.services.dead_letters import list_dead_letters, now_ms
from geo_assets.services.lost_records import losses_of

if TYPE_CHECKING:
    from geo_assets.stack import Stack


def moment(ms: int) -> str | None:
    """ISO 8601 in UTC of milliseconds since the epoch; None of 0."""
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds") if ms else None


def lag_of(stack: Stack) -> dict[str, int]:
    """Records behind: of ingest on `[raw]`, of the ledger's positions on both topics of hints."""
    log = stack.log
    committed = log.committed(topics.INGEST_GROUP, topics.RAW)
    raw = _behind(stack, topics.RAW, committed)
    hints = sum(_behind(stack, name, stack.ledger.positions(log.topic_id(name))) for name in topics.TILE_HINTS)
    return {"ingest": raw, "tile hints": hints}


def _behind(stack: Stack, topic: str, read: Mapping[int, int]) -> int:
    extents = stack.log.extents(topic)
    return sum(max(0, extent.end - max(extent.begin, read.get(p, extent.begin))) for p, extent in extents.items())


def snapshot(stack: Stack) -> dict[str, Any]:
    """Features, tiles, how current sources and tilesets are, lag, what retention took, dead letters and manifests."""
    features = stack.features.counts()
    tiles = stack.ledger.counts()
    letters: dict[str, int] = {}
    for one in list_dead_letters(stack.log):
        if one.replayed_ms is None:
            letters[one.letter.reason] = letters.get(one.letter.reason, 0) + 1
    manifests: list[dict[str, Any]] = []
    for manifest in stack.ledger.manifests(20):
        progress = stack.ledger.progress(manifest.id)
        manifests.append(
            {
                "id": manifest.id,
                "title": manifest.title,
                "kind": manifest.kind,
                "state": manifest.state,
                "created": moment(manifest.created_ms),
                "tiles": manifest.tiles,
                "done": progress.done,
                "failed": progress.failed,
                "problem": manifest.problem,
            }
        )
    return {
        "home": str(stack.settings.home),
        "features": {
            "by_layer": dict(features.by_layer),
            "total": sum(features.by_layer.values()),
            "tombstones": features.tombstones,
            "applied_keys": features.applied_keys,
            "outbox": features.outbox,
            "watermark": moment(features.watermark_ms),
        },
        "tiles": {
            "published": tiles.published,
            "known": tiles.tiles,
            "bytes": tiles.bytes,
            "dirty_live": tiles.dirty_live,
            "dirty_backfill": tiles.dirty_backfill,
            "given_up": tiles.given_up,
            "leased": tiles.leased,
            "owed": dict(tiles.owed),
            "oldest_dirty": moment(tiles.oldest_dirty_ms),
            "by_zoom": {str(zoom): count for zoom, count in sorted(tiles.by_zoom.items())},
        },
        "sources": [
            {
                "name": one.name,
                "received": moment(one.received_ms),
                "watermark": moment(one.watermark_ms),
                "silent_s": one.silent_s,
                "expected_every_s": one.expected_s,
                "silent": one.silent,
            }
            for one in currency.sources(stack, now_ms(), counts=features)
        ],
        "tilesets": [
            {
                "name": one.name,
                "version": one.version,
                "published": moment(one.published_ms),
                "watermark": moment(one.watermark_ms),
                "behind_s": one.behind_s,
                "commits_since": one.commits,
            }
            for one in currency.tilesets(stack, counts=features)
        ],
        "lag": lag_of(stack),
        "lost": {topic: asdict(loss) | {"at": moment(loss.at_ms)} for topic, loss in losses_of(stack.ledger).items()},
        "dead_letters": letters,
        "manifests": manifests,
    }
