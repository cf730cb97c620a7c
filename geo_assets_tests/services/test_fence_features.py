"""Features of a layer of fences: stored and tiled as every feature is, and fences that routing follows."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import shapely

from geo_assets.events import topics
from geo_assets.events.models import FenceEvent
from geo_assets.geofence.fences import Fence
from geo_assets.ports import inbox_object
from geo_assets.services.dead_letters import scan_topic
from geo_assets.services.erasing import erase_features, erase_fences
from geo_assets.services.event_records import event_record
from geo_assets.services.fence_features import KIND, follow_fence_layers
from geo_assets.services.fences import FenceBook
from geo_assets.services.geofence_snapshots import in_force
from geo_assets.services.housekeeping import sweep
from geo_assets.services.importer import import_reading
from geo_assets.services.ingest import Ingest
from geo_assets.services.reading.files import open_file
from geo_assets_tests.geofence_world import position, seen
from geo_assets_tests.services.test_routing import OPTIONS, InThread
from geo_assets_tests.stacks import STACKS, changes_of
from geo_assets_tests.waiting import patient, until
from geo_assets_tests.world import HERE, World, work_off
from resources.event_log.protocol import NewRecord

LAYERS = """
max_zoom: 14
layers:
  - {name: buildings, min_zoom: 12, min_pixels: 0}
  - {name: fences, min_zoom: 12, min_pixels: 0, fences: true}
"""
SCHEDULE = {"zone": "Europe/Helsinki", "windows": ["Mo-Fr 08:00-17:30"]}
LON, LAT = HERE
POINT = {"type": "Point", "coordinates": [LON, LAT]}
SQUARE = shapely.geometry.mapping(shapely.box(LON, LAT, LON + 0.01, LAT + 0.01))


class Killed(BaseException):
    """The process ends here."""


def made_world(home: Path) -> Iterator[World]:
    home.mkdir(exist_ok=True)
    (home / "layers.yaml").write_text(LAYERS)
    made = World(home)
    yield made
    made.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    yield from made_world(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A world for tests that look at fences of their own names."""
    yield from made_world(tmp_path_factory.mktemp("shared"))


def feature(identifier: Any = "depot", version: int | None = 1, *, geometry: Any = POINT, **properties: Any) -> Any:
    said = {} if version is None else {"version": version}
    return {
        "type": "Feature", "id": identifier, **said, "layer": "fences", "geometry": geometry, "properties": properties,
    }  # fmt: skip


def fences(world: World) -> dict[str, Fence]:
    """Those in force for a routing run that looks now."""
    book = FenceBook(world.stack)
    return {fence.id: fence for fence in book.index(book.fold().name).fence_set.fences}


def test_a_feature_of_a_layer_of_fences_is_in_the_store_in_tiles_and_a_fence(world: World) -> None:
    said = {"radius_m": 150, "dwell_s": 60, "hysteresis_m": 20, "priority": 5, "schedule": SCHEDULE, "name": "Depot"}
    assert world.edit(feature(**said)).counts == {"applied": 1}
    made = fences(world)['city:"depot"']
    assert (made.revision, made.dwell_ms, made.hysteresis_m, made.priority, made.name) == (1, 60_000, 20.0, 5, "Depot")
    assert made.schedule is not None
    assert made.geometry.covers(shapely.Point(LON, LAT))
    assert shapely.area(made.geometry) > 0
    stored = world.stack.features.get("city", '"depot"')
    assert stored is not None
    assert json.loads(stored.properties)["radius_m"] == 150
    world.build_dirty()
    (key,) = [state.key for state in world.published().values() if state.key.startswith("14:")]
    assert world.properties(key, "fences")[0]["name"] == "Depot"


def test_members_that_stand_beside_the_properties_are_stored_among_them(shared: World) -> None:
    assert shared.edit(feature("kiosk") | {"radius_m": 80, "name": "Kiosk"}).counts == {"applied": 1}
    stored = shared.stack.features.get("city", '"kiosk"')
    assert stored is not None
    assert json.loads(stored.properties) == {"radius_m": 80, "name": "Kiosk"}
    assert fences(shared)['city:"kiosk"'].name == "Kiosk"


def test_what_a_table_can_say_of_a_fence_is_understood(shared: World) -> None:
    columns = {"radius_m": 80.0, "priority": 3.0, "schedule": json.dumps(SCHEDULE), "name": "", "dwell_s": None}
    assert shared.edit(feature("row", **columns)).counts == {"applied": 1}
    made = fences(shared)['city:"row"']
    assert (made.priority, made.name, made.dwell_ms) == (3, None, 0)
    assert made.schedule is not None


def test_a_fence_moves_goes_and_leaves_its_layer_as_its_feature_does(world: World) -> None:
    world.edit(feature("a", geometry=SQUARE))
    world.edit(feature("b", geometry=SQUARE))
    world.edit(feature("a", 3, radius_m=10))
    world.edit(feature("a", 2, geometry=SQUARE))
    world.edit(feature("b", 2, geometry=SQUARE) | {"layer": "buildings"})
    world.edit(feature("c", 7, geometry=SQUARE))
    world.edit({"type": "Feature", "id": "c", "version": 8, "action": "delete"})
    world.edit(feature("c", 6, geometry=SQUARE))
    assert {name: fence.revision for name, fence in fences(world).items()} == {'city:"a"': 3}


def test_versions_of_both_doors_are_one_count(shared: World) -> None:
    shared.edit(feature("both", 5, geometry=SQUARE, name="feature"))
    for version, name in ((4, "older"), (6, "newer")):
        event = {"type": "Feature", "id": "both", "version": version, "geometry": SQUARE, "name": name}
        record = event_record(FenceEvent.model_validate(event), source="city", event_id=name, received_ms=1)
        shared.stack.log.append([record])
        made = fences(shared)['city:"both"']
        assert (made.revision, made.name) == ((5, "feature") if version == 4 else (6, "newer"))


HOSTILE: list[tuple[str, dict[str, Any], str, str | None]] = [
    ("no radius", {"geometry": POINT}, "properties.radius_m", "> 0"),
    ("zero radius", {"radius_m": 0}, "properties.radius_m", "> 0.0"),
    ("a million kilometres", {"radius_m": 1e9}, "properties.radius_m", "<= 1000000.0"),
    ("text for a radius", {"radius_m": "12"}, "properties.radius_m", None),
    ("radius of an area", {"geometry": SQUARE, "radius_m": 5}, "properties.radius_m", "point or line"),
    ("hysteresis", {"radius_m": 5, "hysteresis_m": 10_001}, "properties.hysteresis_m", "<= 10000.0"),
    ("priority", {"radius_m": 5, "priority": 10}, "properties.priority", "<= 9"),
    ("half a priority", {"radius_m": 5, "priority": 1.5}, "properties.priority", None),
    ("dwell", {"radius_m": 5, "dwell_s": -1}, "properties.dwell_s", "> 0.0"),
    ("zone", {"radius_m": 5, "schedule": {"zone": "Mars/Base", "windows": ["Mo 08:00-09:00"]}},
     "properties.schedule.zone", None),
    ("schedule that is a word", {"radius_m": 5, "schedule": "always"}, "properties.schedule", None),
    ("name", {"radius_m": 5, "name": "x" * 129}, "properties.name", "length <= 128"),
    ("nothing", {"geometry": None}, "geometry", None),
    ("too many circles", {"geometry": {"type": "MultiPoint", "coordinates": [[n / 100, 1] for n in range(2_001)]},
                          "radius_m": 5}, "geometry", "2000"),
]  # fmt: skip


def test_what_is_no_fence_is_one_dead_letter_and_nothing_is_stored(shared: World) -> None:
    said = [feature(name, **members) for name, members, _, _ in HOSTILE]
    before = set(fences(shared))
    outcome = shared.edit({"type": "FeatureCollection", "features": [*said, feature("good", radius_m=5)]})
    assert outcome.counts == {"applied": 1}
    letters = {letter.index: letter for letter in outcome.letters}
    assert len(letters) == len(HOSTILE)
    for index, (name, _, field, limit) in enumerate(HOSTILE):
        letter = letters[index]
        assert (letter.field, letter.stage) == (field, "validate"), name
        assert limit is None or letter.limit == limit, name
        assert shared.stack.features.get("city", json.dumps(name)) is None
    assert set(fences(shared)) - before == {'city:"good"'}


def test_a_layer_that_holds_no_fences_takes_what_is_none(shared: World) -> None:
    said = feature("house", radius_m=-1, geometry=POINT) | {"layer": "buildings"}
    assert shared.edit(said).counts == {"applied": 1}
    assert 'city:"house"' not in fences(shared)


@pytest.mark.parametrize("step", ["send fences", "commit offsets"])
@pytest.mark.parametrize("stack", STACKS)
def test_rule_2_killed_between_the_transaction_and_the_offset_no_fence_is_lost(
    stack: str, step: str, tmp_path: Path
) -> None:
    with changes_of(stack) as changes:
        (tmp_path / "layers.yaml").write_text(LAYERS)
        world = World(tmp_path, **changes)
        try:
            no_fence_is_lost(world, step)
        finally:
            world.close()


def no_fence_is_lost(world: World, step: str) -> None:
    world.send(feature("a", radius_m=5))
    world.send(feature("b", radius_m=5))

    def kill(name: str) -> None:
        if name == step:
            raise Killed

    dying = Ingest(world.stack, step=kill)
    with pytest.raises(Killed):
        dying.run_once(timeout_s=patient(30))
    dying.close()
    assert world.stack.features.get("city", '"a"') is not None
    following = Ingest(world.stack)
    work_off(world, following)
    following.close()
    assert {name: fence.revision for name, fence in fences(world).items()} == {'city:"a"': 1, 'city:"b"': 1}
    assert not world.stack.features.owed(kind=KIND)


def test_what_an_import_that_was_killed_owes_is_swept(world: World) -> None:
    def kill(name: str) -> None:
        if name == "send fences":
            raise Killed

    dying = Ingest(world.stack, step=kill)
    with pytest.raises(Killed):
        dying.work([world.send(feature("a", radius_m=5))])
    dying.close()
    assert sweep(world.stack)["fences"] == 1
    assert list(fences(world)) == ['city:"a"']


def test_a_border_of_41_000_vertices_is_a_fence_by_way_of_the_inbox(shared: World) -> None:
    # As the edge leaves it where it came over HTTP: a body too large for the log is in the inbox.
    turns = [2 * math.pi * n / 41_000 for n in range(41_000)]
    ring = [[LON + 0.1 * math.cos(a), LAT + 0.05 * math.sin(a)] for a in turns]
    border = {"type": "Polygon", "coordinates": [[*ring, ring[0]]]}
    body = json.dumps(feature("border", geometry=border)).encode()
    name = inbox_object(hashlib.sha256(body).hexdigest())
    shared.stack.tiles.put(name, body)
    assert shared.edit(b"", pointer=name).counts == {"applied": 1}
    (record,) = [r for r in scan_topic(shared.stack.log, topics.FENCES) if r.key == 'city:"border"']
    assert record.headers[topics.HEADER_POINTER].startswith("inbox/")
    assert shapely.get_num_coordinates(fences(shared)['city:"border"'].geometry) == 41_001
    assert shared.edit(feature("border", 2, geometry=POINT, radius_m=3)).counts == {"applied": 1}
    assert fences(shared)['city:"border"'].revision == 2


SHAPES: dict[str, dict[str, Any]] = {
    "over the date line": {"type": "Polygon", "coordinates": [[[179, 1], [181, 1], [181, 2], [179, 2], [179, 1]]]},
    "split there": {"type": "MultiPolygon", "coordinates": [
        [[[179, 1], [180, 1], [180, 2], [179, 2], [179, 1]]], [[[-180, 1], [-179, 1], [-179, 2], [-180, 2], [-180, 1]]],
    ]},
    "around the pole": {"type": "Polygon", "coordinates": [
        [[-180, 70], [-90, 70], [0, 70], [90, 70], [180, 70], [180, 90], [-180, 90], [-180, 70]],
    ]},
    "a ring around it": {"type": "Polygon", "coordinates": [[[-170, 70], [-60, 72], [60, 71], [170, 72], [-170, 70]]]},
    "with a hole": {"type": "Polygon", "coordinates": [
        [[0, 0], [4, 0], [4, 4], [0, 4], [0, 0]], [[1, 1], [1, 3], [3, 3], [3, 1], [1, 1]],
    ]},
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_the_ground_of_a_fence_is_the_feature_s_through_both_doors(shared: World, name: str) -> None:
    shared.edit(feature(f"one {name}", geometry=SHAPES[name]))
    event = {"type": "Feature", "id": f"two {name}", "version": 1, "geometry": SHAPES[name]}
    shared.stack.log.append(
        [event_record(FenceEvent.model_validate(event), source="city", event_id="e", received_ms=1)]
    )
    made = fences(shared)
    stored = shared.stack.features.get("city", f'"one {name}"')
    assert stored is not None
    shape = made[f'city:"one {name}"'].geometry
    assert shapely.equals(shape, shapely.from_wkb(stored.geometry))
    assert shapely.equals(shape, made[f'city:"two {name}"'].geometry)


def test_a_circle_over_the_date_line_and_one_around_the_pole(shared: World) -> None:
    for name, lon, lat in (("date line", 180.0, 10.0), ("pole", 25.0, 89.99)):
        shared.edit(feature(name, geometry={"type": "Point", "coordinates": [lon, lat]}, radius_m=50_000))
    made = fences(shared)
    east, pole = made['city:"date line"'].geometry, made['city:"pole"'].geometry
    assert east.covers(shapely.Point(179.9, 10))
    assert east.covers(shapely.Point(-179.9, 10))
    assert all(pole.covers(shapely.Point(lon, 89.9)) for lon in (-170, -60, 0, 100))


def test_ids_are_kept_with_their_type(shared: World) -> None:
    before = set(fences(shared))
    for identifier in (1, "1", 1.5, "åäö 🙂", "x" * 200, None):
        assert shared.edit(feature(identifier, radius_m=5)).counts == {"applied": 1}
    assert shared.edit(feature(True, radius_m=5)).counts == {}
    found = set(fences(shared)) - before
    assert {"city:1", 'city:"1"', "city:1.5", 'city:"åäö 🙂"', f'city:"{"x" * 200}"'} < found
    assert len(found) == 6


def test_a_layer_that_holds_fences_from_now_on_sends_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "layers.yaml").write_text(LAYERS.replace(", fences: true", ""))
    world = World(tmp_path)
    world.edit(feature("good", 4, radius_m=5))
    world.edit(feature("bad", 4))
    world.close()
    (tmp_path / "layers.yaml").write_text(LAYERS)
    world = World(tmp_path)
    assert [follow_fence_layers(world.stack), follow_fence_layers(world.stack)] == [1, 0]
    assert {name: fence.revision for name, fence in fences(world).items()} == {'city:"good"': 4}
    (letter,) = world.letters()
    assert (letter.field, letter.feature_id, letter.layer) == ("properties.radius_m", '"bad"', "fences")
    assert world.stack.features.get("city", '"bad"') is not None
    world.close()


@pytest.mark.parametrize(
    ("name", "members", "reason", "field"),
    [
        ("crossing itself", {"geometry": {"type": "Polygon", "coordinates":
            [[[0, 0], [1, 1], [1, 0], [0, 1], [0, 0]]]}}, "invalid_geometry", "geometry"),
        ("hole outside", {"geometry": {"type": "Polygon", "coordinates": [
            [[0, 0], [1, 0], [1, 1], [0, 1], [0, 0]], [[5, 5], [6, 5], [6, 6], [5, 6], [5, 5]]]}},
         "invalid_geometry", "geometry"),
        ("beyond the pole", {"geometry": {"type": "Point", "coordinates": [0, 95]}, "radius_m": 5},
         "out_of_range", "geometry"),
        ("zero radius", {"geometry": POINT, "radius_m": 0}, "schema", "radius_m"),
        ("a million kilometres", {"geometry": POINT, "radius_m": 1e9}, "schema", "radius_m"),
        ("unknown zone", {"geometry": POINT, "radius_m": 5, "schedule":
            {"zone": "Mars/Base", "windows": ["Mo 08:00-09:00"]}}, "schema", "schedule.zone"),
        ("true for an id", {"geometry": POINT, "radius_m": 5, "id": True}, "schema", "id"),
        ("no id", {"geometry": POINT, "radius_m": 5, "id": None}, "schema", "id"),
        ("a long id", {"geometry": POINT, "radius_m": 5, "id": "x" * 300}, "schema", "id"),
        ("too many circles", {"geometry": {"type": "MultiPoint", "coordinates": [[n / 100, 1] for n in range(2_001)]},
            "radius_m": 5}, "too_large", "geometry"),
        ("NaN", b'{"type": "Feature", "id": 1, "radius_m": NaN, "geometry": null}', "schema", "$"),
        ("infinite", b'{"type": "Feature", "id": 1, "radius_m": 5, "geometry": {"type": "Point", '
            b'"coordinates": [1e999, 0]}}', "invalid_geometry", "geometry"),
        ("no JSON", b"\xff", "schema", "$"),
    ],
)  # fmt: skip
def test_a_hostile_record_of_fences_costs_itself_alone(
    shared: World, name: str, members: dict[str, Any] | bytes, reason: str, field: str
) -> None:
    before = set(fences(shared))
    known = {letter.id for letter in shared.letters()}
    good = {"type": "Feature", "id": f"beside {name}", "geometry": POINT, "radius_m": 5}
    value = members if isinstance(members, bytes) else json.dumps({"type": "Feature", "id": name} | members).encode()
    headers = {"source": "city"}
    shared.stack.log.append(
        [NewRecord(topics.FENCES, name, one, headers) for one in (value, json.dumps(good).encode())]
    )
    assert set(fences(shared)) - before == {f'city:"beside {name}"'}
    (letter,) = [letter for letter in shared.letters() if letter.id not in known]
    assert (letter.reason, letter.field) == (reason, field)


def test_running_routes_follow_features_and_erasing_closes_what_was_open(world: World) -> None:
    now = time.time_ns() // 1_000_000
    options = replace(OPTIONS, idle_s=None)
    run = InThread(world.stack, options)
    world.edit(feature("gate", radius_m=50))
    until(lambda: 'city:"gate"' in fences(world))
    until(lambda: in_force(world.stack.ledger).revision == FenceBook(world.stack).standing().revision)
    world.stack.log.append([position("bus-18", now, LON, LAT)])
    until(lambda: seen(world.stack).get("bus-18"))
    erase_features(world.stack, "city", None)
    until(lambda: len(seen(world.stack)["bus-18"]) == 2)
    run.end()
    assert [(t.fence_id, t.state) for t in seen(world.stack)["bus-18"]] == [('city:"gate"', 1), ('city:"gate"', 0)]


def test_an_imported_table_becomes_fences(world: World, tmp_path: Path) -> None:
    import numpy as np
    import pyogrio

    path = tmp_path / "zones.gpkg"
    columns = {
        "radius_m": np.array([50.0, np.nan, 70.0]), "dwell_s": np.array([60, 60, 60]),
        "priority": np.array([3.0, 1.0, 12.0]), "name": np.array(["Gate", None, "Far"], object),
        "schedule": np.array([json.dumps(SCHEDULE), None, None], object),
    }  # fmt: skip
    shapes = [shapely.Point(LON, LAT), shapely.box(24, 60, 24.1, 60.1), shapely.Point(24, 60)]
    pyogrio.raw.write(
        path, np.array(shapely.to_wkb(shapes), object), list(columns.values()), list(columns), geometry_type="Unknown",
        crs="EPSG:4326", layer="zones", driver="GPKG",
    )  # fmt: skip
    reading = open_file(path, layer="fences", layers=world.stack.layers.names)
    done = import_reading(world.stack, reading, world.stack.sources["city"])
    assert (done.read, done.outcomes, done.refused) == (3, {"applied": 2}, {"schema": 1})
    made = fences(world)
    assert {fence.name for fence in made.values()} == {"Gate", None}
    gate = next(fence for fence in made.values() if fence.name == "Gate")
    assert (gate.dwell_ms, gate.priority) == (60_000, 3)
    assert gate.schedule is not None
    (letter,) = world.letters()
    assert letter.field == "properties.priority"


def test_erasing_a_source_takes_its_fences_whichever_door_they_came_through(world: World) -> None:
    world.edit(feature("a", 4, radius_m=5))
    for source in ("city", "other"):
        event = {"type": "Feature", "id": "posted", "version": 9, "geometry": SQUARE}
        world.stack.log.append(
            [event_record(FenceEvent.model_validate(event), source=source, event_id="e", received_ms=1)]
        )
    assert len(fences(world)) == 3
    assert erase_features(world.stack, "city", None) == 1
    assert set(fences(world)) == {'city:"posted"', 'other:"posted"'}
    assert erase_fences(world.stack, "city") == 1
    assert erase_fences(world.stack, "city") == 0
    assert list(fences(world)) == ['other:"posted"']
