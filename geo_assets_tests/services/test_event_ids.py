"""One event is found by its id in the logs of every service that it passes."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from geo_assets import logs
from geo_assets.events.signature import sign
from geo_assets.services import announce
from geo_assets.services.event_ids import DETAIL, ids_in, told_ids
from geo_assets_tests.services.one_service import Service, service
from geo_assets_tests.waiting import patient, until
from geo_assets_tests.world import World, feature

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def lines_about(one: Service, event_id: str) -> dict[str, dict[str, Any]]:
    """A service's JSON lines that name an event, by what they say."""
    found: dict[str, dict[str, Any]] = {}
    for text in one.lines:
        line = json.loads(text) if text.startswith("{") else {}
        if event_id in (line.get("event_id"), *line.get("event_ids", ())):
            found[line["event"]] = line
    return found


@pytest.mark.timeout(600)
def test_an_event_is_found_by_its_id_from_the_edge_to_the_announcement(tmp_path: Path) -> None:
    world = World(tmp_path / "home")
    home, logs = world.settings.home, {"GEO_ASSETS_LOG_FORMAT": "json", "GEO_ASSETS_LOG_LEVEL": "debug"}
    with service("edge", home, **logs) as edge, service("ingest", home, **logs) as ingest:
        with service("live", home, **logs) as live:
            for one in (edge, ingest, live):
                one.wait_until_ready()
            body = json.dumps({**feature(1), "event_id": "parcel-17"}).encode()
            headers = {"content-type": "application/json"} | sign(SECRET, "m1", int(time.time()), body)
            answer = httpx.post(
                f"{edge.url}/v1/features", content=body, headers=headers, trust_env=False, timeout=patient(60)
            )
            assert answer.json()["event_id"] == "parcel-17"

            until(lambda: "announced" in lines_about(live, "parcel-17"), 180, why="its tiles are announced", every=0.2)

        assert set(lines_about(edge, "parcel-17")) == {"accepted"}
        assert set(lines_about(ingest, "parcel-17")) == {"ingested"}
        told = lines_about(live, "parcel-17")
        assert set(told) == {"looked at", "announced"}
        assert told["announced"]["tile"] in {state.key for state in world.stack.ledger.scan(zooms=range(17))}
    world.close()


@given(st.lists(st.text(max_size=5), max_size=30), st.integers(1, 10))
def test_as_many_ids_as_fit_are_told_and_how_many_more_there_are(ids: list[str], most: int) -> None:
    told, distinct = told_ids(ids, most), list(dict.fromkeys(one for one in ids if one))

    assert told[:most] == distinct[:most]
    assert told[most:] == ([f"and {len(distinct) - most} more"] if len(distinct) > most else [])


@given(st.lists(st.text(max_size=5), max_size=5))
def test_ids_come_back_out_of_a_commits_details(ids: list[str]) -> None:
    assert ids_in(json.dumps({"ms": 1.0, DETAIL: ids})) == ids


@pytest.mark.parametrize("details", ["", "{}", "[]", '{"event_ids": 3}', '{"event_ids": ', '["event_ids"]'])
def test_details_that_name_no_ids_have_none(details: str) -> None:
    assert ids_in(details) == []


@pytest.mark.parametrize("level", ["debug", "info"])
def test_ids_are_looked_for_in_details_only_where_somebody_reads_the_line(
    tmp_path: Path, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    told = io.StringIO()
    monkeypatch.setattr(announce, "ids_in", lambda details: asked.append(details) or ["parcel-17"])
    before = structlog.get_config()
    logs.configure_events(level, "json", stream=told, cache=False)
    monkeypatch.setattr(announce, "log", structlog.get_logger())
    world = World(tmp_path / "home")
    try:
        world.edit(feature(1))
        world.build_dirty()
    finally:
        world.close()
        structlog.configure(**before)
    assert bool(asked) == ("parcel-17" in told.getvalue()) == (level == "debug")
