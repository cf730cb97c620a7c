"""Kill -9 of ingest, of the fast lane, of Dagster runs, of everything, and of services, while edits come in.

Nothing is lost or doubled, and no tile goes back.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import threading
import time
from typing import Any
from unittest import mock

import httpx
import psutil
import shapely
from dagster import AssetKey, AssetRecordsFilter, DagsterInstance

from geo_assets import dagster_home
from geo_assets.configuration import load_sources
from geo_assets.events.signature import sign
from geo_assets.services.ingest import HEAVY_BODY
from geo_assets.settings import Settings
from geo_assets.tiles.decode import decode
from geo_assets.tiles.tile import Tile
from geo_assets.tiles.workkey import tile_hash
from geo_assets_tests.running_platform import Listener, Platform
from geo_assets_tests.stacks import fields_of
from geo_assets_tests.waiting import patient, until
from geo_assets_tests.world import HERE, World, feature
from scripts.local_services import STANDARD, Services

FEATURES = 40
LAYERS = "max_zoom: 14\nlayers: [{name: buildings, min_zoom: 12, min_pixels: 0}]\n"


class Poster(threading.Thread):
    """Posts versions of forty buildings, each until the edge has answered 202."""

    def __init__(self, platform: Platform, edits: int, pause: float, giant_every: int) -> None:
        super().__init__(daemon=True)
        self._platform, self._edits, self._pause, self._giant_every = platform, edits, pause, giant_every
        self._source = load_sources(platform.settings)["city"]
        self.sent = 0
        self.last: dict[int, int] = {}
        self.start()

    def run(self) -> None:
        chance = random.Random(3)
        with httpx.Client(trust_env=False, timeout=patient(30)) as client:
            for number in range(self._edits):
                which, version = number % FEATURES, number // FEATURES + 1
                at = (HERE[0] + 0.004 * which + 0.0005 * chance.random(), HERE[1] + 0.002 * (which % 5))
                one = feature(which, version, at=at)
                if self._giant_every and number % self._giant_every == 0:
                    one = giant(one)
                body = json.dumps(one).encode()
                self._post(client, f"edit-{number}", body)
                self.last[which] = version
                self.sent += 1
                time.sleep(self._pause)

    def _post(self, client: httpx.Client, event_id: str, body: bytes) -> None:
        while True:
            headers = {
                "content-type": "application/geo+json",
                **sign(self._source.secrets[0], event_id, int(time.time()), body),
            }
            try:
                answer = client.post(f"{self._platform.edge}/v1/features", content=body, headers=headers)
                if answer.status_code == 202:
                    return
                assert answer.status_code == 503, answer.text
            except httpx.TransportError:
                pass
            time.sleep(0.2)


def giant(one: dict[str, Any]) -> dict[str, Any]:
    """The same building with so many vertices that ingest works on it beside what is light."""
    ring = one["geometry"]["coordinates"][0]
    sides = [shapely.LineString(side) for side in itertools.pairwise(ring)]
    dense = [list(side.interpolate(step / 1_000, normalized=True).coords[0]) for side in sides for step in range(1_000)]
    made = {**one, "geometry": {"type": "Polygon", "coordinates": [[*dense, dense[0]]]}}
    assert len(json.dumps(made)) > HEAVY_BODY
    return made


def processes(platform: Platform, what: str) -> list[psutil.Process]:
    """The ingest service, the fast lane's workers, or the processes of Dagster runs."""
    found: list[psutil.Process] = []
    for process in platform.left():
        try:
            command = " ".join(process.cmdline())
            if what in ("ingest", "live") and command.endswith(f"geo_assets.cli {what}"):
                found.append(process)
            if what == "run":
                parent = " ".join(process.parent().cmdline()) if process.parent() else ""
                if "dagster api grpc" in parent and "multiprocessing" in command and "resource_tracker" not in command:
                    found.append(process)
        except psutil.Error:
            continue
    return found


def kill(platform: Platform, what: str, services: Services | None) -> bool:
    """Kill -9 one of them, or a service that is started again seconds later; whether there was one."""
    if services is not None and what in STANDARD:
        services.kill(what)
        time.sleep(3)
        services.start(what)
        return True
    if what == "up":
        platform.kill()
        platform.lines.clear()
        platform.start()
        platform.wait_until_up()
        return True
    targets = processes(platform, what)
    for process in targets:
        process.kill()
    return bool(targets)


def ordeal(
    platform: Platform,
    *,
    edits: int,
    kills: list[str],
    every: float,
    pause: float,
    services: Services | None = None,
    giant_every: int = 0,
) -> None:
    """Post edits, kill one thing after the other meanwhile, wait until all is worked off, and look at everything.

    Args:
        platform: On layers of few zooms; it is stopped at the end.
        edits: How many, over forty buildings.
        kills: `ingest`, `live`, `run`, `up`, or names of services. Runs build edits where there is no fast lane.
        every: Seconds before each kill.
        pause: Seconds between edits.
        services: The services that may be killed.
        giant_every: Every so manyth edit is a large body; 0: none.
    """
    poster = Poster(platform, edits, pause, giant_every)
    # Whoever listens throughout sees no tile go back; a stream does not outlive the tile server.
    listener = None if {"up", *STANDARD} & set(kills) else Listener(f"{platform.tiles}/events")
    done: list[str] = []
    for what in kills:
        deadline = time.monotonic() + patient(120)
        time.sleep(every)
        while not kill(platform, what, services) and time.monotonic() < deadline:
            # No run is alive just now: another edit will bring one.
            assert platform.process is not None
            assert platform.process.poll() is None, f"geo-assets up ended by itself:\n{platform.text[-4000:]}"
            time.sleep(0.1)
        done.append(what)
    until(lambda: not poster.is_alive(), 600, why="every edit was posted", every=0.5)
    assert poster.sent == edits

    def quiet() -> bool:
        status = platform.status()
        tiles = status["tiles"]
        waiting = (
            tiles["dirty_live"] + tiles["dirty_backfill"] + sum(tiles["owed"].values()) + status["features"]["outbox"]
        )
        return not waiting and not any(status["lag"].values())

    until(quiet, 300, why="everything was worked off", every=2.0)
    if listener is not None:
        watched(listener, platform)
    assert platform.stop() == 0
    assert platform.left() == []
    verify(platform, poster.last)


def watched(listener: Listener, platform: Platform) -> None:
    """The stream never showed an older revision of a tile after a newer one, and ended with what is published."""
    shown: dict[str, int] = {}
    for event in listener.events:
        path = f"{event['z']}/{event['x']}/{event['y']}"
        assert event["revision"] >= shown.get(path, 0), f"{path} went back"
        shown[path] = event["revision"]
    with platform.stack() as stack:
        published = {Tile.from_key(s.key).path: s.content_hash for s in stack.ledger.scan()}
    last = {path: event["hash"] for path, event in listener.tiles().items() if event["hash"]}
    assert last == published
    listener.close()


def verify(platform: Platform, last: dict[int, int]) -> None:
    """The last version of every edit is in the tiles, once; ledger, store, announcements and catalog agree."""
    world = World(platform.home, **fields_of(platform.environment))
    try:
        assert {json.loads(f.feature_id): f.version for f in world.stack.features.scan()} == last
        states = world.published()
        assert states
        seen: dict[int, int] = {}
        for key, state in states.items():
            data = world.tile(key)
            assert tile_hash(data) == state.content_hash, key
            ids = [f.id for layer in decode(data) for f in layer.features]
            assert len(ids) == len(set(ids)), f"a feature is twice in {key}"
            for layer in decode(data):
                for one in layer.features:
                    assert one.properties["version"] == last[one.id], f"feature {one.id} in {key} is old"
                    seen[one.id] = one.properties["version"]
        assert seen == last
        told: dict[str, dict[str, Any]] = {}
        for event in world.announced():
            path = f"{event['z']}/{event['x']}/{event['y']}"
            if event["revision"] > told.get(path, {"revision": 0})["revision"]:
                told[path] = event
        everything = {s.key: s for s in world.stack.ledger.scan(published=False) if s.revision}
        assert {Tile.from_key(key).path: s.revision for key, s in everything.items()} == {
            p: e["revision"] for p, e in told.items()
        }
        shown = catalogued(platform.settings, list(everything))
        behind = {s.key: (s.revision, shown.get(s.key)) for s in everything.values() if shown.get(s.key) != s.revision}
        assert not behind, f"revisions of the ledger that the catalog does not know: {behind}"
        assert world.letters() == []
    finally:
        world.close()


def catalogued(settings: Settings, keys: list[str]) -> dict[str, int]:
    """Newest revision that the catalog has of each tile."""
    folder = settings.home / "dagster"
    found: dict[str, int] = {}
    # For as long as it takes: what is started later from here would look at this home.
    with (
        mock.patch.dict(os.environ, dagster_home.environment(settings, folder)),
        DagsterInstance.from_config(str(folder)) as instance,
    ):
        for start in range(0, len(keys), 20):
            wanted = AssetRecordsFilter(asset_key=AssetKey("tiles"), asset_partitions=keys[start : start + 20])
            for record in instance.fetch_materializations(wanted, limit=10_000).records:
                made = record.asset_materialization
                assert made is not None
                assert made.partition is not None
                found[made.partition] = max(found.get(made.partition, 0), int(made.metadata["revision"].value))  # pyright: ignore[reportArgumentType]
    return found
