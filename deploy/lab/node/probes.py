"""Probes of a container: what is asked, and what its answers mean.

`ProbeState` counts; it knows no time and asks nobody. `Prober` asks on time, in a thread of its own.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

STARTUP, READINESS, LIVENESS = "startup", "readiness", "liveness"


@dataclass(frozen=True, slots=True)
class ProbeTimes:
    """How often a probe asks and how many answers it takes; seconds and counts, with the API's defaults."""

    delay_s: float = 0
    period_s: float = 10
    timeout_s: float = 1
    successes: int = 1
    failures: int = 3

    @classmethod
    def of(cls, spec: dict[str, Any]) -> ProbeTimes:
        """The times of a probe as the API writes it."""
        return cls(
            float(spec.get("initialDelaySeconds") or 0),
            float(spec.get("periodSeconds") or 10),
            float(spec.get("timeoutSeconds") or 1),
            int(spec.get("successThreshold") or 1),
            int(spec.get("failureThreshold") or 3),
        )


class ProbeState:
    """What the last answers of a probe amount to.

    A readiness or startup probe starts as failed, a liveness probe as passed: nobody gets traffic before an answer, and
    nobody is killed before one. It turns after so many equal answers in a row.
    """

    def __init__(self, kind: str, times: ProbeTimes) -> None:
        self.passed = kind == LIVENESS
        self._times = times
        self._last: bool | None = None
        self._row = 0

    def answer(self, good: bool) -> bool:
        """Count one answer; returns whether the probe stands as passed."""
        self._row = self._row + 1 if good == self._last else 1
        self._last = good
        if self._row >= (self._times.successes if good else self._times.failures):
            self.passed = good
        return self.passed

    @property
    def gave_up(self) -> bool:
        """Whether so many answers in a row failed that the container is to be restarted; for startup and liveness."""
        return self._last is False and self._row >= self._times.failures


class ProbeFailed(Exception):
    """The answer was no; the message says why."""


def port_number(port: int | str, container: dict[str, Any]) -> int:
    """The number of a port that a probe or hook names.

    Raises:
        ProbeFailed: the container has no port of that name.
    """
    if isinstance(port, int) or str(port).isdigit():
        return int(port)
    for each in container.get("ports") or []:
        if each.get("name") == port:
            return int(each["containerPort"])
    raise ProbeFailed(f"{container['name']} has no port named {port}")


def ask_http(action: dict[str, Any], container: dict[str, Any], address: str, timeout_s: float) -> None:
    """GET; anything from 200 to 399 is good.

    Raises:
        ProbeFailed: another status, no answer in time.
    """
    host, port = action.get("host") or address, port_number(action["port"], container)
    if action.get("scheme") == "HTTPS":
        unverified = ssl.create_default_context()
        unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=unverified)
    else:
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    headers = {each["name"]: each["value"] for each in action.get("httpHeaders") or []}
    try:
        connection.request("GET", action.get("path") or "/", headers={"User-Agent": "kube-probe/lab", **headers})
        answer = connection.getresponse()
        if not 200 <= answer.status < 400:
            raise ProbeFailed(f"HTTP probe failed with statuscode: {answer.status}")
    except (OSError, http.client.HTTPException) as fault:
        raise ProbeFailed(f"GET {host}:{port}{action.get('path') or '/'}: {fault}") from fault
    finally:
        connection.close()


def ask_tcp(action: dict[str, Any], container: dict[str, Any], address: str, timeout_s: float) -> None:
    """Connect.

    Raises:
        ProbeFailed: nobody accepts.
    """
    where = (action.get("host") or address, port_number(action["port"], container))
    try:
        socket.create_connection(where, timeout=timeout_s).close()
    except OSError as fault:
        raise ProbeFailed(f"{where[0]}:{where[1]}: {fault}") from fault


def ask_grpc(action: dict[str, Any], address: str, timeout_s: float) -> None:
    """Ask the standard gRPC health service.

    Raises:
        ProbeFailed: it does not serve, or does not answer in time.
    """
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(
        f"{address}:{action['port']}", options=[("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(  # pyright: ignore[reportAttributeAccessIssue]
                health_pb2.HealthCheckRequest(service=action.get("service") or ""),
                timeout=timeout_s,
                wait_for_ready=True,
            )
        except grpc.RpcError as fault:
            raise ProbeFailed(f"gRPC {address}:{action['port']}: {fault.code().name}") from fault
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise ProbeFailed(f"gRPC {address}:{action['port']}: {answer.status}")


class Prober(threading.Thread):
    """Asks one probe of one start of a container until it is told to stop.

    Args:
        kind: `startup`, `readiness` or `liveness`.
        spec: The probe as the API writes it.
        ask: Asks once, within so many seconds; raises ProbeFailed.
        told: Called after every answer with the message of a failure, None for a good one.
    """

    def __init__(
        self, kind: str, spec: dict[str, Any], ask: Callable[[float], None], told: Callable[[Prober, str | None], None]
    ) -> None:
        super().__init__(daemon=True, name=f"{kind} probe")
        self.kind = kind
        self.times = ProbeTimes.of(spec)
        self.state = ProbeState(kind, self.times)
        self._ask, self._told = ask, told
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Ask no more."""
        self._stopped.set()

    def run(self) -> None:
        """Ask, wait, ask again."""
        if self._stopped.wait(self.times.delay_s):
            return
        while True:
            try:
                self._ask(self.times.timeout_s)
                message = None
            except ProbeFailed as fault:
                message = str(fault)
            if self._stopped.is_set():
                return
            self.state.answer(message is None)
            self._told(self, message)
            if self.kind == STARTUP and self.state.passed:
                return
            if self._stopped.wait(self.times.period_s):
                return
