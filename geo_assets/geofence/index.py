"""The index: which fences cover which positions, how far a position is from a border, which fences a leg goes through.

Arrays in, arrays out; nothing is remembered between calls. What it means for a device is decided in `tracker`.
"""

# Functions of shapely that take one geometry or an array have partly unknown types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import shapely

from geo_assets.geofence.fences import FenceSet
from geo_assets.geofence.geodesic import metres_a_degree

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

CHUNK_CORNERS = 1_000_000
"""Corners of fences looked at together when distances are measured: some ten arrays of that length, 100 MB."""

RUN = 32
"""Corners of a run: a border of many is looked at run by run first, so that far ones cost a thirtieth."""

FEW_CORNERS = 256
"""Up to which all of a fence are looked at: the runs of so few cost more than they spare."""

MOST_PAIRS = 250_000
"""Pairs of a position and a fence judged at once: some 100 MB, and a third of a second. 4,000 positions that stay in
thirty fences each."""

_SAMPLED = 500
"""Middles of fences at which is looked how many lie over each other."""

NEAR_DATE_LINE = 170.0
"""Degrees of longitude from which a distance is measured across ±180 as well."""

_make = cast(Any, shapely)
"""For the constructors, which are typed as giving a geometry or an array of them."""

_SPREAD = ((16, 0x0000FFFF0000FFFF), (8, 0x00FF00FF00FF00FF), (4, 0x0F0F0F0F0F0F0F0F), (2, 0x3333333333333333),
           (1, 0x5555555555555555))  # fmt: skip


class Crowded(RuntimeError):
    """More pairs of a position and a fence than are judged at once; nothing was changed. Fewer positions will do.

    Args:
        pairs: As far as they were counted.
        positions: Among how many.
    """

    def __init__(self, pairs: int, positions: int) -> None:
        super().__init__(f"{pairs} pairs of a position and a fence and more; {MOST_PAIRS} are judged at once")
        self.fit = max(1, positions * MOST_PAIRS // pairs)
        """How many positions may do."""


class Legs(NamedTuple):
    """Legs that go through fences, one row a (leg, fence), sorted so.

    Args:
        leg: (n) index of the leg.
        fence: (n) position of the fence in its set.
        enters: (n) where it comes in, as a fraction of the leg.
        leaves: (n) where it goes out for the last time, as a fraction of the leg.
    """

    leg: Ints
    fence: Ints
    enters: Floats
    leaves: Floats


def z_order(lon: Floats, lat: Floats) -> npt.NDArray[np.uint64]:
    """Places along the Z-order curve: what is near on it is near on the ground.

    Args:
        lon: (n) degrees.
        lat: (n) degrees.
    """
    x = ((lon + 180.0) * (4294967295.0 / 360.0)).astype(np.uint64)
    y = ((lat + 90.0) * (4294967295.0 / 180.0)).astype(np.uint64)
    for shift, mask in _SPREAD:
        by, keep = np.uint64(shift), np.uint64(mask)
        x = (x | (x << by)) & keep
        y = (y | (y << by)) & keep
    return x | (y << np.uint64(1))


class FenceIndex:
    """The fences of a set, prepared, in Z-order under a tree of their boxes.

    A fence of several parts (those split at ±180 among them) is as many entries. Fences are named by their position in
    the set. Made once for a revision, 3 µs a fence, on any thread; asked by one at a time.

    Args:
        fence_set: The set.
    """

    def __init__(self, fence_set: FenceSet) -> None:
        self.fence_set = fence_set
        fences = fence_set.fences
        self.fence_ids = list(fence_set.place)
        self.priority = np.array([fence.priority for fence in fences], np.int64)
        self.dwell_ms = np.array([fence.dwell_ms for fence in fences], np.int64)
        self.hysteresis_m = np.array([fence.hysteresis_m for fence in fences], np.float64)
        self._geometries = np.array([fence.geometry for fence in fences], dtype=object)
        parts, owner = shapely.get_parts(self._geometries, return_index=True)
        box = shapely.bounds(parts).reshape(-1, 4)
        order = np.argsort(z_order((box[:, 0] + box[:, 2]) / 2, (box[:, 1] + box[:, 3]) / 2), kind="stable")
        self._parts = parts[order]
        self._fence = owner[order].astype(np.int64)
        self._several_parts = len(parts) > len(fences)
        shapely.prepare(self._parts)
        self._tree = shapely.STRtree(self._parts)
        self.deepest = self._sampled_depth()
        """How many fences lie over each other, more or less."""
        self._step = max(1, 2 * MOST_PAIRS // self.deepest)
        schedules = sorted({fence.schedule for fence in fences if fence.schedule is not None}, key=repr)
        number = {schedule: place for place, schedule in enumerate(schedules)}
        self._schedules = schedules
        self.scheduled = bool(schedules)
        self._schedule = np.array([-1 if f.schedule is None else number[f.schedule] for f in fences], np.int64)

    def _sampled_depth(self) -> int:
        """How many boxes lie over each other, as a sample of their middles says; 1 at least."""
        count = len(self._parts)
        some = np.arange(0, count, max(1, count // _SAMPLED))
        box = shapely.bounds(self._parts[some]).reshape(-1, 4)
        middles = _make.points((box[:, 0] + box[:, 2]) / 2, (box[:, 1] + box[:, 3]) / 2)
        deepest = 1
        for start in range(0, len(some), 20):
            point, _ = self._tree.query(middles[start : start + 20])
            deepest = max(deepest, int(np.bincount(point).max(initial=0)))
        return deepest

    def warm(self) -> None:
        """Work out what the first question about borders would wait for: 5 µs a fence."""
        _ = self._corners, self._runs

    def covered(self, lon: Floats, lat: Floats) -> tuple[Ints, Ints]:
        """The pairs of a position and a fence that covers it. A point on a border (of a hole too) is covered.

        Args:
            lon: (n) degrees, within ±180; 180 and -180 are one meridian.
            lat: (n) degrees.

        Returns:
            Index of the position and of the fence, sorted by both, each pair once.

        Raises:
            Crowded: Of several positions, more than `MOST_PAIRS`.
        """
        # Neighbours one after the other find the tree and the fences in the processor's cache: twice as fast.
        order = np.argsort(z_order(lon, lat))
        rows: list[Ints] = []
        found: list[Ints] = []
        pairs = 0
        for start in range(0, len(order), self._step):
            some = order[start : start + self._step]
            x, y = lon[some], lat[some]
            point, part = self._tree.query(_make.points(x, y))
            inside = shapely.intersects_xy(self._parts[part], x[point], y[point])
            rows.append(some[point[inside]])
            found.append(self._fence[part[inside]])
            pairs += len(rows[-1])
            if pairs > MOST_PAIRS and len(order) > 1:
                raise Crowded(pairs, min(len(order), start + self._step))
        row, fence = (rows[0], found[0]) if len(rows) == 1 else (_joined(rows), _joined(found))
        edge = np.flatnonzero(np.abs(lon) == 180.0)
        if len(edge):
            point, part = self._tree.query(_make.points(-lon[edge], lat[edge]), predicate="intersects")
            row, fence = np.concatenate((row, edge[point])), np.concatenate((fence, self._fence[part]))
        code = (row << 32) | fence
        code.sort()
        if len(edge) or self._several_parts:
            code = unique_sorted(code)
        return code >> 32, code & 0xFFFFFFFF

    def covers(self, fence: Ints, lon: Floats, lat: Floats) -> Bools:
        """Whether fences cover a position each, as `covered` says.

        Args:
            fence: (n) fences.
            lon: (n) degrees, within ±180.
            lat: (n) degrees.
        """
        shapely.prepare(self._geometries[np.unique(fence)])
        shape = self._geometries[fence]
        answer = shapely.intersects_xy(shape, lon, lat)
        edge = np.flatnonzero(np.abs(lon) == 180.0)
        if len(edge):
            answer[edge] |= shapely.intersects_xy(shape[edge], -lon[edge], lat[edge])
        return answer

    def in_force(self, fence: Ints, time_ms: Ints) -> Bools:
        """Whether fences are in force by their schedules.

        Args:
            fence: (n) fences.
            time_ms: (n) event times, milliseconds since the epoch, UTC.
        """
        answer = np.ones(len(fence), np.bool_)
        if self._schedules:
            schedule = self._schedule[fence]
            for number in np.unique(schedule[schedule >= 0]).tolist():
                rows = np.flatnonzero(schedule == number)
                answer[rows] = self._schedules[number].in_force(time_ms[rows])
        return answer

    @cached_property
    def _corners(self) -> tuple[Floats, Bools, Ints]:
        """Corners of all rings, fence by fence; which of them close a ring; where each fence begins."""
        parts, fence = shapely.get_parts(self._geometries, return_index=True)
        rings, part = shapely.get_rings(parts, return_index=True)
        corners, ring = shapely.get_coordinates(rings, return_index=True)
        closes = np.ones(len(ring), np.bool_)
        closes[:-1] = ring[1:] != ring[:-1]
        begins = np.searchsorted(fence[part[ring]], np.arange(len(self.fence_set) + 1))
        return corners, closes, begins.astype(np.int64)

    @cached_property
    def _runs(self) -> tuple[Ints, Floats, Ints]:
        """The first corner of each run of a border, fence by fence; the box of its edges; where each fence begins."""
        corners, closes, begins = self._corners
        count = np.diff(begins)
        runs = -(-count // RUN)
        first = np.zeros(len(count) + 1, np.int64)
        np.cumsum(runs, out=first[1:])
        start = np.repeat(begins[:-1] - RUN * first[:-1], runs) + RUN * np.arange(int(first[-1]))
        end = np.roll(corners, -1, axis=0)
        end[closes] = corners[closes]
        if not len(start):
            return start, np.empty((0, 4)), first
        low = np.minimum.reduceat(np.minimum(corners, end), start)
        high = np.maximum.reduceat(np.maximum(corners, end), start)
        return start, np.concatenate((low, high), axis=1), first

    def near_border(self, lon: Floats, lat: Floats, fence: Ints, reach_m: Floats) -> Bools:
        """Whether positions that a fence does not cover are within a distance of its border, as `border_m` measures it.

        Args:
            lon: (n) degrees.
            lat: (n) degrees.
            fence: (n) fences, one a position.
            reach_m: (n) metres.
        """
        begins = self._corners[2]
        many = begins[fence + 1] - begins[fence] > FEW_CORNERS
        if not many.any():
            return self.border_m(lon, lat, fence) <= reach_m
        answer = np.zeros(len(lon), np.bool_)
        few, many = np.flatnonzero(~many), np.flatnonzero(many)
        answer[few] = self.border_m(lon[few], lat[few], fence[few]) <= reach_m[few]
        edge = many[np.abs(lon[many]) > NEAR_DATE_LINE]
        row = np.concatenate((many, edge))
        x = lon[row]
        x[len(many) :] -= np.sign(x[len(many) :]) * 360.0
        runs = np.diff(self._runs[2])[fence[row]]
        for some in _pieces(runs, CHUNK_CORNERS):
            which = row[some]
            near = self._near_runs(x[some], lat[which], fence[which], reach_m[which])
            answer[which[near]] = True
        return answer

    def _near_runs(self, lon: Floats, lat: Floats, fence: Ints, reach_m: Floats) -> Bools:
        corners = self._corners[0]
        start, box, first = self._runs
        count = first[fence + 1] - first[fence]
        run, owner = spans(first[fence], first[fence + 1]), np.repeat(np.arange(len(fence)), count)
        kx, ky = metres_a_degree(lat)
        x, y, kx, ky = lon[owner], lat[owner], kx[owner], ky[owner]
        west, south, east, north = box[run].T
        # No edge of a run is nearer than its box; what rounding may hide is looked at as well.
        away = np.hypot(np.maximum(np.maximum(west - x, x - east), 0.0) * kx,
                        np.maximum(np.maximum(south - y, y - north), 0.0) * ky)  # fmt: skip
        maybe = np.flatnonzero(away <= reach_m[owner] * (1 + 1e-9) + 1e-6)
        run, owner, x, y, kx, ky = run[maybe], owner[maybe], x[maybe], y[maybe], kx[maybe], ky[maybe]
        begin = corners[start[run]]
        near = np.zeros(len(fence), np.bool_)
        near[owner[np.hypot((begin[:, 0] - x) * kx, (begin[:, 1] - y) * ky) <= reach_m[owner]]] = True
        left = np.flatnonzero(~near[owner])
        run, owner = run[left], owner[left]
        stop = np.minimum(start[run] + RUN + 1, self._corners[2][fence[owner] + 1])
        for some in _pieces(stop - start[run], CHUNK_CORNERS):
            who = owner[some]
            apart = self._edges_m(lon[who], lat[who], start[run[some]], stop[some])
            near[who[apart <= reach_m[who]]] = True
        return near

    def border_m(self, lon: Floats, lat: Floats, fence: Ints) -> Floats:
        """Metres from positions that a fence does not cover to its border, one fence each.

        Measured on the plane scaled at the position (`geodesic.metres_a_degree` states its error), across ±180 too.

        Args:
            lon: (n) degrees.
            lat: (n) degrees.
            fence: (n) fences.
        """
        if not len(lon):
            return np.empty(0)
        near = np.flatnonzero(np.abs(lon) > NEAR_DATE_LINE)
        other = lon[near] - np.sign(lon[near]) * 360.0
        x, y = np.concatenate((lon, other)), np.concatenate((lat, lat[near]))
        which = np.concatenate((fence, fence[near]))
        begins = self._corners[2]
        first, stop = begins[which], begins[which + 1]
        pieces = _pieces(stop - first, CHUNK_CORNERS)
        found = np.concatenate([self._edges_m(x[rows], y[rows], first[rows], stop[rows]) for rows in pieces])
        result = found[: len(lon)]
        result[near] = np.minimum(result[near], found[len(lon) :])
        return result

    def _edges_m(self, lon: Floats, lat: Floats, first: Ints, stop: Ints) -> Floats:
        """Metres from positions to the nearest of the edges between given corners, a range of these a position."""
        corners, closes, _ = self._corners
        count = stop - first
        start = np.cumsum(count) - count
        corner = spans(first, stop)
        kx, ky = metres_a_degree(lat)
        x = (corners[corner, 0] - np.repeat(lon, count)) * np.repeat(kx, count)
        y = (corners[corner, 1] - np.repeat(lat, count)) * np.repeat(ky, count)
        dx, dy = np.roll(x, -1) - x, np.roll(y, -1) - y
        # A corner that closes a ring begins no edge: it stays a point, as the last one does that is looked at.
        last = closes[corner]
        last[start + count - 1] = True
        dx[last] = dy[last] = 0.0
        square = dx * dx + dy * dy
        with np.errstate(invalid="ignore", divide="ignore"):
            along = np.where(square > 0.0, np.clip(-(x * dx + y * dy) / square, 0.0, 1.0), 0.0)
        return np.minimum.reduceat(np.hypot(x + along * dx, y + along * dy), start)

    def legs(self, lon: Floats, lat: Floats, to_lon: Floats, to_lat: Floats, but: Ints | None = None) -> Legs:
        """The fences that legs go through, and where on the leg. A fence that is touched in single points is none.

        Args:
            lon: (n) degrees, where a leg begins. It is straight in lon/lat and goes the shorter way around the globe.
            lat: (n) degrees.
            to_lon: (n) degrees, where it ends.
            to_lat: (n) degrees.
            but: Pairs that are not asked about, sorted: leg * 2^32 + fence.
        """
        turn = np.where(to_lon - lon > 180.0, -360.0, np.where(to_lon - lon < -180.0, 360.0, 0.0))
        wraps = np.flatnonzero(turn)
        leg = np.concatenate((np.arange(len(lon)), wraps))
        ends = np.stack((lon, lat, to_lon + turn, to_lat), axis=1)
        # The other end of a leg across ±180 is the same leg seen from the world next door.
        moved = ends[wraps] - np.stack((turn[wraps], 0 * turn[wraps]) * 2, axis=1)
        ends = np.concatenate((ends, moved))
        lines = _make.linestrings(ends.reshape(-1, 2, 2))
        line, part = self._tree.query(lines)
        if but is not None:
            asked = np.flatnonzero(~among((leg[line] << 32) | self._fence[part], but))
            line, part = line[asked], part[asked]
        meets = np.flatnonzero(shapely.intersects(self._parts[part], lines[line]))
        line, part = line[meets], part[meets]
        shared = shapely.intersection(lines[line], self._parts[part])
        real = np.flatnonzero(shapely.length(shared) > 0.0)
        line, part, shared = line[real], part[real], shared[real]
        points, owner = shapely.get_coordinates(shared, return_index=True)
        own = ends[line[owner]]
        step = own[:, 2:] - own[:, :2]
        fraction = ((points - own[:, :2]) * step).sum(axis=1) / (step * step).sum(axis=1)
        fraction = np.clip(fraction, 0.0, 1.0)
        code = (leg[line[owner]] << 32) | self._fence[part[owner]]
        order = np.argsort(code, kind="stable")
        code, fraction = code[order], fraction[order]
        begins = np.flatnonzero(np.concatenate(([True], code[1:] != code[:-1]))) if len(code) else np.empty(0, np.int64)
        if not len(begins):
            return Legs(begins, begins, np.empty(0), np.empty(0))
        code = code[begins]
        return Legs(
            code >> 32, code & 0xFFFFFFFF, np.minimum.reduceat(fraction, begins), np.maximum.reduceat(fraction, begins)
        )


def _joined(parts: list[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _pieces(weight: Ints, most: int) -> list[Ints]:
    """Rows in pieces that weigh about so much; none where there are none."""
    if not len(weight):
        return []
    reached = np.cumsum(weight)
    cuts = np.unique(np.searchsorted(reached, np.arange(most, reached[-1], most)))
    return np.split(np.arange(len(weight)), cuts[cuts > 0])


def spans(start: Ints, stop: Ints) -> Ints:
    """The numbers of several ranges, one after the other."""
    count = stop - start
    return np.repeat(start - (np.cumsum(count) - count), count) + np.arange(int(count.sum()))


def unique_sorted(values: Ints) -> Ints:
    """The different values of a sorted array."""
    if len(values) < 2:
        return values
    keep = np.empty(len(values), np.bool_)
    keep[0] = True
    np.not_equal(values[1:], values[:-1], out=keep[1:])
    return values[keep]


def among(values: Ints, others: Ints) -> Bools:
    """Which values stand in others; these are sorted."""
    if not len(others):
        return np.zeros(len(values), np.bool_)
    place = np.searchsorted(others, values)
    place[place == len(others)] = 0
    return others[place] == values
