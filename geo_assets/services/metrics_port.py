"""A small HTTP port with metrics and health, for services that serve nothing else.

`/metrics`, `/healthz` (the process is alive) and `/readyz` (it gets on with its work: 503 with the reason where not).
"""

from __future__ import annotations

import errno
import json
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import structlog
from prometheus_client import CollectorRegistry, make_wsgi_app

from geo_assets.services.draining import PROCESS

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

log = structlog.get_logger()

DRAINING = "this process is about to end"


class Readiness:
    """Whether a service gets on with its work, and why not. Set by the service, read by the port's threads."""

    def __init__(self, waits_for: str | None = None) -> None:
        self.waits_for = waits_for
        """What it waits for; None when it works."""

    @property
    def fault(self) -> str | None:
        """Why it is not ready; None when it is. A process that was asked to end is not."""
        return DRAINING if PROCESS.asked else self.waits_for


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a scrape is no news."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


def application(registry: CollectorRegistry, ready: Readiness) -> WSGIApplication:
    """The port's answers, as a WSGI application."""
    metrics = make_wsgi_app(registry)

    def answer(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        if path == "/healthz":
            return _json(start, "200 OK", {"status": "ok"})
        if path == "/readyz":
            fault = ready.fault
            if fault is None:
                return _json(start, "200 OK", {"status": "ready"})
            return _json(start, "503 Service Unavailable", {"status": "unavailable", "detail": fault})
        if path in ("/", "/metrics"):
            return metrics(environ, start)
        return _json(start, "404 Not Found", {"status": "not found"})

    return answer


def _json(start: StartResponse, status: str, value: dict[str, str]) -> Iterable[bytes]:
    body = json.dumps(value).encode()
    start(status, [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
    return [body]


def _serve(registry: CollectorRegistry, host: str, port: int, ready: Readiness) -> tuple[int, Callable[[], None]]:
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    kind = type("_Server", (_Server,), {"address_family": family})
    server = kind((str(address[0]), port), _Quiet)
    server.set_app(application(registry, ready))
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)

    return server.server_port, end


def serve_somewhere(
    registry: CollectorRegistry, host: str, port: int, ready: Readiness | None = None
) -> tuple[int, Callable[[], None]]:
    """Serve the port in a thread, on a free one where this is 0 or taken; the port, and what ends it."""
    ready = ready or Readiness()
    try:
        return _serve(registry, host, port, ready)
    except OSError as fault:
        if port == 0 or fault.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        found, end = _serve(registry, host, 0, ready)
        log.warning("metrics on another port", wanted=port, port=found, error=fault.strerror)
        return found, end


def serve_metrics(
    registry: CollectorRegistry, host: str, port: int, ready: Readiness | None = None
) -> Callable[[], None] | None:
    """Serve the port in a thread; returns what ends it, or None when the port is 0 or taken.

    A taken port is a warning, not an end: the work matters more than being watched.
    """
    if port == 0:
        return None
    try:
        return _serve(registry, host, port, ready or Readiness())[1]
    except OSError as fault:
        if fault.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        log.warning("no metrics", port=port, error=fault.strerror)
        return None
