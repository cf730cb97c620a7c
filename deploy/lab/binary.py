"""The control plane as one binary: where it is kept, and how it is built from the sources of Kubernetes.

Nothing is downloaded but Go modules, through the ordinary Go proxy. A build takes ten minutes and four gigabytes of
Go's cache, so the binary is kept under its release.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from deploy.lab.faults import LabFault

RELEASE = "1.36.3"

_SOURCES = Path(__file__).parent / "kubelab"


def cache() -> Path:
    """The folder that keeps built binaries: GEO_ASSETS_LAB_CACHE, else geo_assets/lab in the user's cache folder."""
    named = os.environ.get("GEO_ASSETS_LAB_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "geo_assets" / "lab"


def binary() -> Path:
    """Where the binary of this release is kept, whether or not it is there."""
    return cache() / f"kubelab-{RELEASE}"


def build() -> Path:
    """Build the binary unless it is there; returns its path.

    Raises:
        LabFault: there is no Go, or the build failed.
    """
    kept = binary()
    if kept.exists():
        return kept
    go = shutil.which("go")
    if go is None:
        raise LabFault("no Go on this machine: the control plane is built from source with Go 1.26 or newer")
    kept.parent.mkdir(parents=True, exist_ok=True)
    version = "k8s.io/component-base/version"
    major, minor, _ = RELEASE.split(".")
    stamped = {"gitVersion": f"v{RELEASE}", "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    flags = " ".join(["-s", "-w", *(f"-X {version}.{name}={value}" for name, value in stamped.items())])
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        made = Path(folder) / "kubelab"
        built = subprocess.run(
            [go, "build", "-trimpath", "-ldflags", flags, "-o", str(made), "."],
            cwd=_SOURCES,
            env={**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly"},
            check=False,
        )
        if built.returncode:
            raise LabFault(f"go build in {_SOURCES} ended with {built.returncode}")
        made.replace(kept)
    return kept
