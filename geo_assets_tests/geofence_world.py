"""Fences, devices on their ways through them, and what a consumer of `[triggers]` sees of it."""

from __future__ import annotations

import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Sequence

from geo_assets.events import topics
from geo_assets.events.models import FenceEvent
from geo_assets.flow.epochs import epoch_of_mark
from geo_assets.flow.reading import TriggerReader
from geo_assets.geofence.fences import FenceSet
from geo_assets.geofence.rules import Rules
from geo_assets.geofence.triggers import NAMES, Trigger, key
from geo_assets.services.event_records import event_record
from geo_assets.stack import Stack
from geo_assets_tests.geofence.reference import Record as Said
from geo_assets_tests.geofence.reference import Reference
from geo_assets_tests.resources.contract_event_log import read_all
from resources.event_log.protocol import NewRecord

WEST, SOUTH, SIDE = 24.90, 60.15, 0.01
"""Fences lie side by side from here on, as many degrees wide and high."""


def fence(number: int, *, version: int = 1, shift: float = 0.0, **more: object) -> FenceEvent:
    """The fence of a place in the row; `shift` in sides."""
    west = WEST + (number + shift) * SIDE
    ring = [[west, SOUTH], [west + SIDE, SOUTH], [west + SIDE, SOUTH + SIDE], [west, SOUTH + SIDE], [west, SOUTH]]
    shape = {"type": "Polygon", "coordinates": [ring]}
    return FenceEvent.model_validate(
        {"type": "Feature", "id": f"f{number}", "version": version, "geometry": shape, **more}
    )


def post_fences(stack: Stack, events: Sequence[FenceEvent]) -> None:
    """What the edge makes of them."""
    now = time.time_ns() // 1_000_000
    stack.log.append([event_record(e, source="demo", event_id=f"e{now}", received_ms=now) for e in events])


def position(device: str, time_ms: int, lon: float, lat: float) -> NewRecord:
    """The record of a position, received as it happened."""
    value = {"device_id": device, "lon": lon, "lat": lat, "event_time_ms": time_ms}
    return NewRecord(topics.POSITIONS, device, json.dumps(value).encode(), {}, time_ms)


def walk(devices: int, fixes: int, *, seed: int = 1, start_ms: int | None = None, fences: int = 6) -> list[NewRecord]:
    """Devices that go back and forth along the row of fences, a minute between two fixes."""
    chance = random.Random(seed)
    start = time.time_ns() // 1_000_000 - fixes * 60_000 if start_ms is None else start_ms
    speed = [chance.uniform(0.2, 1.2) for _ in range(devices)]
    phase = [chance.uniform(0, 2 * fences) for _ in range(devices)]
    records: list[NewRecord] = []
    for fix in range(fixes):
        for number in range(devices):
            along = (phase[number] + fix * speed[number]) % (2 * fences)
            along = along if along <= fences else 2 * fences - along
            lat = SOUTH + SIDE * (0.5 + 0.6 * math.sin(fix / 7 + number))
            records.append(position(f"d{number}", start + fix * 60_000 + number, WEST + along * SIDE, lat))
    return records


def seen(stack: Stack) -> dict[str, list[Trigger]]:
    """Device -> its triggers in order, as a consumer sees them: void ones passed over, repetitions told once."""
    found: dict[str, list[Trigger]] = defaultdict(list)
    known: set[bytes] = set()
    for trigger in TriggerReader().read((r.partition, r.value or b"") for r in read_all(stack.log, topics.TRIGGERS)):
        if key(trigger) not in known:
            known.add(key(trigger))
            found[trigger.device_id].append(trigger)
    return dict(found)


def what(triggers: dict[str, list[Trigger]]) -> dict[str, list[tuple[str, str, int, int]]]:
    """Of each: fence, state, event time and sequence."""
    return {
        device: [(t.fence_id, NAMES[t.state], t.event_time_ms, t.sequence) for t in some]
        for device, some in triggers.items()
    }


def expected(stack: Stack, fences: FenceSet, rules: Rules) -> dict[str, list[tuple[str, str, int, int]]]:
    """What the slow reference tells of all that is in the log, ticks included."""
    reference = Reference(fences, rules)
    for record in read_all(stack.log, topics.POSITIONS):
        said = json.loads(record.value or b"{}")
        reference.feed(
            Said(record.partition, record.offset, said.get("device_id"), said["event_time_ms"], said.get("lon", 0.0),
                 said.get("lat", 0.0), received=record.timestamp_ms)
        )  # fmt: skip
    found: dict[str, list[tuple[str, str, int, int]]] = defaultdict(list)
    for told in reference.told:
        found[told.device].append((told.fence, told.state, told.time, told.sequence))
    return dict(found)


def consistent(triggers: dict[str, list[Trigger]]) -> None:
    """No consumer is ever contradicted: sequences rise by one, and of each fence ENTER and EXIT alternate."""
    for device, some in triggers.items():
        first = some[0].sequence
        assert [t.sequence for t in some] == list(range(first, first + len(some))), device
        inside: set[str] = set()
        for trigger in some:
            state = NAMES[trigger.state]
            assert (trigger.fence_id in inside) == (state != "ENTER"), (device, trigger)
            if state == "ENTER":
                inside.add(trigger.fence_id)
            elif state == "EXIT":
                inside.remove(trigger.fence_id)


def marks(stack: Stack) -> int:
    """Epochs in `[triggers]`: how often a run took over."""
    values = (epoch_of_mark(r.value or b"") for r in read_all(stack.log, topics.TRIGGERS))
    return len({epoch for epoch in values if epoch is not None})
