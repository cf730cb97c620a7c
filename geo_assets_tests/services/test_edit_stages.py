"""Stamps of an edit's stages: they travel with it, cost nobody anything when they are nonsense, and decide nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from geo_assets.events import topics
from geo_assets.services import announce, outbox
from geo_assets.services.dead_letters import scan_topic
from geo_assets.services.edit_stages import (
    NONE,
    STAGES,
    StageHistograms,
    Stamps,
    details_with,
    earliest,
    now_us,
    stamps_in,
    stamps_in_header,
    stamps_of,
)
from geo_assets.services.ingest import Ingest
from geo_assets_tests.world import World, feature
from resources.event_log.protocol import Record
from resources.ledger.protocol import Owed

moments = st.integers(0, 4_102_444_800_000_000)
some_stamps = st.fixed_dictionaries({}, optional=dict.fromkeys(STAGES, moments)).map(lambda d: Stamps(**d))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "home")
    yield made
    made.close()


def record(timestamp_ms: int = 1_777_636_800_000, **headers: str) -> Record:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Record(topics.RAW, 0, 0, "city:1", b"{}", named, timestamp_ms)


def owed(details: str) -> Owed:
    return Owed(1, "announce", "14:12020013321101", 7, "ab" * 32, "w", 10, "built", 1_777_636_800_250, 0, details)


# -- how they travel -----------------------------------------------------------------------------------------------


@given(some_stamps)
def test_stamps_come_out_of_a_header_and_of_a_commits_details_as_they_went_in(stamps: Stamps) -> None:
    assert stamps_in_header(stamps.to_json()) == stamps
    details = json.dumps(details_with(stamps, {"ms": 1.5}))
    assert stamps_in(details) == stamps
    assert json.loads(details)["ms"] == 1.5


@given(st.text())
def test_any_text_in_the_header_is_no_stamp_and_no_fault(text: str) -> None:
    stamps = stamps_of(record(stages=text, received_ms=text))
    assert 0 < stamps.received <= 4_102_444_800_000_000


@pytest.mark.parametrize(
    "nonsense",
    [
        '{"received":-1}', '{"received":1e300}', '{"received":"now"}', '{"received":99999999999999999}', "[]", "null",
        '{"received":null}', "{" * 5_000, '{"received":true}',
    ],
)  # fmt: skip
def test_a_header_with_another_thing_in_it_counts_as_none(nonsense: str) -> None:
    assert stamps_of(record(stages=nonsense)).received == 1_777_636_800_000_000
    assert stamps_in(f'{{"stages": {nonsense}}}') in (NONE, Stamps(received=0))


def test_a_stage_that_a_later_version_adds_does_not_lose_the_others() -> None:
    assert stamps_in_header('{"received":5,"weighed":6}') == Stamps(received=5)


def test_what_has_no_stamps_was_received_when_its_header_says_else_when_it_was_appended() -> None:
    assert stamps_of(record(received_ms="1777636799123")).received == 1_777_636_799_123_000
    assert stamps_of(record()).received == 1_777_636_800_000_000


def test_what_is_replayed_from_a_dead_letter_starts_anew() -> None:
    replayed = record(stages='{"received":5}', received_ms="1", replay="abc")
    assert stamps_of(replayed) == Stamps(received=1_777_636_800_000_000)


def test_of_several_edits_of_one_tile_the_one_that_waits_longest_counts() -> None:
    late, early, unknown = Stamps(received=9, hinted=10), Stamps(received=2, hinted=30), Stamps(hinted=1)
    assert earliest([late, early, unknown]) == early
    assert earliest([unknown]) == NONE
    assert earliest([]) == NONE


# -- along the way -------------------------------------------------------------------------------------------------


def test_a_hint_carries_when_its_edit_was_received_stored_and_hinted(world: World) -> None:
    before = now_us()
    world.edit(feature(1, 1), event_id="one", stages=Stamps(received=before - 5_000).to_json())
    hints = list(scan_topic(world.stack.log, topics.TILES))
    assert hints
    for hint in hints:
        stamps = stamps_of(hint)
        assert stamps.received == before - 5_000
        assert before <= stamps.stored <= stamps.hinted <= now_us()


def test_of_edits_that_are_stored_together_a_tiles_hint_tells_the_one_received_first(world: World) -> None:
    records = [
        world.send(feature(n, 1), event_id=f"e{n}", stages=Stamps(received=received).to_json())
        for n, received in ((1, 3_000_000), (2, 1_000_000), (3, 2_000_000))
    ]
    world.ingest.work(records)
    hints = list(scan_topic(world.stack.log, topics.TILES))
    assert {stamps_of(hint).received for hint in hints} == {1_000_000}
    assert {hint.headers[topics.HEADER_EVENT_ID] for hint in hints} == {"e3"}


def test_a_hint_whose_ingest_died_is_sent_all_the_same_and_says_what_is_known(world: World) -> None:
    class Crash(Exception):
        pass

    def crash(step: str) -> None:
        if step == "send hints":
            raise Crash

    record = world.send(feature(1, 1), event_id="one", stages=Stamps(received=5_000_000).to_json())
    doomed = Ingest(world.stack, step=crash)
    try:
        with pytest.raises(Crash):
            doomed.work([record])
    finally:
        doomed.close()
    assert outbox.send_hints(world.stack) > 0
    stamps = {stamps_of(hint) for hint in scan_topic(world.stack.log, topics.TILES)}
    assert {(one.received, one.stored, one.hinted > 0) for one in stamps} == {(5_000_000, 0, True)}


def test_an_announcement_tells_the_stages_that_the_commit_was_given() -> None:
    stamps = Stamps(received=1, stored=2, hinted=3, taken=4, built=1_777_636_800_250_700)
    told = json.loads(announce.announcement(owed(json.dumps(details_with(stamps, {})))).value or b"")["stages"]
    assert {name: told[name] for name in ("received", "stored", "hinted", "taken")} == {
        "received": 1, "stored": 2, "hinted": 3, "taken": 4,
    }  # fmt: skip
    assert told["built"] <= told["committed"] <= told["announced"] <= now_us()


@pytest.mark.parametrize("details", ["{}", '{"ms":1.2}', "", "no json", '{"stages":[]}', '{"stages":{}}'])
def test_an_announcement_of_a_commit_without_stamps_is_as_it_always_was(details: str) -> None:
    told = json.loads(announce.announcement(owed(details)).value or b"")
    assert set(told) == {"z", "x", "y", "hash", "revision", "outcome", "bytes", "built_at_ms", "data_time_ms"}


def test_what_is_announced_again_after_a_late_purge_tells_no_stages() -> None:
    told = json.loads(announce.announcement(owed('{"stages":{"received":1}}'), again=True).value or b"")
    assert "stages" not in told


def test_rule_14_stamps_enter_no_hint_no_work_key_and_no_byte_of_a_tile(tmp_path: Path) -> None:
    found = []
    for name, received in (("one", 1_000), ("other", 2_000_000_000)):
        world = World(tmp_path / name)
        try:
            stamps = {"received_ms": "1700000000000", "stages": Stamps(received=received).to_json()}
            world.edit(feature(1, 1), event_id="one", **stamps)
            hints = sorted((hint.key, hint.value) for hint in scan_topic(world.stack.log, topics.TILES))
            world.build_dirty()
            tiles = {s.key: (s.work_key, s.content_hash, s.revision) for s in world.published().values()}
        finally:
            world.close()
        found.append((hints, tiles))
    assert found[0] == found[1]
    assert found[0][1]


# -- histograms ----------------------------------------------------------------------------------------------------


def test_a_stage_takes_as_long_as_since_the_one_before_it_that_is_known() -> None:
    stamps = Stamps(received=1_000_000, stored=1_004_000, taken=1_010_000, built=1_009_000)
    assert stamps.seconds("stored") == 0.004
    assert stamps.seconds("taken") == 0.006
    assert stamps.age("taken") == 0.01
    assert stamps.seconds("built") == 0.0, "clocks of two machines differ; no stage takes less than nothing"
    assert stamps.seconds("hinted") is None
    assert stamps.seconds("received") is None


def test_a_process_counts_the_stages_it_sees_and_no_others() -> None:
    registry = CollectorRegistry()
    histograms = StageHistograms(registry)
    histograms.observe([Stamps(received=1_000, stored=31_000), Stamps(received=1_000), NONE], "stored", "hinted")

    def value(name: str, stage: str) -> float | None:
        return registry.get_sample_value(name, {"stage": stage})

    assert value("edit_stage_seconds_count", "stored") == 1
    assert value("edit_stage_seconds_sum", "stored") == pytest.approx(0.03)
    assert value("edit_age_seconds_sum", "stored") == pytest.approx(0.03)
    assert value("edit_stage_seconds_count", "hinted") == 0
    assert value("edit_stage_seconds_count", "built") is None
