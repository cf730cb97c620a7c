"""Trying again: how long to wait, how often at most, and never at the cost of fresh work.

Only transient faults are tried again; whoever saw the fault says which it was, as only they know their ports. What is
permanent, or has failed as often as it may, is a dead letter. A retry passes a token bucket that closes as the system
fills, before records stop being asked for: fresh work is never held up by what failed before.

A fault of a whole port (the log is away) is nobody's retry: whoever works waits by `Backoff` and goes on from where it
is durable. It has no clock and no chance of its own: whoever calls brings both. Not safe for threads.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Generic, Literal, NamedTuple, TypeVar

BASE_S, FACTOR, CAP_S, ATTEMPTS = 0.5, 2.0, 30.0, 5
"""A broker's election and a database's restart take seconds: the four waits add up to 7.5 s at most. The cap is for
those who try for ever."""

RETRIES_A_S, BURST = 10.0, 20
"""A tenth of a hundred edits a second, which is what one machine builds."""

CLOSE_AT, OPEN_AT = 0.6, 0.4
"""Shares of the queue. Records stop being asked for at 0.7 (flow/bounds.py)."""

WAITING = 10_000
"""Most that waits to be tried again: as many as wait for the vertex budget."""

Work = TypeVar("Work")

Fault = Literal["transient", "permanent"]

Verdict = Literal["again", "dead", "full"]
"""It comes again; it is a dead letter; or as many wait as may, and the caller leaves it to whoever stands behind it (a
tile stays dirty, a record stays uncommitted)."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential, with full jitter: any time up to a bound that doubles.

    So many who failed together do not come back together (Brooker, "Exponential Backoff And Jitter", 2015).

    Args:
        base_s: The first bound, seconds.
        factor: By which each is above the one before.
        cap_s: The highest.
        attempts: Tries in all, the first included.
    """

    base_s: float = BASE_S
    factor: float = FACTOR
    cap_s: float = CAP_S
    attempts: int = ATTEMPTS

    def __post_init__(self) -> None:
        if self.base_s <= 0 or self.factor < 1 or self.cap_s < self.base_s or self.attempts < 1:
            raise ValueError(
                f"base_s {self.base_s} is not above 0, factor {self.factor} below 1, cap_s {self.cap_s} below base_s, "
                f"or attempts {self.attempts} below 1"
            )

    def bound_s(self, failed: int) -> float:
        """Most to wait after so many failures, seconds."""
        bound = self.base_s
        for _ in range(failed - 1):
            # The power alone would overflow after a night without a broker.
            if bound >= self.cap_s or self.factor == 1:
                break
            bound *= self.factor
        return min(self.cap_s, bound)

    def wait_s(self, failed: int, chance: Random) -> float:
        """How long to wait after so many failures, seconds.

        Args:
            failed: Failures so far, from 1 on.
            chance: Where the jitter comes from.
        """
        return chance.uniform(0.0, self.bound_s(failed))


class RetryTokens:
    """A token bucket that closes while the system is full.

    Args:
        a_s: Tokens a second.
        burst: Most that gather.
        close_at: Share of the queue from which no token is given.
        open_at: Share down to which the queue must be before one is given again.
    """

    def __init__(
        self, a_s: float = RETRIES_A_S, burst: int = BURST, *, close_at: float = CLOSE_AT, open_at: float = OPEN_AT
    ) -> None:
        if a_s <= 0 or burst < 1 or not 0 < open_at < close_at <= 1:
            raise ValueError(
                f"a_s {a_s} is not above 0, burst {burst} below 1, or open_at {open_at}, close_at {close_at}: "
                "not 0 < a < b <= 1"
            )
        self._a_s, self._burst, self._close_at, self._open_at = a_s, burst, close_at, open_at
        self._tokens, self._at_s = float(burst), 0.0
        self.closed = False
        """Whether it was closed at the last look."""

    def look(self, now_s: float, saturation: float) -> None:
        """See what the time has brought, and whether the system has room.

        Args:
            now_s: The time, seconds; never falling.
            saturation: Share of the queue that is taken.
        """
        self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * self._a_s)
        self._at_s = now_s
        self.closed = saturation >= (self._open_at if self.closed else self._close_at)

    def take(self) -> bool:
        """Take a token, if there is one and the system had room at the last look."""
        if self.closed or self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class Again(NamedTuple, Generic[Work]):
    """Work whose turn has come again."""

    work: Work
    attempt: int
    """The number of this try: 2 for the first retry."""


class Retries(Generic[Work]):
    """Work that failed by a transient fault and waits to be tried again; bounded.

        verdict = retries.failed(work, attempt, "transient", now_s)      # "dead": write a dead letter
        for work, attempt in retries.due(now_s, saturation): ...

    Args:
        backoff: How long it waits, and how often it is tried.
        tokens: What each retry takes.
        waiting: Most that waits.
        chance: Where the jitter comes from.
    """

    def __init__(
        self,
        backoff: Backoff | None = None,
        tokens: RetryTokens | None = None,
        *,
        waiting: int = WAITING,
        chance: Random | None = None,
    ) -> None:
        self._backoff, self._tokens = backoff or Backoff(), tokens or RetryTokens()
        self._most, self._chance = waiting, chance or Random()
        self._numbers = count()
        self._heap: list[tuple[float, int, Again[Work]]] = []
        self.counts: dict[Verdict, int] = {"again": 0, "dead": 0, "full": 0}
        """Verdicts so far."""

    def __len__(self) -> int:
        """Works that wait."""
        return len(self._heap)

    @property
    def closed(self) -> bool:
        """Whether retries wait for the system to have room."""
        return self._tokens.closed

    def failed(self, work: Work, attempt: int, fault: Fault, now_s: float) -> Verdict:
        """Say that work failed, and hear what becomes of it.

        Args:
            work: What failed.
            attempt: The number of the try that failed, 1 for the first.
            fault: Whether it may be over by itself.
            now_s: The time, seconds.
        """
        verdict: Verdict = "again"
        if fault == "permanent" or attempt >= self._backoff.attempts:
            verdict = "dead"
        elif len(self._heap) >= self._most:
            verdict = "full"
        else:
            due_s = now_s + self._backoff.wait_s(attempt, self._chance)
            heapq.heappush(self._heap, (due_s, next(self._numbers), Again(work, attempt + 1)))
        self.counts[verdict] += 1
        return verdict

    def due(self, now_s: float, saturation: float) -> list[Again[Work]]:
        """What is to be tried again now, the longest due first; each takes a token, what gets none goes on waiting.

        Args:
            now_s: The time, seconds; never falling.
            saturation: Share of the queue that is taken, from 0 on.
        """
        self._tokens.look(now_s, saturation)
        found: list[Again[Work]] = []
        while self._heap and self._heap[0][0] <= now_s and self._tokens.take():
            found.append(heapq.heappop(self._heap)[2])
        return found

    def next_s(self) -> float | None:
        """When the next is due; None where none waits."""
        return self._heap[0][0] if self._heap else None
