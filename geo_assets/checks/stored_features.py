"""What the audits of stored features read: all of a small store, of a large one those in a sample of its tiles."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import shapely

from geo_assets.checks.audit import sample
from geo_assets.services import build_worker
from geo_assets.stack import Stack
from geo_assets.tiles.cover import cover

ALL_FEATURES = 50_000
"""A store of no more is looked at whole: three seconds."""

SAMPLED_TILES = 300
"""Tiles of the deepest zooms whose features are looked at in a larger one."""


@dataclass(frozen=True, slots=True)
class StoredFeature:
    """A feature as it is stored.

    Args:
        name: `source:id`, the id as JSON.
        source: Its source.
        layer: Its layer.
        shape: Its geometry, EPSG:4326 lon/lat.
        max_zoom: Deepest zoom at which it is shown.
    """

    name: str
    source: str
    layer: str
    shape: Any
    max_zoom: int

    def subject(self, deepest: int) -> str:
        """The tile in whose middle of things it is: what a person opens on the map. Its name, where it is in none."""
        point = shapely.point_on_surface(self.shape) if np.isfinite(shapely.bounds(self.shape)).all() else None
        if point is None or shapely.is_empty(point):
            return self.name
        keys = cover(point, [min(self.max_zoom, deepest)], buffer=0.0, cap=4).keys()
        return keys[0] if keys else self.name


def features(stack: Stack, name: str) -> Iterator[StoredFeature]:
    """Features with a geometry, for the audit of this name."""
    if sum(stack.features.counts().by_layer.values()) <= ALL_FEATURES:
        for one in stack.features.scan():
            if one.geometry is not None:
                yield StoredFeature(
                    f"{one.source}:{one.feature_id}",
                    one.source,
                    one.layer,
                    shapely.from_wkb(one.geometry),
                    one.max_zoom,
                )
        return
    # Every feature is in tiles of the deepest zoom at which its layer is shown.
    deep = [state.key for state in sample(stack.ledger, name, 10 * SAMPLED_TILES) if _zoom(state.key) >= 12]
    keys = deep[:: max(1, len(deep) // SAMPLED_TILES)][:SAMPLED_TILES]
    if not keys:
        return
    rows = stack.features.features(build_worker.boxes_of(keys, stack.layers))
    for row, geometry in enumerate(rows.geometry):
        yield StoredFeature(
            f"{rows.source[row]}:{rows.feature_id[row]}", rows.source[row], rows.layer[row],
            shapely.from_wkb(geometry), stack.layers.max_zoom,
        )  # fmt: skip


def _zoom(key: str) -> int:
    return int(key.partition(":")[0])
