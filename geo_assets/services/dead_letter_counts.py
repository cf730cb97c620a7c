"""How many records died, of what, whose and when: counted once each, as they come into `[dead-letters]`.

Numbers, reasons and sources only: no payload and no place is kept. Whoever asks brings the counts up to date; counts
and read positions are one value of the ledger, so that of several who do so at once one counts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from geo_assets.events import topics
from geo_assets.events.dead_letter import REASONS, DeadLetter, DeadLetterError
from resources.event_log.protocol import OffsetOutOfRange, Record

if TYPE_CHECKING:
    from geo_assets.stack import Stack

VALUE = "dead-letters.counts"
"""The ledger's named value."""

HOUR_MS = 3_600_000

HOURS = 48
"""Hours that are kept apart: a day to look at and one to compare it with."""

PAIRS = 200
"""Pairs of reason and source that one hour keeps apart; sources are named by whoever writes to the log."""

OTHER = "other"
"""The source of what goes beyond."""

READING_S = 5.0
"""How long one call reads: what is left is counted by the next one."""

PAGE = 2_000
"""Records of one read; the log bounds its bytes."""


@dataclass(slots=True)
class Counts:
    """What was counted.

    Args:
        topic: Id of the topic that the positions are of: one that was made anew is counted from its beginning.
        offsets: Next record of each partition.
        reasons: Reason -> dead letters, ever.
        replayed: Letters that were sent on their way again, ever.
        hours: Hour since the epoch -> `reason source` -> dead letters that came into the log then.
        behind: Whether there is more to count.
    """

    topic: str = ""
    offsets: dict[int, int] = field(default_factory=dict[int, int])
    reasons: dict[str, int] = field(default_factory=dict[str, int])
    replayed: int = 0
    hours: dict[int, dict[str, int]] = field(default_factory=dict[int, dict[str, int]])
    behind: bool = False

    @classmethod
    def from_json(cls, text: str | None) -> Counts:
        """From text; what cannot be read begins anew."""
        if text is None:
            return cls()
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError:
            return cls()

    def to_json(self) -> str:
        """As text."""
        return msgspec.json.encode(self).decode()

    @property
    def total(self) -> int:
        """Dead letters, ever."""
        return sum(self.reasons.values())

    def since(self, since_ms: int) -> dict[tuple[str, str], int]:
        """(reason, source) -> dead letters, of the hours that end after then."""
        found: dict[tuple[str, str], int] = {}
        for hour, pairs in self.hours.items():
            if (hour + 1) * HOUR_MS <= since_ms:
                continue
            for pair, number in pairs.items():
                reason, _, source = pair.partition(" ")
                found[reason, source] = found.get((reason, source), 0) + number
        return found

    def count(self, record: Record, now_ms: int) -> None:
        """Take in one record of `[dead-letters]`."""
        if record.value is None:
            self.replayed += bool(record.headers.get(topics.HEADER_REPLAY))
            return
        try:
            letter = DeadLetter.from_json(record.value)
        except DeadLetterError:
            return  # Whoever lists them says so.
        reason = letter.reason if letter.reason in REASONS else "internal"
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        # What was written long ago, and by a clock that is ahead, is in no hour that is shown.
        hour, newest = record.timestamp_ms // HOUR_MS, now_ms // HOUR_MS
        if newest - HOURS < hour <= newest:
            pairs = self.hours.setdefault(hour, {})
            pair = f"{reason} {letter.source or '-'}"
            pair = pair if pair in pairs or len(pairs) < PAIRS else f"{reason} {OTHER}"
            pairs[pair] = pairs.get(pair, 0) + 1

    def forget(self, now_ms: int) -> None:
        """Drop hours that are not shown any more."""
        oldest = now_ms // HOUR_MS - HOURS
        self.hours = {hour: pairs for hour, pairs in self.hours.items() if hour > oldest}


def stored(stack: Stack) -> Counts:
    """The counts as they were left; reads no log."""
    return Counts.from_json(stack.ledger.get_value(VALUE))


def advance(stack: Stack, now_ms: int) -> Counts:
    """Count what came since the last call, for at most a few seconds; the counts.

    Raises:
        LogUnavailable: Nothing was counted.
        LedgerUnavailable: Nothing was counted.
    """
    before = stack.ledger.get_value(VALUE)
    counts = Counts.from_json(before)
    topic = stack.log.topic_id(topics.DEAD_LETTERS)
    if counts.topic != topic:
        counts.topic, counts.offsets = topic, {}
    counts.behind = _read(stack, counts, now_ms)
    counts.forget(now_ms)
    after = counts.to_json()
    if after != before and not stack.ledger.set_value(VALUE, after, expect=before):
        return stored(stack)  # Somebody else counted the same meanwhile.
    return counts


def _read(stack: Stack, counts: Counts, now_ms: int) -> bool:
    until = time.monotonic() + READING_S
    for partition, extent in sorted(stack.log.extents(topics.DEAD_LETTERS).items()):
        offset = max(extent.begin, counts.offsets.get(partition, extent.begin))
        while offset < extent.end:
            if time.monotonic() >= until:
                return True
            try:
                records = stack.log.read(topics.DEAD_LETTERS, partition, offset, max_records=PAGE)
            except OffsetOutOfRange as moved:
                if moved.begin <= offset:
                    break
                offset = moved.begin
                continue
            if not records:
                break
            for record in records:
                counts.count(record, now_ms)
            offset = records[-1].offset + 1
        counts.offsets[partition] = offset
    return False


def by_reason(pairs: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """Sums over the sources, the most first."""
    sums: dict[str, int] = {}
    for (reason, _), number in pairs.items():
        sums[reason] = sums.get(reason, 0) + number
    return dict(sorted(sums.items(), key=lambda each: (-each[1], each[0])))
