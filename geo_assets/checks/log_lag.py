"""Lag: no reader of the log is so far behind that retention could take what it has not read."""

import time

from geo_assets.catalog import FEATURES
from geo_assets.checks.audit import Audit, check_of
from geo_assets.services import currency
from geo_assets.stack import Stack
from geo_assets.tiles import rules


def audit(stack: Stack) -> Audit:
    """Compare the age of the oldest record that each reader has not worked off with the log's retention."""
    now_ms = time.time_ns() // 1_000_000
    readers = currency.readers(stack)
    verdicts = [
        rules.freshness(one.oldest_ms, now_ms, stack.settings.retention_s * 1000, subject=one.topic) for one in readers
    ]
    failing = [verdict for verdict in verdicts if not verdict.passed]
    numbers: dict[str, float] = {}
    for one in readers:
        numbers |= {f"records_{one.topic}": one.records, f"age_s_{one.topic}": round(one.age_s(now_ms), 1)}
    return Audit(
        looked_at=sum(one.records for one in readers),
        faults=[fault for verdict in failing for fault in verdict.faults],
        summary="; ".join(verdict.summary for verdict in failing or verdicts),
        passed=not failing,
        numbers=numbers,
    )


log_lag = check_of(
    "log_lag",
    "The oldest record that ingest, the sensor and the routing run have not worked off is younger than 70 % of the "
    "log's retention.",
    audit,
    asset=FEATURES,
)
