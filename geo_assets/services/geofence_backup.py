"""What a backup holds of geofences, and what makes routing right again after a restore.

Fences and the snapshot of the tracker are objects of the tile store that two values of the ledger name. They change
every few seconds while a run routes, so that values and objects are read together, and put back together.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from geo_assets.events import topics
from geo_assets.flow.epochs import epoch_of_mark
from geo_assets.geofence.fences import FenceSet
from geo_assets.geofence.triggers import FrameError, decode
from geo_assets.services import fences, geofence_snapshots
from geo_assets.services.fences import Standing
from geo_assets.services.geofence_snapshots import Stored
from geo_assets.services.trigger_tail import EPOCH, current_epoch
from resources.event_log.protocol import OffsetOutOfRange

if TYPE_CHECKING:
    from geo_assets.stack import Stack

log = structlog.get_logger()

VALUES = (fences.VALUE, geofence_snapshots.VALUE)
EPOCHS_AHEAD = 1_000_000
"""How far a restored epoch is set ahead: runs that a century of restarts does not reach, and room in an int64."""

_TAIL = 2_000
"""Newest records of a partition of `[triggers]` looked at for their epoch."""
_TRIES = 20
_PAUSE_S = 0.5


class GeofenceStateMoves(RuntimeError):
    """Objects that the ledger named were gone each time that they were read."""


@dataclass(frozen=True, slots=True)
class GeofenceState:
    """What a backup holds.

    Args:
        values: Name -> value of the ledger, as they were when the objects were read.
        objects: Names of the objects, members of the archive under the same names.
    """

    values: Mapping[str, str]
    objects: tuple[str, ...]


def copy_state(stack: Stack, folder: Path) -> GeofenceState:
    """Copy what the ledger names of geofences into a folder, while runs go on.

    Raises:
        GeofenceStateMoves: Objects were replaced faster than they could be read.
        LedgerUnavailable, TileStoreError: Not now.
    """
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_PAUSE_S)
        values = {name: value for name in VALUES if (value := stack.ledger.get_value(name)) is not None}
        standing = Standing.from_json(values.get(fences.VALUE))
        stored = Stored.from_json(values.get(geofence_snapshots.VALUE))
        names = tuple(sorted({standing.name, stored.name, stored.fences} - {""}))
        # A run replaces its snapshot every few seconds, and deletes the one before.
        if all(_copied(stack, name, folder) for name in names):
            return GeofenceState(values, names)
    raise GeofenceStateMoves("fences or snapshot of the routing run were gone each time that they were read")


def _copied(stack: Stack, name: str, folder: Path) -> bool:
    data = stack.tiles.get(name)
    if data is None:
        return False
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return True


def put_back(stack: Stack, state: GeofenceState, folder: Path) -> None:
    """Put objects and values of a backup back: the objects first, as the values name them."""
    for name in state.objects:
        stack.tiles.put(name, (folder / name).read_bytes())
    for name in VALUES:
        stack.ledger.set_value(name, state.values.get(name))


def make_right(stack: Stack) -> bool:
    """After the ledger was put back: an epoch above any that was, and nothing named that is not there.

    Bears being done again.

    Returns:
        Whether routing goes on from a snapshot; else it begins anew, or had not begun.
    """
    ahead = max(current_epoch(stack.ledger), _highest_epoch(stack))
    if ahead:
        stack.ledger.set_value(EPOCH, str(ahead + EPOCHS_AHEAD))
    standing = Standing.from_json(stack.ledger.get_value(fences.VALUE))
    if standing.name and not stack.tiles.exists(standing.name):
        stack.ledger.set_value(fences.VALUE, _newest(stack, standing).to_json())
    stored = Stored.from_json(stack.ledger.get_value(geofence_snapshots.VALUE))
    there = all(stack.tiles.exists(name) for name in (stored.name, stored.fences) if name)
    if stored.name and not there:
        log.error("the snapshot that the ledger names is gone: routing begins anew", name=stored.name)
        stack.ledger.set_value(geofence_snapshots.VALUE, None)
    return bool(stored.name) and there


def _newest(stack: Stack, standing: Standing) -> Standing:
    """The newest set of fences that is there; what came before it in `[fences]` is read again and is stale."""
    found = {
        int(number): stored.name
        for stored in stack.tiles.list(fences.FOLDER)
        if (number := stored.name.removeprefix(fences.FOLDER).partition("-")[0]).isdecimal()
    }
    if not found:
        log.error("no set of fences is left: those that [fences] still has are read again", name=standing.name)
        return Standing()
    name = found[max(found)]
    data = stack.tiles.get(name)
    assert data is not None, name
    made = FenceSet.from_bytes(data)
    log.warning("the set of fences that the ledger names is gone: the newest there is takes its place", name=name)
    return replace(standing, revision=made.revision, name=name, offsets={}, fences=len(made))


def _highest_epoch(stack: Stack) -> int:
    """The highest epoch among the newest triggers: that of the run that wrote last, or of one a few before it."""
    highest = 0
    for partition, extent in stack.log.extents(topics.TRIGGERS).items():
        start = max(extent.begin, extent.end - _TAIL)
        if start >= extent.end:
            continue
        try:
            records = stack.log.read(topics.TRIGGERS, partition, start, _TAIL)
        except OffsetOutOfRange:
            continue
        for record in records:
            value = record.value or b""
            epoch = epoch_of_mark(value)
            if epoch is None:
                try:
                    epoch = decode(value).epoch
                except FrameError:
                    continue
            highest = max(highest, epoch)
    return highest
