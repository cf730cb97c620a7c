"""Fences reach running jobs: what `[fences]` says, folded into sets with rising revisions.

A set is an object of an immutable name; which one is the newest, and how far `[fences]` was read for it, is one value
of the ledger. It moves by compare-and-set, so any number of processes may fold at once: one wins, the others look
again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from geo_assets.events import topics
from geo_assets.events.dead_letter import DeadLetter, Origin, Refused
from geo_assets.events.foreign import kept_headers
from geo_assets.events.json_text import JsonError, loads, shorten
from geo_assets.events.models import EnvelopeError, FenceEvent, feature_id_text, parse
from geo_assets.events.records import MAX_PART_ID, parts_of_key
from geo_assets.events.sources import is_source_name
from geo_assets.geofence.fences import Fence, FenceSet, Removed, fence_of
from geo_assets.geofence.index import FenceIndex
from geo_assets.ports import inbox_object
from geo_assets.services.dead_letters import write_dead_letters
from geo_assets.services.lost_records import remember_loss, stop_if_told
from resources.event_log.protocol import OffsetOutOfRange
from resources.tile_store.protocol import InvalidName, TileStoreError

if TYPE_CHECKING:
    from geo_assets.stack import Stack
    from resources.event_log.protocol import Record

log = structlog.get_logger()

VALUE = "geofence.fences"
"""The ledger's named value: see `Standing`."""

FOLDER = "geofence/fences/"
"""Where the tile store keeps sets: `<revision>-<hash>`."""

PIECE = 5_000
"""Records of one partition folded at once."""

_KEPT = 3
"""Indices held in memory: the one in force, the newest, and one between."""


class FencesLost(TileStoreError):
    """The object of a set that is still needed is gone."""


@dataclass(frozen=True, slots=True)
class Standing:
    """The newest set, and what it is made of.

    Args:
        revision: Of the set.
        name: Of its object; empty for the set without fences that everything begins with.
        topic: Identity of `[fences]`.
        offsets: Partition -> offset of the next record.
        fences: How many.
    """

    revision: int = 0
    name: str = ""
    topic: str = ""
    offsets: dict[int, int] = field(default_factory=dict[int, int])
    fences: int = 0

    def to_json(self) -> str:
        """As the ledger keeps it."""
        offsets = {str(partition): offset for partition, offset in sorted(self.offsets.items())}
        return json.dumps(
            {"revision": self.revision, "name": self.name, "topic": self.topic, "offsets": offsets,
             "fences": self.fences}
        )  # fmt: skip

    @classmethod
    def from_json(cls, text: str | None) -> Standing:
        """What the ledger kept; None: nothing yet."""
        if text is None:
            return cls()
        said = json.loads(text)
        offsets = {int(partition): offset for partition, offset in said["offsets"].items()}
        return cls(said["revision"], said["name"], said["topic"], offsets, said["fences"])


class FenceBook:
    """The sets of fences. For one thread at a time.

    Args:
        stack: Log, ledger and tile store.
    """

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._indices: dict[str, FenceIndex] = {}

    def standing(self) -> Standing:
        """The newest set, as the ledger says."""
        return Standing.from_json(self._stack.ledger.get_value(VALUE))

    def index(self, name: str) -> FenceIndex:
        """The index of a set, by the name of its object.

        Raises:
            FencesLost: There is no such object.
        """
        found = self._indices.pop(name, None)
        if found is None:
            found = FenceIndex(self._load(name))
            # Here a thread of its own waits for it, and no position.
            found.warm()
        self._indices[name] = found
        while len(self._indices) > _KEPT:
            del self._indices[next(iter(self._indices))]
        return found

    def _load(self, name: str) -> FenceSet:
        if not name:
            return FenceSet()
        data = self._stack.tiles.get(name)
        if data is None:
            raise FencesLost(f"the set of fences {name} is gone from the tile store; a snapshot or the ledger names it")
        return FenceSet.from_bytes(data)

    def fold(self) -> Standing:
        """Read what is new in `[fences]`, to its end, and say which set is the newest.

        What cannot be a fence, or contradicts one of its version, is a dead letter before the position moves past it.

        Raises:
            LogUnavailable, LedgerUnavailable, TileStoreError: Not now; what is not folded comes again.
        """
        while True:
            text = self._stack.ledger.get_value(VALUE)
            before = Standing.from_json(text)
            try:
                after = self._folded(before)
            except FencesLost:
                if self._stack.ledger.get_value(VALUE) != text:
                    continue  # Others folded on, and what they began with was no longer needed.
                raise
            if after is None:
                return before
            self._stack.ledger.set_value(VALUE, after.to_json(), expect=text)
            # Whether this won or another did: there may be more.

    def _folded(self, before: Standing) -> Standing | None:
        log_ = self._stack.log
        topic = log_.topic_id(topics.FENCES)
        offsets = dict(before.offsets) if before.topic == topic else {}
        records: list[Record] = []
        for partition, extent in sorted(log_.extents(topics.FENCES).items()):
            offset = offsets.get(partition, 0)
            if offset != extent.end:
                records += self._read(partition, offset, offsets)
        if not records:
            return None
        only = self._only_source(records)
        changes: list[Fence | Removed] = []
        whose: list[Record] = []
        letters: list[DeadLetter] = []
        for record in records:
            offsets[record.partition] = record.offset + 1
            change = self._change(record, only)
            if isinstance(change, Refused):
                letters.append(_letter(record, change))
            else:
                changes.append(change)
                whose.append(record)
        fences = self._indices[before.name].fence_set if before.name in self._indices else self._load(before.name)
        following, outcomes = fences.apply(changes)
        for record, outcome in zip(whose, outcomes, strict=True):
            if outcome == "version_conflict":
                conflict = Refused("version_conflict", "version", None, None, "the same version with other content")
                letters.append(_letter(record, conflict))
        write_dead_letters(self._stack, letters)
        name = before.name
        if following is not fences:
            data = following.to_bytes()
            name = f"{FOLDER}{following.revision}-{hashlib.sha256(data).hexdigest()[:16]}"
            self._stack.tiles.put(name, data)
            log.info(
                "fences", revision=following.revision, fences=len(following), applied=outcomes.count("applied"),
                stale=outcomes.count("stale"), duplicate=outcomes.count("duplicate"), dead_letters=len(letters),
            )  # fmt: skip
        return Standing(following.revision, name, topic, offsets, len(following))

    def _change(self, record: Record, only: str | None) -> Fence | Removed | Refused:
        pointer = record.headers.get(topics.HEADER_POINTER)
        if not pointer:
            return change_of(record, only)
        try:
            body = self._stack.tiles.get(pointer) if pointer.startswith(inbox_object("")) else None
        except InvalidName:
            body = None
        if body is None:
            return Refused("missing_body", "pointer", shorten(pointer), None, "the inbox has no such body")
        return change_of(record._replace(value=body), only)

    def _only_source(self, records: Sequence[Record]) -> str | None:
        """The only source there is, where there is but one and some record does not say its own."""
        if all(record.headers.get(topics.HEADER_SOURCE) for record in records):
            return None
        sources = self._stack.sources
        return next(iter(sources)) if len(sources) == 1 else None

    def _read(self, partition: int, offset: int, offsets: dict[int, int]) -> list[Record]:
        stack = self._stack
        try:
            return stack.log.read(topics.FENCES, partition, offset, max_records=PIECE)
        except OffsetOutOfRange as gone:
            if offset:
                # Nothing is read twice to harm: versions decide.
                stop_if_told(stack.settings, gone, "the fold of fences", "fences that changed meanwhile stay as before")
                log.error("fences were lost to retention", partition=partition, position=offset, oldest=gone.begin)
                remember_loss(stack.ledger, gone, time.time_ns() // 1_000_000)
            offsets[partition] = gone.begin
            return stack.log.read(topics.FENCES, partition, gone.begin, max_records=PIECE)

    def prune(self, revision: int) -> int:
        """Delete the objects of sets below a revision, which no snapshot needs any more; how many."""
        old = [
            stored.name
            for stored in self._stack.tiles.list(FOLDER)
            if (number := stored.name.removeprefix(FOLDER).partition("-")[0]).isdecimal() and int(number) < revision
        ]
        return self._stack.tiles.delete(old) if old else 0


def change_of(record: Record, only_source: str | None = None) -> Fence | Removed | Refused:
    """What a record of `[fences]` says, or why it says nothing.

    Args:
        record: Its header says whose the fence is, else the event's `source`, else its key before the colon.
        only_source: Whose it is where nothing says so.
    """
    if record.value is None:
        return Refused("null_value", None, None, None, "a fence is deleted by the action `delete`")
    received = record.headers.get(topics.HEADER_RECEIVED_MS, "")
    version = int(received) if received.isdecimal() and len(received) < 16 else record.timestamp_ms
    try:
        event = parse(FenceEvent, loads(record.value))
        source = _source_of(record, event, only_source)
        return fence_of(event, source=source, revision=version, crs=record.headers.get(topics.HEADER_CRS))
    except Refused as refusal:
        return refusal
    except JsonError as fault:
        return Refused("schema", "$", None, "JSON", str(fault))
    except EnvelopeError as fault:
        return Refused("schema", fault.field, fault.value, fault.limit, fault.problem)
    except Exception as fault:
        # Whatever a library finds wrong with a fence costs that fence and no other.
        return Refused("invalid_geometry", "geometry", None, None, f"{type(fault).__name__}: {fault}"[:500])


def _source_of(record: Record, event: FenceEvent, only_source: str | None) -> str:
    """Whose fence it is: fences of two sources are two fences, whatever their ids."""
    signed = record.headers.get(topics.HEADER_SOURCE)
    if signed and event.source is not None and event.source != signed:
        raise Refused("schema", "source", shorten(event.source), signed[:80], "is not the record's source")
    key = parts_of_key(record.key or "")
    of_key = key[0] if key[1] == feature_id_text(event.id) else None
    source = signed or event.source or of_key or only_source
    if source is None:
        where = "the header, a member of the event, or the key before its colon"
        raise Refused("schema", "source", None, where, "nothing says whose fence it is")
    if not is_source_name(source):
        raise Refused("schema", "source", shorten(source), "1..64 of A-Z a-z 0-9 . _ -", "is no source's name")
    return source


def _letter(record: Record, refusal: Refused) -> DeadLetter:
    headers = kept_headers(record.headers)
    # What it has as its version, where it says none: a replay has to have the same.
    headers.setdefault(topics.HEADER_RECEIVED_MS, str(record.timestamp_ms))
    pointer = headers.get(topics.HEADER_POINTER)
    return DeadLetter.refused(
        refusal,
        stage="validate",
        source=headers.get(topics.HEADER_SOURCE, "")[:80],
        at_ms=time.time_ns() // 1_000_000,
        event_id=headers.get(topics.HEADER_EVENT_ID, "")[:MAX_PART_ID] or None,
        origin=Origin(record.topic, record.partition, record.offset),
        payload=record.value or b"",
        pointer=pointer or None,
        headers={**headers, topics.HEADER_KIND: "fences"},
    )
