"""Dagster's home: which dagster.yaml a stack gets, and what its processes are told."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
import yaml
from pydantic import SecretStr

from geo_assets import dagster_home, logs
from geo_assets.settings import Settings
from geo_assets_tests.postgres_rooms import postgres_room


def production(home: Path, url: str) -> Settings:
    """A whole production stack with this tile store; nothing of it is connected."""
    values: dict[str, Any] = {
        "home": home,
        "stack": "production",
        "kafka_servers": "kafka:9092",
        "redis_url": "redis://redis",
        "postgres_url": "postgresql://db/maps",
        "tile_store_url": url,
        "s3_endpoint": None,
    }
    return Settings(**values)


def test_on_s3_what_runs_print_goes_beside_the_tiles(tmp_path: Path) -> None:
    settings = production(tmp_path, "s3://maps/tiles")
    assert yaml.safe_load(dagster_home.instance_yaml(settings))["compute_logs"]["class"] == "S3ComputeLogManager"
    environment = dagster_home.environment(settings, tmp_path)
    assert environment["GEO_ASSETS_LOGS_BUCKET"] == "maps"
    assert environment["GEO_ASSETS_LOGS_PREFIX"] == "tiles/compute-logs"


def test_on_google_what_runs_print_stays_on_the_machine_and_all_else_is_as_deployed(tmp_path: Path) -> None:
    settings = production(tmp_path, "gs://maps/tiles")
    found = yaml.safe_load(dagster_home.instance_yaml(settings))
    deployed = yaml.safe_load(dagster_home.top_level("deploy/dagster.yaml").read_text())
    assert found.pop("compute_logs")["class"] == "LocalComputeLogManager"
    deployed.pop("compute_logs")
    assert found == deployed
    environment = dagster_home.environment(settings, tmp_path)
    assert not [name for name in environment if name.startswith(("GEO_ASSETS_LOGS", "AWS_"))]
    assert environment["GEO_ASSETS_DAGSTER_POSTGRES_URL"].startswith("postgresql://db/maps?options=")


def test_the_embedded_stack_has_the_checkout_s_own(tmp_path: Path) -> None:
    text = dagster_home.top_level("dagster.yaml").read_text()
    assert dagster_home.instance_yaml(Settings(home=tmp_path)) == text


def test_the_schema_that_the_url_names_is_made_once(tmp_path: Path) -> None:
    with postgres_room() as room:
        url = f"{room.url}&options={quote(f'-csearch_path={room.schema}', safe='')}"
        settings = production(tmp_path, "s3://maps/tiles").model_copy(update={"dagster_postgres_url": SecretStr(url)})
        assert [dagster_home.make_schema(settings) for _ in range(2)] == [room.schema] * 2
        with psycopg.connect(url) as db:
            assert db.execute("SELECT current_schema()").fetchone() == (room.schema,)


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_the_pool_s_own_warnings_of_every_attempt_are_not_logged(log_format: str) -> None:
    logs.configure("info", log_format)
    assert not logging.getLogger("psycopg.pool").isEnabledFor(logging.WARNING)
    assert logging.getLogger("psycopg.pool").isEnabledFor(logging.ERROR)


def test_a_traceback_in_a_process_of_dagster_shows_no_variable(tmp_path: Path) -> None:
    code = """
import structlog
import geo_assets.definitions
def connect(url):
    raise ConnectionError("refused")
try:
    connect("postgresql://maps:" + "needle" * 3 + "@db/maps")
except ConnectionError:
    structlog.get_logger().exception("audit failed")
"""
    environment = {**os.environ, "GEO_ASSETS_HOME": str(tmp_path)}
    for log_format in ("console", "json"):
        said = subprocess.run(
            [sys.executable, "-c", code], env=environment | {"GEO_ASSETS_LOG_FORMAT": log_format},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        printed = said.stdout + said.stderr
        assert "audit failed" in printed
        assert "ConnectionError: refused" in printed
        assert "needleneedle" not in printed
