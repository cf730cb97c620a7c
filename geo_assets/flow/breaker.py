"""The circuit breaker: closed, open after failures in a row, half-open with exactly one probe.

It knows nothing of what it guards, and has no clock: whoever asks brings the time. Safe for many threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

FAILURES = 20
OPEN_S = 5.0

BreakerState = Literal["closed", "open", "half-open"]
Held = Literal["closed", "open"]


class Breaker:
    """Failures in a row open it; after a pause one caller may try, and the outcome of that try closes it or not.

    Args:
        failures: In a row, that open it.
        open_s: How long it stays open before the probe, and how long a probe may take before another is let through.
        changed: Told each new state; called with the lock held, so it must not ask the breaker.
    """

    def __init__(
        self,
        failures: int = FAILURES,
        open_s: float = OPEN_S,
        changed: Callable[[BreakerState], None] = lambda _: None,
    ) -> None:
        if failures < 1 or open_s < 0:
            raise ValueError(f"failures {failures} is below 1, or open_s {open_s} below 0")
        self.failures, self.open_s = failures, open_s
        self._changed = changed
        self._lock = threading.Lock()
        self._state: BreakerState = "closed"
        self._in_a_row = 0
        self._since = 0.0
        self._probe = 0
        self.reason = ""
        """Why it is open."""
        self.held: Held | None = None
        """Where an operator holds it."""

    @property
    def state(self) -> BreakerState:
        """The state as of the last call."""
        return self._state

    @property
    def closed(self) -> bool:
        """Whether everybody may pass."""
        return self._state == "closed"

    def probe(self, now_s: float) -> int | None:
        """Ask to be the probe of an open breaker.

        Returns:
            A number to report the outcome with (`succeeded`, `failed`), for one caller alone; None for all others, and
            while it is closed or the pause is not over.
        """
        with self._lock:
            if self._state == "closed" or self.held == "open" or now_s - self._since < self.open_s:
                return None
            # Half-open as well: a probe that never reports its outcome is replaced by the next.
            self._since = now_s
            self._probe += 1
            self._move("half-open")
            return self._probe

    def succeeded(self, probe: int | None = None) -> None:
        """Something went through: ends the row of failures; with the number of the current probe, closes the breaker.

        What was under way when it opened, and got through after all, does not close it.
        """
        with self._lock:
            if self._state == "closed":
                self._in_a_row = 0
            elif self._state == "half-open" and probe == self._probe and self.held != "open":
                self._in_a_row, self.reason = 0, ""
                self._move("closed")

    def failed(self, now_s: float, probe: int | None = None, reason: str = "") -> bool:
        """Something failed, or took too long.

        Returns:
            Whether this opened the breaker.
        """
        with self._lock:
            if self._state == "closed":
                if self.held == "closed":
                    return False
                self._in_a_row += 1
                if self._in_a_row < self.failures:
                    return False
            elif self._state == "open" or probe != self._probe:
                return False
            self._open(now_s, reason)
            return True

    def trip(self, now_s: float, reason: str) -> None:
        """Open it at once, if it is not: the stage before is in breach, or an operator says so."""
        with self._lock:
            if self._state != "open":
                self._open(now_s, reason)

    def hold(self, where: Held | None, now_s: float, reason: str = "an operator holds it open") -> None:
        """Have it stay where an operator wants it.

        Args:
            where: `open`: at once, and no probe passes. `closed`: at once, and failures in a row do not open it; a
                `trip` does, as who trips it cannot go on. None: it goes on by itself, from where it is.
            now_s: The time.
            reason: Why, where it is open.
        """
        with self._lock:
            before, self.held = self.held, where
            if where == "open":
                self._open(now_s, reason)
            elif where == "closed":
                self._in_a_row, self.reason = 0, ""
                self._move("closed")
            elif before == "open":
                # The next one who asks is the probe.
                self._since = now_s - self.open_s

    def _open(self, now_s: float, reason: str) -> None:
        self._since, self.reason = now_s, reason
        self._move("open")

    def _move(self, state: BreakerState) -> None:
        if state != self._state:
            self._state = state
            self._changed(state)
