"""Containers by runc: one root of overlay, one bundle, one cgroup each. Knows no API server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.lab.node.remains import cgroup_of, remove_container

_CGROUPS = Path("/sys/fs/cgroup")


class RuntimeRefused(Exception):
    """runc did not make the container; the message is its own."""


@dataclass(frozen=True, slots=True)
class Image:
    """An unpacked image, never written to."""

    rootfs: Path
    variables: dict[str, str] = field(default_factory=dict)
    user: str = ""
    directory: str = "/"
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()

    @classmethod
    def of(cls, known: dict[str, Any]) -> Image:
        """An image as the lab's file names it."""
        configuration = known.get("configuration") or {}
        return cls(
            Path(known["rootfs"]),
            dict(each.split("=", 1) for each in configuration.get("Env") or []),
            configuration.get("User") or "",
            configuration.get("WorkingDir") or "/",
            tuple(configuration.get("Entrypoint") or ()),
            tuple(configuration.get("Cmd") or ()),
        )


@dataclass(frozen=True, slots=True)
class Bundle:
    """What a container is to be."""

    arguments: list[str]
    variables: dict[str, str]
    directory: str
    user: int
    group: int
    groups: list[int]
    read_only: bool
    capabilities: list[str]
    no_new_privileges: bool
    hostname: str
    mounts: list[tuple[str, Path, bool]]
    """Path inside, path outside, whether it is read-only."""
    memory_bytes: int | None = None
    processors: float | None = None
    """The most it may use."""
    shares: int | None = None


class Running:
    """One start of a container.

    Args:
        node: The node's folder.
        name: Of the container, for runc.
        folder: Where its root and bundle go.
        image: What it runs.
        bundle: How.
        log: Where its output goes.
    """

    def __init__(self, node: Path, name: str, folder: Path, image: Image, bundle: Bundle, log: Path) -> None:
        self._node, self.name, self._folder, self._log = node, name, folder, log
        self._image, self._bundle = image, bundle
        self._pid = 0
        self._memory_cgroup: Path | None = None
        self._reaping = threading.Lock()
        self._orphans: list[int] = []
        """Commands whose runc was killed; this process is their parent now."""
        self.exit_code: int | None = None
        self.out_of_memory = False

    def start(self) -> None:
        """Mount its root, create and start it.

        Raises:
            RuntimeRefused: runc's own words.
        """
        root = self._folder / "rootfs"
        for each in ("upper", "work", "rootfs"):
            (self._folder / each).mkdir(parents=True, exist_ok=True)
        layers = f"lowerdir={self._image.rootfs},upperdir={self._folder}/upper,workdir={self._folder}/work"
        mounted = subprocess.run(
            ["mount", "-t", "overlay", "lab", "-o", layers, str(root)], capture_output=True, text=True, check=False
        )
        if mounted.returncode:
            raise RuntimeRefused(mounted.stderr.strip())
        try:
            (self._folder / "config.json").write_text(json.dumps(self._specification()))
        except RuntimeRefused:
            self.remove()
            raise
        pid_file = self._folder / "pid"
        with open(self._log, "ab") as log:
            before = log.tell()
            made = subprocess.run(
                [*self._runc, "create", "--bundle", str(self._folder), "--pid-file", str(pid_file), self.name],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False,
            )  # fmt: skip
        if made.returncode:
            said = self._log.read_bytes()[before:].decode(errors="replace")
            self.remove()
            raise RuntimeRefused(said.strip()[-500:])
        self._pid = int(pid_file.read_text())
        self._memory_cgroup = _memory_cgroup(self._pid)
        begun = subprocess.run([*self._runc, "start", self.name], capture_output=True, text=True, check=False)
        if begun.returncode:
            self.remove()
            raise RuntimeRefused(begun.stderr.strip()[-500:])

    def poll(self) -> int | None:
        """Its exit code once it has ended, 128 more than the signal that ended it; None while it runs."""
        with self._reaping:
            # While one of them waits to be reaped, the kernel lets no first process of its namespace end.
            for orphan in list(self._orphans):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(orphan, signal.SIGKILL)
                try:
                    done, _ = os.waitpid(orphan, os.WNOHANG)
                except ChildProcessError:
                    done = orphan
                if done:
                    self._orphans.remove(orphan)
            if self.exit_code is None and self._pid:
                try:
                    done, status = os.waitpid(self._pid, os.WNOHANG)
                except ChildProcessError:
                    done, status = self._pid, signal.SIGKILL
                if done:
                    code = os.waitstatus_to_exitcode(status)
                    self.out_of_memory = self._killed_for_memory()
                    self.exit_code = 128 - code if code < 0 else code
            return self.exit_code

    def send(self, number: signal.Signals) -> None:
        """Signal its first process."""
        subprocess.run([*self._runc, "kill", self.name, str(int(number))], capture_output=True, check=False)

    def execute(self, command: list[str], timeout_s: float) -> tuple[int | None, str]:
        """Run a command inside.

        Returns:
            Its exit code, None when it did not end in time and was killed, and the end of its output.
        """
        pid_file = self._folder / f"exec-{threading.get_ident()}"
        child = subprocess.Popen(
            [*self._runc, "exec", "--pid-file", str(pid_file), self.name, *command],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        try:
            output, _ = child.communicate(timeout=timeout_s)
            return child.returncode, output[-500:]
        except subprocess.TimeoutExpired:
            # The command first: runc then sees its end and leaves nothing behind.
            if (inside := _number_in(pid_file)) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(inside, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.communicate(timeout=2)
            if child.poll() is None:
                child.kill()
                child.communicate()
                if (inside := _number_in(pid_file)) is not None:
                    self._orphans.append(inside)
            return None, f"command timed out: {' '.join(command)[:200]}"
        finally:
            pid_file.unlink(missing_ok=True)

    def remove(self) -> None:
        """End it, and take its cgroup and mounts away."""
        remove_container(self._node, self.name)
        deadline = time.monotonic() + 5
        while self._pid and self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        subprocess.run(["umount", "-l", str(self._folder / "rootfs")], capture_output=True, check=False)

    @property
    def _runc(self) -> list[str]:
        return ["runc", "--root", str(self._node / "runc")]

    def _killed_for_memory(self) -> bool:
        if self._memory_cgroup is None:
            return False
        for name in ("memory.oom_control", "memory.events"):
            try:
                lines = (self._memory_cgroup / name).read_text().splitlines()
            except OSError:
                continue
            return any(line.split()[0] == "oom_kill" and int(line.split()[1]) > 0 for line in lines)
        return False

    def _specification(self) -> dict[str, Any]:
        """The OCI runtime's config.json (runtime-spec 1.0)."""
        bundle = self._bundle
        made = subprocess.run(["runc", "spec"], cwd=self._folder, capture_output=True, text=True, check=False)
        if made.returncode:
            raise RuntimeRefused(made.stderr.strip())
        found = json.loads((self._folder / "config.json").read_text())
        found["process"].update(
            terminal=False,
            args=bundle.arguments,
            cwd=bundle.directory,
            env=[f"{name}={value}" for name, value in bundle.variables.items()],
            user={"uid": bundle.user, "gid": bundle.group, "additionalGids": bundle.groups},
            noNewPrivileges=bundle.no_new_privileges,
            capabilities=dict.fromkeys(("bounding", "effective", "permitted"), bundle.capabilities),
            rlimits=[],
        )
        found["root"] = {"path": "rootfs", "readonly": bundle.read_only}
        found["hostname"] = bundle.hostname
        for inside, outside, read_only in bundle.mounts:
            options = ["rbind", "ro" if read_only else "rw"]
            found["mounts"].append({"destination": inside, "source": str(outside), "type": "bind", "options": options})
        # The cluster's network is the machine's loopback.
        linux = found["linux"]
        linux["namespaces"] = [each for each in linux["namespaces"] if each["type"] != "network"]
        linux["resources"] = self._resources()
        # A relative path stays below the node's own cgroup; the unified hierarchy allows no group beside processes.
        unified = (_CGROUPS / "cgroup.controllers").exists()
        linux["cgroupsPath"] = f"/geo-assets-lab/{cgroup_of(self.name)}" if unified else cgroup_of(self.name)
        return found

    def _resources(self) -> dict[str, Any]:
        bundle = self._bundle
        resources: dict[str, Any] = {}
        if bundle.memory_bytes:
            resources["memory"] = {"limit": bundle.memory_bytes}
        processors: dict[str, int] = {}
        if bundle.processors:
            processors |= {"period": 100_000, "quota": max(1_000, int(bundle.processors * 100_000))}
        if bundle.shares:
            processors["shares"] = bundle.shares
        if processors:
            resources["cpu"] = processors
        return resources


def _number_in(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _memory_cgroup(pid: int) -> Path | None:
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _CGROUPS / "memory" / path.lstrip("/")
        if controllers == "" and (_CGROUPS / "cgroup.controllers").exists():
            return _CGROUPS / path.lstrip("/")
    return None
