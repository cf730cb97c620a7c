"""All ports of one process, opened when first used. Services, assets, checks and the command line share it."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from geo_assets import configuration, ports

if TYPE_CHECKING:
    from geo_assets.events.sources import Sources
    from geo_assets.settings import Settings
    from geo_assets.tiles.layers import LayerSet
    from resources.alerts.protocol import Alerts
    from resources.event_log.protocol import EventLog
    from resources.feature_store.protocol import FeatureStore
    from resources.guard.protocol import Guard
    from resources.ledger.protocol import Ledger
    from resources.purge.protocol import Purge
    from resources.tile_store.protocol import TileStore


class Stack:
    """The ports that the settings choose. Opening one is cheap and lazy; `close` closes those that were opened.

    Args:
        settings: Which adapters, and where.
        scoped: For a Dagster run: its tile store can write tiles and nothing else, where a role to assume is set.
    """

    def __init__(self, settings: Settings, *, scoped: bool = False) -> None:
        self.settings = settings
        self.scoped = scoped

    @cached_property
    def layers(self) -> LayerSet:
        """The map's layers."""
        return configuration.load_layers(self.settings)

    @cached_property
    def sources(self) -> Sources:
        """Who may write."""
        return configuration.load_sources(self.settings)

    @cached_property
    def log(self) -> EventLog:
        """The event log, topics declared."""
        return ports.open_log(self.settings)

    @cached_property
    def guard(self) -> Guard:
        """The guard."""
        return ports.open_guard(self.settings)

    @cached_property
    def ledger(self) -> Ledger:
        """The ledger."""
        return ports.open_ledger(self.settings)

    @cached_property
    def tiles(self) -> TileStore:
        """The tile store."""
        return ports.open_tile_store(self.settings, scoped=self.scoped)

    @cached_property
    def purge(self) -> Purge | None:
        """What makes caches forget tiles; None where none is named."""
        return ports.open_purge(self.settings)

    @cached_property
    def alerts(self) -> Alerts:
        """Who is told of what fails."""
        return ports.open_alerts(self.settings)

    @cached_property
    def features(self) -> FeatureStore:
        """The feature store: PostGIS where its URL is set."""
        url = self.settings.feature_store_url or self.settings.postgres_url
        if url is not None:
            from resources.feature_store.postgis import PostgisStore

            return PostgisStore(
                url.get_secret_value(), schema=self.settings.postgres_schema, pool=self.settings.postgres_pool
            )
        from resources.feature_store.geopackage import GeoPackageStore

        return GeoPackageStore(self.settings.home / "features.gpkg")

    def ensure(self) -> Stack:
        """Open every port now, so that a home that cannot be used says so before any work begins."""
        _ = self.layers, self.sources, self.log, self.guard, self.ledger, self.tiles, self.features
        return self

    def close(self) -> None:
        """Close the ports that were opened."""
        for name in ("log", "guard", "ledger", "tiles", "features", "purge", "alerts"):
            port = self.__dict__.pop(name, None)
            if port is not None:
                port.close()

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
