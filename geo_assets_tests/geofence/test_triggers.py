from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_assets.geofence.triggers import (
    ENTER,
    EXIT,
    FrameError,
    Trigger,
    Triggers,
    decode,
    encode,
    encode_many,
    key,
    keys,
    to_json,
)

ONE = Trigger(
    "bus-18", 'demo:"depot"', 1, 1_777_636_800_250, 1_820_300_083_456_001, 2, 3, 4711, 9, 5, 1_777_636_800_300_000_000
)

texts = st.text(min_size=1, max_size=20)
counts = st.integers(0, 2**53)
triggers = st.builds(
    Trigger, texts, texts, st.integers(0, 2), st.integers(0, 2**42), counts, st.integers(0, 9), counts, counts, counts,
    counts, st.integers(0, 2**63 - 1),
)  # fmt: skip


@given(st.lists(triggers, max_size=5))
def test_a_frame_decodes_to_what_was_encoded(many: list[Trigger]) -> None:
    assert [decode(frame) for frame in encode_many(many)] == many
    assert encode_many(many) == [encode(one) for one in many]
    assert keys(many) == [key(one) for one in many]


def test_the_frame_of_version_1_stays_as_it_is() -> None:
    assert encode(ONE).hex() == (
        "019ba66275732d3138ac64656d6f3a226465706f742201cf0000019de368f6facf0006778da3dbe8010203cd12670905cf18ab6f40658b2300"
    )
    assert msgspec.msgpack.decode(encode(ONE)[1:]) == [
        "bus-18", 'demo:"depot"', 1, 1_777_636_800_250, 1_820_300_083_456_001, 2, 3, 4711, 9, 5,
        1_777_636_800_300_000_000,
    ]  # fmt: skip


def test_members_that_a_later_version_appends_are_passed_over() -> None:
    members = msgspec.msgpack.decode(encode(ONE)[1:])
    assert decode(b"\x01" + msgspec.msgpack.encode([*members, "more"])) == ONE


@pytest.mark.parametrize("frame", [b"", b"\x02" + encode(ONE)[1:], b"\x01", encode(ONE)[:-1], b"\x01\x90"])
def test_bytes_that_are_no_frame_are_refused(frame: bytes) -> None:
    with pytest.raises(FrameError, match="frame: "):
        decode(frame)


def test_an_unknown_state_is_refused() -> None:
    with pytest.raises(FrameError, match="state 3"):
        decode(encode(msgspec.structs.replace(ONE, state=3)))


def test_rule_14_a_key_knows_device_fence_state_second_and_sequence_and_no_clock() -> None:
    change = msgspec.structs.replace
    for other in (
        change(ONE, epoch=6), change(ONE, emitted_ns=1), change(ONE, event_time_ms=ONE.event_time_ms + 700),
        change(ONE, priority=0), change(ONE, source_offset=0), change(ONE, fence_revision=0),
    ):  # fmt: skip
        assert key(other) == key(ONE)
    for other in (
        change(ONE, device_id="bus-1"), change(ONE, fence_id='other:"depot"'), change(ONE, state=0),
        change(ONE, event_time_ms=ONE.event_time_ms + 750), change(ONE, sequence=ONE.sequence + 1),
    ):  # fmt: skip
        assert key(other) != key(ONE)
    assert len(key(ONE)) == 16
    assert key(ONE).hex() == "3467bc72ac4c166d8b092a173d9d5405"


def test_numbers_that_a_browser_cannot_hold_are_texts() -> None:
    members = json.loads(json.dumps(to_json(ONE)))
    assert members["state"] == "ENTER"
    assert members["emitted_ns"] == "1777636800300000000"
    assert members["sequence"] == ONE.sequence < 2**53


def test_columns_become_rows() -> None:
    columns = Triggers(
        ["a", "b"], np.array([1, 0]), ["1", "2"], np.array([ENTER, EXIT]), np.array([5, 6]), np.array([7, 8]),
        np.array([9, 0]), np.array([0, 1]), np.array([10, 11]), 3,
    )  # fmt: skip
    assert len(columns) == 2
    assert columns.rows(epoch=4, emitted_ns=99) == [
        Trigger("a", "2", 1, 5, 7, 9, 0, 10, 3, 4, 99),
        Trigger("b", "1", 0, 6, 8, 0, 1, 11, 3, 4, 99),
    ]
    assert replace(columns, fence_revision=5).rows()[0].fence_revision == 5


def test_the_page_for_consumers_tells_the_members_in_their_order() -> None:
    page = (Path(__file__).parents[2] / "docs" / "triggers.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \d+ \| `(\w+)` \|", page, re.MULTILINE)
    assert tuple(listed) == Trigger.__struct_fields__
    assert encode(ONE).hex() in page.replace("\n", "")
    assert key(ONE).hex() in page
