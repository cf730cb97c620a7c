"""Edits without end through real ingest and real workers of the fast lane while retention runs; memory and disk are
sampled meanwhile.

Dagster is not here: what its catalog is owed is paid in its name, and `endurance` drives its storages.
By hand: python -m geo_assets_tests.lane_endurance 500000 2
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from geo_assets.events import topics
from geo_assets.services.dead_letters import now_ms
from geo_assets.services.housekeeping import enforce_retention, sweep
from geo_assets.services.lane import health
from geo_assets.settings import Settings
from geo_assets.stack import Stack
from geo_assets.tiles.decode import decode
from geo_assets_tests.stacks import settings_from
from geo_assets_tests.waiting import patient, until
from geo_assets_tests.world import HERE, World, feature, settings_for
from resources.event_log.protocol import NewRecord

LAYERS = "max_zoom: 14\nlayers: [{name: buildings, min_zoom: 13, min_pixels: 0}]\n"

BUILDINGS = 400
"""Edited again and again, over some thirty tiles: what is current of them is what stays."""

RETENTION_S = 60
"""The shortest that can be set."""

MUCH_LATER_MS = 10 * RETENTION_S * 1000
"""From then on nothing of what is there now is kept any more but what is current; of dead letters neither."""

AHEAD = 2_000
"""Records that wait for ingest before no more are sent: an edit never waits as long as retention."""

MEMORY_SHARE, MEMORY_MB = 0.05, 10.0
DISK_SHARE, DISK_MB = 0.10, 20.0
"""By how much either may differ from the beginning to the end of the second half: allocators' pages; logs of databases,
and where between two passes of retention a sample was taken."""


@dataclass(slots=True)
class Sample:
    """One look."""

    at_s: float
    disk_mb: float
    memory_mb: Mapping[str, float]
    """MB of PSS, by process; the worker processes of one are taken together."""


@dataclass(slots=True)
class Endured:
    """What was measured."""

    edits: int = 0
    seconds: float = 0.0
    passes: int = 0
    removed: Counter[str] = field(default_factory=Counter[str])
    samples: list[Sample] = field(default_factory=list[Sample])
    left: dict[str, int] = field(default_factory=dict[str, int])
    """What a last pass, after everything was past its time, left behind."""

    def series(self) -> dict[str, list[float]]:
        """Disk and each process's memory in MB, over the second half of the time."""
        half = self.samples[len(self.samples) // 2 :]
        names = sorted({name for sample in half for name in sample.memory_mb})
        found = {f"memory of {name}": [sample.memory_mb.get(name, 0.0) for sample in half] for name in names}
        return {"disk": [sample.disk_mb for sample in half], **found}

    def grown(self) -> dict[str, tuple[float, float]]:
        """MB by which each grew over the second half (a line fitted to it), and the MB that are allowed."""
        times = [sample.at_s for sample in self.samples[len(self.samples) // 2 :]]
        found: dict[str, tuple[float, float]] = {}
        for name, values in self.series().items():
            share, least = (DISK_SHARE, DISK_MB) if name == "disk" else (MEMORY_SHARE, MEMORY_MB)
            found[name] = growth(times, values), max(least, share * float(np.mean(values)))
        return found

    def told(self) -> str:
        return json.dumps(
            {
                "edits": self.edits,
                "seconds": round(self.seconds, 1),
                "edits_per_second": round(self.edits / self.seconds, 1),
                "passes": self.passes,
                "removed": dict(self.removed),
                "left": self.left,
                "samples": len(self.samples),
                "most_mb": {name: round(max(values), 1) for name, values in self.series().items()},
                "grown_mb_in_the_second_half": {
                    name: [round(grew, 2), round(may, 1)] for name, (grew, may) in self.grown().items()
                },
            }
        )


def growth(times: Sequence[float], values: Sequence[float]) -> float:
    """By how much a straight line fitted to the values rises from the first to the last of the times."""
    if len(times) < 2:
        return 0.0
    slope, _ = np.polyfit(times, values, 1)
    return float(slope) * (times[-1] - times[0])


def endure(
    home: Path,
    *,
    edits: int,
    workers: int,
    every_s: float | None = None,
    every_edits: int | None = None,
    at_most_s: float | None = None,
    at_most_per_s: float = math.inf,
) -> Endured:
    """Send edits as fast as they are worked off, or slower, enforce retention meanwhile, and look at all tiles at last.

    Args:
        home: A folder that does not exist yet.
        edits: How many.
        workers: Of the fast lane.
        every_s: Between two passes of retention, beside everything else.
        every_edits: Instead of that: after so many edits, when they are worked off, as if all were past its time.
        at_most_s: Seconds after which no more are sent.
        at_most_per_s: Edits a second. What is kept for a time is as much as comes in that time, from its end on.
    """
    home.mkdir()
    (home / "layers.yaml").write_text(LAYERS)
    settings_for(home)
    environment = {
        "GEO_ASSETS_HOME": str(home),
        "GEO_ASSETS_INGEST_PORT": "0",
        "GEO_ASSETS_LIVE_PORT": "0",
        "GEO_ASSETS_RETENTION_S": str(RETENTION_S),
        "GEO_ASSETS_GARBAGE_GRACE_S": str(RETENTION_S),
        "GEO_ASSETS_LOG_LEVEL": "warning",
    }
    settings = settings_from(environment)
    result = Endured()
    with Stack(settings) as stack, _processes(environment, workers) as processes:
        stack.ensure()
        until(lambda: _heard(settings, workers), 300, why="ingest and the lane are up", every=0.2)
        stop = threading.Event()
        beside = [threading.Thread(target=_sample, args=(home, processes, stop, result))]
        if every_s is not None:
            beside.append(threading.Thread(target=_keep, args=(settings, every_s, stop, result)))
        began = time.monotonic()
        for thread in beside:
            thread.start()
        try:
            last = _send(stack, edits, every_edits, at_most_s, at_most_per_s, result)
            until(lambda: not _behind(stack), 600, why="everything was worked off", every=0.5)
        finally:
            result.seconds = time.monotonic() - began
            stop.set()
            for thread in beside:
                thread.join()
        for name, process in processes.items():
            assert process.poll() is None, f"{name} ended"
    _verify(home, environment, last, result)
    return result


@contextlib.contextmanager
def _processes(environment: Mapping[str, str], workers: int) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Ingest and the workers, as `geo-assets ingest` and `geo-assets live` start them."""
    names = {"ingest": "ingest"} | {f"lane {number}": "live" for number in range(1, workers + 1)}
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, command in names.items():
            started[name] = subprocess.Popen(
                [sys.executable, "-m", "geo_assets.cli", command],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
            )
        yield started
    finally:
        for process in started.values():
            process.send_signal(signal.SIGTERM)
        for process in started.values():
            try:
                process.wait(patient(60))
            except subprocess.TimeoutExpired:
                process.kill()


def _heard(settings: Settings, workers: int) -> bool:
    """Whether every worker has said in the ledger that it is there."""
    with Stack(settings) as stack:
        return len(health.read_beats(stack.ledger.get_value(health.VALUE))) >= workers


def _send(
    stack: Stack,
    edits: int,
    every_edits: int | None,
    at_most_s: float | None,
    at_most_per_s: float,
    result: Endured,
) -> dict[int, int]:
    """Append edits to `[raw]`; the last version of each building."""
    chance = random.Random(11)
    last: dict[int, int] = {}
    began = time.monotonic()
    while result.edits < edits and (at_most_s is None or time.monotonic() - began < at_most_s):
        if _unread(stack) > AHEAD or result.edits > at_most_per_s * (time.monotonic() - began):
            time.sleep(0.05)
            continue
        records: list[NewRecord] = []
        for _ in range(min(250, edits - result.edits)):
            which = chance.randrange(BUILDINGS)
            last[which] = last.get(which, 0) + 1
            at = (
                HERE[0] + 0.004 * (which % 20) + 0.0005 * chance.random(),
                HERE[1] + 0.002 * (which // 20) + 0.0002 * chance.random(),
            )
            event_id = f"{which}-{last[which]}"
            headers = {topics.HEADER_SOURCE: "city", topics.HEADER_KIND: "features", topics.HEADER_EVENT_ID: event_id}
            body = json.dumps(feature(which, last[which], at=at)).encode()
            # By the building: versions of one come in their order, as they do from a sender.
            records.append(NewRecord(topics.RAW, f"city:{which}", body, headers))
        stack.log.append(records)
        result.edits += len(records)
        if every_edits is not None and result.edits % every_edits < len(records):
            until(lambda: not _behind(stack), 600, why="everything was worked off", every=0.2)
            _pass(stack, result, at_ms=now_ms() + MUCH_LATER_MS)
    return last


def _unread(stack: Stack) -> int:
    done = stack.log.committed(topics.INGEST_GROUP, topics.RAW)
    return sum(
        max(0, extent.end - max(done.get(partition, 0), extent.begin))
        for partition, extent in stack.log.extents(topics.RAW).items()
    )


def _behind(stack: Stack) -> int:
    """Records, hints, tiles and announcements that nobody has worked off."""
    behind = _unread(stack) + stack.features.counts().outbox
    for topic in topics.TILE_HINTS:
        positions = stack.ledger.positions(stack.log.topic_id(topic))
        behind += sum(
            max(0, extent.end - max(positions.get(partition, 0), extent.begin))
            for partition, extent in stack.log.extents(topic).items()
        )
    return behind + len(stack.ledger.dirty(1_000, unleased=False)) + len(stack.ledger.owed("announce", 1))


def _keep(settings: Settings, every_s: float, stop: threading.Event, result: Endured) -> None:
    """What housekeeping and the catalog's reporter do, at a pace that shows within minutes."""
    with Stack(settings) as stack:
        while not stop.wait(every_s):
            _pass(stack, result)


def _pass(stack: Stack, result: Endured, *, at_ms: int | None = None) -> None:
    _pay_the_catalog(stack)
    sweep(stack)
    result.removed.update(enforce_retention(stack, at_ms=at_ms))
    result.passes += 1


def _pay_the_catalog(stack: Stack) -> None:
    while owed := stack.ledger.owed("catalog", 5_000):
        stack.ledger.pay([row.id for row in owed])


def _sample(
    home: Path, processes: Mapping[str, subprocess.Popen[bytes]], stop: threading.Event, result: Endured
) -> None:
    began = time.monotonic()
    while not stop.wait(1.0):
        memory: dict[str, float] = defaultdict(float)
        for name, process in processes.items():
            with contextlib.suppress(psutil.Error):
                root = psutil.Process(process.pid)
                memory[name] += root.memory_full_info().pss / 1e6
                for child in root.children(recursive=True):
                    memory[f"{name} workers"] += child.memory_full_info().pss / 1e6
        result.samples.append(Sample(time.monotonic() - began, _disk_mb(home), dict(memory)))


def _disk_mb(home: Path) -> float:
    blocks = 0
    for folder, _, files in os.walk(home):
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                blocks += os.stat(os.path.join(folder, name)).st_blocks
    return blocks * 512 / 1e6


def _verify(home: Path, environment: Mapping[str, str], last: Mapping[int, int], result: Endured) -> None:
    """The last version of everything is in the tiles, and once all is past its time only what is current is left."""
    world = World(home, retention_s=int(environment["GEO_ASSETS_RETENTION_S"]))
    try:
        stack = world.stack
        assert {json.loads(f.feature_id): f.version for f in stack.features.scan()} == last
        seen: dict[int, int] = {}
        for key in world.published():
            for layer in decode(world.tile(key)):
                for one in layer.features:
                    assert one.properties["version"] == last[one.id], f"building {one.id} in {key} is old"
                    seen[one.id] = one.properties["version"]
        assert seen == last
        assert world.letters() == []
        _pay_the_catalog(stack)
        enforce_retention(stack, at_ms=now_ms() + MUCH_LATER_MS)
        extents = [extent for topic in topics.ALL for extent in stack.log.extents(topic).values()]
        counts = stack.features.counts()
        result.left = {
            "records": sum(extent.end - extent.begin for extent in extents),
            "objects beyond those of published tiles": sum(1 for _ in stack.tiles.list("tiles/"))
            - len(world.published()),
            "tombstones and applied keys": counts.tombstones + counts.applied_keys,
            "unpaid": counts.outbox + sum(stack.ledger.counts().owed.values()),
        }
    finally:
        world.close()


if __name__ == "__main__":
    many, lanes = int(sys.argv[1]), int(sys.argv[2])
    longest = float(sys.argv[3]) if len(sys.argv) > 3 else None
    with tempfile.TemporaryDirectory() as place:
        print(endure(Path(place) / "home", edits=many, workers=lanes, every_s=5.0, at_most_s=longest).told())
