"""When an edit passed each stage, from the edge to the change stream: its stamps, how they travel, their histograms.

Stamps travel in the header `stages` of records of `[raw]` and `[tiles]`, in the details of a commit and as `stages` of
an announcement: always one JSON object, stage -> microseconds since the epoch, UTC. They are for watching alone: no
key, no order and no byte of a tile hangs on them, and what cannot be read counts as not stamped.

Loads without a geometry library and without dagster.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from prometheus_client import CollectorRegistry, Histogram

from geo_assets.events import topics

if TYPE_CHECKING:
    from resources.event_log.protocol import Record

Stage = Literal["received", "acknowledged", "stored", "hinted", "taken", "built", "committed", "announced", "sent"]

STAGES: tuple[Stage, ...] = (
    "received", "acknowledged", "stored", "hinted", "taken", "built", "committed", "announced", "sent",
)  # fmt: skip
"""In the order in which an edit passes them; `acknowledged` and `sent` are known to edge and tile server alone."""

DETAIL = "stages"
"""Member of a commit's details that holds them."""

BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Seconds; dense around 40, 60 and 250 ms, the figures that the fast path is held against."""

_LATEST_US = 4_102_444_800_000_000
"""The year 2100: what is later was written by no clock."""

_Moment = Annotated[int, msgspec.Meta(ge=0, le=_LATEST_US)]


class Stamps(msgspec.Struct, frozen=True, omit_defaults=True):
    """When an edit passed the stages, microseconds since the epoch, UTC; 0: not known, or not yet."""

    received: _Moment = 0
    """The edge had read and verified its body."""
    acknowledged: _Moment = 0
    """The log had it, and the sender could be told."""
    stored: _Moment = 0
    """The feature store's transaction was durable."""
    hinted: _Moment = 0
    """The hint for the tile was handed to `[tiles]`."""
    taken: _Moment = 0
    """A builder took the tile."""
    built: _Moment = 0
    """Its bytes were made and stored."""
    committed: _Moment = 0
    """The ledger named the new revision."""
    announced: _Moment = 0
    """The announcement was handed to `[tile-updated]`."""
    sent: _Moment = 0
    """The tile server put the change into its streams."""

    def at(self, stage: Stage, moment_us: int | None = None) -> Stamps:
        """These, with one more stage passed: now, or at the moment given."""
        return msgspec.structs.replace(self, **{stage: now_us() if moment_us is None else moment_us})

    def to_json(self) -> str:
        """As a header holds them; `{}` where nothing is known."""
        return _encode(self).decode()

    def to_members(self) -> dict[str, int]:
        """As a member of a JSON object; empty where nothing is known."""
        return msgspec.to_builtins(self)

    def seconds(self, stage: Stage) -> float | None:
        """How long the stage took: since the one before it that is known. None where there is none.

        Clocks of two machines differ: what would be below 0 is 0.
        """
        moment = getattr(self, stage)
        before = max(msgspec.structs.astuple(self)[: STAGES.index(stage)], default=0)
        return None if not moment or not before else max(0.0, (moment - before) / 1_000_000)

    def age(self, stage: Stage) -> float | None:
        """Seconds from `received` to the stage; None where one of them is not known."""
        moment = getattr(self, stage)
        return None if not moment or not self.received else max(0.0, (moment - self.received) / 1_000_000)


NONE = Stamps()
"""Nothing is known."""

_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(Stamps)


def now_us() -> int:
    """Now, microseconds since the epoch, UTC."""
    return time.time_ns() // 1_000


def stamps_in_header(text: str | bytes) -> Stamps:
    """The stamps in the JSON of a header `stages`; `NONE` where it is none."""
    if not text:
        return NONE
    try:
        return _decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return NONE


def stamps_of(record: Record) -> Stamps:
    """The stamps of a record of `[raw]` or `[tiles]`, whoever wrote it.

    One that says nothing was received when its header `received-ms` says, else at the record's own timestamp. What is
    replayed from a dead letter starts anew: how long it lay there is no stage of its way.
    """
    headers = record.headers
    appended_us = max(0, min(record.timestamp_ms * 1_000, _LATEST_US))
    if topics.HEADER_REPLAY in headers:
        return Stamps(received=appended_us)
    said = stamps_in_header(headers.get(topics.HEADER_STAGES, ""))
    if said.received:
        return said
    received = headers.get(topics.HEADER_RECEIVED_MS, "")
    known = received.isascii() and received.isdigit() and len(received) <= 13
    received_us = min(int(received) * 1_000, _LATEST_US) if known else appended_us
    return said.at("received", received_us or appended_us)


def stamps_in(details: str) -> Stamps:
    """The stamps in a commit's details (JSON); `NONE` where there are none."""
    # Most commits of a backfill have none, and reading JSON to find that out would cost more than all the rest.
    if f'"{DETAIL}"' not in details:
        return NONE
    try:
        return msgspec.convert(json.loads(details).get(DETAIL), Stamps)
    except (ValueError, AttributeError, msgspec.ValidationError):
        return NONE


def details_with(stamps: Stamps, details: dict[str, Any]) -> dict[str, Any]:
    """A commit's details that hand the stamps on to its announcement."""
    return {**details, DETAIL: stamps.to_members()} if stamps != NONE else details


def earliest(stamps: Iterable[Stamps]) -> Stamps:
    """Of several edits that one tile answers, the one that waits longest: by `received`, then by `hinted`."""
    known = [one for one in stamps if one.received]
    return min(known, key=lambda one: (one.received, one.hinted), default=NONE)


class StageHistograms:
    """The histograms of one process: how long each stage took, and how old edits were behind it.

    Args:
        registry: The process's own.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._took = Histogram(
            "edit_stage_seconds",
            "How long an edit took for one stage of its way to the map: since the stage before it.",
            ["stage"],
            buckets=BUCKETS,
            registry=registry,
        )
        self._age = Histogram(
            "edit_age_seconds",
            "How long ago an edit was received when it had passed a stage.",
            ["stage"],
            buckets=BUCKETS,
            registry=registry,
        )

    def observe(self, stamps: Iterable[Stamps], *stages: Stage) -> None:
        """Note a batch: for each edit (or tile) the stages named, where they are known."""
        children: list[tuple[Stage, Histogram, Histogram]] = [
            (stage, self._took.labels(stage), self._age.labels(stage)) for stage in stages
        ]
        for one in stamps:
            for stage, took, age in children:
                seconds, old = one.seconds(stage), one.age(stage)
                if seconds is not None:
                    took.observe(seconds)
                if old is not None:
                    age.observe(old)
