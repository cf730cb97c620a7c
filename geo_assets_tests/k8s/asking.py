"""What tests ask of Dagster and of the API about runs, and the edits that they post."""

from __future__ import annotations

import time
from typing import Any

import mercantile
import shapely

from geo_assets.tiles.tile import Tile
from geo_assets_tests.k8s.deployed import Cluster

ENDED = ("SUCCESS", "FAILURE", "CANCELED")

ZOOMS = range(13, 19)
"""Where the layer `buildings` shows."""

RUNS = """
query($tags: [ExecutionTag!]) {
  runsOrError(filter: {tags: $tags}, limit: 200) {
    ... on Runs { results { runId status jobName creationTime tags { key value } } }
  }
}
"""

LAUNCH = """
mutation($params: ExecutionParams!) {
  launchRun(executionParams: $params) {
    __typename
    ... on LaunchRunSuccess { run { runId } }
    ... on PythonError { message }
  }
}
"""

WORDS = """
query($id: ID!) {
  logsForRun(runId: $id) {
    ... on EventConnection {
      events { ... on MessageEvent { message } ... on ErrorEvent { error { message } } }
    }
  }
}
"""


def square(name: str, lon: float, lat: float, side: float = 0.0004) -> dict[str, Any]:
    """A building: its south-west corner and its side in degrees."""
    ring = [[lon, lat], [lon + side, lat], [lon + side, lat + side], [lon, lat + side], [lon, lat]]
    return {
        "type": "Feature", "id": name, "version": time.time_ns() // 1_000_000, "action": "update",
        "properties": {"name": name}, "geometry": {"type": "Polygon", "coordinates": [ring]},
    }  # fmt: skip


def runs(cluster: Cluster, **tags: str) -> list[dict[str, Any]]:
    """Newest first; with their tags as a dictionary."""
    wanted = [{"key": key, "value": value} for key, value in tags.items()]
    found = cluster.graphql(RUNS, tags=wanted)["runsOrError"]["results"]
    return [run | {"tags": {tag["key"]: tag["value"] for tag in run["tags"]}} for run in found]


def quarter(name: str, lon: float, lat: float, side: int = 14) -> list[dict[str, Any]]:
    """So many buildings squared, a tile of zoom 17 apart: enough for a run to be under way for some seconds."""
    return [square(f"{name}-{x}-{y}", lon + x * 0.003, lat + y * 0.0015) for x in range(side) for y in range(side)]


def tiles_of(features: list[dict[str, Any]]) -> set[str]:
    """The keys of the tiles that have their middles: each of these shows something."""
    middles = [shapely.geometry.shape(feature["geometry"]).centroid for feature in features]
    found = (mercantile.tile(middle.x, middle.y, zoom) for middle in middles for zoom in ZOOMS)
    return {Tile(tile.z, tile.x, tile.y).key for tile in found}


def build_runs(cluster: Cluster, but: set[str]) -> list[dict[str, Any]]:
    """Runs that build edits, newest first, other than these."""
    return [run for run in runs(cluster) if run["jobName"] == "build_tiles" and run["runId"] not in but]


def status(cluster: Cluster, run_id: str) -> str:
    """As Dagster has it."""
    answer = cluster.graphql("query($id: ID!) { runOrError(runId: $id) { ... on Run { status } } }", id=run_id)
    return answer["runOrError"]["status"]


def words(cluster: Cluster, run_id: str) -> str:
    """All that a run's log says."""
    events = cluster.graphql(WORDS, id=run_id)["logsForRun"]["events"]
    return "\n".join(f"{one.get('message')} {(one.get('error') or {}).get('message')}" for one in events)


def job(cluster: Cluster, run_id: str) -> dict[str, Any] | None:
    """A run's Job; None where there is none."""
    return next((one for one in jobs(cluster) if one["metadata"]["labels"].get("dagster/run-id") == run_id), None)


def jobs(cluster: Cluster) -> list[dict[str, Any]]:
    """Of all runs."""
    return cluster.get("jobs", selector="app.kubernetes.io/component=run")


def pods(cluster: Cluster, run_id: str) -> list[dict[str, Any]]:
    """Of a run, whatever became of them."""
    return cluster.get("pods", selector=f"dagster/run-id={run_id}")


def launch(cluster: Cluster, name: str = "observe_features", tags: dict[str, str] | None = None) -> str:
    """Start a job as a person does in the UI; the run's id."""
    selector = {
        "repositoryLocationName": "geo_assets", "repositoryName": "__repository__", "jobName": name,
    }  # fmt: skip
    given = {
        "selector": selector, "runConfigData": {},
        "executionMetadata": {"tags": [{"key": key, "value": value} for key, value in (tags or {}).items()]},
    }  # fmt: skip
    answer = cluster.graphql(LAUNCH, params=given)["launchRun"]
    assert answer["__typename"] == "LaunchRunSuccess", answer
    return answer["run"]["runId"]


def end(cluster: Cluster, *run_ids: str) -> None:
    """End runs as a person does in the UI; a few at a time, as each request has a minute."""
    ending = "mutation($ids: [String!]!) { terminateRuns(runIds: $ids) { __typename } }"
    for start in range(0, len(run_ids), 5):
        cluster.graphql(ending, ids=list(run_ids[start : start + 5]))
