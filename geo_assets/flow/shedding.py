"""Shedding: passing over records that newer ones make worthless, when nothing else keeps a consumer alive.

Only of topics that an operator declared self-superseding: each of their records tells a whole state, so that the next
one of the same key makes up for one that is gone. Positions are of that sort. Edits, hints, fences, triggers,
announcements and dead letters are not: they are refused by name when a process starts. Only after nothing was asked for
during half a minute; the lowest region priority first, up to one from which nothing is shed; and each is counted.

Pure: which records are shed is decided by what is handed over, and by no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from geo_assets.events import topics

AFTER_S = 30.0
"""How long nothing was asked for before anything is shed: longer than a broker's restart, which needs no shedding."""

KEEP_FROM = 2
"""Region priority from which nothing is ever shed."""

DEFAULT_PRIORITY = 0
UNREADABLE = 10**9
"""Priority of a record that tells one that is no number: whoever wrote it meant something, and a slip costs nothing."""

NEVER: Mapping[str, str] = {
    topics.RAW: "an edit that is passed over is lost",
    topics.TILES: "a hint that is passed over leaves a tile as it was, and nothing comes to mend it",
    topics.TILES_HOT: "a hint that is passed over leaves a tile as it was, and nothing comes to mend it",
    topics.TILE_UPDATED: "a map that hears nothing of a change keeps showing what was",
    topics.FENCES: "a fence that is passed over never stands, or never ends",
    topics.TRIGGERS: "ENTER and EXIT are a stream of changes: each is needed",
    topics.DEAD_LETTERS: "what died is shown nowhere else",
}
"""Topics that are never shed, and why."""


class NotSheddable(ValueError):
    """A topic was declared self-superseding that is not."""


def declared(text: str) -> frozenset[str]:
    """The topics that a setting declares self-superseding.

    Args:
        text: Names, comma separated; empty for none.

    Raises:
        NotSheddable: A name is not of this platform, or of a topic that is never shed.
    """
    names = frozenset(name for part in text.split(",") if (name := part.strip()))
    for name in sorted(names):
        if name in NEVER:
            raise NotSheddable(f"{name} is never shed: {NEVER[name]}")
        if name not in topics.ALL:
            some = ", ".join(sorted(set(topics.ALL) - NEVER.keys()))
            raise NotSheddable(f"{name[:80]!r} is no topic of this platform; what may be declared: {some}")
    return names


def priority_in(headers: Mapping[str, str]) -> int:
    """The priority that a record's header `region-priority` tells: 0 where it is missing."""
    text = headers.get(topics.HEADER_REGION_PRIORITY)
    if text is None:
        return DEFAULT_PRIORITY
    digits = text.removeprefix("-")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 9:
        return UNREADABLE
    return int(text)


class Shedding:
    """What may be shed when, and how much was. For one thread.

    Args:
        topics: Those declared self-superseding (`declared`).
        after_s: How long nothing was asked for before anything is shed.
        keep_from: Region priority from which nothing is shed.
    """

    def __init__(self, topics: Collection[str], *, after_s: float = AFTER_S, keep_from: int = KEEP_FROM) -> None:
        for name in topics:
            if name in NEVER:
                raise NotSheddable(f"{name} is never shed: {NEVER[name]}")
        if after_s <= 0:
            raise ValueError(f"after_s: {after_s} is not above 0")
        self._topics, self._after_s, self._keep_from = frozenset(topics), after_s, keep_from
        self.shed: dict[str, int] = dict.fromkeys(sorted(self._topics), 0)
        """Topic -> records shed."""

    def below(self, topic: str, stopped_since_s: float | None, now_s: float) -> int | None:
        """The region priority below which records of a topic may be shed now; None: none of them.

        The lowest first: once nothing was asked for during `after_s`, priorities up to 0, and one more for each time
        as long again, up to `keep_from`.

        Args:
            topic: The topic.
            stopped_since_s: Since when nothing is asked for (`pausing.Flow.stopped_since_s`); None: it is.
            now_s: The time, seconds.
        """
        if topic not in self._topics or stopped_since_s is None:
            return None
        steps = int((now_s - stopped_since_s) // self._after_s)
        return min(steps, self._keep_from) if steps >= 1 else None

    def sheds(self, topic: str, headers: Mapping[str, str], stopped_since_s: float | None, now_s: float) -> bool:
        """Whether a record is shed; it is counted then.

        Args:
            topic: The topic.
            headers: The record's.
            stopped_since_s: Since when nothing is asked for; None: it is.
            now_s: The time, seconds.
        """
        below = self.below(topic, stopped_since_s, now_s)
        if below is None or priority_in(headers) >= below:
            return False
        self.count(topic)
        return True

    def count(self, topic: str, records: int = 1) -> None:
        """So many records of a declared topic were shed."""
        self.shed[topic] += records
