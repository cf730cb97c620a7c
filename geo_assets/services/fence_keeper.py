"""Keeps the standing set of fences current while nobody routes: a map shows a fence before the first position comes.

A routing run folds as well, more often; whoever is first wins, and the other finds nothing to do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from geo_assets.services.fences import FOLDER, FenceBook
from geo_assets.services.geofence_snapshots import in_force

if TYPE_CHECKING:
    from geo_assets.stack import Stack

log = structlog.get_logger()

LOOK_S = 0.5
"""Between two looks at `[fences]`: two queries, and a drawn fence shows within two seconds."""

GRACE_MS = 600_000
"""How long a set that was replaced is kept while no run routes: whoever reads it has read it by then."""


class FenceKeeper(threading.Thread):
    """Folds what is new in `[fences]` in a thread of its own.

    Args:
        open_stack: Ports of its own.
    """

    def __init__(self, open_stack: Callable[[], Stack]) -> None:
        super().__init__(daemon=True, name="fence-keeper")
        self._open = open_stack
        self._stop_asked = threading.Event()

    def stop(self) -> None:
        """Ask it to end and wait for the fold under way."""
        self._stop_asked.set()
        self.join(timeout=10)

    def run(self) -> None:
        """Fold until asked to stop; a port that is away is waited for."""
        with self._open() as stack:
            book = FenceBook(stack)
            known, failing = "", False
            while not self._stop_asked.wait(5.0 if failing else LOOK_S):
                try:
                    standing = book.fold()
                    if standing.name != known:
                        known = standing.name
                        clean_up(stack, standing.revision)
                    failing = False
                except Exception as fault:
                    if not failing:
                        log.warning("fences wait", error=f"{type(fault).__name__}: {fault}")
                    failing = True


def clean_up(stack: Stack, revision: int, now_ms: int | None = None) -> int:
    """Delete sets below a revision that nobody can need: no snapshot is in force, and they are old; how many.

    While there is a snapshot, routing runs delete what is below it.
    """
    if in_force(stack.ledger).name:
        return 0
    now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    old = [
        stored.name
        for stored in stack.tiles.list(FOLDER)
        if (number := stored.name.removeprefix(FOLDER).partition("-")[0]).isdecimal()
        and int(number) < revision
        and stored.modified_ms < now_ms - GRACE_MS
    ]
    return stack.tiles.delete(old) if old else 0
