"""The platform in a cluster of the lab, for tests from the outside."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest

from deploy.lab.binary import binary, cache
from deploy.lab.cluster import NODE, ROOT, Lab
from deploy.lab.faults import LabFault
from deploy.lab.network import local
from deploy.lab.node.remains import left
from geo_assets import dagster_home
from geo_assets.events.signature import sign
from geo_assets.settings import Settings
from geo_assets.stack import Stack
from geo_assets_tests.real_services import NEEDS, folder, found
from geo_assets_tests.stacks import environment_of, settings_from
from geo_assets_tests.waiting import patient, until
from geo_assets_tests.webhook import Webhook, webhook
from scripts.local_services.services import Services

NAMESPACE = "geo-assets"
IMAGE = "localhost/geo-assets:lab"
SOURCE, SECRET = "city", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
SOURCES = f"""
sources:
  {SOURCE}:
    secrets: [{SECRET}]
    default_crs: EPSG:4326
    default_layer: buildings
"""
DEPLOYMENTS = ("edge", "ingest", "live", "tiles", "code", "dagster-webserver", "dagster-daemon")

SMALL = {
    "GEO_ASSETS_LOG_PARTITIONS": "2",
    "GEO_ASSETS_BUILD_WORKERS": "1",
    "GEO_ASSETS_INGEST_WORKERS": "1",
}
"""Two cores run all of it."""

QUICK = {
    "start_timeout_seconds: 180": "start_timeout_seconds: 60",
    "cancel_timeout_seconds: 180": "cancel_timeout_seconds: 60",
    "poll_interval_seconds: 15": "poll_interval_seconds: 5",
}
"""What dagster.yaml says of runs that hang, and what it says here: nobody waits three minutes for each of them."""

_SECRET_SETTINGS = {
    "postgres": ("GEO_ASSETS_POSTGRES_URL", "GEO_ASSETS_DAGSTER_POSTGRES_URL"),
    "kafka": ("GEO_ASSETS_KAFKA_SASL_PASSWORD",),
    "redis": ("GEO_ASSETS_REDIS_URL",),
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    "alerts": ("GEO_ASSETS_ALERT_WEBHOOK_URLS",),
}


class Kubectl:
    """Calls to the API of one lab."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab

    def kubectl(self, *arguments: str, input: str | None = None) -> str:
        """What the real kubectl prints; an assertion with its own words when it fails."""
        done = self.lab.kubectl(*arguments, stdin=input)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def get(self, kind: str, name: str | None = None, *, selector: str = "", namespace: str = NAMESPACE) -> Any:
        """One object, or the list of those that a selector finds."""
        asked = ["get", kind, "-n", namespace, "-o", "json"]
        if name is not None:
            return json.loads(self.kubectl(*asked, name))
        return json.loads(self.kubectl(*asked, *(["-l", selector] if selector else [])))["items"]

    def wait(self, function: Callable[[], Any], seconds: float = 60, what: str = "it happens") -> Any:
        """The first true answer; an assertion that names what did not come."""
        return until(function, seconds, why=what, every=0.5)

    def stop_api(self) -> None:
        """Kill the API server, as a machine that loses power does."""
        self.lab.stop("apiserver", hard=True)

    def start_api(self) -> None:
        """Bring it back on its port, and wait until it answers."""
        self.lab.start("apiserver")


class Cluster(Kubectl):
    """The platform, applied and ready.

    Args:
        lab: Where it runs.
        environment: Settings that a process outside the cluster needs to reach the same room in the same services.
        home: A folder with the cluster's layers and sources.
        receiver: Who is told of what fails.
    """

    def __init__(self, lab: Lab, environment: Mapping[str, str], home: Path, receiver: Webhook) -> None:
        super().__init__(lab)
        self.receiver = receiver
        self._urls: dict[str, str] = {}
        self.environment = {**environment, "GEO_ASSETS_HOME": str(home)}

    @property
    def settings(self) -> Settings:
        """The same as an object."""
        return settings_from(self.environment)

    def stack(self) -> Stack:
        """Its ports, for a look from outside."""
        return Stack(self.settings)

    def url(self, service: str) -> str:
        """Where a service answers, through the proxy; known also while the API is away."""
        if service not in self._urls:
            spec = self.get("service", service)["spec"]
            self._urls[service] = f"http://{local(spec['clusterIP'])}:{spec['ports'][0]['port']}"
        return self._urls[service]

    def graphql(self, query: str, **variables: Any) -> dict[str, Any]:
        """Ask Dagster's own interface."""
        url = f"{self.url('dagster-webserver')}/graphql"
        answer = httpx.post(url, json={"query": query, "variables": variables}, timeout=patient(60), trust_env=False)
        value = answer.json()
        assert "errors" not in value, value
        return value["data"]

    def post(self, body: Any, kind: str = "features", event_id: str | None = None) -> httpx.Response:
        """Sign a body as its source would and send it to the edge; its answer, whatever it is."""
        content = json.dumps(body).encode()
        webhook_id = event_id or "post-" + hashlib.sha256(content).hexdigest()[:24]
        headers = {
            "content-type": "application/geo+json" if kind == "features" else "application/json",
            "x-source": SOURCE,
            **sign(SECRET, webhook_id, int(time.time()), content),
        }
        url = f"{self.url('edge')}/v1/{kind}"
        return httpx.post(url, content=content, headers=headers, timeout=patient(30), trust_env=False)

    def command(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run the command line in a running pod of the code server, with its settings and its image."""
        (pod,) = self.pods("code")[:1]
        return self.execute(pod, "geo-assets", *arguments, stdin=stdin)

    def execute(self, pod: str, *command: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command in a pod's first container."""
        return subprocess.run(
            ["runc", "--root", str(self.lab.folder / NODE / "runc"), "exec", self._container(pod), *command],
            input=stdin, capture_output=True, text=True, check=False, timeout=patient(300),
        )  # fmt: skip

    def kill(self, pod: str) -> None:
        """Kill -9 the first process of a pod, as a node without memory does."""
        self._runc("kill", pod, "9")

    @contextmanager
    def standing_still(self, pod: str) -> Iterator[None]:
        """A pod's processes get no processor for the length of a block, and know nothing of it."""
        self._runc("pause", pod)
        try:
            yield
        finally:
            self._runc("resume", pod)

    def _runc(self, verb: str, pod: str, *arguments: str) -> None:
        done = subprocess.run(
            ["runc", "--root", str(self.lab.folder / NODE / "runc"), verb, self._container(pod), *arguments],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def _container(self, pod: str) -> str:
        spec = self.get("pod", pod)
        return f"{spec['metadata']['uid']}.{spec['spec']['containers'][0]['name']}"

    def pods(self, component: str) -> list[str]:
        """Names of a role's running and ready pods that nobody deletes."""
        found = self.get("pods", selector=f"app.kubernetes.io/component={component}")
        return [
            pod["metadata"]["name"]
            for pod in found
            if "deletionTimestamp" not in pod["metadata"]
            and {"type": "Ready", "status": "True"}.items()
            <= next((c for c in pod["status"].get("conditions", []) if c["type"] == "Ready"), {}).items()
        ]

    def logs(self, pod: str) -> str:
        """All that a pod printed."""
        return self.kubectl("logs", "-n", NAMESPACE, pod, "--tail=-1")

    def stop_node(self) -> None:
        """The node dies, with everything on it."""
        self.lab.stop(NODE, hard=True)

    def start_node(self) -> None:
        """The node comes back, and starts what is bound to it anew."""
        self.lab.start(NODE)

    def wait_until_ready(self, seconds: float = 300) -> None:
        """Wait until every Deployment has all its pods, of its newest version and ready."""
        for name in DEPLOYMENTS:
            self.kubectl(
                "rollout", "status", f"deployment/{name}", "-n", NAMESPACE, f"--timeout={patient(seconds):.0f}s"
            )

    def why(self) -> str:
        """What pods are and what happened to them, for a test that fails."""
        shown = [self.lab.kubectl("get", "pods,jobs", "-n", NAMESPACE, "-o", "wide").stdout]
        shown.append(self.lab.kubectl("get", "events", "-n", NAMESPACE, "--sort-by=.lastTimestamp").stdout[-6000:])
        for pod in self.get("pods"):
            if not any(each.get("ready") for each in pod["status"].get("containerStatuses") or []):
                name = pod["metadata"]["name"]
                shown += [f"== {name}", self.lab.kubectl("logs", "-n", NAMESPACE, name, "--tail=30").stdout]
        return "\n".join(shown)


def unless_required(what: str) -> NoReturn:
    """Skip with a line; fail under REQUIRE_LAB=1, where a skip would hide a broken machine."""
    if os.environ.get("REQUIRE_LAB") == "1":
        pytest.fail(what)
    pytest.skip(what)


def need_control_plane() -> None:
    """Skip where the control plane cannot run."""
    if not binary().exists():
        unless_required(f"no control plane: {binary()} is not there (deploy/lab/lab build)")
    for program, package in (("etcd", "etcd-server"), ("openssl", "openssl")):
        if shutil.which(program) is None:
            unless_required(f"no {program} (Debian has it in the package {package})")


def need_node() -> None:
    """Skip where no pod can run."""
    if os.geteuid() != 0:
        unless_required("the lab's node needs root: it mounts images and makes cgroups")
    for program in ("runc", "buildah", "mmdebstrap"):
        if shutil.which(program) is None:
            unless_required(f"no {program} (Debian has it in the package {program})")


@contextmanager
def control_plane(folder: Path) -> Iterator[Kubectl]:
    """A control plane without a node."""
    need_control_plane()
    lab = Lab(folder)
    try:
        lab.up(node=False)
        yield Kubectl(lab)
    finally:
        lab.down()


@contextmanager
def platform(folder: Path) -> Iterator[Cluster]:
    """The whole platform: image, real services, cluster and manifests."""
    need_control_plane()
    need_node()
    with (
        built_image() as (rootfs, configuration),
        real_services(folder),
        environment_of("production") as environment,
        webhook() as receiver,
    ):
        lab = Lab(folder / "lab")
        try:
            lab.up()
            lab.add_image(IMAGE, rootfs, configuration)
            told = {"GEO_ASSETS_ALERT_WEBHOOK_URLS": receiver.url}
            cluster = Cluster(lab, {**environment, **told}, folder / "home", receiver)
            try:
                roll_out(cluster, folder)
            except (AssertionError, LabFault) as fault:
                raise AssertionError(f"{fault}\n{cluster.why()}") from None
            yield cluster
        finally:
            listed = lab.kubectl("get", "pods", "-A", "-o", "jsonpath={.items[*].metadata.uid}").stdout
            lab.down()
        assert left(lab.folder, set(listed.split())) == []


@contextmanager
def built_image() -> Iterator[tuple[Path, dict[str, Any]]]:
    """The image, built where it is not, and mounted: its root folder and its configuration."""
    built = subprocess.run([ROOT / "deploy/image/build", "platform"], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-3000:]
    storage = cache() / "image"
    buildah = ["buildah", "--root", f"{storage}/storage", "--runroot", f"{storage}/run", "--storage-driver", "overlay"]

    def run(*arguments: str) -> str:
        done = subprocess.run([*buildah, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    container = run("from", "--pull-never", IMAGE)
    try:
        rootfs = Path(run("mount", container))
        configuration = json.loads(run("inspect", "--type", "image", IMAGE))["OCIv1"]["config"]
        yield rootfs, configuration
    finally:
        run("umount", container)
        run("rm", container)


@contextmanager
def real_services(own: Path) -> Iterator[None]:
    """Those that run already, else some of the tests' own."""
    needed = ("kafka", "redis", "postgres", "s3")
    if all(NEEDS[name] in found() for name in needed):
        yield
        return
    services = Services(own / "services")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GEO_ASSETS_SERVICES", str(own / "services"))
        assert folder() == own / "services"
        try:
            services.start(*needed)
            yield
        finally:
            services.remove()


def roll_out(cluster: Cluster, folder: Path) -> None:
    """Write the overlay with the values of the real services, and roll it out as an operator does."""
    overlay = write_overlay(cluster, folder / "overlay")
    kubectl = folder / "kubectl"
    kubectl.write_text(f'#!/bin/sh\nexec {shlex.join(cluster.lab.kubectl_command())} "$@"\n')
    kubectl.chmod(0o755)
    told = {**os.environ, "KUBECTL": str(kubectl), "ROLL_OUT_WAIT_S": f"{patient(300):.0f}"}
    done = subprocess.run(
        [ROOT / "deploy/k8s/roll-out", overlay], env=told, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr}"
    cluster.wait_until_ready()


def write_overlay(cluster: Cluster, folder: Path) -> Path:
    """A kustomization upon deploy/k8s/overlays/lab; returns its folder."""
    home = Path(cluster.environment["GEO_ASSETS_HOME"])
    home.mkdir(parents=True)
    (home / "sources.yaml").write_text(SOURCES)
    shutil.copy(ROOT / "deploy/k8s/base/files/layers.yaml", home / "layers.yaml")
    values = {
        name: value
        for name, value in {
            **cluster.environment,
            **dagster_home.environment(cluster.settings, Path("/opt/dagster")),
            **SMALL,
        }.items()
        if name.startswith(("GEO_ASSETS_", "AWS_"))
    }
    # The image's own places, and no cache here.
    for name in ("GEO_ASSETS_HOME", "GEO_ASSETS_PURGE_URLS"):
        values.pop(name, None)
    folder.mkdir(parents=True)
    (folder / "sources.yaml").write_text(SOURCES)
    instance = (ROOT / "deploy/k8s/base/instance/dagster.yaml").read_text()
    for usual, quick in QUICK.items():
        assert instance.count(usual) == 1, f"dagster.yaml has no {usual}"
        instance = instance.replace(usual, quick)
    (folder / "dagster.yaml").write_text(instance)
    secrets = []
    for name, settings in _SECRET_SETTINGS.items():
        _write(folder / f"{name}.env", {each: values.pop(each, "") for each in settings if each in values})
        secrets.append({"name": f"geo-assets-{name}", "envs": [f"{name}.env"]})
    secrets.append({"name": "geo-assets-sources", "files": ["sources.yaml"]})
    _write(folder / "settings.env", values)
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": NAMESPACE,
        "resources": [os.path.relpath(ROOT / "deploy/k8s/overlays/lab", folder)],
        "generatorOptions": {"disableNameSuffixHash": True, "labels": {"geo-assets/step": "prepare"}},
        "configMapGenerator": [
            {"name": "geo-assets-settings", "behavior": "merge", "envs": ["settings.env"]},
            {"name": "dagster-instance", "behavior": "merge", "files": ["dagster.yaml"]},
        ],
        "secretGenerator": secrets,
    }
    (folder / "kustomization.yaml").write_text(json.dumps(content, indent=2))
    return folder


def _write(path: Path, values: Mapping[str, str]) -> None:
    path.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
