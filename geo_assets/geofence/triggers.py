"""Triggers as columns: what the tracker tells of a batch. One trigger, its frame and its key are in `frames`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from geo_assets.geofence.frames import (
    DWELL,
    ENTER,
    EXIT,
    NAMES,
    VERSION,
    FrameError,
    State,
    Trigger,
    decode,
    encode,
    encode_many,
    key,
    keys,
    to_json,
)

__all__ = [
    "DWELL", "ENTER", "EXIT", "NAMES", "VERSION", "FrameError", "State", "Trigger", "Triggers", "decode", "encode",
    "encode_many", "key", "keys", "to_json",
]  # fmt: skip

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Triggers:
    """Triggers as columns, in the order in which they go out.

    Args:
        device: (n) device ids.
        fence: (n) position of the fence in `fence_ids`.
        fence_ids: Ids of the fences of the set.
        state: (n) `State` numbers.
        event_time_ms: (n) when each happened.
        sequence: (n) the device's number of it.
        priority: (n) the fence's.
        partition: (n) partition of `[positions]`.
        source: (n) offset up to which that partition was read when it came out.
        fence_revision: Of the set by which all of them were judged.
    """

    device: Sequence[str]
    fence: Ints
    fence_ids: list[str]
    state: Ints
    event_time_ms: Ints
    sequence: Ints
    priority: Ints
    partition: Ints
    source: Ints
    fence_revision: int

    def __len__(self) -> int:
        return len(self.device)

    def part(self, start: int, stop: int) -> Triggers:
        """Some of them, from one place to before another."""
        return Triggers(
            self.device[start:stop], self.fence[start:stop], self.fence_ids, self.state[start:stop],
            self.event_time_ms[start:stop], self.sequence[start:stop], self.priority[start:stop],
            self.partition[start:stop], self.source[start:stop], self.fence_revision,
        )  # fmt: skip

    def rows(self, *, epoch: int = 0, emitted_ns: int = 0) -> list[Trigger]:
        """One `Trigger` each.

        Args:
            epoch: Of the routing run.
            emitted_ns: When they were made, nanoseconds since the epoch.
        """
        ids, revision, make = self.fence_ids, self.fence_revision, Trigger
        return [
            make(device, ids[fence], state, time, sequence, priority, partition, source, revision, epoch, emitted_ns)
            for device, fence, state, time, sequence, priority, partition, source in zip(
                self.device, self.fence.tolist(), self.state.tolist(), self.event_time_ms.tolist(),
                self.sequence.tolist(), self.priority.tolist(), self.partition.tolist(), self.source.tolist(),
                strict=True,
            )
        ]  # fmt: skip
