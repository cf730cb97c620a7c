"""Dead letters are counted once each, however many count, and no payload is kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from geo_assets.events import topics
from geo_assets.events.dead_letter import DeadLetter
from geo_assets.services import dead_letter_counts
from geo_assets.services.dead_letter_counts import HOUR_MS, HOURS, PAIRS, Counts, advance, by_reason, stored
from geo_assets.services.dead_letters import replay, write_dead_letters
from geo_assets_tests.world import World, feature
from resources.event_log.protocol import Record


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "home")
    yield made
    made.close()


def letter(number: int, reason: str = "schema", source: str = "city") -> DeadLetter:
    return DeadLetter.make(
        reason=reason, stage="ingest", explanation="x", source=source, at_ms=1, payload=f"{number} 60.17".encode()
    )


def record(value: bytes, at_ms: int) -> Record:
    return Record(
        topic=topics.DEAD_LETTERS, partition=0, offset=0, timestamp_ms=at_ms, key=None, value=value, headers={}
    )


def now(world: World) -> int:
    from geo_assets.services.dead_letters import now_ms

    return now_ms()


def test_every_dead_letter_is_counted_once(world: World) -> None:
    write_dead_letters(world.stack, [letter(1), letter(2), letter(3, "timeout"), letter(4, source="other")])
    assert advance(world.stack, now(world)).reasons == {"schema": 3, "timeout": 1}
    assert advance(world.stack, now(world)).total == 4
    write_dead_letters(world.stack, [letter(5)])
    counts = advance(world.stack, now(world))
    assert counts.total == 5
    assert counts.since(now(world) - HOUR_MS) == {
        ("schema", "city"): 3, ("schema", "other"): 1, ("timeout", "city"): 1
    }  # fmt: skip
    assert by_reason(counts.since(0)) == {"schema": 4, "timeout": 1}
    assert "60.17" not in counts.to_json()


def test_a_replay_is_no_dead_letter_and_is_counted_apart(world: World) -> None:
    world.edit(b"{not json", event_id="a")
    replay(world.stack, world.letters())
    counts = advance(world.stack, now(world))
    assert (counts.total, counts.replayed) == (1, 1)


def test_of_two_that_count_at_once_one_counts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    write_dead_letters(world.stack, [letter(1)])
    read = dead_letter_counts._read

    def another_is_faster(*given) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(dead_letter_counts, "_read", read)
            advance(world.stack, now(world))
        return read(*given)

    monkeypatch.setattr(dead_letter_counts, "_read", another_is_faster)
    assert advance(world.stack, now(world)).total == 1
    assert stored(world.stack).total == 1


def test_what_a_call_has_no_time_for_the_next_one_counts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    write_dead_letters(world.stack, [letter(number) for number in range(10)])
    monkeypatch.setattr(dead_letter_counts, "READING_S", -1.0)
    assert advance(world.stack, now(world)).behind
    monkeypatch.undo()
    counts = advance(world.stack, now(world))
    assert (counts.total, counts.behind) == (10, False)


def test_records_that_retention_took_uncounted_do_not_stop_it(world: World) -> None:
    write_dead_letters(world.stack, [letter(1)])
    world.retention_takes(topics.DEAD_LETTERS)
    write_dead_letters(world.stack, [letter(2)])
    assert advance(world.stack, now(world)).total >= 1


def test_hours_and_pairs_are_bounded() -> None:
    counts, at_ms = Counts(), 1_000 * HOUR_MS
    for number in range(PAIRS + 50):
        value = letter(number, source=f"s{number}").to_json()
        counts.count(record(value, at_ms), at_ms)
    assert len(counts.hours[1_000]) == PAIRS + 1
    assert counts.since(0)["schema", "other"] == 50
    counts.count(record(value, at_ms - HOURS * HOUR_MS), at_ms)
    assert set(counts.hours) == {1_000}
    counts.forget(at_ms + HOURS * HOUR_MS)
    assert counts.hours == {}
    assert counts.total == PAIRS + 51


def test_counts_of_another_release_begin_anew() -> None:
    assert Counts.from_json('{"offsets": 7}') == Counts()
    assert Counts.from_json(Counts(hours={3: {"schema a": 1}}).to_json()).hours == {3: {"schema a": 1}}


def test_an_edit_that_dies_is_counted(world: World) -> None:
    world.edit(feature(1, 1), event_id="a")
    world.edit(b"[]", event_id="b")
    assert advance(world.stack, now(world)).reasons == {"schema": 1}
