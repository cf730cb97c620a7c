"""Dagster's home inside ours: which dagster.yaml it has, and the environment that Dagster's processes need."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, urlsplit

import structlog

from geo_assets.configuration import ConfigurationError

if TYPE_CHECKING:
    from geo_assets.settings import Settings

LOGS_FOLDER = "compute-logs"
"""Beside the tiles, in the same bucket: outside what a run's narrowed credentials may write."""

_LOGS = re.compile(r"^compute_logs:\n(?:[ \t]+\S.*\n)+", re.MULTILINE)
"""Where a dagster.yaml says what becomes of what runs print."""

_SEARCH_PATH = re.compile(r"search_path=([A-Za-z0-9_]+)")


def top_level(name: str) -> Path:
    """A file of the project's top level: beside the package in a checkout, under `share/` where it was installed.

    Raises:
        ConfigurationError: It is in neither place.
    """
    import geo_assets

    for folder in (Path(geo_assets.__file__).parents[1], Path(sys.prefix) / "share" / "geo_assets"):
        if (folder / name).is_file():
            return folder / name
    raise ConfigurationError(f"{name} is not there: install geo_assets again, or run it from a checkout")


def prepare(settings: Settings) -> Path:
    """Make Dagster's home, with the dagster.yaml of the stack; on Postgres, make its schema.

    Raises:
        ConfigurationError: Postgres cannot be reached or refuses the schema; the setting is named.
    """
    folder = settings.home / "dagster"
    folder.mkdir(parents=True, exist_ok=True)
    production = settings.stack == "production"
    if production and _bucket(settings) is None:
        structlog.get_logger().warning(
            "what runs print stays on this machine: the tile store is not S3", folder=str(folder / "storage")
        )
    (folder / "dagster.yaml").write_text(instance_yaml(settings), encoding="utf-8")
    if production:
        make_schema(settings)
    return folder


def instance_yaml(settings: Settings) -> str:
    """The dagster.yaml of the stack. Where the tile store is not S3, what runs print stays on their machine.

    dagster-aws writes to S3 alone; the compute log managers of other clouds are packages of their own.
    """
    embedded = top_level("dagster.yaml").read_text(encoding="utf-8")
    if settings.stack != "production":
        return embedded
    text = top_level("deploy/dagster.yaml").read_text(encoding="utf-8")
    if _bucket(settings) is not None:
        return text
    local = _LOGS.search(embedded)
    if local is None:
        raise ConfigurationError("dagster.yaml has no compute_logs: install geo_assets again")
    return _LOGS.sub(lambda _: local[0], text)


def environment(settings: Settings, folder: Path) -> dict[str, str]:
    """Environment of Dagster's processes.

    Args:
        settings: Where Postgres and the object store are.
        folder: Dagster's home, as `prepare` made it.
    """
    wanted = {
        "DAGSTER_HOME": str(folder),
        "GEO_ASSETS_DAGSTER_STORAGE": str(folder / "storage"),
        "GEO_ASSETS_HOME": str(settings.home),
        "DAGSTER_DISABLE_TELEMETRY": "1",
        # Without it Dagster stores each of a run's planned events in a transaction of its own.
        "DAGSTER_EVENT_BATCH_SIZE": "1000",
    }
    if settings.stack != "production":
        return wanted
    wanted["GEO_ASSETS_DAGSTER_POSTGRES_URL"] = storage_url(settings)
    place = _bucket(settings)
    if place is None:
        return wanted
    wanted["GEO_ASSETS_LOGS_BUCKET"], wanted["GEO_ASSETS_LOGS_PREFIX"] = place
    # Dagster's own log manager takes them from where every AWS client does.
    if settings.s3_endpoint is not None:
        wanted["AWS_ENDPOINT_URL_S3"] = settings.s3_endpoint
    if settings.s3_region is not None:
        wanted["AWS_DEFAULT_REGION"] = settings.s3_region
    if settings.s3_profile is not None:
        wanted["AWS_PROFILE"] = settings.s3_profile
    return wanted


def storage_url(settings: Settings) -> str:
    """The URL of Dagster's storage, in a schema of its own beside ours."""
    url = _given_url(settings)
    joint = "&" if urlsplit(url).query else "?"
    return f"{url}{joint}options={quote(f'-csearch_path={schema(settings)}', safe='')}"


def schema(settings: Settings) -> str:
    """The schema of Dagster's own tables."""
    return f"{settings.postgres_schema}_dagster"


def command(settings: Settings) -> list[str]:
    """How Dagster's UI, daemon and code server are started."""
    listen = ["-h", settings.host, "-p", str(settings.dagster_port)]
    return [sys.executable, "-m", "geo_assets.dagster_dev", *listen]


def storage_setting(settings: Settings) -> str:
    """The setting that names the Postgres of Dagster's storage."""
    return "GEO_ASSETS_POSTGRES_URL" if settings.dagster_postgres_url is None else "GEO_ASSETS_DAGSTER_POSTGRES_URL"


def _given_url(settings: Settings) -> str:
    url = settings.dagster_postgres_url or settings.postgres_url
    if url is None:
        raise ConfigurationError("Dagster's storage has no Postgres: set GEO_ASSETS_DAGSTER_POSTGRES_URL")
    return url.get_secret_value()


def _bucket(settings: Settings) -> tuple[str, str] | None:
    """Bucket and prefix of what runs print; None where the tile store is not S3."""
    parts = urlsplit(settings.tile_store_url or "")
    if parts.scheme != "s3":
        return None
    return parts.netloc, "/".join(part for part in (parts.path.strip("/"), LOGS_FOLDER) if part)


def make_schema(settings: Settings) -> str:
    """Make the schema of Dagster's tables unless it is there; returns its name.

    Raises:
        ConfigurationError: Postgres cannot be reached or refuses the schema; the setting is named.
    """
    import psycopg
    from psycopg import sql

    from resources.postgres import conninfo, explained

    url = _given_url(settings)
    # A URL may name a search path of its own: then Dagster's tables are there.
    named = _SEARCH_PATH.search(unquote(urlsplit(url).query))
    name = named[1] if named else schema(settings)
    with (
        explained(ConfigurationError, storage_setting(settings), url),
        psycopg.connect(conninfo(url), autocommit=True) as connection,
    ):
        there = connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (name,)).fetchone()
        if there is None:
            connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(name)))
    return name
