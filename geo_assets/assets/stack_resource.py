"""The ports as a Dagster resource: hands out the plain `Stack` that services and command line use, and no more."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dagster import ConfigurableResource
from pydantic import Field

from geo_assets.settings import Settings
from geo_assets.stack import Stack


class StackResource(ConfigurableResource):
    """Event log, feature store, ledger and tile store, as the settings of this process choose them.

    Args:
        home: Folder of all embedded data; None takes `GEO_ASSETS_HOME`.
    """

    home: str | None = Field(default=None, description="Folder of all embedded data; default `GEO_ASSETS_HOME`.")

    def settings(self) -> Settings:
        """The settings, from the environment and this resource's own configuration."""
        return Settings() if self.home is None else Settings(home=Path(self.home))

    @contextmanager
    def opened(self, *, scoped: bool = False) -> Iterator[Stack]:
        """The ports, closed at the end; a tick and a run open their own. `scoped`: able to write tiles alone."""
        with Stack(self.settings(), scoped=scoped) as stack:
            yield stack
