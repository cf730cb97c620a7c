"""The topics of the event log, their keys, and the headers of a record: one word each, the same everywhere."""

from __future__ import annotations

RAW = "raw"
"""What the edge accepted, byte for byte. Key: `source:feature id`, or `source:event id` for a collection."""
TILES = "tiles"
"""Hints that a tile should be looked at again. Key: `zoom:quadkey`."""
TILES_HOT = "tiles-hot"
"""The same, of tiles that are hinted at so often that they would hold up others. Key: `zoom:quadkey`."""
TILE_UPDATED = "tile-updated"
"""Announcements of committed tiles. Key: `zoom:quadkey`."""
DEAD_LETTERS = "dead-letters"
"""Records that cannot be processed. Key: the source, or the tile."""
POSITIONS = "positions"
"""Device positions. Key: device id."""
FENCES = "fences"
"""Geofences. Key: `source:feature id`, by which triggers name the fence."""
TRIGGERS = "triggers"
"""Geofence triggers: frames of bytes (geofence/frames.py), and marks of epochs (flow/epochs.py). Key: device id."""

ALL = (RAW, TILES, TILES_HOT, TILE_UPDATED, DEAD_LETTERS, POSITIONS, FENCES, TRIGGERS)

TILE_HINTS = (TILES, TILES_HOT)
"""Where hints come in. A hint carries no order: of both, in any order and twice, the same tiles are marked."""

INGEST_GROUP = "ingest"
"""Consumer group of ingest on `[raw]`."""

HEADER_EVENT_ID = "event-id"
HEADER_SOURCE = "source"
HEADER_KIND = "kind"
"""`features`, `tiles`, `positions` or `fences`: the endpoint a raw record came through."""
HEADER_CONTENT_TYPE = "content-type"
HEADER_CRS = "source-crs"
"""What `X-Source-CRS` said."""
HEADER_RECEIVED_MS = "received-ms"
"""Milliseconds since the epoch, UTC, never falling within one edge process: the event time of what came without one."""
HEADER_STAGES = "stages"
"""When an edit passed the stages of its way so far (services/edit_stages.py). For watching: nothing hangs on it."""
HEADER_TRACEPARENT = "traceparent"
"""The trace that a record belongs to, by W3C Trace Context (services/tracing.py). For watching: nothing hangs on it."""
HEADER_TRACE_LINKS = "trace-links"
"""Of a hint of several edits: the `traceparent` of the others, comma separated."""
HEADER_SHA256 = "sha256"
"""Hex sha256 of the body (after decompression)."""
HEADER_POINTER = "pointer"
"""Name of the inbox object that holds the body; the record's value is empty then."""
HEADER_CALLBACK = "callback"
"""URL, allow-listed by the source, that is told the outcome."""
HEADER_VERTEX_COUNT = "vertex-count"
HEADER_REGION_PRIORITY = "region-priority"
HEADER_REPLAY = "replay"
"""Id of the dead letter that this record replays."""
HEADER_REASON = "reason"
"""Of a dead letter: why, so that a consumer can choose without reading the value."""

HEADERS = frozenset(
    {
        HEADER_EVENT_ID,
        HEADER_SOURCE,
        HEADER_KIND,
        HEADER_CONTENT_TYPE,
        HEADER_CRS,
        HEADER_RECEIVED_MS,
        HEADER_STAGES,
        HEADER_TRACEPARENT,
        HEADER_TRACE_LINKS,
        HEADER_SHA256,
        HEADER_POINTER,
        HEADER_CALLBACK,
        HEADER_VERTEX_COUNT,
        HEADER_REGION_PRIORITY,
        HEADER_REPLAY,
        HEADER_REASON,
    }
)
"""Every header that means something here. Others pass, and mean nothing."""
