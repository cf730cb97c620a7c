"""Which adapter stands behind each port: settings in, plain client out. Light ports only, so that slim images load it.

The feature store is opened in `stack.py`: it needs numpy, which the edge and the tile server do without.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from geo_assets.events import topics

if TYPE_CHECKING:
    from geo_assets.settings import Settings
    from resources.alerts.protocol import Alerts
    from resources.event_log.kafka_options import KafkaOptions
    from resources.event_log.protocol import EventLog, TopicSpec
    from resources.guard.protocol import Guard
    from resources.ledger.protocol import Ledger
    from resources.purge.protocol import Purge
    from resources.tile_store.protocol import TileStore

TILES_FOLDER = "tiles/"
"""Where the tile store keeps tiles: the one folder that a run may write, unless it publishes a tileset."""

TILESETS_FOLDER = "tilesets/"
"""Where the tile store keeps published tilesets: `<name>/<version>/…`, each under a name that is never used again."""

SHADOW_FOLDER = "shadow/"
"""Where the tile store keeps what was built to be compared: no ledger names it, nobody is told, nothing serves it."""

MAX_RECORD_BYTES = 1_000_000
"""A record's limit: Kafka's default is 1 MB, and both stacks behave alike. Larger bodies go by pointer."""

TRIGGER_PARTITIONS = 12
"""Of `[triggers]`: its consumers may be that many. A keyed topic's count is not changed while anybody lags."""


def topic_specs(settings: Settings) -> list[TopicSpec]:
    """Every topic of the platform, as it is declared at start-up."""
    from resources.event_log.protocol import TopicSpec

    retention_ms = settings.retention_s * 1000
    return [
        TopicSpec(
            name,
            partitions=TRIGGER_PARTITIONS if name == topics.TRIGGERS else settings.log_partitions,
            # Dead letters wait for people: four times as long as the records they came from.
            retention_ms=retention_ms * 4 if name == topics.DEAD_LETTERS else retention_ms,
            # A dead letter carries its raw payload in base64 with what is said about it.
            max_record_bytes=2 * MAX_RECORD_BYTES if name == topics.DEAD_LETTERS else MAX_RECORD_BYTES,
        )
        for name in topics.ALL
    ]


def kafka_options(settings: Settings, servers: str) -> KafkaOptions:
    """How Kafka is reached, from the settings."""
    from resources.event_log.kafka_options import options_from

    password = settings.kafka_sasl_password
    return options_from(
        servers,
        topic_prefix=settings.kafka_topic_prefix,
        security_protocol=settings.kafka_security_protocol,
        sasl_mechanism=settings.kafka_sasl_mechanism,
        sasl_username=settings.kafka_sasl_username,
        sasl_password=password.get_secret_value() if password else None,
        ssl_ca=settings.kafka_ssl_ca,
        ssl_certificate=settings.kafka_ssl_certificate,
        ssl_key=settings.kafka_ssl_key,
        replication_factor=settings.kafka_replication_factor,
        min_insync_replicas=settings.kafka_min_insync_replicas,
        aws_region=settings.aws_region,
        aws_profile=settings.s3_profile,
    )


def open_log(settings: Settings) -> EventLog:
    """The event log, with every topic declared: Kafka where its servers are named."""
    log: EventLog
    if settings.kafka_servers:
        from resources.event_log.kafka import KafkaEventLog

        log = KafkaEventLog(kafka_options(settings, settings.kafka_servers))
    else:
        from resources.event_log.sqlite import SqliteEventLog

        log = SqliteEventLog(settings.home / "event-log.db")
    try:
        log.ensure_topics(topic_specs(settings))
    except BaseException:
        log.close()
        raise
    return log


def open_guard(settings: Settings) -> Guard:
    """The guard: Redis where its URL is set."""
    if settings.redis_url is not None:
        from resources.guard.redis import RedisGuard

        return RedisGuard(
            settings.redis_url.get_secret_value(), prefix=settings.redis_prefix, ssl_ca=settings.redis_ssl_ca
        )
    from resources.guard.sqlite import SqliteGuard

    return SqliteGuard(settings.home / "guard.db")


def open_ledger(settings: Settings) -> Ledger:
    """The ledger: Postgres where its URL is set."""
    url = settings.ledger_url or settings.postgres_url
    if url is not None:
        from resources.ledger.postgres import PostgresLedger

        return PostgresLedger(url.get_secret_value(), schema=settings.postgres_schema, pool=settings.postgres_pool)
    from resources.ledger.sqlite import SqliteLedger

    return SqliteLedger(settings.home / "ledger.db")


def open_tile_store(settings: Settings, *, scoped: bool = False, write_prefix: str = TILES_FOLDER) -> TileStore:
    """The tile store: objects below `tiles/`, bodies too large for the log below `inbox/`.

    Args:
        settings: An object store where its URL is set, else a folder.
        scoped: With credentials that write below one folder alone, where a role to assume is set: for runs.
        write_prefix: That folder.
    """
    if settings.tile_store_url is not None:
        from resources.tile_store.objects import ObjectTileStore

        return ObjectTileStore(
            settings.tile_store_url,
            endpoint=settings.s3_endpoint,
            region=settings.s3_region,
            profile=settings.s3_profile,
            role=settings.tile_store_role if scoped else None,
            sts_endpoint=settings.sts_endpoint or settings.s3_endpoint,
            write_prefix=write_prefix,
        )
    from resources.tile_store.folder import FolderTileStore

    return FolderTileStore(settings.home / "tiles")


def open_purge(settings: Settings) -> Purge | None:
    """The caches in front of the tile server; None where none is named."""
    if not settings.purge_urls or not settings.purge_urls.strip():
        return None
    from resources.purge.http import HttpPurge

    return HttpPurge([url.strip() for url in settings.purge_urls.split(",") if url.strip()])


def open_alerts(settings: Settings) -> Alerts:
    """Who is told of what fails: webhooks where they are named, else the log."""
    if settings.alert_webhook_urls is None:
        from resources.alerts.log import LogAlerts

        return LogAlerts()
    from geo_assets.events.signature import sign
    from resources.alerts.http import HttpAlerts

    secret = settings.alert_webhook_secret
    urls = settings.alert_webhook_urls.get_secret_value().split(",")
    return HttpAlerts(
        [url.strip() for url in urls if url.strip()],
        format=settings.alert_format,
        sign=None if secret is None else partial(sign, secret.get_secret_value()),
    )


def tile_object(object_name: str) -> str:
    """Name in the tile store of a tile's object: gzip bytes of `z/x/y/<revision>-<hash>`."""
    return f"{TILES_FOLDER}{object_name}.mvt.gz"


def inbox_object(sha256: str) -> str:
    """Name in the tile store of a body that the log does not take in one piece."""
    return f"inbox/{sha256}"
