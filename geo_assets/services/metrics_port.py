"""A small HTTP port with metrics and health, for services that serve nothing else."""

from __future__ import annotations

import errno
from collections.abc import Callable

import structlog
from prometheus_client import CollectorRegistry, start_http_server

log = structlog.get_logger()


def serve_somewhere(registry: CollectorRegistry, host: str, port: int) -> tuple[int, Callable[[], None]]:
    """Serve `/metrics` in a thread, on a free port where this one is 0 or taken; the port, and what ends it."""
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as fault:
        if port == 0 or fault.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        server, thread = start_http_server(0, addr=host, registry=registry)
        log.warning("metrics on another port", wanted=port, port=server.server_port, error=fault.strerror)

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)

    return server.server_port, end


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> Callable[[], None] | None:
    """Serve `/metrics` in a thread; returns what ends it, or None when the port is 0 or taken.

    A taken port is a warning, not an end: the work matters more than being watched.
    """
    if port == 0:
        return None
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as fault:
        if fault.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        log.warning("no metrics", port=port, error=fault.strerror)
        return None

    def end() -> None:
        server.shutdown()
        thread.join(timeout=5)

    return end
