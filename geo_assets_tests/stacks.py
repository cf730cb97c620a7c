"""Both stacks for tests: the embedded one, and the production one in a room of its own on the real services."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from geo_assets.settings import Settings
from geo_assets_tests.real_services import room, settings_of
from geo_assets_tests.waiting import PATIENCE, patient

STACKS = ("embedded", "production")

PREFIX = "GEO_ASSETS_"

KEPT = {
    "GEO_ASSETS_SERVICES", "GEO_ASSETS_BENCH_POSTGIS", "GEO_ASSETS_LAB", "GEO_ASSETS_LAB_CACHE", PATIENCE
}  # fmt: skip
"""Variables of tests and benchmarks themselves."""


def forget_settings() -> None:
    """Forget the platform that this shell is set up for: tests and benchmarks must never write into somebody's map."""
    for name in [name for name in os.environ if name.upper().startswith(PREFIX) and name not in KEPT]:
        del os.environ[name]


@contextmanager
def environment_of(stack: str, services: Mapping[str, str] | None = None) -> Iterator[dict[str, str]]:
    """Environment variables that choose a stack. The room that they name in each service is emptied at the end.

    Args:
        stack: `embedded` or `production`.
        services: Settings of services of the test's own; the shared ones where it is None.
    """
    if stack == "embedded":
        yield {}
        return
    found = dict(services or settings_of("kafka", "redis", "postgres", "s3"))
    name = room()
    found |= {
        "GEO_ASSETS_STACK": "production",
        "GEO_ASSETS_KAFKA_TOPIC_PREFIX": f"{name}.",
        "GEO_ASSETS_REDIS_PREFIX": f"{name}:",
        "GEO_ASSETS_POSTGRES_SCHEMA": name,
        "GEO_ASSETS_TILE_STORE_URL": f"{found['GEO_ASSETS_TILE_STORE_URL'].rstrip('/')}/{name}",
        "GEO_ASSETS_POSTGRES_POOL": "2",
    }
    with pytest.MonkeyPatch.context() as patch:
        # Credentials of the object store are where every AWS client looks: in the environment.
        for variable, value in found.items():
            if variable.startswith("AWS_"):
                patch.setenv(variable, value)
        try:
            yield found
        finally:
            empty_room(settings_from(found), name)


@contextmanager
def changes_of(stack: str) -> Iterator[dict[str, Any]]:
    """The same as arguments for `Settings`, with every table made."""
    from geo_assets.services.migrating import migrate_all

    with environment_of(stack) as environment:
        changes = fields_of(environment)
        if changes:
            migrate_all(Settings(**changes))
        yield changes


def fields_of(environment: Mapping[str, str]) -> dict[str, Any]:
    """Fields of `Settings` among environment variables."""
    found = {
        name[len(PREFIX) :].lower(): value for name, value in environment.items() if name.upper().startswith(PREFIX)
    }
    return {name: value for name, value in found.items() if name in Settings.model_fields}


def settings_from(environment: Mapping[str, str]) -> Settings:
    """The settings that a process with this environment has."""
    return Settings(**fields_of(environment))


def empty_room(settings: Settings, name: str) -> None:
    """Delete what tests left in the real services."""
    import psycopg
    import redis
    from confluent_kafka.admin import AdminClient
    from psycopg import sql

    from geo_assets.ports import open_tile_store

    assert settings.postgres_url is not None
    with psycopg.connect(settings.postgres_url.get_secret_value(), autocommit=True) as connection:
        for schema in (name, f"{name}_dagster"):
            connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema)))
    assert settings.redis_url is not None
    with redis.Redis.from_url(settings.redis_url.get_secret_value()) as server:
        keys = list(server.scan_iter(match=f"{settings.redis_prefix}*", count=1_000))
        if keys:
            server.delete(*keys)
    admin = AdminClient({"bootstrap.servers": settings.kafka_servers or ""})
    topics = [
        topic
        for topic in admin.list_topics(timeout=patient(30)).topics
        if topic.startswith(settings.kafka_topic_prefix)
    ]
    for deleted in (admin.delete_topics(topics) if topics else {}).values():
        deleted.result()
    store = open_tile_store(settings)
    store.delete([one.name for one in store.list()])
    store.close()
