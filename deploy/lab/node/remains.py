"""What a node leaves behind when it is killed, and its end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path


def clear(folder: Path) -> None:
    """End every container of a node that does not run any more, and take its mounts and pods' folders away."""
    runtime = folder / "runc"
    if runtime.exists():
        for container in containers(folder):
            remove_container(folder, container)
    # Innermost first.
    for mount in sorted(_mounts_below(folder), reverse=True):
        subprocess.run(["umount", "-l", mount], check=False, capture_output=True)
    if not _mounts_below(folder):
        shutil.rmtree(folder / "pods", ignore_errors=True)
        (folder / "ready").unlink(missing_ok=True)


def containers(folder: Path) -> list[str]:
    """Names of the node's containers, running or not."""
    listed = subprocess.run(
        ["runc", "--root", str(folder / "runc"), "list", "-f", "json"], capture_output=True, text=True, check=False
    )
    return [each["id"] for each in json.loads(listed.stdout or "null") or []]


def remove_container(folder: Path, name: str) -> None:
    """Kill a container with all its processes, and delete it with its cgroup."""
    for _ in range(50):
        gone = subprocess.run(
            ["runc", "--root", str(folder / "runc"), "delete", "-f", name], capture_output=True, text=True, check=False
        )
        if gone.returncode == 0 or "does not exist" in gone.stderr:
            return
        time.sleep(0.1)


def _mounts_below(folder: Path) -> list[str]:
    inside = str(folder.resolve()) + os.sep
    mounts = (line.split()[1] for line in Path("/proc/mounts").read_text().splitlines())
    return [mount for mount in mounts if mount.startswith(inside)]
