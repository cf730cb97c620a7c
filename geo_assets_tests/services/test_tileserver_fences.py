from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import shapely
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets.events.models import FenceEvent
from geo_assets.geofence.fences import SET_VERSION, Fence, FenceSet, fence_of
from geo_assets.services import fences as folding
from geo_assets.services.tileserver import fences as shown
from geo_assets.services.tileserver.fences import FenceMap
from geo_assets.stack import Stack
from geo_assets.tiles.tile import Box
from geo_assets_tests.geofence_world import SIDE, SOUTH, WEST, fence, post_fences
from geo_assets_tests.services.tile_world import TileWorld
from geo_assets_tests.stacks import STACKS, changes_of
from resources.tile_store.protocol import TileStoreUnavailable


@pytest.fixture
def world(tmp_path: Path) -> Iterator[TileWorld]:
    world = TileWorld(tmp_path / "home")
    yield world
    world.close()


@pytest.fixture
def client(world: TileWorld) -> Iterator[httpx.Client]:
    with world.served() as client:
        yield client


def stand(world: TileWorld, *events: FenceEvent) -> None:
    """Post fences and fold them."""
    with Stack(world.settings) as stack:
        post_fences(stack, events)
        folding.FenceBook(stack).fold()


def of(collection: dict[str, Any]) -> list[str]:
    return sorted(feature["properties"]["key"] for feature in collection["features"])


class _Standing:
    """A ledger and a store that hold one set."""

    def __init__(self, fences: FenceSet) -> None:
        self.data: bytes | None = fences.to_bytes()
        self.name = "a set"

    def get_value(self, name: str) -> str | None:
        assert name == shown.STANDING
        return json.dumps({"name": self.name})

    def get(self, name: str) -> bytes | None:
        return self.data if name == self.name else None


def test_the_server_reads_what_the_fold_writes() -> None:
    assert shown.STANDING == folding.VALUE
    assert shown.SET_VERSION == SET_VERSION


def _event(geometry: object, **more: object) -> Fence:
    event = FenceEvent.model_validate({"type": "Feature", "id": 1, "geometry": geometry, **more})
    made = fence_of(event, source="demo", revision=1)
    assert isinstance(made, Fence)
    return made


@settings(max_examples=40, deadline=None)
@given(
    lon=st.floats(-180, 180), lat=st.floats(-84, 84), radius=st.floats(0.5, 900_000), hole=st.booleans()
)  # fmt: skip
def test_a_fence_is_shown_to_the_last_digit_as_it_judges(lon: float, lat: float, radius: float, hole: bool) -> None:
    made = _event({"type": "Point", "coordinates": [lon, lat]}, radius_m=radius)
    if hole:
        inner = _event({"type": "Point", "coordinates": [lon, lat]}, radius_m=radius / 2)
        made = Fence(made.id, 1, shapely.difference(made.geometry, inner.geometry))
    standing = _Standing(FenceSet(3, (made,)))
    current = FenceMap(standing, standing).current()  # type: ignore[arg-type]
    collection = json.loads(current.collection(None, 10))
    geometry = shapely.from_geojson(json.dumps(collection["features"][0]["geometry"]))
    assert geometry.equals_exact(made.geometry, 0)
    west, south, east, north = made.geometry.bounds
    assert current.fences[0].meets(Box(west, south, east, north))
    x, y = current.fences[0].middle
    assert current.fences[0].meets(Box(x, y, x, y))


def test_a_fence_over_the_date_line_is_found_on_both_sides_and_not_between() -> None:
    made = _event({"type": "Point", "coordinates": [179.99, 10]}, radius_m=5_000)
    standing = _Standing(FenceSet(1, (made,)))
    current = FenceMap(standing, standing).current()  # type: ignore[arg-type]
    assert json.loads(current.collection(Box(-180, 9, -179.9, 11), 10))["matched"] == 1
    assert json.loads(current.collection(Box(179, 9, -179, 11), 10))["matched"] == 1
    assert json.loads(current.collection(Box(-100, 9, 100, 11), 10))["matched"] == 0


def test_a_set_that_is_gone_or_of_another_version_is_not_now() -> None:
    standing = _Standing(FenceSet(1, (_event({"type": "Point", "coordinates": [1, 1]}, radius_m=5),)))
    fences = FenceMap(standing, standing)  # type: ignore[arg-type]
    data, standing.data = standing.data, None
    with pytest.raises(TileStoreUnavailable, match="not in the tile store"):
        fences.current()
    assert data is not None
    for broken in (b"\x09" + data[1:], data[:-9], b"\x01\x93\x01\x91\x98\xa1a"):
        standing.data = broken
        with pytest.raises(TileStoreUnavailable):
            fences.current()
    standing.data = data
    assert len(fences.current().fences) == 1


@pytest.mark.parametrize("stack_name", STACKS)
def test_standing_fences_are_served_by_box_under_an_entity_tag_of_their_set(stack_name: str, tmp_path: Path) -> None:
    with changes_of(stack_name) as changes:
        world = TileWorld(tmp_path / "home", **changes)
        with world.served() as client:
            empty = client.get("/fences.geojson")
            assert (empty.status_code, empty.json()["total"], empty.json()["features"]) == (200, 0, [])
            stand(world, fence(0, name="Depot", dwell_s=60, hysteresis_m=5), fence(1), fence(5, priority=7))
            answer = client.get("/fences.geojson")
            assert answer.headers["content-type"] == "application/geo+json"
            assert answer.headers["content-encoding"] == "gzip"
            whole = answer.json()
            assert (whole["total"], whole["matched"], whole["returned"]) == (3, 3, 3)
            assert of(whole) == ['demo:"f0"', 'demo:"f1"', 'demo:"f5"']
            first = next(f["properties"] for f in whole["features"] if f["properties"]["name"] == "Depot")
            assert first == {
                "key": 'demo:"f0"', "source": "demo", "id": '"f0"', "revision": 1, "priority": 0, "name": "Depot",
                "dwell_s": 60, "hysteresis_m": 5, "editable": True,
            }  # fmt: skip
            box = f"{WEST + 0.2 * SIDE},{SOUTH},{WEST + 0.8 * SIDE},{SOUTH + SIDE}"
            assert of(client.get(f"/fences.geojson?bbox={box}").json()) == ['demo:"f0"']
            tag = answer.headers["etag"]
            assert client.get("/fences.geojson", headers={"If-None-Match": tag}).status_code == 304
            assert client.get("/fences.geojson?limit=2", headers={"If-None-Match": tag}).status_code == 200
            stand(world, fence(1, version=2, shift=0.5))
            changed = client.get("/fences.geojson", headers={"If-None-Match": tag})
            assert changed.status_code == 200
            assert changed.json()["revision"] > whole["revision"]
        world.close()


def test_of_too_many_fences_the_largest_are_shown(world: TileWorld, client: httpx.Client) -> None:
    wide = {"type": "Point", "coordinates": [WEST, SOUTH]}
    big = FenceEvent.model_validate({"type": "Feature", "id": "big", "geometry": wide, "radius_m": 50_000})
    stand(world, *(fence(number) for number in range(5)), big)
    shown_ = client.get("/fences.geojson?limit=2").json()
    assert (shown_["total"], shown_["matched"], shown_["returned"]) == (6, 6, 2)
    assert 'demo:"big"' in of(shown_)


@pytest.mark.parametrize("query", ["bbox=1,2,3", "bbox=1,2,3,x", "limit=0", "limit=5001", "limit=2&limit=3"])
def test_a_malformed_question_names_its_parameter(client: httpx.Client, query: str) -> None:
    answer = client.get(f"/fences.geojson?{query}")
    assert answer.status_code == 400
    assert answer.json()["field"] == query.partition("=")[0]
