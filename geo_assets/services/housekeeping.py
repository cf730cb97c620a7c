"""What has to be done now and then, by one process at a time: sweeps every few seconds, retention every few minutes."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import structlog

from geo_assets.services import garbage, outbox
from geo_assets.services.announce import sweep_announcements, sweep_purges
from geo_assets.services.dead_letters import now_ms
from geo_assets.services.fence_features import send_fences
from geo_assets.services.tileset.keeping import sweep_all
from resources.guard.protocol import GuardUnavailable

if TYPE_CHECKING:
    from geo_assets.stack import Stack

log = structlog.get_logger()

SWEEP_S = 5.0
RETENTION_S = 300.0
LEASE = "housekeeping"
MANIFESTS = 1_000
"""Newest manifests looked at for whether they are done: those before them were when they were new."""


def sweep(stack: Stack, quiet: outbox.QuietImports | None = None) -> dict[str, int]:
    """Pay what dead processes left; how much of each. A port that is away costs its own tasks alone.

    Args:
        stack: The ports.
        quiet: What this process has seen of imports, for while the guard cannot say which of them live.
    """
    return _each(
        {
            "fences": lambda: send_fences(stack),
            "hints": lambda: outbox.send_hints(stack),
            "wide edits": lambda: len(outbox.plan_wide(stack)),
            "imports": lambda: outbox.sweep_imports(stack, quiet),
            "purges": lambda: sweep_purges(stack),
            "announcements": lambda: sweep_announcements(stack),
        }
    )


def enforce_retention(stack: Stack, *, at_ms: int | None = None) -> dict[str, int]:
    """Delete what is past its time; how much of each. A port that is away costs its own tasks alone.

    Args:
        stack: The ports.
        at_ms: The moment that counts as now, milliseconds since the epoch, UTC. Guard keys go by their server's clock.
    """
    now = now_ms() if at_ms is None else at_ms
    kept_ms = 2 * stack.settings.retention_s * 1000

    def features() -> int:
        tombstones, keys = stack.features.expire(tombstones_before_ms=now - kept_ms, keys_before_ms=now - kept_ms)
        return tombstones + keys

    return _each(
        {
            "records": lambda: sum(stack.log.enforce_retention(now).values()),
            "objects": lambda: garbage.collect_objects(stack, now_ms=now),
            "unfinished tilesets": lambda: sweep_all(stack, grace_ms=int(stack.settings.garbage_grace_s * 1000)),
            "bodies": lambda: garbage.collect_inbox(stack, now_ms=now),
            "tombstones and applied keys": features,
            "guard keys": lambda: stack.guard.expire(),
            "batches": lambda: stack.ledger.forget_batches(now - stack.settings.retention_s * 1000),
            "manifests": lambda: forget_manifests(stack, now),
        }
    )


def forget_manifests(stack: Stack, now: int) -> int:
    """Delete manifests whose end nobody asks for any more; how many. One is only known to be done by a look at it."""
    stack.ledger.manifests(MANIFESTS)
    return stack.ledger.forget_manifests(now - stack.settings.retention_s * 1000)


def _each(tasks: Mapping[str, Callable[[], int]]) -> dict[str, int]:
    """Do each; one that fails is logged, counts as 0, and is tried again the next time."""
    done: dict[str, int] = {}
    for name, task in tasks.items():
        try:
            done[name] = task()
        except Exception as fault:
            log.warning("housekeeping failed, will try again", task=name, error=f"{type(fault).__name__}: {fault}")
            done[name] = 0
    return done


class Housekeeper(threading.Thread):
    """Does both in a thread of its own while it holds the lease; a task that fails is logged and tried again later.

    The lease only saves work: every task may be done by several processes at once. So while the guard is away, each of
    them does it.
    """

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
            quiet = outbox.QuietImports()
            while not self._stop_asked.wait(SWEEP_S):
                try:
                    if not self._is_mine(stack):
                        continue
                    self._say(sweep(stack, quiet))
                    if time.monotonic() >= next_retention:
                        next_retention = time.monotonic() + RETENTION_S
                        self._say(enforce_retention(stack))
                except Exception as fault:
                    log.warning("housekeeping failed, will try again", error=f"{type(fault).__name__}: {fault}")

    def _is_mine(self, stack: Stack) -> bool:
        try:
            return stack.guard.acquire(LEASE, self._owner, SWEEP_S * 4) is not None
        except GuardUnavailable as fault:
            log.warning("housekeeping goes on without its lease", error=str(fault))
            return True

    @staticmethod
    def _say(done: dict[str, int]) -> None:
        done = {name: count for name, count in done.items() if count}
        if done:
            log.info("housekeeping", **{name.replace(" ", "_"): count for name, count in done.items()})
