"""Can this process reach what its settings name? One look at each port, which changes nothing that is there.

`geo-assets doctor` prints all of it; `geo-assets up` asks before it starts anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from geo_assets import addresses, ports
from geo_assets.configuration import ConfigurationError
from geo_assets.services.migrating import pending
from geo_assets.stack import Stack

if TYPE_CHECKING:
    from geo_assets.settings import Settings


class NotReady(Exception):
    """A service answers, and something in it is missing: the message says what, and what mends it."""


Look = Callable[[], str]
"""Returns a note, or raises what is wrong."""


def where(settings: Settings, field: str) -> str:
    """A setting and the place that it names, for a message: host, port and path, or nothing where it is no address."""
    value = getattr(settings, field)
    setting = f"GEO_ASSETS_{field.upper()}"
    if value is None:
        return setting
    try:
        place = addresses.places(addresses.KINDS[field], value if isinstance(value, str) else value.get_secret_value())
    except addresses.AddressError:
        return setting
    return f"{place} ({setting})"


def looks(settings: Settings) -> Iterator[tuple[str, Look]]:
    """A look at each service that the settings name; the embedded adapters' files are the home's, looked at with it."""
    if settings.kafka_servers:
        yield f"Kafka {where(settings, 'kafka_servers')}", lambda: _kafka(settings)
    if settings.redis_url is not None:
        yield f"Redis {where(settings, 'redis_url')}", lambda: _redis(settings)
    if store := _named(settings, "feature_store_url", "postgres_url"):
        yield f"feature store {where(settings, store)}", lambda: _feature_store(settings, store)
    if ledger := _named(settings, "ledger_url", "postgres_url"):
        yield f"ledger {where(settings, ledger)}", lambda: _ledger(settings)
    if settings.stack == "production":
        catalog = _named(settings, "dagster_postgres_url", "postgres_url") or "dagster_postgres_url"
        yield f"Dagster's storage {where(settings, catalog)}", lambda: _dagster_storage(settings)
    if settings.tile_store_url:
        yield f"tile store {where(settings, 'tile_store_url')}", lambda: _tile_store(settings)
        if settings.tile_store_role:
            yield "tile store's role (GEO_ASSETS_TILE_STORE_ROLE)", lambda: _tile_store_role(settings)
    if settings.purge_urls:
        yield f"caches {where(settings, 'purge_urls')}", lambda: _caches(settings)


def _named(settings: Settings, *fields: str) -> str | None:
    """The first of the fields that is set."""
    return next((field for field in fields if getattr(settings, field) is not None), None)


def _kafka(settings: Settings) -> str:
    from resources.event_log.kafka import KafkaEventLog

    assert settings.kafka_servers
    log = KafkaEventLog(ports.kafka_options(settings, settings.kafka_servers))
    try:
        there = log.topics()
        absent = [spec.name for spec in ports.topic_specs(settings) if spec.name not in there]
    finally:
        log.close()
    if absent:
        raise NotReady(
            f"topics {', '.join(absent)} are missing below the prefix {settings.kafka_topic_prefix!r} "
            "(GEO_ASSETS_KAFKA_TOPIC_PREFIX); geo-assets up makes them where it may"
        )
    return f"{len(there)} topics"


def _redis(settings: Settings) -> str:
    guard = ports.open_guard(settings)
    try:
        guard.get("doctor")
    finally:
        guard.close()
    return "answers"


def _feature_store(settings: Settings, field: str) -> str:
    import psycopg

    from resources.postgres import conninfo, explained, postgis_lacking

    url, setting = getattr(settings, field).get_secret_value(), f"GEO_ASSETS_{field.upper()}"
    with explained(ConfigurationError, setting, url), psycopg.connect(conninfo(url)) as connection:
        lacking = postgis_lacking(connection)
    if lacking is not None:
        raise NotReady(f"{lacking} ({setting})")
    _migrated(settings, "feature_store")
    with Stack(settings) as stack:
        return f"{sum(stack.features.counts().by_layer.values()):,} features"


def _ledger(settings: Settings) -> str:
    _migrated(settings, "ledger")
    with Stack(settings) as stack:
        return f"{stack.ledger.counts().tiles:,} tiles"


def _migrated(settings: Settings, component: str) -> None:
    steps = pending(settings, component).get(component, 0)
    if steps:
        raise NotReady(f"its schema is {steps} migrations behind: run geo-assets migrate")


def _dagster_storage(settings: Settings) -> str:
    import psycopg

    from geo_assets import dagster_home
    from resources.postgres import conninfo, explained

    url, schema = dagster_home.storage_url(settings), dagster_home.schema(settings)
    with (
        explained(ConfigurationError, dagster_home.storage_setting(settings), url),
        psycopg.connect(conninfo(url)) as connection,
    ):
        there = connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (schema,)).fetchone()
    return "answers" if there else f"answers; geo-assets up makes its schema {schema}"


def _tile_store(settings: Settings) -> str:
    store = ports.open_tile_store(settings)
    name = ports.inbox_object(f"doctor-{os.getpid()}")
    try:
        # Some servers make a bucket for the first object that is put into it: first see that it is there.
        next(iter(store.list(name)), None)
        store.put(name, b"doctor")
        back = store.get(name)
        store.delete([name])
    finally:
        store.close()
    if back != b"doctor":
        raise NotReady(f"{name} was put and does not come back: is GEO_ASSETS_TILE_STORE_URL a replica that lags?")
    return "takes an object and gives it back"


def _tile_store_role(settings: Settings) -> str:
    """What a run does: it assumes the role, and writes where tiles are."""
    store = ports.open_tile_store(settings, scoped=True)
    name = ports.tile_object(f"doctor-{os.getpid()}")
    try:
        store.put(name, b"doctor")
        store.delete([name])
    finally:
        store.close()
    return f"is assumed and may write below {ports.TILES_FOLDER}"


def _caches(settings: Settings) -> str:
    purge = ports.open_purge(settings)
    assert purge is not None
    try:
        failed = purge.purge([f"{settings.tiles_url}/tiles/22/0/0.mvt"])
    finally:
        purge.close()
    if failed:
        raise NotReady("a cache does not take PURGE requests; look at GEO_ASSETS_PURGE_URLS and the cache's own rules")
    return "take purges"
