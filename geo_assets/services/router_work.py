"""What the router has in hand: chunks of triggers, what was sent of them, and the receipts of who brought them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from geo_assets.geofence.triggers import Trigger, Triggers


class Receipt:
    """Says when triggers handed over are durable: in the log, in the spool, known already, or dead letters."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = -1

    @property
    def done(self) -> bool:
        """Whether all of them are."""
        return self.left == 0


class Chunk:
    """Triggers that were handed over at once.

    Args:
        triggers: In order; those of a tracker as columns until it is their turn, as a row is ten times as large.
        emitted: When, `time.perf_counter_ns`.
        outside: By whom: an outside caller, or the loop that pulls positions.
        receipt: Counted down as they become durable.
        drained: They come out of the spool.
        made_ns: When columns were made, `time.time_ns`.
    """

    __slots__ = (
        "columns",
        "count",
        "devices",
        "drained",
        "emitted",
        "frames",
        "keys",
        "made_ns",
        "outside",
        "receipts",
        "triggers",
        "unsettled",
        "whole",
    )

    def __init__(
        self,
        triggers: list[Trigger] | Triggers,
        emitted: int,
        outside: bool,
        receipt: Receipt | None,
        *,
        drained: bool = False,
        made_ns: int = 0,
    ) -> None:
        self.columns = triggers if isinstance(triggers, Triggers) else None
        self.triggers: list[Trigger] = [] if isinstance(triggers, Triggers) else triggers
        self.count = len(triggers)
        """How many were handed over."""
        self.emitted, self.outside, self.drained, self.made_ns = emitted, outside, drained, made_ns
        self.receipts: list[Receipt] = [] if receipt is None else [receipt]
        if receipt is not None:
            receipt.left = len(triggers)
        self.devices: list[str] = []
        self.keys: list[bytes] = []
        self.frames: list[bytes] | None = None
        """None until keys and frames were made."""
        self.unsettled = [len(triggers)]
        """How many are not durable; shared with parts of it."""
        self.whole: Callable[[], None] | None = None
        """Called when all of them are."""

    def load(self) -> None:
        """Make rows of columns."""
        if self.columns is not None:
            self.triggers, self.columns = self.columns.rows(emitted_ns=self.made_ns), None

    @classmethod
    def merged(cls, chunks: Sequence[Chunk]) -> Chunk:
        """Several as one; the oldest one's time counts."""
        one = cls([t for chunk in chunks for t in chunk.triggers], chunks[0].emitted, chunks[0].outside, None)
        one.receipts = [receipt for chunk in chunks for receipt in chunk.receipts]
        return one

    def split(self, count: int) -> tuple[Chunk, Chunk]:
        """Its first so many, and the rest, for the same receipts; neither has frames."""
        first, rest = (
            Chunk(triggers, self.emitted, self.outside, None)
            for triggers in (self.triggers[:count], self.triggers[count:])
        )
        for one in (first, rest):
            one.receipts, one.unsettled = self.receipts, self.unsettled
        return first, rest

    def part(self, places: Iterable[int]) -> Chunk:
        """Some of its triggers as a chunk, for the same receipts."""
        chosen = list(places)
        assert self.frames is not None
        one = Chunk([self.triggers[place] for place in chosen], self.emitted, self.outside, None, drained=self.drained)
        one.receipts, one.unsettled, one.whole = self.receipts, self.unsettled, self.whole
        one.devices = [self.devices[place] for place in chosen]
        one.keys = [self.keys[place] for place in chosen]
        one.frames = [self.frames[place] for place in chosen]
        return one

    def keep(self, places: Sequence[int], frames: list[bytes], keys: list[bytes]) -> None:
        """Keep these alone."""
        self.triggers = [self.triggers[place] for place in places]
        self.devices = [self.devices[place] for place in places]
        self.keys = [keys[place] for place in places]
        self.frames = [frames[place] for place in places]

    def without(self, places: Iterable[int]) -> tuple[list[int], list[bytes], list[bytes]]:
        """The arguments of `keep` for all but these."""
        assert self.frames is not None
        gone = set(places)
        return [place for place in range(len(self.triggers)) if place not in gone], self.frames, self.keys

    def empty(self) -> None:
        """Nothing is left to send."""
        self.triggers, self.devices, self.keys, self.frames = [], [], [], []

    def settled(self, count: int) -> None:
        """So many more are durable."""
        self.unsettled[0] -= count
        if self.unsettled[0] == 0:
            self.durable()
            if self.whole is not None:
                self.whole()

    def durable(self) -> None:
        """All of them are: on disk, at least."""
        for receipt in self.receipts:
            receipt.left = 0


class Sent:
    """A chunk under way.

    Args:
        number: One up with each.
        chunk: What was sent.
        at: When, `time.perf_counter_ns`.
    """

    __slots__ = ("at", "chunk", "number", "spooled")

    def __init__(self, number: int, chunk: Chunk, at: int) -> None:
        self.number, self.chunk, self.at = number, chunk, at
        self.spooled = False
        """It is in the spool as well, in case it fails."""
