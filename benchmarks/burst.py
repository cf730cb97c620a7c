"""Fifty polygons of 41,000 vertices at once, on all that `geo-assets up` starts, while small edits go on elsewhere.

    python -m benchmarks.burst [--giants 50] [--rate 20] [--seconds 60] [--stack embedded|production]
                               [--quick] [--json FILE]

Small edits of the synthetic city are posted at a steady rate, for a while without the giants and then with them, in the
same run; the giants lie elsewhere, each in tiles of its own. It tells what the lane's own metric says of the longest
time between two polls, p50 and p99 of the small edits without and during the burst, the most memory that the services
had between them (PSS: what processes share counts once), and how long it took until the giants were on the map. What is
on the map is taken from the stored objects, as benchmarks.latency does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import re
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import shapely
import uvloop

from benchmarks import latency
from benchmarks.both_stacks import Place, place, stacks_here
from benchmarks.edge import Pool
from benchmarks.latency import City, Edit, Load, percentile
from benchmarks.report import Report, parser
from geo_assets.services.edit_stages import Stamps, now_us
from geo_assets.stack import Stack
from geo_assets_tests.running_platform import Platform, free_ports, running

VERTICES = 41_000
"""Of each giant: 50 to 75 ms of encoding in a tile that shows all of it."""

GOALS = {"poll gap": 5.0, "p99 of small edits": 1_000.0, "memory": 1_500.0}
"""Seconds, milliseconds and MB that the burst is held against."""

SERVICES = ("edge", "ingest", "live", "tiles")
"""What counts as memory of the services, their worker processes with them; Dagster and `up` are told apart."""

FIRST_GIANT = 1_000_000
"""Numbers of giants begin here; small edits have those below."""

POST_S = 120.0
DRAIN_S = 600.0
"""Longest waits for a giant's answer, and for everything to be on the map."""

EVERY_S = 1.0
"""Between two looks at memory and metrics."""


def giant(number: int, *, vertices: int = VERTICES, radius: float = 0.004) -> dict[str, Any]:
    """A polygon with a ragged coast, some 900 m across, a tile of zoom 12 away from the next one and from the city.

    Args:
        number: Its place in the row.
        vertices: Of its ring, the closing one not counted.
        radius: Degrees of latitude.
    """
    chance = np.random.default_rng(number)
    lon, lat = 26.0 + 0.09 * (number % 10), 61.0 + 0.05 * (number // 10)
    turn = np.linspace(0.0, 2 * math.pi, vertices, endpoint=False)
    reach = radius * (0.8 + 0.1 * np.sin(17 * turn) + chance.uniform(-0.02, 0.02, vertices))
    ring = np.column_stack((lon + 2 * reach * np.cos(turn), lat + reach * np.sin(turn))).round(9)
    points = ring.tolist()
    return {"type": "Polygon", "coordinates": [[*points, points[0]]]}


def giants(count: int, run: str, reach: float) -> list[Edit]:
    """Edits that make so many giants."""
    shapes = [giant(number) for number in range(count)]
    covers = latency.cover(shapely.from_geojson([json.dumps(shape) for shape in shapes]), reach)
    return [
        Edit(
            FIRST_GIANT + number,
            json.dumps(
                {
                    "type": "Feature", "id": FIRST_GIANT + number, "version": 1, "layer": "buildings",
                    "geometry": shape,
                    "properties": {"edit": f"<{run}-{FIRST_GIANT + number}>"},
                }
            ).encode(),
            tuple(sorted(tiles)),
        )
        for number, (shape, tiles) in enumerate(zip(shapes, covers, strict=True))
    ]  # fmt: skip


class Watcher(threading.Thread):
    """Looks at the services' memory and at the lane's metric meanwhile."""

    def __init__(self, platform: Platform, live_port: int) -> None:
        super().__init__(daemon=True, name="watcher")
        self._platform, self._metrics = platform, f"http://127.0.0.1:{live_port}/metrics"
        self._done = threading.Event()
        self.most: dict[str, float] = defaultdict(float)
        """MB of PSS, by service, each at its own most."""
        self.most_services = 0.0
        """MB of PSS of all services, at the same moment."""
        self.gap_s = 0.0
        """The longest poll gap that the metric said, of those that it has not told before `forget`."""
        self._last_s = self._known_s = 0.0
        self.unanswered = 0

    def run(self) -> None:
        with httpx.Client(trust_env=False, timeout=10) as client:
            while not self._done.wait(EVERY_S):
                self._look(client)

    def _look(self, client: httpx.Client) -> None:
        now = memory_mb(self._platform)
        for name, megabytes in now.items():
            self.most[name] = max(self.most[name], megabytes)
        self.most_services = max(self.most_services, sum(now.get(name, 0.0) for name in SERVICES))
        try:
            found = re.search(r"^geo_assets_lane_poll_gap_seconds (\S+)$", client.get(self._metrics).text, re.MULTILINE)
        except httpx.HTTPError:
            self.unanswered += 1
            return
        if found is not None:
            self._last_s = float(found[1])
            if self._last_s != self._known_s:
                self.gap_s = max(self.gap_s, self._last_s)

    def forget(self) -> None:
        """Begin anew. The metric looks back a minute: what it says now is of what was before."""
        self._known_s = self._last_s
        self.most, self.most_services, self.gap_s = defaultdict(float), 0.0, 0.0

    def close(self) -> None:
        """End."""
        self._done.set()
        self.join(20)


def memory_mb(platform: Platform) -> dict[str, float]:
    """MB of PSS of each service, its worker processes with it."""
    processes = {process.pid: process for process in platform.left()}
    found: dict[str, float] = defaultdict(float)
    for process in processes.values():
        with contextlib.suppress(psutil.Error):
            name = latency.service(process, processes).removesuffix(" workers")
            found[name] += process.memory_full_info().pss / 1e6
    return dict(found)


async def post_giants(platform: Platform, run: str, edits: Sequence[Edit], after_s: float) -> None:
    """Post all of them at once, some seconds from now."""
    pool = Pool(platform.edge_port)
    requests = [latency.request(run, edit) for edit in edits]
    await asyncio.sleep(after_s)

    async def post(edit: Edit, whole: bytes) -> None:
        edit.due = now_us()
        try:
            edit.status = await asyncio.wait_for(pool.ask(whole), POST_S)
        except (OSError, TimeoutError) as fault:
            edit.status = type(fault).__name__.encode()
        edit.stamps = Stamps(received=edit.due, acknowledged=now_us())

    await asyncio.gather(*(post(edit, whole) for edit, whole in zip(edits, requests, strict=True)))
    pool.close()


async def burst(
    platform: Platform, stack: Stack, run: str, small: Sequence[Edit], rate: float, large: Sequence[Edit]
) -> Load:
    """Small edits at their rate, and the giants one second after the first of them."""
    load, _ = await asyncio.gather(
        latency.paced(platform, stack, run, small, rate, drain_s=DRAIN_S), post_giants(platform, run, large, 1.0)
    )
    return load


@contextlib.contextmanager
def started(where: Place, live_port: int) -> Iterator[Platform]:
    """All of `up` with every default but the ports."""
    environment = {name: value for name, value in where.environment.items() if name != "GEO_ASSETS_HOME"} | {
        "GEO_ASSETS_LIVE_PORT": str(live_port),
        "GEO_ASSETS_GARBAGE_GRACE_S": "86400",  # What an object showed is looked up afterwards.
        "GEO_ASSETS_LOG_LEVEL": "warning",
    }
    with running(where.settings.home, **environment) as platform:
        yield platform


def ages(edits: Sequence[Edit]) -> list[float]:
    """Milliseconds from when each was due until the last of its tiles was told."""
    return [age * 1000 for edit in edits if (age := edit.stamps.age("sent")) is not None]


def measure(report: Report, stack_name: str, options: argparse.Namespace) -> None:
    """Everything about one stack."""
    with contextlib.ExitStack() as kept:
        folder = Path(kept.enter_context(tempfile.TemporaryDirectory()))
        (live_port,) = free_ports(1)
        where = kept.enter_context(place(stack_name, folder / "home"))
        latency.prepare(where, options.buildings)
        platform = kept.enter_context(started(where, live_port))
        stack = kept.enter_context(Stack(where.settings))
        reach = stack.layers.reach_fraction
        city = City(options.buildings, reach, f"b{int(time.time()) % 100_000}")
        large = giants(options.giants, city.run, reach)
        tiles = {key for edit in large for key in edit.tiles}
        report.note(
            f"{stack_name}: {options.giants} polygons of {VERTICES:,} vertices over {len(tiles)} tiles, "
            f"{sum(len(edit.body) for edit in large) / 1e6:.0f} MB of bodies; {options.rate:g} small edits/s"
        )
        uvloop.run(latency.paced(platform, stack, city.run, city.edits(options.warm), options.rate))
        watcher = Watcher(platform, live_port)
        watcher.start()
        kept.callback(watcher.close)
        time.sleep(2 * EVERY_S)
        watcher.forget()
        count = round(options.rate * options.seconds)

        since = latency.begin(stack)
        alone = uvloop.run(latency.paced(platform, stack, city.run, city.edits(count), options.rate))
        quiet = latency.judge(stack, city.run, alone, since)
        before = ages(quiet)
        report.row(f"{stack_name}: poll gap without giants", watcher.gap_s, "s")
        report.row(f"{stack_name}: memory of the services without giants", watcher.most_services, "MB")
        watcher.forget()

        since = latency.begin(stack)
        load = uvloop.run(burst(platform, stack, city.run, city.edits(count), options.rate, large))
        time.sleep(2 * EVERY_S)  # A last look.
        watcher.close()
        of_giants = Load(large, load.events, 0.0, {}, load.drained)
        shown = latency.judge(stack, city.run, of_giants, since)
        seen = latency.judge(stack, city.run, load, since)
        first = min(edit.due for edit in large)
        last = max((edit.stamps.sent for edit in shown), default=first)
        during = ages([edit for edit in seen if first <= edit.due <= last])
        tell(report, stack_name, watcher, before, during)
        if shown:
            report.row(f"{stack_name}: giants on the map, all", (last - first) / 1e6, "s")
            report.row(f"{stack_name}: giants on the map, p50", percentile(ages(shown), 0.5) / 1000, "s")
        report.row(f"{stack_name}: giants not on the map", len(large) - len(shown), "giants")
        unseen = len(alone.edits) - len(quiet) + len(load.edits) - len(seen)
        report.row(f"{stack_name}: small edits not seen", unseen, "edits")
        for one in (alone, load, of_giants):
            if one.unseen:
                report.note(f"{stack_name}: {', '.join(f'{many} {why}' for why, many in one.unseen.items())}")
        failed = stack.ledger.counts()
        if failed.dirty_live:
            report.note(f"{stack_name}: {failed.dirty_live} tiles are still dirty")
        for name, one, these in (("without giants", alone, quiet), ("with them", load, seen)):
            where_it_goes = Report("stages")
            latency.tell(where_it_goes, f"{stack_name}, {name}", one, these)
            report.notes += where_it_goes.notes
        report.note(f"{stack_name}: the generator was late by at most {load.late_ms:.0f} ms")
        if watcher.unanswered:
            report.note(f"{stack_name}: the lane's metrics did not answer {watcher.unanswered} times")


def tell(
    report: Report,
    stack_name: str,
    watcher: Watcher,
    before: Sequence[float],
    during: Sequence[float],
) -> None:
    """Rows of the burst, and which of the goals it holds."""
    for share, word in ((0.5, "p50"), (0.99, "p99")):
        alone, beside = percentile(before, share), percentile(during, share)
        report.row(f"{stack_name}: small edit to SSE without giants, {word}", alone, "ms")
        ratio = alone / beside if during and before else None
        report.row(f"{stack_name}: small edit to SSE during the burst, {word}", beside, "ms", "without giants", ratio)
    report.note(f"{stack_name}: {len(during)} small edits were due while giants were under way")
    report.row(f"{stack_name}: poll gap during the burst", watcher.gap_s, "s")
    for name, megabytes in sorted(watcher.most.items(), key=lambda one: -one[1]):
        report.row(f"{stack_name}: memory of {name} at its most", megabytes, "MB PSS")
    report.row(f"{stack_name}: memory of the services at its most ({', '.join(SERVICES)})", watcher.most_services, "MB")
    figures = {"poll gap": watcher.gap_s, "p99 of small edits": percentile(during, 0.99)}
    figures["memory"] = watcher.most_services
    for name, figure in figures.items():
        # Without a figure nothing is held.
        verdict = "holds" if figure <= GOALS[name] else "does not hold"
        report.note(f"{stack_name}: {name} {verdict}: {figure:,.3g} of {GOALS[name]:,.4g}")


def main() -> None:
    command = parser(__doc__ or "")
    command.add_argument("--stack", choices=("embedded", "production"), action="append", help="one, or twice for both")
    command.add_argument("--giants", type=int, default=50, help="polygons of 41,000 vertices (default 50)")
    command.add_argument("--rate", type=float, default=20, help="small edits a second (default 20)")
    command.add_argument("--seconds", type=float, default=60, help="how long, each time (default 60)")
    command.add_argument("--warm", type=int, default=200, help="edits before anything is timed (default 200)")
    command.add_argument("--buildings", type=int, default=50_000, help="of the city (default 50,000)")
    options = command.parse_args()
    if options.quick:
        options.buildings, options.rate, options.seconds = min(options.buildings, 5_000), 5, 5
        options.warm, options.giants = min(options.warm, 5), min(options.giants, 3)
    report = Report("burst", options.quick)
    here = stacks_here(report)
    for name in options.stack or ["embedded"]:
        if name in here:
            measure(report, name, options)
    report.finish(options.json)


if __name__ == "__main__":
    main()
