"""The processes of one lab: etcd, the API server, the controllers, the scheduler and the stand-in node.

Everything listens on loopback, on ports that were free, and everything a lab has is in its folder: keys, data, logs,
and a file with the process ids and ports. Only processes named there are ever signalled.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from deploy.lab import keys
from deploy.lab.binary import binary
from deploy.lab.faults import LabFault
from deploy.lab.network import Network, free_network
from deploy.lab.node.remains import clear
from scripts.local_services.processes import Process, adopt, family, free_ports, lives, send, wait_until_gone

ROOT = Path(__file__).resolve().parents[2]

CONTROL_PLANE = ("etcd", "apiserver", "controllers", "scheduler")
"""In the order of their start."""

NODE = "node"

_START_S = 180
"""The API server alone needs 4 s on an idle machine."""


@dataclass
class State:
    """What a lab's file says."""

    network: int
    ports: dict[str, int]
    processes: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Process id and start time by name."""
    cpu: str = "8"
    memory: str = "16Gi"


def default_folder() -> Path:
    """GEO_ASSETS_LAB, else .lab in the checkout."""
    return Path(os.environ.get("GEO_ASSETS_LAB") or ROOT / ".lab")


class Lab:
    """One cluster in a folder.

    Args:
        folder: Where its state is.
        control_plane: The binary; the cached one where it is None.
    """

    def __init__(self, folder: Path, control_plane: Path | None = None) -> None:
        self.folder = folder.resolve()
        self.binary = control_plane or binary()

    @property
    def kubeconfig(self) -> Path:
        """The administrator's access."""
        return self.folder / "admin.kubeconfig"

    @property
    def images(self) -> Path:
        """The file that says where each image is unpacked, and its configuration."""
        return self.folder / "images.json"

    def state(self) -> State | None:
        """What was started here; None where nothing was."""
        path = self.folder / "state.json"
        if not path.exists():
            return None
        return State(**json.loads(path.read_text()))

    def up(self, *, node: bool = True, cpu: str = "8", memory: str = "16Gi") -> None:
        """Start whatever does not run, and wait until the API answers and the node is ready.

        Args:
            node: Whether the stand-in node runs too; it needs root.
            cpu: What the node says it has for requests, whatever the machine has.
            memory: The same for memory.

        Raises:
            LabFault: a program is missing or one did not start.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.state() is None:
            names: list[str] = ["etcd", "etcd-peer", "apiserver", "controllers", "scheduler", NODE]
            ports = dict(zip(names, free_ports(len(names)), strict=True))
            self._write(State(free_network().number, ports, cpu=cpu, memory=memory))
        state = self._state()
        keys.make(self.folder / "keys", Network(state.network).api_address)
        self._write_kubeconfig(state)
        for name in CONTROL_PLANE:
            self.start(name)
        if node:
            self.start(NODE)

    def start(self, name: str) -> None:
        """Start one process unless it runs, on the port it had, and wait until it is ready.

        Raises:
            LabFault: it ended, or was not ready in time.
        """
        state = self._state()
        if lives(self._process(state, name)):
            self._wait_ready(state, name)
            return
        if name == NODE:
            clear(self.folder / NODE)
        command = self._command(state, name)
        logs = self.folder / "log"
        logs.mkdir(exist_ok=True)
        with open(logs / f"{name}.log", "ab") as log:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=ROOT
            )
        started = adopt(child)
        state.processes[name] = (started.pid, started.started)
        self._write(state)
        self._wait_ready(state, name)

    def stop(self, name: str, *, hard: bool = False, seconds: float = 20) -> None:
        """End one process; kill it when it does not end in time. The node's pods end with it.

        Args:
            name: Which one.
            hard: Kill it at once, as a machine that loses power would.
            seconds: How long it may take.
        """
        state = self.state()
        process = self._process(state, name) if state else None
        if process and lives(process):
            # Containers are no part of the family that is signalled: they have sessions of their own, and end below.
            known = family(process) if name != NODE else [process]
            send(process, signal.SIGKILL if hard else signal.SIGTERM)
            for left in wait_until_gone(known, seconds):
                send(left, signal.SIGKILL)
            wait_until_gone(known, 5)
        if name == NODE:
            clear(self.folder / NODE)

    def down(self) -> None:
        """End everything that was started here, containers and mounts included, and forget its data."""
        if self.state() is not None:
            for name in (NODE, *reversed(CONTROL_PLANE)):
                self.stop(name)
        if (self.folder / NODE).exists():
            clear(self.folder / NODE)
        for left in ("state.json", "etcd", "keys", NODE, "admin.kubeconfig", "images.json"):
            path = self.folder / left
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def running(self) -> dict[str, Process | None]:
        """Every process by name; None for one that does not run."""
        state = self.state()
        found: dict[str, Process | None] = {}
        for name in (*CONTROL_PLANE, NODE):
            process = self._process(state, name) if state else None
            found[name] = process if lives(process) else None
        return found

    def add_image(self, name: str, rootfs: Path, configuration: dict[str, Any] | None = None) -> None:
        """Tell the node where an image is unpacked.

        Args:
            name: As manifests name it, with the tag.
            rootfs: Its root folder, never written to.
            configuration: `Env`, `User`, `WorkingDir`, `Entrypoint` and `Cmd` of the image, as OCI names them.
        """
        known = json.loads(self.images.read_text()) if self.images.exists() else {}
        known[name] = {"rootfs": str(rootfs), "configuration": configuration or {}}
        fresh = self.images.with_suffix(".new")
        fresh.write_text(json.dumps(known, indent=2))
        fresh.replace(self.images)

    def kubectl(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run the real kubectl as the administrator."""
        return subprocess.run(
            self.kubectl_command(*arguments), input=stdin, capture_output=True, text=True, check=False
        )

    def kubectl_command(self, *arguments: str) -> list[str]:
        """The command line of kubectl as the administrator."""
        return [str(self.binary), "kubectl", "--kubeconfig", str(self.kubeconfig), *arguments]

    def _state(self) -> State:
        state = self.state()
        if state is None:
            raise LabFault(f"no lab was started in {self.folder} (deploy/lab/lab up)")
        return state

    def _write(self, state: State) -> None:
        fresh = self.folder / "state.json.new"
        fresh.write_text(json.dumps(asdict(state), indent=2))
        fresh.replace(self.folder / "state.json")

    @staticmethod
    def _process(state: State, name: str) -> Process | None:
        known = state.processes.get(name)
        return Process(*known) if known else None

    def _write_kubeconfig(self, state: State) -> None:
        pki = self.folder / "keys"
        server = f"https://127.0.0.1:{state.ports['apiserver']}"
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "lab", "cluster": {"server": server, "certificate-authority": f"{pki}/ca.crt"}}],
            "users": [
                {"name": "admin", "user": {"client-certificate": f"{pki}/admin.crt", "client-key": f"{pki}/admin.key"}}
            ],
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "admin", "namespace": "default"}}],
            "current-context": "lab",
        }
        self.kubeconfig.write_text(json.dumps(content, indent=2))

    def _command(self, state: State, name: str) -> list[str]:
        pki, ports = self.folder / "keys", state.ports
        etcd = f"http://127.0.0.1:{ports['etcd']}"
        if name == "etcd":
            program = shutil.which("etcd")
            if program is None:
                raise LabFault("no etcd on this machine (Debian has it in the package etcd-server)")
            peer = f"http://127.0.0.1:{ports['etcd-peer']}"
            return [
                program, "--data-dir", str(self.folder / "etcd"), "--unsafe-no-fsync",
                "--listen-client-urls", etcd, "--advertise-client-urls", etcd,
                "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                "--initial-cluster", f"default={peer}",
            ]  # fmt: skip
        if not self.binary.exists():
            raise LabFault(f"{self.binary} is not there (deploy/lab/lab build)")
        if name == "apiserver":
            return [
                str(self.binary), "kube-apiserver", f"--etcd-servers={etcd}",
                "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", f"--secure-port={ports[name]}",
                "--endpoint-reconciler-type=none", "--kubelet-preferred-address-types=InternalIP",
                f"--cert-dir={pki}/made", f"--tls-cert-file={pki}/apiserver.crt",
                f"--tls-private-key-file={pki}/apiserver.key", f"--client-ca-file={pki}/ca.crt",
                # As real clusters have it: what pods may be is judged by Pod Security.
                "--authorization-mode=RBAC", "--allow-privileged=true",
                f"--service-cluster-ip-range={Network(state.network).service_range}",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={pki}/sa.pub", f"--service-account-signing-key-file={pki}/sa.key",
            ]  # fmt: skip
        if name == "controllers":
            return [
                str(self.binary), "kube-controller-manager", f"--kubeconfig={self.kubeconfig}",
                "--bind-address=127.0.0.1", f"--secure-port={ports[name]}", f"--cert-dir={pki}/made",
                # A node of a machine that is busy tells late that it lives.
                "--node-monitor-grace-period=180s",
                "--leader-elect=false", f"--root-ca-file={pki}/ca.crt",
                f"--service-account-private-key-file={pki}/sa.key",
            ]  # fmt: skip
        if name == "scheduler":
            return [
                str(self.binary), "kube-scheduler", f"--kubeconfig={self.kubeconfig}", "--bind-address=127.0.0.1",
                f"--secure-port={ports[name]}", f"--cert-dir={pki}/made", "--leader-elect=false",
            ]  # fmt: skip
        if name == NODE:
            if os.geteuid() != 0:
                raise LabFault("the stand-in node needs root: it mounts images and makes cgroups")
            return [
                sys.executable, "-m", "deploy.lab.node", "--state", str(self.folder / NODE),
                "--api", f"https://127.0.0.1:{ports['apiserver']}", "--keys", str(pki),
                "--images", str(self.images), "--network", str(state.network), "--port", str(ports[NODE]),
                "--cpu", state.cpu, "--memory", state.memory,
            ]  # fmt: skip
        raise LabFault(f"the lab has no {name}: {', '.join((*CONTROL_PLANE, NODE))}")

    def _wait_ready(self, state: State, name: str) -> None:
        deadline = time.monotonic() + _START_S
        while not self._ready(state, name):
            if not lives(self._process(state, name)):
                raise LabFault(f"{name} ended: {self.tail(name)}")
            if time.monotonic() > deadline:
                raise LabFault(f"{name} is not ready after {_START_S} s: {self.tail(name)}")
            time.sleep(0.1)

    def tail(self, name: str, lines: int = 5) -> str:
        """The end of a process's log."""
        path = self.folder / "log" / f"{name}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    def _ready(self, state: State, name: str) -> bool:
        if name == "etcd":
            return _answers(f"http://127.0.0.1:{state.ports['etcd']}/health")
        if name == NODE:
            found = self.kubectl(
                "get", "nodes", "-o", 'jsonpath={.items[*].status.conditions[?(@.type=="Ready")].status}'
            )
            ready = self.folder / NODE / "ready"
            return found.stdout.strip() == "True" and ready.exists()
        context = ssl.create_default_context(cafile=str(self.folder / "keys" / "ca.crt"))
        context.load_cert_chain(self.folder / "keys" / "admin.crt", self.folder / "keys" / "admin.key")
        path = "readyz" if name == "apiserver" else "healthz"
        if name != "apiserver":
            # These two make certificates of their own when they start.
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return _answers(f"https://127.0.0.1:{state.ports[name]}/{path}", context)


def _answers(url: str, context: ssl.SSLContext | None = None) -> bool:
    try:
        with urlopen(url, timeout=2, context=context) as answer:
            return answer.status == 200
    except (URLError, OSError):
        return False
