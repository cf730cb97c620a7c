"""Dead letters in the log: write, list, show, replay. What a dead letter is, events/dead_letter.py says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import structlog

from geo_assets.events import topics
from geo_assets.events.dead_letter import DeadLetter, DeadLetterError
from geo_assets.events.foreign import KINDS
from geo_assets.ports import MAX_RECORD_BYTES, inbox_object
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
    if said in KINDS:
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


def list_dead_letters(log_: EventLog, wanted: Callable[[DeadLetter], bool] = lambda _: True) -> list[Listed]:
    """Dead letters that are in the log, oldest first, each once."""
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
        if letter.id not in found and wanted(letter):
            found[letter.id] = Listed(letter, record.partition, record.offset, None)
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


def replay(stack: Stack, letters: Sequence[DeadLetter], *, payload: bytes | None = None) -> int:
    """Send dead letters on their way again; how many.

    A replay is keyed on event id and payload, so that sent twice it applies once; the version guard stays, so it never
    undoes something newer.

    Args:
        stack: The ports.
        letters: What to replay.
        payload: A mended payload to send instead; only with a single letter.
    """
    import hashlib

    from geo_assets.tiles.tile import Tile

    records: list[NewRecord] = []
    for letter in letters:
        if letter.stage == "build":
            key = letter.headers.get("tile", "")
            Tile.from_key(key)
            records.append(NewRecord(topics.TILES, key, None))
        elif letter.stage == "tiles":
            # Its key named no tile: the value has to.
            headers = {**letter.headers, topics.HEADER_REPLAY: letter.id}
            body = payload if payload is not None else payload_of(stack, letter)
            records.append(NewRecord(topics.TILES, None, body, headers))
        else:
            body = payload if payload is not None else payload_of(stack, letter)
            sha = hashlib.sha256(body).hexdigest()
            headers = {k: v for k, v in letter.headers.items() if k != topics.HEADER_POINTER}
            headers |= {topics.HEADER_REPLAY: letter.id, topics.HEADER_SHA256: sha, topics.HEADER_SOURCE: letter.source}
            if letter.event_id is not None:
                headers[topics.HEADER_EVENT_ID] = letter.event_id
            if len(body) > MAX_RECORD_BYTES * 9 // 10:
                stack.tiles.put(inbox_object(sha), body)
                headers[topics.HEADER_POINTER] = inbox_object(sha)
                body = b""
            records.append(
                NewRecord(
                    topics.RAW, f"{letter.source}:{letter.feature_id or letter.event_id or letter.id}", body, headers
                )
            )
        records.append(
            NewRecord(topics.DEAD_LETTERS, letter.source or letter.id, None, {topics.HEADER_REPLAY: letter.id})
        )
    if records:
        stack.log.append(records)
    return len(letters)


def now_ms() -> int:
    """Milliseconds since the epoch, UTC."""
    return time.time_ns() // 1_000_000
