"""Routes of the sample: on its streets, closed, and the file exactly what its script makes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import shapely
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets.services.sample import folder
from geo_assets.simulation.routes import (
    KINDS,
    METRES_A_DEGREE,
    Route,
    RouteError,
    decode_line,
    encode_line,
    read_routes,
    write_routes,
)
from scripts.sample_city import Streets, files, read_streets

ROUTES = read_routes((folder() / "routes.json").read_bytes())


@pytest.fixture(scope="module")
def streets() -> dict[str, Streets]:
    return dict(read_streets().items())


def test_every_kind_has_routes_and_every_route_is_closed_and_of_a_length_to_walk() -> None:
    assert {route.kind for route in ROUTES} == set(KINDS)
    for route in ROUTES:
        assert (route.lon[0], route.lat[0]) == (route.lon[-1], route.lat[-1])
        assert 1_500 <= route.distance_m[-1] <= 10_000
        assert len(route.stops) == 5


def test_routes_go_along_streets_that_are_open_to_their_kind(streets: dict[str, Streets]) -> None:
    for kind in KINDS:
        tree = shapely.STRtree(list(streets[kind].lines()))
        points = np.concatenate([np.column_stack((r.lon, r.lat)) for r in ROUTES if r.kind == kind])
        middles = (points[1:] + points[:-1]) / 2
        jumps = np.abs(np.diff(points, axis=0)).max(axis=1) > 0.01  # from one route to the next
        for some in (points, middles[~jumps]):
            # 1e-6 of a degree: the step of the file's lines, and a rounding.
            shapes = shapely.points(some)
            _, distance = tree.query_nearest(shapes, return_distance=True, all_matches=False)
            near = distance * METRES_A_DEGREE < 0.3
            # The seam between two routes of the list is no street.
            assert near.mean() > 0.998, kind


def test_cars_keep_to_one_way_streets(streets: dict[str, Streets]) -> None:
    network = streets["car"]
    places = {(round(network.lon[n] * 1e6), round(network.lat[n] * 1e6)): n for n in network.lon}
    edges = {(node, target) for node, found in network.ways.items() for target, _ in found}
    against = 0
    for route in ROUTES:
        if route.kind != "car":
            continue
        steps = np.rint(np.column_stack((route.lon, route.lat)) * 1e6).astype(int).tolist()
        against += sum(pair not in edges for pair in pairwise(places[lon, lat] for lon, lat in steps))
    assert against == 0


def test_the_files_of_the_sample_are_what_the_script_makes_of_the_extract() -> None:
    made = files()
    assert {path.name for path in made} == {"routes.json", "fences.geojson"}
    for path, data in made.items():
        assert path.read_bytes() == data, f"run python -m scripts.sample_city: {path.name} is of another extract"
        assert "OpenStreetMap contributors" in data.decode()


@given(
    st.lists(
        st.tuples(st.integers(-180_000_000, 180_000_000), st.integers(-90_000_000, 90_000_000)), min_size=1, max_size=40
    )
)
@settings(max_examples=50)
def test_a_line_is_the_same_after_it_was_a_text(points: list[tuple[int, int]]) -> None:
    lon, lat = np.array(points).T / 1e6
    again = decode_line(encode_line(lon, lat))
    assert np.array_equal(again[0], lon)
    assert np.array_equal(again[1], lat)


def test_the_encoding_of_lines_is_the_one_that_others_read() -> None:
    # The example of the format's description, whose digits are five: here they are a tenth as large.
    lon, lat = np.array([-12.02, -12.095, -12.6453]), np.array([3.85, 4.07, 4.3252])
    assert encode_line(lon, lat) == "_p~iF~ps|U_ulLnnqC_mqNvxq`@"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"[]", "routes"),
        (b'{"routes":[]}', "none in the file"),
        (b'{"routes":[{"kind":"boat","stops":[0],"line":""}]}', "boat"),
        (b'{"routes":[{"kind":"car","stops":[0],"line":"_p~iF~ps|U"}]}', r"routes\[0\]: route: 1 points"),
        (b'{"routes":[{"kind":"car","stops":[0],"line":"_p~iF"}]}', "middle of a point"),
        (b'{"routes":[{"kind":"car","stops":[0],"line":"\\n"}]}', "no character"),
    ],
)
def test_a_file_that_is_none_says_which_route_and_why(data: bytes, says: str) -> None:
    with pytest.raises(RouteError, match=says):
        read_routes(data)


def test_a_file_of_routes_reads_as_it_was_written() -> None:
    again = read_routes(write_routes(ROUTES[:3], attribution="somebody"))
    assert [(r.kind, r.stops) for r in again] == [(r.kind, r.stops) for r in ROUTES[:3]]
    assert all(np.array_equal(a.lon, b.lon) for a, b in zip(again, ROUTES, strict=False))


@pytest.mark.parametrize("stops", [(), (1,), (0, 3, 2), (0, 3)])
def test_stops_are_points_of_the_route_from_its_first(stops: tuple[int, ...]) -> None:
    around = np.array([0.0, 1.0, 1.0, 0.0])
    with pytest.raises(RouteError, match="stop"):
        Route("car", around, around[[0, 0, 1, 0]], stops)
