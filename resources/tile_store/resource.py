"""The tile store as a Dagster resource: it hands out the plain client, and is the only file here that needs Dagster."""

from __future__ import annotations

from dagster import ConfigurableResource
from pydantic import Field

from resources.tile_store.folder import FolderTileStore
from resources.tile_store.protocol import TileStore


class TileStoreResource(ConfigurableResource):
    """The embedded tile store.

    Args:
        root: The folder, such as `tiles` in the home folder.
    """

    root: str = Field(description="Folder of the embedded tile store.")

    def client(self) -> TileStore:
        """Open it. The caller closes what it opened."""
        return FolderTileStore(self.root)
