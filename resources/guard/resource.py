"""The guard as a Dagster resource: it hands out the plain client, and is the only file here that needs Dagster."""

from __future__ import annotations

from dagster import ConfigurableResource
from pydantic import Field

from resources.guard.protocol import Guard
from resources.guard.sqlite import SqliteGuard


class GuardResource(ConfigurableResource):
    """The embedded guard.

    Args:
        path: The SQLite file, such as `guard.db` in the home folder.
    """

    path: str = Field(description="File of the embedded guard.")

    def client(self) -> Guard:
        """Open it. The caller closes what it opened."""
        return SqliteGuard(self.path)
