"""Geofence triggers: dead letters among positions and triggers, how fast triggers go out, how far routing lags."""

import json
import time

from dagster import AssetCheckSeverity

from geo_assets.catalog import TRIGGERS
from geo_assets.checks.audit import Audit, check_of
from geo_assets.checks.dead_letters import FEW_RECORDS, WINDOW_MS, count_since, letters_since
from geo_assets.events import topics
from geo_assets.services.geofence_snapshots import in_force
from geo_assets.services.router_metrics import END_TO_END
from geo_assets.services.routing import lag_of
from geo_assets.services.routing_result import DELIVERY_MS, VALUE
from geo_assets.stack import Stack
from geo_assets.tiles import rules
from resources.event_log.protocol import OffsetOutOfRange

LAG_SHARE = 0.7
"""Of the log's retention: beyond, positions will be deleted before they are read."""


def audit_dead_letters(stack: Stack) -> Audit:
    """The rate over the last day, of positions that came in."""
    since_ms = time.time_ns() // 1_000_000 - WINDOW_MS
    dead = sum(letter.stage == "route" for letter in letters_since(stack.log, since_ms))
    came = count_since(stack.log, topics.POSITIONS, since_ms)
    verdict = rules.rate(dead, came, stack.settings.dead_letter_rate, subject="positions")
    severity = AssetCheckSeverity.WARN if came < FEW_RECORDS else AssetCheckSeverity.ERROR
    numbers = {"dead_letters": dead, "rate": verdict.value, "limit": verdict.limit}
    return Audit(came, verdict.faults, verdict.summary, passed=verdict.passed, numbers=numbers, severity=severity)


def audit_delivery(stack: Stack) -> Audit:
    """What the newest routing run measured. The limit is a broker's: the embedded log goes at its own pace."""
    text = stack.ledger.get_value(VALUE)
    said = json.loads(text) if text else {}
    routed = int(said.get("routed", 0))
    found = float(said.get("p99_ms", {}).get(END_TO_END, 0.0))
    late = bool(said.get("on_broker")) and routed > 0 and found > DELIVERY_MS
    return Audit(
        looked_at=routed,
        faults=[],
        summary=f"p99 from a trigger's emission to its acknowledgement: at most {found:g} ms of {DELIVERY_MS:g} ms",
        passed=not late,
        numbers={"p99_ms": found, "limit_ms": DELIVERY_MS, "epoch": int(said.get("epoch", 0))},
        severity=AssetCheckSeverity.WARN,
    )


def audit_lag(stack: Stack) -> Audit:
    """The age of the oldest position not routed, against the log's retention."""
    offsets = in_force(stack.ledger).offsets
    now_ms = time.time_ns() // 1_000_000
    oldest = now_ms
    for partition, extent in stack.log.extents(topics.POSITIONS).items():
        offset = max(extent.begin, offsets.get(partition, extent.begin))
        if offset >= extent.end:
            continue
        try:
            records = stack.log.read(topics.POSITIONS, partition, offset, max_records=1)
        except OffsetOutOfRange:
            continue
        if records:
            oldest = min(oldest, records[0].timestamp_ms)
    lag = lag_of(stack, offsets)
    age_s, limit_s = (now_ms - oldest) / 1000, stack.settings.retention_s * LAG_SHARE
    return Audit(
        looked_at=lag,
        faults=[],
        summary=f"{lag:,} positions wait to be routed, the oldest for {age_s:,.0f} s of {limit_s:,.0f} s",
        passed=age_s <= limit_s,
        numbers={"lag": lag, "age_s": age_s, "limit_s": limit_s},
    )


trigger_dead_letter_rate = check_of(
    "trigger_dead_letter_rate",
    "At most 1 % (GEO_ASSETS_DEAD_LETTER_RATE) of the last day's positions became dead letters, as no position or as a "
    "trigger that could not go out. To see them: `geo-assets dead-letters list`.",
    audit_dead_letters,
    asset=TRIGGERS,
)

delivery = check_of(
    "delivery",
    "In the newest routing run 99 of 100 triggers were acknowledged within 40 ms of their emission, on a broker.",
    audit_delivery,
    asset=TRIGGERS,
)

routing_lag = check_of(
    "routing_lag",
    "The oldest position that waits to be routed has waited less than 70 % of the log's retention.",
    audit_lag,
    asset=TRIGGERS,
)
