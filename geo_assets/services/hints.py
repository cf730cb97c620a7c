"""Read records of `[tiles]` as hints, whoever wrote them; what names no tile becomes a dead letter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from geo_assets.events import topics
from geo_assets.events.dead_letter import DeadLetter, Origin
from geo_assets.events.foreign import kept_headers, readable
from geo_assets.events.json_text import shorten
from geo_assets.events.models import EnvelopeError
from geo_assets.events.records import MAX_PART_ID, TileHint, read_hint
from geo_assets.tiles.tile import Tile, TileError
from resources.event_log.protocol import Record
from resources.ledger.protocol import Hint

HINT_KEY = "zoom:quadkey, or a value with z (or zoom), x and y"
"""What a record needs to be a hint."""


class _Glance(msgspec.Struct):
    """What a value can add to a key that names its tile."""

    z: Any = None
    zoom: Any = None
    x: Any = None
    y: Any = None
    force: Any = None


_glance = msgspec.json.Decoder(_Glance)


@dataclass(frozen=True, slots=True)
class Slice:
    """What a slice of one partition of `[tiles]` says: tiles to look at, and records that name none."""

    hints: tuple[Hint, ...]
    unreadable: tuple[tuple[Record, EnvelopeError], ...]
    next_offset: int


def read_slice(records: Sequence[Record], position: int) -> Slice:
    """Read records as hints.

    The key names the tile, and needs no value; where it names none, or another one than the value, the value's tile is
    looked at (too). A value that cannot be read takes nothing from a key that can.

    Args:
        records: Records of one partition, in order.
        position: Where the slice begins, for one without records.
    """
    hints: list[Hint] = []
    unreadable: list[tuple[Record, EnvelopeError]] = []
    for record in records:
        try:
            tile = Tile.from_key(record.key or "")
        except TileError:
            try:
                said = _read_value(record)
            except EnvelopeError as fault:
                unreadable.append((record, fault))
            else:
                hints.append(Hint(record.offset, said.tile.key, said.force))
            continue
        force, other = _added(tile, record.value)
        hints.append(Hint(record.offset, tile.key, force))
        if other is not None:
            hints.append(Hint(record.offset, other.key, force))
    return Slice(tuple(hints), tuple(unreadable), records[-1].offset + 1 if records else position)


def _read_value(record: Record) -> TileHint:
    """The hint that a value makes by itself."""
    if not record.value:
        raise EnvelopeError("key", "there is no value that could", shorten(readable(record.key or "")), HINT_KEY)
    return read_hint(record.value)


def _added(tile: Tile, value: bytes | None) -> tuple[bool, Tile | None]:
    """What a value adds to the tile that its key names: whether to build by force, and another tile if it names one."""
    if not value:
        return False, None
    try:
        said = _glance.decode(value)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return False, None
    other: Tile | None = None
    if (said.zoom if said.z is None else said.z, said.x, said.y) not in ((tile.z, tile.x, tile.y), (None, None, None)):
        try:
            other = read_hint(value).tile
        except EnvelopeError:
            other = None
    return said.force is True, None if other == tile else other


def hint_dead_letter(record: Record, fault: EnvelopeError, now_ms: int) -> DeadLetter:
    """The dead letter of a record that names no tile.

    Args:
        record: The record.
        fault: What is wrong with it.
        now_ms: Milliseconds since the epoch, UTC.
    """
    headers = kept_headers(record.headers)
    return DeadLetter.make(
        reason="schema",
        stage="tiles",
        explanation=f"the key {shorten(readable(record.key or ''))!r} names no tile; {fault}",
        source=headers.get(topics.HEADER_SOURCE, "")[:80],
        at_ms=now_ms,
        event_id=headers.get(topics.HEADER_EVENT_ID, "")[:MAX_PART_ID] or None,
        field=fault.field,
        value=fault.value,
        limit=fault.limit or HINT_KEY,
        origin=Origin(record.topic, record.partition, record.offset),
        payload=record.value or b"",
        headers=headers,
    )
