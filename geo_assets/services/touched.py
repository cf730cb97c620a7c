"""Tiles that stored features touch: beside what is published, what is looked at when anything may have changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import shapely

from geo_assets.tiles.cover import covers

if TYPE_CHECKING:
    from geo_assets.stack import Stack
    from resources.feature_store.protocol import Feature

FEATURES_AT_ONCE = 5_000
"""Features covered together: some tens of MB, and ten times as fast as one by one."""


class Touched(NamedTuple):
    """What some features touch."""

    keys: list[str]
    """Partition keys, each once."""
    too_wide: int
    """Features that touch more tiles than `manifest_cap`: of those only the zooms that fit are among the keys."""


def touched(stack: Stack, features: Sequence[tuple[Feature, tuple[int, int]]]) -> Touched:
    """Tiles of features, grown by the layers' reach.

    Args:
        stack: Its layers and settings.
        features: Each with the first and the last zoom at which it shows; a last below the first is nowhere. Those
            without a geometry touch nothing.
    """
    shown = [(feature.geometry, limits) for feature, limits in features if feature.geometry is not None]
    if not shown:
        return Touched([], 0)
    last = [deepest for _, (_, deepest) in shown]
    found = covers(
        shapely.from_wkb([geometry for geometry, _ in shown]),
        [first for _, (first, _) in shown],
        last,
        buffer=stack.layers.reach_fraction,
        cap=stack.settings.manifest_cap,
    )
    too_wide = sum(done < deepest for done, deepest in zip(found.complete_to.tolist(), last, strict=True))
    return Touched(found.keys(), too_wide)
