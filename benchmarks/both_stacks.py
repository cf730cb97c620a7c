"""The stacks a benchmark can measure here: the embedded one, and the production one where its services run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.city_home import city_settings
from benchmarks.report import Report
from geo_assets import dagster_databases, dagster_home
from geo_assets.services.migrating import migrate_all
from geo_assets.settings import Settings
from geo_assets.stack import Stack
from geo_assets_tests.real_services import NEEDS, found
from geo_assets_tests.stacks import environment_of, fields_of


@dataclass(frozen=True, slots=True)
class Place:
    """A stack to measure: its settings, and the environment of a process that is to have the same."""

    name: str
    settings: Settings
    environment: dict[str, str]

    def dagster(self) -> None:
        """Make Dagster's home and storage of this stack, and point this process at it."""
        folder = dagster_home.prepare(self.settings)
        os.environ.update(dagster_home.environment(self.settings, folder))
        dagster_databases.make(folder)


def stacks_here(report: Report) -> list[str]:
    """`embedded`, and `production` where `scripts/services` runs; where it does not, the report says so."""
    running = found()
    absent = [name for name in ("kafka", "redis", "postgres", "s3") if NEEDS[name] not in running]
    if absent:
        report.note(f"production stack not measured: no {', '.join(absent)} here (scripts/services start)")
        return ["embedded"]
    return ["embedded", "production"]


@contextmanager
def place(stack: str, home: Path, **changes: object) -> Iterator[Place]:
    """An empty stack with the city's layers; what it leaves in the services is deleted at the end."""
    before = dict(os.environ)
    try:
        with environment_of(stack) as chosen:
            settings = city_settings(home, **{**fields_of(chosen), **changes})
            migrate_all(settings)
            flags = {f"GEO_ASSETS_{name.upper()}": str(value) for name, value in changes.items()}
            yield Place(stack, settings, {**chosen, **flags, "GEO_ASSETS_HOME": str(home)})
    finally:
        # Not before the room is emptied: the object store's credentials are among them.
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def opened(place: Place) -> Iterator[Stack]:
    """Its ports."""
    with Stack(place.settings) as stack:
        yield stack.ensure()
