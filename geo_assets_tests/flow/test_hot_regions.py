"""Hot regions: nothing is called hot that is not, what is hot is found, and memory does not grow with the map."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets.flow.hot_regions import PLACES, Changes, DecayedCounts, HotRegions

HALF_LIFE = 10.0
LASTS = HALF_LIFE / math.log(2)
TILE, OTHER = "14:12020013321101", "14:12020013321102"


class Exact:
    """Every sighting, remembered."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float]] = []

    def add(self, key: str, now: float) -> None:
        self.seen.append((key, now))

    def count(self, key: str | None, now: float) -> float:
        return sum(2 ** ((at - now) / HALF_LIFE) for one, at in self.seen if key is None or one == key)


SIGHTINGS = st.lists(
    st.tuples(
        st.one_of(st.sampled_from([0.0, 0.01]), st.floats(0.0, 30.0), st.sampled_from([4_000.0, 50_000.0])),
        st.one_of(st.just("a"), st.text("abcdefgh", min_size=1, max_size=2)),
    ),
    max_size=150,
)


@settings(max_examples=200, deadline=None)
@given(SIGHTINGS, st.integers(1, 6))
def test_a_count_is_never_above_the_truth_nor_below_it_by_more_than_a_places_share(
    sightings: list[tuple[float, str]], places: int
) -> None:
    counts, exact, now = DecayedCounts(places, HALF_LIFE), Exact(), 0.0
    for seconds, key in sightings:
        now += seconds
        counts.add(key, now)
        exact.add(key, now)
        assert len(counts) == len(set(counts)) <= places
    total = exact.count(None, now)
    for key in {key for _, key in sightings}:
        found, true = counts.seen(key, now), exact.count(key, now)
        assert found <= true * (1 + 1e-9) + 1e-9
        assert true - total / places <= found + 1e-9 * max(total, 1)
    # With a place for each, it is the truth.
    if len({key for _, key in sightings}) <= places:
        for key in {key for _, key in sightings}:
            assert counts.seen(key, now) == pytest.approx(exact.count(key, now), abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(SIGHTINGS, st.integers(1, 6))
def test_what_is_hot_is_so_in_truth_and_the_same_sightings_say_the_same(
    sightings: list[tuple[float, str]], places: int
) -> None:
    one, two = (HotRegions(3 / LASTS, cool_share=1 / 3, half_life_s=HALF_LIFE, places=places) for _ in range(2))
    exact, now, hot = Exact(), 0.0, set[str]()
    for seconds, key in sightings:
        now += seconds
        exact.add(key, now)
        changes = one.see([key], now)
        assert two.see([key], now) == changes
        for region in changes.heated:
            assert region not in hot
            assert exact.count(region, now) >= 3 * (1 - 1e-9)
        for region in changes.cooled:
            assert region in hot
        hot = (hot | set(changes.heated)) - set(changes.cooled)
        assert one.hot == hot
        assert len(hot) <= places
        for region in hot:
            assert exact.count(region, now) >= 1 - 1e-9
            assert one.is_hot(region)
    assert one.hottest(3, now) == two.hottest(3, now)


def rated(regions: HotRegions, tile: str, a_s: float, since: float, until: float) -> list[tuple[float, Changes]]:
    """See a tile at a steady rate; the changes and when they were."""
    found: list[tuple[float, Changes]] = []
    for number in range(int((until - since) * a_s)):
        now = since + number / a_s
        changes = regions.see([tile], now)
        if changes != Changes():
            found.append((now, changes))
    return found


def test_a_tile_heats_within_half_a_minute_and_cools_within_half_a_minute_after_the_last_edit() -> None:
    regions = HotRegions()
    ((at, changes),) = rated(regions, TILE, 20.0, 0.0, 60.0)
    assert changes == Changes((TILE,), ())
    assert 5 < at < 30
    assert not regions.is_hot(OTHER)
    cooled = [now for now in range(60, 120) if regions.look(float(now)).cooled]
    assert len(cooled) == 1
    assert 60 < cooled[0] < 90
    assert regions.hot == frozenset()


def test_a_rate_that_swings_between_the_two_marks_sends_no_tile_to_and_fro() -> None:
    regions = HotRegions()
    rated(regions, TILE, 20.0, 0.0, 60.0)
    assert regions.is_hot(TILE)
    for minute in range(1, 10):
        assert rated(regions, TILE, 9.0 if minute % 2 else 5.0, 60.0 * minute, 60.0 * minute + 60) == []
    cool = HotRegions()
    assert rated(cool, TILE, 9.0, 0.0, 300.0) == []


def test_one_batch_of_edits_is_no_heat() -> None:
    regions = HotRegions()
    assert regions.see([TILE] * 100, 0.0) == Changes()
    assert regions.hottest(1, 0.0)[0].a_s < 10


def test_ten_thousand_cold_tiles_push_no_hot_one_out_and_none_becomes_hot() -> None:
    regions, chance, now = HotRegions(), Random(4), 0.0
    seen: Counter[str] = Counter()
    for _ in range(40_000):
        now += 0.001
        tile = TILE if chance.random() < 0.03 else f"16:{chance.randrange(10_000):016d}"
        regions.see([tile], now)
        seen[tile] += 1
    assert len(seen) > 9_000
    assert regions.hot == {TILE}
    assert regions.hottest(1, now)[0].region == TILE
    assert len(regions._counts) == len(regions._counts._least) == PLACES


def test_a_region_is_a_quadkey_prefix_at_its_zoom() -> None:
    regions = HotRegions(2.0, digits=3)
    tiles = [f"14:1202001332{n:04d}" for n in range(40)] + ["9:120200133"]
    for second in range(60):
        regions.see(tiles[:40], float(second))
    assert regions.hot == {"14:120"}
    assert regions.is_hot("14:12033333333333")
    assert not regions.is_hot("9:120200133")
    assert [one.region for one in regions.hottest(5, 60.0)] == ["14:120"]
    assert HotRegions(digits=3).region("0:") == "0:"


@pytest.mark.parametrize("changes", [{"hot_a_s": 0.0}, {"cool_share": 1.0}, {"cool_share": 0.0}])
def test_marks_out_of_order_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="hot_a_s"):
        HotRegions(**changes)  # pyright: ignore[reportArgumentType]


def test_numbers_that_make_no_counts_are_refused() -> None:
    for places, half_life_s in ((0, 1.0), (1, 0.0)):
        with pytest.raises(ValueError, match="places"):
            DecayedCounts(places, half_life_s)
