"""Which tiles an applied edit makes dirty, as outbox rows: planned inside the feature store's transaction."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import shapely

from geo_assets.events import topics
from geo_assets.events.records import TileHint
from geo_assets.services.edit_stages import Stamps
from geo_assets.services.fence_features import owed_fences
from geo_assets.services.tracing import headers_with
from geo_assets.tiles.cover import covers
from geo_assets.tiles.tile import Tile
from resources.feature_store.protocol import Change, Feature, OutboxRow

if TYPE_CHECKING:
    from geo_assets.tiles.layers import LayerSet


@dataclass(slots=True)
class DirtyPlan:
    """Plans hints, and what is owed to `[fences]`, for a batch of changes. One instance a batch; it does no I/O.

    Args:
        layers: The map's layers.
        edit_cap: Tiles one side of an edit marks at once; the zooms that do not fit become a manifest.
        manifest: Collect the tiles for this manifest instead of sending a hint for each (imports).
        known: Tiles already collected for that manifest: each is written once.
    """

    layers: LayerSet
    edit_cap: int
    manifest: str | None = None
    known: set[str] = field(default_factory=set)
    received_us: Mapping[str, int] = field(default_factory=dict[str, int])
    """Event key -> when the edge received it, microseconds since the epoch, where that is known: a hint's stamp."""
    traces: Mapping[str, str] = field(default_factory=dict[str, str])
    """Event key -> the trace that its hints belong to (`traceparent`), where it is traced."""
    fresh: set[str] = field(default_factory=set)
    """Tiles that this batch adds to `known`, for the caller to add once the transaction is durable."""

    def __call__(self, changes: Sequence[Change]) -> list[OutboxRow]:
        """Outbox rows of the changes: one a tile for hints or the manifest, one more for each edit that is too wide."""
        self.fresh = set()
        fences = owed_fences(changes, self.layers)
        # The old and the new geometry, each at the zooms where it shows; one of them where nothing moved.
        sides: list[tuple[Change, Feature]] = []
        for change in changes:
            before, after = change.before, change.after
            if before is not None and after is not None and _same_place(before, after):
                before = None
            sides.extend((change, side) for side in (before, after) if side is not None and side.geometry is not None)
        if not sides:
            return fences
        found = covers(
            shapely.from_wkb([side.geometry for _, side in sides]),
            [side.min_zoom for _, side in sides],
            [side.max_zoom for _, side in sides],
            buffer=self.layers.reach_fraction,
            cap=self.edit_cap,
        )
        keys = found.keys()
        rows = fences
        rows += self._collected(keys) if self.manifest is not None else self._hints(keys, found.feature.tolist(), sides)
        left: dict[int, tuple[Change, list[int]]] = {}
        for (change, side), last in zip(sides, found.complete_to.tolist(), strict=True):
            if last < side.max_zoom:
                zooms = left.setdefault(id(change), (change, []))[1]
                zooms.extend(range(max(last + 1, side.min_zoom), side.max_zoom + 1))
        rows.extend(self._wide(change, sorted(set(zooms))) for change, zooms in left.values())
        return rows

    def _hints(self, keys: list[str], owners: list[int], sides: list[tuple[Change, Feature]]) -> list[OutboxRow]:
        """One hint a tile; of several edits that touch it, the last one's, with the stamp of the first one received."""
        last: dict[str, int] = {}
        received: dict[str, int] = {}
        traces: dict[str, dict[str, int]] = {}
        for key, owner in zip(keys, owners, strict=True):
            if self.traces and (trace := self.traces.get(sides[owner][0].edit.event_key)):
                traces.setdefault(key, {})[trace] = owner
            last[key] = max(owner, last.get(key, -1))
            stamp = self.received_us.get(sides[owner][0].edit.event_key, 0)
            if stamp and stamp < received.get(key, stamp + 1):
                received[key] = stamp
        return [
            _hint(key, *sides[owner], received.get(key, 0), _newest_first(traces.get(key, {})))
            for key, owner in last.items()
        ]

    def _collected(self, keys: list[str]) -> list[OutboxRow]:
        self.fresh = set(keys) - self.known
        return [OutboxRow("manifest", key, b"", {}, group=self.manifest or "") for key in sorted(self.fresh)]

    def _wide(self, change: Change, left: list[int]) -> OutboxRow:
        areas: list[dict[str, Any]] = []
        for feature in (change.before, change.after):
            if feature is not None and feature.geometry is not None:
                zooms = [z for z in left if feature.min_zoom <= z <= feature.max_zoom]
                if zooms:
                    areas.append({"zooms": zooms, "wkb": base64.b64encode(feature.geometry).decode()})
        edit = change.edit
        value = {"event_id": edit.event_id, "event_key": edit.event_key, "areas": areas}
        return OutboxRow("wide", f"{edit.source}:{edit.feature_id}", json.dumps(value).encode(), {})


def _same_place(before: Feature, after: Feature) -> bool:
    return before.geometry == after.geometry and (before.min_zoom, before.max_zoom) == (after.min_zoom, after.max_zoom)


def _newest_first(traces: Mapping[str, int]) -> list[str]:
    return sorted(traces, key=lambda trace: -traces[trace])


def _hint(key: str, change: Change, feature: Feature, received_us: int, traces: Sequence[str]) -> OutboxRow:
    edit = change.edit
    value = TileHint.of(
        Tile.from_key(key),
        event_id=edit.event_id,
        source=edit.source,
        version=edit.version,
        data_time_ms=edit.event_time_ms,
    )
    headers = {
        topics.HEADER_EVENT_ID: edit.event_id,
        topics.HEADER_VERTEX_COUNT: str(feature.vertex_count),
        topics.HEADER_REGION_PRIORITY: "0",
    }
    if received_us:
        headers[topics.HEADER_STAGES] = Stamps(received=received_us).to_json()
    headers |= headers_with(traces)
    return OutboxRow("tiles", key, value.to_json(), headers)


def wide_areas(value: bytes) -> tuple[str, Iterable[tuple[Any, list[int]]]]:
    """Event key and (geometry in EPSG:4326, zooms) of an outbox row of kind `wide`."""
    read = json.loads(value)
    return read["event_key"], [
        (shapely.from_wkb(base64.b64decode(area["wkb"])), area["zooms"]) for area in read["areas"]
    ]
