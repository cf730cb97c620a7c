"""The real services that `scripts/services` has started: where they are, and rooms of their own in them for tests."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from geo_assets_tests.needs import missing

NEEDS = {
    "kafka": "GEO_ASSETS_KAFKA_SERVERS",
    "redis": "GEO_ASSETS_REDIS_URL",
    "postgres": "GEO_ASSETS_POSTGRES_URL",
    "s3": "GEO_ASSETS_S3_ENDPOINT",
    "cache": "GEO_ASSETS_PURGE_URLS",
}
"""The setting by which each service is found."""


def folder() -> Path:
    """Where `scripts/services` keeps its data unless told otherwise."""
    return Path(os.environ.get("GEO_ASSETS_SERVICES") or Path(__file__).parents[1] / ".services")


def found() -> dict[str, str]:
    """What `scripts/services` wrote of the services it has started; nothing where it has started none."""
    path = folder() / "services.env"
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def settings_of(*names: str) -> dict[str, str]:
    """`GEO_ASSETS_*` settings of running services, as `scripts/services start` wrote them.

    Without one of them the test is skipped with a line, or fails under REQUIRE_SERVICES=1.
    """
    running = found()
    for name in names:
        if NEEDS[name] not in running:
            missing(f"no {name} runs here (scripts/services start {name})")
    return running


def room() -> str:
    """A name that no other test has, for a schema, a prefix or a bucket's folder."""
    return f"t_{secrets.token_hex(5)}"
