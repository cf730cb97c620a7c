"""A burst over the router's capacity, in a process of its own whose memory is measured. Prints a line of JSON a round.

The log is locked by another program for a while: nothing is acknowledged, and callers go on all the same.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import time
from pathlib import Path

import psutil

from geo_assets.flow.bounds import Shed
from geo_assets.geofence.triggers import ENTER, EXIT, Trigger
from geo_assets.services.router import Router, RouterOptions
from resources.event_log.protocol import TopicSpec
from resources.event_log.sqlite import SqliteEventLog

PIECE = 500


def piece(device: str, first: int) -> list[Trigger]:
    return [
        Trigger(device, '"depot"', ENTER if n % 2 else EXIT, 1_777_636_800_000 + n, n, 3, 0, n)
        for n in range(first, first + PIECE)
    ]


def burst(folder: Path, seconds: float, rounds: int) -> None:
    log = SqliteEventLog(folder / "log.db")
    log.ensure_topics([TopicSpec("triggers", partitions=4)])
    router = Router(log, 1, RouterOptions(dedup_keys=200_000, slow_publish_s=5.0), dead_letters=lambda _: None)
    router.start()
    process = psutil.Process()
    pulled = outside = 1
    for number in range(rounds):
        locked = sqlite3.connect(folder / "log.db", isolation_level=None)
        locked.execute("BEGIN IMMEDIATE")
        taken = {"pulled": 0, "outside": 0}
        while router.ready():
            router.route(piece(f"pulled-{number}", pulled))
            pulled, taken["pulled"] = pulled + PIECE, taken["pulled"] + PIECE
            if router.held >= router.options.bounds.capacity:
                break
        refused = pauses = 0
        longest, full = 0.0, 0
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline or refused <= 20:
            began = time.monotonic()
            try:
                router.submit(piece(f"outside-{number}", outside))
            except Shed as shed:
                refused += 1
                said = str(shed)
                full = full or process.memory_info().rss
            else:
                outside, taken["outside"] = outside + PIECE, taken["outside"] + PIECE
            longest = max(longest, time.monotonic() - began)
            pauses += not router.ready()
        rss, held, shed_count = process.memory_info().rss, router.held, router.counts["shed"]
        locked.execute("ROLLBACK")
        locked.close()
        while router.held:
            time.sleep(0.01)
        print(
            json.dumps(
                {
                    **taken, "refused": refused, "pauses": pauses, "said": said, "longest_s": longest, "held": held,
                    "shed": shed_count, "grown": rss - full, "rss": rss, "routed": router.counts["routed"],
                }
            ),
            flush=True,
        )  # fmt: skip
    router.close()
    log.close()


if __name__ == "__main__":
    burst(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
