"""The job that looks at the whole map again: after hints were lost, and whenever somebody doubts the map.

It plans and marks; the sensor does the rest, and what did not change is skipped.
"""

import json
import uuid
from collections.abc import Iterator
from itertools import islice

from dagster import Config, MetadataValue, OpExecutionContext, Output, in_process_executor, job, op
from pydantic import Field

from geo_assets.assets.stack_resource import StackResource
from geo_assets.services.touched import FEATURES_AT_ONCE, touched
from geo_assets.stack import Stack

REPAIR_VALUE = "repair.requested"
"""Ledger value: name of the repair that is wanted; gone when it is planned."""

REPAIR_TAG = "geo_assets/repair"
"""Names the repair of a run: the sensor finds a repair's runs by it."""

KEYS_AT_ONCE = 50_000
"""Tiles of one write to the manifest: half a second of holding the ledger's write lock."""


class RepairConfig(Config):
    """Which repair; one started by hand needs none of it."""

    name: str | None = Field(default=None, description="Name of the repair that the sensor asked for.")


def tiles_that_should_be(stack: Stack) -> tuple[set[str], int]:
    """Every tile that is published or that a stored feature touches.

    Returns:
        Partition keys, and how many features touch more tiles than `manifest_cap`: of those only the lower zooms are
        among the keys, and the others where they are published.
    """
    keys = {state.key for state in stack.ledger.scan()}
    too_wide = 0
    features = ((feature, (feature.min_zoom, feature.max_zoom)) for feature in stack.features.scan())
    while piece := list(islice(features, FEATURES_AT_ONCE)):
        found = touched(stack, piece)
        keys.update(found.keys)
        too_wide += found.too_wide
    return keys, too_wide


def _pieces(keys: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(keys), KEYS_AT_ONCE):
        yield keys[start : start + KEYS_AT_ONCE]


@op(description="Writes and marks a manifest of every tile that is published or that a feature touches.")
def plan_repair(context: OpExecutionContext, config: RepairConfig, stack: StackResource) -> Output[int]:
    """Plan the repair; how many tiles it looks at."""
    with stack.opened() as ports:
        name = config.name or f"repair-{uuid.uuid4().hex[:12]}"
        keys, too_wide = tiles_that_should_be(ports)
        parameters = json.dumps({"run": context.run_id})
        for piece in _pieces(sorted(keys)):
            ports.ledger.write_manifest(name, "repair: the whole map", "repair", piece, parameters=parameters)
        if keys:
            ports.ledger.mark_manifest(name)
        # Only now, and only if no newer repair was asked for meanwhile.
        ports.ledger.set_value(REPAIR_VALUE, None, expect=name)
    if too_wide:
        context.log.warning(f"{too_wide:,} features are too wide to cover at every zoom: see geo-assets backfill")
    return Output(len(keys), metadata={"tiles": len(keys), "manifest": MetadataValue.text(name)})


@job(
    name="repair_coverage",
    executor_def=in_process_executor,
    description="Looks at the whole map again: every published tile, and every tile that a stored feature touches.",
)
def repair_coverage() -> None:
    """One step: plan and mark."""
    plan_repair()
