"""Reading `[triggers]` as a consumer must: marks and void triggers passed over, repetitions told once.

docs/triggers.md is the same in prose, for consumers in other languages.
"""

from __future__ import annotations

from collections.abc import Iterable

from geo_assets.flow.dedup import DedupWindow
from geo_assets.flow.epochs import Epochs, epoch_of_mark
from geo_assets.geofence.triggers import Trigger, decode, keys


class TriggerReader:
    """Triggers that count, of records in the order of their partitions.

    Where a consumer starts in the middle of a partition it may see void triggers before it has seen a mark, so it keeps
    `epochs.highest` with its offsets.

    Args:
        window: Keys of those told before; None for a consumer that knows repetitions itself (by the device's highest
            `sequence`, for one).
    """

    def __init__(self, window: DedupWindow | None = None) -> None:
        self.epochs = Epochs()
        self._window = window
        self.marks = self.void = self.repeated = 0
        """Records passed over, by why."""

    def read(self, records: Iterable[tuple[int, bytes]], now_ms: int = 0) -> list[Trigger]:
        """The triggers that count among records.

        Args:
            records: Partition and value of each.
            now_ms: For the window's time to live.

        Raises:
            FrameError: A value is neither a mark nor a frame of a known version.
        """
        found: list[Trigger] = []
        for partition, value in records:
            epoch = epoch_of_mark(value)
            if epoch is not None:
                self.epochs.valid(partition, epoch)
                self.marks += 1
                continue
            trigger = decode(value)
            if self.epochs.valid(partition, trigger.epoch):
                found.append(trigger)
            else:
                self.void += 1
        if self._window is None or not found:
            return found
        new = self._window.admit(keys(found), now_ms)
        self.repeated += len(found) - len(new)
        return [found[place] for place in new]
