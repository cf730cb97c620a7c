"""Can this process reach what its settings name? One look at each port, which changes nothing that is there.

`geo-assets doctor` prints all of it; `geo-assets up` asks before it starts anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from geo_assets import ports
from geo_assets.services.migrating import pending
from geo_assets.stack import Stack

if TYPE_CHECKING:
    from pydantic import SecretStr

    from geo_assets.settings import Settings


class NotReady(Exception):
    """A service answers, and something in it is missing: the message says what, and what mends it."""


Look = Callable[[], str]
"""Returns a note, or raises what is wrong."""


def where(url: SecretStr | str) -> str:
    """Host, port and path of a URL: nothing in it is a secret."""
    parts = urlsplit(url if isinstance(url, str) else url.get_secret_value())
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.hostname or ''}{port}{parts.path}"


def looks(settings: Settings) -> Iterator[tuple[str, Look]]:
    """A look at each service that the settings name; the embedded adapters' files are the home's, looked at with it."""
    if settings.kafka_servers:
        yield f"Kafka {settings.kafka_servers}", lambda: _kafka(settings)
    if settings.redis_url is not None:
        yield f"Redis {where(settings.redis_url)}", lambda: _redis(settings)
    store = settings.feature_store_url or settings.postgres_url
    if store is not None:
        yield f"feature store {where(store)}", lambda: _feature_store(settings)
    ledger = settings.ledger_url or settings.postgres_url
    if ledger is not None:
        yield f"ledger {where(ledger)}", lambda: _ledger(settings)
    if settings.tile_store_url:
        yield f"tile store {settings.tile_store_url}", lambda: _tile_store(settings)
    if settings.purge_urls:
        yield f"caches {settings.purge_urls}", lambda: _caches(settings)


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


def _feature_store(settings: Settings) -> str:
    _migrated(settings, "feature_store")
    with Stack(settings) as stack:
        return f"{sum(stack.features.counts().by_layer.values()):,} features"


def _ledger(settings: Settings) -> str:
    _migrated(settings, "ledger")
    with Stack(settings) as stack:
        return f"{stack.ledger.counts().tiles:,} tiles"


def _migrated(settings: Settings, component: str) -> None:
    steps = pending(settings).get(component, 0)
    if steps:
        raise NotReady(f"its schema is {steps} migrations behind: run geo-assets migrate")


def _tile_store(settings: Settings) -> str:
    store = ports.open_tile_store(settings)
    name = ports.inbox_object(f"doctor-{os.getpid()}")
    try:
        store.put(name, b"doctor")
        back = store.get(name)
        store.delete([name])
    finally:
        store.close()
    if back != b"doctor":
        raise NotReady(f"{name} was put and does not come back: is GEO_ASSETS_TILE_STORE_URL a replica that lags?")
    return "takes an object and gives it back"


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
