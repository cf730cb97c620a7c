"""Whose turn it is in ingest: nothing is lost, nothing overtakes within its partition, and giants hold up their own."""

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
from geo_assets.services.ingest_turns import HELD_BYTES, HELD_RECORDS, Turns
from geo_assets_tests.waiting import patient
from geo_assets_tests.world import World, feature, work_off
from resources.event_log.protocol import Record


def record(partition: int, offset: int, *, heavy: bool = False, size: int = 1) -> Record:
    return Record(topics.RAW, partition, offset, "heavy" if heavy else "light", b"x" * size, {}, 0)


def is_heavy(one: Record) -> bool:
    return one.key == "heavy"


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=8), max_size=6),
    st.lists(st.integers(0, 3), max_size=40),
)
def test_every_record_is_done_once_and_in_the_order_of_its_partition(
    polls: list[list[tuple[int, bool]]], ends: list[int]
) -> None:
    turns = Turns(is_heavy)
    offsets: dict[int, int] = defaultdict(int)
    done: list[Record] = []
    under_way: list[Record] = []
    everything = 0

    def start() -> None:
        while (one := turns.next_heavy()) is not None:
            assert is_heavy(one)
            assert one.partition not in {other.partition for other in under_way}, "one at a time of each partition"
            under_way.append(one)

    def end(place: int) -> None:
        one = under_way.pop(place % len(under_way))
        done.append(one)
        done.extend(turns.done(one))

    for poll in polls:
        records: list[Record] = []
        for partition, heavy in poll:
            records.append(record(partition, offsets[partition], heavy=heavy))
            offsets[partition] += 1
        everything += len(records)
        waiting = {one.partition for one in under_way}
        now = turns.sort(records)
        done.extend(now)
        assert not any(is_heavy(one) for one in now)
        first_heavy = {one.partition: one.offset for one in reversed(records) if is_heavy(one)}
        for one in records:
            free = one.partition not in waiting and one.offset < first_heavy.get(one.partition, one.offset + 1)
            assert not free or one in now or len(turns), "what nothing heavy stands before goes at once"
        start()
        if under_way and ends:
            end(ends.pop())
            start()
    while under_way:
        end(0)
        start()
    assert len(done) == everything
    for partition, count in offsets.items():
        assert [one.offset for one in done if one.partition == partition] == list(range(count))
    assert len(turns) == 0
    assert not turns.full


def test_light_records_of_a_partition_without_a_heavy_one_never_wait() -> None:
    turns = Turns(is_heavy)
    assert turns.sort([record(0, 0, heavy=True), record(1, 0), record(0, 1)]) == [record(1, 0)]
    assert turns.sort([record(1, 1), record(0, 2), record(2, 0)]) == [record(1, 1), record(2, 0)]
    giant = turns.next_heavy()
    assert giant == record(0, 0, heavy=True)
    assert turns.done(giant) == [record(0, 1), record(0, 2)]
    assert turns.sort([record(0, 3)]) == [record(0, 3)]


def test_partitions_take_turns_with_their_giants() -> None:
    turns = Turns(is_heavy)
    turns.sort([record(p, o, heavy=True) for p in (0, 1) for o in range(3)])
    order: list[int] = []
    while (giant := turns.next_heavy()) is not None:
        order.append(giant.partition)
        turns.done(giant)
    assert order == [0, 1, 0, 1, 0, 1]


def test_rule_9_what_waits_is_bounded_by_number_and_by_bytes() -> None:
    turns = Turns(is_heavy)
    turns.sort([record(0, 0, heavy=True)])
    turns.sort([record(0, 1 + n) for n in range(HELD_RECORDS - 2)])
    assert not turns.full
    turns.sort([record(0, HELD_RECORDS)])
    assert turns.full
    turns = Turns(is_heavy)
    turns.sort([record(0, 0, heavy=True, size=HELD_BYTES)])
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


def test_while_a_giant_is_worked_on_edits_of_other_partitions_are_stored_and_hinted(world: World) -> None:
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
        assert stored(world) == {"2"}
        assert list(scan_topic(world.stack.log, topics.TILES)), "its hints are out"
        assert world.stack.log.committed(topics.INGEST_GROUP, topics.RAW) == {1: 1}, "nothing moves past the giant"

        world.send(feature(3, 1), event_id=event_in(world, 1, "later"))
        assert any(ingest._turn(0.1) for _ in range(600))
        assert stored(world) == {"2", "3"}

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
