"""Backfill of a region: plan its tiles, guard its width, estimate, write and mark its manifest, watch it to its end.

The manifest and its marks are the checkpoint: whoever planned may die, the sensor `tile_updates` goes on with what is
still dirty of it.
"""

from __future__ import annotations

import json
import math
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TimedOut
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import shapely

from geo_assets.services import throughput
from geo_assets.services.build import weigh
from geo_assets.services.regions import MOST_TILES, RegionError, too_wide
from geo_assets.tiles.cover import cover, cover_count

if TYPE_CHECKING:
    from geo_assets.stack import Stack
    from resources.ledger.protocol import Manifest, Progress

T = TypeVar("T")

SAMPLED = 400
"""Tiles whose features are counted for an estimate: a second or two, however wide the region."""

SAMPLED_OF_A_ZOOM = 10
"""Least of them at one zoom: tiles of one zoom are alike, those of two are not."""


@dataclass(frozen=True, slots=True)
class RegionPlan:
    """The tiles of a region, before anything is written."""

    title: str
    keys: tuple[str, ...]
    width: tuple[tuple[int, int], ...]
    """(zoom, tiles), ascending."""
    parameters: str


@dataclass(frozen=True, slots=True)
class ZoomEstimate:
    """What is to be done at one zoom.

    Args:
        zoom: The zoom.
        tiles: Tiles of the plan.
        up_to_date: Those that a run would skip: their work key says that nothing changed. Estimated.
        vertices: Vertices of the features of the others. Estimated.
    """

    zoom: int
    tiles: int
    up_to_date: int
    vertices: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a plan costs, as a sample of its tiles tells.

    Args:
        zooms: By zoom, ascending.
        sampled: Tiles looked at; all of them make it exact.
        seconds: How long the runs take, two or more of them side by side.
        measured: Whether the speed is one that runs of this map had, and not an assumption.
    """

    zooms: tuple[ZoomEstimate, ...]
    sampled: int
    seconds: float
    measured: bool

    @property
    def tiles(self) -> int:
        """Tiles of the plan."""
        return sum(one.tiles for one in self.zooms)

    @property
    def up_to_date(self) -> int:
        """Tiles that a run would skip."""
        return sum(one.up_to_date for one in self.zooms)

    @property
    def vertices(self) -> int:
        """Vertices to encode."""
        return sum(one.vertices for one in self.zooms)

    @property
    def exact(self) -> bool:
        """Whether every tile was looked at."""
        return self.sampled == self.tiles


def plan_region(stack: Stack, region: Any, title: str, zooms: Sequence[int], *, cap: int | None = None) -> RegionPlan:
    """The tiles of a region at these zooms. Nothing is written.

    Args:
        stack: The ports.
        region: Its shape, EPSG:4326 lon/lat.
        title: What people call it.
        zooms: Ascending.
        cap: Most tiles; None: the setting `manifest_cap`.

    Raises:
        RegionError: The region covers no tile, more than the cap, or takes longer to plan than `plan_timeout_s`.
    """
    cap = min(stack.settings.manifest_cap if cap is None else cap, MOST_TILES)
    deepest = stack.layers.max_zoom
    if zooms[-1] > deepest:
        raise RegionError(f"zoom {zooms[-1]} is above {deepest}, the deepest that the layers are built for")
    # The region says which tiles are meant: without a buffer, or each would bring its neighbours along.
    found = _in_time(lambda: cover(region, zooms, buffer=0.0, cap=cap), title, stack.settings.plan_timeout_s)
    if found.zooms_left:
        raise too_wide(title, zooms, cover_count(region, zooms, buffer=0.0), cap)
    keys = tuple(found.keys())
    if not keys:
        raise RegionError(
            f"{title} covers 0 tiles: the region is empty; give one with an area, inside ±180 and ±90 degrees"
        )
    width = tuple((zoom, len(found.by_zoom[zoom])) for zoom in zooms if zoom in found.by_zoom)
    parameters = json.dumps({"title": title, "zooms": list(zooms), "bounds": list(shapely.bounds(region))})
    return RegionPlan(title, keys, width, parameters)


def _in_time(work: Callable[[], T], title: str, timeout_s: float) -> T:
    # Nothing can stop the library's own code in a thread; whoever asked goes on, and the thread ends with its process.
    outcome: Future[T] = Future()

    def plan() -> None:
        try:
            outcome.set_result(work())
        except BaseException as fault:
            outcome.set_exception(fault)

    threading.Thread(target=plan, name="plan", daemon=True).start()
    try:
        return outcome.result(timeout_s)
    except TimedOut:
        raise RegionError(
            f"{title}: planning took longer than {timeout_s:g} s (GEO_ASSETS_PLAN_TIMEOUT_S); simplify the region"
        ) from None


def estimate(stack: Stack, plan: RegionPlan, *, force: bool = False) -> Estimate:
    """What a plan costs: a sample of its tiles is weighed as a run would weigh them.

    Args:
        stack: The ports.
        plan: The plan.
        force: Whether tiles that are up to date are encoded all the same.
    """
    chosen = _sample(plan)
    keys = [key for group in chosen.values() for key in group]
    states = stack.ledger.read(keys)
    work_keys, vertices = weigh(stack, keys)
    found = dict(zip(keys, zip(work_keys, vertices.tolist(), strict=True), strict=True))
    zooms: list[ZoomEstimate] = []
    for zoom, tiles in plan.width:
        group = chosen[zoom]
        # One that is dirty is looked at again, and skipped if the work key is the same in spite of it.
        skipped = [key for key in group if not force and states[key].work_key == found[key][0]]
        to_do = sum(found[key][1] for key in set(group) - set(skipped))
        share = tiles / len(group)
        zooms.append(ZoomEstimate(zoom, tiles, round(len(skipped) * share), round(to_do * share)))
    speed = throughput.speed(stack.ledger)
    tiles, skipped = sum(one.tiles for one in zooms), sum(one.up_to_date for one in zooms)
    weight = sum(one.vertices for one in zooms) + (tiles - skipped) * throughput.TILE_WEIGHT
    rate = speed.weight_per_s * stack.settings.runs_in_flight
    seconds = weight / rate + skipped / throughput.SKIPPED_PER_S
    return Estimate(tuple(zooms), len(keys), seconds, speed.measured)


def _sample(plan: RegionPlan) -> dict[int, list[str]]:
    by_zoom: dict[int, list[str]] = {zoom: [] for zoom, _ in plan.width}
    for key in plan.keys:
        by_zoom[int(key.partition(":")[0])].append(key)
    # The same plan, the same estimate.
    choice = random.Random(len(plan.keys))
    whole = len(plan.keys)
    if whole <= SAMPLED:
        return by_zoom
    return {
        zoom: choice.sample(keys, min(len(keys), max(SAMPLED_OF_A_ZOOM, math.ceil(SAMPLED * len(keys) / whole))))
        for zoom, keys in by_zoom.items()
    }


def start_backfill(stack: Stack, plan: RegionPlan, *, force: bool = False, manifest_id: str | None = None) -> Manifest:
    """Write the plan's manifest and mark its tiles.

    Args:
        stack: The ports.
        plan: The plan.
        force: Encode also what is up to date.
        manifest_id: The same id again goes on with the same manifest: nothing is marked twice.
    """
    manifest_id = manifest_id or f"backfill-{uuid.uuid4().hex[:12]}"
    stack.ledger.write_manifest(
        manifest_id, plan.title, "backfill", plan.keys, parameters=plan.parameters, cap=len(plan.keys)
    )
    return stack.ledger.mark_manifest(manifest_id, force=force)


class Cancelled(Exception):
    """The manifest was cancelled while somebody watched it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a backfill ended.

    Args:
        progress: Tiles, answered, given up.
        floor: Least fraction of tiles that has to be answered.
        failed: Tiles that were given up, with their error; the first of them.
    """

    progress: Progress
    floor: float
    failed: tuple[tuple[str, str], ...]

    @property
    def coverage(self) -> float:
        """Fraction of its tiles that are answered."""
        return self.progress.done / self.progress.tiles if self.progress.tiles else 1.0

    @property
    def passed(self) -> bool:
        """Whether it keeps its floor."""
        return self.coverage >= self.floor

    @property
    def summary(self) -> str:
        """One line."""
        done, tiles = self.progress.done, self.progress.tiles
        if not self.progress.failed:
            return f"{done:,} tiles are up to date"
        line = f"{self.progress.failed:,} of {tiles:,} tiles failed: coverage {self.coverage:.4f}"
        return f"{line} is {'at or above' if self.passed else 'below'} the floor of {self.floor}"


def watch(stack: Stack, manifest_id: str, *, poll_s: float = 0.5) -> Iterator[Progress]:
    """How far a manifest is, now and every `poll_s` seconds, until each of its tiles is answered or given up.

    Raises:
        UnknownManifest: There is none of that id.
        Cancelled: Somebody cancelled it.
    """
    while True:
        progress = stack.ledger.progress(manifest_id)
        yield progress
        if progress.done + progress.failed >= progress.tiles:
            return
        if stack.ledger.manifest(manifest_id).state == "cancelled":
            raise Cancelled(f"manifest {manifest_id} was cancelled")
        time.sleep(poll_s)


def verdict(stack: Stack, manifest_id: str, *, shown: int = 50) -> Verdict:
    """How a manifest ended, or stands.

    Raises:
        UnknownManifest: There is none of that id.
    """
    progress = stack.ledger.progress(manifest_id)
    failed: list[tuple[str, str]] = []
    if progress.failed:
        for key, state in stack.ledger.read(stack.ledger.manifest_keys(manifest_id)).items():
            if state.dirty and state.given_up >= state.wanted:
                failed.append((key, state.error or ""))
    return Verdict(progress, stack.settings.coverage_floor, tuple(sorted(failed)[:shown]))
