"""What an import can be refused for before a feature of it is read: layers that cannot be, a CRS nobody knows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from geo_assets.events.dead_letter import Refused
from geo_assets.services.reading.reading import Reading, ReadingError

if TYPE_CHECKING:
    from geo_assets.events.sources import Source
    from geo_assets.services.reading.mapping import LayerMapping
    from geo_assets.tiles.layers import LayerSet


def check_layers(named: Iterable[str], layers: LayerSet, source: Source, where: str) -> None:
    """Whether the source may write each of these layers of the map.

    Args:
        named: Names of layers.
        layers: The map's.
        source: Whose features are to go there.
        where: Where the names stand, for the message: `--layer`, or the mapping's file.

    Raises:
        ReadingError: The first that is none of the map, or not the source's.
    """
    missing = sorted(set(named) - set(layers.names))
    if missing:
        shown = ", ".join(repr(name[:80]) for name in missing[:20])
        raise ReadingError(
            f"{where}: {shown}: no {'layer' if len(missing) == 1 else 'layers'} of this map; "
            f"there are {', '.join(layers.names)}"
        )
    forbidden = [name for name in layers.names if name in set(named) and not source.may_write(name)]
    if forbidden:
        raise ReadingError(
            f"{where}: {', '.join(map(repr, forbidden))}: source {source.name} may not write there; "
            f"its layers are {_writable(layers, source)}"
        )


def check_crs(crs: str) -> str:
    """The `AUTHORITY:CODE` of a CRS that somebody typed.

    Raises:
        ReadingError: PROJ knows none of that name.
    """
    from geo_assets.events.crs import resolve_crs

    try:
        return resolve_crs([("--crs", crs)], None)
    except Refused as fault:
        why = " ".join(fault.explanation.split())
        raise ReadingError(
            f"--crs {crs[:80]!r}: {why}; a CRS is said by a code that PROJ knows, such as EPSG:3067 or EPSG:4326"
        ) from None


def check_tables(reading: Reading, mapping: LayerMapping | None, layers: LayerSet, source: Source) -> None:
    """Whether there is a layer for the rows of each table of a file.

    Args:
        reading: The file, opened with the map's layers.
        mapping: What it was opened with; None where nothing names a layer.
        layers: The map's.
        source: Whose features the rows become.

    Raises:
        ReadingError: A table whose rows would have no layer, or one that the source may not write.
    """
    for table in reading.tables:
        if mapping is not None and all(
            rule.layer is not None or rule.table not in (None, table.name) for rule in mapping.rules
        ):
            continue
        if table.name is not None and table.name in layers:
            check_layers([table.name], layers, source, str(reading.path))
        elif "layer" not in table.columns and source.default_layer is None:
            called = "" if table.name is None else f"its table {table.name!r} is called like no layer of this map, "
            raise ReadingError(
                f"{reading.path}: no layer for its features: {called}it has no column 'layer', and source "
                f"{source.name} no default layer; say --layer with one of {_writable(layers, source)}"
            )


def _writable(layers: LayerSet, source: Source) -> str:
    return ", ".join(name for name in layers.names if source.may_write(name)) or "none of this map"
