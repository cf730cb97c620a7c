"""Dead letters in the log: write, list, show, replay. What a dead letter is, events/dead_letter.py says."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from geo_assets.events import topics
from geo_assets.events.dead_letter import DeadLetter, DeadLetterError
from geo_assets.events.foreign import KINDS
from geo_assets.events.json_text import loads
from geo_assets.events.models import EnvelopeError, PositionEvent, parse
from geo_assets.events.records import position_value
from geo_assets.geofence.frames import FrameError, decode
from geo_assets.ports import MAX_RECORD_BYTES, inbox_object
from geo_assets.services import resending
from geo_assets.tiles.tile import Tile
from resources.event_log.protocol import NewRecord, OffsetOutOfRange, Record

if TYPE_CHECKING:
    from geo_assets.stack import Stack
    from resources.event_log.protocol import EventLog

log = structlog.get_logger()

INLINE_BYTES = MAX_RECORD_BYTES
"""Payload above which it goes to the inbox: base64 makes it a third larger, and the topic takes two records' worth."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A dead letter as it stands in the log, and whether it was replayed since."""

    letter: DeadLetter
    partition: int
    offset: int
    replayed_ms: int | None


def write_dead_letters(stack: Stack, letters: Sequence[DeadLetter]) -> None:
    """Append dead letters durably. Releases their event keys, so that a replay is no duplicate.

    Raises:
        LogUnavailable: None of them is in the log.
    """
    if not letters:
        return
    records: list[NewRecord] = []
    for letter in letters:
        kept = letter
        if len(letter.payload) > INLINE_BYTES and letter.payload_sha256:
            stack.tiles.put(inbox_object(letter.payload_sha256), letter.payload)
            kept = replace(letter, payload=b"", pointer=inbox_object(letter.payload_sha256))
        headers = {topics.HEADER_KIND: _kind(kept), topics.HEADER_REASON: kept.reason}
        records.append(NewRecord(topics.DEAD_LETTERS, kept.source or kept.id, kept.to_json(), headers))
        log.warning(
            "dead letter", id=letter.id, reason=letter.reason, stage=letter.stage, source=letter.source,
            event_id=letter.event_id, field=letter.field,
        )  # fmt: skip
    stack.log.append(records)
    keys = [letter.event_key for letter in letters if letter.event_key]
    if keys:
        stack.features.forget_keys(keys)


def _kind(letter: DeadLetter) -> str:
    """What the dead record was of: its own word where that is one of ours."""
    said = letter.headers.get(topics.HEADER_KIND, "")
    if said in KINDS or said == "triggers":
        return said
    return "tiles" if letter.stage in ("tiles", "build") else "features"


def scan_topic(log_: EventLog, topic: str) -> Iterator[Record]:
    """Every record that a topic holds now, partition by partition."""
    for partition, extent in sorted(log_.extents(topic).items()):
        offset = extent.begin
        while offset < extent.end:
            try:
                records = log_.read(topic, partition, offset, max_records=2_000)
            except OffsetOutOfRange as moved:
                if moved.begin <= offset:
                    break
                offset = moved.begin
                continue
            if not records:
                break
            yield from records
            offset = records[-1].offset + 1


def list_dead_letters(
    log_: EventLog, wanted: Callable[[DeadLetter], bool] = lambda _: True, *, payloads: bool = True
) -> list[Listed]:
    """Dead letters that are in the log, oldest first, each once; one that died again after a replay is not replayed.

    Args:
        log_: The event log.
        wanted: Which ones.
        payloads: Whether they keep their payloads; a listing needs none, and `read_letter` reads one.
    """
    found: dict[str, Listed] = {}
    replayed: dict[str, int] = {}
    junk, first = 0, dict[str, int | str]()
    for record in scan_topic(log_, topics.DEAD_LETTERS):
        marker = record.headers.get(topics.HEADER_REPLAY)
        if marker and record.value is None:
            replayed[marker] = record.timestamp_ms
            continue
        try:
            letter = DeadLetter.from_json(record.value or b"")
        except DeadLetterError as fault:
            if not junk:
                first = {"partition": record.partition, "offset": record.offset, "error": str(fault)}
            junk += 1
            continue
        if letter.origin is None:
            # It has the same id where it dies again. Letter and mark have one key, hence one partition and an order.
            replayed.pop(letter.id, None)
        if letter.id not in found and wanted(letter):
            kept = letter if payloads else replace(letter, payload=b"")
            found[letter.id] = Listed(kept, record.partition, record.offset, None)
    if junk:
        log.warning("records of dead-letters that are none", records=junk, first=first)
    listed = [replace(one, replayed_ms=replayed.get(one.letter.id)) for one in found.values()]
    return sorted(listed, key=lambda one: (one.letter.at_ms, one.letter.id))


def payload_of(stack: Stack, letter: DeadLetter) -> bytes:
    """The raw payload, wherever it is kept.

    Raises:
        LookupError: It was in the inbox and is not there any more.
    """
    if letter.pointer is None:
        return letter.payload
    data = stack.tiles.get(letter.pointer)
    if data is None:
        raise LookupError(f"dead letter {letter.id}: its payload {letter.pointer} is not in the inbox any more")
    return data


def read_letter(log_: EventLog, listed: Listed) -> DeadLetter:
    """A dead letter that was listed, with its payload.

    Raises:
        LookupError: Retention has taken it since.
    """
    try:
        records = log_.read(topics.DEAD_LETTERS, listed.partition, listed.offset, max_records=1)
    except OffsetOutOfRange:
        records = []
    if not records or records[0].offset != listed.offset:
        raise LookupError(f"dead letter {listed.letter.id}: the log does not keep it any more")
    return DeadLetter.from_json(records[0].value or b"")


def replay(stack: Stack, letters: Sequence[DeadLetter], *, payload: bytes | None = None) -> int:
    """Send dead letters on their way again, each to where it came from; how many.

    Twice is harmless, and nothing newer is undone: an edit is known by event id and payload and guarded by its version,
    as a fence is; a position that is not newer than its device's last is late; a trigger is known by its key.

    Args:
        stack: The ports.
        letters: What to replay.
        payload: A mended payload to send instead; only with a single letter.

    Raises:
        LookupError: A payload is not in the inbox any more; nothing was sent.
        ValueError: One cannot be sent as it is: its payload has to be mended; nothing was sent.
    """
    records: list[NewRecord] = []
    frames: list[bytes] = []
    for letter in letters:
        if letter.stage == "build":
            key = letter.headers.get("tile", "")
            Tile.from_key(key)
            records.append(NewRecord(topics.TILES, key, None))
            continue
        body = payload if payload is not None else payload_of(stack, letter)
        home = home_of(letter)
        if home == topics.TRIGGERS:
            frames.append(_frame(letter, body))
        else:
            records.append(_again(stack, letter, home, body))
    resending.wish(stack.ledger, frames)
    records += [
        NewRecord(topics.DEAD_LETTERS, letter.source or letter.id, None, {topics.HEADER_REPLAY: letter.id})
        for letter in letters
    ]
    stack.log.append(records)
    return len(letters)


def home_of(letter: DeadLetter) -> str:
    """The topic to which a letter goes back: the one that it stood on; what never stood on one, by what it is."""
    kind = letter.headers.get(topics.HEADER_KIND)
    if letter.stage in ("tiles", "build"):
        return topics.TILES
    if kind == "triggers":
        return topics.TRIGGERS
    if letter.origin is not None and letter.origin.topic in (topics.POSITIONS, topics.FENCES):
        return letter.origin.topic
    if letter.stage == "route":
        return topics.POSITIONS
    return topics.RAW


def _again(stack: Stack, letter: DeadLetter, home: str, body: bytes) -> NewRecord:
    """The record by which a letter goes back to a topic."""
    headers = {k: v for k, v in letter.headers.items() if k != topics.HEADER_POINTER}
    headers[topics.HEADER_REPLAY] = letter.id
    if home == topics.TILES:
        # Its key named no tile: the value has to.
        return NewRecord(home, None, body, headers)
    if home == topics.POSITIONS:
        return _position(letter, body, headers)
    sha = hashlib.sha256(body).hexdigest()
    headers |= {topics.HEADER_SHA256: sha, topics.HEADER_SOURCE: letter.source}
    if letter.event_id is not None:
        headers[topics.HEADER_EVENT_ID] = letter.event_id
    if home == topics.FENCES:
        # Its version is the time of receipt where it says none: of the first receipt, not of this.
        headers.setdefault(topics.HEADER_RECEIVED_MS, str(letter.at_ms))
        if not letter.source:
            del headers[topics.HEADER_SOURCE]
    if len(body) > MAX_RECORD_BYTES * 9 // 10:
        stack.tiles.put(inbox_object(sha), body)
        headers[topics.HEADER_POINTER] = inbox_object(sha)
        body = b""
    return NewRecord(home, f"{letter.source}:{letter.feature_id or letter.event_id or letter.id}", body, headers)


def _position(letter: DeadLetter, body: bytes, headers: dict[str, str]) -> NewRecord:
    """A position as the edge writes it; nothing of it stands in an error.

    Its time may be said as it stands in the record that died, in `event_time_ms` alone.
    """
    try:
        value: Any = loads(body)
        if isinstance(value, list) and len(value) == 1:
            (value,) = value
        if isinstance(value, dict) and not {"time", "time_ms", "time_s"} & value.keys() and "event_time_ms" in value:
            value = {**value, "time_ms": value["event_time_ms"]}
        event = parse(PositionEvent, value)
    except (EnvelopeError, ValueError) as fault:
        field = fault.field if isinstance(fault, EnvelopeError) else "$"
        raise ValueError(
            f"dead letter {letter.id}: its payload is no position ({field} is at fault): send it with --payload FILE"
        ) from None
    record = msgspec.json.encode(position_value(event))
    return NewRecord(topics.POSITIONS, event.device_id, record, {**headers, topics.HEADER_KIND: "positions"})


def _frame(letter: DeadLetter, body: bytes) -> bytes:
    try:
        decode(body)
    except FrameError as fault:
        raise ValueError(f"dead letter {letter.id}: its payload is no trigger's frame ({fault})") from None
    return body


def now_ms() -> int:
    """Milliseconds since the epoch, UTC."""
    return time.time_ns() // 1_000_000
