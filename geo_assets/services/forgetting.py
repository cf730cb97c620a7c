"""Forgetting devices: who asks writes the wish to the ledger, and the routing run, which has the state, fulfils it.

A wish stands until a snapshot without the device is in force: a run that is killed in between leaves it to the next.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resources.ledger.protocol import Ledger

VALUE = "geofence.forget"
"""The ledger's named value: device ids, JSON."""


def wishes(ledger: Ledger) -> tuple[str, ...]:
    """Devices that are to be forgotten."""
    return tuple(json.loads(ledger.get_value(VALUE) or "[]"))


def wish(ledger: Ledger, device: str) -> None:
    """Ask for a device to be forgotten."""
    _change(ledger, added=(device,), removed=())


def fulfilled(ledger: Ledger, devices: Iterable[str]) -> None:
    """These are forgotten, and their ids go from the ledger too."""
    _change(ledger, added=(), removed=devices)


def _change(ledger: Ledger, added: Iterable[str], removed: Iterable[str]) -> None:
    while True:
        text = ledger.get_value(VALUE)
        left = sorted((set(json.loads(text or "[]")) | set(added)) - set(removed))
        if ledger.set_value(VALUE, json.dumps(left) if left else None, expect=text):
            return
