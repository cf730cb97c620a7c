from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from geo_assets_tests.real_services import room, settings_of
from geo_assets_tests.resources.contract_tile_store import TileStoreContract, TileStoreHarness
from resources.tile_store.objects import ObjectTileStore
from resources.tile_store.protocol import TileStore


@pytest.fixture(scope="session")
def s3() -> dict[str, str]:
    return settings_of("s3")


@pytest.fixture(autouse=True)
def _credentials(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a pod has them: in the environment, from where boto3's chain takes them."""
    for name, value in s3.items():
        if name.startswith("AWS_"):
            monkeypatch.setenv(name, value)


def a_place(s3: dict[str, str]) -> str:
    return f"{s3['GEO_ASSETS_TILE_STORE_URL']}/{room()}"


def opened(s3: dict[str, str], url: str | None = None, **options: str) -> ObjectTileStore:
    return ObjectTileStore(url or a_place(s3), endpoint=s3["GEO_ASSETS_S3_ENDPOINT"], region="us-east-1", **options)


@pytest.fixture
def store(s3: dict[str, str]) -> Iterator[ObjectTileStore]:
    store = opened(s3)
    yield store
    store.delete([o.name for o in store.list()])
    store.close()


class TestObjectTileStore(TileStoreContract):
    @pytest.fixture
    def harness(self, s3: dict[str, str]) -> TileStoreHarness:
        return TileStoreHarness(
            open=functools.partial(ObjectTileStore, a_place(s3), endpoint=s3["GEO_ASSETS_S3_ENDPOINT"])
        )

    def fresh(self, tmp_path_factory: pytest.TempPathFactory) -> TileStore:
        return opened(settings_of("s3"))
