"""Who draws geometries into tiles: the encoder itself, or PostGIS by its ST_AsMVT (`GEO_ASSETS_ENGINE`).

Only that step differs. Which features show, how they are simplified, their ids, attributes, order and framing are the
encoder's with either engine, so both make tiles of the same features. What may differ is geometry by a unit, and hence
what is no larger than that: PostGIS drops what is smaller than half a unit, rounds before it asks whether a feature
reaches into the buffer, and mends polygons that rounding broke in its own way. Below 3.5 it can lose some of those.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from geo_assets.configuration import ConfigurationError
from geo_assets.tiles.decode import DecodedFeature, decode, ring_area
from geo_assets.tiles.encode import EncodedTile, TileFeatures, encode_tiles
from geo_assets.tiles.encode.grid import Draw, Drawn, Place
from geo_assets.tiles.encode.ragged import Ints, offsets, where
from geo_assets.tiles.encode.shapes import POLYGON, Shapes, geos
from resources.feature_store.protocol import FeatureStoreError, FeatureStoreUnavailable

if TYPE_CHECKING:
    from geo_assets.stack import Stack
    from resources.feature_store.postgis import PostgisStore

_KINDS = {"Point": 1, "LineString": 2, "Polygon": 3}


def encode(stack: Stack, features: TileFeatures) -> list[EncodedTile]:
    """Encode a batch of tiles with the engine that the settings choose."""
    if stack.settings.engine == "numpy":
        return encode_tiles(features, stack.layers)
    return encode_tiles(features, stack.layers, PostgisDraw(_store(stack)))


def version(stack: Stack) -> str:
    """What the engine adds to the recipe; nothing for the encoder's own.

    Raises:
        ConfigurationError: The engine needs a feature store that is not configured.
        FeatureStoreUnavailable: The server cannot be asked now.
    """
    return "" if stack.settings.engine == "numpy" else _store(stack).mvt_version


def _store(stack: Stack) -> PostgisStore:
    from resources.feature_store.postgis import PostgisStore

    store = stack.features
    if not isinstance(store, PostgisStore):
        raise ConfigurationError(
            "GEO_ASSETS_ENGINE is st_asmvt, which needs PostGIS: set GEO_ASSETS_FEATURE_STORE_URL or "
            "GEO_ASSETS_POSTGRES_URL, or GEO_ASSETS_ENGINE=numpy"
        )
    return store


@dataclass(frozen=True, slots=True)
class PostgisDraw(Draw):
    """The encoder's `draw` by ST_AsMVT.

    Args:
        store: Whose server draws.
    """

    store: PostgisStore

    def __call__(self, shapes: Shapes, item: Ints | None, place: Place, *, buffer: int) -> Drawn:
        """Draw items into tiles; what PostGIS refuses is a fault of its pair alone."""
        placed = place.moved(shapes if item is None else shapes.take(item))
        if not len(placed):
            return Drawn(Shapes.empty(), np.zeros(0, np.bool_), np.zeros(0, np.int64), [])
        # PostGIS counts y from the south.
        north = placed.moved(np.column_stack([placed.xy[:, 0], place.extent - placed.xy[:, 1]]))
        geometries = north.geometries()
        broken = where(~geos.is_valid(geometries))
        if len(broken):
            # Polygons of a collection that overlap, above all: PostGIS would leave out what lies in two of them.
            geometries[broken] = geos.make_valid(geometries[broken], method="structure", keep_collapsed=False)
        wkb: list[bytes] = geos.to_wkb(geometries, output_dimension=2, byte_order=1).tolist()
        found, faults = self._drawn(wkb, place.extent, buffer, 0)
        return Drawn(*_shapes(found), faults)

    def _drawn(
        self, wkb: list[bytes], extent: int, buffer: int, first: int
    ) -> tuple[list[tuple[int, DecodedFeature]], list[tuple[int, str]]]:
        """Features by pair, counted from `first`, and faults; halved until what cannot be drawn is alone."""
        try:
            layers = decode(self.store.draw(wkb, extent=extent, buffer=buffer))
        except FeatureStoreUnavailable:
            raise
        except FeatureStoreError as error:
            if len(wkb) == 1:
                return [], [(first, f"PostGIS: {error}")]
            half = math.ceil(len(wkb) / 2)
            one = self._drawn(wkb[:half], extent, buffer, first)
            other = self._drawn(wkb[half:], extent, buffer, first + half)
            return one[0] + other[0], one[1] + other[1]
        found = [(first + (f.id or 0) - 1, f) for layer in layers for f in layer.features]
        return sorted(found, key=lambda each: each[0]), []


def _shapes(found: list[tuple[int, DecodedFeature]]) -> tuple[Shapes, np.ndarray, Ints]:
    """Decoded features as shapes, which rings to turn (none: they come as the specification wants), and their pairs."""
    kinds: list[int] = []
    pairs: list[int] = []
    rings: list[int] = []
    shell: list[bool] = []
    points: list[int] = []
    xy: list[tuple[int, int]] = []
    for pair, feature in found:
        kind = _KINDS.get(feature.geometry_type)
        if kind is None or not feature.paths:
            continue
        before = len(points)
        if kind == 1:
            # All points of a feature are one ring.
            shell.append(True)
            points.append(len(feature.paths))
            xy.extend(path[0] for path in feature.paths)
        for path in feature.paths if kind != 1 else ():
            own = path[:-1] if kind == POLYGON else path
            is_shell = kind != POLYGON or ring_area(path) > 0
            shell.append(is_shell)
            points.append(len(own))
            xy.extend(own)
        kinds.append(kind)
        pairs.append(pair)
        rings.append(len(points) - before)
    shapes = Shapes(
        np.array(kinds, np.int64),
        offsets(np.array(rings, np.int64)),
        np.array(shell, np.bool_),
        offsets(np.array(points, np.int64)),
        np.array(xy, np.float64).reshape(-1, 2),
    )
    return shapes, np.zeros(len(shell), np.bool_), np.array(pairs, np.int64)
