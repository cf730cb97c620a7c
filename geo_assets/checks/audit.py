"""What every check shares: an audit looks at stored things and says what it found; Dagster shows it as a check.

No rule is decided here, and none in the other modules of this folder: they are in geo_assets/tiles/rules.py.
"""

import heapq
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog
from dagster import (
    AssetCheckResult,
    AssetChecksDefinition,
    AssetCheckSeverity,
    AssetKey,
    MetadataValue,
    TableColumn,
    TableRecord,
    TableSchema,
    asset_check,
)

from geo_assets import catalog
from geo_assets.assets.stack_resource import StackResource
from geo_assets.catalog import TILES
from geo_assets.stack import Stack
from geo_assets.tiles.rules import Fault
from geo_assets.tiles.tile import Tile, TileError
from resources.ledger.protocol import Ledger, TileState

log = structlog.get_logger()

SHOWN = 50
"""Rows of a check's table; the number of faults stands beside it."""


@dataclass(frozen=True, slots=True)
class Audit:
    """What an audit found."""

    looked_at: int
    """Tiles, manifests or records looked at."""
    faults: Sequence[Fault]
    summary: str
    passed: bool
    numbers: dict[str, Any] = field(default_factory=dict)
    """More metadata, by name."""
    severity: AssetCheckSeverity = AssetCheckSeverity.ERROR


AUDITS: dict[str, Callable[[Stack], Audit]] = {}
"""Every audit of this process, by the name of its check: what a test runs without Dagster around it."""


def check_of(
    name: str, description: str, audit: Callable[[Stack], Audit], *, asset: AssetKey = TILES
) -> AssetChecksDefinition:
    """An asset-level check that runs an audit, of `tiles` unless another asset is named.

    Asset level, over an explicit set: Dagster keeps results by partition only in runs of a single partition. An
    unexpected error is a failed check, not a failed run: what cannot be audited has not passed.
    """
    AUDITS[name] = audit

    @asset_check(asset=asset, name=name, description=description)
    def check(stack: StackResource) -> AssetCheckResult:
        try:
            with stack.opened() as ports:
                return result_of(audit(ports), ports.settings.tiles_url)
        except Exception as fault:
            log.exception("audit failed", check=name)
            return AssetCheckResult(
                passed=False,
                severity=AssetCheckSeverity.ERROR,
                description=f"the audit itself failed: {type(fault).__name__}: {fault}",
                metadata={"traceback": MetadataValue.md(f"```\n{traceback.format_exc()}\n```")},
            )

    return check


def result_of(audit: Audit, tiles_url: str) -> AssetCheckResult:
    """The check's result: one line, the numbers, and a table of what fails."""
    metadata: dict[str, Any] = {"looked_at": audit.looked_at, "faults": len(audit.faults), **audit.numbers}
    if audit.faults:
        columns = ["subject", "rule", "problem", "value", "limit", "map"]
        schema = TableSchema([TableColumn(column, "string") for column in columns])
        records = [TableRecord(row_of(fault, tiles_url)) for fault in audit.faults[:SHOWN]]
        metadata["failing"] = MetadataValue.table(records, schema)
    return AssetCheckResult(passed=audit.passed, severity=audit.severity, description=audit.summary, metadata=metadata)


def row_of(fault: Fault, tiles_url: str) -> dict[str, str]:
    """A fault as a row of the table; one about a tile links to the map."""
    subject = str(fault.subject)
    try:
        tile = Tile.from_path(subject) if "/" in subject else Tile.from_key(subject)
        link = catalog.map_url(tiles_url, tile)
    except TileError:
        link = ""
    return {
        "subject": subject,
        "rule": fault.rule,
        "problem": fault.problem,
        "value": "" if fault.value is None else str(fault.value),
        "limit": "" if fault.limit is None else str(fault.limit),
        "map": link,
    }


def sample(ledger: Ledger, name: str, size: int) -> list[TileState]:
    """Published tiles for an audit that cannot look at all of them each time.

    One half are those built last, where a fault is likeliest; the other half goes on in key order from where the audit
    of this name stopped, so that after enough audits every tile had its turn. One pass over the ledger, memory bounded
    by the size.

    Args:
        ledger: The ledger; it also keeps where the audit stopped.
        name: Name of the audit.
        size: Most tiles.
    """
    cursor_name = f"audit.{name}"
    cursor = ledger.get_value(cursor_name) or ""
    newest: list[tuple[int, str, TileState]] = []
    first: list[TileState] = []
    after: list[TileState] = []
    total = 0
    for state in ledger.scan():
        total += 1
        if len(first) < size:
            first.append(state)
        if state.key > cursor and len(after) < size:
            after.append(state)
        entry = (state.built_at_ms, state.key, state)
        if len(newest) < size // 2:
            heapq.heappush(newest, entry)
        elif newest and entry[:2] > newest[0][:2]:
            heapq.heapreplace(newest, entry)
    if total <= size:
        return first
    chosen = {state.key: state for _, _, state in newest}
    turn = ""
    # From the start again when the end is reached.
    for state in [*after, *first]:
        if len(chosen) >= size:
            break
        chosen[state.key] = state
        turn = state.key
    ledger.set_value(cursor_name, turn)
    return [chosen[key] for key in sorted(chosen)]
