"""Whether the fast lane makes progress, so that the sensor may leave young marks to it. Pure, but for one named value.

A worker that only beats is no reason to wait: what counts is that something came of what it had in hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resources.ledger.protocol import Ledger

VALUE = "lane"
"""The ledger's named value with the beats of all workers."""

BEAT_S = 1.0
"""Between two beats: a transaction of a millisecond."""

SILENT_MS = 4_000
"""Without a beat for so long a worker is gone: four were missed."""

STUCK_MS = 5_000
"""With work in hand and none of it done for so long it is stuck. One tile of a giant takes seconds, in a process of its
own, and others are built beside it."""

FORGOTTEN_MS = 60_000
"""After so long a silent worker's beat is struck out."""

GRACE_MS = 30_000
"""How young a live mark is left to a healthy lane. Runs beside one that has much to do would take its processors, and
cost seconds before the first tile; one tile that it never comes to waits no longer than this."""

TRIES = 5
"""Writes of a beat against those of other workers; another one follows in a second."""


@dataclass(frozen=True, slots=True)
class Beat:
    """What a worker says of itself.

    Args:
        at_ms: When, milliseconds since the epoch, UTC.
        progress_ms: When it last finished a tile, or had none to build.
        waiting: Tiles in its hands.
        built: Tiles finished since it started.
    """

    at_ms: int
    progress_ms: int
    waiting: int = 0
    built: int = 0

    def healthy(self, now_ms: int) -> bool:
        """Whether it is there and gets on with its work."""
        return now_ms - self.at_ms < SILENT_MS and (not self.waiting or now_ms - self.progress_ms < STUCK_MS)


def read_beats(text: str | None) -> dict[str, Beat]:
    """The named value as worker -> beat; what cannot be read counts as nobody's."""
    try:
        said = json.loads(text or "{}")
        return {str(name): Beat(**{k: int(v) for k, v in one.items()}) for name, one in said.items()}
    except (AttributeError, TypeError, ValueError):
        return {}


def write_beats(beats: Mapping[str, Beat]) -> str:
    """The named value."""
    return json.dumps({name: asdict(beat) for name, beat in sorted(beats.items())}, separators=(",", ":"))


def grace_ms(beats: Iterable[Beat], now_ms: int) -> int:
    """How young a live mark the sensor leaves alone: none where a worker that is there is stuck, or none is there.

    A stuck one holds partitions that the others do not read.
    """
    there = [beat for beat in beats if now_ms - beat.at_ms < SILENT_MS]
    return GRACE_MS if there and all(beat.healthy(now_ms) for beat in there) else 0


def beat(ledger: Ledger, worker: str, said: Beat | None) -> bool:
    """Write a worker's beat beside the others'; None strikes it out. Whether it is written.

    Raises:
        LedgerUnavailable: Not now.
    """
    for _ in range(TRIES):
        before = ledger.get_value(VALUE)
        beats = read_beats(before)
        now = max((one.at_ms for one in (*beats.values(), *([said] if said else []))), default=0)
        beats = {name: one for name, one in beats.items() if now - one.at_ms < FORGOTTEN_MS}
        beats.pop(worker, None)
        if said is not None:
            beats[worker] = said
        if ledger.set_value(VALUE, write_beats(beats) if beats else None, expect=before):
            return True
    return False
