"""The feature store as a Dagster resource: hands out the plain client. The only file here that needs Dagster."""

from __future__ import annotations

from dagster import ConfigurableResource
from pydantic import Field

from resources.feature_store.geopackage import GeoPackageStore
from resources.feature_store.protocol import FeatureStore


class FeatureStoreResource(ConfigurableResource):
    """The embedded feature store.

    Args:
        path: The GeoPackage, such as `features.gpkg` in the home folder.
    """

    path: str = Field(description="GeoPackage of the embedded feature store.")

    def client(self) -> FeatureStore:
        """Open it. The caller closes what it opened."""
        return GeoPackageStore(self.path)
