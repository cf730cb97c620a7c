"""deploy/settings/*.env: every one is a complete production stack, and names nothing that is no setting."""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_args

import pytest
from pydantic import SecretStr

from geo_assets.settings import Settings
from geo_assets_tests.deploy.examples import DEPLOY, of_dagster, read

EXAMPLES = sorted((DEPLOY / "settings").glob("*.env"))
SECRET = {
    f"GEO_ASSETS_{name.upper()}"
    for name, field in Settings.model_fields.items()
    if SecretStr in get_args(field.annotation)
}


@pytest.fixture(params=EXAMPLES, ids=[path.stem for path in EXAMPLES])
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in list(os.environ):
        if name.startswith("GEO_ASSETS_"):
            monkeypatch.delenv(name)
    return request.param


def test_there_is_an_example_for_each_place() -> None:
    assert [path.stem for path in EXAMPLES] == ["aws", "gcs", "local", "r2"]


def test_every_setting_is_in_every_example(example: Path) -> None:
    active, shown = read(example)
    settings = {f"GEO_ASSETS_{name.upper()}" for name in Settings.model_fields}

    assert settings - set(active) - set(shown) == set()


def test_no_example_names_what_is_no_setting(example: Path) -> None:
    active, shown = read(example)
    known = {f"GEO_ASSETS_{name.upper()}" for name in Settings.model_fields} | of_dagster()

    assert {name for name in (*active, *shown) if name.startswith("GEO_ASSETS_")} - known == set()


def test_with_its_secrets_an_example_is_a_production_stack(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    active, shown = read(example)
    secrets = {name: shown[name] for name in SECRET if name in shown}
    for name, value in {**active, **secrets}.items():
        monkeypatch.setenv(name, value)

    found = Settings()

    assert found.stack == "production"
    for name, value in active.items():
        if name.startswith("GEO_ASSETS_"):
            assert str(getattr(found, name.removeprefix("GEO_ASSETS_").lower())) in (value, f"{value}.0"), name


def test_what_is_shown_in_comments_is_a_value_that_the_setting_takes(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, shown = read(example)
    for name, value in shown.items():
        if value:
            monkeypatch.setenv(name, value)

    Settings()


def test_without_its_secrets_an_example_is_refused_by_name(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in read(example)[0].items():
        monkeypatch.setenv(name, value)

    with pytest.raises(ValueError, match="GEO_ASSETS_REDIS_URL, which is not set"):
        Settings()


def test_no_example_sets_a_secret(example: Path) -> None:
    active, shown = read(example)

    assert not SECRET & set(active)
    assert not {name for name in active if "SECRET" in name or "PASSWORD" in name or name == "AWS_ACCESS_KEY_ID"}
    assert not [value for value in active.values() if "@" in value.replace("@my-project.iam", "")]
    # What stands for a password cannot be mistaken for one.
    for name in SECRET & set(shown):
        assert "PASSWORD" in shown[name] or shown[name] == "…", name


@pytest.mark.parametrize("name", ["aws", "gcs", "r2"])
def test_cloud_examples_encrypt_every_connection(name: str) -> None:
    active, shown = read(DEPLOY / "settings" / f"{name}.env")

    assert active["GEO_ASSETS_KAFKA_SECURITY_PROTOCOL"] == "SASL_SSL"
    assert shown["GEO_ASSETS_REDIS_URL"].startswith("rediss://")
    assert "sslmode=" in shown["GEO_ASSETS_POSTGRES_URL"]
    assert active.get("GEO_ASSETS_S3_ENDPOINT", "https://").startswith("https://")
    assert all(active[f"GEO_ASSETS_PUBLIC_{part}_URL"].startswith("https://") for part in ("EDGE", "TILES", "DAGSTER"))


def test_on_aws_no_cache_is_purged_that_takes_no_purge() -> None:
    """CloudFront answers 403, and would hold for an hour what a tile server with this setting hands out."""
    active, shown = read(DEPLOY / "settings" / "aws.env")

    assert "GEO_ASSETS_PURGE_URLS" not in active
    assert "GEO_ASSETS_PURGE_URLS" in shown
