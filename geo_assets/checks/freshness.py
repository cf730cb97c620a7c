"""Freshness: nothing dirty waits so long that the log could forget what it waits for."""

import time

from geo_assets.checks.audit import Audit, check_of
from geo_assets.stack import Stack
from geo_assets.tiles import rules


def audit(stack: Stack) -> Audit:
    """Compare the age of the longest-waiting tile with the log's retention."""
    counts = stack.ledger.counts()
    now_ms = time.time_ns() // 1_000_000
    verdict = rules.freshness(counts.oldest_dirty_ms, now_ms, stack.settings.retention_s * 1000)
    numbers = {
        "lag_s": round(verdict.value / 1000, 1),
        "limit_s": round(verdict.limit / 1000, 1),
        "dirty_live": counts.dirty_live,
        "dirty_backfill": counts.dirty_backfill,
        "given_up": counts.given_up,
    }
    looked_at = counts.dirty_live + counts.dirty_backfill
    return Audit(looked_at, verdict.faults, verdict.summary, passed=verdict.passed, numbers=numbers)


freshness = check_of(
    "freshness",
    "The tile that waits longest has waited less than 70 % of the log's retention.",
    audit,
)
