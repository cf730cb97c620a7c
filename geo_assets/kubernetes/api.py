"""The Kubernetes API as the run launcher and the janitor ask it: every request ends, and its fault is told in a line.

What a fault means is decided here, by pure functions: whether the API is away, whether it refused, and whether it said
for certain that something is not there.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import kubernetes.client
import urllib3.exceptions
from dagster_k8s.client import DagsterKubernetesClient, PatchedApiClient
from kubernetes.client import ApiException, V1DeleteOptions, V1Job, V1JobList, V1Preconditions

CONNECT_S, READ_S = 3.0, 10.0
"""Longest that a connection and an answer may take. The API answers in milliseconds; one that takes longer hangs."""

PATIENCE_S = 60.0
"""How long a launch asks again: an API server that is replaced is back by then, and of the run's start timeout of three
minutes there is enough left."""

END_PATIENCE_S = 10.0
"""How long a deletion asks again: the janitor comes after it, and whoever ends a run in the UI waits for the answer."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0

RUN_LABEL = "dagster/run-id"
"""Label of a Job and its pod: the run it works for."""

OVERLOADED = frozenset({408, 429})

T = TypeVar("T")


class ApiAway(Exception):
    """The Kubernetes API does not answer, or says that it cannot now."""


class ApiRefused(Exception):
    """The Kubernetes API answers, and does not do it: no permission, no quota, or an object it does not take."""


def told(fault: Exception) -> str:
    """A fault in one line: the API's own message where it gave one, never a header or a body."""
    if isinstance(fault, ApiException):
        message = _status_of(fault).get("message")
        text = f"{fault.status} {fault.reason}" + (f": {message}" if message else "")
    else:
        text = f"{type(fault).__name__}: {fault}"
    return " ".join(text.split())[:500]


def _status_of(fault: ApiException) -> dict[str, Any]:
    """The `Status` object that the API answers a fault with; empty where something else answered."""
    try:
        body = json.loads(fault.body or "")
    except (TypeError, ValueError):
        return {}
    return body if isinstance(body, dict) and body.get("kind") == "Status" else {}


def is_away(fault: Exception) -> bool:
    """Whether a fault says nothing of what was asked for: no connection, a timeout, 408, 429 or 5xx."""
    if isinstance(fault, ApiException):
        return not fault.status or fault.status in OVERLOADED or fault.status >= 500
    return isinstance(fault, (urllib3.exceptions.HTTPError, OSError))


def is_absent(fault: Exception) -> bool:
    """Whether the API itself says that the object does not exist.

    A 404 of a proxy in front of it, or of a server that does not know this kind of object, says nothing of the kind.
    """
    if not isinstance(fault, ApiException) or fault.status != 404:
        return False
    status = _status_of(fault)
    return status.get("reason") == "NotFound" and bool((status.get("details") or {}).get("name"))


def may_pass(fault: Exception) -> bool:
    """Whether the same request may succeed a little later: the API is away, or a quota is used up for now."""
    if is_away(fault):
        return True
    if not isinstance(fault, ApiException):
        return False
    # An API that was just started may not know a token yet.
    return fault.status == 401 or (fault.status == 403 and "exceeded quota" in told(fault))


def pause_s(tries: int, retry_after: str | None = None) -> float:
    """Seconds before the next try.

    Args:
        tries: Those that failed so far, from one on.
        retry_after: What the API asked for, if it did.
    """
    if retry_after is not None and retry_after.isdecimal():
        return min(float(retry_after), LONGEST_PAUSE_S)
    return min(FIRST_PAUSE_S * 2.0 ** min(tries - 1, 10), LONGEST_PAUSE_S)


class _ApiClient(PatchedApiClient):
    def request(self, method: str, url: str, *args: Any, _request_timeout: Any = None, **more: Any) -> Any:
        return super().request(method, url, *args, _request_timeout=_request_timeout or (CONNECT_S, READ_S), **more)


class Jobs(DagsterKubernetesClient):
    """Dagster's client of the API, with an end to every request, and with retries that know what they repeat.

    Args:
        patience_s: Seconds for which creating a Job is tried again.
        host: URL of the API, for tests; default: as Kubernetes' configuration was loaded.
    """

    def __init__(self, *, patience_s: float = PATIENCE_S, host: str | None = None) -> None:
        configuration = kubernetes.client.Configuration.get_default_copy()
        # The library would repeat a read that hangs three times before it says so.
        configuration.retries = False  # pyright: ignore[reportAttributeAccessIssue]
        if host is not None:
            configuration.host = host
        client = _ApiClient(configuration)
        super().__init__(
            kubernetes.client.BatchV1Api(client),
            kubernetes.client.CoreV1Api(client),
            logging.info,
            time.sleep,
            time.time,
        )
        self.patience_s = patience_s

    def create_namespaced_job_with_retries(
        self, body: V1Job, namespace: str, wait_time_between_attempts: float = 0.0
    ) -> None:
        """Create a run's Job; one that is there already, and is this run's, was created by an earlier try.

        Raises:
            ApiAway: The API was away for longer than a launch waits. Whether the Job was created is not known: a worker
                that comes late finds that its run has ended and does nothing.
            ApiRefused: It does not take the Job.
        """
        metadata: Any = body.metadata
        name, labels = metadata.name, metadata.labels

        def create() -> None:
            try:
                self.batch_api.create_namespaced_job(namespace=namespace, body=body)
            except ApiException as fault:
                if fault.status != 409:
                    raise
                there: Any = self.batch_api.read_namespaced_job(name, namespace)
                if (there.metadata.labels or {}).get(RUN_LABEL) != (labels or {}).get(RUN_LABEL):
                    raise

        self._patiently(create, f"the creation of Job {name}", self.patience_s)

    def list_jobs(self, namespace: str, selector: str, limit: int, token: str | None = None) -> V1JobList:
        """One page of the Jobs with these labels; its metadata has the token of the next one.

        Raises:
            ApiAway: The API is away.
            ApiRefused: It does not list them.
        """
        more = {"_continue": token} if token else {}
        return self._patiently(
            lambda: self.batch_api.list_namespaced_job(namespace, label_selector=selector, limit=limit, **more),
            f"the list of Jobs in {namespace}",
            min(END_PATIENCE_S, self.patience_s),
        )

    def delete_job(self, job_name: str, namespace: str, *, uid: str | None = None) -> bool:
        """Delete a Job; its pods are ended in good order and follow it.

        Args:
            job_name: Its name.
            namespace: Where it is.
            uid: Delete only the Job of this uid, and no later one of its name.

        Returns:
            Whether it was there, and the same.

        Raises:
            ApiAway: The API is away.
            ApiRefused: It does not delete the Job.
        """
        options = V1DeleteOptions(
            # Without this the Job's pods would outlive it.
            propagation_policy="Background",
            preconditions=V1Preconditions(uid=uid) if uid else None,
        )

        def delete() -> bool:
            try:
                self.batch_api.delete_namespaced_job(job_name, namespace, body=options)
            except ApiException as fault:
                if is_absent(fault) or (fault.status == 409 and options.preconditions is not None):
                    return False
                raise
            return True

        return self._patiently(delete, f"the deletion of Job {job_name}", min(END_PATIENCE_S, self.patience_s))

    def _patiently(self, ask: Callable[[], T], what: str, patience_s: float) -> T:
        """Ask until it is done, until the API refuses, or until the patience is over."""
        end, tries = time.monotonic() + patience_s, 0
        while True:
            try:
                return ask()
            except Exception as fault:
                tries += 1
                if not isinstance(fault, ApiException) and not is_away(fault):
                    raise
                wait_s = pause_s(tries, (getattr(fault, "headers", None) or {}).get("Retry-After"))
                if may_pass(fault) and time.monotonic() + wait_s < end:
                    time.sleep(wait_s)
                    continue
                if is_away(fault):
                    host = self.batch_api.api_client.configuration.host
                    raise ApiAway(f"the Kubernetes API {host} is away ({told(fault)}): {what} is in doubt") from None
                raise ApiRefused(f"Kubernetes refuses {what}: {told(fault)}") from None
