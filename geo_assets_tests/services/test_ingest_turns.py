"""Whose turn it is in ingest: nothing is lost, nothing overtakes its own key, and giants hold up nothing else."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_assets.events import topics
from geo_assets.services.dead_letters import scan_topic
from geo_assets.services.ingest import HEAVY_BODY, Ingest
from geo_assets.services.ingest_turns import AHEAD_RECORDS, HELD_BYTES, HELD_RECORDS, Turns
from geo_assets_tests.waiting import patient
from geo_assets_tests.world import World, feature, work_off
from resources.event_log.protocol import Record


def record(partition: int, offset: int, key: str | None = None, *, heavy: bool = False, size: int = 1) -> Record:
    return Record(topics.RAW, partition, offset, key, b"x" * size, {"heavy": "yes"} if heavy else {}, 0)


def is_heavy(one: Record) -> bool:
    return "heavy" in one.headers


def where(one: Record) -> tuple[str, int]:
    return one.topic, one.partition


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["a", "b", "c", None]), st.booleans()), max_size=8),
        max_size=6,
    ),
    st.lists(st.integers(0, 3), max_size=40),
)
def test_every_record_is_done_once_in_the_order_of_its_key_and_no_offset_moves_past_one_that_is_not(
    polls: list[list[tuple[int, str | None, bool]]], ends: list[int]
) -> None:
    turns = Turns(is_heavy)
    offsets: dict[int, int] = defaultdict(int)
    done: list[Record] = []
    under_way: list[Record] = []
    read: list[Record] = []
    said: dict[tuple[str, int], int] = {}

    def start() -> None:
        while (one := turns.next_heavy()) is not None:
            assert is_heavy(one)
            assert one.partition not in {other.partition for other in under_way}, "one at a time of each partition"
            under_way.append(one)

    def end(place: int) -> None:
        one = under_way.pop(place % len(under_way))
        done.append(one)
        done.extend(turns.done(one))

    def look() -> None:
        moved = turns.moved()
        assert not moved.items() & said.items(), "what was said is not said again"
        said.update(moved)
        for partition, count in offsets.items():
            left = [one.offset for one in read if one.partition == partition and one not in done]
            assert said.get((topics.RAW, partition), 0) == min(left, default=count)
        assert len(turns) == len(read) - len(done)

    for poll in polls:
        records: list[Record] = []
        for partition, key, heavy in poll:
            records.append(record(partition, offsets[partition], key, heavy=heavy))
            offsets[partition] += 1
        now = turns.sort(records)
        read.extend(records)
        done.extend(now)
        assert not any(is_heavy(one) for one in now)
        left = [one for one in read if one not in done]
        for one in left:
            before = [each for each in left if where(each) == where(one) and each.offset < one.offset]
            assert is_heavy(one) or one.key in {each.key for each in before} - {None}, "it waits for its key alone"
        look()
        start()
        if under_way and ends:
            end(ends.pop())
            look()
            start()
    while under_way:
        end(0)
        look()
        start()
    assert sorted(done) == sorted(read)
    of_key: dict[tuple[int, str], list[int]] = defaultdict(list)
    for one in done:
        if one.key is not None:
            of_key[one.partition, one.key].append(one.offset)
    assert all(each == sorted(each) for each in of_key.values())
    assert not turns.full


def test_light_records_wait_for_a_heavy_one_of_their_key_and_for_no_other() -> None:
    turns = Turns(is_heavy)
    assert turns.sort([record(0, 0, "a", heavy=True), record(1, 0, "a"), record(0, 1, "a"), record(0, 2, "b")]) == [
        record(1, 0, "a"), record(0, 2, "b"),
    ]  # fmt: skip
    assert turns.moved() == {(topics.RAW, 1): 1}
    assert turns.sort([record(0, 3), record(0, 4, "b", heavy=True), record(0, 5, "a")]) == [record(0, 3)]
    giant = turns.next_heavy()
    assert giant == record(0, 0, "a", heavy=True)
    assert turns.moved() == {}
    assert turns.done(giant) == [record(0, 1, "a"), record(0, 5, "a")]
    assert turns.moved() == {(topics.RAW, 0): 4}
    assert turns.sort([record(0, 6, "a"), record(0, 7, "b")]) == [record(0, 6, "a")]


def test_what_is_read_again_has_its_offset_said_again() -> None:
    turns = Turns(is_heavy)
    records = [record(0, 0), record(0, 1)]
    assert turns.sort(records) == records
    assert turns.moved() == {(topics.RAW, 0): 2}
    # The partition was away meanwhile: nobody took what was said.
    assert turns.sort(records) == records
    assert turns.moved() == {(topics.RAW, 0): 2}
    assert turns.moved() == {}


def test_partitions_take_turns_with_their_giants() -> None:
    turns = Turns(is_heavy)
    turns.sort([record(p, o, heavy=True) for p in (0, 1) for o in range(3)])
    order: list[int] = []
    while (giant := turns.next_heavy()) is not None:
        order.append(giant.partition)
        turns.done(giant)
    assert order == [0, 1, 0, 1, 0, 1]


def test_rule_9_what_waits_or_would_be_done_again_is_bounded_by_number_and_by_bytes() -> None:
    turns = Turns(is_heavy)
    turns.sort([record(0, 0, "a", heavy=True)])
    turns.sort([record(0, 1 + n, "a") for n in range(HELD_RECORDS - 2)])
    assert not turns.full
    turns.sort([record(0, HELD_RECORDS, "a")])
    assert turns.full
    turns = Turns(is_heavy)
    turns.sort([record(0, 0, heavy=True, size=HELD_BYTES)])
    assert turns.full
    giant = turns.next_heavy()
    assert giant is not None
    turns.done(giant)
    assert not turns.full
    turns.sort([record(0, 1, heavy=True)])
    turns.sort([record(0, AHEAD_RECORDS - 1)])
    assert not turns.full
    turns.sort([record(0, AHEAD_RECORDS), record(1, 3 * AHEAD_RECORDS)])
    assert turns.full
    giant = turns.next_heavy()
    assert giant is not None
    turns.done(giant)
    assert not turns.full


# -- in ingest -----------------------------------------------------------------------------------------------------


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "home")
    yield made
    made.close()


def giant(first: int, version: int = 1) -> dict[str, object]:
    """A collection large enough to be worked on beside the others."""
    features = [feature(first + n, version, note="x" * 1_000) for n in range(HEAVY_BODY // 1_000 + 10)]
    return {"type": "FeatureCollection", "features": features}


def event_in(world: World, partition: int, start: str) -> str:
    """An event id whose record lands in this partition."""
    from resources.event_log.murmur2 import partition_of

    count = world.stack.log.topics()[topics.RAW].partitions
    return next(e for n in range(1_000) if partition_of(f"city:{(e := f'{start}{n}')}", count) == partition)


def stored(world: World) -> set[str]:
    return {one.feature_id for one in world.stack.features.scan()}


def test_while_a_giant_is_worked_on_all_other_edits_are_stored_and_hinted_and_no_offset_passes_it(world: World) -> None:
    go_on, reached = threading.Event(), threading.Event()

    def step(name: str) -> None:
        if name == "apply" and threading.current_thread().name.startswith("heavy"):
            reached.set()
            assert go_on.wait(patient(60))

    ingest = Ingest(world.stack, step=step)
    try:
        world.send(giant(1_000), event_id=event_in(world, 0, "giant"))
        world.send(feature(1, 1), event_id=event_in(world, 0, "behind"))
        world.send(feature(2, 1), event_id=event_in(world, 1, "beside"))
        for _ in range(600):
            if reached.is_set():
                break
            ingest._turn(0.1)
        assert reached.is_set(), "the giant is worked on in a thread of its own"
        assert stored(world) == {"1", "2"}
        assert list(scan_topic(world.stack.log, topics.TILES)), "its hints are out"
        assert world.stack.log.committed(topics.INGEST_GROUP, topics.RAW) == {1: 1}

        world.send(feature(3, 1), event_id=event_in(world, 1, "later"))
        assert any(ingest._turn(0.1) for _ in range(600))
        assert stored(world) == {"1", "2", "3"}

        go_on.set()
        work_off(world, ingest)
        assert {"1", "2", "3", "1000", "1001"} <= stored(world)
        assert world.stack.log.committed(topics.INGEST_GROUP, topics.RAW) == {0: 2, 1: 2}
    finally:
        go_on.set()
        ingest.close()


@pytest.mark.parametrize("step", ["apply", "send hints", "dead letters"])
def test_rule_2_a_giant_whose_ingest_died_is_done_again_and_counts_once(world: World, step: str) -> None:
    class Crash(Exception):
        pass

    def crash(name: str) -> None:
        if name == step and threading.current_thread().name.startswith("heavy"):
            raise Crash

    world.send(giant(1_000), event_id=event_in(world, 0, "giant"))
    world.send(feature(1, 1), event_id=event_in(world, 0, "behind"))
    world.send(feature(2, 1), event_id=event_in(world, 1, "beside"))
    doomed = Ingest(world.stack, step=crash)
    with pytest.raises(Crash):
        work_off(world, doomed)
    doomed.close()
    assert 0 not in world.stack.log.committed(topics.INGEST_GROUP, topics.RAW)

    successor = Ingest(world.stack)
    work_off(world, successor)
    successor.close()
    assert {"1", "2", "1000"} <= stored(world)
    assert world.stack.features.owed() == []
    assert world.letters() == []
    assert world.stack.log.committed(topics.INGEST_GROUP, topics.RAW) == {0: 2, 1: 1}
