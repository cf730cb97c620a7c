"""The recipe of the tiles that this process would build: its layers, its encoder and its libraries."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import pyproj
import shapely

from geo_assets.tiles import workkey
from geo_assets.tiles.encode import ENCODER_VERSION

if TYPE_CHECKING:
    from geo_assets.tiles.layers import LayerSet


@lru_cache(maxsize=4)
def _recipe_of(layers: LayerSet) -> str:
    geos = ".".join(map(str, shapely.geos_version))
    return workkey.recipe(layers, ENCODER_VERSION, geos, pyproj.proj_version_str)


def current_recipe(layers: LayerSet) -> str:
    """Hex recipe of these layers in this process."""
    return _recipe_of(layers)
