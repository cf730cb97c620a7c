"""Runs the stand-in node: `python -m deploy.lab.node --state … --api … --keys … --images … --network N --port P`."""

from __future__ import annotations

import argparse
import ctypes
import json
import signal
import threading
from pathlib import Path
from urllib.parse import urlsplit

from deploy.lab.network import Network, local
from deploy.lab.node.api import Api, Object, Refused, Unreachable
from deploy.lab.node.environment import service_links
from deploy.lab.node.logs import serve_logs
from deploy.lab.node.pod import Node, Pod, now
from deploy.lab.node.proxy import Proxy, routes
from deploy.lab.node.runtime import Image

_HEARTBEAT_S = 10
_PR_SET_CHILD_SUBREAPER = 36


class StandIn:
    """The node: registers, follows the pods bound to it, and gives each a thread of its own."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked
        self._network = Network(asked.network)
        self._api = Api(asked.api, asked.keys)
        self._pods: dict[str, Pod] = {}
        self._lock = threading.Lock()
        self._services: list[Object] = []
        self._slices: list[Object] = []
        self._proxy = Proxy()
        self._node = Node(self._api, asked.name, asked.state, self._image, self._hosts, self._variables)
        self._stopped = threading.Event()

    def run(self) -> None:
        """Run until SIGTERM; then every pod's processes end too."""
        asked = self._asked
        asked.state.mkdir(parents=True, exist_ok=True)
        # Containers' first processes become children of this one, so that their exit codes can be read.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stopped.set())
        serve_logs(asked.port, asked.keys, self._log)
        self._register()
        self._api.follow("/api/v1/services", self._seen_services)
        self._api.follow("/apis/discovery.k8s.io/v1/endpointslices", self._seen_slices)
        self._api.follow("/api/v1/pods", self._seen_pods, fieldSelector=f"spec.nodeName={asked.name}")
        (asked.state / "ready").touch()
        while not self._stopped.wait(_HEARTBEAT_S):
            try:
                self._heartbeat()
            except (Refused, Unreachable) as fault:
                print(f"heartbeat: {fault}", flush=True)
        with self._lock:
            pods = list(self._pods.values())
        for pod in pods:
            pod.abandon()
        for pod in pods:
            pod.join(15)
        self._proxy.close()

    def _register(self) -> None:
        name = self._asked.name
        labels = {
            "kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64",
            "topology.kubernetes.io/zone": "lab-a", **dict(each.split("=", 1) for each in self._asked.label),
        }  # fmt: skip
        try:
            self._api.create(
                "/api/v1/nodes", {"kind": "Node", "apiVersion": "v1", "metadata": {"name": name, "labels": labels}}
            )
        except Refused as fault:
            if fault.status != 409:
                raise
        self._heartbeat()

    def _heartbeat(self) -> None:
        asked = self._asked
        room = {"cpu": asked.cpu, "memory": asked.memory, "pods": "110", "ephemeral-storage": "20Gi"}
        ready = {
            "type": "Ready", "status": "True", "reason": "KubeletReady", "message": "stand-in",
            "lastHeartbeatTime": now(), "lastTransitionTime": now(),
        }  # fmt: skip
        addresses = [{"type": "InternalIP", "address": "127.0.0.1"}, {"type": "Hostname", "address": asked.name}]
        about = {
            "kubeletVersion": "v0.0.0-standin", "operatingSystem": "linux", "architecture": "amd64",
            "containerRuntimeVersion": "runc://1", "bootID": "", "kernelVersion": "", "kubeProxyVersion": "",
            "machineID": "", "osImage": "", "systemUUID": "",
        }  # fmt: skip
        self._api.patch(
            f"/api/v1/nodes/{asked.name}/status",
            {"status": {
                "capacity": room, "allocatable": room, "addresses": addresses, "conditions": [ready],
                "daemonEndpoints": {"kubeletEndpoint": {"Port": asked.port}}, "nodeInfo": about,
            }},
        )  # fmt: skip

    # What the API has.

    def _seen_pods(self, found: dict[str, Object]) -> None:
        with self._lock:
            for uid, pod in found.items():
                if uid in self._pods:
                    self._pods[uid].changed(pod)
                else:
                    self._begin(uid, pod)
            gone = [pod for uid, pod in self._pods.items() if uid not in found]
        for pod in gone:
            pod.abandon()

    def _begin(self, uid: str, pod: Object) -> None:
        address = (pod.get("status") or {}).get("podIP") or self._free_address()
        begun = Pod(self._node, pod, address, self._forget)
        self._pods[uid] = begun
        begun.changed(pod)
        begun.start()

    def _free_address(self) -> str:
        used = {pod.address for pod in self._pods.values()}
        candidates = (self._network.pod_address(1, index) for index in range(2, 255))
        return next(each for each in candidates if each not in used)

    def _forget(self, uid: str) -> None:
        with self._lock:
            self._pods.pop(uid, None)

    def _seen_services(self, found: dict[str, Object]) -> None:
        self._services = list(found.values())
        self._route()
        with self._lock:
            pods = list(self._pods.values())
        for pod in pods:
            pod.new_hosts()

    def _seen_slices(self, found: dict[str, Object]) -> None:
        self._slices = list(found.values())
        self._route()

    def _route(self) -> None:
        self._proxy.set_routes(
            {
                where: ends
                for where, ends in routes(self._services, self._slices).items()
                if where[0] != local(self._network.api_address)
            }
        )

    # What pods ask.

    def _hosts(self, namespace: str) -> str:
        lines = ["127.0.0.1 localhost"]
        for service in self._services:
            address, metadata = service["spec"].get("clusterIP"), service["metadata"]
            if address and address != "None":
                full = f"{metadata['name']}.{metadata['namespace']}"
                names = [f"{full}.svc.cluster.local", f"{full}.svc", full]
                if metadata["namespace"] == namespace:
                    names.append(metadata["name"])
                lines.append(" ".join([local(address), *names]))
        return "\n".join(lines) + "\n"

    def _variables(self, pod: Object) -> dict[str, str]:
        server = urlsplit(self._asked.api)
        found = {"KUBERNETES_SERVICE_HOST": str(server.hostname), "KUBERNETES_SERVICE_PORT": str(server.port)}
        if pod["spec"].get("enableServiceLinks", True):
            found = service_links(self._services, pod["metadata"]["namespace"]) | found
        return found

    def _image(self, name: str) -> Image | None:
        try:
            known = json.loads(self._asked.images.read_text())
        except FileNotFoundError:
            return None
        return Image.of(known[name]) if name in known else None

    def _log(self, namespace: str, name: str, container: str, previous: bool) -> Path | None:
        with self._lock:
            pods = list(self._pods.values())
        for pod in pods:
            if (pod.namespace, pod.name) == (namespace, name):
                return pod.log_of(container, previous)
        return None


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m deploy.lab.node")
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--api", required=True)
    parser.add_argument("--keys", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--network", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--name", default="lab-1")
    parser.add_argument("--label", action="append", default=[])
    parser.add_argument("--cpu", default="8")
    parser.add_argument("--memory", default="16Gi")
    StandIn(parser.parse_args()).run()


if __name__ == "__main__":
    main()
