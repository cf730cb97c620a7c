"""Reports the fast lane's commits to Dagster's catalog, in batches and without a run: a process beside the lane.

The lane itself never imports Dagster, which takes two seconds and 150 MB. What this process does not come to, the
sensor reports half a minute later.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Sequence

import structlog

from geo_assets import catalog
from geo_assets.dagster_instance import instance_of
from geo_assets.logs import configure
from geo_assets.services.draining import PROCESS
from geo_assets.services.outages import OUTAGES
from geo_assets.settings import Settings
from geo_assets.stack import Stack
from resources.guard.protocol import GuardUnavailable
from resources.ledger.protocol import Owed

log = structlog.get_logger()

LEASE = "catalog-reporter"
EVERY_S = 1.0
"""Between two looks: at 300 tiles a second one batch each."""
ROWS = 2_000
MIN_AGE_MS = 300


def by_lane(rows: Sequence[Owed]) -> list[Owed]:
    """Rows of the lane's commits. A run reports its own, with its name on them."""
    return [row for row in rows if _maker(row) == "lane"]


def _maker(row: Owed) -> str:
    try:
        said = json.loads(row.details)
    except ValueError:
        return ""
    return str(said.get("by", "")) if isinstance(said, dict) else ""


def run(settings: Settings, stop: threading.Event) -> None:
    """Report until asked to stop, while this process holds the lease; the lease only saves work."""
    owner = f"{socket.gethostname()}:{os.getpid()}"
    with instance_of(settings) as instance, Stack(settings) as stack:
        while not stop.wait(EVERY_S):
            try:
                try:
                    if stack.guard.acquire(LEASE, owner, EVERY_S * 5) is None:
                        continue
                except GuardUnavailable as away:
                    log.warning("reporting goes on without its lease", error=str(away))
                while not stop.is_set():
                    reported = catalog.pay_owed(
                        stack.ledger, instance, settings, limit=ROWS, min_age_ms=MIN_AGE_MS, only=by_lane
                    )
                    if reported < ROWS:
                        break
            except OUTAGES as away:
                log.warning("the catalog waits", error=str(away))
            except Exception as fault:
                # Dagster's storage away, locked or full raises whatever its driver raises: the rows stay owed.
                log.warning("the catalog waits", error=str(fault), kind=type(fault).__name__)


def main() -> int:
    """Run it with the settings of the environment, until its parent ends or a signal comes."""
    settings = Settings()
    configure(settings.log_level, settings.log_format)
    PROCESS.on_signals(settings.drain_s)
    run(settings, PROCESS.stop)
    return 0


if __name__ == "__main__":
    sys.exit(main())
