from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_assets.events.models import PositionEvent
from geo_assets.events.records import position_value
from geo_assets.geofence.positions import read_positions, tick_value
from geo_assets_tests.geofence.world import NOON


def test_records_of_positions_and_ticks_become_columns() -> None:
    said = PositionEvent(device_id="bus-18", lon=24.9, lat=60.1, time="2026-05-01T12:00:00.250Z", accuracy_m=12)
    values = [
        json.dumps(position_value(said)).encode(),
        tick_value(NOON),
        b'{"device_id":"x","event_time_ms":1,"lon":1,"lat":2}',
    ]
    columns, poison = read_positions(values, [0, 1, 0], [7, 0, 8], [NOON, NOON, 5])
    assert not poison
    assert columns.device == ["bus-18", None, "x"]
    assert columns.time_ms.tolist() == [NOON + 250, NOON, 1]
    assert columns.lon.tolist()[::2] == [24.9, 1.0]
    assert columns.accuracy_m[0] == 12
    assert math.isnan(columns.accuracy_m[2])
    assert (columns.partition.tolist(), columns.offset.tolist(), columns.received_ms.tolist()) == (
        [0, 1, 0], [7, 0, 8], [NOON, NOON, 5],
    )  # fmt: skip


def test_poison_is_named_by_its_row_and_keeps_its_offset() -> None:
    values = [None, b"{", b'{"lon":1}', b'{"event_time_ms":"1"}', b"\xff", tick_value(NOON), b'{"event_time_ms":1e30}']
    columns, poison = read_positions(values, [0] * 7, list(range(7)), [NOON] * 7)
    assert poison == [0, 1, 2, 3, 4, 6]
    assert columns.offset.tolist() == list(range(7))
    assert columns.device == [None] * 7


def test_a_time_beyond_64_bits_is_out_of_range_like_any_other() -> None:
    columns, poison = read_positions(
        [b'{"device_id":"d","lon":1,"lat":2,"event_time_ms":%d}' % (1 << 63)], [0], [0], [NOON]
    )
    assert not poison
    assert columns.time_ms.tolist() == [0]


ODD = [
    b'{"device_id":"a","event_time_ms":1}',
    b'{"device_id":"b","event_time_ms":2}\n',
    b'{"device_id":"c",\n"event_time_ms":3}',
    b'{"event_time_ms":4}{"event_time_ms":5}',
    b'{"event_time_ms":7}\n{"event_time_ms":8}',
    b'\r{"event_time_ms":10}',
    *(b'{"event_time_ms":6,', b'"device_id":"d"}', b'{"device_id":"', b'","event_time_ms":9}'),
    *(b"", b" ", b"\n", b"\r", b"1", b"[]", None),
]


@given(st.lists(st.sampled_from(ODD), max_size=6))
def test_each_record_is_judged_by_itself_whatever_stands_beside_it(values: list[bytes | None]) -> None:
    columns, poison = read_positions(values, [0] * len(values), list(range(len(values))), [NOON] * len(values))
    alone = [read_positions([value, None], [0, 0], [0, 1], [NOON, NOON]) for value in values]
    assert poison == [row for row, (_, bad) in enumerate(alone) if 0 in bad]
    assert list(columns.device) == [one.device[0] for one, _ in alone]
    assert columns.time_ms.tolist() == [int(one.time_ms[0]) for one, _ in alone]


@pytest.mark.parametrize(
    "members",
    [
        {"device_id": "a"},
        {"device_id": "a", "lat": 60.1},
        {"device_id": "a", "lon": 24.9},
        {"device_id": "", "lon": 1, "lat": 2},
        {"device_id": "x" * 129, "lon": 1, "lat": 2},
        {"device_id": "a\0b", "lon": 1, "lat": 2},
        {"lon": 1, "lat": 2},
        {"device_id": "a", "lon": None, "lat": 2},
    ],
)
def test_a_record_without_a_place_or_a_device_is_poison_and_never_at_0_0(members: dict[str, Any]) -> None:
    value = json.dumps({"event_time_ms": NOON, **members}).encode()
    good = json.dumps({"event_time_ms": NOON, "device_id": "b", "lon": 1.0, "lat": 2.0}).encode()
    found, poison = read_positions([good, value, tick_value(NOON)], [0, 0, 0], [0, 1, 2], [1, 1, 1])
    assert poison == [1]
    assert found.device == ["b", None, None]
    assert found.time_ms.tolist() == [NOON, 0, NOON]
