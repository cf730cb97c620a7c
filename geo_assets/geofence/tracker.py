"""The tracker: positions in, triggers out, as columns; which device is in which fence, and what follows from it.

Every rule is told by records alone: what comes out for a device does not depend on where batches are cut, on the clock,
or on what is remembered of devices that fell silent. Hence a replay from a snapshot gives the same triggers under the
same keys. What a snapshot must wait for, and when new fences are adopted, is decided in `replay`.

For one record, in this order:

1. A record already read (its offset is below the next one) changes nothing.
2. A time outside 2000 to 2100, a place outside the world: refused. A time too far after the record's receipt: refused.
   All others move the watermark of their partition, the highest event time seen; ticks do nothing else.
3. A position `silent_ms` or more behind the watermark before it is late. One whose radius is over `max_accuracy_m` is
   too coarse. Both are ignored.
4. A device of which the watermark has moved on by `silent_ms` since its last fix was forgotten at that record: EXIT
   from where it was, stamped last fix + `silent_ms`. It is now as one never seen.
5. A position at or before the device's last one is late, and ignored.
6. A position that could not have been reached at `max_speed_mps` from the last one that counted (both radii granted) is
   a jump, and does not count; unless it is the `recover_after`-th in a row that agree with each other.
7. The device is in a fence that covers the point (its border included) while in force. It stays in a fence while in
   force and within the larger of the fence's hysteresis and the fix's radius of its border. So ENTER needs the fix
   inside, EXIT needs all of its circle outside, and a coarse fix does not flutter. Stamped with the position's time.
8. By option, a fence passed through between two fixes gives ENTER and EXIT, stamped between; less than a millisecond
   in it is none. If the fix is still within the border's hysteresis, EXIT is yet to come.
9. DWELL comes once a stay, stamped enter + dwell: when the device itself is past that (nothing earlier of it can come),
   or when the watermark is past it by `lateness_ms`; not when the stay ended first, nor if the fence is out of force by
   then.
10. Of one device and record: by event time; at the same time EXIT, ENTER, DWELL; then by priority, highest first; then
    by fence id.

`sequence` counts the triggers of a device, over all fences: one up each. It begins at 1024 times the event time
(milliseconds) of the first position after it was unknown, so that a device that comes back after it was forgotten goes
on above where it ended, although nothing of it was kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from geo_assets.geofence.fences import FenceSet
from geo_assets.geofence.geodesic import EARTH_RADIUS_M, metres_apart
from geo_assets.geofence.index import MOST_PAIRS, Crowded, FenceIndex, among, spans
from geo_assets.geofence.positions import Positions
from geo_assets.geofence.rules import Rules
from geo_assets.geofence.state import (
    DEVICE_COLUMNS,
    FIRED,
    NEVER,
    NONE,
    STAY_COLUMNS,
    Devices,
    Snapshot,
    SnapshotError,
    Stays,
)
from geo_assets.geofence.triggers import DWELL, ENTER, EXIT, Triggers

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

EARLIEST_MS = 946_684_800_000
LATEST_MS = 4_102_444_800_000
"""2000-01-01 and 2100-01-01, as in `PositionEvent`: times outside are a wrong unit or a clock that was never set."""

SEQUENCES_A_MS = 1024
"""Room for the triggers of one fix; with the times above the sequence stays below 2^53."""

_SPAN = 1 << 42
"""Milliseconds above every event time and due time: partitions are told apart by multiples of it."""

_DEGREE_M = EARTH_RADIUS_M * np.pi / 180 * 1.000001
"""No way along a meridian and a parallel is longer, a degree."""


class TooManyDevices(RuntimeError):
    """More devices at once than `max_devices`; nothing of the batch was taken.

    Args:
        message: What is too many, and the limit.
        devices: Those for which there is no room, in the order in which they came.
    """

    def __init__(self, message: str, devices: frozenset[str]) -> None:
        super().__init__(message)
        self.devices = devices


class TooManyStays(RuntimeError):
    """A position for whose stays there is no room (`max_stays`); nothing was changed.

    Args:
        message: How many, and the limit.
        partition: Of its record.
        offset: Of its record.
    """

    def __init__(self, message: str, partition: int, offset: int) -> None:
        super().__init__(message)
        self.partition, self.offset = partition, offset


@dataclass(slots=True)
class Counts:
    """What became of records since the tracker was made. `positions` is the sum of those below it down to `jumped`."""

    positions: int = 0
    accepted: int = 0
    out_of_range: int = 0
    future: int = 0
    late: int = 0
    coarse: int = 0
    jumped: int = 0
    recovered: int = 0
    """Jumps that turned out to be where the device is (among the accepted)."""
    ticks: int = 0
    repeated: int = 0
    """Records read before (among nothing else)."""
    forgotten: int = 0
    """Devices that fell silent."""


class _Clock:
    """The watermarks of a batch, record by record.

    Args:
        batch: Records, partition after partition.
        moves: Which of them move the watermark.
        watermarks: Before the batch.
    """

    def __init__(self, batch: Positions, moves: Bools, watermarks: Mapping[int, int]) -> None:
        count = len(batch)
        first = np.ones(count, np.bool_)
        np.not_equal(batch.partition[1:], batch.partition[:-1], out=first[1:])
        self.start = np.flatnonzero(first)
        self.partitions = batch.partition[self.start]
        self.stop = np.append(self.start[1:], count)
        before = np.array([watermarks.get(p, 0) for p in self.partitions.tolist()], np.int64)
        base = np.repeat(np.arange(len(self.start)) * _SPAN, self.stop - self.start)
        reached = np.where(moves, batch.time_ms, 0)
        reached[self.start] = np.maximum(reached[self.start], before)
        self._reached = np.maximum.accumulate(reached + base)
        self.before = np.empty(count, np.int64)
        self.before[1:] = (self._reached - base)[:-1]
        self.before[self.start] = before
        self.end = (self._reached - base)[self.stop - 1]
        self.count = count

    def segment(self, partition: npt.NDArray[Any]) -> Ints:
        """Number of a partition within the batch; -1 where it has no records there."""
        place = np.searchsorted(self.partitions, partition)
        place[place == len(self.partitions)] = 0
        return np.where(self.partitions[place] == partition, place, -1)

    def first(self, time_ms: Ints, segment: Ints) -> Ints:
        """The record at which the watermark reached a time; the number of records where none did."""
        row = np.searchsorted(self._reached, np.minimum(time_ms, _SPAN - 1) + segment * _SPAN)
        return np.where(row < self.stop[segment], row, self.count)


@dataclass(slots=True)
class _Work:
    """The usable positions of a batch, one a column entry, and the fences that cover each."""

    row: Ints
    device: Ints
    lon: Floats
    lat: Floats
    accuracy: Floats
    time: Ints
    hits: Ints
    """Fences, position by position, ascending."""
    hit: Ints
    """Where each position's begin; one more at the end."""


class Tracker:
    """The state of all devices, and the fences it is judged by.

    Not safe for several threads at once.

    Args:
        fences: The fences of the first revision, or their index where it was made before.
        rules: How positions are judged.
    """

    def __init__(self, fences: FenceSet | FenceIndex | None = None, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self.index = _indexed(fences if fences is not None else FenceSet())
        self.counts = Counts()
        self._devices = Devices()
        self._stays = Stays()
        self._offsets: dict[int, int] = {}
        self._watermarks: dict[int, int] = {}
        self._pending: list[tuple[Ints, Ints, Ints, Ints, Ints]] = []
        self._done: list[tuple[Ints, list[str], Ints, Ints, Ints, Ints]] = []
        # No device was last seen earlier. It is exact after a look at all of them, which a batch seldom needs.
        self._oldest = NEVER

    # What others may know

    @property
    def revision(self) -> int:
        """Of the fences."""
        return self.index.fence_set.revision

    @property
    def offsets(self) -> dict[int, int]:
        """Partition -> offset of the next record."""
        return dict(self._offsets)

    @property
    def watermarks(self) -> dict[int, int]:
        """Partition -> highest event time, milliseconds since the epoch."""
        return dict(self._watermarks)

    @property
    def devices(self) -> int:
        """Devices remembered."""
        return len(self._devices.number)

    @property
    def stays(self) -> int:
        """Devices in fences: pairs."""
        return self._stays.used

    def fullest(self, most: int = 3) -> dict[str, int]:
        """Ids of the fences with the most devices in them -> how many."""
        count = np.bincount(self._stays.fence[self._stays.open()])
        order = np.argsort(-count, kind="stable")[:most]
        return {self.index.fence_ids[fence]: int(count[fence]) for fence in order.tolist() if count[fence]}

    def inside(self, device: str) -> list[str]:
        """Ids of the fences that a device is in, sorted."""
        row = self._devices.number.get(device)
        if row is None:
            return []
        stays, _ = self._stays.of(self._devices.head[[row]])
        return sorted(self.index.fence_ids[fence] for fence in self._stays.fence[stays].tolist())

    def next_due(self) -> dict[int, int]:
        """Partition -> watermark at which something comes of devices that say nothing; those without are left out.

        A DWELL at its time + `lateness_ms`, or the end of what a device has open that fell silent.
        """
        devices, stays = self._devices, self._stays
        stay = stays.open()
        owner = stays.device[stay]
        due = np.minimum(stays.due[stay] + self.rules.lateness_ms, devices.seen[owner] + self.rules.silent_ms)
        partition = devices.partition[owner]
        return {number: int(due[partition == number].min()) for number in np.unique(partition).tolist()}

    # Positions

    def feed(self, batch: Positions) -> Triggers:
        """Judge records, and say what follows.

        Args:
            batch: Records, each partition's in their order. Those below its next offset are passed over.

        Returns:
            The triggers, partition after partition in the order of the records that brought them; those of one device
            in its order.

        Raises:
            Crowded: They are in too many fences to be judged at once. Nothing was changed; see `pieces`.
            TooManyDevices: Nothing was changed.
            TooManyStays: Of a single record. Nothing was changed.
            Exception: A fault of a library's or of our own. What is left is no state to go on from: see `sift`.
        """
        batch = self._unread(batch)
        if not len(batch):
            return self._triggers(batch.partition, batch.offset)
        time = batch.time_ms
        wrong_time = (time < EARLIEST_MS) | (time >= LATEST_MS)
        future = time > batch.received_ms + self.rules.max_future_ms
        clock = _Clock(batch, ~(wrong_time | future), self._watermarks)
        work = self._work(batch, clock, wrong_time, future)
        opened: list[Ints] = []
        for at in _rounds(work.device, self._devices.end):
            opened.append(self._round(work, at, clock))
        self._watermark(clock)
        for stays in opened:
            self._stays.opened[stays] = NONE
        for partition, stop, end in zip(
            clock.partitions.tolist(), clock.stop.tolist(), clock.end.tolist(), strict=True
        ):
            self._offsets[partition] = int(batch.offset[stop - 1]) + 1
            self._watermarks[partition] = end
        return self._triggers(batch.partition, batch.offset + 1)

    def pieces(self, batch: Positions, refuse: Callable[[int, int], None] | None = None) -> Iterator[Triggers]:
        """Judge records as `feed` does, those in very many fences few at a time; what follows, piece by piece.

        Args:
            batch: Records, each partition's in their order.
            refuse: Called with partition and offset of a record for whose stays there is no room, which is then judged
                as if it said nothing. None: the fault is raised.
        """
        waiting = [batch]
        while waiting:
            piece = waiting.pop()
            try:
                told = self.feed(piece)
            except Crowded as fault:
                size = max(1, min(fault.fit, len(piece) // 2))
                waiting += [
                    piece.rows(np.arange(start, min(start + size, len(piece))))
                    for start in range((len(piece) - 1) // size * size, -1, -size)
                ]
            except TooManyStays as fault:
                if refuse is None:
                    raise
                refuse(fault.partition, fault.offset)
                rows = np.flatnonzero((piece.partition == fault.partition) & (piece.offset == fault.offset))
                waiting.append(piece.silenced(rows.tolist()))
            else:
                yield told

    def _unread(self, batch: Positions) -> Positions:
        """The records not read before, partition after partition."""
        if not len(batch):
            return batch
        partition, offset = batch.partition, batch.offset
        step = np.diff(partition)
        if (step >= 0).all() and (np.diff(offset)[step == 0] > 0).all():
            starts = np.concatenate(([0], np.flatnonzero(step) + 1))
            known = [self._offsets.get(number, 0) for number in partition[starts].tolist()]
            if (offset[starts] >= known).all():
                return batch
        order = np.argsort(partition, kind="stable")
        parts: list[Ints] = []
        for rows in np.split(order, np.flatnonzero(np.diff(partition[order])) + 1):
            floor = np.full(len(rows), self._offsets.get(int(partition[rows[0]]), 0))
            np.maximum.accumulate(offset[rows][:-1] + 1, out=floor[1:])
            floor = np.maximum(floor, floor[0])
            parts.append(rows[offset[rows] >= floor])
        order = np.concatenate(parts)
        self.counts.repeated += len(batch) - len(order)
        return batch.rows(order)

    def _work(self, batch: Positions, clock: _Clock, wrong_time: Bools, future: Bools) -> _Work:
        """The positions that can be used, their devices (new ones are made) and the fences that cover them."""
        count, rules, counts, devices = len(batch), self.rules, self.counts, self._devices
        known: Any = devices.number.get
        number = np.fromiter(map(known, batch.device, repeat(NONE)), np.int64, count)
        unknown = np.flatnonzero(number < 0)
        accuracy = np.where(np.isnan(batch.accuracy_m), 0.0, batch.accuracy_m)
        lost = wrong_time | ~((np.abs(batch.lon) <= 180.0) & (np.abs(batch.lat) <= 90.0) & (accuracy >= 0.0))
        late = batch.time_ms <= clock.before - rules.silent_ms
        coarse = accuracy > rules.max_accuracy_m
        usable = ~(lost | future | late | coarse)
        ticks = np.zeros(count, np.bool_)
        ticks[[row for row in unknown.tolist() if batch.device[row] is None]] = True
        usable &= ~ticks
        row = np.arange(count) if usable.all() else np.flatnonzero(usable)
        place = (batch.lon, batch.lat) if len(row) == count else (batch.lon[row], batch.lat[row])
        at, fence = self.index.covered(*place)
        if self.index.scheduled and len(at):
            keep = self.index.in_force(fence, batch.time_ms[row[at]])
            at, fence = at[keep], fence[keep]
        self._room(batch, number[row], at, fence)
        wanted = unknown[usable[unknown]]
        if len(wanted):
            names = list(dict.fromkeys(batch.device[row] for row in wanted.tolist()))
            if len(devices.number) + len(names) > rules.max_devices:
                raise TooManyDevices(
                    f"max_devices: {len(devices.number)} devices are known and {len(names)} more came; the limit is "
                    f"{rules.max_devices}. Raise it, or lower silent_ms ({rules.silent_ms})",
                    frozenset(name for name in names[max(0, rules.max_devices - len(devices.number)) :] if name),
                )
            devices.add(names)  # pyright: ignore[reportArgumentType]
            number[wanted] = [devices.number[batch.device[row]] for row in wanted.tolist()]  # pyright: ignore[reportArgumentType]
        counts.ticks += int(ticks.sum())
        counts.positions += count - int(ticks.sum())
        time, partition = batch.time_ms, batch.partition
        if len(row) < count:
            counts.out_of_range += int((lost & ~ticks).sum())
            left = ~(ticks | lost)
            for name, reason in (("future", future), ("late", late), ("coarse", coarse)):
                setattr(counts, name, getattr(counts, name) + int((left & reason).sum()))
                left &= ~reason
            number, accuracy, time, partition = number[row], accuracy[row], time[row], partition[row]
        moved = devices.partition[number] != partition
        if moved.any():
            devices.partition[number[moved]] = partition[moved]
        hit = np.zeros(len(row) + 1, np.int64)
        np.cumsum(np.bincount(at, minlength=len(row)), out=hit[1:])
        return _Work(row, number, *place, accuracy, time, fence, hit)

    def _room(self, batch: Positions, device: Ints, at: Ints, fence: Ints) -> None:
        """Raise where positions would take too much at once, or more than may be kept.

        Args:
            batch: What they are of.
            device: Device of each position; -1 where it is not known.
            at: Position of each pair with a fence that covers it, ascending.
            fence: Its fence.
        """
        devices, stays = self._devices, self._stays
        known = np.flatnonzero(device >= 0)
        pairs = len(at) + int(devices.stays[device[known]].sum())
        if self.rules.crossings:
            pairs = max(pairs, len(batch) * self.index.deepest)
        if len(batch) > 1 and pairs > MOST_PAIRS:
            raise Crowded(pairs, len(batch))
        if stays.used + len(at) <= self.rules.max_stays:
            return
        old, owner = stays.of(devices.head[device[known]])
        code = (known[owner] << 32) | stays.fence[old]
        new = len(at) - int(among((at << 32) | fence, np.sort(code)).sum())
        if new and stays.used + new > self.rules.max_stays:
            if len(batch) > 1:
                raise Crowded(max(pairs, 1), len(batch))  # What has no room is found one by one.
            raise TooManyStays(
                f"max_stays: {stays.used} devices in fences are remembered, and {new} more came; the limit is "
                f"{self.rules.max_stays}", int(batch.partition[0]), int(batch.offset[0]),
            )  # fmt: skip

    def _round(self, work: _Work, at: Ints, clock: _Clock) -> Ints:
        """Judge one position each of different devices.

        Returns:
            The stays that began.
        """
        devices, rules = self._devices, self.rules
        device, time, before = work.device[at], work.time[at], clock.before[work.row[at]]
        seen = devices.seen[device]
        silent = before >= seen + rules.silent_ms
        silent &= seen >= 0
        if silent.any():
            self._forget(device[silent], clock)
            seen = devices.seen[device]
        good = time > seen
        if not good.all():
            self.counts.late += len(good) - int(good.sum())
            at, device, time, before, seen = at[good], device[good], time[good], before[good], seen[good]
        devices.seen[device] = time
        odd, recovered = self._jumps(work, at, device, time, seen)
        if odd.any():
            at, device, time, before, recovered = at[~odd], device[~odd], time[~odd], before[~odd], recovered[~odd]
        self.counts.accepted += len(at)
        new = devices.time[device] == NONE
        if new.any():
            devices.sequence[device[new]] = time[new] * SEQUENCES_A_MS
            self._oldest = min(self._oldest, int(time[new].min()))
        opened = self._judge(work, at, device, time, before, recovered, clock)
        devices.time[device] = time
        devices.lon[device], devices.lat[device] = work.lon[at], work.lat[at]
        devices.accuracy[device] = work.accuracy[at]
        return opened

    def _jumps(self, work: _Work, at: Ints, device: Ints, time: Ints, seen: Ints) -> tuple[Bools, Bools]:
        """Which positions are jumps that do not count, and which are jumps that do."""
        devices, rules = self._devices, self.rules
        odd, recovered = np.zeros(len(at), np.bool_), np.zeros(len(at), np.bool_)
        if not rules.max_speed_mps:
            return odd, recovered
        lon, lat, accuracy = work.lon[at], work.lat[at], work.accuracy[at]
        last = devices.time[device]
        reach = (time - last) * (rules.max_speed_mps / 1000.0) + accuracy + devices.accuracy[device]
        step = np.abs(lon - devices.lon[device]) + np.abs(lat - devices.lat[device])
        # Most are near enough by a bound that costs nothing.
        far = np.flatnonzero((step * _DEGREE_M > reach) & (last != NONE))
        if len(far):
            who = device[far]
            far = far[metres_apart(devices.lon[who], devices.lat[who], lon[far], lat[far]) > reach[far]]
            odd[far] = True
        settled = device[~odd]
        if devices.odd[settled].any():
            devices.odd[settled] = 0
        if len(far):
            who = device[far]
            reach = (time[far] - seen[far]) * (rules.max_speed_mps / 1000.0) + accuracy[far]
            apart = metres_apart(devices.odd_lon[who], devices.odd_lat[who], lon[far], lat[far])
            agree = np.where((devices.odd[who] > 0) & (apart <= reach), devices.odd[who] + 1, 1)
            back = agree >= rules.recover_after
            devices.odd[who] = np.where(back, 0, agree)
            devices.odd_lon[who], devices.odd_lat[who] = lon[far], lat[far]
            odd[far], recovered[far] = ~back, back
            self.counts.recovered += int(back.sum())
            self.counts.jumped += len(far) - int(back.sum())
        return odd, recovered

    def _judge(
        self, work: _Work, at: Ints, device: Ints, time: Ints, before: Ints, recovered: Bools, clock: _Clock
    ) -> Ints:
        """ENTER, EXIT and DWELL of positions that count; returns the stays that began."""
        devices, stays, rules = self._devices, self._stays, self.rules
        head = devices.head[device]
        count = work.hit[at + 1] - work.hit[at]
        # Nearly all devices stay where they are: in one fence, or in none. They are looked at no further.
        same = count == 0
        same &= head == NONE
        one = np.flatnonzero((count == 1) & (head != NONE))
        stay = head[one]
        kept = (stays.fence[stay] == work.hits[work.hit[at[one]]]) & (stays.next[stay] == NONE)
        one, stay = one[kept], stay[kept]
        ripe = stays.due[stay] <= np.maximum(time[one], before[one] - rules.lateness_ms)
        if ripe.any():
            self._dwell(stay[ripe], work.row[at[one[ripe]]], clock)
        same[one] = True
        if rules.crossings:
            same &= devices.time[device] == NONE
        if same.all():
            return np.empty(0, np.int64)
        rest = np.flatnonzero(~same)
        return self._transitions(work, at[rest], device[rest], time[rest], before[rest], recovered[rest], clock)

    def _transitions(
        self, work: _Work, at: Ints, device: Ints, time: Ints, before: Ints, recovered: Bools, clock: _Clock
    ) -> Ints:
        """The same for devices of which it has to be worked out: pairs of device and fence before and now."""
        devices, stays, rules = self._devices, self._stays, self.rules
        row, accuracy = work.row[at], work.accuracy[at]
        old, owner = stays.of(devices.head[device])
        code = (owner << 32) | stays.fence[old]
        order = np.argsort(code)
        old, owner, code = old[order], owner[order], code[order]
        now = spans(work.hit[at], work.hit[at + 1])
        now_owner, now_fence = np.repeat(np.arange(len(at)), work.hit[at + 1] - work.hit[at]), work.hits[now]
        now_code = (now_owner << 32) | now_fence
        leaves = ~among(code, now_code)
        gone = np.flatnonzero(leaves)
        if len(gone):
            held = self._holds(stays.fence[old[gone]], owner[gone], work.lon[at], work.lat[at], accuracy, time)
            leaves[gone[held]] = False
        ripe = stays.due[old] <= np.maximum(
            np.where(leaves, time[owner] - 1, time[owner]), before[owner] - rules.lateness_ms
        )
        if ripe.any():
            self._dwell(old[ripe], row[owner[ripe]], clock)
        ended = old[leaves]
        if len(ended):
            self._emit(row[owner[leaves]], device[owner[leaves]], stays.fence[ended], EXIT, time[owner[leaves]])
        new = np.flatnonzero(~among(now_code, code))
        begun, begun_owner = now_fence[new], now_owner[new]
        since = time[begun_owner]
        if rules.crossings:
            passed, passed_owner, entered = self._crossed(work, at, device, time, recovered, np.union1d(code, now_code))
            begun, begun_owner = np.concatenate((begun, passed)), np.concatenate((begun_owner, passed_owner))
            since = np.concatenate((since, entered))
        started = stays.take(len(begun))
        if len(begun):
            stays.device[started], stays.fence[started] = device[begun_owner], begun
            stays.since[started], stays.opened[started] = since, row[begun_owner]
            stays.due[started] = self._due(begun, since)
            self._emit(row[begun_owner], device[begun_owner], begun, ENTER, since)
            if rules.crossings:
                ripe = stays.due[started] <= np.maximum(time[begun_owner], before[begun_owner] - rules.lateness_ms)
                if ripe.any():
                    self._dwell(started[ripe], row[begun_owner[ripe]], clock)
        changed = np.zeros(len(at), np.bool_)
        changed[owner[leaves]] = True
        changed[begun_owner] = True
        remain = old[~leaves & changed[owner]]
        stays.chain(devices, device[changed], np.concatenate((remain, started)))
        if len(ended):
            stays.give(ended)
        return started

    def _holds(self, fence: Ints, at: Ints, lon: Floats, lat: Floats, accuracy: Floats, time: Ints) -> Bools:
        """Whether fences that do not cover a fix hold its device all the same: near the border, while in force."""
        held = np.zeros(len(fence), np.bool_)
        reach = np.maximum(self.index.hysteresis_m[fence], accuracy[at])
        near = reach > 0.0
        if self.index.scheduled:
            near &= self.index.in_force(fence, time[at])
        near = np.flatnonzero(near)
        if len(near):
            who = at[near]
            held[near] = self.index.near_border(lon[who], lat[who], fence[near], reach[near])
        return held

    def _crossed(
        self, work: _Work, at: Ints, device: Ints, time: Ints, recovered: Bools, known: Ints
    ) -> tuple[Ints, Ints, Ints]:
        """Fences passed on the way from the last fix; those passed and left are told.

        Args:
            work: The positions.
            at: Which of them.
            device: Their devices.
            time: Their times.
            recovered: Those that came by a jump: nothing is known of their way.
            known: Pairs of position and fence, sorted, that have been judged by their ends.

        Returns:
            Fences entered on the way and not left, which position of `at`, and when they were entered.
        """
        devices, index, row = self._devices, self.index, work.row[at]
        last = devices.time[device]
        lon, lat = work.lon[at], work.lat[at]
        go = (last != NONE) & ~recovered & (time - last <= self.rules.crossing_gap_ms)
        go &= (devices.lon[device] != lon) | (devices.lat[device] != lat)
        goes = np.flatnonzero(go)
        place = np.minimum(np.searchsorted(goes, known >> 32), max(0, len(goes) - 1))
        mine = goes[place] == known >> 32 if len(goes) else np.zeros(len(known), np.bool_)
        leg, fence, enters, leaves = index.legs(
            devices.lon[device[goes]], devices.lat[device[goes]], lon[goes], lat[goes],
            (place[mine] << 32) | (known[mine] & 0xFFFFFFFF),
        )  # fmt: skip
        owner = goes[leg]
        span = (time - last)[owner]
        entered = last[owner] + np.maximum(1, np.ceil(enters * span).astype(np.int64))
        left = last[owner] + np.floor(leaves * span).astype(np.int64)
        real = left > entered
        if index.scheduled:
            real &= index.in_force(fence, entered)
        owner, fence, entered, left = owner[real], fence[real], entered[real], left[real]
        held = self._holds(fence, owner, lon, lat, work.accuracy[at], time)
        out = np.flatnonzero(~held)
        who = owner[out]
        due = self._due(fence[out], entered[out])
        self._emit(row[who], device[who], fence[out], ENTER, entered[out])
        self._emit(row[who], device[who], fence[out], EXIT, left[out])
        stayed = due < left[out]
        self._emit(row[who[stayed]], device[who[stayed]], fence[out[stayed]], DWELL, due[stayed])
        return fence[held], owner[held], entered[held]

    def _due(self, fence: Ints, since: Ints) -> Ints:
        """When DWELL comes of stays."""
        dwell = self.index.dwell_ms[fence]
        due = np.where(dwell > 0, since + dwell, NEVER)
        if self.index.scheduled:
            some = np.flatnonzero(dwell > 0)
            due[some[~self.index.in_force(fence[some], due[some])]] = NEVER
        return due

    def _dwell(self, stay: Ints, row: Ints, clock: _Clock) -> None:
        """Tell DWELL of stays, by the watermark or at a record at the latest."""
        stays = self._stays
        segment = clock.segment(self._devices.partition[stays.device[stay]])
        fired = np.maximum(clock.first(stays.due[stay] + self.rules.lateness_ms, segment), stays.opened[stay])
        self._emit(np.minimum(fired, row), stays.device[stay], stays.fence[stay], DWELL, stays.due[stay])
        stays.due[stay] = FIRED

    def _forget(self, device: Ints, clock: _Clock) -> None:
        """End what devices had open that fell silent, and make them unknown."""
        devices, stays = self._devices, self._stays
        gone = devices.seen[device] + self.rules.silent_ms
        at = clock.first(gone, clock.segment(devices.partition[device]))
        stay, owner = stays.of(devices.head[device])
        ripe = stays.due[stay] < gone[owner]
        if ripe.any():
            self._dwell(stay[ripe], at[owner[ripe]], clock)
        self._emit(at[owner], stays.device[stay], stays.fence[stay], EXIT, gone[owner])
        # Number what is pending before the count begins anew.
        self._settle(self.index.priority)
        stays.give(stay)
        for column in ("head", "seen", "time"):
            getattr(devices, column)[device] = NONE
        devices.odd[device] = devices.stays[device] = 0
        self.counts.forgotten += len(device)

    def _watermark(self, clock: _Clock) -> None:
        """What the watermarks bring by the end of the batch to devices that said nothing."""
        devices, stays = self._devices, self._stays
        highest = int(clock.end.max())
        if self._oldest + self.rules.silent_ms <= highest:
            device = devices.rows()
            segment = clock.segment(devices.partition[device])
            silent = (segment >= 0) & (devices.seen[device] + self.rules.silent_ms <= clock.end[segment])
            if silent.any():
                self._forget(device[silent], clock)
                devices.remove(device[silent])
            self._oldest = int(devices.seen[device[~silent]].min(initial=NEVER))
        stay = np.flatnonzero(stays.due[: stays.end] <= highest - self.rules.lateness_ms)
        if len(stay):
            segment = clock.segment(devices.partition[stays.device[stay]])
            stay = stay[(segment >= 0) & (stays.due[stay] + self.rules.lateness_ms <= clock.end[segment])]
        if len(stay):
            self._dwell(stay, np.full(len(stay), clock.count), clock)

    # Triggers

    def _emit(self, row: Ints, device: Ints, fence: Ints, state: int, time: Ints) -> None:
        if len(row):
            self._pending.append((row, device, fence, np.full(len(row), state), time))

    def _settle(self, priority: Ints) -> None:
        """Bring the pending triggers into their order and number them."""
        if not self._pending:
            return
        row, device, fence, state, time = (np.concatenate(column) for column in zip(*self._pending, strict=True))
        self._pending.clear()
        order = np.lexsort((device, fence, -priority[fence], state, time, row))
        row, device, fence, state, time = (column[order] for column in (row, device, fence, state, time))
        grouped = np.argsort(device, kind="stable")
        who = device[grouped]
        first = np.ones(len(who), np.bool_)
        np.not_equal(who[1:], who[:-1], out=first[1:])
        starts = np.flatnonzero(first)
        sizes = np.diff(np.append(starts, len(who)))
        number = np.arange(len(who)) - np.repeat(starts, sizes) + 1
        sequence = np.empty(len(who), np.int64)
        sequence[grouped] = self._devices.sequence[who] + number
        self._devices.sequence[who[starts]] += sizes
        names = self._devices.names
        self._done.append((row, [names[d] for d in device.tolist()], fence, state, time, sequence))

    def _triggers(
        self, partition: Ints, source: Ints, ids: list[str] | None = None, priority: Ints | None = None
    ) -> Triggers:
        """All that is to be told, with partition and source by row."""
        priority = self.index.priority if priority is None else priority
        self._settle(priority)
        done, self._done = self._done, []
        if not done:
            done = [(np.empty(0, np.int64), list[str](), *(np.empty(0, np.int64) for _ in range(4)))]
        if len(done) == 1:
            row, names, fence, state, time, sequence = done[0]
        else:
            row, fence, state, time, sequence = (
                np.concatenate([piece[place] for piece in done]) for place in (0, 2, 3, 4, 5)
            )
            names = [name for piece in done for name in piece[1]]
            order = np.argsort(row, kind="stable")
            row, fence, state, time, sequence = (column[order] for column in (row, fence, state, time, sequence))
            names = [names[place] for place in order.tolist()]
        return Triggers(
            names, fence, self.index.fence_ids if ids is None else ids, state, time, sequence, priority[fence],
            partition[row], source[row], self.revision,
        )  # fmt: skip

    # Fences

    def adopt(self, fences: FenceSet | FenceIndex, rules: Rules | None = None) -> Triggers:
        """Judge by other fences from here on, and end the stays that these no longer bear out.

        Between a `snapshot(adopting=...)` that is safe and the next `feed`; see `replay`. A stay ends whose fence is
        gone, out of force, or away from the device's last fix; EXIT is stamped with the watermark. A fence that now
        covers a device gives ENTER at its next position only.

        Args:
            fences: The new set, or its index where it was made before (on another thread).
            rules: New rules, or None for the same.

        Returns:
            The EXITs (a DWELL that was due comes before), with the next offset as their source.
        """
        index = _indexed(fences)
        if index.fence_set.revision < self.revision:
            raise ValueError(f"revision: {index.fence_set.revision} is below {self.revision}, the one in force")
        before, after, place = self.index.fence_set.fences, index.fence_set.fences, index.fence_set.place
        used = np.flatnonzero(np.bincount(self._stays.fence[self._stays.open()], minlength=len(before)))
        there = [place.get(before[number].id, NONE) for number in used.tolist()]
        new = np.full(len(before), NONE, np.int64)
        new[used] = there
        same = np.zeros(len(before), np.bool_)
        same[used] = [
            number != NONE and (after[number] is before[old] or after[number].digest == before[old].digest)
            for old, number in zip(used.tolist(), there, strict=True)
        ]
        ids, priority = self.index.fence_ids, self.index.priority
        return self._adopt(index, rules or self.rules, ids, priority, new, same)

    def _adopt(
        self, index: FenceIndex, rules: Rules, ids: list[str], priority: Ints, new: Ints, same: Bools
    ) -> Triggers:
        devices, stays = self._devices, self._stays
        stay = stays.open()
        device, old = stays.device[stay], stays.fence[stay]
        fence = new[old]
        ends = fence == NONE
        look = np.flatnonzero(~ends & ~same[old])
        self.index, self.rules = index, rules
        if len(look):
            who = device[look]
            lon, lat, accuracy, time = (getattr(devices, n)[who] for n in ("lon", "lat", "accuracy", "time"))
            held = index.covers(fence[look], lon, lat)
            if index.scheduled:
                held &= index.in_force(fence[look], time)
            out = np.flatnonzero(~held)
            held[out] = self._holds(fence[look[out]], out, lon, lat, accuracy, time)
            ends[look[~held]] = True
        partitions = sorted(self._offsets)
        number = np.searchsorted(partitions, devices.partition[device]) if partitions else np.zeros_like(device)
        stamp = np.array([self._watermarks.get(p, 0) for p in partitions], np.int64)
        gone = np.flatnonzero(ends)
        if len(gone):
            due = gone[stays.due[stay[gone]] < stamp[number[gone]]]
            self._emit(number[due], device[due], old[due], DWELL, stays.due[stay[due]])
            self._emit(number[gone], device[gone], old[gone], EXIT, stamp[number[gone]])
            changed = np.unique(device[gone])
            remain, _ = stays.of(devices.head[changed])
            stays.device[stay[gone]] = NONE
            stays.chain(devices, changed, remain[stays.device[remain] != NONE])
            stays.give(stay[gone])
        left = stay[~ends]
        stays.fence[left] = fence[~ends]
        again = left[(~same[old])[~ends]]
        again = again[stays.due[again] != FIRED]
        stays.due[again] = self._due(stays.fence[again], stays.since[again])
        sources = np.array([self._offsets[p] for p in partitions], np.int64)
        return self._triggers(np.array(partitions, np.int64), sources, ids, priority)

    # State

    def copy(self) -> Tracker:
        """The same state under the same fences, to be fed apart from this one: 0.1 µs a device and more."""
        made = Tracker(self.index, self.rules)
        made.counts = replace(self.counts)
        made._devices, made._stays = self._devices.copy(), self._stays.copy()
        made._offsets, made._watermarks = dict(self._offsets), dict(self._watermarks)
        made._oldest = self._oldest
        return made

    def erase(self, device: str) -> bool:
        """Forget one device: its place, its stays and its count; nothing is told.

        Snapshots and records from before still know it: take a snapshot after, and drop those before.

        Returns:
            Whether it was known.
        """
        row = self._devices.number.get(device)
        if row is None:
            return False
        rows = np.array([row], np.int64)
        stay, _ = self._stays.of(self._devices.head[rows])
        self._stays.give(stay)
        self._devices.remove(rows)
        return True

    def freeze(self, adopting: int | None = None, rules: Rules | None = None) -> Snapshot:
        """All of it at this moment: state, counts of the devices, offsets, and the fence revision from here on.

        Takes a fraction of what its `to_bytes` does, which another thread may call.

        Args:
            adopting: The revision that `adopt` is about to be called with; this one by default.
            rules: The rules that `adopt` is about to be called with.
        """
        devices, stays = self._devices, self._stays
        row, stay = devices.rows(), stays.open()
        place = np.zeros(devices.end, np.int64)
        place[row] = np.arange(len(row))
        used = np.flatnonzero(np.bincount(stays.fence[stay], minlength=len(self.index.fence_ids)))
        fence = np.zeros(len(self.index.fence_ids), np.int64)
        fence[used] = np.arange(len(used))
        columns = {name: getattr(stays, name)[stay] for name in STAY_COLUMNS}
        columns |= {"device": place[columns["device"]], "fence": fence[columns["fence"]]}
        names = devices.names
        return Snapshot(
            self.revision if adopting is None else adopting,
            (rules or self.rules).members(),
            dict(self._offsets),
            dict(self._watermarks),
            names.copy() if len(row) == len(names) else [names[number] for number in row.tolist()],
            [self.index.fence_ids[number] for number in used.tolist()],
            self.index.priority[used].tolist(),
            {name: getattr(devices, name)[row] for name in DEVICE_COLUMNS},
            columns,
        )

    def snapshot(self, adopting: int | None = None, rules: Rules | None = None) -> bytes:
        """The bytes of `freeze`, whose arguments these are."""
        return self.freeze(adopting, rules).to_bytes()

    @classmethod
    def restore(
        cls, data: bytes, fence_sets: Mapping[int, FenceSet] | Mapping[int, FenceIndex]
    ) -> tuple[Tracker, Triggers]:
        """The tracker of a snapshot.

        Args:
            data: What `snapshot` gave.
            fence_sets: Revision -> fences (or their index); the snapshot's own must be there.

        Returns:
            The tracker, and the triggers of the adoption that the snapshot was written for; they may have been told
            before, under the same keys.

        Raises:
            SnapshotError: No snapshot, an unknown version, or fences that are not at hand.
        """
        stored = Snapshot.from_bytes(data)
        if stored.revision not in fence_sets:
            raise SnapshotError(
                f"revision: the snapshot needs the fences of revision {stored.revision}; at hand are "
                f"{', '.join(map(str, sorted(fence_sets)[-5:])) or 'none'}"
            )
        try:
            rules = Rules(**stored.rules)
        except (TypeError, ValueError) as fault:
            raise SnapshotError(f"rules: {fault}") from None
        index = _indexed(fence_sets[stored.revision])
        tracker = cls(index, rules)
        devices, stays = tracker._devices, tracker._stays
        rows = devices.add(stored.devices)
        for name, column in stored.device_columns.items():
            getattr(devices, name)[rows] = column
        taken = stays.take(len(stored.stay_columns["device"]))
        for name, column in stored.stay_columns.items():
            getattr(stays, name)[taken] = column
        tracker._oldest = int(devices.seen[rows].min(initial=NEVER))
        stays.chain(devices, rows, taken)
        tracker._offsets, tracker._watermarks = dict(stored.offsets), dict(stored.watermarks)
        place = index.fence_set.place
        new = np.array([place.get(fence, NONE) for fence in stored.fences], np.int64)
        triggers = tracker._adopt(
            index, rules, stored.fences, np.array(stored.priorities, np.int64), new, np.zeros(len(new), np.bool_)
        )
        return tracker, triggers


def _indexed(fences: FenceSet | FenceIndex) -> FenceIndex:
    return fences if isinstance(fences, FenceIndex) else FenceIndex(fences)


def _rounds(device: Ints, devices: int) -> Iterator[Ints]:
    """Positions cut so that a round has one of a device, and a device's come in their order."""
    count = len(device)
    if not count:
        return
    everything = np.arange(count)
    last = np.empty(devices, np.int64)
    last[device] = everything
    if (last[device] == everything).all():
        yield everything
        return
    order = np.argsort(device, kind="stable")
    who = device[order]
    starts = np.flatnonzero(np.concatenate(([True], who[1:] != who[:-1])))
    rank = everything - np.repeat(starts, np.diff(np.append(starts, count)))
    by_rank = np.empty(count, np.int64)
    by_rank[order] = rank
    order = np.argsort(by_rank, kind="stable")
    yield from np.split(order, np.cumsum(np.bincount(rank))[:-1])
