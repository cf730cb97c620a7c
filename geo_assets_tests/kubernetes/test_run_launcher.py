"""Runs launched as the cluster's dagster.yaml says: what their Jobs are, and what a run's tags cannot choose."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from dagster import DagsterInstance, DagsterRun, DagsterRunStatus, job, op, reconstructable
from dagster._config import process_config, resolve_to_config_type
from dagster._core.instance.ref import InstanceRef
from dagster._core.launcher import LaunchRunContext
from dagster._core.launcher.base import WorkerStatus

from geo_assets.kubernetes import api
from geo_assets.kubernetes.api import ApiAway, ApiRefused, Jobs
from geo_assets.kubernetes.pods import CONFIG_TAG, NOT_LAUNCHED_TAG, Size, run_tags
from geo_assets.kubernetes.run_launcher import PatientRunLauncher
from geo_assets_tests.kubernetes.api_stand_in import StandIn, fault, stand_in

DEPLOY = Path(__file__).parents[2] / "deploy"
INSTANCE = DEPLOY / "k8s/base/instance/dagster.yaml"
DIGEST = "sha256:" + "0123456789abcdef" * 4


@op
def nothing() -> None: ...


@job
def empty() -> None:
    nothing()


def instance_yaml(path: Path = INSTANCE) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


@pytest.fixture
def server() -> Iterator[StandIn]:
    with stand_in() as running:
        running.answers((201, {}))
        yield running


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DagsterInstance]:
    """One on disk: a Job tells its process which instance it belongs to, and one in memory has no name."""
    with DagsterInstance.local_temp(str(tmp_path_factory.mktemp("dagster"))) as made:
        yield made


@pytest.fixture
def launcher(
    server: StandIn, instance: DagsterInstance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> PatientRunLauncher:
    monkeypatch.setenv("DAGSTER_CURRENT_IMAGE", f"registry.example.org/geo-assets@{DIGEST}")
    monkeypatch.setenv("GEO_ASSETS_IMAGE_DIGEST", DIGEST)
    monkeypatch.setattr(api, "FIRST_PAUSE_S", 0.01)
    access = tmp_path / "kubeconfig"
    access.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1", "kind": "Config", "current-context": "it",
                "clusters": [{"name": "it", "cluster": {"server": server.host}}],
                "users": [{"name": "it", "user": {}}],
                "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
            }
        )
    )  # fmt: skip
    given = instance_yaml()["run_launcher"]["config"]
    given |= {"load_incluster_config": False, "kubeconfig_file": str(access)}
    read = process_config(resolve_to_config_type(PatientRunLauncher.config_type()), given)
    assert read.success, read.errors
    made = PatientRunLauncher.from_config_value(None, read.value)
    made.register_instance(instance)
    return made


def a_run(launcher: PatientRunLauncher, tags: dict[str, str] | None = None) -> DagsterRun:
    return launcher._instance.create_run_for_job(
        empty,
        status=DagsterRunStatus.STARTING,
        tags=tags or {},
        job_code_origin=reconstructable(empty).get_python_origin(),
    )


def launched(launcher: PatientRunLauncher, server: StandIn, tags: dict[str, str] | None = None) -> dict[str, Any]:
    launcher.launch_run(LaunchRunContext(a_run(launcher, tags), workspace=None))
    return next(one.body for one in server.asked if one.method == "POST")


def test_in_a_cluster_dagster_does_what_it_does_elsewhere() -> None:
    here, elsewhere = instance_yaml(), instance_yaml(DEPLOY / "dagster.yaml")

    # What differs is where files are, and how runs are launched and ended.
    for name in set(elsewhere) - {"local_artifact_storage", "compute_logs", "run_monitoring"}:
        assert here[name] == elsewhere[name], name
    assert set(here) - set(elsewhere) == {"run_launcher"}
    assert elsewhere["run_monitoring"].items() <= here["run_monitoring"].items()


def test_rule_15_nothing_but_the_dirty_mark_retries() -> None:
    here = instance_yaml()

    assert here["run_retries"] == {"enabled": False}
    assert here["run_monitoring"]["max_resume_run_attempts"] == 0
    assert PatientRunLauncher.supports_resume_run.__get__(object()) is False


def test_kubernetes_ends_a_job_after_dagster_would_have_ended_its_run() -> None:
    here = instance_yaml()
    monitoring = here["run_monitoring"]
    spec = here["run_launcher"]["config"]["run_k8s_config"]["job_spec_config"]

    bounds = (
        monitoring["start_timeout_seconds"],
        monitoring["max_runtime_seconds"],
        monitoring["cancel_timeout_seconds"],
    )
    assert spec["active_deadline_seconds"] > sum(bounds)


def test_a_run_is_one_restricted_pod_without_a_token(launcher: PatientRunLauncher, server: StandIn) -> None:
    made = launched(launcher, server)
    pod = made["spec"]["template"]["spec"]
    (container,) = pod["containers"]

    assert made["spec"]["backoffLimit"] == 0
    assert pod["restartPolicy"] == "Never"
    assert pod["serviceAccountName"] == "run"
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert container["image"] == f"registry.example.org/geo-assets@{DIGEST}"
    assert {"name": "GEO_ASSETS_IMAGE_DIGEST", "value": DIGEST} in container["env"]
    assert made["metadata"]["labels"]["app.kubernetes.io/component"] == "run"
    writable = {one["mountPath"] for one in container["volumeMounts"] if not one.get("readOnly")}
    assert writable == {"/tmp", "/data"}


def test_no_secrets_value_stands_in_a_job(
    launcher: PatientRunLauncher, server: StandIn, instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = InstanceRef.from_dir(instance.root_directory, overrides=instance_yaml())
    monkeypatch.setattr(instance, "get_ref", lambda: cluster)
    for name in ("POSTGRES_URL", "DAGSTER_POSTGRES_URL", "REDIS_URL", "KAFKA_SASL_PASSWORD"):
        monkeypatch.setenv(f"GEO_ASSETS_{name}", "SECRETPW")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRETPW")

    made = launched(launcher, server)

    assert "SECRETPW" not in json.dumps(made)
    assert "GEO_ASSETS_DAGSTER_POSTGRES_URL" in json.dumps(made)
    (container,) = made["spec"]["template"]["spec"]["containers"]
    assert {one["secretRef"]["name"] for one in container["envFrom"] if "secretRef" in one} == {
        "geo-assets-postgres", "geo-assets-kafka", "geo-assets-redis", "geo-assets-s3",
    }  # fmt: skip


def test_a_batchs_tag_gives_its_pod_memory_and_account(launcher: PatientRunLauncher, server: StandIn) -> None:
    made = launched(launcher, server, run_tags(Size(1_536, 750), "batch"))

    pod = made["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "batch"
    assert pod["containers"][0]["resources"] == {
        "requests": {"cpu": "750m", "memory": "1536Mi"}, "limits": {"memory": "1536Mi"},
    }  # fmt: skip


@pytest.mark.parametrize(
    "asked",
    [
        {"pod_spec_config": {"service_account_name": "control"}},
        {"pod_spec_config": {"serviceAccountName": "upkeep"}},
        {"pod_spec_config": {"host_network": True}},
        {"pod_spec_config": {"automount_service_account_token": True}},
        {"pod_spec_config": {"volumes": [{"name": "x", "secret": {"secret_name": "geo-assets-alerts"}}]}},
        {"pod_spec_config": {"node_selector": {"a": "b"}}},
        {"container_config": {"image": "another"}},
        {"container_config": {"command": ["sh"]}},
        {"container_config": {"env": [{"name": "LD_PRELOAD", "value": "/tmp/x.so"}]}},
        {"container_config": {"env_from": [{"secret_ref": {"name": "geo-assets-alerts"}}]}},
        {"container_config": {"security_context": {"privileged": True}}},
        {"job_spec_config": {"active_deadline_seconds": 1_000_000}},
        {"job_metadata": {"namespace": "kube-system"}},
        {"pod_template_spec_metadata": {"labels": {"app.kubernetes.io/component": "edge"}}},
        {"pod_template_spec_metadata": {"labels": {"dagster/run-id": "another"}}},
        {"pod_template_spec_metadata": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/x"}}},
    ],
)  # fmt: skip
def test_a_tag_chooses_nothing_else(launcher: PatientRunLauncher, server: StandIn, asked: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=r"allowed list|may not choose"):
        launched(launcher, server, {CONFIG_TAG: json.dumps(asked)})
    assert not [one for one in server.asked if one.method == "POST"]


def test_a_launch_while_the_api_is_away_raises_and_leaves_no_trace_but_a_line(
    launcher: PatientRunLauncher, server: StandIn
) -> None:
    server.answers(fault(503, "ServiceUnavailable", "starting"))
    launcher._api_client = Jobs(patience_s=0.1)

    with pytest.raises(ApiAway, match="is away"):
        launcher.launch_run(LaunchRunContext(a_run(launcher), workspace=None))


def test_a_run_outlives_an_api_that_is_away_and_ends_when_its_job_is_gone(
    launcher: PatientRunLauncher, server: StandIn
) -> None:
    run = a_run(launcher)
    name = f"dagster-run-{run.run_id}"
    server.answers(
        fault(503, "ServiceUnavailable", "starting"), None, fault(404, "NotFound", f"{name} not found", name)
    )

    found = [launcher.check_run_worker_health(run).status for _ in range(3)]

    assert found == [WorkerStatus.RUNNING, WorkerStatus.RUNNING, WorkerStatus.NOT_FOUND]


def test_ending_a_run_deletes_its_job_with_its_pod(launcher: PatientRunLauncher, server: StandIn) -> None:
    run = a_run(launcher)
    server.answers((200, {"kind": "Status", "status": "Success"}))

    assert launcher.terminate(run.run_id) is True
    (asked,) = [one for one in server.asked if one.method == "DELETE"]
    assert asked.path.endswith(f"/namespaces/geo-assets/jobs/dagster-run-{run.run_id}")
    assert asked.body["propagationPolicy"] == "Background"


REFUSED = (fault(403, "Forbidden", "no permission", "x"), "ApiRefused")
AWAY = (fault(503, "ServiceUnavailable", "starting"), "ApiAway")


@pytest.mark.parametrize(("answer", "kind"), [REFUSED, AWAY], ids=["refused", "away"])
def test_a_run_that_got_no_job_is_marked_with_what_was_the_fault(
    launcher: PatientRunLauncher, server: StandIn, answer: Any, kind: str
) -> None:
    server.answers(answer)
    launcher._api_client.patience_s = 0.1  # pyright: ignore[reportAttributeAccessIssue]
    run = a_run(launcher)

    with pytest.raises((ApiRefused, ApiAway)):
        launcher.launch_run(LaunchRunContext(run, workspace=None))

    marked = launcher._instance.get_run_by_id(run.run_id)
    assert marked is not None
    assert marked.tags[NOT_LAUNCHED_TAG] == kind


def test_a_run_that_got_its_job_is_not_marked(launcher: PatientRunLauncher, server: StandIn) -> None:
    run = a_run(launcher)

    launcher.launch_run(LaunchRunContext(run, workspace=None))

    left = launcher._instance.get_run_by_id(run.run_id)
    assert left is not None
    assert NOT_LAUNCHED_TAG not in left.tags
