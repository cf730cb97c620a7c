"""How current things are: sources by what they sent, readers of the log by what waits, tilesets by their watermark.

A watermark is the newest event time of anything applied; how long ago that was says nothing of a source that rarely has
something to say. Silence is a fault only where `sources.yaml` says how often something is expected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from geo_assets.events import topics
from geo_assets.services.tileset import registry
from resources.event_log.protocol import OffsetOutOfRange

if TYPE_CHECKING:
    from geo_assets.stack import Stack
    from resources.event_log.protocol import EventLog
    from resources.feature_store.protocol import StoreCounts


@dataclass(frozen=True, slots=True)
class SourceCurrency:
    """How current a source is.

    Args:
        name: The source.
        watermark_ms: Newest event time applied of it, milliseconds since the epoch, UTC; 0 when nothing was.
        received_ms: When something new of it came in last; 0 where that is not known.
        silent_s: Seconds since then; None where it is not known.
        expected_s: Within which something is expected; None where silence is no fault.
    """

    name: str
    watermark_ms: int
    received_ms: int
    silent_s: float | None
    expected_s: float | None

    @property
    def silent(self) -> bool:
        """Whether it is silent for longer than expected. One that never sent is not: it may not have begun."""
        return self.expected_s is not None and self.silent_s is not None and self.silent_s > self.expected_s


def sources(stack: Stack, now_ms: int, *, counts: StoreCounts | None = None) -> list[SourceCurrency]:
    """Every source that is configured or ever wrote, by name.

    Args:
        stack: The ports.
        now_ms: Milliseconds since the epoch, UTC.
        counts: Of the feature store, where somebody counted already: it takes a while.
    """
    times = (counts or stack.features.counts()).sources
    found: list[SourceCurrency] = []
    for name in sorted({*stack.sources, *times}):
        watermark_ms, received_ms = times.get(name, (0, 0))
        silent_s = max(0.0, (now_ms - received_ms) / 1000) if received_ms else None
        configured = stack.sources.get(name)
        expected_s = configured.expect_every_s if configured is not None else None
        found.append(SourceCurrency(name, watermark_ms, received_ms, silent_s, expected_s))
    return found


@dataclass(frozen=True, slots=True)
class TilesetCurrency:
    """How current the version of a tileset is that is in force.

    Args:
        name: Of the tileset.
        version: In force.
        published_ms: When it was, milliseconds since the epoch, UTC.
        watermark_ms: Newest event time applied when it was read from the ledger; 0 where that was not written down.
        behind_s: Seconds of event time from there to the newest applied since; None where it is not known.
        commits: Tiles committed since, on the whole map; None where it is not known. What came late, with a time
            before the watermark, shows here alone.
    """

    name: str
    version: str
    published_ms: int
    watermark_ms: int
    behind_s: float | None
    commits: int | None


def tilesets(stack: Stack, *, counts: StoreCounts | None = None) -> list[TilesetCurrency]:
    """Every tileset of which a version is in force, by name.

    Args:
        stack: The ports.
        counts: As for `sources`.
    """
    versions = {
        name: version for name in registry.names(stack.ledger) if (version := _in_force(stack, name)) is not None
    }
    if not versions:
        return []
    newest_ms, commits = (counts or stack.features.counts()).watermark_ms, stack.ledger.counts().revision_sum
    return [
        TilesetCurrency(
            name,
            one.version,
            one.published_at_ms,
            one.watermark_ms,
            max(0.0, (newest_ms - one.watermark_ms) / 1000) if one.watermark_ms else None,
            max(0, commits - one.commits) if one.commits else None,
        )
        for name, one in versions.items()
    ]


def _in_force(stack: Stack, name: str) -> registry.Version | None:
    try:
        return registry.read(stack.ledger, name).in_force
    except registry.UnknownTileset:
        return None  # Its first publication has not begun to write.


@dataclass(frozen=True, slots=True)
class Reader:
    """What a reader of a topic has not worked off.

    Args:
        topic: The topic.
        records: How many records.
        oldest_ms: When the oldest of them was appended, milliseconds since the epoch, UTC; 0 for none.
    """

    topic: str
    records: int
    oldest_ms: int

    def age_s(self, now_ms: int) -> float:
        """How long the oldest waits."""
        return max(0.0, (now_ms - self.oldest_ms) / 1000) if self.oldest_ms else 0.0


def readers(stack: Stack) -> list[Reader]:
    """Ingest on `[raw]`, the ledger's positions on both topics of hints, and the routing run's on `[positions]`."""
    # It loads a geometry library, which nothing else here needs.
    from geo_assets.services.geofence_snapshots import in_force

    log, ledger = stack.log, stack.ledger
    offsets = {
        topics.RAW: log.committed(topics.INGEST_GROUP, topics.RAW),
        **{topic: ledger.positions(log.topic_id(topic)) for topic in topics.TILE_HINTS},
        topics.POSITIONS: in_force(ledger).offsets,
    }
    return [behind(log, topic, read) for topic, read in offsets.items()]


def behind(log: EventLog, topic: str, offsets: Mapping[int, int]) -> Reader:
    """Records that are not read, and when the oldest of them was appended. One read a partition.

    Args:
        log: The event log.
        topic: Which.
        offsets: Next record of each partition; a partition that is absent is read from its beginning.
    """
    lag, oldest_ms = 0, 0
    for partition, extent in log.extents(topic).items():
        offset = max(extent.begin, offsets.get(partition, extent.begin))
        if offset >= extent.end:
            continue
        lag += extent.end - offset
        try:
            found = log.read(topic, partition, offset, max_records=1)
        except OffsetOutOfRange:
            continue
        if found:
            oldest_ms = min(oldest_ms or found[0].timestamp_ms, found[0].timestamp_ms)
    return Reader(topic, lag, oldest_ms)
