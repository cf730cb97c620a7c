"""Devices whose crossings are known, fences that move meanwhile, routing processes that are killed: what is told?

Two rows of devices. Those in the south pass fences that never change: their triggers are known before anything runs.
Those in the north pass fences that move, go and come back: what they bring follows from the moments at which a run took
each change up, which a watcher reads off the ledger. Both are held against a consumer's view of `[triggers]`, trigger
by trigger, in order.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geo_assets.events import topics
from geo_assets.events.dead_letter import Refused
from geo_assets.events.models import FenceEvent
from geo_assets.flow.epochs import epoch_of_mark
from geo_assets.flow.reading import TriggerReader
from geo_assets.geofence.fences import FenceSet
from geo_assets.geofence.rules import Rules
from geo_assets.geofence.state import Snapshot
from geo_assets.geofence.triggers import NAMES, Trigger, key
from geo_assets.services import forgetting
from geo_assets.services.fences import VALUE as FENCES
from geo_assets.services.fences import Standing, change_of
from geo_assets.services.geofence_snapshots import VALUE as SNAPSHOT
from geo_assets.services.geofence_snapshots import Stored, in_force
from geo_assets.stack import Stack
from geo_assets_tests.geofence.reference import Record as Said
from geo_assets_tests.geofence.reference import Reference, Told
from geo_assets_tests.geofence_world import post_fences
from geo_assets_tests.resources.contract_event_log import read_all
from geo_assets_tests.services.ledger_history import LedgerHistory
from geo_assets_tests.waiting import patient, until
from resources.event_log.protocol import LogError, NewRecord, Record

WEST, SOUTH, NORTH, SIDE = 24.90, 60.15, 60.25, 0.004
"""A fence is 220 m by 440 m; there is one, and a gap as wide, along each row."""

STEP_MS = 1_000
"""Of event time between two fixes of a device, which goes less than a fence's width meanwhile."""

STANDING, MOVING = 10, 5
"""Fences in the south and in the north."""

LATENESS_MS = 1_000


# Fences


def standing_fences() -> list[FenceEvent]:
    """The south: one after the other, some with a dwell."""
    return [_fence(f"s{n}", 2 * n, SOUTH, dwell_s=(None, 2, 5)[n % 3], priority=n % 10) for n in range(STANDING)]


def moving_fence(number: int, version: int) -> FenceEvent:
    """One of the north: every fourth version deletes it, the others stand elsewhere each."""
    if version % 4 == 3:
        return FenceEvent.model_validate(
            {"type": "Feature", "id": f"m{number}", "version": version, "action": "delete", "geometry": None}
        )
    west = 4 * number + (0.0, 0.7, 1.9, 0.0, 0.4, 2.5, 1.2)[version % 7]
    return _fence(f"m{number}", west, NORTH, version=version, dwell_s=(None, 3)[number % 2])


def _fence(name: str, west: float, south: float, *, version: int = 1, **more: Any) -> FenceEvent:
    x0, x1 = WEST + west * SIDE, WEST + (west + 1) * SIDE
    ring = [[x0, south], [x1, south], [x1, south + SIDE], [x0, south + SIDE], [x0, south]]
    shape = {"type": "Polygon", "coordinates": [ring]}
    said = {"type": "Feature", "id": name, "version": version, "geometry": shape, **more}
    return FenceEvent.model_validate({name: value for name, value in said.items() if value is not None})


# Devices


@dataclass(frozen=True)
class Journey:
    """Where every device is at every fix.

    Args:
        devices: Half of them in the south, half in the north.
        fixes: Of each.
        start_ms: Event time of the first one.
    """

    devices: int
    fixes: int
    start_ms: int
    seed: int = 7

    def records(self) -> list[NewRecord]:
        """All positions, in the order in which they happen; received when they are appended."""
        ways = [self._way(number) for number in range(self.devices)]
        return [
            _position(self.name(number), self.time_ms(number, fix), way[fix], self._latitude(number))
            for fix in range(self.fixes)
            for number, way in enumerate(ways)
        ]

    def name(self, number: int) -> str:
        return f"{'south' if number % 2 == 0 else 'north'}-{number}"

    def time_ms(self, number: int, fix: int) -> int:
        return self.start_ms + fix * STEP_MS + number % STEP_MS

    def known(self) -> dict[str, list[tuple[str, str, int]]]:
        """ENTER and EXIT of the south: fence, state and time, in order, by nothing but where a device is."""
        found: dict[str, list[tuple[str, str, int]]] = {}
        for number in range(0, self.devices, 2):
            inside: int | None = None
            told: list[tuple[str, str, int]] = []
            for fix, lon in enumerate(self._way(number)):
                here = next((n for n in range(STANDING) if _covers(n, lon)), None)
                if here == inside:
                    continue
                if inside is not None:
                    told.append((f"s{inside}", "EXIT", self.time_ms(number, fix)))
                if here is not None:
                    told.append((f"s{here}", "ENTER", self.time_ms(number, fix)))
                inside = here
            found[self.name(number)] = told
        return found

    def _way(self, number: int) -> list[float]:
        chance = random.Random(self.seed * 100_003 + number)
        width = 2 * STANDING
        at, speed = chance.uniform(0, 2 * width), chance.uniform(0.15, 0.85)
        along = [(at + fix * speed) % (2 * width) for fix in range(self.fixes)]
        return [WEST + SIDE * (x if x <= width else 2 * width - x) for x in along]

    def _latitude(self, number: int) -> float:
        return (SOUTH if number % 2 == 0 else NORTH) + SIDE / 2


def _covers(number: int, lon: float) -> bool:
    return WEST + 2 * number * SIDE <= lon <= WEST + (2 * number + 1) * SIDE


def _position(device: str, time_ms: int, lon: float, lat: float) -> NewRecord:
    value = {"device_id": device, "lon": lon, "lat": lat, "event_time_ms": time_ms}
    return NewRecord(topics.POSITIONS, device, json.dumps(value).encode())


class Poster(threading.Thread):
    """Appends positions at a pace, as far as it may, each piece again until the log has acknowledged it."""

    def __init__(self, stack: Stack, records: Sequence[NewRecord], a_second: float, piece: int = 100) -> None:
        super().__init__(daemon=True)
        self._stack, self._records, self._a_second, self._piece = stack, records, a_second, piece
        self.sent = self.again = self.limit = self._burst = 0
        self.stop = threading.Event()
        self.start()

    def allow(self, limit: int) -> None:
        """It may go on so far."""
        self.limit = max(self.limit, min(limit, len(self._records)))

    def burst(self, count: int, seconds: float) -> None:
        """So many more as fast as it can; returns when the log has them."""
        self._burst = min(self.sent + count, len(self._records))
        self.allow(self._burst)
        until(lambda: self.sent >= self._burst, seconds, why="a burst is in the log", every=0.001)

    def run(self) -> None:
        while self.sent < len(self._records) and not self.stop.is_set():
            piece = self._records[self.sent : min(self.sent + self._piece, self.limit)]
            if not piece:
                self.stop.wait(0.01)
                continue
            began = time.monotonic()
            try:
                self._stack.log.append(piece)
            except LogError:
                self.again += 1
                self.stop.wait(0.2)
                continue
            self.sent += len(piece)
            if self.sent >= self._burst:
                self.stop.wait(max(0.0, began + len(piece) / self._a_second - time.monotonic()))


class Mover(threading.Thread):
    """Changes one fence of the north after the other, while it may."""

    def __init__(self, stack: Stack, every_s: float) -> None:
        super().__init__(daemon=True)
        self._stack, self._every_s = stack, every_s
        self.changes = 0
        self.moves = threading.Event()
        self.moves.set()
        self.stop = threading.Event()
        self.start()

    def run(self) -> None:
        while not self.stop.wait(self._every_s):
            if not self.moves.is_set():
                continue
            number, version = self.changes % MOVING, 2 + self.changes // MOVING
            try:
                post_fences(self._stack, [moving_fence(number, version)])
            except LogError:
                continue
            self.changes += 1

    def end(self) -> None:
        self.stop.set()
        self.join(patient(60))


# What was in force from where on


@dataclass(frozen=True)
class Change:
    """Something that a run took up at a snapshot.

    Args:
        offsets: Partition -> offset from which on it holds.
        fences: The set in force from there on; None where a device was forgotten.
        forgotten: The device.
    """

    offsets: dict[int, int]
    fences: FenceSet | None = None
    forgotten: str | None = None


class Watcher(threading.Thread):
    """What was in force from which offsets on, and where devices were forgotten.

    Sets of fences come from the history that the ledger's own database keeps, whole however slow the machine is. Who
    was forgotten stands in a snapshot, which is looked at while it is there.
    """

    EVERY_S = 0.01

    def __init__(self, stack: Stack) -> None:
        super().__init__(daemon=True)
        self._stack = stack
        stack.ledger.get_value(SNAPSHOT)  # Whoever asks first makes the tables.
        self._history = LedgerHistory(stack.settings)
        self._number = (0, 0)
        self._to_forget: set[str] = set()
        self._forgotten: list[tuple[tuple[int, int], Change]] = []
        self.fault: BaseException | None = None
        self.stop = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            while not self.stop.wait(self.EVERY_S):
                self._look()
        except BaseException as fault:
            self.fault = fault

    def _look(self) -> None:
        self._to_forget |= set(forgetting.wishes(self._stack.ledger))
        if not self._to_forget:
            return
        stored = in_force(self._stack.ledger)
        if not stored.name or (stored.epoch, stored.number) == self._number:
            return
        self._number = (stored.epoch, stored.number)
        data = self._stack.tiles.get(stored.name)
        if data is None:
            return  # It went before it was looked at. A device that is forgotten is in none of those that follow.
        for device in self._to_forget - set(Snapshot.from_bytes(data).devices):
            self._forgotten.append((self._number, Change(stored.offsets, forgotten=device)))
            self._to_forget.remove(device)

    def end(self) -> list[Change]:
        """All changes, in the order in which they were taken up."""
        self._look()
        self.stop.set()
        self.join(patient(30))
        assert self.fault is None, self.fault
        sets = sets_folded(self._stack, map(Standing.from_json, self._history.of(FENCES)))
        found = list(self._forgotten)
        revision = -1
        for stored in map(Stored.from_json, self._history.of(SNAPSHOT)):
            if stored.name and stored.revision != revision:
                revision = stored.revision
                found.append(((stored.epoch, stored.number), Change(stored.offsets, fences=sets[stored.fences])))
        return [change for _, change in sorted(found, key=lambda one: one[0])]


def sets_folded(stack: Stack, standings: Iterable[Standing]) -> dict[str, FenceSet]:
    """Every set that ever stood, by the name of its object, made again of what `[fences]` says."""
    partitions = sorted(stack.log.extents(topics.FENCES))
    records = {p: read_from(stack, topics.FENCES, p) for p in partitions}
    found, fences, done = {"": FenceSet()}, FenceSet(), dict.fromkeys(partitions, 0)
    for standing in standings:
        new = [r for p in partitions for r in records[p] if done[p] <= r.offset < standing.offsets.get(p, 0)]
        done |= standing.offsets
        changes = [change_of(record) for record in new]
        fences, _ = fences.apply([change for change in changes if not isinstance(change, Refused)])
        assert standing.name.endswith(hashlib.sha256(fences.to_bytes()).hexdigest()[:16]), standing
        found[standing.name] = fences
    return found


# Routing processes


class Route:
    """`geo-assets route` in a process of its own."""

    def __init__(self, environment: dict[str, str], log: Path, *arguments: str) -> None:
        self._log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "geo_assets.cli", "route", *arguments],
                env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it with -9."""
        if self.alive:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self, seconds: float = 60.0) -> int:
        """End it in order; its exit code."""
        if self.alive:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(patient(seconds))


class Keeper:
    """Keeps one routing process alive: who ends by itself, as for want of a broker, is started again.

    Args:
        environment: Of the processes.
        log: File for what they say; a number is added for each.
    """

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self.environment, self._log = environment, log
        self.running: Route | None = None
        self.started = self.kills = 0
        self.ended: list[int] = []
        self._all: list[Route] = []

    def keep(self) -> Route:
        if self.running is None or not self.running.alive:
            if self.running is not None and self.running.process.returncode >= 0:
                self.ended.append(self.running.process.returncode)
            self.running = self.another()
        return self.running

    def another(self) -> Route:
        """One more process, which stands by."""
        self.started += 1
        self._all.append(Route(self.environment, self._log.with_suffix(f".{self.started}.log")))
        return self._all[-1]

    def ripe(self) -> None:
        """Wait until the running one may be killed: these may be at any time."""

    def kill(self, following: Route | None = None) -> None:
        """Kill the running one; another takes its place."""
        self.keep().kill()
        self.kills += 1
        self.running = following
        self.keep()

    def end(self) -> None:
        """Have the running one end in order."""
        assert self.keep().end() == 0, self.keep().said[-3_000:]

    def close(self) -> None:
        """Kill whatever is left."""
        for one in self._all:
            one.kill()


# What is told


@dataclass(frozen=True)
class Found:
    """`[triggers]` as a consumer sees it: void ones passed over, repetitions by key told once."""

    by_device: dict[str, list[Trigger]]
    valid: int
    void: int
    repeated: int
    epochs: int


def found_in(stack: Stack) -> Found:
    """All of `[triggers]`; what has the same key must say the same."""
    reader, by_key = TriggerReader(), dict[bytes, Trigger]()
    by_device: dict[str, list[Trigger]] = defaultdict(list)
    records = read_all(stack.log, topics.TRIGGERS)
    valid = reader.read((r.partition, r.value or b"") for r in records)
    for trigger in valid:
        before = by_key.setdefault(key(trigger), trigger)
        if before is trigger:
            by_device[trigger.device_id].append(trigger)
        assert told_of(before) == told_of(trigger)
    epochs = {epoch for r in records if (epoch := epoch_of_mark(r.value or b"")) is not None}
    return Found(dict(by_device), len(valid), reader.void, len(valid) - len(by_key), len(epochs))


def told_of(trigger: Trigger) -> Told:
    """All that a repetition has in common with what it repeats."""
    return Told(
        trigger.device_id, trigger.fence_id, NAMES[trigger.state], trigger.event_time_ms, trigger.sequence,
        trigger.priority, trigger.source_partition, trigger.source_offset, trigger.fence_revision,
    )  # fmt: skip


def expected_of(stack: Stack, changes: Sequence[Change]) -> dict[str, list[Told]]:
    """What the slow reference tells of all that is in `[positions]`, ticks included, with fences as they changed."""
    first = changes[0].fences
    assert first is not None
    assert not any(changes[0].offsets.values()), "the first snapshot was not seen"
    found: dict[str, list[Told]] = defaultdict(list)
    for partition in stack.log.extents(topics.POSITIONS):
        # A device's records are in one partition, and no other's watermark concerns it.
        reference, records, at = Reference(first, Rules(lateness_ms=LATENESS_MS)), stack_records(stack, partition), 0
        for change in (*changes[1:], Change({partition: 1 << 60})):
            while at < len(records) and records[at].offset < change.offsets.get(partition, 0):
                reference.feed(records[at])
                at += 1
            if change.fences is not None:
                reference.next.setdefault(partition, 0)
                reference.adopt(change.fences)
            if change.forgotten is not None:
                reference.devices.pop(change.forgotten, None)
        for told in reference.told:
            found[told.device].append(told)
    return dict(found)


def stack_records(stack: Stack, partition: int) -> list[Said]:
    """A partition of `[positions]`."""
    found: list[Said] = []
    for record in read_from(stack, topics.POSITIONS, partition):
        said = json.loads(record.value or b"{}")
        found.append(
            Said(partition, record.offset, said.get("device_id"), said["event_time_ms"], said.get("lon", 0.0),
                 said.get("lat", 0.0), received=record.timestamp_ms)
        )  # fmt: skip
    return found


def read_from(stack: Stack, topic: str, partition: int) -> list[Record]:
    """All records of a partition."""
    found: list[Record] = []
    offset = stack.log.extents(topic)[partition].begin
    while records := stack.log.read(topic, partition, offset):
        found += records
        offset = records[-1].offset + 1
    return found


def told(stack: Stack) -> int:
    """Records of `[triggers]`."""
    return sum(extent.end for extent in stack.log.extents(topics.TRIGGERS).values())


def crossings_of(triggers: Sequence[Trigger]) -> list[tuple[str, str, int]]:
    """ENTER and EXIT as `Journey.known` has them."""
    return [
        (_short(t.fence_id), NAMES[t.state], t.event_time_ms) for t in triggers if NAMES[t.state] in ("ENTER", "EXIT")
    ]


def _short(fence_id: str) -> str:
    """The name of a fence in its id, whatever else stands there."""
    found = re.search(r"[ms]\d+", fence_id)
    assert found is not None, fence_id
    return found[0]


def _first_difference(heard: Sequence[Trigger], right: Sequence[Told], changes: Sequence[Change]) -> str:
    """Where a device's triggers part from what the reference tells, and what was in force when."""
    at = next((n for n, (t, r) in enumerate(zip(heard, right, strict=False)) if told_of(t) != r), None)
    at = min(len(heard), len(right)) if at is None else at
    lines = [f"{len(heard)} triggers heard, {len(right)} expected; they part at number {at}"]
    lines += [f"heard {told_of(t)} of epoch {t.epoch}" for t in heard[max(0, at - 1) : at + 3]]
    lines += [f"right {told}" for told in right[max(0, at - 1) : at + 3]]
    lines += [f"revision {c.fences.revision} from {c.offsets}" for c in changes if c.fences is not None]
    return "\n".join(lines)


def judge(stack: Stack, journey: Journey, changes: Sequence[Change], *, forgotten: Sequence[str] = ()) -> Found:
    """Hold what a consumer sees against what is known and what the reference tells: the same, once each, in order."""
    found = found_in(stack)
    positions = {(s.device, s.time) for p in stack.log.extents(topics.POSITIONS) for s in stack_records(stack, p)}
    lost = journey.devices * journey.fixes - sum(device is not None for device, _ in positions)
    assert lost == 0, f"{lost} positions never got into the log"
    for device, known in journey.known().items():
        if device not in forgotten:
            assert crossings_of(found.by_device.get(device, [])) == known, device
    expected = expected_of(stack, changes)
    for device in sorted(expected.keys() | found.by_device.keys()):
        heard, right = found.by_device.get(device, []), expected.get(device, [])
        assert [told_of(t) for t in heard] == right, _first_difference(heard, right, changes)
    for device, triggers in found.by_device.items():
        sequences = [t.sequence for t in triggers]
        if device not in forgotten:
            assert sequences == list(range(sequences[0], sequences[0] + len(sequences))), device
        else:
            assert sequences == sorted(set(sequences)), device
    return found
