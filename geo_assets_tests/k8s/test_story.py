"""All of it in the cluster as its users meet it: edit, map, backfill, check, alert and geofence, with runs as pods."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import mercantile
import pytest

from geo_assets.geofence.triggers import NAMES
from geo_assets.ports import tile_object
from geo_assets.tiles.decode import decode
from geo_assets.tiles.tile import Tile
from geo_assets_tests.geofence_world import seen
from geo_assets_tests.k8s.asking import ENDED, end, job, launch, pods, runs, square, status
from geo_assets_tests.k8s.deployed import Cluster
from geo_assets_tests.running_platform import Listener
from geo_assets_tests.waiting import patient

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(900)]

HERE = (24.8412, 60.1702)

LATEST = """
query($partition: String!) {
  assetNodeOrError(assetKey: {path: ["tiles"]}) {
    ... on AssetNode {
      assetMaterializations(partitions: [$partition], limit: 1) {
        metadataEntries { label ... on TextMetadataEntry { text } ... on IntMetadataEntry { intValue } }
      }
    }
  }
}
"""


def tile_at(lon: float, lat: float, zoom: int = 16) -> Tile:
    found = mercantile.tile(lon, lat, zoom)
    return Tile(found.z, found.x, found.y)


def fetched(cluster: Cluster, tile: Tile) -> bytes | None:
    """A tile through the service's proxy; None while it is empty."""
    answer = httpx.get(f"{cluster.url('tiles')}/tiles/{tile.path}.mvt", trust_env=False, timeout=patient(30))
    assert answer.status_code in (200, 204), answer.text
    return answer.content if answer.status_code == 200 else None


def materialized(cluster: Cluster, tile: Tile) -> dict[str, Any] | None:
    """The metadata of a tile's newest entry in Dagster's catalog."""
    found = cluster.graphql(LATEST, partition=tile.key)["assetNodeOrError"]["assetMaterializations"]
    if not found:
        return None
    return {each["label"]: each.get("text", each.get("intValue")) for each in found[0]["metadataEntries"]}


def as_a_pod(cluster: Cluster, run_id: str) -> dict[str, Any]:
    """The Job of a run, and that one pod of component `run` worked for it."""
    made = job(cluster, run_id)
    assert made is not None, f"run {run_id} has no Job"
    (pod,) = pods(cluster, run_id)
    assert pod["metadata"]["labels"]["app.kubernetes.io/component"] == "run"
    return made


def test_an_edit_is_on_the_map_and_in_the_catalog(cluster: Cluster) -> None:
    tile = tile_at(HERE[0] + 0.0002, HERE[1] + 0.0002)
    listener = Listener(f"{cluster.url('tiles')}/events")
    before = len(runs(cluster))
    begun = time.monotonic()
    answer = cluster.post(square("town-hall", *HERE))
    assert answer.status_code == 202, answer.text

    told = cluster.wait(lambda: listener.tiles().get(tile.path), 60, "the stream of changes names the tile")
    print(f"posted to announced: {time.monotonic() - begun:.2f} s")
    listener.close()
    data = fetched(cluster, tile)
    assert data is not None
    (layer,) = decode(data)
    assert layer.name == "buildings"
    assert [each.properties["name"] for each in layer.features] == ["town-hall"]
    entry = cluster.wait(lambda: materialized(cluster, tile), 60, "the catalog has it")
    assert (entry["revision"], entry["content_hash"]) == (told["revision"], told["hash"])
    assert entry["image_digest"] == "local"
    assert len(runs(cluster)) == before, "the fast lane builds, without a run"


def test_a_backfill_is_a_run_in_a_pod(cluster: Cluster) -> None:
    lon, lat = HERE
    before = {run["runId"] for run in runs(cluster)}
    box = f"{lon - 0.001},{lat - 0.001},{lon + 0.001},{lat + 0.001}"
    done = cluster.command("backfill", "--bbox", box, "--zooms", "14-17", "--force", "--yes")
    assert done.returncode == 0, done.stdout + done.stderr

    def ended() -> dict[str, Any] | None:
        listed = cluster.command("backfills", "list", "--json")
        assert listed.returncode == 0, listed.stderr
        return next((one for one in json.loads(listed.stdout) if one["state"] != "open"), None)

    def built() -> str | None:
        new = [run for run in runs(cluster) if run["runId"] not in before and run["jobName"] == "build_tiles"]
        return next((run["runId"] for run in new if run["status"] == "SUCCESS"), None)

    run_id = cluster.wait(built, 180, "a run has built the region")
    as_a_pod(cluster, run_id)
    manifest = cluster.wait(ended, 60, "the manifest is done")
    assert manifest["failed"] == 0
    assert manifest["done"] == manifest["tiles"] > 0


def test_a_lost_object_is_found_by_the_check_told_by_the_alert_and_mended(cluster: Cluster) -> None:
    tile = tile_at(HERE[0] + 0.0002, HERE[1] + 0.0002)
    with cluster.stack() as stack:
        lost = stack.ledger.read([tile.key])[tile.key]
        assert lost.object_name is not None
        stack.tiles.delete([tile_object(lost.object_name)])
    run_id = launch(cluster, "audit")
    cluster.wait(lambda: status(cluster, run_id) in ENDED, 180, "the audit has ended")
    as_a_pod(cluster, run_id)

    def told() -> dict[str, Any] | None:
        alerts = [each for body in cluster.receiver.bodies for each in body["alerts"]]
        found = (each for each in alerts if each["name"] == "tiles/integrity")
        return next((each for each in found if tile.key in {one["subject"] for one in each["failing"]}), None)

    alert = cluster.wait(told, 120, "the alert")
    assert (alert["status"], alert["severity"]) == ("firing", "error")

    def mended() -> bool:
        with cluster.stack() as stack:
            state = stack.ledger.read([tile.key])[tile.key]
            return state.object_name is not None and stack.tiles.exists(tile_object(state.object_name))

    cluster.wait(mended, 120, "its object is there again")


def test_positions_start_a_routing_run_in_a_pod_and_their_triggers_come(cluster: Cluster) -> None:
    lon, lat, half = 25.31, 60.31, 0.002
    ring = [[lon + x * half, lat + y * half] for x, y in ((-1, -1), (1, -1), (1, 1), (-1, 1), (-1, -1))]
    depot = {"type": "Feature", "id": "depot", "version": 1, "geometry": {"type": "Polygon", "coordinates": [ring]}}
    assert cluster.post(depot, "fences").status_code == 202

    def at(east: float) -> list[str]:
        """Say where the device is, and look what was told of it."""
        now = time.time_ns() // 1_000_000
        fix = {"device_id": "bus-18", "lon": lon + east * half, "lat": lat, "time_ms": now}
        assert cluster.post(fix, "positions").status_code == 202
        with cluster.stack() as stack:
            return [NAMES[trigger.state] for trigger in seen(stack).get("bus-18", [])]

    at(3.0)
    # Until the run has begun, and the fence is in force, it says so again and again.
    cluster.wait(lambda: at(0.0), 180, "ENTER")
    told = cluster.wait(lambda: len(told := at(3.0)) == 2 and told, 60, "EXIT")
    assert told == ["ENTER", "EXIT"]
    routing = [run for run in runs(cluster) if run["jobName"] == "route_geofence_triggers"]
    going = [run for run in routing if run["status"] == "STARTED"]
    assert going
    for run in going:
        assert run["tags"]["dagster/sensor_name"] == "geofence_positions"
        as_a_pod(cluster, run["runId"])
    end(cluster, *(run["runId"] for run in routing if run["status"] not in ENDED))
