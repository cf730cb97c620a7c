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
def _recipe_of(layers: LayerSet, engine: str) -> str:
    geos = ".".join(map(str, shapely.geos_version))
    encoder = f"{ENCODER_VERSION}, {engine}" if engine else ENCODER_VERSION
    return workkey.recipe(layers, encoder, geos, pyproj.proj_version_str)


def current_recipe(layers: LayerSet, engine: str = "") -> str:
    """Hex recipe of these layers in this process.

    Args:
        layers: The map's layers.
        engine: What draws their geometries, with its versions; nothing for the encoder itself.
    """
    return _recipe_of(layers, engine)
