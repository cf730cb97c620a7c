"""What a batch that cannot be judged costs: the records at fault, and no others.

A fault leaves a tracker half changed. So the batch is judged by copies of one that has not seen it: whole, then in
halves, until a record is alone with the fault. As no outcome depends on where batches are cut, a record is at fault by
what it says and by the state it meets, whatever it was read with.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from geo_assets.geofence.positions import Positions
from geo_assets.geofence.tracker import Tracker
from geo_assets.geofence.triggers import Triggers


class Fault(NamedTuple):
    """A record that cannot be judged: its row in the batch, and why."""

    row: int
    error: Exception


class Sifted(NamedTuple):
    """A batch without the records at fault.

    Args:
        tracker: Which has judged it.
        triggers: What followed, piece by piece.
        faults: What was left out.
    """

    tracker: Tracker
    triggers: list[Triggers]
    faults: list[Fault]


def sift(tracker: Tracker, batch: Positions, meanwhile: Callable[[], None] = lambda: None) -> Sifted:
    """Judge a batch, and pass over the records at fault as if they said nothing.

    Args:
        tracker: As it was before the batch; it stays so.
        batch: Records, partition after partition.
        meanwhile: Called before each try; may raise to end the matter.

    Raises:
        MemoryError: It is no record's fault.
        Exception: A record that says nothing cannot be judged either.
    """
    triggers: list[Triggers] = []
    faults: list[Fault] = []
    waiting = [(0, len(batch))]
    while waiting:
        meanwhile()
        start, stop = waiting.pop()
        tried = tracker.copy()
        try:
            told = tried.feed(batch.rows(np.arange(start, stop)))
        except MemoryError:
            raise
        except Exception as error:
            if stop - start > 1:
                middle = (start + stop) // 2
                waiting += [(middle, stop), (start, middle)]
                continue
            faults.append(Fault(start, error))
            tried = tracker.copy()
            told = tried.feed(batch.silenced([start]).rows(np.arange(start, stop)))
        tracker = tried
        triggers.append(told)
    return Sifted(tracker, triggers, faults)


def named(error: BaseException) -> str:
    """An error by its class and where it was raised; its own words may tell a place."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{where}"
