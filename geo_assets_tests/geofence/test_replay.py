"""The replay protocol, with the real tracker: every story of one device, and long random ones of many."""

from __future__ import annotations

from collections import defaultdict, deque
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import shapely
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets.geofence.fences import Fence, FenceSet
from geo_assets.geofence.index import FenceIndex
from geo_assets.geofence.replay import Replay, adopt, horizon_of
from geo_assets.geofence.rules import Rules
from geo_assets.geofence.tracker import Tracker
from geo_assets_tests.geofence.reference import Record, Told
from geo_assets_tests.geofence.test_reference import random_story
from geo_assets_tests.geofence.world import NOON, box, columns, told

# One device, one fence, every interleaving of records, changes, acknowledgements, snapshots and two crashes.

PLACES = (1, 2, 1, 3, 2)
"""Where the device is, by offset: a place is a hundredth of a degree."""

CRASHES = 2
RULES = Rules(lateness_ms=1000, max_speed_mps=0)


def areas(*places: int) -> shapely.MultiPolygon:
    return shapely.MultiPolygon([shapely.box(p / 100 - 0.001, -1, p / 100 + 0.001, 1) for p in places])


INDEXES = {
    0: FenceIndex(FenceSet(0, (Fence("1", 1, areas(1, 3), dwell_ms=1500),))),
    1: FenceIndex(FenceSet(1, (Fence("1", 2, areas(2), dwell_ms=1500),))),
    2: FenceIndex(FenceSet(2)),
}
"""What the fence covers, by revision: places 1 and 3; place 2; it is deleted."""

RECORDS = [Record(0, n, "d", NOON + 1000 * n, place / 100) for n, place in enumerate(PLACES)]


class State(NamedTuple):
    snapshot: bytes
    tracker: bytes
    offset: int = 0
    revision: int = 0
    horizon: int = 0
    latest: int = 0
    flying: tuple[Told, ...] = ()
    log: tuple[Told, ...] = ()
    crashes: int = 0


@cache
def fed(tracker: bytes, offset: int) -> tuple[bytes, tuple[Told, ...]]:
    restored, closed = Tracker.restore(tracker, INDEXES)
    assert not len(closed)
    out = told(restored.feed(columns([RECORDS[offset]])))
    return restored.snapshot(), tuple(out)


@cache
def adopted(tracker: bytes, revision: int) -> tuple[bytes, bytes, tuple[Told, ...]]:
    restored, _ = Tracker.restore(tracker, INDEXES)
    kept: list[bytes] = []
    out = adopt(restored, INDEXES[revision], kept.append)
    return kept[0], restored.snapshot(), tuple(told(out))


@cache
def restarted(snapshot: bytes, revision: int | None) -> tuple[bytes, int, int, tuple[Told, ...]]:
    restored, closed = Tracker.restore(snapshot, INDEXES)
    out = told(closed)
    if revision is not None:
        out += told(restored.adopt(INDEXES[revision]))
    return restored.snapshot(), restored.offsets.get(0, 0), restored.revision, tuple(out)


def steps(s: State, broken: str):
    replay = Replay({0: s.horizon})
    if s.latest < max(INDEXES):
        yield f"fence revision {s.latest + 1} arrives", s._replace(latest=s.latest + 1)
    if s.offset < len(RECORDS):
        tracker, out = fed(s.tracker, s.offset)
        yield f"position {s.offset}", s._replace(tracker=tracker, offset=s.offset + 1, flying=s.flying + out)
    if s.flying:
        yield "acknowledged", s._replace(log=(*s.log, s.flying[0]), flying=s.flying[1:])
    may = replay.may_snapshot(in_flight=len(s.flying)) or broken == "snapshot-before-acknowledgement"
    if may and s.tracker != s.snapshot:
        yield "snapshot", s._replace(snapshot=s.tracker)
    may = replay.may_adopt({0: s.offset}, in_flight=len(s.flying))
    if broken == "new-fence-in-replay":
        may = not s.flying
    if s.revision < s.latest and may:
        snapshot, tracker, out = adopted(s.tracker, s.latest)
        if broken == "no-snapshot-at-change":
            snapshot = s.snapshot
        yield f"adopts {s.latest}", s._replace(snapshot=snapshot, tracker=tracker, revision=s.latest, flying=out)
    if s.crashes < CRASHES:
        newest = s.latest if broken == "newest-fence-at-start" else None
        tracker, offset, revision, out = restarted(s.snapshot, newest)
        horizon = horizon_of((one.partition, one.source) for one in s.log).get(0, 0)
        yield (
            "killed, started again",
            s._replace(
                tracker=tracker, offset=offset, revision=revision, horizon=horizon, flying=out, crashes=s.crashes + 1
            ),
        )


def key(one: Told) -> tuple[object, ...]:
    return one.device, one.fence, one.state, one.time // 1000, one.sequence


def fault(log: tuple[Told, ...], inside: bool | None) -> str | None:
    seen: dict[tuple[object, ...], Told] = {}
    for one in log:
        if seen.setdefault(key(one), one) != one:
            return f"one key, two triggers: {seen[key(one)]} and {one}"
    states = [one.state for one in seen.values()]
    moves = [state for state in states if state != "DWELL"]
    if any(a == b for a, b in pairwise(moves)) or moves[:1] == ["EXIT"]:
        return f"a consumer sees {states}"
    if any(state == "DWELL" and before != "ENTER" for before, state in pairwise(["", *states])):
        return f"a consumer sees {states}"
    if inside is not None and (moves[-1:] == ["ENTER"]) != inside:
        return f"a consumer sees {states}, the device is {'inside' if inside else 'outside'}"
    return None


def explore(broken: str) -> tuple[int, list[str]]:
    """States walked, and the shortest story that goes wrong."""
    begin = Tracker(INDEXES[0], RULES).snapshot()
    first = State(begin, begin)
    parent: dict[State, tuple[State, str] | None] = {first: None}
    queue = deque([first])
    while queue:
        s = queue.popleft()
        for name, t in steps(s, broken):
            if t in parent:
                continue
            parent[t] = (s, name)
            queue.append(t)
            quiet = t.offset == len(RECORDS) and not t.flying and t.revision == t.latest
            inside = bool(Tracker.restore(t.tracker, INDEXES)[0].inside("d")) if quiet else None
            if wrong := fault(t.log, inside):
                story, at = [wrong], parent[t]
                while at is not None:
                    story.insert(0, at[1])
                    at = parent[at[0]]
                return len(parent), story
    return len(parent), []


def test_rule_2_whatever_happens_when_a_consumer_sees_one_true_story() -> None:
    states, story = explore("")
    assert not story, story
    assert states > 5_000


@pytest.mark.parametrize(
    "broken",
    ["snapshot-before-acknowledgement", "new-fence-in-replay", "no-snapshot-at-change", "newest-fence-at-start"],
)
def test_without_any_of_the_rules_some_story_goes_wrong(broken: str) -> None:
    assert explore(broken)[1]


# Many devices and fences, long stories, batches cut anywhere.


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_rule_2_a_run_killed_at_any_step_tells_what_an_unharmed_one_tells(seed: int) -> None:
    killed_run(seed)


def killed_run(seed: int) -> int:
    rng = np.random.default_rng(seed)
    fences, story = random_story(rng, 120)
    rules = Rules(lateness_ms=2000, silent_ms=120_000, crossings=bool(rng.random() < 0.3))
    records = [entry for entry in story if isinstance(entry, Record)]
    changes = [entry for entry in story if isinstance(entry, list)]
    sets, newest = {fences.revision: fences}, fences
    by_partition: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        by_partition[record.partition].append(record)
    tracker = Tracker(fences, rules)
    stored, log, flying = tracker.snapshot(), list[Told](), list[Told]()
    adoptions: dict[int, dict[int, int]] = {}
    replay = Replay()
    ends = {p: of_it[-1].offset + 1 for p, of_it in by_partition.items()}

    def keep(data: bytes) -> None:
        nonlocal stored
        stored = data

    steps_left = 3000
    while steps_left and (tracker.offsets != ends or flying or changes or tracker.revision < newest.revision):
        steps_left -= 1
        dice = rng.random()
        if dice < 0.4:
            partition = int(rng.choice(list(by_partition)))
            start = tracker.offsets.get(partition, 0)
            batch = [r for r in by_partition[partition] if r.offset >= start][: int(rng.integers(1, 30))]
            flying += told(tracker.feed(columns(batch)))
        elif dice < 0.7:
            count = int(rng.integers(0, len(flying) + 1))
            log, flying = log + flying[:count], flying[count:]
        elif dice < 0.75 and replay.may_snapshot(in_flight=len(flying)):
            keep(tracker.snapshot())
        elif dice < 0.8 and changes:
            following, _ = newest.apply(changes.pop(0))
            newest = sets[following.revision] = following
        elif dice < 0.9 and replay.may_adopt(tracker.offsets, in_flight=len(flying)):
            if tracker.revision < newest.revision:
                adoptions[newest.revision] = tracker.offsets
                flying += told(adopt(tracker, newest, keep))
        elif dice > 0.97 and steps_left > 500:
            tracker, closed = Tracker.restore(stored, sets)
            flying = told(closed)
            replay = Replay(horizon_of((one.partition, one.source) for one in log))
    assert steps_left
    first: dict[tuple[object, ...], Told] = {}
    for one in log:
        assert first.setdefault(key(one), one) == one
    unharmed, expected, at = Tracker(sets[min(sets)], rules), list[Told](), dict[int, int]()
    for revision, offsets in [*adoptions.items(), (0, ends)]:
        batch = [r for r in records if at.get(r.partition, 0) <= r.offset < offsets.get(r.partition, 0)]
        expected += told(unharmed.feed(columns(batch)))
        at = offsets
        if revision:
            expected += told(unharmed.adopt(sets[revision]))
    devices = {one.device for one in expected}
    assert {one.device for one in log} == devices
    for device in devices:
        assert [one for one in first.values() if one.device == device] == [o for o in expected if o.device == device]
    return len(expected)


# The parts


def test_it_is_a_replay_until_every_partition_is_past_what_was_told() -> None:
    replay = Replay(horizon_of([(0, 5), (1, 9), (0, 7), (0, 6)]))
    assert replay.left({}) == {0: 7, 1: 9}
    assert replay.left({0: 7, 1: 8}) == {1: 1}
    assert not replay.may_adopt({0: 7, 1: 8}, in_flight=0)
    assert replay.may_adopt({0: 7, 1: 9, 2: 0}, in_flight=0)


def test_nothing_is_written_while_a_trigger_is_in_flight() -> None:
    assert not Replay().may_snapshot(in_flight=1)
    assert not Replay().may_adopt({}, in_flight=1)
    assert Replay().may_snapshot(in_flight=0)


def test_the_snapshot_that_names_new_fences_is_written_before_anything_of_them_is_told() -> None:
    before, after = FenceSet(1, (box("1", -1, -1, 1, 1),)), FenceSet(2)
    tracker = Tracker(before)
    tracker.feed(columns([Record(0, 0, "d", NOON)]))
    kept: list[bytes] = []

    def store(data: bytes) -> None:
        assert tracker.revision == 1
        kept.append(data)

    closed = told(adopt(tracker, after, store))
    assert [one.state for one in closed] == ["EXIT"]
    again, same = Tracker.restore(kept[0], {2: after})
    assert told(same) == closed
    assert again.snapshot() == tracker.snapshot()
