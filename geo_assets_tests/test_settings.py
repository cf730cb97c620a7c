"""Settings: every address is refused before anybody connects, by its setting's name, and without what is in it."""

from __future__ import annotations

import os
import traceback
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import settings as limits
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from geo_assets import addresses
from geo_assets.cli import explain
from geo_assets.settings import Settings

SECRET = "SECRETPW"
FIELDS = sorted(addresses.KINDS)

GOOD = [
    ("kafka_servers", "kafka:9092", "kafka:9092"),
    ("kafka_servers", "b-1.example.org:9096, b-2.example.org:9096", "b-1.example.org:9096, b-2.example.org:9096"),
    ("kafka_servers", "[::1]:9092", "[::1]:9092"),
    ("redis_url", f"redis://:{SECRET}@redis:6379/0", "redis:6379/0"),
    ("redis_url", f"rediss://me:{SECRET}%40%2F@redis.example.org", "redis.example.org"),
    ("redis_url", f"redis://redis?password={SECRET}", "redis"),
    ("redis_url", f"unix://:{SECRET}@/run/redis.sock?db=1", "/run/redis.sock"),
    (
        "postgres_url",
        f"postgresql://me:{SECRET}@db:5432/maps?sslmode=verify-full&sslrootcert=/etc/a.pem",
        "db:5432/maps",
    ),
    ("postgres_url", f"postgres://me:{SECRET}@one:5432,two:5433/maps?connect_timeout=3", "one:5432,two:5433/maps"),
    ("postgres_url", f"postgresql://me:{SECRET}@/maps?host=/run/postgresql", "a socket of this machine/maps"),
    ("dagster_postgres_url", f"postgresql://me:{SECRET}@db/maps?options=-csearch_path%3Dx", "db/maps"),
    ("tile_store_url", "s3://my-maps/tiles/of/all/", "s3://my-maps/tiles/of/all/"),
    ("tile_store_url", "gs://my-maps", "gs://my-maps"),
    ("s3_endpoint", "http://127.0.0.1:8333", "127.0.0.1:8333"),
    ("s3_endpoint", "https://account.example.org/storage/v1/s3", "account.example.org/storage/v1/s3"),
    ("sts_endpoint", "https://sts.eu-west-1.amazonaws.com", "sts.eu-west-1.amazonaws.com"),
    ("purge_urls", f"http://me:{SECRET}@cache:6081/, http://[::1]:80", "cache:6081, [::1]:80"),
    ("public_tiles_url", "https://maps.example.org/tiles/", "maps.example.org/tiles"),
]

BAD = [
    ("kafka_servers", f"user:{SECRET}@kafka:9092"),
    ("kafka_servers", f"kafka:{SECRET}"),
    ("kafka_servers", "kafka:9092,kafka:99999"),
    ("kafka_servers", ","),
    ("redis_url", f"redis://:{SECRET}/abc@h"),
    ("redis_url", f"redis://:{SECRET}[@h"),
    ("redis_url", f"redis://:{SECRET}#@h"),
    ("redis_url", f"redis://:{SECRET}%zz@h"),
    ("redis_url", f"redis://:{SECRET}@h/zero"),
    ("postgres_url", f"postgresql://me:%bb{SECRET}@h/x"),
    ("redis_url", f"http://:{SECRET}@h"),
    ("redis_url", f"redis://:{SECRET}@"),
    ("postgres_url", f"postgresql://geo_assets:{SECRET}/q@127.0.0.1:1/x"),
    ("postgres_url", f"postgresql://geo_assets:1/{SECRET}@127.0.0.1:1/x"),
    ("postgres_url", f"postgresql://geo_assets:{SECRET}@db@127.0.0.1:1/x"),
    ("postgres_url", f"host=db user=geo_assets password={SECRET}"),
    ("feature_store_url", f"foo:{SECRET}"),
    ("ledger_url", f"{SECRET}@foo"),
    ("dagster_postgres_url", f"postgresql://me:{SECRET}@db:port/maps"),
    ("postgres_url", f"postgresql://me:{SECRET}@db/maps?{SECRET}"),
    ("tile_store_url", f"s3://AKIA:{SECRET}@b/tiles"),
    ("tile_store_url", f"s3://AKIA:{SECRET}/x@b/tiles"),
    ("tile_store_url", "s3://"),
    ("tile_store_url", "file:///tmp"),
    ("s3_endpoint", "127.0.0.1:8333"),
    ("s3_endpoint", f"http://me:{SECRET}@s3:8333"),
    ("s3_endpoint", "http://"),
    ("sts_endpoint", "sts.eu-west-1.amazonaws.com"),
    ("purge_urls", f"http://u:{SECRET}/@cache:6081"),
    ("purge_urls", "http://cache:6081/path"),
    ("public_edge_url", f"https://me:{SECRET}@edge.example.org"),
]


def settings_with(**values: Any) -> Settings:
    """Settings of these, as texts that pydantic has yet to read."""
    return Settings(**values)


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("GEO_ASSETS_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(("field", "value", "place"), GOOD)
def test_an_address_is_taken_and_shown_without_its_password(field: str, value: str, place: str) -> None:
    given = getattr(settings_with(**{field: value}), field)
    assert (given.get_secret_value() if isinstance(given, SecretStr) else given) == value
    assert addresses.places(addresses.KINDS[field], value) == place


@pytest.mark.parametrize(("field", "value"), BAD)
def test_no_address_is_refused_by_name_with_what_is_expected_and_never_with_its_value(field: str, value: str) -> None:
    with pytest.raises(ValidationError) as found:
        settings_with(**{field: value})
    line = explain(found.value)
    assert line.startswith(f"GEO_ASSETS_{field.upper()} ")
    assert addresses.KINDS[field].expected in line
    assert "\n" not in line
    for said in (line, str(found.value), "".join(traceback.format_exception(found.value))):
        assert SECRET not in said
        assert len(value) < 8 or value not in said


JUNK = st.text("ab1:/?#@[]%&=,. ", max_size=6) | st.text(max_size=6)
"""What a parser may stumble over, around the password."""


@limits(max_examples=400, deadline=None)
@given(
    st.sampled_from(FIELDS),
    st.sampled_from(
        ["", "://", *(f"{s}://" for s in ("redis", "rediss", "unix", "postgresql", "postgres", "s3", "http"))]
    ),
    JUNK,
    JUNK,
    st.sampled_from(["@h", "@h:1", "@h:1/x", "@b/tiles", "@", " host=h"]),
)
@example("postgres_url", "postgresql://", "geo_assets:", "/q", "@127.0.0.1:1/x")
@example("postgres_url", "", "host=h password=", "", " host=h")
@example("redis_url", "redis://", ":", "[", "@h")
@example("purge_urls", "http://", "me", "", "@h")
@example("redis_url", "redis://", "me", "", "@h")
@example("postgres_url", "postgresql://", "me", "", "@h:1/x")
def test_whatever_stands_around_a_password_no_message_shows_it(
    field: str, scheme: str, before: str, after: str, end: str
) -> None:
    text = f"{scheme}{before}:{SECRET}{after}{end}"
    assert [said for said in messages(field, text) if SECRET in said] == []


def messages(field: str, text: str) -> list[str]:
    """All that is said of a setting with this value, taken or not, before anybody connects."""
    from geo_assets.services.reachable import looks, where
    from resources import postgres

    try:
        current = settings_with(**{field: text})
    except ValidationError as fault:
        said = [explain(fault), str(fault)]
    else:
        said = [where(current, field), repr(current), str(current), *(name for name, _ in looks(current))]
    return [*said, postgres.where(text)]


def test_every_wrong_address_is_told_at_once() -> None:
    with pytest.raises(ValidationError) as found:
        Settings(redis_url=SecretStr("x"), s3_endpoint="y")
    assert "GEO_ASSETS_REDIS_URL" in explain(found.value)
    assert "GEO_ASSETS_S3_ENDPOINT" in explain(found.value)


@pytest.mark.parametrize("blank", ["", "  ", "\t"])
def test_a_setting_without_a_value_is_not_set(blank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KAFKA_SERVERS", "REDIS_URL", "POSTGRES_URL", "TILE_STORE_URL", "EDGE_PORT", "KAFKA_SASL_PASSWORD"):
        monkeypatch.setenv(f"GEO_ASSETS_{name}", blank)
    found = Settings()
    assert (found.kafka_servers, found.redis_url, found.postgres_url, found.tile_store_url) == (None,) * 4
    assert found.kafka_sasl_password is None
    assert found.edge_port == 8787
    assert Settings(redis_url=SecretStr(blank)).redis_url is None


@pytest.mark.parametrize("name", ["KAFKA_SERVERS", "REDIS_URL", "POSTGRES_URL", "TILE_STORE_URL"])
def test_the_production_stack_refuses_an_empty_setting_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {
        "STACK": "production",
        "KAFKA_SERVERS": "kafka:9092",
        "REDIS_URL": "redis://redis",
        "POSTGRES_URL": "postgresql://db/maps",
        "TILE_STORE_URL": "s3://maps/tiles",
    }
    for each, value in (whole | {name: " "}).items():
        monkeypatch.setenv(f"GEO_ASSETS_{each}", value)
    with pytest.raises(ValidationError, match=f"GEO_ASSETS_{name}, which is not set"):
        Settings()


def test_blanks_around_an_address_are_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEO_ASSETS_POSTGRES_URL", "postgresql://db/maps \n")
    found = Settings().postgres_url
    assert found is not None
    assert found.get_secret_value() == "postgresql://db/maps"


def test_a_text_that_may_be_empty_stays_so_where_it_is_given_as_an_argument() -> None:
    assert Settings(redis_prefix="").redis_prefix == ""


@pytest.mark.parametrize("name", ["raw", "tiles", "tiles-hot", "fences", "triggers"])
def test_a_topic_that_is_never_shed_is_refused_by_name_at_the_start(name: str) -> None:
    with pytest.raises(ValidationError, match=rf"shed_topics\n.*{name} is never shed: "):
        Settings(shed_topics=f"positions,{name}")


def test_positions_may_be_declared_to_be_shed_and_nothing_is_by_default() -> None:
    assert Settings().shed_topics == ""
    assert Settings(shed_topics=" positions, ").shed_topics == "positions"


def test_a_small_tile_that_would_not_fit_into_its_share_is_refused() -> None:
    with pytest.raises(ValidationError, match="GEO_ASSETS_SMALL_VERTICES 10000 is above 9999, the quarter"):
        Settings(vertex_budget=39_999)
    assert Settings(vertex_budget=20_000, small_vertices=5_000).small_vertices == 5_000


@pytest.mark.parametrize("protocol", ["PLAINTEXT", "SSL", "SASL_PLAINTEXT"])
def test_tokens_of_a_role_go_out_encrypted_or_not_at_all(protocol: str) -> None:
    with pytest.raises(ValidationError, match="AWS_MSK_IAM needs GEO_ASSETS_KAFKA_SECURITY_PROTOCOL=SASL_SSL"):
        settings_with(kafka_sasl_mechanism="AWS_MSK_IAM", kafka_security_protocol=protocol)
    found = settings_with(kafka_sasl_mechanism="AWS_MSK_IAM", kafka_security_protocol="SASL_SSL")
    assert found.kafka_sasl_mechanism == "AWS_MSK_IAM"
