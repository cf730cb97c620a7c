"""Holding the routing run's breaker: an operator writes where to the ledger, and whichever run routes obeys."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from geo_assets.flow.breaker import Held
    from resources.ledger.protocol import Ledger

VALUE = "geofence.breaker"
"""The ledger's named value: `open` or `closed`; none while it goes by itself."""


def held(ledger: Ledger) -> Held | None:
    """Where it is to be held; None: nowhere."""
    found = ledger.get_value(VALUE)
    return cast("Held", found) if found in ("open", "closed") else None


def hold(ledger: Ledger, where: Held | None) -> None:
    """Hold it there from now on, in this run and those that follow; None lets it go."""
    ledger.set_value(VALUE, where)
