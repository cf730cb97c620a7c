"""The job that deletes what is past its time: from Dagster's own storages, and from log, stores and ledger."""

from dagster import (
    Config,
    DefaultScheduleStatus,
    MetadataValue,
    OpExecutionContext,
    Output,
    ScheduleDefinition,
    in_process_executor,
    job,
    op,
)
from dagster._core.storage.tags import PRIORITY_TAG
from pydantic import Field

from geo_assets import catalog
from geo_assets.assets.stack_resource import StackResource
from geo_assets.catalog_retention import Keep, enforce
from geo_assets.services.housekeeping import enforce_retention
from geo_assets.settings import Settings

BUDGET_S = 5_400.0
"""Longest that one pass goes on: Dagster ends runs after two hours. The next one goes on from there."""


class MaintenanceConfig(Config):
    """What a pass may do; one started by hand needs none of it."""

    dry_run: bool = Field(default=False, description="Count what is past its time, and delete nothing.")
    budget_s: float = Field(default=BUDGET_S, gt=0, description="Seconds after which it ends; the next one goes on.")


@op(description="Deletes what is past its time, a little at a time, beside everything that runs.")
def delete_what_is_past(context: OpExecutionContext, config: MaintenanceConfig, stack: StackResource) -> Output[int]:
    """Delete; how many rows, objects and records."""
    with stack.opened() as ports:
        keep = Keep.of(ports.settings)
        removed = enforce(context.instance, keep, dry=config.dry_run, budget_s=config.budget_s)
        if not config.dry_run:
            removed |= enforce_retention(ports)
            catalog.count_partitions(context.instance)
    rows = [f"| {name} | {count:,} |" for name, count in removed.items() if count]
    for row in rows:
        context.log.info(row.strip("| "))
    table = "\n".join(["| what | how many |", "| --- | ---: |", *rows])
    return Output(
        sum(count for name, count in removed.items() if name != "bytes given back"),
        metadata={"removed": MetadataValue.md(table), "dry_run": config.dry_run},
    )


@job(
    name="maintenance",
    executor_def=in_process_executor,
    # Everything else passes it in Dagster's queue.
    tags={PRIORITY_TAG: "-30"},
    description=(
        "Deletes what is past its time: superseded materializations, what old runs logged, old check results, runs and "
        "ticks; records, objects, tombstones and manifests. Never the newest entry of a partition or a check."
    ),
)
def maintenance() -> None:
    """One step: delete."""
    delete_what_is_past()


def _cron() -> tuple[str, DefaultScheduleStatus]:
    cron = Settings().maintenance_cron
    return ("23 3 * * *", DefaultScheduleStatus.STOPPED) if cron == "off" else (cron, DefaultScheduleStatus.RUNNING)


nightly_maintenance = ScheduleDefinition(
    name="nightly_maintenance",
    job=maintenance,
    cron_schedule=_cron()[0],
    default_status=_cron()[1],
    description="When GEO_ASSETS_MAINTENANCE_CRON says: at night, when the fewest wait.",
)
