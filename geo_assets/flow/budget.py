"""The vertex budget: how much work is under way, counted in vertices, and whose turn is next.

Messages say nothing of work: one record may be a kiosk or a country. What is large holds a part of the budget, never
all of it: a share and a worker are kept for small work, so that one giant does not hold up every small edit.

Nobody waits in here. Whoever polls asks for work that came in and takes what may start; workers refund when they end:

    budget.ask(partition, work, vertices_in(record.headers), now_s)
    for ticket in budget.grants():
        pool.submit(run, ticket)

    def run(ticket):
        with ticket:                 # refunds in any case
            build(ticket.work)

It has no clock: whoever calls brings the time. Safe for many threads, by one lock that is held for microseconds.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Hashable, Mapping
from types import TracebackType
from typing import Generic, Literal, NamedTuple, Self, TypeVar

from geo_assets.events.topics import HEADER_VERTEX_COUNT

CAPACITY = 60_000
"""Vertices under way. Encoding costs 1.5 µs each: all of it is a tenth of a second of one core, which is what the next
edit waits at most for what began before it."""

SMALL = 10_000
"""Most vertices of small work: 15 ms of encoding, a tile of zoom 15 in a dense city."""

KEPT = 0.25
"""Share of the capacity that large work leaves alone: room for a small one, and for the half of another."""

WORKERS = 3
"""Workers, of which one is never large work's: two processes, one for each core of a small machine, and one beside."""

WAITING = 10_000
"""Most tickets that wait, some 10 MB. Whoever polls stops asking for records long before (flow/pausing.py)."""

Work = TypeVar("Work")

State = Literal["waiting", "granted", "refunded"]


class BudgetFull(Exception):
    """As many wait as may; nothing was taken. Ask again when something has started."""

    def __init__(self, waiting: int) -> None:
        super().__init__(f"{waiting:,} works wait for the vertex budget, which is the most; none was taken")
        self.waiting = waiting


class Gauges(NamedTuple):
    """How a budget stands."""

    in_use: int
    """Vertices under way: their tickets' `held`."""
    under_way: int
    """Works under way."""
    waiting: int
    """Works that wait."""
    oldest_wait_s: float
    """How long the one has waited that waits longest; 0 where none does."""
    fill: float
    """Share of the places for those who wait that is taken: what flow/pausing.py goes by."""


class Ticket(Generic[Work]):
    """A piece of work and what it holds of the budget; as a context manager it refunds at the end, whatever happens."""

    __slots__ = ("_budget", "asked_s", "cost", "held", "partition", "small", "state", "work")

    def __init__(
        self, budget: VertexBudget[Work], partition: Hashable, work: Work, cost: int, held: int, asked_s: float
    ) -> None:
        self._budget = budget
        self.partition, self.work, self.cost, self.held, self.asked_s = partition, work, cost, held, asked_s
        self.small = cost <= budget.small
        self.state: State = "waiting"

    def refund(self) -> None:
        """See `VertexBudget.refund`."""
        self._budget.refund(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.refund()


class VertexBudget(Generic[Work]):
    """Admits work in vertices: first in, first out within a partition, in turn among partitions.

    The turn of a partition comes by when its first work became its first; so none waits for more than one of each
    other. Large work goes strictly in turn, and while one waits, small work keeps to its share: what is under way
    ends, and the large one starts. Small work goes in turn among small work, and always has its share. It is bounded by
    vertices alone: whoever builds it may take several at once.

    Args:
        capacity: Most vertices under way. A cost above it counts as it.
        small: Most vertices of small work.
        kept: Share of the capacity that large work leaves alone. A ticket of large work holds at most the rest.
        workers: Whoever works, of whom one is left to small work: one fewer than these are under way of large work.
        waiting: Most works that wait.
    """

    def __init__(
        self,
        capacity: int = CAPACITY,
        *,
        small: int = SMALL,
        kept: float = KEPT,
        workers: int = WORKERS,
        waiting: int = WAITING,
    ) -> None:
        self.capacity, self.small, self.workers, self.most_waiting = capacity, small, workers, waiting
        self.kept = int(capacity * kept)
        """Vertices kept for small work."""
        if not 1 <= small <= self.kept < capacity:
            raise ValueError(
                f"capacity {capacity}, small {small}, kept {kept}: the {self.kept} vertices kept for small work must "
                f"hold one of {small}, and leave room for others"
            )
        if workers < 2 or waiting < 1:
            raise ValueError(
                f"workers {workers} is below 2, one for large work and one for small, or waiting {waiting} below 1"
            )
        self._lock = threading.Lock()
        self._queues: dict[Hashable, deque[Ticket[Work]]] = {}
        # The first of each partition by its turn, small and large apart.
        self._small: list[tuple[int, Ticket[Work]]] = []
        self._large: list[tuple[int, Ticket[Work]]] = []
        self._turns = self._waiting = 0
        self._used = {True: 0, False: 0}
        self._under_way = {True: 0, False: 0}

    def cost(self, vertices: int | None) -> int:
        """What work costs: its vertices, at most the capacity. One that nobody measured (None, 0) costs all of it."""
        return self.capacity if vertices is None or vertices < 1 else min(vertices, self.capacity)

    def ask(self, partition: Hashable, work: Work, vertices: int | None, now_s: float) -> Ticket[Work]:
        """Queue work behind what its partition has waiting.

        Args:
            partition: Whose order it keeps.
            work: What `Ticket.work` gives back.
            vertices: Of the work; None or 0 where nobody measured it.
            now_s: The time, seconds; never falling.

        Raises:
            BudgetFull: As many wait as may.
        """
        cost = self.cost(vertices)
        held = cost if cost <= self.small else min(cost, self.capacity - self.kept)
        ticket = Ticket(self, partition, work, cost, held, now_s)
        with self._lock:
            if self._waiting >= self.most_waiting:
                raise BudgetFull(self._waiting)
            self._waiting += 1
            queue = self._queues.setdefault(partition, deque())
            queue.append(ticket)
            if len(queue) == 1:
                self._first(ticket)
        return ticket

    def grants(self) -> list[Ticket[Work]]:
        """What may start now, in the order of its start; each counts as under way until it is refunded."""
        found: list[Ticket[Work]] = []
        with self._lock:
            while (ticket := self._next()) is not None:
                ticket.state = "granted"
                self._used[ticket.small] += ticket.held
                self._under_way[ticket.small] += 1
                self._waiting -= 1
                heapq.heappop(self._small if ticket.small else self._large)
                self._queues[ticket.partition].popleft()
                self._follow(ticket.partition)
                found.append(ticket)
        return found

    def refund(self, ticket: Ticket[Work]) -> None:
        """Give back what a ticket holds; one that waits is withdrawn. Again: no change."""
        with self._lock:
            state, ticket.state = ticket.state, "refunded"
            if state == "granted":
                self._used[ticket.small] -= ticket.held
                self._under_way[ticket.small] -= 1
            elif state == "waiting":
                self._waiting -= 1
                queue = self._queues[ticket.partition]
                first = queue[0] is ticket
                queue.remove(ticket)
                if first:
                    self._small, self._large = _without(self._small, ticket), _without(self._large, ticket)
                    self._follow(ticket.partition)

    def gauges(self, now_s: float) -> Gauges:
        """How it stands."""
        with self._lock:
            oldest = min((queue[0].asked_s for queue in self._queues.values()), default=now_s)
            return Gauges(
                in_use=sum(self._used.values()),
                under_way=sum(self._under_way.values()),
                waiting=self._waiting,
                oldest_wait_s=max(0.0, now_s - oldest),
                fill=self._waiting / self.most_waiting,
            )

    def _first(self, ticket: Ticket[Work]) -> None:
        """A ticket became the first of its partition."""
        heapq.heappush(self._small if ticket.small else self._large, (self._turns, ticket))
        self._turns += 1

    def _follow(self, partition: Hashable) -> None:
        """The first of a partition is gone; its follower's turn is behind the first of all others."""
        queue = self._queues[partition]
        if queue:
            self._first(queue[0])
        else:
            del self._queues[partition]

    def _next(self) -> Ticket[Work] | None:
        """Who may start now."""
        large = self._large[0][1] if self._large else None
        small = self._small[0][1] if self._small else None
        used = sum(self._used.values())
        if (
            large is not None
            and self._under_way[False] < self.workers - 1
            and self._used[False] + large.held <= self.capacity - self.kept
            and used + large.held <= self.capacity
        ):
            return large
        if small is None or used + small.held > self.capacity:
            return None
        return small if large is None or self._used[True] + small.held <= self.kept else None


def _without(heap: list[tuple[int, Ticket[Work]]], ticket: Ticket[Work]) -> list[tuple[int, Ticket[Work]]]:
    kept = [entry for entry in heap if entry[1] is not ticket]
    heapq.heapify(kept)
    return kept


def vertices_in(headers: Mapping[str, str]) -> int | None:
    """The vertices that a record's header `vertex-count` tells; None where it is missing or no number."""
    text = headers.get(HEADER_VERTEX_COUNT, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 12 else None
