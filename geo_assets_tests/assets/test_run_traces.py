"""What a run builds of traced events is in their trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from geo_assets.events import topics
from geo_assets.services import tracing
from geo_assets.services.hint_traces import traces_of_run
from geo_assets.tiles.tile import Tile
from geo_assets_tests.dagster_world import world
from geo_assets_tests.services.collector import chain, collector
from resources.event_log.protocol import NewRecord
from sensors.tile_updates import tick

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{CALLER}-01"


def test_a_tile_that_a_run_builds_belongs_to_its_events_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    home = Tile(14, 9_327, 4_741)
    with collector() as seen, world(tmp_path, monkeypatch, otlp_endpoint=seen.url) as here:
        here.put_square("a", home)
        headers = {topics.HEADER_TRACEPARENT: SAMPLED}
        here.stack.log.append([NewRecord(topics.TILES, home.key, None, headers)])
        (request,) = tick(here.stack, here.instance).requests
        assert here.execute(request).success
        # A run that comes later finds the hint, and that it was answered.
        tracing.start(here.stack.settings, "run")
        again = traces_of_run(here.stack, [home.key])
        assert again is not None
        again.taken([home.key], tracing.now_ns())
        tracing.stop()

    (built,) = seen.named("build tile")
    assert (built.trace, built.parent, built.service) == (TRACE, CALLER, "geo-assets-run")
    assert built.attributes["geo_assets.builder"] == "run"
    (announced,) = seen.named("announce tile")
    spans = {span.id: span for span in seen.spans}
    assert [span.name for span in chain(spans, announced)] == ["build tile", "commit tile", "announce tile"]
