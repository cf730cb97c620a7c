"""A tick of the sensor over 10,000 hints that wait in the log, on both stacks.

    python -m benchmarks.sensor [--quick] [--json FILE]

It reads the records, raises the marks, registers the partitions and requests the runs. Against it, in the same run: the
naive way, one mark and one partition registered for each hint.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from dagster import DagsterInstance

from benchmarks.both_stacks import opened, place, stacks_here
from benchmarks.report import Report, parser
from geo_assets import catalog
from geo_assets.events import topics
from geo_assets.tiles.tile import Tile
from resources.event_log.protocol import NewRecord
from sensors.tile_updates import tick

NAIVE = 50
TILES = 2_000
"""Distinct tiles that the hints name: an edit's neighbours name the same ones again."""


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    report = Report("sensor", options.quick)
    hints = 2_000 if options.quick else 10_000
    for name in stacks_here(report):
        measure(name, hints, report)
    report.finish(options.json)


def measure(name: str, hints: int, report: Report) -> None:
    """One stack: the tick, and the naive way over a few of the same hints."""
    keys = [Tile(16, 37_000 + i % 50, 18_900 + i // 50).key for i in range(min(TILES, hints))]
    with tempfile.TemporaryDirectory() as folder, place(name, Path(folder) / "home") as where:
        where.dagster()
        with opened(where) as stack, DagsterInstance.get() as instance:
            tick(stack, instance)  # what a daemon that runs has behind it
            stack.log.append([NewRecord(topics.TILES, keys[i % len(keys)], None) for i in range(hints)])
            started = time.perf_counter()
            done = tick(stack, instance)
            seconds = time.perf_counter() - started
            assert done.requests, "the tick requested no run"
            started = time.perf_counter()
            for key in keys[:NAIVE]:
                stack.ledger.mark([key])
                instance.add_dynamic_partitions(catalog.PARTITIONS, [f"naive-{key}"])
            naive = (time.perf_counter() - started) / NAIVE * hints
            report.row(f"{name}: tick over {hints:,} hints", seconds, "s", "one by one", naive / seconds)


if __name__ == "__main__":
    main()
