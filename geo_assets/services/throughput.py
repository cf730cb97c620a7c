"""How fast this map's tiles are built and how much memory that takes: measured by runs, kept in the ledger.

Plans of backfills say minutes by it, and runs start no more workers than memory has room for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from resources.ledger.protocol import Ledger

TILE_WEIGHT = 500
"""What a tile costs before its first vertex, in vertices: half a millisecond."""

SKIPPED_PER_S = 1_900.0
"""Tiles a second that are found up to date: measured on two cores over 5,000 tiles of the sample."""

ASSUMED_PER_S = 250_000.0
"""Weight a second of one run before any was measured: two cores shared by two runs."""

LEAST_TILES = 50
"""A run over fewer tiles says little about speed: its start and its first fetch are most of it."""

NEWEST = 0.3
"""Weight of the newest run in the moving average."""

MEMORY_SHARE = 0.6
"""Share of the free memory that worker processes of all runs may take together."""

SKIPS_KEPT = 40
"""Runs whose skip rate is kept."""

_SKIPS = "build.skips"
_SPEED = "build.speed"
_MEMORY = "build.worker-memory"


@dataclass(frozen=True, slots=True)
class Speed:
    """Weight (vertices and `TILE_WEIGHT` a tile) that one run builds a second.

    Args:
        weight_per_s: The rate.
        measured: Whether runs of this map had it.
    """

    weight_per_s: float
    measured: bool


def speed(ledger: Ledger) -> Speed:
    """The moving average of the runs so far."""
    try:
        rate = float(json.loads(ledger.get_value(_SPEED) or "null"))
    except (TypeError, ValueError):
        return Speed(ASSUMED_PER_S, measured=False)
    return Speed(rate, measured=True) if rate > 0 else Speed(ASSUMED_PER_S, measured=False)


def remember_speed(ledger: Ledger, tiles: int, vertices: int, seconds: float) -> None:
    """Take a run's speed into the average; one over too few encoded tiles changes nothing."""
    if tiles < LEAST_TILES or seconds <= 0:
        return
    newest = (vertices + tiles * TILE_WEIGHT) / seconds
    before = speed(ledger)
    rate = NEWEST * newest + (1 - NEWEST) * before.weight_per_s if before.measured else newest
    ledger.set_value(_SPEED, json.dumps(round(rate, 1)))


def remember_memory(ledger: Ledger, histogram: Mapping[int, int]) -> None:
    """Keep what a worker needs: the 99th percentile of its resident memory, of the newest run or the one before.

    Args:
        ledger: Where it is kept.
        histogram: Samples by the power of two of megabytes above them.
    """
    total = sum(histogram.values())
    if not total:
        return
    seen = 0
    for power, samples in sorted(histogram.items()):
        seen += samples
        if seen >= 0.99 * total:
            # Half of what was known stays for one run: a small batch after a large one must not forget it at once.
            ledger.set_value(_MEMORY, str(max(2**power, worker_megabytes(ledger) // 2)))
            return


class Skips(NamedTuple):
    """What a backfill run skipped.

    Args:
        skipped: Tiles that were up to date.
        targets: Tiles in all.
        recipe: How they are built; runs of two recipes are not compared.
    """

    skipped: int
    targets: int
    recipe: str


def skips(ledger: Ledger) -> list[Skips]:
    """The newest backfill runs, oldest first. One that forced its tiles is not among them."""
    try:
        return [Skips(int(a), int(b), str(c)) for a, b, c in json.loads(ledger.get_value(_SKIPS) or "[]")]
    except (TypeError, ValueError):
        return []


def remember_skips(ledger: Ledger, newest: Skips) -> None:
    """Keep what a backfill run skipped. Two runs may end at once: whoever was slower tries again."""
    for _ in range(10):
        before = ledger.get_value(_SKIPS)
        kept = [*skips(ledger), newest][-SKIPS_KEPT:]
        if ledger.set_value(_SKIPS, json.dumps(kept), expect=before):
            return


def worker_megabytes(ledger: Ledger) -> int:
    """Megabytes that a worker process needs; 0 before any was measured."""
    text = ledger.get_value(_MEMORY) or ""
    return int(text) if text.isdecimal() else 0


def free_megabytes() -> int | None:
    """Memory that is free for new processes, of the machine or of the control group; None where nothing says."""
    found: list[int] = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) // 1_024)
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit.isdecimal():
            found.append((int(limit) - int((group / "memory.current").read_text())) // 1_048_576)
    except (OSError, ValueError, IndexError):
        pass
    return min(found) if found else None


def workers(ledger: Ledger, most: int, runs: int, free: int | None = None, *, own: bool = False) -> int:
    """Worker processes of one run: as many as the settings say, fewer where memory has no room for them.

    Args:
        ledger: What a worker needs.
        most: The setting `build_workers`.
        runs: Runs at the same time.
        free: Free megabytes; None: as the system says.
        own: The free memory is this run's alone and was reserved for its workers, as that of a pod.
    """
    needed = worker_megabytes(ledger)
    free = free_megabytes() if free is None else free
    if not needed or free is None:
        return most
    if own:
        return max(1, min(most, free // needed))
    return max(1, min(most, int(free * MEMORY_SHARE) // (needed * max(runs, 1))))
