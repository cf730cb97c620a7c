"""When a consumer stops asking for records, and when it pauses partitions: stop asking first, pause late.

To stop asking costs nothing and ends at once: whoever does not ask still polls for no records, so that its group keeps
it. A pause keeps the client from fetching what nobody asks for, and takes up to a second to end, since the broker's
fetch under way has to come back first. So it comes late, and one partition of each broker goes on, which keeps that
fetch short and the connection warm.

Pure: from what was decided before and how it stands now to what is to be done. It has no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Set
from dataclasses import dataclass
from typing import Generic, TypeVar

from geo_assets.flow.bounds import PAUSE_AT, RESUME_AT

PAUSE_AFTER_S = 10.0
"""How long nothing was asked for before partitions are paused: ten times what the end of a pause costs."""

PAUSED_LEAST_S = 5.0
"""Least length of a pause: one that is over sooner costs more than it spares."""

Partition = TypeVar("Partition", bound=Hashable)
"""A (topic, partition) pair, or whatever the caller's log calls one."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When what happens.

    Args:
        stop_at: Share of the queue from which nothing is asked for.
        ask_at: Share below which the queue must be before records are asked for again.
        pause_after_s: How long nothing was asked for before partitions are paused.
        paused_least_s: Least length of a pause.
    """

    stop_at: float = PAUSE_AT
    ask_at: float = RESUME_AT
    pause_after_s: float = PAUSE_AFTER_S
    paused_least_s: float = PAUSED_LEAST_S

    def __post_init__(self) -> None:
        if not 0 < self.ask_at < self.stop_at <= 1 or self.pause_after_s < 0 or self.paused_least_s < 0:
            raise ValueError(
                f"ask_at {self.ask_at}, stop_at {self.stop_at}: not 0 < a < b <= 1; or pause_after_s "
                f"{self.pause_after_s}, paused_least_s {self.paused_least_s} below 0"
            )


_DEFAULT = Limits()


@dataclass(frozen=True, slots=True)
class Flow:
    """What was decided last; the next decision is made from it."""

    stopped_since_s: float | None = None
    """Since when nothing is asked for: what shedding goes by (flow/shedding.py)."""
    paused_since_s: float | None = None

    @property
    def asks(self) -> bool:
        """Whether records are asked for; if not, polls are for none."""
        return self.stopped_since_s is None


@dataclass(frozen=True, slots=True)
class Decision(Generic[Partition]):
    """What is to be done now.

    Args:
        flow: For the next decision.
        pause: Partitions to pause that are not.
        resume: Partitions to resume that are paused.
    """

    flow: Flow
    pause: frozenset[Partition]
    resume: frozenset[Partition]


def decide(
    flow: Flow,
    fill: float,
    brokers: Mapping[str, Collection[Partition]],
    paused: Set[Partition],
    lag: Mapping[Partition, int],
    now_s: float,
    limits: Limits = _DEFAULT,
) -> Decision[Partition]:
    """Decide what a consumer does.

    Args:
        flow: What was decided last.
        fill: Share of its queue that is taken, from 0 on.
        brokers: Partitions that it holds, by the broker that leads each.
        paused: Those of them that are paused. One that was given up and came back is not.
        lag: Partition -> records behind; of a broker the one that is least behind goes on, as least comes from it.
        now_s: The time, seconds; never falling.
        limits: When what happens.
    """
    stopped_since = flow.stopped_since_s
    if fill < (limits.stop_at if stopped_since is None else limits.ask_at):
        stopped_since = None
    elif stopped_since is None:
        stopped_since = now_s
    wanted: set[Partition] = set()
    for partitions in brokers.values():
        stay = paused & set(partitions)
        if stopped_since is not None and now_s - stopped_since >= limits.pause_after_s:
            stay = set(partitions)
        elif stopped_since is None and _over(flow, now_s, limits):
            stay = set()
        if len(stay) == len(partitions):
            # One goes on: the one that does already, so that none takes turns with another.
            on = [partition for partition in partitions if partition not in paused] or partitions
            stay -= set(sorted(on, key=lambda partition: (lag.get(partition, 0), str(partition)))[:1])
        wanted |= stay
    held = {partition for partitions in brokers.values() for partition in partitions}
    since = None
    if wanted:
        since = now_s if flow.paused_since_s is None else flow.paused_since_s
    return Decision(Flow(stopped_since, since), frozenset(wanted - paused), frozenset((paused & held) - wanted))


def _over(flow: Flow, now_s: float, limits: Limits) -> bool:
    """Whether a pause has been long enough to end."""
    return flow.paused_since_s is None or now_s - flow.paused_since_s >= limits.paused_least_s
