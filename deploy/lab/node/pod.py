"""One pod on the node, from its binding to its end: a thread that starts, watches, restarts and ends its containers."""

from __future__ import annotations

import copy
import datetime
import http.client
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.lab.network import local
from deploy.lab.node.api import Api, Object, Refused, Unreachable
from deploy.lab.node.environment import Files, NotConfigured, environment, expand
from deploy.lab.node.probes import (
    LIVENESS,
    READINESS,
    STARTUP,
    ProbeFailed,
    Prober,
    ask_grpc,
    ask_http,
    ask_tcp,
    port_number,
)
from deploy.lab.node.quantities import amount
from deploy.lab.node.runtime import Bundle, Image, Running, RuntimeRefused
from deploy.lab.node.volumes import Volumes

_LOOK_S = 0.1
_AGAIN_S = 1.0
_BACKOFF_S, _BACKOFF_CAP_S, _BACKOFF_FORGOTTEN_S = 1.0, 60.0, 120.0
"""First wait before a restart, doubled up to a cap; a kubelet's are 10 s, 300 s and 600 s."""
_ROOT_CAPABILITIES = ["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_KILL", "CAP_SETGID", "CAP_SETUID"]
_LOST = 137


@dataclass(frozen=True, slots=True)
class Node:
    """What a pod has to know of its node."""

    api: Api
    name: str
    folder: Path
    image: Callable[[str], Image | None]
    hosts: Callable[[str], str]
    """The content of /etc/hosts for pods of a namespace."""
    variables: Callable[[Object], dict[str, str]]
    """What the node adds to every container's environment."""


def contradicts(written: Object, seen: Object) -> bool:
    """Whether the API says of a pod's readiness other than was written: it was overwritten by another.

    The node's controller does so when heartbeats come late, and leaves it to the kubelet to say again how it is.
    """
    ours = {each["type"]: each["status"] for each in written["conditions"]}
    theirs = {each["type"]: each["status"] for each in seen.get("conditions") or []}
    return any(theirs.get(kind, status) != status for kind, status in ours.items())


def now() -> str:
    """The time as the API writes it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Container:
    """A container of a pod through all its starts.

    Args:
        spec: As the API has it.
        known: What the pod's status said of it before the node was restarted.
    """

    def __init__(self, spec: Object, known: Object | None) -> None:
        self.spec = spec
        self.name: str = spec["name"]
        self.restarts: int = (known or {}).get("restartCount") or 0
        self.state: Object = {"waiting": {"reason": "PodInitializing"}}
        self.last_state: Object = {}
        self.running: Running | None = None
        self.ready = self.started = False
        self.probers: list[Prober] = []
        self.stopping = False
        self.again_at = 0.0
        self.image_known = True
        self._backoff = 0.0
        self._started_at = 0.0
        if known and ("running" in known.get("state", {}) or "terminated" in known.get("state", {})):
            before = known["state"].get("running") or {}
            self.state = known["state"]
            if "running" in known["state"]:
                # Nothing outlives the node: what ran then was lost with it.
                self.ended(_LOST, "Error", before.get("startedAt"))

    @property
    def exit_code(self) -> int | None:
        """How the last start ended; None while it runs or waits for its first."""
        ended = self.state.get("terminated") or self.last_state.get("terminated")
        return None if self.running or ended is None else ended["exitCode"]

    def begun(self, running: Running) -> None:
        """It runs."""
        self.running, self.stopping, self.ready, self.started = running, False, False, False
        self.state = {"running": {"startedAt": now()}}
        self._started_at = time.monotonic()

    def ended(self, code: int, reason: str, began: str | None = None) -> None:
        """It ended; says when it may start again."""
        began = began or (self.state.get("running") or {}).get("startedAt") or now()
        self.state = {"terminated": {"exitCode": code, "reason": reason, "startedAt": began, "finishedAt": now()}}
        if self._started_at and time.monotonic() - self._started_at > _BACKOFF_FORGOTTEN_S:
            self._backoff = 0.0
        self.again_at = time.monotonic() + self._backoff
        self._backoff = min(max(_BACKOFF_S, self._backoff * 2), _BACKOFF_CAP_S)
        self.running, self.ready, self.started = None, False, False
        self.stop_probes()

    def waits(self, reason: str, message: str = "") -> None:
        """It cannot run now."""
        if "terminated" in self.state:
            self.last_state = {"terminated": self.state["terminated"]}
        self.state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}

    def stop_probes(self) -> None:
        """Ask no more."""
        for each in self.probers:
            each.stop()
        self.probers = []

    def status(self) -> Object:
        """Its entry in the pod's status."""
        return {
            "name": self.name, "image": self.spec["image"], "imageID": self.spec["image"],
            "containerID": f"runc://{self.running.name}" if self.running else "", "ready": self.ready,
            "started": self.started, "restartCount": self.restarts, "state": self.state, "lastState": self.last_state,
        }  # fmt: skip


class Pod:
    """Runs one pod.

    Args:
        node: Where.
        pod: The pod as it was bound.
        address: The address it gets, of 10.0.0.0/8.
        gone: Called when nothing of it is left here and in the API.
    """

    def __init__(self, node: Node, pod: Object, address: str, gone: Callable[[str], None]) -> None:
        self._node, self._pod, self._gone = node, pod, gone
        self.address = address
        self.uid: str = pod["metadata"]["uid"]
        self.namespace: str = pod["metadata"]["namespace"]
        self.name: str = pod["metadata"]["name"]
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"pod {self.name}")
        self._folder = node.folder / "pods" / self.uid
        self._wake = threading.Event()
        self._deleted = self._abandoned = False
        self._delete_grace = 30.0
        status = pod.get("status") or {}
        known = {
            each["name"]: each
            for each in (status.get("containerStatuses") or []) + (status.get("initContainerStatuses") or [])
        }
        spec = pod["spec"]
        self._first = [Container(each, known.get(each["name"])) for each in spec.get("initContainers") or []]
        self._main = [Container(each, known.get(each["name"])) for each in spec["containers"]]
        self._volumes: dict[str, Path] = {}
        self._conditions: dict[str, Object] = {}
        self._started_at = status.get("startTime") or now()
        self._written: Object | None = None
        self._overwritten = False
        self._over = status.get("phase") in ("Succeeded", "Failed")
        self._stopped_by: threading.Thread | None = None

    # What the node tells it.

    def start(self) -> None:
        """Begin, in a thread of its own."""
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Wait until nothing of it is left."""
        self._thread.join(seconds)

    def changed(self, pod: Object) -> None:
        """The API has a newer version of it."""
        self._pod = pod
        if self._written is not None and contradicts(self._written, pod.get("status") or {}):
            self._overwritten = True
        if pod["metadata"].get("deletionTimestamp") and not self._deleted:
            self._delete_grace = float(pod["metadata"].get("deletionGracePeriodSeconds") or 0)
            self._deleted = True
        elif self._deleted:
            self._delete_grace = min(self._delete_grace, float(pod["metadata"].get("deletionGracePeriodSeconds") or 0))
        self._wake.set()

    def abandon(self) -> None:
        """It is gone from the API, or the node ends: kill it at once."""
        self._abandoned = True
        self._wake.set()

    def log_of(self, container: str | None, previous: bool = False) -> Path | None:
        """The file with a container's output; None where there is none yet."""
        known = [each for each in (*self._main, *self._first) if container in (None, "", each.name)]
        if not known:
            return None
        number = known[0].restarts - (1 if previous else 0)
        path = self._folder / "logs" / f"{known[0].name}.{number}"
        return path if path.exists() else None

    def new_hosts(self) -> None:
        """Services came or went: write the names anew, into the file that is mounted."""
        path = self._folder / "hosts"
        if path.exists():
            path.write_text(self._hosts())

    # Its life.

    def _run(self) -> None:
        try:
            if not self._over:
                self._live()
            self._end()
        except Exception as fault:
            # A pod that this program cannot run must not stay as if it ran.
            print(f"pod {self.name}: {fault!r}", flush=True)
            self._abandoned = True
            self._end()
            raise

    def _live(self) -> None:
        self._report()
        while not self._ending and not self._volumes_made():
            self._pause(_AGAIN_S)
        # Init containers one after the other; one that always restarts is a companion, and need only have started.
        for container in self._first:
            companion = container.spec.get("restartPolicy") == "Always"
            while not self._ending:
                self._look(container, "Always" if companion else self._init_policy)
                if companion and container.started:
                    break
                if not companion and container.exit_code == 0 and container.running is None:
                    break
                if not companion and container.exit_code is not None and self._init_policy == "Never":
                    self._over = True
                    self._report()
                    return
                self._pause(_LOOK_S)
        companions = [each for each in self._first if each.spec.get("restartPolicy") == "Always"]
        while not self._ending:
            for container in companions:
                self._look(container, "Always")
            for container in self._main:
                self._look(container, self._policy)
            self._over = all(self._done(each) for each in self._main)
            self._report()
            if self._over:
                return
            self._pause(_LOOK_S)

    @property
    def _ending(self) -> bool:
        return self._deleted or self._abandoned

    @property
    def _policy(self) -> str:
        return self._pod["spec"].get("restartPolicy") or "Always"

    @property
    def _init_policy(self) -> str:
        return "Never" if self._policy == "Never" else "OnFailure"

    def _done(self, container: Container) -> bool:
        code = container.exit_code
        if code is None:
            return False
        return self._policy == "Never" or (self._policy == "OnFailure" and code == 0)

    def _pause(self, seconds: float) -> None:
        self._wake.wait(seconds)
        self._wake.clear()

    def _volumes_made(self) -> bool:
        pod_folder = self._folder / "volumes"
        try:
            self._volumes = Volumes(self._node.api, self._pod, pod_folder, local(self.address), self._node.name).make()
        except (NotConfigured, Refused) as fault:
            self._all_wait("ContainerCreating", str(fault))
            self._tell("Warning", "FailedMount", str(fault))
        except Unreachable as fault:
            print(f"pod {self.name}: {fault}", flush=True)
        else:
            (self._folder / "logs").mkdir(parents=True, exist_ok=True)
            (self._folder / "hosts").write_text(self._hosts())
            return True
        return False

    def _hosts(self) -> str:
        return self._node.hosts(self.namespace) + f"{local(self.address)} {self.name[:63]}\n"

    def _all_wait(self, reason: str, message: str) -> None:
        for container in (*self._first, *self._main):
            container.waits(reason, message)
        self._report()

    def _look(self, container: Container, policy: str) -> None:
        """See to one container: note its end, start it, restart it."""
        if container.running is not None:
            code = container.running.poll()
            if code is None:
                if not container.probers and not container.stopping:
                    self._begin_probes(container)
                return
            memory = container.running.out_of_memory
            container.running.remove()
            container.ended(code, "OOMKilled" if memory else "Completed" if code == 0 else "Error")
            self._report()
        code = container.exit_code
        if code is not None and (policy == "Never" or (policy == "OnFailure" and code == 0)):
            return
        if code is not None and time.monotonic() < container.again_at:
            if "terminated" in container.state and container.again_at - time.monotonic() > _LOOK_S:
                container.waits("CrashLoopBackOff", f"back-off restarting failed container {container.name}")
                self._tell("Warning", "BackOff", f"Back-off restarting failed container {container.name}")
                self._report()
            return
        self._start(container, again=code is not None)

    def _start(self, container: Container, again: bool) -> None:
        if time.monotonic() < container.again_at:
            return
        image = self._node.image(container.spec["image"])
        if image is None:
            self._cannot(container, "ErrImageNeverPull", f"image {container.spec['image']} is not on this node")
            return
        number = container.restarts + (1 if again else 0)
        folder = self._folder / "containers" / f"{container.name}.{number}"
        shutil.rmtree(folder, ignore_errors=True)
        name = f"{self.uid}.{container.name}"
        log = self._folder / "logs" / f"{container.name}.{number}"
        try:
            running = Running(self._node.folder, name, folder, image, self._bundle(container.spec, image), log)
        except (NotConfigured, Refused) as fault:
            self._cannot(container, "CreateContainerConfigError", str(fault))
            return
        except Unreachable as fault:
            print(f"pod {self.name}: {fault}", flush=True)
            return
        if "terminated" in container.state:
            container.last_state = {"terminated": container.state["terminated"]}
        container.restarts = number
        try:
            running.start()
        except RuntimeRefused as fault:
            container.state = {}
            container.ended(128, "StartError")
            container.state["terminated"]["message"] = str(fault)
            self._tell("Warning", "Failed", f"Error: {fault}")
            self._report()
            return
        container.begun(running)
        self._tell("Normal", "Started", f"Started container {container.name}")
        self._begin_probes(container)
        self._report()

    def _cannot(self, container: Container, reason: str, message: str) -> None:
        before = container.state.get("waiting")
        container.waits(reason, message)
        container.again_at = time.monotonic() + _AGAIN_S
        if before != container.state["waiting"]:
            self._tell("Warning", "Failed", f"Error: {message}")
        self._report()

    def _bundle(self, spec: Object, image: Image) -> Bundle:
        pod_context = self._pod["spec"].get("securityContext") or {}
        context = {**pod_context, **(spec.get("securityContext") or {})}
        user_text, _, group_text = image.user.partition(":")
        user = context.get("runAsUser", int(user_text) if user_text.isdigit() else 0)
        group = context.get("runAsGroup", int(group_text) if group_text.isdigit() else 0)
        if context.get("runAsNonRoot") and user == 0:
            raise NotConfigured("container has runAsNonRoot and image will run as root")
        groups = [*(pod_context.get("supplementalGroups") or [])]
        if pod_context.get("fsGroup") is not None:
            groups.append(pod_context["fsGroup"])
        files = Files(self._node.api, self.namespace)
        given = {**image.variables, "HOSTNAME": self.name, **self._node.variables(self._pod)}
        variables = environment(self._pod, spec, files, given, local(self.address), self._node.name)
        command = [expand(each, variables) for each in spec.get("command") or []]
        arguments = [expand(each, variables) for each in spec.get("args") or []]
        if not command:
            command = list(image.entrypoint)
            arguments = arguments or list(image.command)
        if not command + arguments:
            raise NotConfigured(f"image {spec['image']} has no command, and the container names none")
        limits, requests = (
            (spec.get("resources") or {}).get("limits") or {},
            (spec.get("resources") or {}).get("requests") or {},
        )
        dropped = ((context.get("capabilities") or {}).get("drop")) or []
        return Bundle(
            arguments=command + arguments,
            variables=variables,
            directory=spec.get("workingDir") or image.directory,
            user=user,
            group=group,
            groups=groups,
            read_only=bool(context.get("readOnlyRootFilesystem")),
            capabilities=[] if "ALL" in dropped or user else _ROOT_CAPABILITIES,
            no_new_privileges=context.get("allowPrivilegeEscalation") is False,
            hostname=self.name[:63],
            mounts=self._mounts(spec, variables),
            memory_bytes=int(amount(limits["memory"])) if "memory" in limits else None,
            processors=float(amount(limits["cpu"])) if "cpu" in limits else None,
            shares=max(2, int(amount(requests["cpu"]) * 1024)) if "cpu" in requests else None,
        )

    def _mounts(self, spec: Object, variables: dict[str, str]) -> list[tuple[str, Path, bool]]:
        kinds = {each["name"]: each for each in self._pod["spec"].get("volumes") or []}
        found: list[tuple[str, Path, bool]] = []
        for mount in spec.get("volumeMounts") or []:
            source = self._volumes[mount["name"]]
            inside = mount.get("subPath") or expand(mount.get("subPathExpr") or "", variables)
            writable = "emptyDir" in kinds[mount["name"]]
            if inside:
                source = source / inside
                if writable and not source.exists():
                    source.mkdir(parents=True)
                    source.chmod(0o2777)
                if not source.exists():
                    raise NotConfigured(f"volume {mount['name']} has no {inside}")
            found.append((mount["mountPath"], source, bool(mount.get("readOnly")) or not writable))
        # A mount above another must come first.
        found.sort(key=lambda each: each[0].rstrip("/").count("/"))
        return [*found, ("/etc/hosts", self._folder / "hosts", True)]

    # Probes.

    def _begin_probes(self, container: Container) -> None:
        """Startup first, then readiness and liveness. Without a readiness probe it is ready when it started."""
        spec = container.spec
        if not container.started and STARTUP in self._kinds(container):
            self._begin_probe(container, STARTUP)
            return
        if not container.started:
            container.started = True
            container.ready = READINESS not in self._kinds(container)
            self._wake.set()
        for kind in (READINESS, LIVENESS):
            if kind in self._kinds(container) and spec.get(f"{kind}Probe"):
                self._begin_probe(container, kind)

    @staticmethod
    def _kinds(container: Container) -> set[str]:
        return {kind for kind in (STARTUP, READINESS, LIVENESS) if container.spec.get(f"{kind}Probe")}

    def _begin_probe(self, container: Container, kind: str) -> None:
        spec = container.spec[f"{kind}Probe"]
        running = container.running
        assert running is not None

        def ask(timeout_s: float) -> None:
            self._act(spec, container.spec, running, timeout_s)

        def told(prober: Prober, message: str | None) -> None:
            if container.running is running:
                self._answered(container, prober, message)

        prober = Prober(kind, spec, ask, told)
        container.probers.append(prober)
        prober.start()

    def _answered(self, container: Container, prober: Prober, message: str | None) -> None:
        if message is not None:
            self._tell("Warning", "Unhealthy", f"{prober.kind.capitalize()} probe failed: {message}")
        if prober.kind == READINESS:
            container.ready = prober.state.passed
        elif prober.kind == STARTUP and prober.state.passed:
            container.started = True
            container.ready = READINESS not in self._kinds(container)
            container.probers = []
        elif prober.state.gave_up and not container.stopping:
            container.stopping = True
            container.stop_probes()
            self._tell("Normal", "Killing", f"Container {container.name} failed {prober.kind} probe, will be restarted")
            threading.Thread(target=self._stop, args=(container, self._grace), daemon=True).start()
        self._wake.set()

    def _act(self, action: Object, spec: Object, running: Running, timeout_s: float) -> None:
        """Do what a probe says, once.

        Raises:
            ProbeFailed: the answer is no.
        """
        address = local(self.address)
        if "httpGet" in action:
            ask_http(action["httpGet"], spec, address, timeout_s)
        elif "tcpSocket" in action:
            ask_tcp(action["tcpSocket"], spec, address, timeout_s)
        elif "grpc" in action:
            ask_grpc(action["grpc"], address, timeout_s)
        elif "exec" in action:
            code, output = running.execute(action["exec"]["command"], timeout_s)
            if code != 0:
                raise ProbeFailed(output.strip() or f"exit code {code}")

    # Its end.

    @property
    def _grace(self) -> float:
        return float(self._pod["spec"].get("terminationGracePeriodSeconds", 30))

    def _stop(self, container: Container, grace_s: float) -> None:
        """preStop, SIGTERM, and SIGKILL when the grace period is over."""
        running = container.running
        if running is None or running.poll() is not None:
            return
        deadline = time.monotonic() + grace_s
        hook = (container.spec.get("lifecycle") or {}).get("preStop")
        if hook and grace_s > 0:
            try:
                self._hook(hook, container.spec, running, grace_s)
            except (ProbeFailed, OSError, http.client.HTTPException) as fault:
                self._tell("Warning", "FailedPreStopHook", str(fault))
        running.send(signal.SIGTERM)
        while running.poll() is None and not self._abandoned:
            # A second deletion may have shortened the time.
            if time.monotonic() > min(deadline, deadline - grace_s + self._delete_grace if self._deleted else deadline):
                break
            time.sleep(0.05)
        if running.poll() is None:
            running.send(signal.SIGKILL)

    def _hook(self, hook: Object, spec: Object, running: Running, grace_s: float) -> None:
        if "sleep" in hook:
            until = time.monotonic() + min(grace_s, float(hook["sleep"]["seconds"]))
            while time.monotonic() < until and running.poll() is None and not self._abandoned:
                time.sleep(0.05)
        elif "exec" in hook:
            code, output = running.execute(hook["exec"]["command"], grace_s)
            if code != 0:
                raise ProbeFailed(f"preStop hook: {output.strip() or code}")
        elif "httpGet" in hook:
            action: dict[str, Any] = hook["httpGet"]
            ask_http({**action, "port": port_number(action["port"], spec)}, spec, local(self.address), grace_s)

    def _end(self) -> None:
        """Stop what runs, say how it ended, wait for the pod to be deleted, and leave nothing."""
        containers = [*self._main, *self._first]
        running = [each for each in containers if each.running is not None]
        if running and not self._abandoned:
            for each in running:
                self._tell("Normal", "Killing", f"Stopping container {each.name}")
        grace = 0.0 if self._abandoned else self._delete_grace if self._deleted else self._grace
        # Companions end after what they serve.
        for group in (self._main, list(reversed(self._first))):
            threads = []
            for each in group:
                if each.running is not None:
                    each.stopping = True
                    # While it drains, readiness is still asked; nobody kills it for a liveness probe any more.
                    for prober in each.probers:
                        if prober.kind != READINESS:
                            prober.stop()
                    threads.append(threading.Thread(target=self._stop, args=(each, grace), daemon=True))
                    threads[-1].start()
            while any(each.is_alive() for each in threads):
                if not self._abandoned:
                    self._report()
                time.sleep(0.05)
        for each in containers:
            if each.running is not None:
                each.running.remove()
                code = each.running.poll()
                each.ended(_LOST if code is None else code, "Completed" if code == 0 else "Error")
        self._over = self._over or self._deleted
        while not self._abandoned:
            reported = self._report()
            if self._deleted and reported and self._delete():
                break
            self._pause(_LOOK_S if self._deleted else 5)
        for each in containers:
            each.stop_probes()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._gone(self.uid)

    def _delete(self) -> bool:
        path = f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"
        try:
            self._node.api.delete(path, {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}})
        except Refused as fault:
            return fault.status in (404, 409)
        except Unreachable:
            time.sleep(_AGAIN_S)
            return False
        return True

    # What the API is told.

    def _report(self) -> bool:
        """Write the status where it changed, here or in the API; returns whether the API has the last one."""
        status = self._status()
        if status == self._written and not self._overwritten:
            return True
        self._overwritten = False
        path = f"/api/v1/namespaces/{self.namespace}/pods/{self.name}/status"
        try:
            self._node.api.patch(path, {"metadata": {"uid": self.uid}, "status": status})
        except Refused as fault:
            if fault.status not in (404, 409):
                print(f"status of pod {self.name}: {fault}", flush=True)
            elif not self._deleted:
                # Gone, or another pod of the same name is there by now.
                self._abandoned = True
            return True
        except Unreachable:
            self._overwritten = True
            return False
        self._written = copy.deepcopy(status)
        return True

    def _status(self) -> Object:
        initialised = all(
            each.started if each.spec.get("restartPolicy") == "Always" else each.exit_code == 0 for each in self._first
        )
        ready = not self._over and initialised and all(each.ready for each in self._main)
        for kind, holds in (
            ("PodReadyToStartContainers", not self._over), ("Initialized", initialised), ("ContainersReady", ready),
            ("Ready", ready),
        ):  # fmt: skip
            value = "True" if holds else "False"
            if self._conditions.get(kind, {}).get("status") != value:
                self._conditions[kind] = {"type": kind, "status": value, "lastTransitionTime": now()}
                if not holds and kind in ("ContainersReady", "Ready"):
                    self._conditions[kind]["reason"] = "PodCompleted" if self._over else "ContainersNotReady"
        return {
            "phase": self._phase(),
            "hostIP": "127.0.0.1",
            "hostIPs": [{"ip": "127.0.0.1"}],
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "startTime": self._started_at,
            "conditions": list(self._conditions.values()),
            "containerStatuses": [each.status() for each in self._main],
            **({"initContainerStatuses": [each.status() for each in self._first]} if self._first else {}),
        }

    def _phase(self) -> str:
        if self._over:
            codes = [each.exit_code for each in self._main]
            return "Succeeded" if codes and all(code == 0 for code in codes) else "Failed"
        begun = any(each.running is not None or each.exit_code is not None for each in self._main)
        return "Running" if begun else "Pending"

    def _tell(self, kind: str, reason: str, message: str) -> None:
        metadata = self._pod["metadata"]
        event = {
            "metadata": {"generateName": f"{self.name[:200]}.", "namespace": self.namespace},
            "involvedObject": {
                "kind": "Pod", "apiVersion": "v1", "namespace": self.namespace, "name": self.name,
                "uid": metadata["uid"],
            },
            "type": kind, "reason": reason, "message": message[:1000], "count": 1,
            "firstTimestamp": now(), "lastTimestamp": now(),
            "source": {"component": "kubelet", "host": self._node.name},
        }  # fmt: skip
        threading.Thread(target=self._post, args=(event,), daemon=True).start()

    def _post(self, event: Object) -> None:
        try:
            self._node.api.create(f"/api/v1/namespaces/{self.namespace}/events", event)
        except (Refused, Unreachable):
            # Events are a help to people; nothing waits for one.
            return
