"""Pins: who reads objects that the ledger named a while ago, so that garbage collection leaves those alone meanwhile.

A pin says since when. Whatever was current at that moment or later stays while it holds; it is renewed, and one whose
owner died runs out. All pins are one value of the ledger.

Why nothing pinned is lost: garbage collection reads what is current, then the pins, then deletes. A pin that it does
not see yet was set after that, and its owner reads the ledger later still: what had been superseded before is not in
what it reads.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from resources.ledger.protocol import Ledger

VALUE = "pins"
"""The ledger's named value: id of a pin -> what it says."""

CLOCKS_MS = 60_000
"""What the clocks of two machines may differ by: a pin reaches so far back, and runs out so much later."""

PIN_S = 300.0
"""How long a pin holds without its owner: an owner renews it far more often, even while it waits for a slow store."""


class PinLost(Exception):
    """A pin ran out before it was renewed: what it held may be gone."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A pin as the ledger keeps it; times in milliseconds since the epoch, UTC."""

    id: str
    what: str
    """For people: who reads what."""
    since_ms: int
    until_ms: int


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def live_pins(ledger: Ledger, now_ms: int | None = None) -> list[Pin]:
    """Pins that have not run out."""
    now = _now_ms() if now_ms is None else now_ms
    return [pin for pin in _read(ledger.get_value(VALUE)) if pin.until_ms + CLOCKS_MS > now]


def pinned_since(ledger: Ledger, now_ms: int | None = None) -> int | None:
    """From when on everything that was current is pinned, milliseconds since the epoch, UTC; None: nothing is."""
    return min((pin.since_ms - CLOCKS_MS for pin in live_pins(ledger, now_ms)), default=None)


def expired_pins(ledger: Ledger, now_ms: int | None = None) -> list[Pin]:
    """Pins that have run out and that nobody let go of."""
    now = _now_ms() if now_ms is None else now_ms
    return [pin for pin in _read(ledger.get_value(VALUE)) if pin.until_ms + CLOCKS_MS <= now]


def forget_expired(ledger: Ledger, now_ms: int | None = None) -> int:
    """Forget them; how many."""
    expired = {pin.id for pin in expired_pins(ledger, now_ms)}
    _change(ledger, lambda pins: [pin for pin in pins if pin.id not in expired])
    return len(expired)


def set_pin(ledger: Ledger, what: str, *, ttl_s: float = PIN_S) -> Pin:
    """Pin everything that is current from now on. Read the ledger after this, not before."""
    now = _now_ms()
    pin = Pin(uuid.uuid4().hex[:12], what, now, now + int(ttl_s * 1000))
    _change(ledger, lambda pins: [*pins, pin])
    return pin


def renew_pin(ledger: Ledger, pin: Pin, *, ttl_s: float = PIN_S) -> None:
    """Hold it for longer.

    Raises:
        PinLost: It had run out already.
    """
    now = _now_ms()

    def renewed(pins: list[Pin]) -> list[Pin]:
        found = [one for one in pins if one.id == pin.id and one.until_ms > now]
        if not found:
            raise PinLost(f"the pin {pin.id} of {pin.what} ran out: what it read may have been collected; start again")
        return [
            Pin(one.id, one.what, one.since_ms, now + int(ttl_s * 1000)) if one.id == pin.id else one for one in pins
        ]

    _change(ledger, renewed)


def drop_pin(ledger: Ledger, pin: Pin) -> None:
    """Let go of it, and of those that have run out."""
    _change(ledger, lambda pins: [one for one in pins if one.id != pin.id])


def _change(ledger: Ledger, change: Callable[[list[Pin]], list[Pin]]) -> None:
    while True:
        text = ledger.get_value(VALUE)
        now = _now_ms()
        pins = [pin for pin in change(_read(text)) if pin.until_ms + CLOCKS_MS > now]
        wanted = _written(pins) if pins else None
        if wanted == text or ledger.set_value(VALUE, wanted, expect=text):
            return


def _read(text: str | None) -> list[Pin]:
    said = json.loads(text) if text else {}
    return [Pin(name, str(one["what"]), int(one["since_ms"]), int(one["until_ms"])) for name, one in said.items()]


def _written(pins: list[Pin]) -> str:
    return json.dumps(
        {pin.id: {"what": pin.what, "since_ms": pin.since_ms, "until_ms": pin.until_ms} for pin in pins},
        sort_keys=True,
    )
