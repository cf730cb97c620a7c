"""The lease of the routing run: one routes, the next one stands by. Epochs are what keeps order."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

import structlog

from resources.event_log.protocol import LogError
from resources.guard.protocol import GuardUnavailable

if TYPE_CHECKING:
    from resources.guard.protocol import Guard, Lease

log = structlog.get_logger()

NAME = "geofence-routing"
TTL_S = 5.0
"""How long positions wait at most for the next run when this one is killed."""

POLL_S = 0.1
"""How often a standby asks: it takes over so soon after a release."""


_WARM_S = 1.0


class RoutingLease:
    """Waits for the lease, then renews it in a thread until it is closed or lost.

    Args:
        guard: Keeps it.
        ttl_s: How long it holds without being renewed.
    """

    def __init__(self, guard: Guard, ttl_s: float = TTL_S) -> None:
        self._guard, self._ttl_s = guard, ttl_s
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._lease: Lease | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self.lost = False
        """Another run has it."""

    def wait(
        self,
        stop: threading.Event,
        timeout_s: float | None = None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> bool:
        """Wait for the lease; whether it was got before `stop` was set and the time was over.

        Args:
            stop: Ends it.
            timeout_s: Ends it too.
            meanwhile: Done about every second of waiting, to keep warm; a fault of the log there costs nothing.

        Where the guard does not answer it counts as got: the higher epoch decides who routes.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        warm_at = time.monotonic() + _WARM_S
        told = False
        while True:
            try:
                self._lease = self._guard.acquire(NAME, self._owner, self._ttl_s)
            except GuardUnavailable as fault:
                log.warning("routing goes on without its lease", error=str(fault))
                break
            if self._lease is not None:
                break
            if not told:
                log.info("another run routes: standing by")
                told = True
            if stop.wait(POLL_S) or (deadline is not None and time.monotonic() >= deadline):
                return False
            if time.monotonic() >= warm_at:
                try:
                    meanwhile()
                except LogError as fault:
                    log.warning("a standby is not kept warm", error=str(fault))
                warm_at = time.monotonic() + _WARM_S
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()
        return True

    def _renew(self) -> None:
        while not self._closed.wait(self._ttl_s / 3):
            try:
                renewed = self._guard.renew(self._lease, self._ttl_s) if self._lease is not None else None
                if renewed is None:
                    # It ran out while this process was held up, or the guard was away: nobody else may want it.
                    renewed = self._guard.acquire(NAME, self._owner, self._ttl_s)
            except GuardUnavailable as fault:
                log.warning("the lease of routing is not renewed", error=str(fault))
                continue
            if renewed is None:
                self.lost = True
                return
            self._lease = renewed

    def close(self) -> None:
        """Let the next one have it, at once."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        if self._lease is not None and not self.lost:
            try:
                self._guard.release(self._lease)
            except GuardUnavailable as fault:
                log.warning("the lease of routing was not released", error=str(fault))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
