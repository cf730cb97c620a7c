"""What a node leaves behind when it is killed, and its end: containers, cgroups, mounts, folders."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Set
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def clear(folder: Path) -> None:
    """End every container of a node that does not run any more, and take its mounts and pods' folders away."""
    runtime = folder / "runc"
    if runtime.exists():
        for container in containers(folder):
            remove_container(folder, container)
    pods = folder / "pods"
    # Containers that runc knows no more may have left their cgroups: a kill came between.
    uids = {pod.name for pod in pods.iterdir()} if pods.exists() else set[str]()
    _remove_cgroups(lambda container: container.partition(".")[0] in uids)
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
            break
        time.sleep(0.1)
    _remove_cgroups(lambda container: container == name)


def cgroup_of(container: str) -> str:
    """The last part of the path of a container's cgroup."""
    return f"lab-{container}"


def _remove_cgroups(whose: Callable[[str], bool]) -> None:
    """Delete containers' cgroups in every hierarchy: runc leaves one that was busy."""
    left = [place for place in _lab_cgroups() if whose(place.name.removeprefix("lab-"))]
    deadline = time.monotonic() + 5
    while left and time.monotonic() < deadline:
        left = [place for place in left if not _removed(place)]
        if left:
            time.sleep(0.05)


def _lab_cgroups() -> Iterator[Path]:
    for place, names, _ in os.walk(_CGROUPS):
        for name in [each for each in names if each.startswith("lab-")]:
            names.remove(name)
            yield Path(place) / name


def _removed(place: Path) -> bool:
    # What the container made inside goes first.
    for inside, _, _ in os.walk(place, topdown=False):
        try:
            os.rmdir(inside)
        except FileNotFoundError:
            continue
        except OSError:
            return False
    return True


def left(folder: Path, pods: Set[str]) -> list[str]:
    """What is still there of a node and of these pods (uids): processes, mounts, cgroups. After its end, nothing."""
    inside = str(folder.resolve()).encode()
    found = [f"mount {mount}" for mount in _mounts_below(folder)]
    found += [f"cgroup {place}" for place in _lab_cgroups() if place.name[4:].partition(".")[0] in pods]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if inside in command:
            found.append(f"process {process.name}: {command.replace(bytes(1), b' ').decode(errors='replace')[:200]}")
    return found


def _mounts_below(folder: Path) -> list[str]:
    inside = str(folder.resolve()) + os.sep
    mounts = (line.split()[1] for line in Path("/proc/mounts").read_text().splitlines())
    return [mount for mount in mounts if mount.startswith(inside)]
