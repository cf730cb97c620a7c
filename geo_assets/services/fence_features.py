"""Features of a layer that holds fences reach `[fences]`: by rows of the outbox, written in their edit's transaction.

A feature of such a layer that is no fence is refused before it is stored; what is stored is owed to `[fences]`, and the
row goes when the log has it. So no kill loses a fence, and one that is sent twice is a duplicate by its version.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import msgspec
import structlog

from geo_assets.events import topics
from geo_assets.events.dead_letter import DeadLetter, Refused
from geo_assets.events.json_text import loads, shorten
from geo_assets.events.records import feature_key
from geo_assets.geofence.fences import fence_of_feature, members_of_feature
from geo_assets.ports import MAX_RECORD_BYTES, inbox_object
from geo_assets.services.dead_letters import now_ms, write_dead_letters
from geo_assets.services.event_records import headers_of
from resources.event_log.protocol import NewRecord
from resources.feature_store.protocol import Change, Feature, OutboxRow

if TYPE_CHECKING:
    from geo_assets.events.validate import ValidEdit
    from geo_assets.stack import Stack
    from geo_assets.tiles.layers import LayerSet

log = structlog.get_logger()

SEEN = "fence-layers-seen"
"""Ledger value: layers whose features were sent, JSON."""

KIND = "fence"
"""Of its rows in the outbox."""

_PAGE = 200
"""Rows at once: each may hold the border of a country."""

encode_fence = msgspec.json.Encoder().encode
"""The value of a record of `[fences]`."""


def check_fence(edit: ValidEdit, layers: LayerSet) -> None:
    """Whether a valid edit may be stored: what goes to a layer of fences has to be one.

    Raises:
        Refused: It is none; the field is named, such as `properties.radius_m`.
    """
    if edit.action == "delete" or not layers[edit.layer].fences:
        return
    try:
        fence_of_feature(edit.source, edit.feature_id, edit.version, edit.geometry, edit.properties)
    except Refused:
        raise
    except Exception as fault:
        # Whatever a library finds wrong with a fence costs that fence and no other.
        why = f"{type(fault).__name__}: {shorten(str(fault), 200)}"
        raise Refused("invalid_geometry", "geometry", explanation=why) from None


def owed_fences(changes: Sequence[Change], layers: LayerSet) -> list[OutboxRow]:
    """What changes owe to `[fences]`: each feature that is in a layer of fences now, the deletion of each that was."""
    rows: list[OutboxRow] = []
    for change in changes:
        edit = change.edit
        if _holds(change.after, layers):
            assert change.after is not None
            feature = change.after
            members = members_of_feature(feature.feature_id, feature.version, feature.geometry, feature.properties)
        elif _holds(change.before, layers):
            members = removal(edit.feature_id, edit.version)
        else:
            continue
        headers = headers_of("fences", edit.source, edit.event_id, edit.event_time_ms)
        rows.append(OutboxRow(KIND, feature_key(edit.source, edit.feature_id), encode_fence(members), headers))
    return rows


def follow_fence_layers(stack: Stack) -> int:
    """Send the features of layers that hold fences now and did not before; how many were sent.

    Call it before ingest begins. Those that are no fences stay features and become dead letters; those of a layer that
    holds fences no more stay fences until they are deleted.
    """
    seen = set(json.loads(stack.ledger.get_value(SEEN) or "[]"))
    now = {layer.name for layer in stack.layers.layers if layer.fences}
    if now == seen:
        return 0
    sent = 0
    for layer in sorted(now - seen):
        features = stack.features.scan(layer=layer)
        while page := list(islice(features, _PAGE)):
            records: list[NewRecord] = []
            letters: list[DeadLetter] = []
            for feature in page:
                try:
                    records.append(_stored_record(stack, feature))
                except Refused as refused:
                    letters.append(_letter(feature, refused))
            write_dead_letters(stack, letters)
            stack.log.append(records)
            sent += len(records)
    stack.ledger.set_value(SEEN, json.dumps(sorted(now)))
    if sent:
        log.info("layers hold fences now", layers=sorted(now - seen), fences=sent)
    return sent


def _stored_record(stack: Stack, feature: Feature) -> NewRecord:
    said = feature.feature_id, feature.version, feature.geometry, feature.properties
    fence_of_feature(feature.source, *said)
    key = feature_key(feature.source, feature.feature_id)
    headers = headers_of("fences", feature.source, f"layer-{feature.layer}", feature.event_time_ms)
    return fence_record(stack, key, encode_fence(members_of_feature(*said)), headers, None)


def _letter(feature: Feature, refused: Refused) -> DeadLetter:
    said = feature.feature_id, feature.version, feature.geometry, feature.properties
    return DeadLetter.refused(
        refused, stage="validate", source=feature.source, at_ms=now_ms(), feature_id=feature.feature_id,
        layer=feature.layer, payload=encode_fence(members_of_feature(*said) | {"layer": feature.layer}),
        headers=headers_of("features", feature.source, f"layer-{feature.layer}", feature.event_time_ms),
    )  # fmt: skip


def removal(feature_id: str, version: int) -> dict[str, object]:
    """The event that takes a fence away."""
    return {"type": "Feature", "id": loads(feature_id.encode()), "version": version, "action": "delete"}


def send_fences(stack: Stack) -> int:
    """Append every owed fence to `[fences]`, then delete its row; how many.

    Raises:
        LogUnavailable, TileStoreError: The rows stay owed.
    """
    sent = 0
    while rows := stack.features.owed(_PAGE, kind=KIND):
        stack.log.append([_record(stack, row) for row in rows])
        stack.features.pay([row.id for row in rows])
        sent += len(rows)
        if len(rows) < _PAGE:
            break
    return sent


def _record(stack: Stack, row: OutboxRow) -> NewRecord:
    received = int(row.headers[topics.HEADER_RECEIVED_MS])
    return fence_record(stack, row.key, row.value, row.headers, received)


def fence_record(
    stack: Stack, key: str, value: bytes, headers: Mapping[str, str], timestamp_ms: int | None
) -> NewRecord:
    """The record of a fence's event; a value too large for the log goes to the inbox."""
    kept = dict(headers)
    if len(value) > MAX_RECORD_BYTES * 9 // 10:
        sha = hashlib.sha256(value).hexdigest()
        stack.tiles.put(inbox_object(sha), value)
        kept |= {topics.HEADER_POINTER: inbox_object(sha), topics.HEADER_SHA256: sha}
        value = b""
    return NewRecord(topics.FENCES, key, value, kept, timestamp_ms)


def _holds(feature: Feature | None, layers: LayerSet) -> bool:
    return feature is not None and feature.layer in layers and layers[feature.layer].fences
