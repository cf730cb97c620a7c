"""Runs in the cluster: launched by the sensor, killed, left alone by an API that is away, refused, and cleaned away."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import mercantile
import pytest

from geo_assets.jobs import BATCH_TAG
from geo_assets.kubernetes.pods import CONFIG_TAG
from geo_assets.tiles.tile import Tile
from geo_assets_tests.k8s.deployed import NAMESPACE, Cluster

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(900)]

SECRETS = ("geo-assets-postgres", "geo-assets-kafka", "geo-assets-redis", "geo-assets-s3")

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
    ring = [[lon, lat], [lon + side, lat], [lon + side, lat + side], [lon, lat + side], [lon, lat]]
    return {
        "type": "Feature", "id": name, "version": time.time_ns() // 1_000_000, "action": "update",
        "properties": {"name": name}, "geometry": {"type": "Polygon", "coordinates": [ring]},
    }  # fmt: skip


def runs(cluster: Cluster, **tags: str) -> list[dict[str, Any]]:
    """Newest first."""
    wanted = [{"key": key, "value": value} for key, value in tags.items()]
    found = cluster.graphql(RUNS, tags=wanted)["runsOrError"]["results"]
    return [run | {"tags": {tag["key"]: tag["value"] for tag in run["tags"]}} for run in found]


def run_of(cluster: Cluster, batch: str) -> dict[str, Any] | None:
    found = runs(cluster, **{BATCH_TAG: batch})
    return found[0] if found else None


def status(cluster: Cluster, run_id: str) -> str:
    answer = cluster.graphql("query($id: ID!) { runOrError(runId: $id) { ... on Run { status } } }", id=run_id)
    return answer["runOrError"]["status"]


def words(cluster: Cluster, run_id: str) -> str:
    """All that a run's log says."""
    events = cluster.graphql(WORDS, id=run_id)["logsForRun"]["events"]
    return "\n".join(f"{one.get('message')} {(one.get('error') or {}).get('message')}" for one in events)


def job(cluster: Cluster, run_id: str) -> dict[str, Any] | None:
    return next((one for one in jobs(cluster) if one["metadata"]["labels"].get("dagster/run-id") == run_id), None)


def jobs(cluster: Cluster) -> list[dict[str, Any]]:
    return cluster.get("jobs", selector="app.kubernetes.io/component=run")


def pods(cluster: Cluster, run_id: str) -> list[dict[str, Any]]:
    return cluster.get("pods", selector=f"dagster/run-id={run_id}")


def launch(cluster: Cluster, name: str = "observe_features", tags: dict[str, str] | None = None) -> str:
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


def sweep(cluster: Cluster) -> None:
    """The janitor, now; as its CronJob runs it."""
    name = f"janitor-{time.time_ns()}"
    cluster.kubectl("create", "job", name, "--from=cronjob/janitor", "-n", NAMESPACE)
    cluster.kubectl("wait", "--for=condition=complete", f"job/{name}", "-n", NAMESPACE, "--timeout=120s")
    cluster.kubectl("delete", "job", name, "-n", NAMESPACE)


@contextmanager
def without_the_fast_lane(cluster: Cluster) -> Iterator[None]:
    """Runs build everything."""
    cluster.kubectl("scale", "deployment/live", "--replicas=0", "-n", NAMESPACE)
    try:
        yield
    finally:
        cluster.kubectl("scale", "deployment/live", "--replicas=2", "-n", NAMESPACE)


LIMIT = "mutation($key: String!, $limit: Int!) { setConcurrencyLimit(concurrencyKey: $key, limit: $limit) }"


def test_an_edit_is_built_by_a_run_that_the_sensor_asked_for(cluster: Cluster) -> None:
    with without_the_fast_lane(cluster):
        lon, lat = 24.9412, 60.1702
        assert cluster.post(square("by-a-run", lon, lat)).status_code == 202
        tile = mercantile.tile(lon + 0.0002, lat + 0.0002, 16)
        key = Tile(tile.z, tile.x, tile.y).key
        url = f"{cluster.url('tiles')}/tiles/{tile.z}/{tile.x}/{tile.y}.mvt"

        cluster.wait(lambda: httpx.get(url, trust_env=False).status_code == 200, 180, f"tile {key} is served")

    run = next(one for one in runs(cluster) if one["jobName"] == "build_tiles")
    cluster.wait(lambda: status(cluster, run["runId"]) == "SUCCESS", 60, "the run ends well")
    made = job(cluster, run["runId"])
    assert made is not None
    pod = made["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "run"
    assert pod["automountServiceAccountToken"] is False
    asked = json.loads(run["tags"][CONFIG_TAG])["container_config"]["resources"]
    assert pod["containers"][0]["resources"]["limits"] == asked["limits"]
    assert len(pods(cluster, run["runId"])) == 1


def test_a_killed_worker_brings_its_work_back_and_each_tile_is_committed_once(cluster: Cluster) -> None:
    with without_the_fast_lane(cluster):
        lon, lat = 24.9512, 60.1752
        assert cluster.post(square("killed", lon, lat)).status_code == 202
        seen = {one["runId"] for one in runs(cluster)}

        def begun() -> dict[str, Any] | None:
            return next(
                (one for one in runs(cluster) if one["jobName"] == "build_tiles" and one["runId"] not in seen
                 and pods(cluster, one["runId"])), None,
            )  # fmt: skip

        run = cluster.wait(begun, 120, "a run has a pod")
        for pod in pods(cluster, run["runId"]):
            cluster.kubectl("delete", "pod", pod["metadata"]["name"], "-n", NAMESPACE, "--grace-period=0", "--force")
        tile = mercantile.tile(lon + 0.0002, lat + 0.0002, 16)
        key = Tile(tile.z, tile.x, tile.y).key

        def built() -> bool:
            with cluster.stack() as stack:
                state = stack.ledger.read([key])[key]
            return state.revision > 0 and not state.dirty

        cluster.wait(built, 400, "the tile is built after all")
        with cluster.stack() as stack:
            assert stack.ledger.read([key])[key].revision == 1


def test_a_run_goes_on_while_the_api_is_away(cluster: Cluster) -> None:
    run_id = launch(cluster, "route_geofence_triggers")
    cluster.wait(lambda: status(cluster, run_id) == "STARTED", 120, "the run has started")
    before = [pod["metadata"]["uid"] for pod in pods(cluster, run_id)]

    cluster.stop_api()
    try:
        # Longer than the run monitor's poll of 15 seconds.
        time.sleep(20)
        assert status(cluster, run_id) == "STARTED"
    finally:
        cluster.start_api()

    assert [pod["metadata"]["uid"] for pod in pods(cluster, run_id)] == before
    cluster.graphql("mutation($id: String!) { terminateRun(runId: $id) { __typename } }", id=run_id)
    cluster.wait(lambda: status(cluster, run_id) in ("CANCELED", "SUCCESS"), 240, "the run is ended")
    cluster.wait(lambda: job(cluster, run_id) is None, 60, "its Job is gone")


def test_a_pod_that_cannot_be_placed_ends_its_run_and_leaves_no_job(cluster: Cluster) -> None:
    asked = {"container_config": {"resources": {"requests": {"cpu": "7900m", "memory": "1Gi"}}}}
    run_id = launch(cluster, tags={CONFIG_TAG: json.dumps(asked)})

    cluster.wait(lambda: status(cluster, run_id) == "FAILURE", 300, "the start timeout ends the run")
    assert "longer than" in words(cluster, run_id)
    time.sleep(121)
    sweep(cluster)
    cluster.wait(lambda: job(cluster, run_id) is None, 60, "its Job is gone")


def test_a_missing_secret_ends_the_run_and_leaves_no_job(cluster: Cluster) -> None:
    kept = json.dumps(
        {
            key: value if key != "metadata" else {"name": value["name"], "labels": value.get("labels", {})}
            for key, value in cluster.get("secret", "geo-assets-kafka").items()
        }
    )
    cluster.kubectl("delete", "secret", "geo-assets-kafka", "-n", NAMESPACE)
    try:
        run_id = launch(cluster)
        cluster.wait(lambda: status(cluster, run_id) == "FAILURE", 300, "the start timeout ends the run")
        assert "geo-assets-kafka" in words(cluster, run_id)
    finally:
        cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", input=kept)
    time.sleep(121)
    sweep(cluster)
    cluster.wait(lambda: job(cluster, run_id) is None, 60, "its Job is gone")


def test_what_a_quota_refuses_ends_the_run_with_the_apis_own_words(cluster: Cluster) -> None:
    asked = {"container_config": {"resources": {"requests": {"memory": "20Gi"}, "limits": {"memory": "20Gi"}}}}
    run_id = launch(cluster, tags={CONFIG_TAG: json.dumps(asked)})

    cluster.wait(lambda: status(cluster, run_id) == "FAILURE", 300, "the run ends")
    assert "maximum memory usage per Container" in words(cluster, run_id)
    time.sleep(121)
    sweep(cluster)
    cluster.wait(lambda: job(cluster, run_id) is None, 60, "its Job is gone")


def test_a_tag_that_asks_for_another_account_is_refused(cluster: Cluster) -> None:
    run_id = launch(cluster, tags={CONFIG_TAG: json.dumps({"pod_spec_config": {"service_account_name": "control"}})})

    cluster.wait(lambda: status(cluster, run_id) == "FAILURE", 60, "the run is refused")
    assert "may not choose: service account 'control'" in words(cluster, run_id)
    assert job(cluster, run_id) is None


@pytest.mark.parametrize("account", ["control", "code", "run", "service"])
@pytest.mark.parametrize(
    ("verb", "what", "namespace"),
    [
        ("create", "pods", NAMESPACE),
        ("get", "secrets", NAMESPACE),
        ("list", "secrets", NAMESPACE),
        ("create", "pods/exec", NAMESPACE),
        ("create", "serviceaccounts/token", NAMESPACE),
        ("patch", "jobs", NAMESPACE),
        ("create", "jobs", "default"),
        ("list", "jobs", "kube-system"),
        ("get", "pods", "default"),
        ("list", "nodes", NAMESPACE),
    ],
)
def test_no_account_may_do_more_than_launch_runs(
    cluster: Cluster, account: str, verb: str, what: str, namespace: str
) -> None:
    someone = f"--as=system:serviceaccount:{NAMESPACE}:{account}"
    answer = cluster.lab.kubectl("auth", "can-i", verb, what, "-n", namespace, someone)
    assert answer.stdout.strip() == "no"


def test_who_launches_runs_is_refused_when_it_tries_more(cluster: Cluster) -> None:
    someone = f"--as=system:serviceaccount:{NAMESPACE}:control"
    for arguments in (
        ("run", "x", "--image=x", "-n", NAMESPACE),
        ("get", "secret", "geo-assets-postgres", "-n", NAMESPACE),
        ("create", "job", "x", "--image=x", "-n", "default"),
    ):
        done = cluster.lab.kubectl(*arguments, someone)
        assert done.returncode != 0
        assert "forbidden" in done.stderr.lower()


def test_no_secrets_value_stands_in_a_job_a_log_or_an_event(cluster: Cluster) -> None:
    run_id = launch(cluster)
    cluster.wait(lambda: status(cluster, run_id) in ("SUCCESS", "FAILURE"), 180, "the run has ended")
    values = [
        base64.b64decode(value).decode()
        for name in SECRETS
        for value in (cluster.get("secret", name).get("data") or {}).values()
    ]
    values = [value for value in values if len(value) > 8]
    assert values

    shown = [json.dumps(jobs(cluster)), json.dumps(cluster.get("pods")), json.dumps(cluster.get("events"))]
    shown.append(words(cluster, run_id))
    shown += [cluster.logs(pod["metadata"]["name"]) for pod in pods(cluster, run_id)]
    shown += [cluster.logs(name) for role in ("dagster-daemon", "code") for name in cluster.pods(role)]

    for text in shown:
        assert not [value[:4] + "…" for value in values if value in text]


def test_a_late_second_worker_beside_a_live_old_one_makes_exactly_one_commit_visible(cluster: Cluster) -> None:
    """A Job is copied under another name while its run is alive: two workers of one run."""
    with without_the_fast_lane(cluster):
        lon, lat = 24.9612, 60.1802
        seen = {one["runId"] for one in runs(cluster)}
        assert cluster.post(square("two-workers", lon, lat)).status_code == 202

        def launched() -> dict[str, Any] | None:
            found = [one for one in runs(cluster) if one["jobName"] == "build_tiles" and one["runId"] not in seen]
            return next((made for one in found if (made := job(cluster, one["runId"]))), None)

        made = cluster.wait(launched, 120, "a run has a Job")
        spec = made["spec"]
        for name in ("selector", "manualSelector"):
            spec.pop(name, None)
        labels = {
            key: value for key, value in made["metadata"]["labels"].items()
            if not key.startswith(("batch.kubernetes.io/", "controller-uid", "job-name"))
        }  # fmt: skip
        spec["template"]["metadata"]["labels"] = labels
        spec["template"]["metadata"].pop("name", None)
        twin = {
            "apiVersion": "batch/v1", "kind": "Job", "spec": spec,
            "metadata": {"name": made["metadata"]["name"] + "-t", "labels": labels},
        }  # fmt: skip
        cluster.kubectl("create", "-n", NAMESPACE, "-f", "-", input=json.dumps(twin))
        tile = mercantile.tile(lon + 0.0002, lat + 0.0002, 16)
        key = Tile(tile.z, tile.x, tile.y).key

        def settled() -> bool:
            with cluster.stack() as stack:
                state = stack.ledger.read([key])[key]
            return state.revision > 0 and not state.dirty

        cluster.wait(settled, 240, "the tile is built")
        run_id = labels["dagster/run-id"]
        cluster.wait(
            lambda: all(one["status"]["phase"] in ("Succeeded", "Failed") for one in pods(cluster, run_id)),
            180,
            "both workers have ended",
        )
        with cluster.stack() as stack:
            assert stack.ledger.read([key])[key].revision == 1
        assert status(cluster, run_id) == "SUCCESS"
        assert "Ignoring a" in words(cluster, run_id)


def test_with_fifty_runs_in_the_queue_pools_and_tag_limits_hold(cluster: Cluster) -> None:
    begun = str(time.time_ns())
    cluster.graphql(LIMIT, key="feature_store", limit=1)
    try:
        for number in range(50):
            tags = {"test/fifty": begun}
            if number % 2:
                launch(cluster, tags=tags | {"dagster/backfill": begun})
            else:
                # Of a batch that nobody knows: it takes its pool's slot, and ends at once.
                launch(cluster, "build_tiles", tags | {BATCH_TAG: f"{begun}-{number}"})
        most = {"build_tiles": 0, "observe_features": 0}

        def ten_have_ended() -> bool:
            found = runs(cluster, **{"test/fifty": begun})
            for name in most:
                going = [one for one in found if one["jobName"] == name and one["status"] in ("STARTING", "STARTED")]
                most[name] = max(most[name], len(going))
            ended = [one["jobName"] for one in found if one["status"] in ("SUCCESS", "FAILURE", "CANCELED")]
            return all(ended.count(name) >= 5 for name in most)

        cluster.wait(ten_have_ended, 600, "five runs of each kind have ended")
        assert most == {"build_tiles": 1, "observe_features": 2}
    finally:
        for one in runs(cluster, **{"test/fifty": begun}):
            if one["status"] in ("QUEUED", "STARTING", "STARTED"):
                cluster.graphql("mutation($id: String!) { terminateRun(runId: $id) { __typename } }", id=one["runId"])
        cluster.graphql(LIMIT, key="feature_store", limit=5)
