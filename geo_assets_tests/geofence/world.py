"""Records, fences and stories for the tests of geofences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import shapely

from geo_assets.geofence.fences import Fence, FenceSet
from geo_assets.geofence.positions import Positions
from geo_assets.geofence.triggers import NAMES, Triggers
from geo_assets_tests.geofence.reference import Record, Told

NOON = 1_777_636_800_000
"""2026-05-01T12:00:00Z, a Friday."""


def columns(records: Sequence[Record]) -> Positions:
    return Positions(
        [r.device for r in records],
        np.array([r.lon for r in records], np.float64),
        np.array([r.lat for r in records], np.float64),
        np.array([r.accuracy for r in records], np.float64),
        np.array([r.time for r in records], np.int64),
        np.array([r.received for r in records], np.int64),
        np.array([r.partition for r in records], np.int64),
        np.array([r.offset for r in records], np.int64),
    )


def told(triggers: Triggers) -> list[Told]:
    return [
        Told(t.device_id, t.fence_id, NAMES[t.state], t.event_time_ms, t.sequence, t.priority, t.source_partition,
             t.source_offset, t.fence_revision)
        for t in triggers.rows()
    ]  # fmt: skip


def box(identifier: str, west: float, south: float, east: float, north: float, revision: int = 1, **more: Any) -> Fence:
    return Fence(identifier, revision, shapely.box(west, south, east, north), **more)


def fences(*all_of_them: Fence, revision: int = 1) -> FenceSet:
    return FenceSet(revision, tuple(all_of_them))


class Walk:
    """Records one after the other at offsets of their own."""

    def __init__(self, partition: int = 0) -> None:
        self.partition, self.offset = partition, 0

    def at(self, device: str | None, seconds: float, lon: float = 0.0, lat: float = 0.0, **more: Any) -> Record:
        record = Record(self.partition, self.offset, device, NOON + round(seconds * 1000), lon, lat, **more)
        self.offset += 1
        return record

    def tick(self, seconds: float) -> Record:
        return self.at(None, seconds)
