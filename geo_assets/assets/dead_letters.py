"""The asset `dead_letters`: how many records could not be processed, over time; and the job that sends them again.

The asset is observed, never built. Numbers, reasons and sources only: payloads stay in the log, and
`geo-assets dead-letters show` prints one.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from dagster import (
    AssetObservation,
    AssetSpec,
    Config,
    DagsterInstance,
    Failure,
    MetadataValue,
    ObserveResult,
    OpExecutionContext,
    Output,
    TableColumn,
    TableRecord,
    TableSchema,
    in_process_executor,
    job,
    multi_observable_source_asset,
    op,
)
from pydantic import Field

from geo_assets import catalog
from geo_assets.assets.stack_resource import StackResource
from geo_assets.catalog import DEAD_LETTERS
from geo_assets.events.dead_letter import REASONS, STAGES
from geo_assets.links import job_url
from geo_assets.services.dead_letter_counts import HOUR_MS, Counts, advance, by_reason
from geo_assets.services.dead_letters import now_ms
from geo_assets.services.replaying import ChoiceError, Chosen, homes, moment_of, select, send
from geo_assets.services.status import moment
from geo_assets.stack import Stack

DAY_MS = 24 * HOUR_MS

SHOWN = 50
"""Rows of a table."""

OBSERVE_EVERY_MS = HOUR_MS
"""How often it is observed although nothing came: so that the UI's plots have points, and not a thousand a day."""

_LAST_OBSERVED = "catalog.dead-letters"
"""Ledger value: when the sensor last observed, and the counts that it saw."""


def observation_metadata(counts: Counts, now: int, dagster_url: str) -> dict[str, Any]:
    """What an observation shows: numbers that the UI plots, tables of the last day, and what to do.

    Args:
        counts: Up to date.
        now: Milliseconds since the epoch, UTC.
        dagster_url: Where browsers find the UI, without a slash at the end.
    """
    day = counts.since(now - DAY_MS)
    hour = counts.since(now - HOUR_MS)
    metadata: dict[str, Any] = {
        "dead_letters": counts.total,
        "last_day": sum(day.values()),
        "per_hour": round(sum(day.values()) / 24, 2),
        "last_hour": sum(hour.values()),
        "replayed": counts.replayed,
        "by_reason_and_source": _table(day),
        "by_hour": _hours(counts),
        "what_to_do": MetadataValue.md(_advice(day, dagster_url)),
    }
    # One number a reason, so that each has a plot of its own.
    for reason, number in counts.reasons.items():
        metadata[f"ever_{reason}"] = number
    return metadata


def _table(pairs: Mapping[tuple[str, str], int]) -> MetadataValue:
    columns = [TableColumn("reason", "string"), TableColumn("source", "string"), TableColumn("dead_letters", "int")]
    rows = sorted(pairs.items(), key=lambda each: (-each[1], each[0]))[:SHOWN]
    return MetadataValue.table(
        [TableRecord({"reason": reason, "source": source, "dead_letters": n}) for (reason, source), n in rows],
        TableSchema(columns),
    )


def _hours(counts: Counts) -> MetadataValue:
    columns = [TableColumn("hour", "string"), TableColumn("dead_letters", "int"), TableColumn("reasons", "string")]
    rows: list[TableRecord] = []
    for number, pairs in sorted(counts.hours.items(), reverse=True):
        reasons = by_reason({(pair.partition(" ")[0], pair): n for pair, n in pairs.items()})
        rows.append(
            TableRecord(
                {
                    "hour": (moment(number * HOUR_MS) or "")[:16],
                    "dead_letters": sum(pairs.values()),
                    "reasons": ", ".join(f"{reason} {n}" for reason, n in reasons.items()),
                }
            )
        )
    return MetadataValue.table(rows, TableSchema(columns))


def _advice(day: Mapping[tuple[str, str], int], dagster_url: str) -> str:
    if not day:
        return "Nothing died within a day."
    worst = next(iter(by_reason(day)))
    return (
        f"Most of the last day's: `{worst}`. Look at them: `geo-assets dead-letters list --reason {worst}`, "
        f"and at one: `geo-assets dead-letters show ID`. When their cause is mended, send them again: "
        f"`geo-assets dead-letters replay --reason {worst}`, or "
        f"[the job replay_dead_letters]({job_url(dagster_url, 'replay_dead_letters')})."
    )


@multi_observable_source_asset(
    name="dead_letters",
    specs=[
        AssetSpec(
            DEAD_LETTERS,
            group_name="map",
            kinds={"kafka"},
            owners=["team:map"],
            tags={"domain": "vector"},
            description=(
                "Records that could not be processed, by reason and source: the topic `dead-letters` "
                "(docs/kafka.md). The sensor `dead_letter_counts` observes it when some came, and every hour."
            ),
        )
    ],
)
def dead_letters(stack: StackResource) -> Iterator[ObserveResult]:
    """Count what came, and show it."""
    with stack.opened() as ports:
        now = now_ms()
        counts = advance(ports, now)
        yield ObserveResult(DEAD_LETTERS, metadata=observation_metadata(counts, now, ports.settings.dagster_url))


def observe_if_news(stack: Stack, instance: DagsterInstance, now: int) -> tuple[Counts, bool]:
    """Count, and report an observation when something came, or an hour has passed; the counts and whether."""
    counts = advance(stack, now)
    last = json.loads(stack.ledger.get_value(_LAST_OBSERVED) or "{}")
    seen = [counts.total, counts.replayed]
    if counts.behind or (seen == last.get("seen") and now - last.get("at_ms", 0) < OBSERVE_EVERY_MS):
        return counts, False
    metadata = observation_metadata(counts, now, stack.settings.dagster_url)
    catalog.report_materializations(instance, [AssetObservation(DEAD_LETTERS, metadata=metadata)])
    stack.ledger.set_value(_LAST_OBSERVED, json.dumps({"at_ms": now, "seen": seen}))
    return counts, True


# -- sending them again --------------------------------------------------------------------------------------------


class ReplayConfig(Config):
    """Which dead letters are sent again. Those that were already are left out."""

    reason: str = Field(default="", description=f"All of this reason: {', '.join(REASONS)}.")
    source: str = Field(default="", description="All of this source.")
    stage: str = Field(default="", description=f"All that died at this stage: {', '.join(STAGES)}.")
    since: str = Field(default="", description="All that died since: 2h, 3d, or a time such as 2026-05-01T12:00Z.")
    every: bool = Field(default=False, description="All there are, where nothing above narrows them.")
    limit: int = Field(default=10_000, ge=1, description="Most that are sent; the oldest first.")
    dry_run: bool = Field(default=False, description="Say how many would go where, and send nothing.")


@op(
    name="replay",
    description="Sends dead letters back to the topics they came from. Twice is harmless, and nothing newer is undone.",
)
def replay_op(context: OpExecutionContext, config: ReplayConfig, stack: StackResource) -> Output[int]:
    """Send them; how many went."""
    try:
        since_ms = moment_of(config.since) if config.since else None
        chosen = Chosen(config.reason or None, config.source or None, config.stage or None, since_ms)
    except ChoiceError as fault:
        raise Failure(str(fault), allow_retries=False) from None
    if not (chosen.narrow or config.every):
        raise Failure("name reason, source, stage or since, or say every: true", allow_retries=False)
    with stack.opened() as ports:
        rows = select(ports, chosen)
        taken = rows[: config.limit]
        metadata: dict[str, Any] = {
            "chosen": len(rows),
            "left": len(rows) - len(taken),
            "to": ", ".join(f"{count:,} to {home}" for home, count in homes(taken).items()) or "nowhere",
        }
        if config.dry_run:
            context.log.info(f"dry run: {len(taken):,} would be sent, {metadata['to']}")
            return Output(0, metadata={**metadata, "sent": 0, "dry_run": True})
        done = send(ports, taken, told=lambda looked_at: context.log.info(f"{looked_at:,} of {len(taken):,}"))
    for why in done.unfit[:SHOWN]:
        context.log.warning(why)
    metadata |= {"sent": done.count, "unfit": len(done.unfit), "dry_run": False}
    if done.unfit and not done.count:
        raise Failure(f"none of {len(done.unfit):,} could be sent: {done.unfit[0]}", metadata, allow_retries=False)
    context.log.info(f"sent {done.count:,}; those that die again are counted again")
    return Output(done.count, metadata=metadata)


@job(
    name="replay_dead_letters",
    executor_def=in_process_executor,
    description=(
        "Sends dead letters on their way again, after what killed them was mended: by reason, source, stage or time. "
        "Twice is harmless; triggers go out by the routing run, which the sensor geofence_positions starts for them."
    ),
)
def replay_dead_letters() -> None:
    """One step."""
    replay_op()
