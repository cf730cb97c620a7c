"""A changed layers file reaches what is stored: zoom limits are rewritten, then every tile it can touch is marked.

That is every tile that is published and every tile that a feature touches by the layers of today: one that shows at
more zooms, or that reaches into a neighbour by a larger buffer. What did not change is skipped when it is looked at.

The order survives a kill anywhere: the manifest is written (it says which tiles), the limits are rewritten, the
manifest is marked, and only then the recipe counts as seen. Started again in between, by these layers or by others, it
does the rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

import shapely
import structlog

from geo_assets.services import engines
from geo_assets.services.recipe import current_recipe
from geo_assets.services.touched import FEATURES_AT_ONCE, touched
from geo_assets.tiles.tile import Box
from geo_assets.tiles.zooms import NOWHERE, zoom_limits
from resources.feature_store.protocol import Feature
from resources.ledger.protocol import Manifest

if TYPE_CHECKING:
    from geo_assets.stack import Stack

log = structlog.get_logger()

SEEN = "recipe-seen"
"""Ledger value: the recipe that stored features and published tiles were last brought in line with."""


def follow_layers(stack: Stack) -> Manifest | None:
    """Bring stored features and tiles in line with the layers and libraries of this process, if those changed.

    Call it before anything else runs in a home. Returns the manifest of the tiles to build anew; None where nothing
    changed.
    """
    recipe = current_recipe(stack.layers, engines.version(stack))
    seen = stack.ledger.get_value(SEEN)
    if seen == recipe:
        return None
    name = f"recipe-{(seen or 'first')[:12]}-{recipe[:12]}"
    title = "layers or libraries changed"
    parameters = json.dumps({"from": seen, "to": recipe})
    keys = {state.key for state in stack.ledger.scan()}
    changed: dict[tuple[str, str], tuple[int, int]] = {}
    too_wide = 0
    features = stack.features.scan()
    while page := list(islice(features, FEATURES_AT_ONCE)):
        shown = list(_limits(stack, page))
        changed.update({(one.source, one.feature_id): limits for one, limits in shown if limits != _stored(one)})
        # All of them, not only those whose limits changed: a buffer that grew changes no limit, and who was killed
        # behind the limits of other layers finds them rewritten.
        found = touched(stack, shown)
        keys.update(found.keys)
        too_wide += found.too_wide
    manifest: Manifest | None = None
    if keys:
        manifest = stack.ledger.write_manifest(name, title, "repair", sorted(keys), parameters=parameters)
    if changed:
        stack.features.set_zooms(changed)
    if keys:
        manifest = stack.ledger.mark_manifest(name)
        log.info("layers or libraries changed", features=len(changed), tiles=len(keys), manifest=name)
    if too_wide:
        log.warning("features too wide to look at every tile of them: see geo-assets backfill", features=too_wide)
    stack.ledger.set_value(SEEN, recipe)
    return manifest


def _stored(feature: Feature) -> tuple[int, int]:
    return feature.min_zoom, feature.max_zoom


def _limits(stack: Stack, features: list[Feature]) -> Iterator[tuple[Feature, tuple[int, int]]]:
    """Each feature with the zooms at which it shows by the layers of today."""
    for feature in features:
        if feature.geometry is None or feature.layer not in stack.layers:
            yield feature, NOWHERE
            continue
        shape = shapely.from_wkb(feature.geometry)
        dimension = int(shapely.get_dimensions(shape))
        yield feature, zoom_limits(stack.layers[feature.layer], stack.layers, _size_box(feature, shape), dimension)


def _size_box(feature: Feature, shape: shapely.Geometry) -> Box:
    """The box that says how large a feature is: of one that was split at the date line, the box before the split."""
    west, south, east, north = feature.bbox or shapely.bounds(shape).tolist()
    if west == -180.0 and east == 180.0:
        parts = [shapely.bounds(part).tolist() for part in shapely.get_parts(shape)]
        joined = [(w + 360, e + 360) if e <= 0 else (w, e) for w, _, e, _ in parts]
        west, east = min(w for w, _ in joined), max(e for _, e in joined)
    return Box(west, south, east, north)
