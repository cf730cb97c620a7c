"""More than the router may hold, with nothing acknowledged: pulling pauses, outside callers are shed, memory stays."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from geo_assets_tests.waiting import patient

CAPACITY = 100_000
BYTES = 16_000_000
"""What the allocator may keep for itself; the queue as a whole is 40 MB."""


@pytest.mark.timeout(120)
def test_rule_9_a_burst_over_capacity_pauses_pulling_sheds_outside_callers_and_takes_no_more_memory(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "geo_assets_tests.services.router_burst", str(tmp_path), "0.5", "2"],
        capture_output=True, text=True, timeout=patient(110), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3_000:]
    rounds = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    print(*rounds, sep="\n")
    assert len(rounds) == 2
    for number, one in enumerate(rounds, start=1):
        assert one["pulled"] == 0.7 * CAPACITY
        assert one["outside"] == 0.2 * CAPACITY
        assert one["held"] == 0.9 * CAPACITY
        assert one["pauses"] > one["refused"] > 20
        assert "90,000 wait for their acknowledgement, 500 more would exceed 90,000" in one["said"]
        assert one["longest_s"] < patient(3)
        assert one["grown"] < BYTES
        # Those that were taken, and no others.
        assert one["routed"] == number * 0.9 * CAPACITY
    assert rounds[1]["shed"] == 500 * (rounds[0]["refused"] + rounds[1]["refused"])
    assert rounds[1]["rss"] - rounds[0]["rss"] < BYTES
