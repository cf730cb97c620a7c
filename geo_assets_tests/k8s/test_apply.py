"""Every overlay is taken by the real API as it stands, and what is broken in one of many ways is refused by it.

`kubectl apply --dry-run=server --validate=strict`: defaulting, schemas, validation, Pod Security, limits and rights
are the API server's own; only nothing is stored.
"""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from geo_assets_tests.deploy.manifests import (
    K8S,
    OVERLAYS,
    Object,
    build,
    copy_with_secrets,
    named,
    pods,
    with_components,
)
from geo_assets_tests.k8s.deployed import Kubectl
from geo_assets_tests.waiting import patient

pytestmark = pytest.mark.k8s

WITH = {
    "aws, with components": ("aws", "keda", "monitoring", "ui-alb-oidc"),
    "local, with components": ("local", "hpa", "monitoring", "ingress-nginx", "ui-oauth2-proxy"),
}
OPERATORS = {"ScaledObject", "TriggerAuthentication", "PodMonitor", "PrometheusRule"}
"""Kinds that this API does not know by itself: KEDA's and the Prometheus operator's."""

DEFINITIONS = {
    "github.com/kedacore/keda/v2@v2.18.1": (
        "config/crd/bases/keda.sh_scaledobjects.yaml",
        "config/crd/bases/keda.sh_triggerauthentications.yaml",
    ),
    "github.com/prometheus-operator/prometheus-operator@v0.85.0": (
        "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
        "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
    ),
}
"""Go modules that define them, and where."""


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Object]]:
    """The objects of each overlay, by itself and with components."""
    k8s = copy_with_secrets(tmp_path_factory.mktemp("deploy") / "deploy")
    found = {name: build(k8s / "overlays" / name) for name in OVERLAYS}
    for name, (overlay, *components) in WITH.items():
        found[name] = build(with_components(k8s, overlay, *components))
    return found


@pytest.fixture(scope="module")
def api(control_plane: Kubectl, variants: dict[str, list[Object]]) -> Kubectl:
    """The API with the namespace, its accounts and its limits: what the rest is judged by."""
    kinds = ("Namespace", "LimitRange", "ResourceQuota", "Role", "RoleBinding")
    # A component brings an account of its own.
    accounts = named([each for objects in variants.values() for each in objects], "ServiceAccount")
    first = [each for each in variants["aws"] if each["kind"] in kinds] + list(accounts.values())
    control_plane.kubectl("apply", "-f", "-", input=listed(first))
    control_plane.wait(lambda: control_plane.get("serviceaccount"), 60, "the namespace has its accounts")
    return control_plane


def listed(objects: Any) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})


def dry(api: Kubectl, *objects: Object) -> Any:
    """Apply strictly, and store nothing."""
    arguments = ("apply", "--dry-run=server", "--validate=strict", "-n", "geo-assets", "-f", "-")
    return api.lab.kubectl(*arguments, stdin=listed(objects))


@pytest.mark.parametrize("name", [*OVERLAYS, *WITH])
def test_the_api_takes_every_object_of_an_overlay_without_a_warning(
    name: str, api: Kubectl, variants: dict[str, list[Object]]
) -> None:
    objects = [each for each in variants[name] if each["kind"] not in OPERATORS]

    done = dry(api, *objects)

    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == len(objects)


@pytest.mark.parametrize("name", [*OVERLAYS, *WITH])
def test_pod_security_limits_and_accounts_take_every_pod(
    name: str, api: Kubectl, variants: dict[str, list[Object]]
) -> None:
    """A Deployment is taken whatever its pods are: it is the pod that is refused."""
    made = [pod_of(each) for each in variants[name] if each["kind"] in ("Deployment", "Job", "CronJob")]

    done = dry(api, *made)

    assert (done.returncode, done.stderr) == (0, "")


def test_the_api_takes_the_canary_and_its_pod(api: Kubectl) -> None:
    canary = yaml.safe_load((K8S / "canary.yaml").read_text())

    done = dry(api, canary, pod_of(canary))

    assert (done.returncode, done.stderr) == (0, "")


def pod_of(workload: Object) -> Object:
    """The pod that a workload would make."""
    ((_, name, template),) = pods([workload])
    template = copy.deepcopy(template)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**template["metadata"], "name": f"{name}-1", "namespace": "geo-assets"},
        "spec": template["spec"],
    }


Change = Callable[[Object], object]


def container(workload: Object) -> Object:
    """Its first container, to change it."""
    spec = workload["spec"]
    spec = spec.get("jobTemplate", {}).get("spec", spec)
    return spec.get("template", {"spec": spec})["spec"]["containers"][0]


BROKEN: dict[str, tuple[str, str, Change, str]] = {
    "an unknown field": ("Deployment", "edge", lambda o: o["spec"].update(replica=2), "unknown field"),
    "an unknown field deep down": (
        "Deployment",
        "edge",
        lambda o: container(o).update(resource={"limits": {"cpu": "1"}}),
        "unknown field",
    ),
    "a text for a number": ("Deployment", "live", lambda o: o["spec"].update(replicas="two"), "replicas"),
    "a selector that finds nothing": (
        "Deployment",
        "tiles",
        lambda o: o["spec"]["template"]["metadata"]["labels"].update({"app.kubernetes.io/component": "tile"}),
        "selector",
    ),
    "a port above 65535": (
        "Deployment",
        "edge",
        lambda o: container(o)["ports"][0].update(containerPort=99_999),
        "containerPort",
    ),
    "a probe of two kinds": (
        "Deployment",
        "edge",
        lambda o: container(o)["livenessProbe"].update(tcpSocket={"port": 8787}),
        "may not specify more than 1 handler type",
    ),
    "more asked for than allowed": (
        "Deployment",
        "code",
        lambda o: container(o)["resources"]["requests"].update(memory="2Gi"),
        "must be less than or equal to memory limit",
    ),
    "a mount without its volume": (
        "Deployment",
        "code",
        lambda o: o["spec"]["template"]["spec"].update(volumes=[]),
        "volumeMounts",
    ),
    "a schedule that is none": ("CronJob", "mend", lambda o: o["spec"].update(schedule="hourly"), "schedule"),
    "a container without an image": ("Job", "migrate", lambda o: container(o).pop("image"), "image"),
    "no address": (
        "NetworkPolicy",
        "services",
        lambda o: o["spec"]["egress"][0]["to"][0]["ipBlock"].update(cidr="10.0.0.0"),
        "cidr",
    ),
    "an unknown field of a policy": (
        "NetworkPolicy",
        "code",
        lambda o: o["spec"].update(ingres=o["spec"].pop("ingress")),
        "unknown field",
    ),
    "a path without its type": (
        "Ingress",
        "edge",
        lambda o: o["spec"]["rules"][0]["http"]["paths"][0].pop("pathType"),
        "pathType",
    ),
    "a budget of both kinds": (
        "PodDisruptionBudget",
        "edge",
        lambda o: o["spec"].update(minAvailable=1),
        "cannot be both set",
    ),
    "an autoscaler from two to one": (
        "HorizontalPodAutoscaler",
        "edge",
        lambda o: o["spec"].update(maxReplicas=1),
        "maxReplicas",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_object_is_refused_and_its_fault_named(
    name: str, api: Kubectl, variants: dict[str, list[Object]]
) -> None:
    kind, which, change, words = BROKEN[name]
    broken = copy.deepcopy(named(variants["aws"], kind)[which])
    assert dry(api, broken).returncode == 0
    change(broken)

    done = dry(api, broken)

    assert done.returncode != 0
    assert words in done.stderr


REFUSED: dict[str, tuple[Change, str]] = {
    "root": (lambda spec: spec["securityContext"].update(runAsUser=0), "violates PodSecurity"),
    "no seccomp profile": (lambda spec: spec["securityContext"].pop("seccompProfile"), "violates PodSecurity"),
    "a way to privileges": (
        lambda spec: spec["containers"][0]["securityContext"].update(allowPrivilegeEscalation=True),
        "violates PodSecurity",
    ),
    "capabilities": (
        lambda spec: spec["containers"][0]["securityContext"].pop("capabilities"),
        "violates PodSecurity",
    ),
    "privileged": (
        lambda spec: spec["containers"][0]["securityContext"].update(privileged=True, allowPrivilegeEscalation=True),
        "violates PodSecurity",
    ),
    "the host's network": (lambda spec: spec.update(hostNetwork=True), "violates PodSecurity"),
    "a folder of the host": (
        lambda spec: spec["volumes"].append({"name": "host", "hostPath": {"path": "/"}}),
        "violates PodSecurity",
    ),
    "more memory than one may have": (
        lambda spec: spec["containers"][0]["resources"]["limits"].update(memory="64Gi"),
        "maximum memory usage per Container is 16Gi",
    ),
    "an account that is not there": (lambda spec: spec.update(serviceAccountName="admin"), "not found"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_pod_that_asks_for_more_than_it_may_have_is_refused(
    name: str, api: Kubectl, variants: dict[str, list[Object]]
) -> None:
    change, words = REFUSED[name]
    pod = pod_of(named(variants["aws"], "Deployment")["edge"])
    assert dry(api, pod).returncode == 0
    change(pod["spec"])

    done = dry(api, pod)

    assert done.returncode != 0
    assert words in done.stderr


@pytest.mark.parametrize(
    ("account", "verb", "resource", "allowed"),
    [
        ("control", "create", "jobs.batch", True),
        ("control", "delete", "jobs.batch", True),
        ("control", "get", "jobs.batch/status", True),
        ("control", "delete", "pods", True),
        ("control", "create", "pods", False),
        ("control", "create", "pods/exec", False),
        ("control", "get", "secrets", False),
        ("control", "patch", "deployments.apps", False),
        ("control", "create", "serviceaccounts/token", False),
        ("run", "create", "jobs.batch", False),
        ("run", "get", "pods", False),
        ("batch", "create", "jobs.batch", False),
        ("tiles", "get", "configmaps", False),
        ("upkeep", "get", "secrets", False),
        ("code", "create", "jobs.batch", False),
    ],
)
def test_each_account_may_do_what_it_is_for_and_no_more(
    account: str, verb: str, resource: str, allowed: bool, api: Kubectl
) -> None:
    asked = ("auth", "can-i", verb, resource, "-n", "geo-assets", f"--as=system:serviceaccount:geo-assets:{account}")
    done = api.lab.kubectl(*asked)

    assert done.stdout.strip() == ("yes" if allowed else "no")
    assert (done.returncode == 0) == allowed


def test_an_unknown_kind_is_refused(api: Kubectl, variants: dict[str, list[Object]]) -> None:
    """What components with an operator's kinds meet where the operator is not."""
    done = dry(api, named(variants["aws, with components"], "PodMonitor")["services"])

    assert done.returncode != 0
    assert "no matches for kind" in done.stderr


# -- kinds of operators ----------------------------------------------------------------------------------------------


def definitions() -> list[Path]:
    """What the operators' own releases say of their kinds; skips where they are not to be had."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("no Go, which fetches the operators' definitions of their kinds")
    found = []
    for module, files in DEFINITIONS.items():
        # Outside the checkout: it asks for a module, and there is none to note it in.
        done = subprocess.run(
            [go, "mod", "download", "-json", module],
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
            timeout=patient(300),
        )
        told = json.loads(done.stdout or "{}")
        if done.returncode or "Dir" not in told:
            pytest.skip(f"{module} is not to be had: {(told.get('Error') or done.stderr)[:200]}")
        found += [Path(told["Dir"]) / file for file in files]
    return found


@pytest.fixture(scope="module")
def with_operators(api: Kubectl) -> Iterator[Kubectl]:
    """The API with the operators' kinds."""
    files = definitions()
    given = [argument for file in files for argument in ("-f", str(file))]
    try:
        # Too large for the annotation that a client's `apply` would write.
        api.kubectl("create", *given)
        api.kubectl("wait", "--for=condition=Established", f"--timeout={patient(60):.0f}s", *given)
        # What knows of a kind is brought up to date a moment later.
        api.wait(lambda: "ScaledObject" in api.kubectl("api-resources", "--no-headers"), 60, "the kinds are known")
        yield api
    finally:
        api.lab.kubectl("delete", "--ignore-not-found", *given)


@pytest.mark.parametrize("name", WITH)
def test_what_is_meant_for_an_operator_is_as_its_kind_is_defined(
    name: str, with_operators: Kubectl, variants: dict[str, list[Object]]
) -> None:
    objects = [each for each in variants[name] if each["kind"] in OPERATORS]
    expected = OPERATORS if name.startswith("aws") else {"PodMonitor", "PrometheusRule"}
    assert {each["kind"] for each in objects} == expected

    done = dry(with_operators, *objects)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("kind", "which", "change", "words"),
    [
        ("ScaledObject", "ingest", lambda o: o["spec"].update(maxReplicas=4), "unknown field"),
        ("ScaledObject", "live", lambda o: o["spec"]["triggers"][0].pop("type"), "type"),
        ("TriggerAuthentication", "kafka", lambda o: o["spec"]["env"][0].pop("parameter"), "parameter"),
        ("PodMonitor", "services", lambda o: o["spec"]["podMetricsEndpoints"][0].update(interval="soon"), "interval"),
        ("PrometheusRule", "geo-assets", lambda o: o["spec"]["groups"][0]["rules"][0].pop("expr"), "expr"),
    ],
)
def test_what_an_operator_would_not_understand_is_refused(
    kind: str, which: str, change: Change, words: str, with_operators: Kubectl, variants: dict[str, list[Object]]
) -> None:
    broken = copy.deepcopy(named(variants["aws, with components"], kind)[which])
    change(broken)

    done = dry(with_operators, broken)

    assert done.returncode != 0
    assert words in done.stderr
