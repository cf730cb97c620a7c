"""Dead letters: how many of the last day's records could not be processed."""

import time

from dagster import AssetCheckSeverity

from geo_assets.catalog import DEAD_LETTERS
from geo_assets.checks.audit import Audit, check_of
from geo_assets.events import topics
from geo_assets.events.dead_letter import DeadLetter, DeadLetterError
from geo_assets.stack import Stack
from geo_assets.tiles import rules
from resources.event_log.protocol import EventLog, OffsetOutOfRange, Record

WINDOW_MS = 24 * 3_600_000
"""The last day: long enough to have records, short enough to show today's fault."""

LETTERS = 20_000
"""Most dead letters read; beyond, the rate is far over any limit."""

FEW_RECORDS = 100
"""Below as many records a single one is over the limit: worth a look, not a call at night."""


def first_offset_since(log: EventLog, topic: str, partition: int, since_ms: int) -> tuple[int, int]:
    """Where a partition's records of that time and later begin, and where the partition ends.

    A binary search: twenty reads of one record among a million. Stamps fall by seconds at most within a partition.
    """
    extent = log.extents(topic)[partition]
    low, high = extent.begin, extent.end
    while low < high:
        middle = (low + high) // 2
        try:
            found = log.read(topic, partition, middle, max_records=1)
        except OffsetOutOfRange as moved:
            low = max(moved.begin, middle + 1)
            continue
        if found and found[0].timestamp_ms < since_ms:
            low = found[0].offset + 1
        else:
            high = middle
    return low, extent.end


def count_since(log: EventLog, topic: str, since_ms: int) -> int:
    """How many records a topic got since then."""
    bounds = (first_offset_since(log, topic, partition, since_ms) for partition in log.extents(topic))
    return sum(end - begin for begin, end in bounds)


def letters_since(log: EventLog, since_ms: int) -> list[DeadLetter]:
    """The dead letters since then, one for each record they come from, at most `LETTERS`."""
    found: dict[object, DeadLetter] = {}
    for partition in log.extents(topics.DEAD_LETTERS):
        begin, end = first_offset_since(log, topics.DEAD_LETTERS, partition, since_ms)
        while begin < end and len(found) < LETTERS:
            records: list[Record] = log.read(topics.DEAD_LETTERS, partition, begin, max_records=2_000)
            if not records:
                break
            begin = records[-1].offset + 1
            for record in records:
                try:
                    letter = DeadLetter.from_json(record.value or b"")
                except DeadLetterError:
                    continue  # A mark that one was replayed.
                found.setdefault(letter.origin or letter.id, letter)
    return list(found.values())


def audit(stack: Stack) -> Audit:
    """Rates over the last day: of what came in, and of tiles that were hinted at."""
    since_ms = time.time_ns() // 1_000_000 - WINDOW_MS
    letters = letters_since(stack.log, since_ms)
    hints = sum(letter.stage in ("tiles", "build") for letter in letters)
    received = count_since(stack.log, topics.RAW, since_ms)
    hinted = sum(count_since(stack.log, topic, since_ms) for topic in topics.TILE_HINTS)
    limit = stack.settings.dead_letter_rate
    verdicts = [
        rules.rate(len(letters) - hints, received, limit, subject="records received"),
        rules.rate(hints, hinted, limit, subject="tiles hinted at"),
    ]
    reasons: dict[str, int] = {}
    for letter in letters:
        reasons[letter.reason] = reasons.get(letter.reason, 0) + 1
    failing = [verdict for verdict in verdicts if not verdict.passed]
    few = received + hinted < FEW_RECORDS
    return Audit(
        looked_at=received + hinted,
        faults=[fault for verdict in verdicts for fault in verdict.faults],
        summary="; ".join(verdict.summary for verdict in failing or verdicts),
        passed=not failing,
        numbers={
            "dead_letters": len(letters),
            "rate_received": verdicts[0].value,
            "rate_tiles": verdicts[1].value,
            "limit": limit,
            "reasons": ", ".join(f"{name} {count}" for name, count in sorted(reasons.items())) or "none",
        },
        severity=AssetCheckSeverity.WARN if few else AssetCheckSeverity.ERROR,
    )


dead_letter_rate = check_of(
    "dead_letter_rate",
    "At most 1 % (GEO_ASSETS_DEAD_LETTER_RATE) of the last day's records became dead letters. To see them: "
    "`geo-assets dead-letters list`.",
    audit,
    asset=DEAD_LETTERS,
)
