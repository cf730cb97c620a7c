"""Records that retention took before they were read: stop, or count them and go on (setting `offset_out_of_range`)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from resources.event_log.protocol import LogError, OffsetOutOfRange

if TYPE_CHECKING:
    from geo_assets.settings import Settings
    from resources.ledger.protocol import Ledger

SETTING = "GEO_ASSETS_OFFSET_OUT_OF_RANGE"

LOSSES_VALUE = "log.losses"
"""The ledger's named value: what was lost of each topic."""

_TRIES = 5
"""Writers that may be faster, one after the other; each wrote a loss of its own meanwhile."""


class RecordsLost(LogError):
    """Retention took records before they were read, and the setting says to stop then."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What was lost of a topic: how much in all, and the last time."""

    records: int
    times: int
    at_ms: int
    partition: int
    position: int
    oldest: int
    newest: int


def records_in(gone: OffsetOutOfRange) -> int:
    """How many records were lost; 0 where the position is beyond the end, as after a restored or truncated log."""
    return max(0, gone.begin - gone.offset)


def stop_if_told(settings: Settings, gone: OffsetOutOfRange, reader: str, then: str) -> None:
    """End the reader, unless the setting says to go on.

    Args:
        settings: With `offset_out_of_range`.
        gone: What the log said.
        reader: Who reads, for the message.
        then: What going on means.

    Raises:
        RecordsLost: `offset_out_of_range` is `stop`.
    """
    if settings.offset_out_of_range != "stop":
        return
    where = f"{gone.topic}/{gone.partition}"
    lost = records_in(gone)
    what = (
        f"{lost:,} records of {where} were deleted before they were read"
        if lost
        else f"the position in {where} is beyond its end"
    )
    raise RecordsLost(
        f"{reader} stops: {what} (position {gone.offset}, oldest {gone.begin}, newest {gone.end}). Look into it, then "
        f"set {SETTING}=reset to go on at the oldest: {then}"
    )


def remember_loss(ledger: Ledger, gone: OffsetOutOfRange, now_ms: int) -> None:
    """Keep it where status shows it. Called before the position moves: a crash in between does not count it twice."""
    for _ in range(_TRIES):
        text = ledger.get_value(LOSSES_VALUE)
        losses = _read(text)
        before = losses.get(gone.topic)
        if before is not None and (before.partition, before.position, before.oldest) == (
            gone.partition,
            gone.offset,
            gone.begin,
        ):
            return
        losses[gone.topic] = Loss(
            records=records_in(gone) + (before.records if before else 0),
            times=1 + (before.times if before else 0),
            at_ms=now_ms,
            partition=gone.partition,
            position=gone.offset,
            oldest=gone.begin,
            newest=gone.end,
        )
        written = json.dumps({topic: asdict(loss) for topic, loss in sorted(losses.items())})
        if ledger.set_value(LOSSES_VALUE, written, expect=text):
            return


def losses_of(ledger: Ledger) -> dict[str, Loss]:
    """What was lost, by topic."""
    return _read(ledger.get_value(LOSSES_VALUE))


def _read(text: str | None) -> dict[str, Loss]:
    try:
        return {topic: Loss(**loss) for topic, loss in json.loads(text or "{}").items()}
    except (AttributeError, TypeError, ValueError):
        return {}
