"""Which traces the tiles of a run belong to: read off the newest hints in the log.

Whoever read a hint first, sensor or lane, knew its trace; the run that builds its tile may be neither's. So a run looks
for itself, where traces are on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog

from geo_assets.events import topics
from geo_assets.services.outages import OUTAGES
from geo_assets.services.tracing import TileTraces, tile_traces
from resources.event_log.protocol import LogError

if TYPE_CHECKING:
    from geo_assets.stack import Stack

log = structlog.get_logger()

NEWEST = 2_000
"""Hints of each partition that are looked at, in hundredths of a second; the traces of older ones end at the hint."""


def traces_of_run(stack: Stack, keys: Sequence[str]) -> TileTraces | None:
    """The traces of the hints that these tiles were not built since; None where nobody asked for traces."""
    traces = tile_traces("run")
    if traces is None:
        return None
    try:
        states = stack.ledger.read(keys)
        for topic in topics.TILE_HINTS:
            for partition, extent in stack.log.extents(topic).items():
                start = max(extent.begin, extent.end - NEWEST)
                for record in stack.log.read(topic, partition, start, NEWEST) if extent.end > start else ():
                    state = states.get(record.key or "")
                    if state is not None and record.timestamp_ms >= state.built_at_ms:
                        traces.hinted(state.key, record.headers)
    except (LogError, *OUTAGES) as fault:
        # What is missing is missed by whoever needs it.
        log.debug("hints not looked at for traces", error=str(fault))
    return traces
