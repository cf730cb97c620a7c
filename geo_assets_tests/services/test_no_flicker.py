"""Feature events, hints and announcements that come twice, shuffled and late: no map client sees a tile go back.

Ingest, the fast lane, runs that it overtakes, the tile server and its change stream are real; the mischief is made.
"""

from __future__ import annotations

import json
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from geo_assets.events import topics
from geo_assets.services.build import TileBuilder
from geo_assets.services.dead_letters import scan_topic
from geo_assets.services.lane.lane import Lane
from geo_assets.services.tileserver import create_app
from geo_assets.stack import Stack
from geo_assets.tiles.decode import decode
from geo_assets.tiles.tile import Tile
from geo_assets_tests.services.running import running
from geo_assets_tests.stacks import STACKS, changes_of
from geo_assets_tests.waiting import patient, until
from geo_assets_tests.world import HERE, World, feature
from resources.event_log.protocol import NewRecord, Record

LAYERS = "max_zoom: 14\nlayers: [{name: buildings, min_zoom: 12, min_pixels: 0}]\n"
BUILDINGS, VERSIONS = 6, 5
NEWEST = dict.fromkeys(range(BUILDINGS), VERSIONS) | {BUILDINGS: 1}
"""Building -> version; one more is built at the end."""


class MapClient(threading.Thread):
    """Listens to the change stream and fetches each tile that it is told of, as a map does.

    Args:
        url: Of the tile server.
        leaves_after: Events after which it goes and comes back from where it was; 0: it stays.
    """

    def __init__(self, url: str, leaves_after: int = 0) -> None:
        super().__init__(daemon=True)
        self._url, self._leaves_after = url, leaves_after
        self._point: str | None = None
        self._http = httpx.Client(base_url=url, timeout=patient(60), trust_env=False)
        self._versions: dict[tuple[str, int], int] = {}
        self.opened, self._ended = threading.Event(), threading.Event()
        self.connections = 0
        self.told: dict[str, list[int]] = defaultdict(list)
        """Revisions of each tile in the order in which the streams told them."""
        self.has: dict[str, int] = {}
        """Revision of each tile that it shows."""
        self.faults: list[str] = []
        self.start()
        assert self.opened.wait(patient(60))

    def run(self) -> None:
        try:
            while not self._ended.is_set():
                self._listen()
        except Exception as fault:
            if not self._ended.is_set():
                self.faults.append(f"{type(fault).__name__}: {fault}")

    def _listen(self) -> None:
        headers = {} if self._point is None else {"Last-Event-ID": self._point}
        heard, named = 0, False
        with httpx.stream(
            "GET", f"{self._url}/events", headers=headers, timeout=patient(60), trust_env=False
        ) as answer:
            self.connections += 1
            for line in answer.iter_lines():
                if self._ended.is_set():
                    return
                if line.startswith("id:"):
                    self._point, named = line[3:].strip(), True
                    self.opened.set()
                elif line.startswith("event:") and line[6:].strip() in ("reset", "dropped"):
                    self.faults.append(line)
                elif line.startswith("data: {") and '"revision"' in line:
                    heard += 1
                    self._hear(json.loads(line[6:]))
                elif not line:
                    # What it missed comes without a point to resume from: it does not leave in the middle of that.
                    if self._leaves_after and named and heard >= self._leaves_after:
                        return
                    named = False

    def _hear(self, event: dict[str, Any]) -> None:
        path = f"{event['z']}/{event['x']}/{event['y']}"
        self.told[path].append(event["revision"])
        if event["revision"] <= self.has.get(path, 0):
            return  # As every client of ours does.
        answer = self._http.get(f"/tiles/{path}.mvt")
        if answer.status_code not in (200, 204):
            self.faults.append(f"{path}: {answer.status_code}")
            return
        revision = int(answer.headers["x-tile-revision"])
        if revision < max(event["revision"], self.has.get(path, 0)):
            self.faults.append(f"{path}: told {event['revision']}, showed {self.has.get(path)}, was served {revision}")
        self.has[path] = revision
        for number, version in versions_in(answer.content).items():
            if version < self._versions.get((path, number), 0):
                self.faults.append(f"{path}: building {number} went back to version {version}")
            self._versions[path, number] = version

    def close(self) -> None:
        self._ended.set()
        self._http.close()


def versions_in(data: bytes) -> dict[int, int]:
    """Building -> version, of a tile."""
    return {f.id: f.properties["version"] for layer in decode(data) for f in layer.features} if data else {}


class Mischief:
    """Delivers everything more than once, in no order."""

    def __init__(self, world: World, chance: random.Random) -> None:
        self.world, self.chance = world, chance
        self.counts: dict[str, int] = defaultdict(int)
        events = [
            (number, version, f"{number}-{version}-{copy}")
            for number in range(BUILDINGS)
            for version in range(1, VERSIONS + 1)
            for copy in ("a", "a", "b")  # The same event twice, and what it says under another id.
        ]
        chance.shuffle(events)
        self.waiting = events

    def events(self, count: int) -> None:
        """The next feature events; often as after a crash of ingest before its offset moved: once more."""
        now, self.waiting = self.waiting[:count], self.waiting[count:]
        records = [self.world.send(building(number, version), event_id=event_id) for number, version, event_id in now]
        if not records:
            return
        for _ in range(self.chance.choice((1, 2))):
            for outcome in self.world.ingest.work(records):
                for name, many in outcome.counts.items():
                    self.counts[name] += many

    def hints(self) -> None:
        """Hints of any age once more, to any partition; and the sensor's marks."""
        for topic in topics.TILE_HINTS:
            self._again(topic, 6, anywhere=True)
        if self.chance.random() < 0.5:
            self.world.mark_hints()

    def announcements(self) -> None:
        """Announcements of any age once more."""
        self._again(topics.TILE_UPDATED, 12)

    def _again(self, topic: str, most: int, *, anywhere: bool = False) -> None:
        log = self.world.stack.log
        known: list[Record] = list(scan_topic(log, topic))
        if not known:
            return
        partitions = sorted(log.extents(topic))
        late = self.chance.sample(known, min(len(known), self.chance.randint(1, most)))
        log.append(
            [
                NewRecord(
                    topic, one.key, one.value, one.headers,
                    partition=self.chance.choice(partitions) if anywhere else one.partition,
                )
                for one in late
            ]
        )  # fmt: skip

    def overtaken(self, meanwhile: Callable[[], object]) -> None:
        """A run is held up before it commits: its lease ends, and others build its tiles with newer edits."""
        owner = f"run {self.chance.random()}"
        held_up_at, left = self.chance.choice(("read features", "put", "commit")), [True]

        def hold_up(step: str, _key: str) -> None:
            if step == held_up_at and left:
                left.clear()
                self.world.stack.ledger.free(owner)
                self.events(4)
                meanwhile()

        self.world.mark_hints()
        dirty = [state.key for state in self.world.stack.ledger.dirty(4)]
        with TileBuilder(self.world.stack, owner, inline=True, step=hold_up) as run:
            for result in run.build(dirty):
                assert result.outcome != "failed", result


def building(number: int, version: int) -> dict[str, Any]:
    """Buildings that share tiles, and stand elsewhere in each version."""
    return feature(number, version, at=(HERE[0] + 0.002 * number + 0.0004 * version, HERE[1] + 0.0003 * version))


@pytest.fixture(params=STACKS)
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    home = tmp_path / "home"
    home.mkdir()
    (home / "layers.yaml").write_text(LAYERS)
    with changes_of(request.param) as changes:
        world = World(home, live_coalesce_ms=0, **changes)
        yield world
        world.close()


def test_whatever_comes_twice_shuffled_or_late_no_client_sees_a_tile_go_back(world: World) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    mischief = Mischief(world, random.Random(seed))
    ledger = world.stack.ledger
    with Stack(world.settings) as ports:
        app = create_app(ports.ledger, ports.tiles, ports.log, ports.layers, world.settings)
        lane = Lane(world.stack, "lane:1")
        with running(app, on_stop=app.state.end_streams) as url:
            stays, comes_back = MapClient(url), MapClient(url, leaves_after=3)
            try:
                lane.turn(0.0)
                rounds = 0
                while mischief.waiting:
                    mischief.events(6)
                    mischief.hints()
                    mischief.announcements()
                    if rounds % 3 == 1:
                        mischief.overtaken(lambda: sum(lane.turn(0.05) for _ in range(3)))
                    lane.turn(0.1)
                    rounds += 1
                mischief.hints()
                mischief.announcements()
                world.edit(building(BUILDINGS, 1))
                until(
                    lambda: not lane.turn(0.05) and not ledger.dirty(1_000, unleased=False), 240, why="nothing is dirty"
                )
                states = {Tile.from_key(s.key).path: s for s in ledger.scan(published=False) if s.revision}
                last = {path: state.revision for path, state in states.items()}
                for client in (stays, comes_back):
                    until(
                        lambda client=client: client.faults or client.has == last,
                        240,
                        why="the clients show what there is",
                    )
                with httpx.Client(base_url=url, trust_env=False, timeout=patient(30)) as http:
                    served = {path: http.get(f"/tiles/{path}.mvt").content for path in states}
            finally:
                stays.close()
                comes_back.close()
                lane.close()
    assert stays.faults == []
    assert comes_back.faults == []
    assert comes_back.connections > 2
    assert mischief.counts["stale"], "no edit came after a newer one"
    assert mischief.counts["duplicate"], "no edit came twice"
    back = {path: told for path, told in stays.told.items() if told != sorted(set(told))}
    assert not back, f"revisions that did not rise: {back}"
    assert any(len(told) > 2 for told in stays.told.values()), "nothing was ever changed again"
    seen: dict[int, int] = {}
    for path, data in served.items():
        for number, version in versions_in(data).items():
            assert version == NEWEST[number], f"building {number} in {path} is old"
            seen[number] = version
    assert seen == NEWEST
    assert world.letters() == []
