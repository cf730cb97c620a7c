"""Triggers that died on their way and are to be sent again: who asks writes them to the ledger, the routing run sends.

Only the run of the highest epoch may write to `[triggers]`. A wish stands until the log has what it asks for; a run
that is killed in between leaves it to the next, and a trigger that was sent before is known by its key.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resources.ledger.protocol import Ledger

VALUE = "geofence.resend"
"""The ledger's named value: frames, base64 in a JSON array, in the order in which they go."""

MAX_BYTES = 1_000_000
"""Of the value: what waits at once."""


class TooMuchWaits(RuntimeError):
    """More triggers wait to be sent again than the ledger's value is meant to hold."""


def wishes(ledger: Ledger) -> list[bytes]:
    """Frames that are to be sent again."""
    return [base64.b64decode(frame) for frame in json.loads(ledger.get_value(VALUE) or "[]")]


def wish(ledger: Ledger, frames: Sequence[bytes]) -> None:
    """Ask for frames to be sent again, each once.

    Raises:
        TooMuchWaits: None was added.
    """
    _change(ledger, [base64.b64encode(frame).decode() for frame in frames], ())


def fulfilled(ledger: Ledger, frames: Iterable[bytes]) -> None:
    """These were sent."""
    _change(ledger, (), [base64.b64encode(frame).decode() for frame in frames])


def _change(ledger: Ledger, added: Iterable[str], removed: Iterable[str]) -> None:
    gone = set(removed)
    while True:
        text = ledger.get_value(VALUE)
        left = [frame for frame in dict.fromkeys((*json.loads(text or "[]"), *added)) if frame not in gone]
        made = json.dumps(left) if left else None
        if made is not None and len(made) > MAX_BYTES and not gone:
            raise TooMuchWaits(
                f"{len(left):,} triggers of {len(made):,} bytes would wait to be sent again, the limit is "
                f"{MAX_BYTES:,}: have a routing run send some of them first"
            )
        if ledger.set_value(VALUE, made, expect=text):
            return
