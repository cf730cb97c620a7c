"""The event log as a Dagster resource: it hands out the plain client, and is the only file here that needs Dagster."""

from __future__ import annotations

from dagster import ConfigurableResource
from pydantic import Field

from resources.event_log.protocol import EventLog
from resources.event_log.sqlite import SqliteEventLog


class EventLogResource(ConfigurableResource):
    """The embedded event log.

    Args:
        path: The SQLite file, such as `event-log.db` in the home folder.
    """

    path: str = Field(description="File of the embedded event log.")

    def client(self) -> EventLog:
        """Open it. The caller closes what it opened."""
        return SqliteEventLog(self.path)
