"""From a posted edit to the last of its tiles on the change stream, stage by stage, on all that `geo-assets up` starts.

    python -m benchmarks.latency [--rate 100] [--seconds 60] [--ladder] [--stack embedded|production] [--browser]
                                 [--profile] [--quick] [--json FILE]

Signed edits of the synthetic city's buildings, spread evenly over its tiles of zoom 14, are posted when they are due,
whether or not earlier ones were answered. When an edit is on the map is not taken from anybody's word: each writes a
mark of its own into a property, and afterwards the stored object of every revision that was announced is searched for
it. An edit is seen when the stream has told of a revision with the mark in it, of the last tile that shows the feature.
Several edits may share a revision. All times are from when the edit was due, by one machine's clock.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import json
import math
import random
import re
import shutil
import socket
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import shapely
import uvloop

from benchmarks import sampler, synthetic
from benchmarks.both_stacks import Place, place, stacks_here
from benchmarks.city_home import SOURCES
from benchmarks.edge import Pool
from benchmarks.report import Report, parser
from geo_assets.events import topics
from geo_assets.events.signature import sign
from geo_assets.ports import tile_object
from geo_assets.services.build import TileBuilder
from geo_assets.services.edit_stages import STAGES, Stage, Stamps, now_us, stamps_in_header
from geo_assets.services.importer import import_reading
from geo_assets.services.reading import open_file
from geo_assets.stack import Stack
from geo_assets.tiles.cover import covers
from geo_assets.tiles.tile import Tile
from geo_assets_tests.conftest import CHROMIUM_FLAGS
from geo_assets_tests.running_platform import Platform, running
from resources.event_log.protocol import Record
from resources.ledger.protocol import object_name

LAYERS = """
max_zoom: 16
layers:
  - {name: buildings, min_zoom: 14, min_pixels: 0, simplify: 0.25}
  - {name: streets, min_zoom: 14, min_pixels: 0, simplify: 0.5}
  - {name: places, min_zoom: 14}
"""
"""Every edit shows at zooms 14, 15 and 16."""

ZOOMS = (14, 15, 16)
LADDER = (10, 25, 50, 75, 100, 125, 150, 200)
"""Edits a second, upwards until one does not hold."""

GOALS = {"embedded": (60, 250), "production": (math.inf, 300)}
"""Milliseconds that p50 and p99 are held against, by stack."""

DRAIN_S = 120.0
"""Longest wait for what was sent to be on the map; what is not by then counts as lost."""

SECRET = re.search(r"whsec_\w+", SOURCES)


@dataclass(slots=True)
class Edit:
    """One edit, as it was sent, and what became of it. Moments in microseconds since the epoch."""

    number: int
    body: bytes
    tiles: tuple[str, ...]
    """Every tile that the old or the new geometry touches."""
    due: int = 0
    status: bytes = b""
    stamps: Stamps = field(default_factory=Stamps)
    """Of the tile that was seen last."""


class City:
    """The buildings to edit, by tile of zoom 14, and the next edit of each.

    Args:
        buildings: How many the city has.
        run: A name that no earlier run in this home had: its edits are told from theirs.
    """

    def __init__(self, buildings: int, reach: float, run: str) -> None:
        self.run, self._reach, self._count = run, reach, 0
        by_tile: dict[str, list[dict[str, Any]]] = defaultdict(list)
        found = [feature for feature in synthetic.city(buildings) if feature["layer"] == "buildings"]
        middles = shapely.centroid(shapely.from_geojson([json.dumps(feature["geometry"]) for feature in found]))
        for feature, key in zip(found, _tiles_of(middles, 14, 0.0), strict=True):
            by_tile[min(key)].append(feature)
        most = max(map(len, by_tile.values()))
        # Tiles at the city's edge have few buildings: an even load is one over those that are full.
        self._tiles = [tile for tile in by_tile.values() if len(tile) > most / 2]
        shuffle = random.Random(7)
        for tile in self._tiles:
            shuffle.shuffle(tile)

    @property
    def tiles(self) -> int:
        """Tiles of zoom 14 over which the edits are spread."""
        return len(self._tiles)

    def edits(self, count: int) -> list[Edit]:
        """The next edits: in turn one of each tile, no building twice."""
        made: list[tuple[dict[str, Any], Any, Any]] = []
        for _ in range(count):
            tile = self._tiles[self._count % len(self._tiles)]
            if not tile:
                raise SystemExit(f"the city has no more buildings to edit: {self._count:,} edits were made of it")
            made.append((tile.pop(), self._count, None))
            self._count += 1
        before = shapely.from_geojson([json.dumps(feature["geometry"]) for feature, _, _ in made])
        # A few centimetres: what tile shows it does not change, and every tile of it does.
        after = shapely.transform(before, lambda points: points + np.array([3e-7, 2e-7]))
        old, new = (cover(geometry, self._reach) for geometry in (before, after))
        edits: list[Edit] = []
        for (feature, number, _), geometry, tiles in zip(
            made, after, [a | b for a, b in zip(old, new, strict=True)], strict=True
        ):
            body = {
                **feature,
                "version": int(time.time() * 1000),
                "geometry": json.loads(shapely.to_geojson(geometry)),
                "properties": {**feature["properties"], "edit": f"<{self.run}-{number}>"},
            }
            edits.append(Edit(number, json.dumps(body).encode(), tuple(sorted(tiles))))
        return edits


def _tiles_of(geometry: Any, zoom: int, reach: float) -> list[set[str]]:
    found = covers(geometry, [zoom] * len(geometry), [zoom] * len(geometry), buffer=reach, cap=1_000)
    return _by_feature(found, len(geometry))


def cover(geometry: Any, reach: float) -> list[set[str]]:
    """Tiles of all zooms that each geometry touches."""
    low, high = [min(ZOOMS)] * len(geometry), [max(ZOOMS)] * len(geometry)
    return _by_feature(covers(geometry, low, high, buffer=reach, cap=1_000), len(geometry))


def _by_feature(found: Any, count: int) -> list[set[str]]:
    tiles: list[set[str]] = [set() for _ in range(count)]
    for key, feature in zip(found.keys(), found.feature.tolist(), strict=True):
        tiles[feature].add(key)
    return tiles


# -- the load ------------------------------------------------------------------------------------------------------


class Listener(asyncio.Protocol):
    """The change stream as it comes: chunks with the moment of each. Read afterwards, so that hearing costs nothing."""

    def __init__(self) -> None:
        self.chunks: list[tuple[int, bytes]] = []
        self.ended = False

    def data_received(self, data: bytes) -> None:
        self.chunks.append((now_us(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = True

    def events(self) -> dict[tuple[str, int], int]:
        """(tile's path, revision) -> when its event was there, whole."""
        found: dict[tuple[str, int], int] = {}
        buffered = b""
        for moment, data in self.chunks:
            buffered += data
            *lines, buffered = buffered.split(b"\n")
            for line in lines:
                if line.startswith(b"data: {") and b'"revision"' in line:
                    told = json.loads(line[6:])
                    found.setdefault((f"{told['z']}/{told['x']}/{told['y']}", told["revision"]), moment)
        return found


@contextlib.asynccontextmanager
async def listening(port: int) -> AsyncIterator[Listener]:
    """An open change stream."""
    loop = asyncio.get_running_loop()
    transport, listener = await loop.create_connection(Listener, "127.0.0.1", port)
    transport.write(b"GET /events HTTP/1.1\r\nHost: tiles\r\nAccept: text/event-stream\r\n\r\n")
    while not listener.chunks:
        await asyncio.sleep(0.01)
    try:
        yield listener
    finally:
        transport.close()


def request(run: str, edit: Edit) -> bytes:
    """A whole signed HTTP request."""
    assert SECRET is not None
    headers = sign(SECRET[0], f"{run}-{edit.number}", int(time.time()), edit.body) | {
        "host": "edge",
        "content-type": "application/geo+json",
        "content-length": str(len(edit.body)),
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST /v1/features HTTP/1.1\r\n{head}\r\n".encode() + edit.body


@dataclass(slots=True)
class Load:
    """What was sent and heard."""

    edits: list[Edit]
    events: dict[tuple[str, int], int]
    late_ms: float
    """Most milliseconds by which the generator itself was behind."""
    cpu: dict[str, float]
    """Cores that each service was using while edits were sent."""
    drained: bool
    unseen: Counter[str] = field(default_factory=Counter[str])
    """Why edits were not seen."""


async def paced(
    platform: Platform, stack: Stack, run: str, edits: Sequence[Edit], rate: float, *, drain_s: float = DRAIN_S
) -> Load:
    """Send each edit when it is due, and wait at most so long until everything is on the map."""
    pool = Pool(platform.edge_port)
    requests = [request(run, edit) for edit in edits]
    async with listening(platform.tiles_port) as listener:
        before, began = cpu_seconds(platform), time.perf_counter()
        tasks: list[asyncio.Task[None]] = []
        start = now_us() + 100_000
        late = 0.0
        for place_, (edit, whole) in enumerate(zip(edits, requests, strict=True)):
            edit.due = start + round(place_ * 1_000_000 / rate)
            if (wait := edit.due - now_us()) > 0:
                await asyncio.sleep(wait / 1_000_000)
            late = max(late, (now_us() - edit.due) / 1_000)
            tasks.append(asyncio.create_task(_send(pool, edit, whole)))
        await asyncio.gather(*tasks)
        seconds = time.perf_counter() - began
        spent = {name: (cpu - before.get(name, 0.0)) / seconds for name, cpu in cpu_seconds(platform).items()}
        drained = await _quiet(stack, listener, drain_s)
        pool.close()
        return Load(list(edits), listener.events(), late, spent, drained)


async def one_by_one(platform: Platform, stack: Stack, run: str, edits: Sequence[Edit]) -> Load:
    """Send each edit to an idle system."""
    pool = Pool(platform.edge_port)
    async with listening(platform.tiles_port) as listener:
        for edit in edits:
            whole = request(run, edit)
            edit.due = now_us()
            await _send(pool, edit, whole)
            heard, deadline = len(listener.chunks), time.monotonic() + 60
            while len(listener.chunks) == heard and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
            while listener.chunks[-1][0] > now_us() - 400_000:
                await asyncio.sleep(0.05)
            await asyncio.sleep(random.uniform(0.0, 0.3))
        drained = await _quiet(stack, listener)
        pool.close()
        return Load(list(edits), listener.events(), 0.0, {}, drained)


async def _send(pool: Pool, edit: Edit, whole: bytes) -> None:
    try:
        edit.status = await asyncio.wait_for(pool.ask(whole), 30)
    except (OSError, TimeoutError) as fault:
        edit.status = type(fault).__name__.encode()
    edit.stamps = Stamps(received=edit.due, acknowledged=now_us())


async def _quiet(stack: Stack, listener: Listener, drain_s: float = DRAIN_S) -> bool:
    """Whether everything is on the map in time."""
    loop, deadline = asyncio.get_running_loop(), time.monotonic() + drain_s
    while time.monotonic() < deadline:
        counts = await loop.run_in_executor(None, stack.ledger.counts)
        behind = await loop.run_in_executor(None, _behind, stack)
        last = listener.chunks[-1][0] if listener.chunks else 0
        if not counts.dirty_live and not behind and now_us() - last > 700_000:
            return True
        await asyncio.sleep(0.2)
    return False


def _behind(stack: Stack) -> int:
    """Records of `[raw]` that ingest has not worked off, and hints that are no marks yet."""
    done = {topics.RAW: stack.log.committed(topics.INGEST_GROUP, topics.RAW)}
    done |= {topic: stack.ledger.positions(stack.log.topic_id(topic)) for topic in topics.TILE_HINTS}
    return sum(
        extent.end - max(done[topic].get(partition, 0), extent.begin)
        for topic in done
        for partition, extent in stack.log.extents(topic).items()
    )


def cpu_seconds(platform: Platform) -> dict[str, float]:
    """CPU that each service has taken, its worker processes with it."""
    parents = {process.pid: process for process in platform.left()}
    found: dict[str, float] = defaultdict(float)
    for process in parents.values():
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            found[service(process, parents)] += times.user + times.system
    return dict(found)


def service(process: psutil.Process, all_: Mapping[int, psutil.Process]) -> str:
    """The service that a process is, or whose worker it is."""
    line = process.cmdline()
    if "geo_assets.cli" in line:
        return line[-1] if line[-1] in sampler.NAMES else "up"
    if any("dagster" in word or "catalog_reporter" in word for word in line):
        return "dagster"
    parent = all_.get(process.ppid())
    return f"{service(parent, all_).removesuffix(' workers')} workers" if parent is not None else "others"


# -- what became of it ---------------------------------------------------------------------------------------------


def begin(stack: Stack) -> dict[str, dict[int, int]]:
    """Where the topics end now."""
    return {
        topic: {p: extent.end for p, extent in stack.log.extents(topic).items()}
        for topic in (*topics.TILE_HINTS, topics.TILE_UPDATED)
    }


def judge(stack: Stack, run: str, load: Load, since: Mapping[str, Mapping[int, int]]) -> list[Edit]:
    """Give each edit the stamps of the tile that was seen last; those that were never seen whole are left out."""
    hinted: dict[str, Stamps] = {}
    for record in (record for topic in topics.TILE_HINTS for record in _records(stack, topic, since)):
        event = record.headers.get(topics.HEADER_EVENT_ID, "")
        passed = stamps_in_header(record.headers.get(topics.HEADER_STAGES, ""))
        if event not in hinted or passed.hinted > hinted[event].hinted:
            hinted[event] = passed
    revisions: dict[str, dict[int, Stamps]] = defaultdict(dict)
    hashes: dict[tuple[str, int], str | None] = {}
    for record in _records(stack, topics.TILE_UPDATED, since):
        told = json.loads(record.value or b"{}")
        stamps = stamps_in_header(json.dumps(told.get("stages") or {}))
        committed = stamps.committed or told["built_at_ms"] * 1_000
        announced = stamps.announced or record.timestamp_ms * 1_000
        key = record.key or ""
        hashes[key, told["revision"]] = told["hash"]
        revisions[key][told["revision"]] = Stamps(
            taken=stamps.taken, built=stamps.built, committed=committed, announced=announced,
            sent=load.events.get((f"{told['z']}/{told['x']}/{told['y']}", told["revision"]), 0),
        )  # fmt: skip
    first: dict[str, dict[int, int]] = {}
    for key, known in revisions.items():
        marks = first.setdefault(key, {})
        for revision in sorted(known):
            for number in _marks(stack, run, key, revision, hashes[key, revision]):
                marks.setdefault(number, revision)
    seen: list[Edit] = []
    for edit in load.edits:
        told = [(key, first[key][edit.number]) for key in edit.tiles if edit.number in first.get(key, {})]
        shown = {int(key.partition(":")[0]) for key, _ in told}
        moments = [_heard(revisions[key], revision) for key, revision in told]
        if edit.status != b"202":
            load.unseen[f"answered {edit.status.decode()}"] += 1
        elif shown != set(ZOOMS):
            load.unseen[f"never shown at zoom {', '.join(map(str, sorted(set(ZOOMS) - shown)))}"] += 1
        elif None in moments:
            load.unseen["shown, and not told"] += 1
        if edit.status != b"202" or shown != set(ZOOMS) or None in moments:
            continue
        last = max((one for one in moments if one is not None), key=lambda one: one.sent)
        hint = hinted.get(f"{run}-{edit.number}", Stamps())
        edit.stamps = Stamps(
            received=edit.due, acknowledged=edit.stamps.acknowledged, stored=hint.stored, hinted=hint.hinted,
            taken=last.taken, built=last.built, committed=last.committed, announced=last.announced, sent=last.sent,
        )  # fmt: skip
        seen.append(edit)
    return seen


def _heard(known: Mapping[int, Stamps], revision: int) -> Stamps | None:
    """A revision's stamps; where the stream passed over it, those of the next one that it told."""
    return next((known[one] for one in sorted(known) if one >= revision and known[one].sent), None)


def _records(stack: Stack, topic: str, since: Mapping[str, Mapping[int, int]]) -> Iterator[Record]:
    for partition, offset in since[topic].items():
        while records := stack.log.read(topic, partition, offset):
            yield from records
            offset = records[-1].offset + 1


def _marks(stack: Stack, run: str, key: str, revision: int, content_hash: str | None) -> set[int]:
    """The numbers of this run's edits that a tile's object shows."""
    if content_hash is None:
        return set()
    stored = stack.tiles.get(tile_object(object_name(key, revision, content_hash)))
    if stored is None:
        raise SystemExit(f"the object of {key}, revision {revision} is gone: it cannot be said what it showed")
    return {int(number) for number in re.findall(rb"<%s-(\d+)>" % run.encode(), gzip.decompress(stored))}


def percentile(values: Sequence[float], share: float) -> float:
    """The value within which this share lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


STEPS: tuple[Stage, ...] = tuple(stage for stage in STAGES if stage != "received")


def tell(report: Report, name: str, load: Load, seen: Sequence[Edit]) -> tuple[float, float]:
    """Rows of one load; p50 and p99 of the whole way in milliseconds."""
    whole: list[float] = []
    for stage in STEPS:
        ages = [age * 1000 for edit in seen if (age := edit.stamps.age(stage)) is not None]
        if stage == "sent":
            whole = ages
        if ages:
            label = "SSE" if stage == "sent" else stage
            for share, word in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99")):
                report.row(f"{name}: edit to {label}, {word}", percentile(ages, share), "ms")
    took = {stage: [s * 1000 for e in seen if (s := e.stamps.seconds(stage)) is not None] for stage in STEPS}
    medians = {stage: statistics.median(values) for stage, values in took.items() if values}
    slow = sorted(whole)[int(len(whole) * 0.98) :]
    tail = [edit for edit in seen if (edit.stamps.age("sent") or 0) * 1000 >= (slow[0] if slow else 0)]
    tails = {
        stage: statistics.mean(values)
        for stage in STEPS
        if (values := [s * 1000 for e in tail if (s := e.stamps.seconds(stage)) is not None])
    }
    report.note(f"{name}, each stage since the one before it, p50 ms: {_listed(medians)}")
    report.note(f"{name}, the slowest 2 %, mean ms: {_listed(tails)}")
    if medians:
        limit, worst = (max(of, key=lambda stage: of[stage]) for of in (medians, tails))
        report.note(f"{name}: most of the time goes into '{limit}', of the slowest into '{worst}'")
    if load.cpu:
        used = {who: cores for who, cores in sorted(load.cpu.items(), key=lambda one: -one[1]) if cores >= 0.005}
        report.note(f"{name}, cores in use: {_listed(used, 2)}; generator late by at most {load.late_ms:.1f} ms")
    lost = len(load.edits) - len(seen)
    report.row(f"{name}: edits that were not seen", lost, "edits")
    if load.unseen:
        report.note(f"{name}: {', '.join(f'{count} {why}' for why, count in load.unseen.items())}")
    if not load.drained:
        report.note(f"{name}: not all was on the map {DRAIN_S:g} s after the last edit")
    return percentile(whole, 0.5), percentile(whole, 0.99) if not lost else math.inf


def _listed(values: Mapping[str, float], digits: int = 1) -> str:
    return ", ".join(f"{name} {value:.{digits}f}" for name, value in values.items())


# -- a browser -----------------------------------------------------------------------------------------------------

_WATCH = """() => {
  window.shown = [];
  geoAssets.map.on('sourcedata', (event) => {
    const id = event.sourceId === 'tiles' && event.tile?.tileID?.canonical;
    if (id) shown.push([`${id.z}/${id.x}/${id.y}`, performance.timeOrigin + performance.now()]);
  });
}"""


def in_a_browser(platform: Platform, city: City, count: int) -> list[float]:
    """Milliseconds from posting an edit until a real browser's map had loaded the tile that shows it, one at a time."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        raise SystemExit("--browser needs Chromium (Debian and Ubuntu have it in the package chromium)")
    took: list[float] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=CHROMIUM_FLAGS)
        page = browser.new_page(viewport={"width": 900, "height": 700})
        for edit in city.edits(count):
            key = next(tile for tile in edit.tiles if tile.startswith("16:"))
            tile = Tile.from_key(key)
            west, south, east, north = tile.bounds
            page.goto("about:blank")
            page.goto(f"{platform.tiles}/#16.3/{(south + north) / 2:.6f}/{(west + east) / 2:.6f}")
            deadline = time.monotonic() + 60
            while not page.evaluate(
                "() => Boolean(window.geoAssets?.map.loaded() && geoAssets.map.areTilesLoaded()"
                " && document.getElementById('badge').dataset.live === 'open')"
            ):
                if time.monotonic() > deadline:
                    raise SystemExit("the map did not load within 60 s")
                page.wait_for_timeout(50)
            page.wait_for_timeout(500)
            page.evaluate(_WATCH)
            due = now_us()
            # Not in an event loop: playwright has one in this thread.
            with socket.create_connection(("127.0.0.1", platform.edge_port), 30) as connection:
                connection.sendall(request(city.run, edit))
                assert connection.recv(4_096).startswith(b"HTTP/1.1 202")
            shown: list[float] = []
            while not shown and time.monotonic() < deadline:
                page.wait_for_timeout(20)
                shown = [at for path, at in page.evaluate("() => shown") if path == tile.path]
            if shown:
                took.append(max(shown) - due / 1000)
        browser.close()
    return took


# -- the whole -----------------------------------------------------------------------------------------------------


def prepare(where: Place, buildings: int) -> None:
    """Import the city and build its tiles: the map as it is before the first edit."""
    home = where.settings.home
    (home / "layers.yaml").write_text(LAYERS)
    file = home / "city.geojsonl"
    synthetic.write(file, buildings)
    with Stack(where.settings) as stack:
        stack.ensure()
        done = import_reading(stack, open_file(file, None), next(iter(stack.sources.values())))
        assert done.manifest is not None
        with TileBuilder(stack, "prepare") as builder:
            for result in builder.build(stack.ledger.manifest_keys(done.manifest.id)):
                assert result.outcome != "failed", result
    file.unlink()


@contextlib.contextmanager
def started(where: Place, profile: Path | None, lane: bool) -> Iterator[Platform]:
    """All of `up`, on free ports; without the lane the sensor and its runs build alone."""
    environment = {name: value for name, value in where.environment.items() if name != "GEO_ASSETS_HOME"} | {
        "GEO_ASSETS_LIVE_PORT": "0",
        "GEO_ASSETS_GARBAGE_GRACE_S": "86400",
        "GEO_ASSETS_LOG_LEVEL": "warning",
    }
    if not lane:
        environment["GEO_ASSETS_LIVE_WORKERS"] = "0"
    if profile is not None:
        environment |= sampler.environment(profile)
    with running(where.settings.home, **environment) as platform:
        yield platform


def measure(report: Report, stack_name: str, options: argparse.Namespace, profile: Path | None) -> None:
    """Everything about one stack."""
    with contextlib.ExitStack() as kept:
        folder = Path(kept.enter_context(tempfile.TemporaryDirectory()))
        where = kept.enter_context(place(stack_name, folder / "home"))
        prepare(where, options.buildings)
        platform = kept.enter_context(started(where, profile, not options.without_lane))
        stack = kept.enter_context(Stack(where.settings))
        city = City(options.buildings, stack.layers.reach_fraction, f"r{int(time.time()) % 100_000}")
        report.note(f"{stack_name}: {options.buildings:,} buildings, edits spread over {city.tiles} tiles of zoom 14")
        # What loads at the first edit, and at the first of each tile, is no part of it.
        uvloop.run(paced(platform, stack, city.run, city.edits(options.warm), min(20, options.rate)))
        measuring = None if profile is None else profile / sampler.MEASURING
        if measuring is not None:
            measuring.touch()
        if options.idle:
            since = begin(stack)
            load = uvloop.run(one_by_one(platform, stack, city.run, city.edits(options.idle)))
            tell(report, f"{stack_name}, idle", load, judge(stack, city.run, load, since))
        if options.browser:
            took = in_a_browser(platform, city, 5 if options.quick else 20)
            for share, word in ((0.5, "p50"), (0.95, "p95")):
                report.row(f"{stack_name}, idle: edit to browser, {word}", percentile(took, share), "ms")
        best: float | None = None
        for rate in LADDER if options.ladder else (options.rate,):
            seconds = min(options.seconds, 20) if options.ladder else options.seconds
            since = begin(stack)
            edits = city.edits(round(rate * seconds))
            load = uvloop.run(paced(platform, stack, city.run, edits, rate))
            p50, p99 = tell(report, f"{stack_name}, {rate:g}/s", load, judge(stack, city.run, load, since))
            goal = GOALS[stack_name]
            if p50 <= goal[0] and p99 <= goal[1]:
                best = rate
            elif options.ladder and p99 > 2_000:
                break
        if measuring is not None:
            measuring.unlink()
        held = f"{best:g} edits/s" if best is not None else "none of the rates"
        report.note(f"{stack_name}: the highest rate that holds {GOALS[stack_name]} ms (p50, p99): {held}")


def main() -> None:
    command = parser(__doc__ or "")
    command.add_argument("--stack", choices=("embedded", "production"), action="append", help="one, or twice for both")
    command.add_argument("--rate", type=float, default=100, help="edits a second (default 100)")
    command.add_argument("--seconds", type=float, default=60, help="how long (default 60)")
    command.add_argument("--ladder", action="store_true", help="rates upwards until one does not hold")
    command.add_argument("--idle", type=int, default=30, help="single edits on an idle system (default 30; 0: none)")
    command.add_argument("--warm", type=int, default=400, help="edits before anything is timed (default 400)")
    command.add_argument("--without-lane", action="store_true", help="sensor and runs alone build")
    command.add_argument("--buildings", type=int, default=100_000, help="of the city (default 100,000)")
    command.add_argument("--browser", action="store_true", help="also to the map in a real browser")
    command.add_argument("--profile", action="store_true", help="also where services spend their time")
    options = command.parse_args()
    if options.quick:
        options.buildings, options.rate, options.seconds = min(options.buildings, 10_000), 20, 5
        options.idle, options.warm = min(options.idle, 5), min(options.warm, 10)
    report = Report("latency", options.quick)
    here = stacks_here(report)
    for name in options.stack or ["embedded"]:
        if name not in here:
            continue
        with contextlib.ExitStack() as kept:
            profile = Path(kept.enter_context(tempfile.TemporaryDirectory())) if options.profile else None
            measure(report, name, options, profile)
            for one in sampler.profiles(profile) if profile is not None else ():
                for line in one.lines():
                    report.note(line)
    report.finish(options.json)


if __name__ == "__main__":
    main()
