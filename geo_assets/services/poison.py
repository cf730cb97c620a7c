"""Poison: triggers that cannot be encoded or are too large become dead letters, at once and beside the others."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import structlog

from geo_assets.events.dead_letter import DeadLetter, Reason
from geo_assets.events.json_text import shorten
from geo_assets.geofence.triggers import Trigger
from geo_assets.services.router_work import Chunk
from resources.event_log.protocol import RecordTooLarge

log = structlog.get_logger()

_AGAIN_S = 1.0
SOURCE = "geofence"


def letter_of(trigger: Trigger, frame: bytes | None, fault: Exception) -> DeadLetter:
    """The dead letter of a trigger.

    Args:
        trigger: It.
        frame: Its frame, where it has one.
        fault: Why it cannot go out.
    """
    reason: Reason = "too_large" if isinstance(fault, RecordTooLarge) else "schema"
    return DeadLetter.make(
        reason=reason,
        stage="route",
        explanation=shorten(str(fault)),
        source=SOURCE,
        at_ms=time.time_ns() // 1_000_000,
        # Members of a trigger say nothing of a device's place but the fence.
        payload=frame if frame is not None else repr(trigger).encode("utf-8", "backslashreplace"),
        headers={"kind": "triggers"},
    )


class Undertaker:
    """Writes dead letters in a thread of its own, again and again until they are durable: the router never waits.

    Args:
        write: Writes them, or raises.
    """

    def __init__(self, write: Callable[[Sequence[DeadLetter]], None]) -> None:
        self._write = write
        self._lock = threading.Condition()
        self._waiting: deque[tuple[Chunk, list[DeadLetter]]] = deque()
        self._written: deque[tuple[Chunk, int]] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False

    def take(self, chunk: Chunk, letters: list[DeadLetter]) -> None:
        """Write letters of a chunk's triggers."""
        with self._lock:
            self._waiting.append((chunk, letters))
            self._lock.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dead letters", daemon=True)
                self._thread.start()

    def buried(self) -> list[tuple[Chunk, int]]:
        """Chunks of which so many letters are durable now."""
        found: list[tuple[Chunk, int]] = []
        while self._written:
            found.append(self._written.popleft())
        return found

    def close(self, timeout_s: float) -> None:
        """End when all are written, or the time is over."""
        if self._thread is None:
            return
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._lock.wait_for(lambda: not self._waiting, timeout_s)
            self._closed = True
            self._lock.notify_all()
        self._thread.join(max(0.1, deadline - time.monotonic()))

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                chunk, letters = self._waiting[0]
            try:
                self._write(letters)
            except Exception as fault:
                log.warning("dead letters wait", letters=len(letters), error=str(fault))
                with self._lock:
                    self._lock.wait_for(lambda: self._closed, _AGAIN_S)
                continue
            with self._lock:
                self._waiting.popleft()
                self._written.append((chunk, len(letters)))
                self._lock.notify_all()
