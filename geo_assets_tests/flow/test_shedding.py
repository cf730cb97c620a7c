"""Shedding: of declared topics alone, after half a minute, the lowest priority first, never above it, and counted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets.events import topics
from geo_assets.events.topics import HEADER_REGION_PRIORITY
from geo_assets.flow.shedding import NEVER, UNREADABLE, NotSheddable, Shedding, declared, priority_in


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
    + [({HEADER_REGION_PRIORITY: text}, UNREADABLE) for text in ("", "-", "high", "1.5", "--1", "١", "9" * 12)],
)
def test_a_priority_is_0_by_default_and_what_cannot_be_read_is_kept(headers: dict[str, str], priority: int) -> None:
    assert priority_in(headers) == priority


def test_nothing_is_shed_before_half_a_minute_of_pause_nor_of_another_topic() -> None:
    shedding = Shedding(declared("positions"))
    for since, now in ((None, 1_000.0), (970.1, 1_000.0), (1_000.0, 1_000.0)):
        assert not shedding.sheds(topics.POSITIONS, {}, since, now)
    assert not shedding.sheds(topics.TILES, {}, 0.0, 1_000.0)
    assert not Shedding([]).sheds(topics.POSITIONS, {}, 0.0, 1_000.0)
    assert shedding.shed == {topics.POSITIONS: 0}
    assert shedding.sheds(topics.POSITIONS, {}, 970.0, 1_000.0)
    assert shedding.shed == {topics.POSITIONS: 1}


def test_the_lowest_priority_goes_first_the_next_after_as_long_again_and_from_2_on_none() -> None:
    shedding = Shedding([topics.POSITIONS])
    at = {paused: shedding.below(topics.POSITIONS, 0.0, paused) for paused in (29.9, 30.0, 59.9, 60.0, 90.0, 86_400.0)}
    assert at == {29.9: None, 30.0: 1, 59.9: 1, 60.0: 2, 90.0: 2, 86_400.0: 2}


@settings(max_examples=200, deadline=None)
@given(
    paused=st.floats(0, 1_000),
    longer=st.floats(0, 1_000),
    text=st.one_of(st.none(), st.integers(-3, 5).map(str), st.text(max_size=3)),
    after_s=st.floats(0.5, 100),
    keep_from=st.integers(1, 5),
)
def test_of_any_record_and_pause(
    paused: float, longer: float, text: str | None, after_s: float, keep_from: int
) -> None:
    shedding = Shedding([topics.POSITIONS], after_s=after_s, keep_from=keep_from)
    headers = {} if text is None else {HEADER_REGION_PRIORITY: text}
    priority = priority_in(headers)
    now, later = paused, paused + longer
    sheds = shedding.sheds(topics.POSITIONS, headers, 0.0, now)
    assert shedding.shed[topics.POSITIONS] == sheds
    if sheds:
        assert paused >= after_s
        assert priority < keep_from
        # Who is shed is shed also when the pause is longer, and so is whoever has a lower priority.
        assert shedding.sheds(topics.POSITIONS, headers, 0.0, later)
        assert shedding.sheds(topics.POSITIONS, {HEADER_REGION_PRIORITY: str(priority - 1)}, 0.0, now)
    elif paused >= after_s * (max(priority, 0) + 1) + 0.001:
        assert priority >= keep_from


def test_a_wait_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="after_s"):
        Shedding([topics.POSITIONS], after_s=0.0)
