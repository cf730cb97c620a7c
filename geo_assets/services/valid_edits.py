"""From what the events module found valid to what the feature store takes: the same fields, the port's own records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resources.feature_store.protocol import Edit, Feature

if TYPE_CHECKING:
    from geo_assets.events.validate import ValidEdit


def edit_of(valid: ValidEdit) -> Edit:
    """The store's edit of a valid one."""
    feature = None
    if valid.action != "delete":
        feature = Feature(
            source=valid.source,
            feature_id=valid.feature_id,
            layer=valid.layer,
            version=valid.version,
            geometry=valid.geometry,
            bbox=valid.bbox,
            properties=valid.properties,
            content_hash=valid.content_hash,
            digest=valid.digest,
            min_zoom=valid.min_zoom,
            max_zoom=valid.max_zoom,
            vertex_count=valid.vertex_count,
            event_time_ms=valid.event_time_ms,
        )
    return Edit(
        event_key=valid.event_key,
        event_id=valid.event_id,
        action=valid.action,
        source=valid.source,
        feature_id=valid.feature_id,
        version=valid.version,
        event_time_ms=valid.event_time_ms,
        content_hash=valid.content_hash,
        feature=feature,
    )
