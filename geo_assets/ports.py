"""Which adapter stands behind each port: settings in, plain client out. Light ports only, so that slim images load it.

The feature store is opened in `stack.py`: it needs numpy, which the edge and the tile server do without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from geo_assets.events import topics

if TYPE_CHECKING:
    from geo_assets.settings import Settings
    from resources.event_log.protocol import EventLog, TopicSpec
    from resources.guard.protocol import Guard
    from resources.ledger.protocol import Ledger
    from resources.tile_store.protocol import TileStore

MAX_RECORD_BYTES = 1_000_000
"""A record's limit: Kafka's default is 1 MB, and both stacks behave alike. Larger bodies go by pointer."""


def topic_specs(settings: Settings) -> list[TopicSpec]:
    """Every topic of the platform, as it is declared at start-up."""
    from resources.event_log.protocol import TopicSpec

    retention_ms = settings.retention_s * 1000
    return [
        TopicSpec(
            name,
            partitions=settings.log_partitions,
            # Dead letters wait for people: four times as long as the records they came from.
            retention_ms=retention_ms * 4 if name == topics.DEAD_LETTERS else retention_ms,
            # A dead letter carries its raw payload in base64 with what is said about it.
            max_record_bytes=2 * MAX_RECORD_BYTES if name == topics.DEAD_LETTERS else MAX_RECORD_BYTES,
        )
        for name in topics.ALL
    ]


def open_log(settings: Settings) -> EventLog:
    """The event log, with every topic declared."""
    from resources.event_log.sqlite import SqliteEventLog

    log = SqliteEventLog(settings.home / "event-log.db")
    log.ensure_topics(topic_specs(settings))
    return log


def open_guard(settings: Settings) -> Guard:
    """The guard."""
    from resources.guard.sqlite import SqliteGuard

    return SqliteGuard(settings.home / "guard.db")


def open_ledger(settings: Settings) -> Ledger:
    """The ledger."""
    from resources.ledger.sqlite import SqliteLedger

    return SqliteLedger(settings.home / "ledger.db")


def open_tile_store(settings: Settings) -> TileStore:
    """The tile store: objects below `tiles/`, bodies too large for the log below `inbox/`."""
    from resources.tile_store.folder import FolderTileStore

    return FolderTileStore(settings.home / "tiles")


def tile_object(object_name: str) -> str:
    """Name in the tile store of a tile's object: gzip bytes of `z/x/y/<revision>-<hash>`."""
    return f"tiles/{object_name}.mvt.gz"


def inbox_object(sha256: str) -> str:
    """Name in the tile store of a body that the log does not take in one piece."""
    return f"inbox/{sha256}"
