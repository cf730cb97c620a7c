"""The whole of it as a person meets it: `geo-assets up --sample`, an edit, the map's tiles, Dagster's catalog."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import shapely

from geo_assets.geofence.triggers import NAMES
from geo_assets.ports import tile_object
from geo_assets.tiles.tile import Tile
from geo_assets_tests.geofence_world import seen
from geo_assets_tests.ordeal import LAYERS, ordeal
from geo_assets_tests.running_platform import Listener, Platform, free_ports, paths, running
from geo_assets_tests.stacks import STACKS, environment_of
from geo_assets_tests.waiting import patient, until
from geo_assets_tests.webhook import Webhook, webhook
from geo_assets_tests.world import feature, settings_for, tiles_touched

pytestmark = pytest.mark.timeout(600)

MATERIALIZED = """
query($key: AssetKeyInput!) {
  assetNodeOrError(assetKey: $key) {
    ... on AssetNode { partitionStats { numMaterialized numFailed numPartitions } }
  }
}
"""

LATEST = """
query($key: AssetKeyInput!, $partition: String!) {
  assetNodeOrError(assetKey: $key) {
    ... on AssetNode {
      assetMaterializations(partitions: [$partition], limit: 1) {
        timestamp
        metadataEntries { label ... on TextMetadataEntry { text } ... on IntMetadataEntry { intValue } }
      }
    }
  }
}
"""

RUNS = '{ runsOrError(filter: {pipelineName: "build_tiles"}) { ... on Runs { results { id status } count } } }'


@pytest.fixture(scope="module")
def receiver() -> Iterator[Webhook]:
    """Who is told of what fails."""
    with webhook() as made:
        yield made


@pytest.fixture(scope="module", params=STACKS)
def up(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, receiver: Webhook
) -> Iterator[Platform]:
    with (
        environment_of(request.param) as environment,
        running(
            tmp_path_factory.mktemp("up") / "home",
            "--sample",
            GEO_ASSETS_ALERT_WEBHOOK_URLS=receiver.url,
            **environment,
        ) as platform,
    ):
        yield platform


def published(platform: Platform) -> dict[str, str | None]:
    """Every tile of the ledger with its content hash, by path."""
    with platform.stack() as stack:
        return {Tile.from_key(s.key).path: s.content_hash for s in stack.ledger.scan()}


def building(platform: Platform) -> dict[str, Any]:
    return json.loads((platform.home / "edit-a-building.geojson").read_text())


def runs(platform: Platform) -> int:
    return platform.graphql(RUNS)["runsOrError"]["count"]


def materialization(platform: Platform, key: str) -> dict[str, Any] | None:
    node = platform.graphql(LATEST, key={"path": ["tiles"]}, partition=key)["assetNodeOrError"]
    found = node["assetMaterializations"]
    if not found:
        return None
    return {e["label"]: e.get("text", e.get("intValue")) for e in found[0]["metadataEntries"]}


def quiet(platform: Platform) -> None:
    """Wait until nothing is dirty and nothing is owed."""

    def nothing() -> bool:
        status = platform.status()
        tiles = status["tiles"]
        return not (
            tiles["dirty_live"] or tiles["dirty_backfill"] or any(tiles["owed"].values()) or any(status["lag"].values())
        )

    until(nothing, 90, why="nothing is dirty", every=1.0)


def test_it_comes_up_with_a_city_its_catalog_and_a_command_to_try(up: Platform) -> None:
    tiles = published(up)
    assert 400 <= len(tiles) <= 550
    assert {int(path.partition("/")[0]) for path in tiles} == set(range(19))
    stats = up.graphql(MATERIALIZED, key={"path": ["tiles"]})["assetNodeOrError"]["partitionStats"]
    assert stats["numMaterialized"] >= len(tiles)
    assert stats["numFailed"] == 0
    for wanted in (up.tiles, up.dagster, f"{up.edge}/v1/features", "geo-assets", "edit-a-building.geojson"):
        assert wanted in up.text
    assert httpx.get(f"{up.tiles}/", trust_env=False, timeout=patient(30)).status_code == 200
    assert httpx.get(f"{up.tiles}/tiles.json", trust_env=False, timeout=patient(30)).json()["vector_layers"]


def test_an_edit_that_moves_a_building_changes_exactly_its_tiles(up: Platform) -> None:
    quiet(up)
    before, count = published(up), runs(up)
    edit = building(up)
    with up.stack() as stack:
        old = stack.features.get("demo", json.dumps(edit["id"]))
        assert old is not None
        buffer, deepest = stack.layers.reach_fraction, stack.layers.max_zoom
    touched = paths(
        sorted(
            tiles_touched([shapely.from_wkb(old.geometry), edit["geometry"]], range(old.min_zoom, deepest + 1), buffer)
        )
    )
    listener = Listener(f"{up.tiles}/events")

    started = time.monotonic()
    answer = up.post(edit)
    assert answer["status"] == "queued"
    until(
        lambda: set(listener.tiles()) and set(listener.tiles()) == changed(before, published(up)),
        90,
        why="SSE named what changed",
        every=0.2,
    )
    print(f"posted to announced: {time.monotonic() - started:.1f} s")
    quiet(up)
    listener.close()

    after = published(up)
    assert changed(before, after) <= touched
    assert set(listener.tiles()) == changed(before, after)
    for path, event in listener.tiles().items():
        assert event["hash"] == after[path]
        assert (up.etag(path) or "").strip('W/"').startswith(str(after[path])[:16])
        shown = materialization(up, Tile.from_path(path).key)
        assert shown is not None
        assert (shown["revision"], shown["content_hash"]) == (event["revision"], after[path])
    with up.stack() as stack:
        moved = stack.features.get("demo", json.dumps(edit["id"]))
        assert moved is not None
        assert moved.version == edit["version"]
    assert runs(up) == count, "the fast lane builds, without a run"


@pytest.fixture
def new_page(browser: Any) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": 1200, "height": 800})
    yield page
    page.close()  # Or it goes on drawing beside the tests that follow.


@pytest.mark.browser
def test_the_map_shows_an_edit_without_a_reload(up: Platform, new_page: Any, tmp_path: Path) -> None:
    quiet(up)
    edit = building(up)
    with up.stack() as stack:
        stored = stack.features.get("demo", json.dumps(edit["id"]))
        assert stored is not None
        west, south, east, north = stored.bbox or (0, 0, 0, 0)
    page = new_page
    faults: list[str] = []
    fetched: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on(
        "request",
        lambda r: fetched.append(r.url.partition("/tiles/")[2].partition(".")[0]) if "/tiles/" in r.url else None,
    )
    page.goto(f"{up.tiles}/#17/{(south + north) / 2:.5f}/{(west + east) / 2:.5f}")
    until(
        lambda: page.evaluate("() => Boolean(window.geoAssets?.map.areTilesLoaded())"),
        why="the map is drawn",
        every=0.2,
    )
    until(
        lambda: page.evaluate("() => document.getElementById('badge').dataset.live === 'open'"),
        why="the page listens",
        every=0.2,
    )
    page.evaluate("() => { window.stayed = true }")
    before = page.screenshot(path=str(tmp_path / "before.png"))
    fetched.clear()
    listener = Listener(f"{up.tiles}/events")

    # The building grows by a storey and moves a little further: whatever the earlier tests did to it, this is new.
    shift = (0.0004, 0.0)
    again = {**edit, "version": stored.version + 1, "properties": {**edit["properties"], "levels": 99}}
    again["geometry"] = json.loads(
        shapely.to_geojson(shapely.transform(shapely.from_wkb(stored.geometry), lambda xy: xy + shift))
    )
    up.post(again)
    until(
        lambda: any(path.startswith("17/") for path in listener.tiles()), 90, why="the change was announced", every=0.2
    )
    quiet(up)
    listener.close()
    until(
        lambda: page.evaluate("() => window.geoAssets.map.areTilesLoaded()") and fetched,
        why="tiles were fetched again",
        every=0.2,
    )
    page.wait_for_timeout(1500)
    after = page.screenshot(path=str(tmp_path / "after.png"))

    assert page.evaluate("() => window.stayed === true")
    assert set(fetched) <= set(listener.tiles())
    assert before != after
    assert faults == []


def changed(before: dict[str, str | None], after: dict[str, str | None]) -> set[str]:
    return {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}


def test_the_same_edit_again_is_a_duplicate_and_starts_no_run(up: Platform) -> None:
    edit = building(up)
    up.post(edit, "--event-id", "first")
    quiet(up)
    count, before = runs(up), published(up)

    assert up.post(edit, "--event-id", "first")["status"] == "duplicate"
    up.post(edit, "--event-id", "second")
    older = {**edit, "version": edit["version"] - 1}
    up.post(older, "--event-id", "third")
    time.sleep(8)
    quiet(up)

    assert (runs(up), published(up)) == (count, before)


def test_the_same_version_with_other_content_is_a_dead_letter_that_names_the_conflict(up: Platform) -> None:
    one = feature("conflict", 1, name="one")
    up.post(one, "--event-id", "conflict-base")
    up.post({**one, "properties": {"name": "another"}}, "--event-id", "conflict")
    until(lambda: up.status()["dead_letters"].get("version_conflict"), why="the conflict is a dead letter", every=0.2)
    assert "version_conflict" in up.command("dead-letters", "list", "--reason", "version_conflict").stdout


def test_a_wrong_signature_is_401_and_leaves_nothing_in_the_log(up: Platform) -> None:
    before = up.status()["lag"]
    answer = httpx.post(
        f"{up.edge}/v1/features",
        content=b"{}",
        headers={
            "content-type": "application/geo+json",
            "webhook-id": "x",
            "webhook-timestamp": str(int(time.time())),
            "webhook-signature": "v1,AAAA",
        },
        trust_env=False,
        timeout=patient(30),
    )
    assert answer.status_code == 401
    assert answer.headers["content-type"] == "application/problem+json"
    assert up.status()["lag"] == before


def test_a_backfill_from_the_command_line_skips_what_did_not_change(up: Platform) -> None:
    quiet(up)
    before = published(up)
    done = up.command("backfill", "--bbox", "24.94,60.165,24.95,60.175", "--zooms", "14-16", "--wait")
    assert done.returncode == 0, done.stderr
    assert "up to date" in done.stdout
    assert published(up) == before


def test_selected_partitions_materialized_in_the_ui_are_reported(up: Platform) -> None:
    quiet(up)
    keys = [Tile.from_path(path).key for path in sorted(published(up)) if path.startswith("15/")][:3]
    launch = """
    mutation($params: LaunchBackfillParams!) {
      launchPartitionBackfill(backfillParams: $params) {
        __typename
        ... on LaunchBackfillSuccess { backfillId }
        ... on PythonError { message }
      }
    }
    """
    params = {"assetSelection": [{"path": ["tiles"]}], "partitionNames": keys}
    started = up.graphql(launch, params=params)["launchPartitionBackfill"]
    assert started["__typename"] == "LaunchBackfillSuccess", started
    state = "query($id: String!) { partitionBackfillOrError(backfillId: $id) { ... on PartitionBackfill { status } } }"

    def status() -> str:
        return up.graphql(state, id=started["backfillId"])["partitionBackfillOrError"]["status"]

    until(
        lambda: status() in ("COMPLETED_SUCCESS", "COMPLETED", "COMPLETED_FAILED", "FAILED"),
        120,
        why="the backfill ended",
        every=1.0,
    )
    assert status() in ("COMPLETED_SUCCESS", "COMPLETED")
    for key in keys:
        shown = materialization(up, key)
        assert shown is not None
        assert shown["outcome"] == "skipped"


def test_an_object_that_is_gone_is_told_within_half_a_minute_of_the_check(up: Platform, receiver: Webhook) -> None:
    quiet(up)
    receiver.requests.clear()
    with up.stack() as stack:
        lost = next(state for state in stack.ledger.scan(zooms=[16]) if state.object_name is not None)
        stack.tiles.delete([tile_object(lost.object_name or "")])
    launch = """
    mutation($job: String!) {
      launchRun(executionParams: {runConfigData: "{}", selector: {
        repositoryLocationName: "geo_assets", repositoryName: "__repository__", jobName: $job}}) { __typename }
    }
    """
    assert up.graphql(launch, job="audit")["launchRun"]["__typename"] == "LaunchRunSuccess"

    def told() -> dict[str, Any] | None:
        alerts = [alert for body in receiver.bodies for alert in body["alerts"] if alert["name"] == "tiles/integrity"]
        return next((alert for alert in alerts if lost.key in {one["subject"] for one in alert["failing"]}), None)

    alert = until(told, 150, why="the alert", every=0.2)
    waited_s = time.time() - datetime.fromisoformat(alert["at"]).timestamp()
    assert waited_s < 30
    assert (alert["status"], alert["severity"]) == ("firing", "error")
    assert alert["url"].startswith(up.dagster)
    assert alert["failing"][0]["map_url"].startswith(up.tiles)
    quiet(up)  # The check marked the tile: it is built again.


ROUTING = """
{ runsOrError(filter: {pipelineName: "route_geofence_triggers"}) {
    ... on Runs { results { status tags { key value } } } } }
"""


@pytest.mark.parametrize("up", ["production"], indirect=True)
def test_positions_have_the_sensor_start_a_routing_run_and_their_triggers_come(up: Platform) -> None:
    lon, lat, half = 25.31, 60.31, 0.002
    ring = [[lon + x * half, lat + y * half] for x, y in ((-1, -1), (1, -1), (1, 1), (-1, 1), (-1, -1))]
    depot = {"type": "Feature", "id": "depot", "version": 1, "geometry": {"type": "Polygon", "coordinates": [ring]}}
    up.post(depot, "--kind", "fences")

    def at(east: float) -> list[tuple[str, str]]:
        """Say where the device is, and look what was told of it."""
        now = time.time_ns() // 1_000_000
        fix = {"device_id": "bus-18", "lon": lon + east * half, "lat": lat, "time_ms": now}
        up.post(fix, "--kind", "positions")
        with up.stack() as stack:
            return [(t.fence_id, NAMES[t.state]) for t in seen(stack).get("bus-18", [])]

    at(3.0)
    # Until the run has begun, and the fence is in force, it says so again and again.
    entered = until(lambda: at(0.0), 120, why="ENTER", every=1.0)
    left = until(lambda: len(told := at(3.0)) == 2 and told, why="EXIT", every=1.0)
    assert [state for _, state in left] == ["ENTER", "EXIT"]
    assert "depot" in entered[0][0]
    assert left[0][0] == left[1][0] == entered[0][0]
    found = up.graphql(ROUTING)["runsOrError"]["results"]
    assert found
    assert all({"key": "dagster/sensor_name", "value": "geofence_positions"} in run["tags"] for run in found)


def test_a_second_up_in_the_same_home_is_refused_in_one_line(up: Platform) -> None:
    done = up.command("up")
    assert done.returncode == 1
    assert "already up" in done.stderr
    assert (up.home / "stack.json").exists()
    assert "Traceback" not in done.stderr


def test_ctrl_c_leaves_no_process_and_the_next_start_goes_on(tmp_path: Path) -> None:
    with running(tmp_path / "home") as platform:
        assert platform.left()
        assert platform.stop() == 0
        assert platform.left() == []
        platform.lines.clear()
        platform.start()
        platform.wait_until_up()


def test_a_killed_supervisor_leaves_nothing_that_the_next_start_does_not_end(tmp_path: Path) -> None:
    with running(tmp_path / "home") as platform:
        assert platform.process is not None
        platform.process.send_signal(signal.SIGKILL)
        platform.process.wait(patient(30))
        platform.lines.clear()
        platform.start()
        platform.wait_until_up()
        assert platform.stop() == 0
        assert platform.left() == []


@pytest.mark.parametrize("name", ["EDGE", "TILES", "DAGSTER"])
def test_a_port_that_is_taken_is_one_clear_line(tmp_path: Path, name: str) -> None:
    import socket

    platform = Platform(tmp_path / "home")
    with socket.socket() as taken:
        (port,) = free_ports(1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        platform.environment[f"GEO_ASSETS_{name}_PORT"] = str(port)
        done = platform.command("up")
    assert done.returncode == 1
    assert f"port {port}" in done.stderr
    assert f"GEO_ASSETS_{name}_PORT" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_home_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    done = subprocess.run(
        [sys.executable, "-m", "geo_assets.cli", "--home", str(blocked / "home"), "up"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "cannot be written" in done.stderr
    assert "GEO_ASSETS_HOME" in done.stderr
    assert "Traceback" not in done.stderr


# -- killed while edits come in ------------------------------------------------------------------------------------


@pytest.fixture
def besieged(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Platform]:
    home = tmp_path / "home"
    home.mkdir()
    (home / "layers.yaml").write_text(LAYERS)
    settings_for(home)
    platform = Platform(home, GEO_ASSETS_LEASE_S="20", GEO_ASSETS_LIVE_WORKERS=str(request.param))
    platform.start()
    try:
        platform.wait_until_up()
        yield platform
    finally:
        if platform.process is not None and platform.process.poll() is None:
            platform.kill()
        for process in platform.left():
            process.kill()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("besieged", [2], indirect=True, ids=["two workers of the fast lane"])
def test_killed_processes_lose_nothing_and_need_no_hand(besieged: Platform) -> None:
    ordeal(besieged, edits=160, kills=["ingest", "live", "up"], every=5.0, pause=0.25)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("besieged", [0], indirect=True, ids=["no fast lane"])
def test_without_a_fast_lane_killed_runs_lose_nothing(besieged: Platform) -> None:
    ordeal(besieged, edits=80, kills=["run"], every=5.0, pause=0.25)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("besieged", [0], indirect=True, ids=["no fast lane"])
def test_twenty_kills_during_two_thousand_edits_lose_nothing(besieged: Platform) -> None:
    chance = random.Random(20)
    kills = [chance.choice(["ingest", "run", "up"]) for _ in range(20)]
    ordeal(besieged, edits=2_000, kills=kills, every=10.0, pause=0.25)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("besieged", [2], indirect=True, ids=["two workers of the fast lane"])
def test_workers_of_the_fast_lane_killed_twenty_times_in_ten_thousand_edits_lose_nothing(besieged: Platform) -> None:
    ordeal(besieged, edits=10_000, kills=["live"] * 20, every=12.0, pause=0.02)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("besieged", [1], indirect=True, ids=["one worker of the fast lane"])
def test_ingest_killed_ten_times_while_small_edits_pass_large_ones_loses_nothing(besieged: Platform) -> None:
    ordeal(besieged, edits=1_500, kills=["ingest"] * 10, every=4.0, pause=0.03, giant_every=4)
