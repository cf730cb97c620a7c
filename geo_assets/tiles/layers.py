"""Layers: what a map consists of, as data. Their definitions are part of every tile's recipe."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from geo_assets.tiles.tile import MAX_ZOOM

EXTENT = 4096
"""Units a side of a tile in MVT, the field's usual grid (Mapbox Vector Tile 2.1, section 4.1 gives it as default)."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)


_NOT_IN_TILES = frozenset({"description", "fences"})
"""What is said of a layer and changes no tile."""


class LayerError(ValueError):
    """A layer definition that cannot be: its field, value and limit are in the message."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the map.

    Args:
        name: Name in the tile, 1 to 64 characters of `A-Z a-z 0-9 _ -`.
        min_zoom: First zoom at which anything of it shows.
        max_zoom: Last zoom at which it shows.
        min_pixels: Side in pixels (of a 256-pixel tile) from which a line or polygon shows; 0 shows every size.
            Points have no size: only the zooms limit them.
        simplify: Tolerance in pixels (of a 256-pixel tile) for lines and polygons below `max_zoom`; 0 keeps all.
        attributes: Properties that go into the tile; None takes all.
        description: One line for people; it reaches TileJSON, not the tile.
        fences: Its features are geofences too: what is no fence is no feature of it.

    Raises:
        LayerError: A value outside its range.
    """

    name: str
    min_zoom: int = 0
    max_zoom: int = MAX_ZOOM
    min_pixels: float = 4.0
    simplify: float = 0.5
    attributes: tuple[str, ...] | None = None
    description: str = ""
    fences: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise LayerError(f"layer name {self.name[:80]!r} is not 1..64 characters of A-Z, a-z, 0-9, _ and -")
        for field_name in ("min_zoom", "max_zoom"):
            if type(getattr(self, field_name)) is not int:
                raise LayerError(f"layer {self.name}: {field_name} {getattr(self, field_name)!r} is no whole number")
        if not 0 <= self.min_zoom <= self.max_zoom <= MAX_ZOOM:
            raise LayerError(
                f"layer {self.name}: min_zoom {self.min_zoom} and max_zoom {self.max_zoom} "
                f"are not 0 <= min <= max <= {MAX_ZOOM}"
            )
        for field_name in ("min_pixels", "simplify"):
            value = getattr(self, field_name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise LayerError(f"layer {self.name}: {field_name} {value!r} is no number")
            if not 0 <= value <= 256:
                raise LayerError(f"layer {self.name}: {field_name} {value} is outside 0..256 pixels")
        if type(self.fences) is not bool:
            raise LayerError(f"layer {self.name}: fences {self.fences!r} is neither true nor false")


@dataclass(frozen=True, eq=True)
class LayerSet:
    """The layers of a map and the grid they are drawn on.

    Args:
        layers: The layers, in drawing order; their names differ.
        buffer: Units of `extent` by which a tile reaches over its edge, so that lines and icons meet across it.
        extent: Units a side of a tile.
        max_zoom: Last zoom that is built; clients overzoom beyond it. No layer shows deeper.
        attribution: Whose data the map shows, as HTML for TileJSON.

    Raises:
        LayerError: Two layers of one name, none at all, or a value outside its range.
    """

    layers: tuple[Layer, ...]
    buffer: int = 64
    extent: int = EXTENT
    max_zoom: int = 18
    attribution: str = ""
    _by_name: dict[str, Layer] = field(init=False, repr=False, compare=False, default_factory=dict[str, Layer])

    def __post_init__(self) -> None:
        if not self.layers:
            raise LayerError("layers: at least one layer is needed")
        if not 0 <= self.buffer <= self.extent // 2:
            raise LayerError(f"buffer {self.buffer} is outside 0..{self.extent // 2} units")
        if not 256 <= self.extent <= 8192:
            raise LayerError(f"extent {self.extent} is outside 256..8192 units")
        if not 0 <= self.max_zoom <= MAX_ZOOM:
            raise LayerError(f"max_zoom {self.max_zoom} is outside 0..{MAX_ZOOM}")
        for layer in self.layers:
            if layer.name in self._by_name:
                raise LayerError(f"layer {layer.name} is defined twice")
            self._by_name[layer.name] = layer

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> Layer:
        """The layer of that name; KeyError when there is none."""
        return self._by_name[name]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names, in drawing order."""
        return tuple(layer.name for layer in self.layers)

    @property
    def buffer_fraction(self) -> float:
        """The buffer as a fraction of a tile's side."""
        return self.buffer / self.extent

    @property
    def reach_fraction(self) -> float:
        """How far from a tile's edge a feature can lie and still change it, as a fraction of the side.

        The buffer, and the tolerance by which simplification may move a line: what an edit dirties.
        """
        return self.buffer_fraction + max(layer.simplify for layer in self.layers) / 256

    def recipe_parameters(self) -> dict[str, Any]:
        """All of the definition that can change a tile's bytes, as plain JSON values: part of the recipe."""
        layers = [{k: v for k, v in asdict(layer).items() if k not in _NOT_IN_TILES} for layer in self.layers]
        return {"layers": layers, "buffer": self.buffer, "extent": self.extent, "max_zoom": self.max_zoom}
