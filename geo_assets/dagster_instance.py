"""Dagster's instance of a home, for commands that work on the catalog. Imports Dagster, which takes two seconds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dagster import DagsterInstance

from geo_assets import dagster_databases, dagster_home
from geo_assets.configuration import ConfigurationError
from geo_assets.settings import Settings


@contextmanager
def instance_of(settings: Settings) -> Iterator[DagsterInstance]:
    """The instance of this home, or, where `geo-assets up` made none in it, the one that DAGSTER_HOME names.

    In a home of our own this process's environment names it from then on; in a container a deployment has set it.

    Raises:
        ConfigurationError: There is none yet.
    """
    folder = settings.home / "dagster"
    if (folder / "dagster.yaml").is_file():
        os.environ.update(dagster_home.environment(settings, folder))
        dagster_databases.make(folder)
        with DagsterInstance.from_config(str(folder)) as opened:
            yield opened
        return
    elsewhere = os.environ.get("DAGSTER_HOME")
    if not elsewhere:
        raise ConfigurationError(
            f"{folder} has no dagster.yaml: `geo-assets up` makes it, or DAGSTER_HOME names another"
        )
    if not (Path(elsewhere) / "dagster.yaml").is_file():
        raise ConfigurationError(f"DAGSTER_HOME={elsewhere} has no dagster.yaml")
    with DagsterInstance.get() as opened:
        yield opened
