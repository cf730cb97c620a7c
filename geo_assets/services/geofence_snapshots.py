"""Snapshots of the tracker: an object of an immutable name each, and a value of the ledger that names the one in force.

The value carries the epoch of who may replace it and moves by compare-and-set: a run that starts puts its own epoch
there first, and a predecessor that was only paused finds that it has been replaced.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

import structlog

from geo_assets.services.trigger_tail import Replaced
from resources.tile_store.protocol import TileStoreError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from resources.ledger.protocol import Ledger
    from resources.tile_store.protocol import TileStore

log = structlog.get_logger()

VALUE = "geofence.snapshot"
"""The ledger's named value: see `Stored`."""

FOLDER = "geofence/snapshots/"
"""Where the tile store keeps them: `<epoch>-<number>-<random>`."""


class SnapshotLost(TileStoreError):
    """The object of the snapshot in force is gone."""


class PositionsChanged(Exception):
    """`[positions]` is not what it was when the run began."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The snapshot in force.

    Args:
        epoch: Of the run that may replace it.
        number: Of this value in that run.
        name: Of its object; empty before the first one.
        fences: Name of the object of the fences that are in force from its offsets on.
        revision: Their revision.
        topic: Identity of `[positions]`.
        offsets: Partition of `[positions]` -> offset of the next record.
        at_ms: When it was taken, milliseconds since the epoch, UTC.
        heard: Partition -> when the last record read was received, milliseconds since the epoch, UTC.
        due_ms: When something comes next of devices that say nothing, by the clock; None for nothing.
        passed_over: Partition -> offsets from its offsets on that could not be judged: whoever reads them again passes
            over them, whether the fault comes again or not.
        shed: Spans of which records of low priority are passed over, whoever reads them (position_shedding.py):
            partition, first offset, offset behind the last, and the region priority below which they are.
    """

    epoch: int = 0
    number: int = 0
    name: str = ""
    fences: str = ""
    revision: int = 0
    topic: str = ""
    offsets: dict[int, int] = field(default_factory=dict[int, int])
    at_ms: int = 0
    heard: dict[int, int] = field(default_factory=dict[int, int])
    due_ms: int | None = None
    passed_over: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    shed: tuple[tuple[int, int, int, int], ...] = ()

    def to_json(self) -> str:
        """As the ledger keeps it."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | None) -> Stored:
        """What the ledger kept; None: nothing yet."""
        if text is None:
            return cls()
        said = json.loads(text)
        for member in ("offsets", "heard", "passed_over"):
            said[member] = {int(partition): of for partition, of in said.get(member, {}).items()}
        said["shed"] = tuple(tuple(span) for span in said.get("shed", ()))
        return cls(**said)


def in_force(ledger: Ledger) -> Stored:
    """The snapshot in force, for who only looks."""
    return Stored.from_json(ledger.get_value(VALUE))


class Snapshots:
    """The snapshots of one run. Not for several threads at once.

    Args:
        ledger: Keeps which one is in force.
        tiles: Keeps their bytes.
        epoch: Of the run.
    """

    def __init__(self, ledger: Ledger, tiles: TileStore, epoch: int) -> None:
        self._ledger, self._tiles, self._epoch = ledger, tiles, epoch
        self._text: str | None = None
        self.stored = Stored()

    def claim(self) -> Stored:
        """Put this run's epoch to the snapshot in force: nobody of a lower one replaces it from here on.

        Raises:
            Replaced: Its epoch is higher already.
        """
        while True:
            text = self._ledger.get_value(VALUE)
            found = Stored.from_json(text)
            if found.epoch > self._epoch:
                raise Replaced(f"epoch {self._epoch} was replaced by {found.epoch}")
            claimed = replace(found, epoch=self._epoch, number=found.number + 1)
            if self._ledger.set_value(VALUE, claimed.to_json(), expect=text):
                self._text, self.stored = claimed.to_json(), claimed
                return claimed

    def load(self) -> bytes | None:
        """The bytes of the snapshot in force; None where there is none yet, or its object is gone."""
        return self._tiles.get(self.stored.name) if self.stored.name else None

    def store(self, data: bytes, what: Stored) -> None:
        """Store a snapshot and put it in force; it is durable when this returns.

        Args:
            data: Its bytes.
            what: What it is of; epoch, number, name and time are set here.

        Raises:
            Replaced: A run of a higher epoch has taken over.
            LedgerUnavailable, TileStoreError: The one before may still be in force.
        """
        number = self.stored.number + 1
        name = f"{FOLDER}{self._epoch}-{number}-{secrets.token_hex(4)}"
        self._tiles.put(name, data)
        # Of the same topic, what is to be read again is shed again.
        shed = self.stored.shed if what.topic == self.stored.topic else ()
        made = replace(
            what, epoch=self._epoch, number=number, name=name, at_ms=time.time_ns() // 1_000_000,
            shed=tuple(span for span in shed if span[2] > what.offsets.get(span[0], 0)),
        )  # fmt: skip
        try:
            self._put(made)
        except Replaced:
            self._delete(name)
            raise
        before, self.stored = self.stored, made
        if before.name:
            self._delete(before.name)

    def pass_over(self, offsets: Mapping[int, list[int]]) -> None:
        """Have records passed over by whoever goes on from the snapshot in force; durable when this returns.

        Args:
            offsets: Partition -> all offsets, those of before among them.

        Raises:
            Replaced: A run of a higher epoch has taken over.
            LedgerUnavailable: It may be said or not.
        """
        made = replace(self.stored, number=self.stored.number + 1, passed_over=dict(offsets))
        self._put(made)
        self.stored = made

    def shed(self, spans: Sequence[tuple[int, int, int, int]]) -> None:
        """Have records of more spans passed over by whoever goes on from the snapshot in force; durable on return.

        Args:
            spans: As `Stored.shed`.

        Raises:
            Replaced: A run of a higher epoch has taken over.
            LedgerUnavailable: It may be said or not.
        """
        made = replace(self.stored, number=self.stored.number + 1, shed=(*self.stored.shed, *spans))
        self._put(made)
        self.stored = made

    def _put(self, made: Stored) -> None:
        while not self._ledger.set_value(VALUE, made.to_json(), expect=self._text):
            # Where the ledger fell silent after it had taken a value of ours, that one stands there now.
            text = self._ledger.get_value(VALUE)
            found = Stored.from_json(text)
            if found.epoch != self._epoch:
                raise Replaced(f"epoch {self._epoch} was replaced by {found.epoch}")
            self._text = text
            if found.name == made.name and found.number == made.number:
                break
        self._text = made.to_json()

    def sweep(self) -> int:
        """Delete what runs before this one left and is not in force; how many. A later run's are its own."""
        old = [
            stored.name
            for stored in self._tiles.list(FOLDER)
            if stored.name != self.stored.name
            and (epoch := stored.name.removeprefix(FOLDER).partition("-")[0]).isdecimal()
            and int(epoch) < self._epoch
        ]
        return self._tiles.delete(old) if old else 0

    def _delete(self, name: str) -> None:
        try:
            self._tiles.delete([name])
        except Exception as fault:
            log.warning("a snapshot stays behind", name=name, error=str(fault))
