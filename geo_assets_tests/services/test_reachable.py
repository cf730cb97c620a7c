"""A look at each service that is named: what is wrong there in one line, and nothing of a neighbour's fault."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from geo_assets.cli import explain
from geo_assets.configuration import ConfigurationError
from geo_assets.services.migrating import migrate_all
from geo_assets.services.reachable import NotReady, looks
from geo_assets.settings import Settings
from geo_assets_tests.postgres_rooms import PostgresRoom, postgres_room
from geo_assets_tests.real_services import room as name_of_a_room
from geo_assets_tests.real_services import settings_of
from resources.postgres import explained

NOWHERE = "postgresql://me:SECRETPW@127.0.0.1:1/maps"


def settings_with(**values: Any) -> Settings:
    """Settings of these, as texts that pydantic has yet to read."""
    return Settings(**values)


@pytest.fixture
def room() -> Iterator[PostgresRoom]:
    with postgres_room() as room:
        yield room


def answer(settings: Settings, kind: str) -> str:
    """What the look of this kind says, its fault too."""
    (look,) = (look for name, look in looks(settings) if name.startswith(kind))
    try:
        return look()
    except Exception as fault:
        return f"failed: {explain(fault)}"


def test_looks_are_named_by_kind_setting_and_place(tmp_path: Path) -> None:
    settings = settings_with(
        home=tmp_path,
        stack="production",
        kafka_servers="kafka:9092",
        redis_url="redis://:SECRETPW@redis/0",
        postgres_url=NOWHERE,
        ledger_url="postgresql://me:SECRETPW@other/maps",
        tile_store_url="s3://maps/tiles",
        tile_store_role="arn:aws:iam::1:role/x",
        purge_urls="http://me:SECRETPW@cache:6081",
    )
    assert [name for name, _ in looks(settings)] == [
        "Kafka kafka:9092 (GEO_ASSETS_KAFKA_SERVERS)",
        "Redis redis/0 (GEO_ASSETS_REDIS_URL)",
        "feature store 127.0.0.1:1/maps (GEO_ASSETS_POSTGRES_URL)",
        "ledger other/maps (GEO_ASSETS_LEDGER_URL)",
        "Dagster's storage 127.0.0.1:1/maps (GEO_ASSETS_POSTGRES_URL)",
        "tile store s3://maps/tiles (GEO_ASSETS_TILE_STORE_URL)",
        "tile store's role (GEO_ASSETS_TILE_STORE_ROLE)",
        "caches cache:6081 (GEO_ASSETS_PURGE_URLS)",
    ]
    for kind in ("feature store", "Dagster's storage"):
        said = answer(settings, kind)
        assert "refused" in said
        assert "GEO_ASSETS_POSTGRES_URL" in said
        assert "SECRETPW" not in said


def test_a_place_is_shown_only_of_an_address_that_is_one(tmp_path: Path) -> None:
    # As no validated settings can be: what a look shows does not depend on it.
    odd = settings_with(home=tmp_path).model_copy(
        update={"tile_store_url": "s3://AKIA:SECRETPW@b/x", "purge_urls": "SECRETPW@"}
    )
    assert [name for name, _ in looks(odd)] == ["tile store GEO_ASSETS_TILE_STORE_URL", "caches GEO_ASSETS_PURGE_URLS"]


def test_the_ledger_s_wrong_url_is_no_fault_of_the_feature_store(room: PostgresRoom, tmp_path: Path) -> None:
    good = settings_with(home=tmp_path, postgres_url=room.url, postgres_schema=room.schema)
    assert "migrations behind" in answer(good, "feature store")
    migrate_all(good)
    settings = settings_with(home=tmp_path, postgres_url=room.url, ledger_url=NOWHERE, postgres_schema=room.schema)
    assert answer(settings, "feature store") == "0 features"
    assert answer(settings, "ledger").startswith("failed: Postgres at 127.0.0.1:1")


def test_dagster_s_storage_is_looked_at_where_it_is(room: PostgresRoom, tmp_path: Path) -> None:
    settings = settings_with(
        home=tmp_path,
        stack="production",
        kafka_servers="kafka:9092",
        redis_url="redis://redis",
        postgres_url=NOWHERE,
        dagster_postgres_url=room.url,
        postgres_schema=room.schema,
        tile_store_url="s3://maps/tiles",
    )
    assert answer(settings, "Dagster's storage") == f"answers; geo-assets up makes its schema {room.schema}_dagster"


def test_a_database_without_postgis_says_so_and_what_to_do(room: PostgresRoom, tmp_path: Path) -> None:
    admin = settings_of("postgres")["TEST_POSTGRES_ADMIN_URL"]
    name = sql.Identifier(f"{room.schema}_bare")
    with psycopg.connect(admin, autocommit=True) as db:
        db.execute(sql.SQL("CREATE DATABASE {} OWNER geo_assets TEMPLATE template0").format(name))
    try:
        url = room.url.replace("/geo_assets?", f"/{room.schema}_bare?")
        settings = settings_with(home=tmp_path, postgres_url=url, postgres_schema=room.schema)
        for said in (answer(settings, "feature store"), _migrating(settings)):
            assert "PostGIS is" in said
            assert "CREATE EXTENSION postgis" in said
            assert "GEO_ASSETS_POSTGRES_URL" in said
            assert "unexpected" not in said
            assert "\n" not in said
    finally:
        with psycopg.connect(admin, autocommit=True) as db:
            db.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(name))


def _migrating(settings: Settings) -> str:
    with pytest.raises(ConfigurationError) as found:
        migrate_all(settings)
    return explain(found.value)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    s3 = settings_of("s3")
    for name, value in s3.items():
        if name.startswith("AWS_"):
            monkeypatch.setenv(name, value)
    return Settings(
        home=tmp_path,
        tile_store_url=f"{s3['GEO_ASSETS_TILE_STORE_URL']}/{name_of_a_room()}",
        s3_endpoint=s3["GEO_ASSETS_S3_ENDPOINT"],
        tile_store_role=s3["GEO_ASSETS_TILE_STORE_ROLE"],
    )


def test_a_bucket_takes_an_object_and_its_role_may_write_tiles(bucket: Settings) -> None:
    assert answer(bucket, "tile store s3") == "takes an object and gives it back"
    assert "may write below tiles/" in answer(bucket, "tile store's role")


def test_a_role_that_nobody_may_assume_is_found(bucket: Settings) -> None:
    wrong = bucket.model_copy(update={"tile_store_role": "arn:aws:iam::000000000000:role/Nobody"})
    assert answer(wrong, "tile store's role").startswith("failed: ")


def test_a_bucket_that_is_missing_is_not_made_by_looking(bucket: Settings) -> None:
    name = f"no-bucket-{name_of_a_room().replace('_', '-')}"
    missing = bucket.model_copy(update={"tile_store_url": f"s3://{name}/tiles"})
    for _ in range(2):
        assert f"no bucket '{name}'" in answer(missing, "tile store s3")


def test_what_a_look_finds_missing_is_an_error_for_people() -> None:
    assert explain(NotReady("it is not there")) == "it is not there"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://geo_assets:SECRETPW/q@127.0.0.1:1/x",
        "postgresql://geo_assets:1/SECRETPW@127.0.0.1:1/x",
        "foo:SECRETPW",
        "SECRETPW@foo",
        "host=127.0.0.1 port=SECRETPW",
    ],
)
def test_postgres_explains_a_url_that_cannot_be_read_without_a_part_of_it(url: str) -> None:
    with pytest.raises(ConfigurationError) as found, explained(ConfigurationError, "GEO_ASSETS_POSTGRES_URL", url):
        psycopg.connect(url, connect_timeout=2)
    assert "GEO_ASSETS_POSTGRES_URL is no postgresql:// URL" in str(found.value)
    assert "SECRETPW" not in str(found.value)


def test_an_answer_that_broke_off_is_a_server_that_is_away() -> None:
    with pytest.raises(ConfigurationError, match="lost synchronization"), explained(ConfigurationError, "S", NOWHERE):
        raise psycopg.DatabaseError("lost synchronization with server")
    with pytest.raises(psycopg.errors.DivisionByZero), explained(ConfigurationError, "S", NOWHERE):
        raise psycopg.errors.DivisionByZero("division by zero")


@pytest.mark.parametrize(
    "fault",
    [
        psycopg.errors.InsufficientPrivilege('permission denied to create extension "postgis"'),
        psycopg.errors.FeatureNotSupported('extension "postgis" is not available'),
    ],
)
def test_an_extension_that_cannot_be_made_is_named_with_what_to_do(fault: psycopg.Error) -> None:
    with (
        pytest.raises(ConfigurationError, match=r"\(S\): PostGIS is missing .*CREATE EXTENSION postgis"),
        explained(ConfigurationError, "S", NOWHERE),
    ):
        raise fault
    with pytest.raises(psycopg.errors.FeatureNotSupported), explained(ConfigurationError, "S", NOWHERE):
        raise psycopg.errors.FeatureNotSupported("something else")
