"""How devices move: where each is at a time, and which positions it sends, as columns.

Everything follows from the seed and the time alone: not from when or in which pieces it is asked for. So a simulator
that is started again goes on where its devices would be by now, and a test knows what was sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from geo_assets.simulation.routes import METRES_A_DEGREE, Kind, Route

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

MIX: Mapping[Kind, float] = {"pedestrian": 0.6, "bicycle": 0.15, "car": 0.25}
"""Share of each kind."""

SPEEDS: Mapping[Kind, tuple[float, float]] = {"pedestrian": (0.9, 1.8), "bicycle": (3.5, 6.5), "car": (5.0, 11.0)}
"""Metres a second while it moves: a stroll and a hurry; a tourist and a courier; a centre where 30 and 40 km/h hold."""

WAITS: Mapping[Kind, tuple[float, float]] = {"pedestrian": (20, 240), "bicycle": (5, 90), "car": (10, 120)}
"""Seconds at a stop."""

ERROR_M = (1.5, 8.0)
"""Error of a fix, one standard deviation to each side: under an open sky, and between houses."""

WAVES_S = ((120.0, 300.0), (60.0, 100.0))
"""Periods of the two waves in which an error wanders, seconds: at most 1.6 m/s, 0.4 on the average."""

SILENT_SHARE, SILENT_EVERY_S, SILENT_FOR_S = 0.05, 300.0, 75.0
"""One device in twenty says nothing for 75 s of every five minutes: in a tunnel, in a pocket."""

JUMP_DEGREES = 1.0
"""A jump goes 111 km to the north: no fix of a device that sends at least every two minutes can follow that."""

MAX_INTERVAL_MS = 120_000
MIN_INTERVAL_MS = 10


class FleetError(ValueError):
    """A number outside its range; the message names it, its value and its limit."""


class Fate(IntEnum):
    """What is odd about a position, if anything."""

    PLAIN = 0
    LATE = 1
    """Sent after the one that followed it; a tracker ignores it."""
    DUPLICATE = 2
    """Sent a second time; a tracker ignores it."""
    JUMP = 3
    """Somewhere else, where the device cannot be; a tracker filters it."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Positions in the order in which they are sent: of a device by time, but for those that are late.

    Args:
        device: Numbers of devices, from 0.
        lon: Degrees.
        lat: Degrees.
        accuracy_m: Radius, metres; 0 where the fleet says none.
        speed_mps: Metres a second.
        heading_deg: Clockwise from north.
        time_ms: Event time, milliseconds since the epoch, UTC.
        fate: `Fate` numbers.
    """

    device: Ints
    lon: Floats
    lat: Floats
    accuracy_m: Floats
    speed_mps: Floats
    heading_deg: Floats
    time_ms: Ints
    fate: Ints

    def __len__(self) -> int:
        return len(self.device)

    def rows(self, which: Ints | Bools) -> Sent:
        """Some of them."""
        return Sent(
            self.device[which], self.lon[which], self.lat[which], self.accuracy_m[which], self.speed_mps[which],
            self.heading_deg[which], self.time_ms[which], self.fate[which],
        )  # fmt: skip

    def counting(self) -> Sent:
        """Those that say something new of where a device is: neither late nor repeated nor a jump."""
        return self.rows(self.fate == Fate.PLAIN)


class Fleet:
    """Devices on routes.

    Args:
        routes: Of every kind, at least one.
        devices: How many.
        seed: Another number, other devices.
        interval_ms: Milliseconds between two positions of a device.
        start_ms: Nothing is sent at or before this event time, milliseconds since the epoch.
        prefix: Before each device's id.
        late: Share of positions that are late.
        duplicates: Share of positions that are sent twice.
        jumps: Share of positions that are jumps.
        silent: Whether some devices fall silent now and then.
        noise: Whether fixes have an error and say their accuracy.

    Raises:
        FleetError: A number is outside its range.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        devices: int,
        *,
        seed: int = 1,
        interval_ms: float = 1_000.0,
        start_ms: int = 0,
        prefix: str = "",
        late: float = 0.0,
        duplicates: float = 0.0,
        jumps: float = 0.0,
        silent: bool = True,
        noise: bool = True,
    ) -> None:
        _check("devices", devices, 1, 1_000_000)
        _check("interval_ms", interval_ms, MIN_INTERVAL_MS, MAX_INTERVAL_MS)
        for name, share in (("late", late), ("duplicates", duplicates), ("jumps", jumps)):
            _check(name, share, 0, 0.5)
        # Every second position is a plain one, so that it is certain what a tracker makes of the odd ones.
        _check("late + duplicates + jumps", late + duplicates + jumps, 0, 0.5)
        self.routes = routes
        self.interval_ms, self.start_ms, self.seed = float(interval_ms), start_ms, seed
        self._odd = 2 * late, 2 * (late + duplicates), 2 * (late + duplicates + jumps)
        self._noise = noise
        chance = np.random.default_rng([seed, 1])
        kinds = list(MIX)
        counts = np.floor(np.array([MIX[kind] for kind in kinds]) * devices).astype(int)
        counts[0] += devices - counts.sum()
        self.kind: list[Kind] = [kind for kind, count in zip(kinds, counts.tolist(), strict=True) for _ in range(count)]
        self.ids = [f"{prefix}{kind}-{number:05d}" for kind, count in zip(kinds, counts.tolist(), strict=True)
                    for number in range(1, count + 1)]  # fmt: skip
        """Id of each device by its number."""
        self._devices(chance, silent)
        self._lines()

    def __len__(self) -> int:
        return len(self.ids)

    def _devices(self, chance: np.random.Generator, silent: bool) -> None:
        count = len(self.kind)
        by_kind: dict[Kind, list[int]] = {}
        for number, route in enumerate(self.routes):
            by_kind.setdefault(route.kind, []).append(number)
        for kind in set(self.kind):
            if kind not in by_kind:
                raise FleetError(f"routes: there is none for a {kind}")
        drawn = chance.random(count)
        self._route = np.array(
            [by_kind[kind][int(u * len(by_kind[kind]))] for kind, u in zip(self.kind, drawn.tolist(), strict=True)]
        )
        low, high = np.array([SPEEDS[kind] for kind in self.kind]).T
        self._speed = low + (high - low) * chance.random(count)
        most = max(len(route.stops) for route in self.routes)
        lengths = np.array([route.distance_m[-1] for route in self.routes])
        # A route with fewer stops has others at its very end, at which nobody waits.
        stop_m = np.array([
            np.append(route.distance_m[list(route.stops)], [length] * (most - len(route.stops)))
            for route, length in zip(self.routes, lengths, strict=True)
        ])[self._route]  # fmt: skip
        low, high = np.array([WAITS[kind] for kind in self.kind]).T
        self._wait = low[:, None] + (high - low)[:, None] * chance.random((count, most))
        self._wait[stop_m >= lengths[self._route][:, None]] = 0.0
        before = np.cumsum(self._wait, axis=1) - self._wait
        self._arrive = stop_m / self._speed[:, None] + before
        self._period = lengths[self._route] / self._speed + self._wait.sum(axis=1)
        self._shift = chance.random(count) * self._period
        self._due = np.floor(np.arange(count) * (self.interval_ms / count))
        self._error = ERROR_M[0] + (ERROR_M[1] - ERROR_M[0]) * chance.random(count)
        # An error wanders: two slow waves to the east and two to the north.
        self._waves = np.stack([chance.uniform(*period, count) for period in WAVES_S * 2])
        self._turns = chance.random((4, count)) * 2 * np.pi
        self._is_silent = silent & (chance.random(count) < SILENT_SHARE)
        self._silent_shift = chance.random(count) * SILENT_EVERY_S

    def _lines(self) -> None:
        """All routes as one line, each far enough behind the one before."""
        lengths = np.array([route.distance_m[-1] for route in self.routes])
        self._base = np.concatenate(([0.0], np.cumsum(lengths + 1_000.0)[:-1]))
        distance = [base + route.distance_m for base, route in zip(self._base, self.routes, strict=True)]
        self._distance = np.concatenate(distance)
        self._lon = np.concatenate([route.lon for route in self.routes])
        self._lat = np.concatenate([route.lat for route in self.routes])
        step = np.diff(self._distance)
        # Points at the same place make a stretch without length, at which nobody is.
        step[step == 0] = 1.0
        self._lon_a_m, self._lat_a_m = np.diff(self._lon) / step, np.diff(self._lat) / step
        self._turn = np.degrees(np.arctan2(self._lon_a_m * np.cos(np.radians(self._lat[:-1])), self._lat_a_m)) % 360

    def where(self, device: Ints, time_ms: Ints) -> tuple[Floats, Floats, Floats, Floats]:
        """Where devices truly are: on their routes, without an error.

        Args:
            device: Numbers of devices.
            time_ms: A time for each, milliseconds since the epoch.

        Returns:
            Lon and lat in degrees, metres a second, degrees clockwise from north.
        """
        clock = (time_ms * 1e-3 + self._shift[device]) % self._period[device]
        since = clock[:, None] - self._arrive[device]
        wait = self._wait[device]
        waited = np.clip(since, 0.0, wait)
        stands = ((since >= 0) & (since < wait)).any(axis=1)
        metres = self._base[self._route[device]] + (clock - waited.sum(axis=1)) * self._speed[device]
        place = np.searchsorted(self._distance, metres, side="right") - 1
        place = np.clip(place, 0, len(self._distance) - 2)
        along = metres - self._distance[place]
        return (
            self._lon[place] + along * self._lon_a_m[place],
            self._lat[place] + along * self._lat_a_m[place],
            np.where(stands, 0.0, self._speed[device]),
            self._turn[place],
        )

    def between(self, after_ms: int, until_ms: int) -> Sent:
        """What is sent after one event time and up to another, in the order in which it is due.

        Windows that follow each other give what one over all of them gives, in the same order for each device.
        """
        first, last = self._slot(after_ms), self._slot(until_ms)
        many = np.maximum(last - first, 0)
        device = np.repeat(np.arange(len(self.ids)), many)
        start = np.repeat(first + 1 - (np.cumsum(many) - many), many)
        slot = start + np.arange(len(device))
        fate = self._fate(device, slot)
        here = self._says(device, slot)
        held = here & (fate == Fate.LATE)
        # Every slot, its repetition, and the one before it that was held back.
        again = here & (fate == Fate.DUPLICATE)
        behind = here & (self._fate(device, slot - 1) == Fate.LATE)
        shown = here & ~held
        devices = np.concatenate((device[shown], device[again], device[behind]))
        slots = np.concatenate((slot[shown], slot[again], slot[behind] - 1))
        # The first one of two is no duplicate, whatever the fate of its slot.
        own = np.where(fate[shown] == Fate.JUMP, Fate.JUMP, Fate.PLAIN)
        fates = np.concatenate((own, np.full(again.sum(), Fate.DUPLICATE), np.full(behind.sum(), Fate.LATE)))
        due = np.concatenate((slot[shown], slot[again], slot[behind]))
        turn = np.concatenate((np.zeros(shown.sum()), np.ones(again.sum()), np.full(behind.sum(), 2)))
        order = np.lexsort((turn, devices, self._time(devices, due)))
        devices, slots, fates = devices[order], slots[order], fates[order].astype(np.int64)
        return self._fixes(devices, self._time(devices, slots), fates)

    def _slot(self, time_ms: int) -> Ints:
        """Number of each device's last position up to a time."""
        since = max(time_ms, self.start_ms) - self._due
        return np.floor(since / self.interval_ms).astype(np.int64)

    def _time(self, device: Ints, slot: Ints) -> Ints:
        # A hair, for intervals that are no whole number: a slot lies where `_slot` counts it.
        return np.floor(slot * self.interval_ms + self._due[device] + 1e-3).astype(np.int64)

    def _says(self, device: Ints, slot: Ints) -> Bools:
        """Whether a device says anything there: it has begun, and is not silent."""
        clock = slot * (self.interval_ms * 1e-3) + self._silent_shift[device]
        silent = self._is_silent[device] & (clock % SILENT_EVERY_S < SILENT_FOR_S)
        return ~silent & (slot > self._slot(self.start_ms)[device])

    def _fate(self, device: Ints, slot: Ints) -> Ints:
        late, duplicates, jumps = self._odd
        if not jumps:
            return np.zeros(len(slot), np.int64)
        drawn = _unit(self.seed, device, slot)
        fate = np.select([drawn < late, drawn < duplicates, drawn < jumps], [1, 2, 3], 0).astype(np.int64)
        # One odd one at a time, between two that are sent and plain.
        sound = (slot % 2 == 1) & self._says(device, slot - 1) & self._says(device, slot) & self._says(device, slot + 1)
        return np.where(sound, fate, Fate.PLAIN)

    def _fixes(self, device: Ints, time_ms: Ints, fate: Ints) -> Sent:
        lon, lat, speed, heading = self.where(device, time_ms)
        accuracy = np.zeros(len(device))
        if self._noise:
            error = self._error[device]
            seconds = time_ms * 1e-3
            waves = [np.sin(seconds * (2 * np.pi / self._waves[n][device]) + self._turns[n][device]) for n in range(4)]
            # Two waves of one and a half: their squares' means add up to one standard deviation.
            lon = lon + error * (1.2 * waves[0] + 0.7 * waves[1]) / (METRES_A_DEGREE * np.cos(np.radians(lat)))
            lat = lat + error * (1.2 * waves[2] + 0.7 * waves[3]) / METRES_A_DEGREE
            accuracy = error * 1.5  # 68 % of a normal error in two directions is within 1.5 of it in one.
        lat = lat + (fate == Fate.JUMP) * JUMP_DEGREES
        # As they are sent: a centimetre, a decimetre, whole degrees.
        return Sent(
            device, np.round(lon, 7), np.round(lat, 7), np.round(accuracy, 1), np.round(speed, 2), np.round(heading),
            time_ms, fate,
        )  # fmt: skip


def _unit(seed: int, device: Ints, slot: Ints) -> Floats:
    """A number in [0, 1) for each device and slot (the finalizer of SplitMix64)."""
    with np.errstate(over="ignore"):
        x = (slot.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) ^ (
            (device.astype(np.uint64) + np.uint64((seed * 0x5851F42D + 1) % 2**64)) * np.uint64(0xD1B54A32D192ED03)
        )
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)).astype(np.float64) / float(1 << 53)


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise FleetError(f"{name}: {value:g} is outside {low:g}..{high:g}")
