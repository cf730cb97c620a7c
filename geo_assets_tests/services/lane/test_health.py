from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_assets.services.lane.health import (
    FORGOTTEN_MS,
    GRACE_MS,
    SILENT_MS,
    STUCK_MS,
    VALUE,
    Beat,
    beat,
    grace_ms,
    read_beats,
    write_beats,
)
from geo_assets_tests.world import World

NOW = 1_000_000_000


def test_a_lane_that_rests_or_gets_on_has_a_grace() -> None:
    assert grace_ms([Beat(NOW, NOW)], NOW) == GRACE_MS
    assert grace_ms([Beat(NOW, NOW - STUCK_MS + 1, waiting=9)], NOW) == GRACE_MS


def test_a_lane_that_only_beats_has_none() -> None:
    assert grace_ms([Beat(NOW, NOW - STUCK_MS, waiting=1)], NOW) == 0


def test_a_lane_that_is_silent_or_was_never_there_has_none() -> None:
    assert grace_ms([Beat(NOW - SILENT_MS, NOW)], NOW) == 0
    assert grace_ms([], NOW) == 0


def test_one_stuck_worker_among_several_ends_the_grace_of_all_and_a_dead_one_does_not() -> None:
    well = Beat(NOW, NOW, waiting=3)
    assert grace_ms([well, Beat(NOW, NOW - STUCK_MS, waiting=1)], NOW) == 0
    assert grace_ms([well, Beat(NOW - SILENT_MS, NOW - STUCK_MS, waiting=1)], NOW) == GRACE_MS


@pytest.mark.parametrize("text", [None, "", "[]", "7", "{", '{"a": 1}', '{"a": {"b": 1}}', '{"a": {"at_ms": "x"}}'])
def test_what_cannot_be_read_is_nobody_s_beat(text: str | None) -> None:
    assert read_beats(text) == {}


@given(st.dictionaries(st.text(max_size=20), st.builds(Beat, *[st.integers(0, 2**53)] * 4), max_size=5))
def test_beats_are_read_as_they_were_written(beats: dict[str, Beat]) -> None:
    assert read_beats(write_beats(beats)) == beats


def test_workers_write_beside_each_other_and_long_silent_ones_are_struck_out(tmp_path: Path) -> None:
    world = World(tmp_path / "home")
    ledger = world.stack.ledger
    try:
        assert beat(ledger, "a", Beat(NOW, NOW))
        assert beat(ledger, "b", Beat(NOW + 1, NOW))
        assert set(read_beats(ledger.get_value(VALUE))) == {"a", "b"}
        assert beat(ledger, "b", Beat(NOW + 1 + FORGOTTEN_MS, NOW))
        assert set(read_beats(ledger.get_value(VALUE))) == {"b"}
        assert beat(ledger, "b", None)
        assert ledger.get_value(VALUE) is None
    finally:
        world.close()
