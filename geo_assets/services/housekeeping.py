"""What has to be done now and then, by one process at a time: sweeps every few seconds, retention every few minutes."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from geo_assets.services import garbage, outbox
from geo_assets.services.announce import sweep_announcements
from geo_assets.services.dead_letters import now_ms

if TYPE_CHECKING:
    from geo_assets.stack import Stack

log = structlog.get_logger()

SWEEP_S = 5.0
RETENTION_S = 300.0
LEASE = "housekeeping"


def sweep(stack: Stack) -> dict[str, int]:
    """Pay what dead processes left; how much of each."""
    return {
        "hints": outbox.send_hints(stack),
        "wide edits": len(outbox.plan_wide(stack)),
        "imports": outbox.sweep_imports(stack),
        "announcements": sweep_announcements(stack),
    }


def enforce_retention(stack: Stack) -> dict[str, int]:
    """Delete what is past its time; how much of each."""
    now = now_ms()
    kept_ms = 2 * stack.settings.retention_s * 1000
    tombstones, keys = stack.features.expire(tombstones_before_ms=now - kept_ms, keys_before_ms=now - kept_ms)
    return {
        "records": sum(stack.log.enforce_retention().values()),
        "objects": garbage.collect_objects(stack, now_ms=now),
        "bodies": garbage.collect_inbox(stack, now_ms=now),
        "tombstones": tombstones,
        "applied keys": keys,
        "guard keys": stack.guard.expire(),
        "batches": stack.ledger.forget_batches(now - stack.settings.retention_s * 1000),
    }


class Housekeeper(threading.Thread):
    """Does both in a thread of its own while it holds the lease; a task that fails is logged and tried again later."""

    def __init__(self, open_stack: Callable[[], Stack]) -> None:
        super().__init__(daemon=True, name="housekeeping")
        self._open = open_stack
        self._stop_asked = threading.Event()
        self._owner = f"{socket.gethostname()}:{os.getpid()}"

    def stop(self) -> None:
        """Ask it to end and wait for the task under way."""
        self._stop_asked.set()
        self.join(timeout=10)

    def run(self) -> None:
        """Sweep and clean until asked to stop."""
        with self._open() as stack:
            next_retention = time.monotonic() + 30.0
            while not self._stop_asked.wait(SWEEP_S):
                try:
                    lease = stack.guard.acquire(LEASE, self._owner, SWEEP_S * 4)
                    if lease is None:
                        continue
                    self._say(sweep(stack))
                    if time.monotonic() >= next_retention:
                        next_retention = time.monotonic() + RETENTION_S
                        self._say(enforce_retention(stack))
                except Exception as fault:
                    log.warning("housekeeping failed, will try again", error=f"{type(fault).__name__}: {fault}")

    @staticmethod
    def _say(done: dict[str, int]) -> None:
        done = {name: count for name, count in done.items() if count}
        if done:
            log.info("housekeeping", **{name.replace(" ", "_"): count for name, count in done.items()})
