"""Silence: a source that is expected to send now and then has not."""

import time

from geo_assets.catalog import FEATURES
from geo_assets.checks.audit import Audit, check_of
from geo_assets.services import currency
from geo_assets.stack import Stack
from geo_assets.tiles.rules import Fault


def audit(stack: Stack) -> Audit:
    """Compare how long each source is silent with what `sources.yaml` expects of it."""
    found = currency.sources(stack, time.time_ns() // 1_000_000)
    expected = [one for one in found if one.expected_s is not None]
    faults = [
        Fault(
            "source_silence", one.name, "nothing new came of it", f"{one.silent_s or 0:,.0f} s", f"{one.expected_s:g} s"
        )
        for one in expected
        if one.silent
    ]
    if faults:
        summary = f"{len(faults)} of {len(expected)} sources are silent for longer than expected"
    elif expected:
        summary = f"{len(expected)} sources sent within what is expected of them"
    else:
        summary = "of no source is it said how often it sends (expect_every_s in sources.yaml)"
    numbers = {f"watermark_ms_{one.name}": one.watermark_ms for one in found[:20]}
    return Audit(len(found), faults, summary, passed=not faults, numbers=numbers)


source_silence = check_of(
    "source_silence",
    "Each source with `expect_every_s` in sources.yaml sent something new within that time.",
    audit,
    asset=FEATURES,
)
