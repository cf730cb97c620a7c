"""The sensor that counts dead letters and shows them in the catalog. A thin shell over the counting service."""

from dagster import DefaultSensorStatus, SensorEvaluationContext, SensorResult, SkipReason, sensor

from geo_assets.assets.dead_letters import DAY_MS, observe_if_news
from geo_assets.assets.stack_resource import StackResource
from geo_assets.services.dead_letters import now_ms
from resources.event_log.protocol import LogUnavailable
from resources.ledger.protocol import LedgerUnavailable


@sensor(
    name="dead_letter_counts",
    # An observation is an event for good, and nobody waits for this one: the check and the alerts are others' work.
    minimum_interval_seconds=60,
    default_status=DefaultSensorStatus.RUNNING,
    description="Counts what came into `[dead-letters]` and observes the asset `dead_letters` when some did.",
)
def dead_letter_counts(context: SensorEvaluationContext, stack: StackResource) -> SensorResult:
    """Evaluate one tick; a port that is away skips it."""
    try:
        with stack.opened() as ports:
            now = now_ms()
            counts, _ = observe_if_news(ports, context.instance, now)
    except (LogUnavailable, LedgerUnavailable) as away:
        return SensorResult(skip_reason=SkipReason(f"{away}; the next tick tries again"))
    said = f"{counts.total:,} dead letters ever, {sum(counts.since(now - DAY_MS).values()):,} within a day"
    return SensorResult(skip_reason=SkipReason(said + ("; counting on" if counts.behind else "")))
