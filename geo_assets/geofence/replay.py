"""When a snapshot may be written and new fences adopted, so that a replay tells the same triggers under the same keys.

Three rules, each with a story that goes wrong without it (the tests walk them all):

- A snapshot is written when every trigger up to it is acknowledged. One written before would skip a trigger that a
  crash then loses.
- New fences are adopted at a snapshot, written first, that names them as the ones in force from its offsets on. After a
  start, state, counts, rules and fences come from the snapshot alone.
- After a start, no newer fences are adopted before the highest source found in the tail of `[triggers]` has been read
  again: up to there it is a replay, and what was told then was told by the old fences.

Nothing here reads or writes; who routes brings the sources and stores the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from geo_assets.geofence.fences import FenceSet
from geo_assets.geofence.index import FenceIndex
from geo_assets.geofence.rules import Rules
from geo_assets.geofence.tracker import Tracker
from geo_assets.geofence.triggers import Triggers


def horizon_of(sources: Iterable[tuple[int, int]]) -> dict[int, int]:
    """How far triggers were told.

    Args:
        sources: Source partition and offset of each trigger in the tail of `[triggers]`, void ones included. The tail
            reaches back as far as the snapshot does: all triggers sent after it was written.

    Returns:
        Source partition -> highest source offset.
    """
    horizon: dict[int, int] = {}
    for partition, source in sources:
        horizon[partition] = max(source, horizon.get(partition, 0))
    return horizon


@dataclass(frozen=True, slots=True)
class Replay:
    """How far a replay goes.

    Args:
        horizon: Source partition -> highest source offset found in `[triggers]` at the start; see `horizon_of`.
    """

    horizon: Mapping[int, int] = field(default_factory=dict[int, int])

    def left(self, offsets: Mapping[int, int]) -> dict[int, int]:
        """Offsets still to be read again, by partition; empty when it is no replay any more.

        Args:
            offsets: Partition -> offset of the next record, as `Tracker.offsets`.
        """
        return {
            partition: source - offsets.get(partition, 0)
            for partition, source in self.horizon.items()
            if offsets.get(partition, 0) < source
        }

    def may_snapshot(self, *, in_flight: int) -> bool:
        """Whether a snapshot may be written.

        Args:
            in_flight: Triggers told by the tracker and not yet acknowledged, spooled ones included.
        """
        return in_flight == 0

    def may_adopt(self, offsets: Mapping[int, int], *, in_flight: int) -> bool:
        """Whether new fences (or rules) may be adopted, at a snapshot.

        Args:
            offsets: Partition -> offset of the next record, as `Tracker.offsets`.
            in_flight: Triggers told by the tracker and not yet acknowledged.
        """
        return self.may_snapshot(in_flight=in_flight) and not self.left(offsets)


def adopt(
    tracker: Tracker, fences: FenceSet | FenceIndex, store: Callable[[bytes], None], rules: Rules | None = None
) -> Triggers:
    """Adopt fences in the one right order: the snapshot that names them first.

    Args:
        tracker: A tracker for which `Replay.may_adopt` holds.
        fences: The new set or its index; already where a restart finds it.
        store: Writes the snapshot; returns when it is durable.
        rules: New rules, or None for the same.

    Returns:
        What the change ends, to be sent like any other triggers.
    """
    fence_set = fences.fence_set if isinstance(fences, FenceIndex) else fences
    store(tracker.snapshot(adopting=fence_set.revision, rules=rules))
    return tracker.adopt(fences, rules)
