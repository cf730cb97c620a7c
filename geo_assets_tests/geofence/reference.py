"""A slow tracker to hold the fast one against: one record at a time, dictionaries, plain shapely.

It follows the ten rules in the tracker's docstring and shares no code with it but the fences and the rules' numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import shapely
from shapely.geometry import LineString, Point

from geo_assets.geofence.fences import Fence, FenceSet
from geo_assets.geofence.rules import Rules

RANK = {"EXIT": 0, "ENTER": 1, "DWELL": 2}


class Record(NamedTuple):
    partition: int
    offset: int
    device: str | None
    time: int
    lon: float = 0.0
    lat: float = 0.0
    accuracy: float = math.nan
    received: int = 1 << 60


class Told(NamedTuple):
    device: str
    fence: str
    state: str
    time: int
    sequence: int
    priority: int
    partition: int
    source: int
    revision: int


@dataclass
class Device:
    partition: int
    seen: int
    time: int
    lon: float
    lat: float
    accuracy: float
    sequence: int
    odd: tuple[float, float, int] | None = None
    stays: dict[str, list[Any]] = field(default_factory=dict)  # fence id -> [since, due or None, fence]


class Reference:
    def __init__(self, fences: FenceSet, rules: Rules) -> None:
        self.fences, self.rules = fences, rules
        self.devices: dict[str, Device] = {}
        self.next: dict[int, int] = {}
        self.watermark: dict[int, int] = {}
        self.told: list[Told] = []
        self.counts: dict[str, int] = {}

    def count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def feed(self, record: Record) -> None:
        p = record.partition
        if record.offset < self.next.get(p, 0):
            self.count("repeated")
            return
        self.next[p] = record.offset + 1
        before = self.watermark.setdefault(p, 0)
        right_time = 946_684_800_000 <= record.time < 4_102_444_800_000
        future = record.time > record.received + self.rules.max_future_ms
        if right_time and not future:
            self.watermark[p] = max(before, record.time)
        if record.device is None:
            self.count("ticks")
        else:
            self.count("positions")
            self.count(self.position(record, before, right_time, future))
        self.time_passes(p, record.offset + 1)

    def position(self, r: Record, before: int, right_time: bool, future: bool) -> str:
        rules = self.rules
        accuracy = 0.0 if math.isnan(r.accuracy) else r.accuracy
        if not right_time or not (abs(r.lon) <= 180 and abs(r.lat) <= 90 and accuracy >= 0):
            return "out_of_range"
        if future:
            return "future"
        if r.time <= before - rules.silent_ms:
            return "late"
        if accuracy > rules.max_accuracy_m:
            return "coarse"
        device = self.devices.get(r.device or "")
        first = device is None
        if device is None:
            device = Device(r.partition, r.time, r.time, r.lon, r.lat, accuracy, r.time * 1024)
            self.devices[r.device or ""] = device
        last = (device.lon, device.lat, device.time)
        recovered = False
        if not first:
            if r.time <= device.seen:
                return "late"
            seen, device.seen = device.seen, r.time
            if rules.max_speed_mps:
                speed = rules.max_speed_mps / 1000
                reach = (r.time - device.time) * speed + accuracy + device.accuracy
                if haversine(device.lon, device.lat, r.lon, r.lat) > reach:
                    agree = 1
                    if device.odd is not None:
                        reach = (r.time - seen) * speed + accuracy
                        if haversine(device.odd[0], device.odd[1], r.lon, r.lat) <= reach:
                            agree = device.odd[2] + 1
                    if agree < rules.recover_after:
                        device.odd = (r.lon, r.lat, agree)
                        return "jumped"
                    recovered = True
                    self.count("recovered")
                device.odd = None
        out: list[tuple[int, str, Fence]] = []
        for identifier, stay in list(device.stays.items()):
            fence = stay[2]
            exit_at = None if self.holds(fence, r.lon, r.lat, accuracy, r.time) else r.time
            if stay[1] is not None and (stay[1] <= r.time if exit_at is None else stay[1] < exit_at):
                out.append((stay[1], "DWELL", fence))
                stay[1] = None
            if exit_at is not None:
                out.append((exit_at, "EXIT", fence))
                del device.stays[identifier]
        gone = {fence.id for _, state, fence in out if state == "EXIT"}
        for fence in self.fences.fences:
            if fence.id in device.stays or fence.id in gone:
                continue
            if covers(fence, r.lon, r.lat) and in_force(fence, r.time):
                out.append((r.time, "ENTER", fence))
                device.stays[fence.id] = [r.time, due_of(fence, r.time), fence]
            elif rules.crossings and not first and not recovered and r.time - last[2] <= rules.crossing_gap_ms:
                self.crossing(device, fence, last, r, accuracy, out)
        device.time, device.lon, device.lat, device.accuracy = r.time, r.lon, r.lat, accuracy
        self.tell(r.device or "", device, out, r.partition, r.offset + 1)
        return "accepted"

    def crossing(self, device: Device, fence: Fence, last: Any, r: Record, accuracy: float, out: Any) -> None:
        if (last[0], last[1]) == (r.lon, r.lat):
            return
        fractions = passage(fence, last[0], last[1], r.lon, r.lat)
        if not fractions:
            return
        span = r.time - last[2]
        enter = last[2] + max(1, math.ceil(min(fractions) * span))
        leave = last[2] + math.floor(max(fractions) * span)
        if leave <= enter or not in_force(fence, enter):
            return
        out.append((enter, "ENTER", fence))
        due = due_of(fence, enter)
        if self.holds(fence, r.lon, r.lat, accuracy, r.time):
            if due is not None and due <= r.time:
                out.append((due, "DWELL", fence))
                due = None
            device.stays[fence.id] = [enter, due, fence]
            return
        if due is not None and due < leave:
            out.append((due, "DWELL", fence))
        out.append((leave, "EXIT", fence))

    def time_passes(self, p: int, source: int) -> None:
        now = self.watermark[p]
        for name, device in list(self.devices.items()):
            if device.partition != p:
                continue
            out: list[tuple[int, str, Fence]] = []
            gone = device.seen + self.rules.silent_ms
            if gone <= now:
                for _, due, fence in device.stays.values():
                    if due is not None and due < gone:
                        out.append((due, "DWELL", fence))
                    out.append((gone, "EXIT", fence))
                self.count("forgotten")
                del self.devices[name]
            for stay in device.stays.values() if gone > now else ():
                if stay[1] is not None and stay[1] + self.rules.lateness_ms <= now:
                    out.append((stay[1], "DWELL", stay[2]))
                    stay[1] = None
            self.tell(name, device, out, p, source)

    def adopt(self, fences: FenceSet) -> None:
        self.fences = fences
        here = {fence.id: fence for fence in fences.fences}
        for name, device in self.devices.items():
            out: list[tuple[int, str, Fence]] = []
            now = self.watermark[device.partition]
            for identifier, stay in list(device.stays.items()):
                fence = here.get(identifier)
                if fence is None or not self.holds(fence, device.lon, device.lat, device.accuracy, device.time):
                    if stay[1] is not None and stay[1] < now:
                        out.append((stay[1], "DWELL", stay[2]))
                    out.append((now, "EXIT", stay[2]))
                    del device.stays[identifier]
                elif fence.digest != stay[2].digest:
                    fired = stay[1] is None and due_of(stay[2], stay[0]) is not None
                    device.stays[identifier] = [stay[0], None if fired else due_of(fence, stay[0]), fence]
            self.tell(name, device, out, device.partition, self.next[device.partition])

    def tell(self, name: str, device: Device, out: list[tuple[int, str, Fence]], p: int, source: int) -> None:
        for time, state, fence in sorted(out, key=lambda o: (o[0], RANK[o[1]], -o[2].priority, o[2].id)):
            device.sequence += 1
            self.told.append(
                Told(name, fence.id, state, time, device.sequence, fence.priority, p, source, self.fences.revision)
            )

    def holds(self, fence: Fence, lon: float, lat: float, accuracy: float, time: int) -> bool:
        if not in_force(fence, time):
            return False
        reach = max(fence.hysteresis_m, accuracy)
        return covers(fence, lon, lat) or (reach > 0 and border_m(fence, lon, lat) <= reach)


def covers(fence: Fence, lon: float, lat: float) -> bool:
    sides = {lon, -lon} if abs(lon) == 180 else {lon}
    return any(fence.geometry.covers(Point(side, lat)) for side in sides)


def border_m(fence: Fence, lon: float, lat: float) -> float:
    phi = math.radians(lat)
    a, e2 = 6378137.0, 0.0066943799901413165
    w = math.sqrt(1 - e2 * math.sin(phi) ** 2)
    kx = math.radians(a / w * math.cos(phi))
    ky = math.radians(a * (1 - e2) / w**3)
    found = []
    for turn in (-360, 0, 360):
        local = shapely.transform(fence.geometry, lambda c, turn=turn: (c - (lon + turn, lat)) * (kx, ky))
        found.append(local.distance(Point(0, 0)))
    return min(found)


def haversine(lon: float, lat: float, to_lon: float, to_lat: float) -> float:
    phi, to_phi = math.radians(lat), math.radians(to_lat)
    half = math.sin((to_phi - phi) / 2) ** 2
    half += math.cos(phi) * math.cos(to_phi) * math.sin(math.radians(to_lon - lon) / 2) ** 2
    return 2 * 6371008.8 * math.asin(math.sqrt(min(half, 1.0)))


def passage(fence: Fence, lon: float, lat: float, to_lon: float, to_lat: float) -> list[float]:
    turn = -360 if to_lon - lon > 180 else 360 if to_lon - lon < -180 else 0
    fractions: list[float] = []
    for world in {0, turn}:
        x0, x1 = lon - world, to_lon + turn - world
        for part in shapely.get_parts(fence.geometry):
            shared = LineString([(x0, lat), (x1, to_lat)]).intersection(part)
            if shared.length == 0:
                continue
            dx, dy = x1 - x0, to_lat - lat
            for x, y in shapely.get_coordinates(shared).tolist():
                fractions.append(min(1.0, max(0.0, ((x - x0) * dx + (y - lat) * dy) / (dx * dx + dy * dy))))
    return fractions


def due_of(fence: Fence, since: int) -> int | None:
    due = since + fence.dwell_ms
    return due if fence.dwell_ms and in_force(fence, due) else None


def in_force(fence: Fence, time: int) -> bool:
    if fence.schedule is None:
        return True
    local = datetime.fromtimestamp(time // 60_000 * 60, ZoneInfo(fence.schedule.zone))
    days = ("Mo", "Tu", "We", "Th", "Fr", "Sa", "Su")
    minute = local.hour * 60 + local.minute
    for window in fence.schedule.windows:
        named, hours = window.split(" ")
        start, end = (int(text[:2]) * 60 + int(text[3:]) for text in hours.split("-"))
        listed = set()
        for piece in named.split(","):
            first, _, to = piece.partition("-")
            day = days.index(first)
            listed.add(day)
            while to and days[day] != to:
                day = (day + 1) % 7
                listed.add(day)
        today, yesterday = local.weekday() in listed, (local.weekday() - 1) % 7 in listed
        if end > start:
            if today and start <= minute < end:
                return True
        elif (today and minute >= start) or (yesterday and minute < end):
            return True
    return False
