"""Dead letters go back to where they came from, and count once however often they are sent."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from geo_assets.cli import app
from geo_assets.events import topics
from geo_assets.events.dead_letter import DeadLetter
from geo_assets.geofence.triggers import ENTER, Trigger, encode
from geo_assets.services import resending, routing
from geo_assets.services.dead_letters import home_of, list_dead_letters, replay, scan_topic, write_dead_letters
from geo_assets.services.fences import FenceBook
from geo_assets.services.poison import letter_of
from geo_assets.settings import Settings
from geo_assets.stack import Stack
from geo_assets_tests.geofence_world import SIDE, SOUTH, WEST, fence, post_fences, seen
from geo_assets_tests.services.test_routing import OPTIONS
from resources.event_log.protocol import NewRecord, RecordTooLarge

INSIDE = {"lon": WEST + 1.5 * SIDE, "lat": SOUTH + 0.5 * SIDE}
NOON = time.time_ns() // 10**9 * 1000 - 60_000
"""A minute ago: devices that were silent for longer would be forgotten."""
TRIGGER = Trigger("bus-18", 'demo:"f1"', ENTER, NOON, NOON * 1024, 3, 0, 7, 1, 1, 1)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with Stack(Settings(home=tmp_path, log_partitions=2)) as opened:
        yield opened


def letters(stack: Stack) -> list[DeadLetter]:
    return [one.letter for one in list_dead_letters(stack.log) if one.replayed_ms is None]


def put(stack: Stack, topic: str, key: str | None, value: Any, **headers: str) -> None:
    stack.log.append([NewRecord(topic, key, json.dumps(value).encode(), headers, NOON)])


def test_a_position_goes_back_to_positions_and_counts_once(stack: Stack) -> None:
    post_fences(stack, [fence(1)])
    put(stack, topics.POSITIONS, "bus-18", {"device_id": "bus-18", **INSIDE, "time_ms": "noon"}, source="demo")
    routing.route(stack, OPTIONS)
    (letter,) = letters(stack)
    assert (letter.stage, home_of(letter)) == ("route", topics.POSITIONS)
    with pytest.raises(ValueError, match="time_ms") as refused:
        replay(stack, [letter])
    assert str(INSIDE["lon"]) not in str(refused.value)
    mended = json.dumps({"device_id": "bus-18", **INSIDE, "time_ms": NOON}).encode()
    for _ in range(2):
        assert replay(stack, [letter], payload=mended) == 1
    routing.route(stack, OPTIONS)
    assert [t.state for t in seen(stack)["bus-18"]] == [ENTER]
    assert letters(stack) == []


def test_a_position_is_mended_in_the_form_in_which_its_record_stands(stack: Stack) -> None:
    post_fences(stack, [fence(1)])
    record = {"device_id": "bus-18", **INSIDE, "event_time_ms": NOON}
    put(stack, topics.POSITIONS, "bus-18", {**record, "lon": "24.9x"})
    routing.route(stack, OPTIONS)
    (letter,) = letters(stack)
    assert letter.payload == json.dumps({**record, "lon": "24.9x"}).encode()
    for mended in (record, [record]):
        assert replay(stack, [letter], payload=json.dumps(mended).encode()) == 1
    routing.route(stack, OPTIONS)
    assert [(t.state, t.event_time_ms) for t in seen(stack)["bus-18"]] == [(ENTER, NOON)]
    with pytest.raises(ValueError, match="time"):
        replay(stack, [letter], payload=json.dumps({**record, "event_time_ms": None}).encode())


def test_a_position_older_than_its_device_s_last_undoes_nothing(stack: Stack) -> None:
    post_fences(stack, [fence(1)])
    put(stack, topics.POSITIONS, "bus-18", {"device_id": "bus-18", **INSIDE, "time_ms": "noon"})
    put(stack, topics.POSITIONS, "bus-18", {"device_id": "bus-18", **INSIDE, "event_time_ms": NOON + 5_000})
    routing.route(stack, OPTIONS)
    replay(
        stack, letters(stack), payload=json.dumps({"device_id": "bus-18", "lon": 0, "lat": 0, "time_ms": NOON}).encode()
    )
    routing.route(stack, OPTIONS)
    assert [t.state for t in seen(stack)["bus-18"]] == [ENTER]


def test_a_fence_goes_back_to_fences_and_counts_once(stack: Stack) -> None:
    point = {"type": "Feature", "id": "kiosk", "geometry": {"type": "Point", "coordinates": [24, 60]}}
    put(stack, topics.FENCES, 'demo:"kiosk"', point, source="demo")
    book = FenceBook(stack)
    book.fold()
    (letter,) = letters(stack)
    assert (letter.field, home_of(letter)) == ("radius_m", topics.FENCES)
    for _ in range(2):
        replay(stack, [letter], payload=json.dumps({**point, "radius_m": 5}).encode())
    (made,) = book.index(book.fold().name).fence_set.fences
    assert (made.id, made.revision) == ('demo:"kiosk"', NOON)
    assert book.standing().revision == 1
    assert letters(stack) == []


def test_a_fence_that_died_never_takes_the_place_of_a_newer_one(stack: Stack) -> None:
    put(stack, topics.FENCES, 'demo:"f1"', {"type": "Feature", "id": "f1", "geometry": None}, source="demo")
    post_fences(stack, [fence(1, version=NOON + 1)])
    book = FenceBook(stack)
    book.fold()
    (letter,) = letters(stack)
    shape = {"type": "Point", "coordinates": [24, 60]}
    replay(
        stack, [letter], payload=json.dumps({"type": "Feature", "id": "f1", "radius_m": 5, "geometry": shape}).encode()
    )
    (made,) = book.index(book.fold().name).fence_set.fences
    assert made.revision == NOON + 1


def test_a_trigger_goes_out_by_the_routing_run_under_its_epoch_and_counts_once(stack: Stack) -> None:
    post_fences(stack, [fence(1)])
    put(stack, topics.POSITIONS, "bus-1", {"device_id": "bus-1", **INSIDE, "event_time_ms": NOON})
    routing.route(stack, OPTIONS)
    write_dead_letters(stack, [letter_of(TRIGGER, encode(TRIGGER), RecordTooLarge("too large"))])
    (letter,) = letters(stack)
    assert home_of(letter) == topics.TRIGGERS
    for _ in range(2):
        replay(stack, [letter])
        result = routing.route(stack, OPTIONS)
        replay(stack, [letter])
        again = routing.route(stack, OPTIONS)
        assert (again.routed, again.deduped) == (0, 1)
    assert resending.wishes(stack.ledger) == []
    (told,) = seen(stack)["bus-18"]
    assert told == msgspec.structs.replace(TRIGGER, epoch=told.epoch)
    assert told.epoch > 1
    assert result.routed in (0, 1)
    assert letters(stack) == []


def test_one_that_dies_again_is_listed_again(stack: Stack) -> None:
    letter = letter_of(TRIGGER, encode(TRIGGER), RecordTooLarge("too large"))
    write_dead_letters(stack, [letter])
    replay(stack, [letter])
    assert letters(stack) == []
    write_dead_letters(stack, [letter])
    assert [one.id for one in letters(stack)] == [letter.id]


def test_a_stranger_s_position_without_a_time_of_ours_is_read(stack: Stack) -> None:
    post_fences(stack, [fence(1)])
    put(stack, topics.POSITIONS, "bus-18", {"device_id": "bus-18", **INSIDE, "time_s": NOON // 1000})
    routing.route(stack, OPTIONS)
    assert [t.event_time_ms for t in seen(stack)["bus-18"]] == [NOON]
    assert letters(stack) == []


def test_the_command_chooses_hides_and_sends(stack: Stack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GEO_ASSETS_HOME", str(tmp_path))
    monkeypatch.setenv("GEO_ASSETS_LOG_PARTITIONS", "2")
    post_fences(stack, [fence(1)])
    put(stack, topics.POSITIONS, "bus-18", {"device_id": "bus-18", **INSIDE, "time_ms": "noon"}, source="demo")
    put(stack, topics.FENCES, None, {"type": "Feature", "id": "x", "geometry": None}, source="city")
    routing.route(stack, OPTIONS)
    position, posted = sorted(letters(stack), key=lambda one: one.stage)
    lon = str(INSIDE["lon"])

    def command(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(app, ["dead-letters", *arguments])
        assert result.exit_code == code, result.output
        return result.output

    assert lon not in command("list") + command("list", "--json") + command("show", position.id)
    assert lon not in command("show", position.id, "--raw", code=1)
    assert lon in command("show", position.id, "--reveal")
    assert lon in command("show", position.id, "--reveal", "--raw")
    assert "1 to positions" in command("replay", "--stage", "route", "--dry-run")
    assert "1 to fences" in command("replay", "--source", "city", "--since", "1h", "--reason", "schema", "--dry-run")
    assert "0 would be" in command("replay", "--since", "2999-01-01T00:00Z", "--dry-run")
    for wrong in (["--since", "soon"], ["--since", "2026-05-01T12:00"], ["--stage", "nowhere"], []):
        command("replay", *wrong, code=1)
    assert "1 more are left" in command("replay", "--all", "--limit", "1", "--dry-run")
    refused = command("replay", position.id, code=1)
    assert "--payload" in refused
    assert lon not in refused
    mended = tmp_path / "mended.json"
    mended.write_text(json.dumps({"device_id": "bus-18", **INSIDE, "time_ms": NOON}))
    names = tmp_path / "ids"
    names.write_text(f"{position.id}\n\n")
    assert "replayed 1;" in command("replay", "--ids", str(names), "--payload", str(mended))
    assert "replayed 1;" in command("replay", posted.id)
    assert len(list(scan_topic(stack.log, topics.FENCES))) == 3
    write_dead_letters(stack, [letter_of(TRIGGER, encode(TRIGGER), RecordTooLarge("too large"))])
    assert "replayed 1;" in command("replay", "--stage", "route")
    assert [t.state for t in seen(stack)["bus-18"]][-1] == ENTER
