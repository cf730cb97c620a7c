"""Skip rate: backfills over what did not change skip it; a sudden fall to zero means that the work key moved."""

from dagster import AssetCheckSeverity

from geo_assets.checks.audit import Audit, check_of
from geo_assets.services import throughput
from geo_assets.stack import Stack
from geo_assets.tiles import rules


def audit(stack: Stack) -> Audit:
    """Judge the newest backfill run against those before it that had the same recipe."""
    runs = throughput.skips(stack.ledger)
    # A changed recipe builds everything once, and that is what it is for.
    alike = [one for one in runs if one.recipe == runs[-1].recipe]
    verdict = rules.skip_rate([(one.skipped, one.targets) for one in alike])
    return Audit(
        looked_at=len(alike),
        faults=verdict.faults,
        summary=verdict.summary,
        passed=verdict.passed,
        numbers={"skip_rate": round(verdict.value, 4), "runs": len(alike)},
        # Every feature may really have changed: worth a look, not a call at night.
        severity=AssetCheckSeverity.WARN,
    )


skip_rate = check_of(
    "skip_rate",
    "The newest backfill run skipped something, where those before it, of the same recipe, skipped a fifth or more.",
    audit,
)
