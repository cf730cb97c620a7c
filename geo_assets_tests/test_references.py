"""Settings that stand for secrets of AWS, against a server that answers as Secrets Manager and Parameter Store do."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator

import boto3
import pytest
from moto.server import ThreadedMotoServer

from geo_assets import references
from geo_assets.settings import Settings
from resources.aws import references as stored

URL = "postgresql://geo_assets:word-that-stays-hidden@maps.internal:5432/geo_assets"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(autouse=True)
def account(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("GEO_ASSETS_", "AWS_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("GEO_ASSETS_AWS_REGION", "eu-west-1")
    stored._resolved.cache_clear()  # pyright: ignore[reportPrivateUsage]


@pytest.fixture(scope="module", autouse=True)
def secrets(server: str) -> None:
    keys = {"region_name": "eu-west-1", "endpoint_url": server, "aws_access_key_id": "a", "aws_secret_access_key": "b"}
    manager, parameters = boto3.client("secretsmanager", **keys), boto3.client("ssm", **keys)
    manager.create_secret(Name="maps/postgres", SecretString=json.dumps({"url": URL, "port": 5432, "more": {}}))
    manager.create_secret(Name="maps/plain", SecretString="word-that-stays-hidden\n")
    manager.create_secret(Name="maps/binary", SecretBinary=b"word-that-stays-hidden")
    parameters.put_parameter(Name="/maps/redis", Type="SecureString", Value="rediss://:hidden-too@redis.internal:6379")


def test_a_setting_takes_a_secret_by_its_name_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEO_ASSETS_POSTGRES_URL", "aws-secretsmanager:maps/postgres#url")
    monkeypatch.setenv("GEO_ASSETS_KAFKA_SASL_PASSWORD", "aws-secretsmanager:maps/plain")
    monkeypatch.setenv("GEO_ASSETS_REDIS_URL", "aws-ssm:/maps/redis")

    found = Settings()

    assert found.postgres_url is not None
    assert found.redis_url is not None
    assert found.kafka_sasl_password is not None
    assert found.postgres_url.get_secret_value() == URL
    assert found.kafka_sasl_password.get_secret_value() == "word-that-stays-hidden"
    assert found.redis_url.get_secret_value() == "rediss://:hidden-too@redis.internal:6379"
    assert "hidden" not in repr(found)


def test_a_secret_is_read_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEO_ASSETS_REDIS_URL", "aws-ssm:/maps/redis")
    first = Settings().redis_url
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert Settings().redis_url == first


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("aws-secretsmanager:maps/none", "aws-secretsmanager:maps/none cannot be read: ResourceNotFoundException"),
        ("aws-ssm:/maps/none", "aws-ssm:/maps/none cannot be read: ParameterNotFound"),
        ("aws-secretsmanager:maps/plain#url", "the secret is no JSON object"),
        ("aws-secretsmanager:maps/postgres#user", "has no text under this key"),
        ("aws-secretsmanager:maps/postgres#more", "has no text under this key"),
        ("aws-secretsmanager:maps/binary", "is binary"),
        ("aws-secretsmanager:", "is no reference to a secret; expected is aws-secretsmanager:NAME"),
        ("aws-ssm:/maps/redis#key", "is no reference to a secret"),
    ],
)
def test_what_cannot_be_read_names_setting_and_secret_and_never_its_value(
    reference: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GEO_ASSETS_REDIS_URL", reference)
    with caplog.at_level(logging.DEBUG), pytest.raises(ValueError, match="GEO_ASSETS_REDIS_URL") as raised:
        Settings()
    assert said in str(raised.value)
    assert "hidden" not in str(raised.value)


def test_no_log_line_shows_a_secret(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("GEO_ASSETS_REDIS_URL", "aws-ssm:/maps/redis")
    with caplog.at_level(logging.INFO):
        Settings()
    assert "hidden" not in caplog.text


def test_without_a_region_or_an_answer_the_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEO_ASSETS_REDIS_URL", "aws-ssm:/maps/redis")
    monkeypatch.delenv("GEO_ASSETS_AWS_REGION")
    with pytest.raises(ValueError, match="set GEO_ASSETS_AWS_REGION"):
        Settings()


def test_dagster_s_own_url_is_filled_in_as_the_settings_are() -> None:
    environ = {"GEO_ASSETS_AWS_REGION": "eu-west-1", "GEO_ASSETS_POSTGRES_SSL_CA": "/etc/rds.pem"}
    found = references.of_postgres("aws-secretsmanager:maps/postgres#url", environ)
    assert found == f"{URL}?sslmode=verify-full&sslrootcert=/etc/rds.pem"


def test_iam_puts_tokens_in_the_place_of_a_password() -> None:
    environ = {"GEO_ASSETS_POSTGRES_AUTH": "aws-iam", "GEO_ASSETS_POSTGRES_SSL_CA": "/etc/rds.pem"}
    once = references.of_postgres("postgresql://maps@db.internal:5432/geo_assets?options=-cx%3Dy", environ)
    assert once == (
        "postgresql://maps:aws-rds-iam@db.internal:5432/geo_assets?options=-cx%3Dy"
        "&sslmode=verify-full&sslrootcert=/etc/rds.pem"
    )
    assert references.of_postgres(once, environ) == once
    for url, said in ((URL, "has a password"), ("postgresql://db.internal/geo_assets", "names no user")):
        with pytest.raises(ValueError, match=f"GEO_ASSETS_DAGSTER_POSTGRES_URL {said}") as raised:
            references.of_postgres(url, environ)
        assert "hidden" not in str(raised.value)


def test_a_url_that_says_how_it_is_secured_stays_as_it_is() -> None:
    url = f"{URL}?sslmode=require"
    assert references.of_postgres(url, {"GEO_ASSETS_POSTGRES_SSL_CA": "/etc/rds.pem"}) == url
    assert references.of_postgres(URL, {}) == URL
