"""Runs in the cluster: launched by the sensor, killed, left alone by an API that is away, refused, and cleaned away."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
import mercantile
import pytest

from deploy.lab.node.quantities import amount
from geo_assets.jobs import BATCH_TAG
from geo_assets.kubernetes.pods import CONFIG_TAG
from geo_assets_tests.k8s.asking import (
    ENDED,
    build_runs,
    end,
    job,
    jobs,
    launch,
    pods,
    quarter,
    runs,
    square,
    status,
    tiles_of,
    words,
)
from geo_assets_tests.k8s.deployed import NAMESPACE, Cluster
from geo_assets_tests.waiting import patient

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", autouse=True)
def without_the_fast_lane(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs build everything here."""
    cluster: Cluster = request.getfixturevalue("cluster")
    cluster.kubectl("scale", "deployment/live", "--replicas=0", "-n", NAMESPACE)
    cluster.wait(lambda: not cluster.get("pods", selector="app.kubernetes.io/component=live"), 60, "no fast lane")
    yield
    cluster.kubectl("scale", "deployment/live", "--replicas=2", "-n", NAMESPACE)
    cluster.wait_until_ready()


def revisions(cluster: Cluster, keys: set[str]) -> dict[str, int] | None:
    """How often each of these tiles was committed; None while one is dirty or was never built."""
    with cluster.stack() as stack:
        found = stack.ledger.read(sorted(keys))
    if any(state.dirty or not state.revision for state in found.values()):
        return None
    return {key: state.revision for key, state in found.items()}


def under_way(cluster: Cluster, features: list[dict[str, Any]]) -> tuple[str, str]:
    """Post features in one body, and wait for a run over them; its id, and the name of its pod that works."""
    before = {run["runId"] for run in runs(cluster)}
    answer = cluster.post({"type": "FeatureCollection", "features": features})
    assert answer.status_code == 202, answer.text

    def started() -> str | None:
        return next((run["runId"] for run in build_runs(cluster, before) if run["status"] == "STARTED"), None)

    run_id = cluster.wait(started, 120, "a run has started")
    (pod,) = pods(cluster, run_id)
    return run_id, pod["metadata"]["name"]


def test_an_edit_is_built_by_a_run_that_the_sensor_asked_for(cluster: Cluster) -> None:
    lon, lat = 24.9412, 60.1702
    before = {run["runId"] for run in runs(cluster)}
    assert cluster.post(square("by-a-run", lon, lat)).status_code == 202
    tile = mercantile.tile(lon + 0.0002, lat + 0.0002, 16)
    url = f"{cluster.url('tiles')}/tiles/{tile.z}/{tile.x}/{tile.y}.mvt"
    cluster.wait(
        lambda: httpx.get(url, trust_env=False, timeout=patient(30)).status_code == 200, 180, "the tile is served"
    )

    run = build_runs(cluster, before)[-1]
    cluster.wait(lambda: status(cluster, run["runId"]) == "SUCCESS", 60, "the run ends well")
    made = job(cluster, run["runId"])
    assert made is not None
    pod = made["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "batch"
    assert pod["automountServiceAccountToken"] is False
    asked = json.loads(run["tags"][CONFIG_TAG])["container_config"]["resources"]
    given = pod["containers"][0]["resources"]["limits"]
    assert {name: amount(each) for name, each in given.items()} == {
        name: amount(each) for name, each in asked["limits"].items()
    }
    assert len(pods(cluster, run["runId"])) == 1


def test_a_killed_worker_brings_its_work_back_and_each_tile_is_committed_once(cluster: Cluster) -> None:
    features = quarter("killed", 25.0, 60.2)
    run_id, pod = under_way(cluster, features)
    cluster.kill(pod)
    assert revisions(cluster, tiles_of(features)) is None, "the worker was killed after its work"

    cluster.wait(lambda: status(cluster, run_id) == "FAILURE", 90, "the run is known to be lost")
    built = cluster.wait(lambda: revisions(cluster, tiles_of(features)), 240, "another run builds what is dirty")
    assert set(built.values()) == {1}
    (lost,) = pods(cluster, run_id)
    assert lost["status"]["phase"] == "Failed"


def test_a_late_second_worker_of_a_run_leaves_it_to_the_first(cluster: Cluster) -> None:
    """The first one stands still, as on a node that hangs, until the second has come and gone."""
    features = quarter("twin", 25.1, 60.2)
    run_id, pod = under_way(cluster, features)
    with cluster.standing_still(pod):
        assert revisions(cluster, tiles_of(features)) is None, "the worker was stopped after its work"
        twin = copy_of(cluster, run_id)
        cluster.kubectl("create", "-n", NAMESPACE, "-f", "-", input=json.dumps(twin))
        name = twin["metadata"]["name"]
        cluster.wait(
            lambda: (cluster.get("job", name).get("status") or {}).get("conditions"), 120, "the second worker has ended"
        )
        assert status(cluster, run_id) == "STARTED"
        assert "Ignoring a" in words(cluster, run_id)

    # It goes on; or the connection it was just making has timed out meanwhile, and another run takes over.
    built = cluster.wait(lambda: revisions(cluster, tiles_of(features)), 240, "the tiles are built")
    assert set(built.values()) == {1}
    cluster.wait(lambda: status(cluster, run_id) in ("SUCCESS", "FAILURE"), 120, "the run ends")


def test_a_late_worker_of_a_run_that_was_given_up_makes_nothing_visible_again(cluster: Cluster) -> None:
    """Its tiles were built by another run meanwhile."""
    features = quarter("late", 25.2, 60.2)
    keys = tiles_of(features)
    run_id, pod = under_way(cluster, features)
    with without_janitor(cluster), cluster.standing_still(pod):
        assert revisions(cluster, keys) is None, "the worker was stopped after its work"
        given_up(cluster, run_id)
        built = cluster.wait(lambda: revisions(cluster, keys), 240, "another run builds what is dirty")
        assert set(built.values()) == {1}
        with cluster.stack() as stack:
            shown = {key: state.object_name for key, state in stack.ledger.read(sorted(keys)).items()}
    cluster.wait(
        lambda: all(each["status"]["phase"] in ("Succeeded", "Failed") for each in pods(cluster, run_id)),
        180,
        "the late worker has ended",
    )

    assert revisions(cluster, keys) == built
    with cluster.stack() as stack:
        assert {key: state.object_name for key, state in stack.ledger.read(sorted(keys)).items()} == shown


@contextmanager
def without_janitor(cluster: Cluster) -> Iterator[None]:
    """It would end a worker whose run has ended two minutes ago."""

    def suspend(now: bool) -> None:
        spec = json.dumps({"spec": {"suspend": now}})
        cluster.kubectl("patch", "cronjob", "janitor", "-n", NAMESPACE, "--type=merge", "-p", spec)

    suspend(True)
    try:
        yield
    finally:
        suspend(False)


def given_up(cluster: Cluster, run_id: str) -> None:
    """The run has failed, by Dagster's word alone: its worker is not told, as by a time limit while the API is away."""
    code = (
        "import sys; from dagster import DagsterInstance; instance = DagsterInstance.get(); "
        "instance.report_run_failed(instance.get_run_by_id(sys.argv[1]), 'given up')"
    )
    (daemon,) = cluster.pods("dagster-daemon")
    done = cluster.execute(daemon, "python", "-c", code, run_id)
    assert done.returncode == 0, done.stderr


def copy_of(cluster: Cluster, run_id: str) -> dict[str, Any]:
    """A run's Job under another name."""
    made = job(cluster, run_id)
    assert made is not None
    spec = made["spec"]
    for name in ("selector", "manualSelector"):
        spec.pop(name, None)
    labels = {
        key: value for key, value in made["metadata"]["labels"].items()
        if not key.startswith(("batch.kubernetes.io/", "controller-uid", "job-name"))
    }  # fmt: skip
    spec["template"]["metadata"]["labels"] = labels
    spec["template"]["metadata"].pop("name", None)
    about = {"name": made["metadata"]["name"] + "-t", "labels": labels}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": about, "spec": spec}


def test_a_run_goes_on_while_the_api_is_away(cluster: Cluster) -> None:
    run_id = launch(cluster, "route_geofence_triggers")
    cluster.wait(lambda: status(cluster, run_id) == "STARTED", 120, "the run has started")
    before = [pod["metadata"]["uid"] for pod in pods(cluster, run_id)]
    assert len(before) == 1

    cluster.stop_api()
    try:
        # Four of the run monitor's looks.
        time.sleep(20)
        assert status(cluster, run_id) == "STARTED"
    finally:
        cluster.start_api()
    time.sleep(12)

    # Without positions it ends by itself some time.
    assert status(cluster, run_id) in ("STARTED", "SUCCESS")
    (pod,) = pods(cluster, run_id)
    assert [pod["metadata"]["uid"]] == before
    assert pod["status"]["phase"] in ("Running", "Succeeded")
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
    end(cluster, run_id)
    cluster.wait(lambda: status(cluster, run_id) in ("CANCELED", "SUCCESS"), 120, "the run is ended")


def test_runs_that_cannot_start_end_by_their_timeout_and_leave_no_job(cluster: Cluster) -> None:
    """No node has room, a Secret is not there, a quota is used up, or a pod is above what one may have."""
    # What they have of the quota would be free again for the one that is to find it used up.
    cluster.wait(lambda: not live_runs(cluster), 240, "runs of before have ended")
    with without_secret(cluster, "geo-assets-kafka"):
        unplaceable = launch(cluster, tags=asking_for({"cpu": "7900m", "memory": "1Gi"}, {"memory": "1Gi"}))
        secretless = launch(cluster)
        too_large = launch(cluster, tags=asking_for({"memory": "20Gi"}, {"memory": "20Gi"}))
        cluster.wait(lambda: pods(cluster, unplaceable) and pods(cluster, secretless), 60, "two pods wait")
        # Room for the small pods of others, and for no large one.
        used = cluster.get("resourcequota", "geo-assets")["status"]["used"]["limits.memory"]
        quota = {
            "apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "used-up"},
            "spec": {"hard": {"limits.memory": str(int(amount(used)) + 6 * 1024**3)}},
        }  # fmt: skip
        cluster.kubectl("create", "-n", NAMESPACE, "-f", "-", input=json.dumps(quota))
        try:
            cluster.wait(lambda: "hard" in cluster.get("resourcequota", "used-up").get("status", {}), 60, "it counts")
            above_quota = launch(cluster, tags=asking_for({"cpu": "10m", "memory": "15Gi"}, {"memory": "15Gi"}))
            stranded = {
                unplaceable: "longer than",
                secretless: "geo-assets-kafka",
                too_large: "maximum memory usage per Container is 16Gi",
                above_quota: "exceeded quota: used-up",
            }
            for run_id in stranded:
                cluster.wait(
                    lambda each=run_id: status(cluster, each) == "FAILURE", 150, "the start timeout ends the run"
                )
            for run_id, why in stranded.items():
                assert why in words(cluster, run_id)
            # The janitor as its CronJob runs it; only that nobody waits two minutes after a run's end.
            sweep = "from geo_assets.kubernetes import janitor; janitor.ENDED_S = 1.0; raise SystemExit(janitor.main())"
            (daemon,) = cluster.pods("dagster-daemon")
            time.sleep(2)
            swept = cluster.execute(daemon, "python", "-c", sweep)
            assert swept.returncode == 0, swept.stderr
            for run_id in stranded:
                cluster.wait(lambda each=run_id: job(cluster, each) is None, 60, "the Job is gone")
                assert status(cluster, run_id) == "FAILURE"
        finally:
            cluster.kubectl("delete", "resourcequota", "used-up", "-n", NAMESPACE)


def live_runs(cluster: Cluster) -> set[str]:
    """Runs that have a pod which has not ended."""
    found = cluster.get("pods", selector="app.kubernetes.io/component=run")
    return {
        pod["metadata"]["labels"]["dagster/run-id"] for pod in found if pod["status"]["phase"] in ("Pending", "Running")
    }


def asking_for(requests: dict[str, str], limits: dict[str, str]) -> dict[str, str]:
    """The tag that sizes a run's pod."""
    return {CONFIG_TAG: json.dumps({"container_config": {"resources": {"requests": requests, "limits": limits}}})}


@contextmanager
def without_secret(cluster: Cluster, name: str) -> Iterator[None]:
    """Nobody finds it."""
    found = cluster.get("secret", name)
    found["metadata"] = {"name": name, "labels": found["metadata"].get("labels", {})}
    cluster.kubectl("delete", "secret", name, "-n", NAMESPACE)
    try:
        yield
    finally:
        cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", input=json.dumps(found))


def test_the_janitors_cronjob_runs_with_its_account_in_its_pod(cluster: Cluster) -> None:
    name = f"janitor-{time.time_ns()}"
    cluster.kubectl("create", "job", name, "--from=cronjob/janitor", "-n", NAMESPACE)
    cluster.kubectl(
        "wait", "--for=condition=complete", f"job/{name}", "-n", NAMESPACE, f"--timeout={patient(120):.0f}s"
    )
    cluster.kubectl("delete", "job", name, "-n", NAMESPACE)


def test_a_tag_that_asks_for_another_account_is_refused(cluster: Cluster) -> None:
    run_id = launch(cluster, tags={CONFIG_TAG: json.dumps({"pod_spec_config": {"service_account_name": "control"}})})

    cluster.wait(lambda: status(cluster, run_id) == "FAILURE", 60, "the run is refused")
    assert "may not choose: service account 'control'" in words(cluster, run_id)
    assert job(cluster, run_id) is None


@pytest.mark.parametrize("account", ["control", "code", "run", "batch", "edge", "ingest", "live", "tiles", "upkeep"])
def test_no_account_may_do_more_than_launch_runs(cluster: Cluster, account: str) -> None:
    someone = f"--as=system:serviceaccount:{NAMESPACE}:{account}"
    for verb, what, namespace in (
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
    ):
        answer = cluster.lab.kubectl("auth", "can-i", verb, what, "-n", namespace, someone)
        assert answer.stdout.strip() == "no", (verb, what, namespace)


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


LIMIT = "mutation($key: String!, $limit: Int!) { setConcurrencyLimit(concurrencyKey: $key, limit: $limit) }"


def test_with_fifty_batches_in_the_queue_pools_and_tag_limits_hold(cluster: Cluster) -> None:
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
        limits = {"build_tiles": 1, "observe_features": 2}
        most = dict.fromkeys(limits, 0)

        def some_have_ended() -> bool:
            found = runs(cluster, **{"test/fifty": begun})
            for name in most:
                going = [one for one in found if one["jobName"] == name and one["status"] in ("STARTING", "STARTED")]
                most[name] = max(most[name], len(going))
            ended = [one["jobName"] for one in found if one["status"] in ENDED]
            return all(ended.count(name) >= 4 and most[name] >= limit for name, limit in limits.items())

        cluster.wait(some_have_ended, 600, "four runs of each kind have ended, and as many were going on as may")
        assert most == limits
    finally:
        try:
            left = [run["runId"] for run in runs(cluster, **{"test/fifty": begun}) if run["status"] not in ENDED]
            end(cluster, *left)
        finally:
            cluster.graphql(LIMIT, key="feature_store", limit=5)


def test_no_secrets_value_stands_in_any_job_log_or_event(cluster: Cluster) -> None:
    """Last here: of all that happened above, whatever is still to be read."""
    run_id = launch(cluster)
    cluster.wait(lambda: status(cluster, run_id) in ENDED, 180, "the run has ended")
    values = {
        base64.b64decode(value).decode()
        for secret in cluster.get("secrets")
        for value in (secret.get("data") or {}).values()
    }
    values |= {unquote(password) for value in values if "://" in value and (password := urlsplit(value).password)}
    values = {value for value in values if len(value) > 8}
    assert len(values) >= 6

    shown = {"jobs": json.dumps(jobs(cluster)), "pods": json.dumps(cluster.get("pods"))}
    shown["events"] = json.dumps(cluster.get("events"))
    shown |= {run["runId"]: words(cluster, run["runId"]) for run in runs(cluster)[:60]}
    read = 0
    for pod in cluster.get("pods"):
        name = pod["metadata"]["name"]
        printed = cluster.lab.kubectl("logs", "-n", NAMESPACE, name, "--tail=-1").stdout
        shown[name] = printed
        read += bool(printed)
    assert read > 10

    for where, text in shown.items():
        assert not [value[:4] + "…" for value in values if value in text], where
