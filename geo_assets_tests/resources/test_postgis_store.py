"""The feature store in PostGIS under the contract, and what is its own: many processes, faults, a killed server."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql

from geo_assets_tests.real_services import room, settings_of
from geo_assets_tests.resources.contract_feature_store import Connect, FeatureStoreContract
from resources.feature_store.postgis import PostgisStore
from resources.feature_store.postgis_schema import COMPONENT, MIGRATIONS
from resources.migrations import migrate


@pytest.fixture(scope="module")
def url() -> str:
    return settings_of("postgres")["GEO_ASSETS_POSTGRES_URL"]


@pytest.fixture
def schema(url: str) -> Iterator[str]:
    name = room()
    migrate(url, name, COMPONENT, MIGRATIONS)
    yield name
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(name)))


@pytest.fixture
def connect(url: str, schema: str) -> Connect:
    return lambda: PostgisStore(url, schema)


@pytest.fixture
def opening(url: str, schema: str) -> str:
    return f"from resources.feature_store.postgis import PostgisStore\nstore = PostgisStore({url!r}, {schema!r})"


class TestPostgisStore(FeatureStoreContract):
    pass
