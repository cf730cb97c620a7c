"""Builds the manifests of deploy/k8s as kubectl does, for tests without a cluster."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from deploy.lab.binary import binary
from geo_assets_tests.deploy.examples import DEPLOY
from geo_assets_tests.needs import missing

K8S = DEPLOY / "k8s"
OVERLAYS = ("aws", "lab", "local")
COMPONENTS = ("hpa", "ingress-nginx", "keda", "monitoring", "ui-alb-oidc", "ui-oauth2-proxy")

Object = dict[str, Any]


@functools.cache
def kustomize() -> tuple[str, ...]:
    """The command that builds a kustomization; where there is none, the test has nothing to read."""
    command = found()
    if command is None:
        missing("no kustomize 5 and no kubectl from 1.27 on (deploy/lab/lab build makes one)")
    return command


def found() -> tuple[str, ...] | None:
    """The command of kubectl from 1.27 on, of the lab, or kustomize 5 itself; None where there is none of them."""
    kubectl = shutil.which("kubectl")
    if kubectl is not None:
        told = subprocess.run([kubectl, "version", "--client", "-o", "json"], capture_output=True, check=False)
        # Before that kubectl did not say, and knew no components or other replacements.
        if json.loads(told.stdout or "{}").get("kustomizeVersion", "").startswith("v5"):
            return (kubectl, "kustomize")
    if binary().exists():
        return (str(binary()), "kubectl", "kustomize")
    alone = shutil.which("kustomize") or shutil.which("kustomize", path=str(Path(sys.executable).parent))
    return None if alone is None else (alone, "build")


def build(folder: Path) -> list[Object]:
    """The objects of a kustomization."""
    done = subprocess.run([*kustomize(), str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "kustomize warns"
    # libyaml where it is: a dashboard is 95 kB in one text.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [each for each in yaml.load_all(done.stdout, Loader=loader) if each is not None]


def copy_with_secrets(folder: Path) -> Path:
    """A copy of deploy/ with the secrets that overlays/local asks for; returns its k8s folder."""
    shutil.copytree(DEPLOY, folder, ignore=shutil.ignore_patterns("secrets", "lab", "image", "*.pyc"))
    # The lab's overlay is a folder of that name too.
    shutil.copytree(K8S / "overlays/lab", folder / "k8s/overlays/lab", dirs_exist_ok=True)
    made = subprocess.run(
        [sys.executable, str(folder / "k8s/overlays/local/make-secrets")], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    return folder / "k8s"


def with_components(k8s: Path, overlay: str, *components: str) -> Path:
    """A kustomization upon an overlay, with components that it has not; returns its folder."""
    folder = k8s / "overlays" / f"{overlay}-with-{'-'.join(components)}"
    folder.mkdir()
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "geo-assets",
        "resources": [f"../{overlay}"],
        "components": [f"../../components/{name}" for name in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return folder


def named(objects: list[Object], kind: str) -> dict[str, Object]:
    """Objects of a kind by name."""
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


def pods(objects: list[Object]) -> Iterator[tuple[str, str, Object]]:
    """Kind, name and pod template of everything that makes pods."""
    for each in objects:
        kind, spec = each["kind"], each.get("spec", {})
        if kind == "CronJob":
            spec = spec["jobTemplate"]["spec"]
        if kind in ("Deployment", "StatefulSet", "Job", "CronJob"):
            yield kind, each["metadata"]["name"], spec["template"]


if __name__ == "__main__":
    sys.exit(found() is None)
