"""Coordinate reference systems."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from geo_assets.events import crs as module
from geo_assets.events.crs import ProbeFailed, crs_name, probe, resolve_crs, to_wgs84
from geo_assets.events.dead_letter import Refused


def refused(*arguments: Any, **options: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        resolve_crs(*arguments, **options)
    return caught.value


def at(crs: str, x: float, y: float, **options: Any) -> tuple[float, float]:
    places, _ = to_wgs84(crs, np.array([[x, y]], dtype=float), **options)
    return tuple(places[0].tolist())


def test_rule_11_known_coordinates_come_out_as_known():
    probe()


def test_rule_11_another_answer_fails_the_process(monkeypatch: pytest.MonkeyPatch):
    wrong = module._Probe("EPSG:3067", 500000.0, 6651411.19, 27.0, 60.00001)
    monkeypatch.setattr(module, "_PROBES", (wrong,))
    with pytest.raises(ProbeFailed, match="EPSG:3067"):
        probe()


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("EPSG:3067", "EPSG:3067"),
        ("epsg:3067", "EPSG:3067"),
        (3067, "EPSG:3067"),
        ("3067", "EPSG:3067"),
        ("urn:ogc:def:crs:EPSG::3067", "EPSG:3067"),
        ("urn:ogc:def:crs:EPSG:6.9:3067", "EPSG:3067"),
        ("http://www.opengis.net/def/crs/EPSG/0/3067", "EPSG:3067"),
        ("urn:ogc:def:crs:OGC:1.3:CRS84", "OGC:CRS84"),
        ("CRS84", "OGC:CRS84"),
        ("EPSG:900913", "EPSG:3857"),
        ({"type": "name", "properties": {"name": "urn:ogc:def:crs:EPSG::2154"}}, "EPSG:2154"),
        ({"type": "EPSG", "properties": {"code": 2154}}, "EPSG:2154"),
        (None, None),
    ],
)
def test_every_form_in_use_names_its_crs(value: Any, name: str | None):
    assert crs_name(value) == name


@pytest.mark.parametrize(
    "value",
    [
        True,
        5.0,
        "",
        "WGS 84",
        "+proj=utm +zone=35 +nadgrids=/etc/passwd",
        'GEOGCS["x"]',
        {"type": "link", "properties": {"href": "http://example.org/crs"}},
        {"type": "name"},
        {},
        [],
        "EPSG:" + "9" * 500,
    ],
)
def test_anything_else_is_refused(value: Any):
    with pytest.raises(Refused) as caught:
        crs_name(value)
    assert caught.value.reason == "unknown_crs"


def test_rule_11_what_is_not_declared_is_refused():
    assert refused([], None).reason == "unknown_crs"
    assert refused([("crs", None)], None).reason == "unknown_crs"
    assert resolve_crs([("crs", None)], "EPSG:4326") == "EPSG:4326"


def test_a_declaration_counts_before_the_sources_default():
    assert resolve_crs([("crs", None), ("X-Source-CRS", "EPSG:3067")], "EPSG:4326") == "EPSG:3067"


def test_declarations_in_conflict_are_refused_by_name():
    caught = refused([("crs", "EPSG:3067"), ("properties.source_epsg", 2154)], None)
    assert (caught.reason, caught.field) == ("unknown_crs", "properties.source_epsg")
    assert "EPSG:3067" in str(caught)


def test_two_names_of_one_crs_are_no_conflict():
    assert resolve_crs([("crs", "OGC:CRS84"), ("X-Source-CRS", "EPSG:4326")], None) == "OGC:CRS84"
    assert resolve_crs([("crs", "EPSG:3857"), ("X-Source-CRS", "EPSG:900913")], None) == "EPSG:3857"


@pytest.mark.parametrize("name", ["EPSG:99999", "EPSG:5773", "EPSG:4978", "OGC:NOTHING"])
def test_what_proj_does_not_know_or_has_no_map_is_refused(name: str):
    assert refused([("crs", name)], None).reason == "unknown_crs"


def test_x_comes_first_whatever_the_axis_order_on_paper():
    assert at("EPSG:4258", 24.9, 60.1) == pytest.approx((24.9, 60.1))
    assert at("EPSG:3879", 25500000.0, 6654072.8194) == pytest.approx((25.0, 60.0), abs=1e-8)
    assert at("EPSG:2154", 700000.0, 6600000.0) == pytest.approx((3.0, 46.5), abs=1e-9)


def test_operation_and_accuracy_are_recorded():
    _, operation = to_wgs84("EPSG:2393", np.array([[3385000.0, 6675000.0]]))
    assert "KKJ" in operation.name
    assert operation.accuracy_m == 1.0
    assert to_wgs84("EPSG:4326", np.array([[1.0, 2.0]]))[1].name == "none"


def test_a_ballpark_transformation_is_refused_unless_the_source_allows_it():
    with pytest.raises(Refused) as caught:
        at("EPSG:4901", 2.0, 50.0)
    assert caught.value.reason == "unknown_crs"
    assert "ballpark" in str(caught.value)
    _, operation = to_wgs84("EPSG:4901", np.array([[2.0, 50.0]]), allow_ballpark=True)
    assert operation.ballpark


def test_places_far_outside_the_area_of_use_are_refused_unless_the_source_allows_it():
    with pytest.raises(Refused) as caught:
        at("EPSG:3067", 6672000.0, 385000.0)  # Northing and easting exchanged.
    assert caught.value.reason == "unknown_crs"
    assert "area of use" in str(caught.value)
    at("EPSG:3067", 6672000.0, 385000.0, allow_ballpark=True)


def test_places_a_little_outside_are_not():
    lon, _ = at("EPSG:32635", 150000.0, 6700000.0)
    assert 19 < lon < 24


def test_an_area_of_use_across_the_date_line_has_places_on_both_sides():
    assert at("EPSG:3832", 4000000.0, 0.0)[0] == pytest.approx(-174.067, abs=0.01)
    assert at("EPSG:3832", 3000000.0, 0.0)[0] == pytest.approx(176.949, abs=0.01)


def test_coordinates_that_are_no_place_are_out_of_range():
    with pytest.raises(Refused) as caught:
        at("EPSG:3067", 1e12, 1e12)
    assert caught.value.reason == "out_of_range"


def test_a_crs_of_another_body_is_refused():
    with pytest.raises(Refused) as caught:
        at("IAU_2015:30100", 1.0, 2.0)
    assert caught.value.reason == "unknown_crs"
