"""What a simulation has done so far: counted by several threads, read by one that shows it."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_KEPT = 100_000
"""Times of which percentiles are taken: the newest ones."""


class SimulationError(Exception):
    """The simulation cannot go on; the message is for people."""


@dataclass(slots=True)
class Percentiles:
    """The newest of many durations, milliseconds, and when each was added."""

    newest: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def add(self, milliseconds: Iterable[float]) -> None:
        """Some more."""
        now_s = time.monotonic()
        self.newest.extend((now_s, value) for value in milliseconds)

    def members(self, last_s: float = math.inf) -> dict[str, float] | None:
        """p50, p95, p99 and the highest, milliseconds; None where there is none.

        Args:
            last_s: Only those that were added in so many seconds before the last one.
        """
        if not self.newest:
            return None
        begin = self.newest[-1][0] - last_s
        values = np.array([value for at, value in self.newest if at >= begin])
        p50, p95, p99 = np.percentile(values, (50, 95, 99)).tolist()
        return {"p50": round(p50, 1), "p95": round(p95, 1), "p99": round(p99, 1), "max": round(float(values.max()), 1)}


class Tally:
    """Counts of a simulation. Every method may be called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._answers: Counter[str] = Counter()
        self._made: Counter[str] = Counter()
        self._triggers: Counter[str] = Counter()
        self._times = {"acknowledged": Percentiles(), "triggers": Percentiles()}
        self.problem: str | None = None
        """The newest thing that went wrong, for people."""

    def made(self, fates: Iterable[tuple[str, int]]) -> None:
        """Positions that were due, by what is odd about them."""
        with self._lock:
            self._made.update(dict(fates))

    def add(self, name: str, count: int = 1) -> None:
        """One more of a plain count."""
        with self._lock:
            self._counts[name] += count

    def answered(self, status: int | str, count: int = 1) -> None:
        """Answers of the edge, by status."""
        with self._lock:
            self._answers[str(status)] += count

    def trigger(self, states: Iterable[str], milliseconds: Iterable[float]) -> None:
        """Triggers that were seen, and how long after their position."""
        with self._lock:
            self._triggers.update(states)
            self._times["triggers"].add(milliseconds)

    def acknowledged(self, positions: int, milliseconds: float) -> None:
        """Positions that are in the log, and how long after they were due the first of them is."""
        with self._lock:
            self._counts["sent"] += positions
            self._times["acknowledged"].add((milliseconds,))

    def count(self, name: str) -> int:
        """A plain count."""
        return self._counts[name]

    def members(self) -> dict[str, Any]:
        """All of it as plain JSON values."""
        with self._lock:
            return {
                "made": sum(self._made.values()),
                "fates": dict(sorted(self._made.items())),
                "sent": self._counts["sent"],
                "refused": self._counts["refused"],
                "shed": self._counts["shed"],
                "answers": dict(sorted(self._answers.items())),
                "acknowledged_ms": self._times["acknowledged"].members(),
                "edits": {
                    name: self._counts[f"edits {name}"]
                    for name in ("due", "taken", "refused")
                    if self._counts["edits due"]
                },
                "triggers": dict(sorted(self._triggers.items())),
                "trigger_ms": self._times["triggers"].members(),
                "trigger_ms_last_minute": self._times["triggers"].members(60.0),
                "problem": self.problem,
            }
