"""Shedding: of declared topics alone, after half a minute, the lowest priority first, never above it, and counted."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets.events import topics
from geo_assets.events.topics import HEADER_REGION_PRIORITY
from geo_assets.flow.shedding import NEVER, Candidate, NotSheddable, Shedding, declared, priority_in


def test_of_the_platforms_topics_positions_alone_may_be_declared() -> None:
    assert set(topics.ALL) - set(NEVER) == {topics.POSITIONS}
    assert declared("positions") == declared(" positions , ") == {topics.POSITIONS}
    assert declared("") == frozenset()


@pytest.mark.parametrize("name", sorted(NEVER))
def test_a_topic_of_edits_hints_or_fences_is_refused_by_name_and_reason(name: str) -> None:
    with pytest.raises(NotSheddable, match=f"^{name} is never shed: {NEVER[name]}"):
        declared(f"positions,{name}")
    with pytest.raises(NotSheddable, match=f"^{name} is never shed"):
        Shedding([name])


def test_a_name_that_is_no_topic_is_refused() -> None:
    with pytest.raises(NotSheddable, match="'postions' is no topic of this platform; what may be declared: positions"):
        declared("postions")


@pytest.mark.parametrize(
    ("headers", "priority"),
    [({}, 0), ({"x": "5"}, 0)]
    + [({HEADER_REGION_PRIORITY: text}, n) for text, n in (("0", 0), ("1", 1), ("7", 7), ("-3", -3))]
    + [({HEADER_REGION_PRIORITY: text}, 2) for text in ("", "-", "high", "1.5", "--1", "١", "9" * 12)],
)
def test_a_priority_is_0_by_default_and_what_cannot_be_read_is_kept(headers: dict[str, str], priority: int) -> None:
    assert priority_in(headers) == priority


def test_nothing_is_shed_before_half_a_minute_of_pause_nor_of_another_topic() -> None:
    waiting = [Candidate("a"), Candidate("b")]
    shedding = Shedding(declared("positions"))
    for since, now in ((None, 1_000.0), (970.1, 1_000.0), (1_000.0, 1_000.0)):
        assert shedding.choose(topics.POSITIONS, waiting, 2, since, now) == []
    assert shedding.choose(topics.TILES, waiting, 2, 0.0, 1_000.0) == []
    assert Shedding([]).choose(topics.POSITIONS, waiting, 2, 0.0, 1_000.0) == []
    assert shedding.shed == {topics.POSITIONS: 0}
    assert shedding.choose(topics.POSITIONS, waiting, 2, 970.0, 1_000.0) == [0, 1]
    assert shedding.shed == {topics.POSITIONS: 2}


def test_the_lowest_priority_goes_first_then_what_is_superseded_then_the_oldest() -> None:
    waiting = [
        Candidate("bus", 1), Candidate("tram"), Candidate("car"), Candidate("tram"), Candidate("bus", 1),
        Candidate("fire engine", 2), Candidate("fire engine", 2), Candidate("boat", -1), Candidate(None, -5),
    ]  # fmt: skip
    chosen = [Shedding([topics.POSITIONS]).choose(topics.POSITIONS, waiting, n, 0.0, 60.0) for n in range(8)]
    order = [(set(more) - set(less)).pop() for less, more in pairwise(chosen[:7])]
    assert order == [7, 1, 2, 3, 0, 4]
    assert chosen[7] == [0, 1, 2, 3, 4, 7]


CANDIDATES = st.lists(st.builds(Candidate, st.sampled_from([None, "a", "b", "c"]), st.integers(-2, 4)), max_size=30)


@settings(max_examples=300, deadline=None)
@given(CANDIDATES, st.integers(-1, 40))
def test_whatever_waits(waiting: list[Candidate], excess: int) -> None:
    shedding = Shedding([topics.POSITIONS])
    chosen = shedding.choose(topics.POSITIONS, waiting, excess, 0.0, 30.0)
    may = [place for place, one in enumerate(waiting) if one.key is not None and one.priority < 2]
    assert len(chosen) == min(max(excess, 0), len(may)) == shedding.shed[topics.POSITIONS]
    assert set(chosen) <= set(may)
    assert chosen == sorted(set(chosen))
    # What stays is of no lower priority than what goes, nor superseded where what goes is not.
    rest = [place for place in may if place not in chosen]
    if chosen and rest:
        assert max(waiting[place].priority for place in chosen) <= min(waiting[place].priority for place in rest)
    for gone in chosen:
        for place in rest:
            if waiting[gone].priority == waiting[place].priority:
                assert superseded(waiting, gone) or not superseded(waiting, place)
    # The choice hangs on what is handed over alone.
    assert Shedding([topics.POSITIONS]).choose(topics.POSITIONS, waiting, excess, 100.0, 130.0) == chosen


def superseded(waiting: list[Candidate], place: int) -> bool:
    return any(one.key == waiting[place].key for one in waiting[place + 1 :])
