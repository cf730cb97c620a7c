"""Records of tile, position and fence events: one way, whether they came over HTTP or through `[raw]`.

Loads without a geometry library: the edge writes them too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from geo_assets.events import topics
from geo_assets.events.models import FenceEvent, PositionEvent, TileEvent, feature_id_text
from geo_assets.events.records import TileHint, feature_key, position_value
from resources.event_log.protocol import NewRecord

_encode = msgspec.json.Encoder().encode


def event_record(
    event: TileEvent | PositionEvent | FenceEvent,
    *,
    source: str,
    event_id: str,
    received_ms: int,
    crs: str | None = None,
    callback: str | None = None,
) -> NewRecord:
    """The record of one event on its topic.

    Args:
        event: The event.
        source: Whose it is.
        event_id: Its id.
        received_ms: When it was received, milliseconds since the epoch, UTC.
        crs: What the sender declared beside the body; for fences alone.
        callback: Who is told the outcome.
    """
    headers = headers_of(_kind(event), source, event_id, received_ms)
    if isinstance(event, TileEvent):
        topic, key = topics.TILES, event.tile.key
        value = TileHint.of(
            event.tile, event_id=event_id, source=source, version=event.version, data_time_ms=received_ms,
            force=event.force,
        ).to_json()  # fmt: skip
    elif isinstance(event, PositionEvent):
        topic, key, value = topics.POSITIONS, event.device_id, _encode(position_value(event))
    else:
        topic, key = topics.FENCES, feature_key(source, feature_id_text(event.id) or event_id)
        fence: Mapping[str, Any] = event.model_dump(exclude_unset=True)
        value = _encode(fence)
        if crs is not None:
            headers[topics.HEADER_CRS] = crs
    if callback is not None:
        headers[topics.HEADER_CALLBACK] = callback
    return NewRecord(topic, key, value, headers, received_ms)


def headers_of(kind: str, source: str, event_id: str, received_ms: int) -> dict[str, str]:
    """Headers that every record of an event has."""
    return {
        topics.HEADER_EVENT_ID: event_id,
        topics.HEADER_SOURCE: source,
        topics.HEADER_KIND: kind,
        topics.HEADER_RECEIVED_MS: str(received_ms),
    }


def part_of(event_id: str, index: int, count: int) -> str:
    """The id of one event of several that were sent as one."""
    return event_id if count == 1 else f"{event_id}:{index}"


def _kind(event: TileEvent | PositionEvent | FenceEvent) -> str:
    if isinstance(event, TileEvent):
        return "tiles"
    return "positions" if isinstance(event, PositionEvent) else "fences"
