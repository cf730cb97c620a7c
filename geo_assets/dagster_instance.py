"""Dagster's instance of a home, for commands that work on the catalog. Imports Dagster, which takes two seconds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from dagster import DagsterInstance

from geo_assets import dagster_home
from geo_assets.configuration import ConfigurationError
from geo_assets.settings import Settings


@contextmanager
def instance_of(settings: Settings) -> Iterator[DagsterInstance]:
    """The instance of this home. This process's environment names it from then on.

    Raises:
        ConfigurationError: There is none yet.
    """
    folder = settings.home / "dagster"
    if not (folder / "dagster.yaml").is_file():
        raise ConfigurationError(f"{folder} has no dagster.yaml: `geo-assets up` makes it")
    os.environ.update(dagster_home.environment(settings, folder))
    with DagsterInstance.from_config(str(folder)) as opened:
        yield opened
