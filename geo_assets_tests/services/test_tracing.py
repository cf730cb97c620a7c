"""With traces on, a collector sees one trace from the edge to the announcement; off, nothing of it is there."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_assets import configuration
from geo_assets.events import topics
from geo_assets.events.signature import sign
from geo_assets.services import span_sending, tracing
from geo_assets.services.edge import create_app
from geo_assets.services.lane.lane import Lane
from geo_assets.services.tracing import MOST_LINKS, TileTraces, headers_with, parent_in, traces_in
from geo_assets_tests.running_platform import free_ports
from geo_assets_tests.services.collector import Collector, chain, collector
from geo_assets_tests.services.running import running
from geo_assets_tests.waiting import patient
from geo_assets_tests.world import HERE, World, feature, settings_for
from resources.event_log.protocol import Record

pytestmark = pytest.mark.timeout(300)

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{CALLER}-01", f"00-{TRACE}-{CALLER}-00"

TOLD = {
    "geo_assets.event_id", "geo_assets.source", "geo_assets.outcome", "geo_assets.tile", "geo_assets.tiles",
    "geo_assets.builder", "geo_assets.records", "http.request.method", "http.response.status_code",
}  # fmt: skip
"""All that spans may say."""


@pytest.fixture(autouse=True)
def _(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield
    tracing.stop(0.0)


class Pipeline:
    """Edge, ingest and lane of one home, in this process."""

    def __init__(self, world: World, url: str, lane: Lane) -> None:
        self.world, self.url, self.lane = world, url, lane
        self._sent = 0

    def post(self, body: Any, kind: str = "features", **headers: str) -> httpx.Response:
        self._sent += 1
        content = json.dumps(body).encode()
        signed = sign(SECRET, f"m{self._sent}", int(time.time()), content)
        given = {"content-type": "application/json"} | signed | headers
        return httpx.post(f"{self.url}/v1/{kind}", content=content, headers=given, trust_env=False, timeout=patient(60))

    def work(self) -> None:
        """Until everything is announced."""
        while self.world.ingest.run_once():
            pass
        self.build()

    def build(self) -> None:
        while self.lane.turn(0.05) or self.world.stack.ledger.dirty(1, unleased=False):
            pass

    def records(self, topic: str) -> list[Record]:
        log = self.world.stack.log
        return [one for part, extent in log.extents(topic).items() for one in log.read(topic, part, extent.begin)]


@contextmanager
def pipeline(home: Path, **settings: Any) -> Iterator[Pipeline]:
    """A pipeline that traces as its settings say."""
    world = World(home, **settings)
    tracing.start(world.settings, "test")
    lane = Lane(world.stack, "lane:1", coalesce_s=0.0)
    stack = world.stack
    app = create_app(stack.log, stack.guard, stack.tiles, configuration.load_sources(world.settings), world.settings)
    try:
        with running(app) as url:
            lane.turn(0.0)
            yield Pipeline(world, url, lane)
    finally:
        lane.close()
        world.close()


@pytest.fixture(scope="module")
def seen() -> Iterator[Collector]:
    with collector() as made:
        yield made


def counted(outcome: str) -> float:
    return tracing.SPANS.labels(outcome)._value.get()  # pyright: ignore[reportPrivateUsage]


# -- on ------------------------------------------------------------------------------------------------------------


def test_one_trace_leads_from_the_caller_through_the_edge_to_the_announcement_of_every_tile(
    tmp_path: Path, seen: Collector
) -> None:
    seen.spans.clear()
    with pipeline(tmp_path / "home", otlp_endpoint=seen.url) as here:
        assert here.post({**feature(1), "event_id": "parcel-17"}, traceparent=SAMPLED).status_code == 202
        here.work()
        tiles = set(here.world.published())
        announced = here.records(topics.TILE_UPDATED)
        tracing.stop()

    spans = {span.id: span for span in seen.spans}
    assert len(tiles) >= 5
    of_tiles = {span.attributes["geo_assets.tile"]: chain(spans, span) for span in seen.named("announce tile")}
    assert set(of_tiles) == tiles
    for key, way in of_tiles.items():
        names = ["POST /v1/features", "ingest", "send hints", "build tile", "commit tile", "announce tile"]
        assert [span.name for span in way] == names
        assert {span.trace for span in way} == {TRACE}
        assert way[0].parent == CALLER
        assert {span.attributes["geo_assets.event_id"] for span in way[:2]} == {"parcel-17"}
        assert {span.attributes["geo_assets.source"] for span in way[:2]} == {"city"}
        assert {span.attributes["geo_assets.tile"] for span in way[3:]} == {key}
        outcomes = [span.attributes["geo_assets.outcome"] for span in way]
        assert outcomes == ["queued", "applied", "sent", "built", "committed", "sent"]
        assert all(span.began_ns <= span.ended_ns for span in way)
        assert [span.began_ns for span in way] == sorted(span.began_ns for span in way)
    # Whoever reads the announcements can go on with it.
    last = {record.key: parent_in(record.headers[topics.HEADER_TRACEPARENT]) for record in announced}
    assert {key: f"{said.span_id:016x}" for key, said in last.items() if said} == {
        key: way[-1].id for key, way in of_tiles.items() if key is not None
    }

    (event,), (batch,) = seen.named("ingest"), seen.named("ingest batch")
    assert event.links == ((batch.trace, batch.id),)
    assert batch.trace != TRACE
    assert {span.service for span in seen.spans} == {"geo-assets-test"}


def test_rule_12_spans_tell_no_payload_and_not_where_anything_is(tmp_path: Path, seen: Collector) -> None:
    seen.spans.clear()
    position = {"device_id": "bus 17", "lon": HERE[0], "lat": HERE[1], "time": "2026-05-01T12:00:00Z"}
    fence = {**feature(1), "layer": None, "action": "create"}
    with pipeline(tmp_path / "home", otlp_endpoint=seen.url) as here:
        assert here.post(position, "positions", traceparent=SAMPLED).status_code == 202
        assert topics.HEADER_TRACEPARENT not in here.records(topics.POSITIONS)[0].headers
        here.world.send(position, kind="positions", traceparent=SAMPLED)
        assert here.post(fence, "fences").status_code in (202, 400)
        here.post(feature(1, name="a secret name"))
        here.post({**feature(2), "geometry": {"type": "Polygon", "coordinates": [[[24.9441, 60.169]]]}})
        here.work()
        tracing.stop()

    assert seen.spans
    assert {name for span in seen.spans for name in span.attributes} <= TOLD
    text = repr(seen.spans)
    assert not [one for one in ("24.94", "60.16", "bus 17", "secret") if one in text]


def test_a_build_that_answers_many_events_belongs_to_one_and_is_linked_to_as_many_as_may_be(
    tmp_path: Path, seen: Collector
) -> None:
    seen.spans.clear()
    with pipeline(tmp_path / "home", otlp_endpoint=seen.url) as here:
        for number in range(MOST_LINKS + 4):
            here.post({**feature(number, name=str(number)), "event_id": f"e{number}"})
            if number % 2:  # Some are stored together, and share a hint; others each have theirs.
                while here.world.ingest.run_once():
                    pass
        here.build()
        tracing.stop()

    spans = {span.id: span for span in seen.spans}
    events = {span.trace for span in seen.named("POST /v1/features")}
    built = [span for span in seen.named("build tile") if spans[span.parent].name == "send hints"]
    assert len(events) == MOST_LINKS + 4
    assert built
    for span in built:
        linked = [trace for trace, _ in span.links]
        assert len(linked) == MOST_LINKS
        assert set(linked) <= events
        assert {spans[one].name for _, one in span.links} <= {"send hints", "ingest"}
        assert len(set(span.links)) == MOST_LINKS


def test_what_a_caller_decided_counts_and_of_the_others_as_many_as_the_ratio_says(
    tmp_path: Path, seen: Collector
) -> None:
    seen.spans.clear()
    with pipeline(tmp_path / "home", otlp_endpoint=seen.url, trace_ratio=0) as here:
        here.post(feature(1))
        here.post(feature(2), traceparent=UNSAMPLED)
        here.work()
        # The header goes on all the same, so that ingest begins no other.
        said = [parent_in(record.headers[topics.HEADER_TRACEPARENT]) for record in here.records(topics.RAW)]
        assert [one.sampled for one in said if one is not None] == [False, False]
        assert not [one for one in here.records(topics.TILES) if topics.HEADER_TRACEPARENT in one.headers]

        here.post(feature(3), traceparent=SAMPLED)
        here.work()
        tracing.stop()

    traced = seen.named("build tile")
    assert traced
    assert {span.trace for span in seen.spans if span.name != "ingest batch"} == {TRACE}
    assert len(seen.named("ingest")) == len(seen.named("ingest batch")) == 1


GARBLED = ["", "00", "x" * 5_000, f"ff-{TRACE}-{CALLER}-01", f"00-{'0' * 32}-{CALLER}-01", f"{SAMPLED}, {SAMPLED}"]


def test_a_garbled_traceparent_is_ignored_and_its_event_has_a_trace_of_its_own(tmp_path: Path, seen: Collector) -> None:
    seen.spans.clear()
    with pipeline(tmp_path / "home", otlp_endpoint=seen.url) as here:
        for number, text in enumerate(GARBLED):
            assert here.post(feature(number), traceparent=text).status_code == 202
        tracing.stop()

    assert [span.parent for span in seen.spans] == [""] * len(GARBLED)
    assert len({span.trace for span in seen.spans} - {TRACE, "0" * 32}) == len(GARBLED)


@given(st.text(max_size=80) | st.from_regex(r"\A[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.{0,9})?\Z"))
def test_whatever_a_header_says_it_is_a_trace_or_none(text: str) -> None:
    said = parent_in(text)
    if said is None:
        assert traces_in({topics.HEADER_TRACEPARENT: text, topics.HEADER_TRACE_LINKS: text}) == []
    else:
        assert text[3:52] == f"{said.trace_id:032x}-{said.span_id:016x}"
    assert (TRACE in text) <= (said is None or said.trace_id > 0)
    TileTraces("lane").hinted("0:", {topics.HEADER_TRACEPARENT: text})


@given(st.lists(st.integers(1, 30), max_size=20))
def test_of_the_events_of_a_hint_the_newest_and_some_others_are_handed_on(numbers: list[int]) -> None:
    traces = [f"00-{TRACE}-{number:016x}-01" for number in numbers]
    assert traces_in(headers_with(traces)) == list(dict.fromkeys(traces))[:MOST_LINKS]


# -- a collector that takes nothing --------------------------------------------------------------------------------


def test_a_collector_that_hangs_holds_nothing_up_and_what_it_does_not_take_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_sending.Sender.__init__, "__kwdefaults__", {"most": 10, "every_s": 0.01})
    # It hangs for longer than all of this takes.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", f"{patient(60):.0f}")
    before = counted("dropped")
    with collector() as hanging:
        hanging.free.clear()
        with pipeline(tmp_path / "home", otlp_endpoint=hanging.url) as here:
            here.post(feature(1))
            assert hanging.came.wait(patient(30))
            here.post(feature(2))
            here.work()
            assert len(here.world.announced()) >= 5
            tracing.stop(0.1)
        # Up to here it never answered: one request hangs, ten spans waited, and the others were dropped.
        assert (hanging.requests, hanging.spans, hanging.free.is_set()) == (1, [], False)
        assert counted("dropped") - before > 10


def test_a_collector_that_refuses_costs_the_spans_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_ports(1)[0]}")
    sent, dropped = counted("sent"), counted("dropped")
    with pipeline(tmp_path / "home") as here:
        assert tracing.ACTIVE is not None
        here.post(feature(1))
        here.work()
        assert len(here.world.announced()) >= 5
        tracing.stop()
    assert counted("sent") == sent
    assert counted("dropped") - dropped >= 19


# -- off -----------------------------------------------------------------------------------------------------------


def test_without_a_collectors_address_nothing_of_opentelemetry_is_imported(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from geo_assets.services import edge, hint_traces, ingest, tracing
from geo_assets.services.lane import service
from geo_assets_tests.world import World
from resources.event_log.protocol import NewRecord
world = World(Path({str(tmp_path / "home")!r}))
tracing.start(world.settings, "edge")
assert tracing.ACTIVE is None
lane = service.Lane(world.stack, "lane:1")
lane.turn(0.0)
world.stack.log.append([NewRecord("tiles", "0:", None)])
while not lane.built:
    lane.turn(0.05)
lane.close()
world.close()
tracing.stop()
print(sorted(name for name in sys.modules if name.startswith(("opentelemetry", "google.protobuf", "requests"))))
"""
    environment = {"PATH": "/usr/bin:/bin", "OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=patient(120),
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("broken", ["absent", "refused"])
def test_traces_that_cannot_begin_are_told_of_and_end_no_service(
    broken: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise ModuleNotFoundError if broken == "absent" else ValueError

    monkeypatch.setattr(span_sending, "OtlpTracer", fails)
    settings = settings_for(tmp_path / "home", otlp_endpoint="http://127.0.0.1:4318")

    assert not tracing.start(settings, "edge")
    assert tracing.ACTIVE is None
    assert "no traces" in "".join(capfd.readouterr())


def test_a_tile_costs_a_builder_nothing_where_nobody_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Callable[..., Any]] = []
    monkeypatch.setattr(tracing, "parent_in", lambda text: looked.append(text))
    assert tracing.tile_traces("lane") is None
    TileTraces("lane").hinted("0:", {topics.HEADER_EVENT_ID: "e"})
    assert looked == []
