"""Tracker: positions through the index and the state machine, against one position at a time.

Devices drive about in a city of 50,000 fences that share their borders (hysteresis 10 m, dwell 60 s); one position in a
hundred comes into another fence. Device ids are texts, as they come from the log. The naive way is what a first version
does: for each position a query of the same tree, a dictionary of what the device was in, the same hysteresis and dwell.

The figures that are compared are of process CPU time: the machine may have other work. Wall time stands beside it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import shapely

from benchmarks.report import Report, parser
from geo_assets.geofence.fences import Fence, FenceSet
from geo_assets.geofence.index import FenceIndex
from geo_assets.geofence.positions import Positions
from geo_assets.geofence.rules import Rules
from geo_assets.geofence.tracker import Tracker
from geo_assets.geofence.triggers import decode, encode_many, keys

WEST, SOUTH, EAST, NORTH = 24.5, 60.1, 25.5, 60.5
START_MS = 1_777_636_800_000
FIX_MS = 10_000
HYSTERESIS_M, DWELL_MS = 10.0, 60_000


def main() -> None:
    arguments = parser("Positions through geofence index and state machine.").parse_args()
    report = Report("tracker", quick=arguments.quick)
    side = 224 if not arguments.quick else 100
    devices, batch, rounds = (250_000, 50_000, 40) if not arguments.quick else (50_000, 25_000, 10)
    fences = tiling(side)
    index, seconds, _ = timed(lambda: FenceIndex(fences))
    report.row(f"index of {len(fences):,} fences", seconds, "s CPU")
    for share, crossings in ((0.01, False), (0.05, False), (0.01, True)):
        city = Drive(devices, side, share)
        tracker = Tracker(index, Rules(crossings=crossings))
        # Until as many leave as come in: a stay ends some fixes after the border, and DWELL comes six after ENTER.
        for positions in city.batches(batch, 12 * devices // batch):
            tracker.feed(positions)
        gc.freeze()
        work = list(city.batches(batch, rounds))
        triggers, seconds, wall = timed(lambda tracker=tracker, work=work: [tracker.feed(each) for each in work])
        if tracker.counts.accepted != tracker.counts.positions:
            raise SystemExit(f"positions were refused: {tracker.counts}")
        count, told = batch * rounds, sum(map(len, triggers))
        against = naive(index, work[: max(1, rounds // 20)])
        report.row(
            f"{share:.0%} into another fence, {'with' if crossings else 'no'} segment test", count / seconds,
            "positions/s CPU",
            "one at a time" if not crossings else "one at a time, without it", count / seconds / against,
        )  # fmt: skip
        report.row("the same by the wall clock", count / wall, "positions/s")
        report.row("triggers among them", 100 * told / count, "per 100 positions")
        if share == 0.01 and not crossings:
            snapshot(report, tracker, index)
            frames(report, triggers)
    report.note(f"{devices:,} devices, {batch * rounds:,} positions a row in batches of {batch:,}, ids as texts.")
    report.note("CPU: time of this process on one core; the machine may have been busy, which the wall clock shows.")
    report.finish(arguments.json)


def snapshot(report: Report, tracker: Tracker, index: FenceIndex) -> None:
    data, seconds, _ = timed(tracker.snapshot)
    report.row(f"snapshot of {tracker.devices:,} devices, {len(data) / 1e6:.1f} MB", seconds * 1000, "ms CPU")
    _, seconds, _ = timed(lambda: Tracker.restore(data, {tracker.revision: index}))
    report.row("restore", seconds * 1000, "ms CPU")


def frames(report: Report, triggers: list[Any]) -> None:
    rows, seconds, _ = timed(
        lambda: [row for each in triggers for row in each.rows(epoch=1, emitted_ns=time.time_ns())]
    )
    report.row(f"{len(rows):,} triggers from columns to structs", seconds / len(rows) * 1e6, "µs/trigger CPU")
    encoded, seconds, _ = timed(lambda: encode_many(rows))
    report.row("encode", seconds / len(rows) * 1e6, "µs/trigger CPU")
    _, seconds, _ = timed(lambda: keys(rows))
    report.row("idempotency key", seconds / len(rows) * 1e6, "µs/trigger CPU")
    decoded, seconds, _ = timed(lambda: list(map(decode, encoded)))
    report.row("decode", seconds / len(rows) * 1e6, "µs/trigger CPU")
    if decoded != rows:
        raise SystemExit("a frame does not decode to what was encoded")


def timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """What the work gives, and its seconds by the process's CPU and by the wall clock."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, time.process_time() - cpu, time.perf_counter() - wall


def tiling(side: int) -> FenceSet:
    """Fences that share their borders and leave no gap, side by side; corners are jittered."""
    rng = np.random.default_rng(1)
    x, y = np.meshgrid(np.linspace(WEST, EAST, side + 1), np.linspace(SOUTH, NORTH, side + 1))
    jitter = rng.uniform(-0.2, 0.2, (2, side + 1, side + 1))
    jitter[:, [0, -1]] = jitter[:, :, [0, -1]] = 0.0
    x, y = x + jitter[0] * (EAST - WEST) / side, y + jitter[1] * (NORTH - SOUTH) / side
    column, row = (axis.ravel() for axis in np.meshgrid(np.arange(side), np.arange(side)))
    ring = [(x[row + b, column + a], y[row + b, column + a]) for a, b in ((0, 0), (1, 0), (1, 1), (0, 1))]
    shapes = shapely.polygons(np.stack([np.stack(corner, axis=1) for corner in ring], axis=1))
    made = (
        Fence(f'city:"area-{number:06}"', 1, shape, dwell_ms=DWELL_MS, hysteresis_m=HYSTERESIS_M)
        for number, shape in enumerate(shapes)
    )
    return FenceSet(1, tuple(made))


class Drive:
    """Devices that drive straight on and turn at the edge of the city; each sends a fix a second.

    Args:
        devices: How many.
        side: Fences in a row.
        share: Of the fixes, how many are in another fence than the one before.
    """

    def __init__(self, devices: int, side: int, share: float) -> None:
        rng = np.random.default_rng(2)
        self.ids = [f"device-{number:08}" for number in range(devices)]
        self.x, self.y = rng.uniform(0.02, 0.98, (2, devices))
        heading = rng.uniform(0, 2 * np.pi, devices)
        # A straight step of length s crosses (|cos| + |sin|) s = 4/pi s lines of a grid of unit squares on average.
        step = share / side * np.pi / 4
        self.dx, self.dy = step * np.cos(heading), step * np.sin(heading)
        self.order = rng.permutation(devices)
        self.sent = 0

    def batches(self, size: int, count: int) -> Any:
        """Batches of positions, device after device, in an order that has nothing to do with where they are."""
        devices = len(self.ids)
        for _ in range(count):
            numbers = self.sent + np.arange(size)
            who = self.order[numbers % devices]
            for place, step in ((self.x, self.dx), (self.y, self.dy)):
                ahead = place[who] + step[who]
                step[who] = np.where((ahead < 0.01) | (ahead > 0.99), -step[who], step[who])
                place[who] += step[who]
            seen = START_MS + numbers // devices * FIX_MS + numbers % devices * FIX_MS // devices
            yield Positions(
                [self.ids[number] for number in who.tolist()],
                WEST + self.x[who] * (EAST - WEST), SOUTH + self.y[who] * (NORTH - SOUTH), np.full(size, np.nan),
                seen, seen, np.zeros(size, np.int64), numbers,
            )  # fmt: skip
            self.sent += size


def naive(index: FenceIndex, work: list[Positions]) -> float:
    """Positions a second (CPU) of one position at a time."""
    feed, _ = naive_way(index)

    def run() -> int:
        count = 0
        for batch in work:
            for row in zip(batch.device, batch.lon.tolist(), batch.lat.tolist(), batch.time_ms.tolist(), strict=True):
                feed(*row)
                count += 1
        return count

    count, seconds, _ = timed(run)
    return count / seconds


def naive_way(
    index: FenceIndex,
) -> tuple[Callable[[str | None, float, float, int], None], list[tuple[str | None, int, str, int]]]:
    """What judges one position, and where it puts what it tells: device, number of the fence, state, time."""
    fences = [fence.geometry for fence in index.fence_set.fences]
    shapely.prepare(fences)
    tree = shapely.STRtree(fences)
    state: dict[str | None, dict[int, list[int]]] = {}
    told: list[tuple[str | None, int, str, int]] = []

    def feed(device: str | None, lon: float, lat: float, at: int) -> None:
        point = shapely.Point(lon, lat)
        now = set(tree.query(point, predicate="covered_by").tolist())
        stays = state.setdefault(device, {})
        for fence in [fence for fence in stays if fence not in now]:
            reach = HYSTERESIS_M / 111_195.0
            if fences[fence].distance(point) > reach:
                del stays[fence]
                told.append((device, fence, "EXIT", at))
        for fence, stay in stays.items():
            if stay[1] <= at:
                told.append((device, fence, "DWELL", stay[1]))
                stay[1] = 1 << 62
        for fence in now - stays.keys():
            stays[fence] = [at, at + DWELL_MS]
            told.append((device, fence, "ENTER", at))

    return feed, told


if __name__ == "__main__":
    main()
