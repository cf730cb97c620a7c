"""Pay the feature store's outbox: hints to the log, collected tiles and very wide edits to manifests of the ledger.

Rows go only when the log or the ledger has acknowledged them; sending one twice is harmless, a hint carries no order.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import shapely
import structlog

from geo_assets.events import topics
from geo_assets.services import tracing
from geo_assets.services.dirty import wide_areas
from geo_assets.services.edit_stages import NONE, Stamps, stamps_in_header
from geo_assets.tiles.cover import cover
from geo_assets.tiles.keys import coordinates_of
from geo_assets.tiles.tile import HALF_WORLD
from geo_assets.tiles.zooms import to_mercator
from resources.event_log.protocol import NewRecord
from resources.feature_store.protocol import OutboxRow
from resources.guard.protocol import GuardUnavailable, Lease
from resources.ledger.protocol import Manifest, UnknownManifest

if TYPE_CHECKING:
    from geo_assets.services.edit_stages import StageHistograms
    from geo_assets.services.hot_tiles import HotTiles
    from geo_assets.stack import Stack

log = structlog.get_logger()

PAGE = 5_000
QUIET_S = 600.0
"""How long an import stores nothing before it is taken for dead while the guard cannot say: a transaction of 2,500
edits takes seconds, the slowest validation of a chunk minutes."""
IMPORT_LEASE = "import:"
"""A guard lease of this name and the manifest's id says that an import still collects its tiles."""


def send_hints(
    stack: Stack, *, stored_us: int = 0, stages: StageHistograms | None = None, hot: HotTiles | None = None
) -> int:
    """Append every owed hint to `[tiles]`, or of a hot tile to `[tiles-hot]`, then delete its row; how many.

    Args:
        stack: The ports.
        stored_us: When the edits behind them were durable, microseconds since the epoch; 0: not known.
        stages: Where to note how long they waited.
        hot: Which tiles are hot; None where nobody watches.

    Raises:
        LogUnavailable: The rows stay owed.
    """
    sent = 0
    if hot is not None:
        hot.look()
    while rows := stack.features.owed(PAGE, kind="tiles"):
        stamps = [_passed(row, stored_us) for row in rows]
        where = [topics.TILES if hot is None else hot.topic_of(row.key) for row in rows]
        records = [_hint_record(*one) for one in zip(where, rows, stamps, strict=True)]
        if tracing.ACTIVE is None:
            stack.log.append(records)
        else:
            traces = [row.headers.get(topics.HEADER_TRACEPARENT, "") for row in rows]
            with tracing.Sending("send hints", traces, [row.key for row in rows]) as sending:
                stack.log.append(sending.relayed(records))
        if stages is not None:
            stages.observe(stamps, "hinted")
        if hot is not None:
            hot.sent([row.key for row in rows])
        stack.features.pay([row.id for row in rows])
        sent += len(rows)
        if len(rows) < PAGE:
            break
    return sent


def _passed(row: OutboxRow, stored_us: int) -> Stamps:
    """The stages that the edit behind a hint passed up to now; `NONE` where nobody said when it was received."""
    stamps = stamps_in_header(row.headers.get(topics.HEADER_STAGES, ""))
    if stamps == NONE:
        return NONE
    return (stamps.at("stored", stored_us) if stored_us else stamps).at("hinted")


def _hint_record(topic: str, row: OutboxRow, stamps: Stamps) -> NewRecord:
    headers = row.headers if stamps == NONE else {**row.headers, topics.HEADER_STAGES: stamps.to_json()}
    return NewRecord(topic, row.key, row.value, headers)


def finish_manifest(stack: Stack, manifest_id: str, title: str, kind: str, parameters: str = "{}") -> Manifest | None:
    """Write the tiles collected for a manifest into the ledger, mark them and delete the rows; None without tiles.

    Where it was marked before, which an import taken for dead brings about, what was collected since is marked as a
    manifest of its own: edits stored after a mark are not answered by it.
    """
    manifest = manifest_or_none(stack, manifest_id)
    rows = stack.features.owed(10_000_000, kind="manifest", group=manifest_id)
    if rows and (manifest is None or manifest.state not in ("cancelled", "refused")):
        if manifest is not None and manifest.state != "writing":
            manifest_id = f"{manifest_id}-{max(row.id for row in rows)}"
        stack.ledger.write_manifest(manifest_id, title, kind, sorted({row.key for row in rows}), parameters=parameters)
        manifest = stack.ledger.mark_manifest(manifest_id)
    if rows:
        stack.features.pay([row.id for row in rows])
    return manifest


def manifest_or_none(stack: Stack, manifest_id: str) -> Manifest | None:
    """A manifest of the ledger; None where there is none of that id."""
    try:
        return stack.ledger.manifest(manifest_id)
    except UnknownManifest:
        return None


def plan_wide(stack: Stack) -> list[Manifest]:
    """Turn very wide edits into manifests. One over the cap is kept as refused, with its number."""
    made: list[Manifest] = []
    for row in stack.features.owed(100, kind="wide"):
        made.append(_wide_manifest(stack, row))
        stack.features.pay([row.id])
    return made


def _wide_manifest(stack: Stack, row: OutboxRow) -> Manifest:
    cap = stack.settings.manifest_cap
    event_key, areas = wide_areas(row.value)
    keys: set[str] = set()
    complete = True
    for geometry, zooms in areas:
        # One above the cap is enough to know that it is exceeded; the whole of a country would take minutes.
        found = cover(geometry, zooms, buffer=stack.layers.reach_fraction, cap=cap + 1)
        keys.update(found.keys())
        complete = complete and not found.zooms_left
    zooms_asked = sorted({zoom for _, zooms in areas for zoom in zooms})
    manifest_id, title = f"wide-{event_key[:24]}", f"edit of {row.key}, zooms {zooms_asked}"
    parameters = json.dumps({"feature": row.key, "zooms": zooms_asked})
    manifest = manifest_or_none(stack, manifest_id)
    if manifest is not None and manifest.state != "writing":
        return manifest
    if not complete or len(keys) > cap:
        problem = (
            f"more than {cap:,} tiles at zooms {', '.join(map(str, zooms_asked))} (GEO_ASSETS_MANIFEST_CAP); "
            "backfill its region in parts, or raise the cap"
        )
        log.warning("edit is too wide for its deeper zooms", feature=row.key, problem=problem)
        # What is there must never show what is not so any more: known tiles are looked at all the same.
        there = sorted({key for shape, zooms in areas for key in known_tiles(stack, shape, zooms)})
        if there:
            name = f"{manifest_id}-published"
            stack.ledger.write_manifest(name, f"{title}, published tiles", "wide", there, parameters=parameters)
            stack.ledger.mark_manifest(name)
        return stack.ledger.refuse_manifest(manifest_id, title, "wide", problem, parameters=parameters)
    stack.ledger.write_manifest(manifest_id, title, "wide", sorted(keys), parameters=parameters)
    return stack.ledger.mark_manifest(manifest_id)


def known_tiles(stack: Stack, geometry: Any, zooms: Sequence[int]) -> list[str]:
    """Tiles of the ledger at these zooms that a geometry (EPSG:4326) meets: as many as there are, however wide it is.

    Those that are being built for the first time are among them: their builder may have read the features before.
    """
    keys = [state.key for state in stack.ledger.scan(zooms=zooms, published=False)]
    if not keys:
        return []
    drawn = shapely.transform(geometry, to_mercator)
    shapely.prepare(drawn)
    z, x, y = coordinates_of(keys)
    side = 2 * HALF_WORLD / np.exp2(z)
    reach = stack.layers.reach_fraction * side
    west, north = x * side - HALF_WORLD, HALF_WORLD - y * side
    boxes = shapely.box(west - reach, north - side - reach, west + side + reach, north + reach)
    return [keys[i] for i in np.flatnonzero(shapely.intersects(drawn, boxes)).tolist()]


class QuietImports:
    """Which imports have added nothing for so long that they must be dead, by what one process has seen of them.

    Args:
        after_s: How long one must have been quiet, seconds.
        clock: Seconds that only go forward.
    """

    def __init__(self, after_s: float = QUIET_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._after_s, self._clock = after_s, clock
        self._seen: dict[str, tuple[int, float]] = {}
        """Newest row of each import, and when it was first seen to be the newest."""

    def look(self, newest: Mapping[str, int]) -> set[str]:
        """Those that are quiet, of the imports that have rows now, each with its newest row."""
        now = self._clock()
        self._seen = {
            group: self._seen[group] if self._seen.get(group, (-1, 0.0))[0] == row else (row, now)
            for group, row in newest.items()
        }
        return {group for group, (_, since) in self._seen.items() if now - since >= self._after_s}


def sweep_imports(stack: Stack, quiet: QuietImports | None = None) -> int:
    """Finish manifests whose import died before it could; how many.

    A live import holds a lease. While the guard is away nobody can see it: then one that has added nothing for minutes
    is finished. An import that was only slow notices, and marks anew what it stores after that.
    """
    groups = sorted({row.group for row in stack.features.owed(PAGE, kind="manifest")})
    finished = 0
    try:
        for group in groups:
            lease = stack.guard.acquire(IMPORT_LEASE + group, "sweep", 60)
            if lease is None:
                continue
            try:
                _finish_import(stack, group)
                finished += 1
            finally:
                let_go(stack, lease)
    except GuardUnavailable as fault:
        silent: set[str] = set()
        if quiet is not None:
            owed = {group: stack.features.owed(10_000_000, kind="manifest", group=group) for group in groups}
            silent = quiet.look({group: rows[-1].id for group, rows in owed.items() if rows})
        log.warning("cannot see which imports live", imports=len(groups), taken_for_dead=len(silent), error=str(fault))
        for group in silent:
            _finish_import(stack, group)
            finished += 1
    return finished


def _finish_import(stack: Stack, group: str) -> None:
    finish_manifest(stack, group, "import that was interrupted", "import")


def let_go(stack: Stack, lease: Lease) -> None:
    """Give a lease back; where the guard is away it ends by itself."""
    try:
        stack.guard.release(lease)
    except GuardUnavailable as fault:
        log.warning("lease not given back", lease=lease.name, error=str(fault))
