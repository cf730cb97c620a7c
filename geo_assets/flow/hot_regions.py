"""Hot regions: where so much happens that it would hold up its neighbours, told by rates in bounded memory.

Rates are counts that decay with a half-life, kept for the regions that were seen most (space saving: Metwally et al.,
"Efficient Computation of Frequent and Top-k Elements in Data Streams", 2005). What is known of a region is a lower
bound: what was seen of it since it has a place. So nothing is called hot that is not; and whatever is hot by more than
the rate of all over the number of places is called so.

A region is a tile, or a quadkey prefix at its zoom. It has no clock: the same sightings at the same times say the same
everywhere. Not safe for threads.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

HALF_LIFE_S = 10.0
"""So long that one batch of edits is no heat, so short that a region is cool half a minute after its last edit."""

HOT_A_S = 10.0
"""Sightings a second from which a tile is hot. A dense tile takes 50 ms to encode: at ten a second it would have half a
core for itself."""

COOL_SHARE = 0.4
"""Share of that rate below which it is hot no longer: under half, so that no tile goes to and fro."""

PLACES = 1_024
"""Regions that are kept: at 1,000 sightings a second, one a second may hide in the error."""

_RESCALE = 500.0
"""Half-lives after which counts are taken down to the present: 2^1,000 is near the end of what a float holds."""


class Heat(NamedTuple):
    """A region and its rate."""

    region: str
    a_s: float
    """Sightings a second, at least."""


class Changes(NamedTuple):
    """What a look found."""

    heated: tuple[str, ...] = ()
    """Regions that are hot from now on."""
    cooled: tuple[str, ...] = ()
    """Regions that are hot no longer."""


class DecayedCounts:
    """Counts that halve every `half_life_s`, of the `places` keys seen most.

    Counts are kept as of one moment for all (forward decay: Cormode et al., "Forward Decay", 2009), so that time
    changes none of them, nor their order.

    Args:
        places: Keys that are kept.
        half_life_s: Seconds in which a count halves.
    """

    def __init__(self, places: int = PLACES, half_life_s: float = HALF_LIFE_S) -> None:
        if places < 1 or half_life_s <= 0:
            raise ValueError(f"places {places} is below 1, or half_life_s {half_life_s} not above 0")
        self.places, self.half_life_s = places, half_life_s
        self._counts: dict[str, float] = {}
        self._errors: dict[str, float] = {}
        # One entry a key, its count as it was at some time: never above what it is now.
        self._least: list[tuple[float, str]] = []
        self._origin_s: float | None = None
        self._now_s = -math.inf

    def __len__(self) -> int:
        return len(self._counts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._counts)

    def add(self, key: str, now_s: float) -> None:
        """Count a sighting of a key; one that had no place takes that of the least, and its count as its error.

        Args:
            key: Of what.
            now_s: The time, seconds; one that falls counts as the latest.
        """
        weight = self._scale(now_s)
        if key in self._counts:
            self._counts[key] += weight
            return
        error = self._drop_least() if len(self._counts) >= self.places else 0.0
        self._counts[key], self._errors[key] = error + weight, error
        heapq.heappush(self._least, (error + weight, key))

    def seen(self, key: str, now_s: float) -> float:
        """What is surely left of a key's count: what was seen of it since it has a place."""
        scale = self._scale(now_s)
        return (self._counts[key] - self._errors[key]) / scale if key in self._counts else 0.0

    def _drop_least(self) -> float:
        """Take the place of the key with the least count; that count."""
        while True:
            count, key = self._least[0]
            if count == self._counts[key]:
                heapq.heappop(self._least)
                del self._errors[key]
                return self._counts.pop(key)
            heapq.heapreplace(self._least, (self._counts[key], key))

    def _scale(self, now_s: float) -> float:
        """What a sighting of now weighs."""
        self._now_s = now_s = max(now_s, self._now_s)
        if self._origin_s is None:
            self._origin_s = now_s
        age = (now_s - self._origin_s) / self.half_life_s
        if age > _RESCALE:
            down = 2.0 ** -min(age, 1_000.0)
            self._counts = {key: count * down for key, count in self._counts.items()}
            self._errors = {key: error * down for key, error in self._errors.items()}
            self._least = sorted((count, key) for key, count in self._counts.items())
            self._origin_s, age = now_s, 0.0
        return 2.0**age


class HotRegions:
    """Which regions are hot.

    Args:
        hot_a_s: Sightings a second from which a region is hot.
        cool_share: Share of that rate below which it is hot no longer.
        half_life_s: Of the rates: heat is told some seconds after it began, and cold as late.
        places: Regions that are kept, and most that are hot.
        digits: Quadkey digits of a region, at the zoom of the tile; None: each tile is one.
    """

    def __init__(
        self,
        hot_a_s: float = HOT_A_S,
        *,
        cool_share: float = COOL_SHARE,
        half_life_s: float = HALF_LIFE_S,
        places: int = PLACES,
        digits: int | None = None,
    ) -> None:
        if hot_a_s <= 0 or not 0 < cool_share < 1:
            raise ValueError(f"hot_a_s {hot_a_s} is not above 0, or cool_share {cool_share} not between 0 and 1")
        self._counts = DecayedCounts(places, half_life_s)
        # Of sightings at a steady rate so much is left: the integral of what each has left.
        self._lasts_s = half_life_s / math.log(2)
        self._hot_at, self._cool_at = hot_a_s * self._lasts_s, cool_share * hot_a_s * self._lasts_s
        self._digits = digits
        self._hot: set[str] = set()

    def region(self, key: str) -> str:
        """The region of a tile's key (`zoom:quadkey`)."""
        if self._digits is None:
            return key
        zoom, _, quadkey = key.partition(":")
        return f"{zoom}:{quadkey[: self._digits]}"

    def see(self, keys: Iterable[str], now_s: float) -> Changes:
        """Count sightings of tiles, and see what that changes.

        Args:
            keys: Of the tiles, one for each sighting.
            now_s: The time, seconds; never falling.
        """
        regions = [self.region(key) for key in keys]
        for region in regions:
            self._counts.add(region, now_s)
        heated = {
            region
            for region in dict.fromkeys(regions)
            if region not in self._hot and self._counts.seen(region, now_s) >= self._hot_at
        }
        cooled = self.look(now_s).cooled
        self._hot |= heated
        return Changes(tuple(sorted(heated)), cooled)

    def look(self, now_s: float) -> Changes:
        """See what cooled, where nothing was seen.

        Args:
            now_s: The time, seconds; never falling.
        """
        cooled = {region for region in self._hot if self._counts.seen(region, now_s) < self._cool_at}
        self._hot -= cooled
        return Changes((), tuple(sorted(cooled)))

    def is_hot(self, key: str) -> bool:
        """Whether a tile was in a hot region at the last look."""
        return self.region(key) in self._hot

    @property
    def hot(self) -> frozenset[str]:
        """The regions that were hot at the last look."""
        return frozenset(self._hot)

    def hottest(self, most: int, now_s: float) -> list[Heat]:
        """Regions by rate, the highest first.

        Args:
            most: How many at most.
            now_s: The time, seconds; never falling.
        """
        rates = ((self._counts.seen(region, now_s) / self._lasts_s, region) for region in self._counts)
        return [Heat(region, rate) for rate, region in heapq.nlargest(most, rates) if rate > 0]
