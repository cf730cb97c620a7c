"""Polygons of 41,000 vertices at once: what the lane promises beside times, which `benchmarks.burst` measures."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from geo_assets.flow.budget import VertexBudget
from geo_assets.services.lane.lane import Lane
from geo_assets.services.lane.reading import HintReader
from geo_assets.services.pool import WorkerPool
from geo_assets.tiles.decode import decode
from geo_assets_tests.waiting import patient
from geo_assets_tests.world import HERE, World, feature

LAYERS = "max_zoom: 14\nlayers: [{name: buildings, min_zoom: 13, min_pixels: 0}]\n"
GIANTS, SMALL = 4, 12
VERTICES = 41_000


def giant(number: int) -> bytes:
    """A coast with some noise, as a body that the log takes as it is (below 1 MB)."""
    lon, lat = HERE[0] + 0.1 * number, HERE[1]
    ring: list[list[float]] = []
    for step in range(VERTICES):
        turn = 2 * math.pi * step / VERTICES
        reach = 0.004 * (0.9 + 0.1 * math.sin(17 * turn))
        ring.append([round(lon + 2 * reach * math.cos(turn), 7), round(lat + reach * math.sin(turn), 7)])
    geometry = {"type": "Polygon", "coordinates": [[*ring, ring[0]]]}
    return json.dumps({**feature(number, 1), "geometry": geometry}, separators=(",", ":")).encode()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    home = tmp_path / "home"
    home.mkdir()
    (home / "layers.yaml").write_text(LAYERS)
    world = World(home, live_coalesce_ms=0)
    yield world
    world.close()


def test_in_a_burst_of_giants_the_lane_goes_on_polling_keeps_its_budget_and_loses_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    story: list[str] = []
    most = [0]
    poll, start, grants = HintReader.poll, WorkerPool.start, VertexBudget.grants

    def polled(self: HintReader, *asked: Any) -> Any:
        story.append("poll")
        return poll(self, *asked)

    def started(self: WorkerPool, work: Any, task: Any) -> Any:
        if hasattr(task, "key"):
            story.append(f"start {task.key}")
        return start(self, work, task)

    def granted(self: VertexBudget[Any]) -> Any:
        found = grants(self)
        most[0] = max(most[0], self.gauges(0.0).in_use)
        return found

    monkeypatch.setattr(HintReader, "poll", polled)
    monkeypatch.setattr(WorkerPool, "start", started)
    monkeypatch.setattr(VertexBudget, "grants", granted)
    # An announcement is the end of a build.
    lane = Lane(
        world.stack, "lane:1", step=lambda name, key: story.append(f"end {key}") if name == "announce" else None
    )
    try:
        lane.turn(0.0)
        for number in range(GIANTS):
            assert world.edit(giant(number)).letters == []
        while not any(one.startswith("start") for one in story):
            lane.turn(0.05)
        for number in range(SMALL):
            world.edit(feature(100 + number, 1, at=(HERE[0] + 0.05 * number, HERE[1] + 0.2)))
        deadline = time.monotonic() + patient(240)
        while lane.turn(0.05) or world.stack.ledger.dirty(1_000, unleased=False):
            assert time.monotonic() < deadline, "it does not come to rest"
    finally:
        lane.close()

    large = {one.removeprefix("start ") for one in story if one.startswith("start")}
    ends = {one.removeprefix("end "): at for at, one in enumerate(story) if one.startswith("end")}
    assert len(large) >= GIANTS, "giants are built in other processes"
    assert 0 < most[0] <= world.settings.vertex_budget
    # What is small waits for no giant but the one under way.
    assert max(at for key, at in ends.items() if key not in large) < max(at for key, at in ends.items() if key in large)
    # Between two polls no more than what its worker processes have finished.
    between = [part.split() for part in "\n".join(story).split("poll")]
    ended = [sum(word in large for word in part if word != "start") for part in between]
    assert max(ended) <= 2 * world.settings.live_build_workers + 1
    assert world.letters() == []
    seen = {
        (int(key.partition(":")[0]), f.id)
        for key in world.published()
        for layer in decode(world.tile(key))
        for f in layer.features
    }
    everyone = [*range(GIANTS), *range(100, 100 + SMALL)]
    assert seen == {(zoom, number) for zoom in (13, 14) for number in everyone}
