"""Opening a user's file: is it a local file, which format is it by its content, and which reader takes it."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from geo_assets.services.reading.mapping import LayerMapping
from geo_assets.services.reading.reading import Reading, ReadingError

FORMATS = "OpenStreetMap (.osm.pbf, .osm), GeoJSON, GeoJSONSeq, GeoPackage, Shapefile, FlatGeobuf and GeoParquet"

# `/vsi…` is GDAL's own file system, most of it network or archives; a scheme is a URL, or a driver's connection string.
_VIRTUAL = re.compile(r"/vsi|[A-Za-z][A-Za-z0-9+.-]+:")

_ARCHIVES = {
    b"PK\x03\x04": "zip",
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"7z\xbc\xaf": "7z",
    b"\x28\xb5\x2f\xfd": "zstandard",
    b"Rar!": "rar",
}

# Of the SQLite header: the application id that makes it a GeoPackage (OGC 12-128r18, requirement 2; GP10 and GP11 are
# those of versions 1.0 and 1.1).
_GEOPACKAGE_IDS = (b"GPKG", b"GP10", b"GP11")


def open_file(
    path: str | os.PathLike[str],
    mapping: LayerMapping | None = None,
    *,
    layer: str | None = None,
    table: str | None = None,
    id_column: str | None = None,
    layers: Collection[str] | None = None,
) -> Reading:
    """Open a local file for import. The format is told by the content, not by the name.

    Args:
        path: The file; of a Shapefile its .shp. A symbolic link is followed. No URL, no `/vsi` path, no archive.
        mapping: Which objects become features of which layer; None takes them all, with every attribute.
        layer: Layer of what names none.
        table: The table to read, of a GeoPackage that has several; None reads them all.
        id_column: Column or property with the features' ids; it goes before the mapping's. Not of OpenStreetMap files.
        layers: The map's layers: a table called like one goes into it where nothing else names a layer. None: any
            table's name is taken for a layer's.

    Returns:
        The reading, to be iterated once.

    Raises:
        ReadingError: It is no local file, of no format that is read here, damaged, or the mapping names a column that
            is not there.
    """
    file = _local(path)
    kind = _format(file)
    if kind == "osm.pbf" or kind == "osm":
        if mapping is None:
            raise ReadingError(f"{file}: an OpenStreetMap file needs a mapping of its tags to layers")
        if id_column is not None:
            raise ReadingError(f"{file}: OpenStreetMap objects have their ids; they take no id column {id_column!r}")
        from geo_assets.services.reading.osm import open_osm

        return open_osm(file, mapping, kind)
    if id_column is not None:
        mapping = (
            LayerMapping.single(None if kind == "GeoJSON" else layer, id_column=id_column)
            if mapping is None
            else mapping.model_copy(update={"id": id_column})
        )
    if kind == "GeoJSON":
        from geo_assets.services.reading.geojson import open_geojson

        return open_geojson(file, mapping, layer)
    if mapping is None:
        mapping = LayerMapping.single(layer)
    elif layer is not None:
        mapping = mapping.with_default(layer)
    from geo_assets.services.reading.tables import open_geoparquet, open_table

    if kind == "GeoParquet":
        return open_geoparquet(file, mapping)
    return open_table(file, kind, mapping, table, layers)


def _local(path: str | os.PathLike[str]) -> Path:
    text = os.fspath(path)
    file = Path(text)
    if _VIRTUAL.match(text) and not (file.is_file() and not text.startswith("/vsi")):
        raise ReadingError(f"{text}: only local files are read; download it first")
    try:
        resolved = file.resolve(strict=True)
        if resolved.is_dir():
            raise ReadingError(f"{text}: is a folder; name a file in it")
        if not resolved.is_file():
            raise ReadingError(f"{text}: is no regular file")
        if str(resolved).startswith("/vsi"):
            raise ReadingError(
                f"{text}: lies below a folder whose name GDAL takes for a file system of its own; move it"
            )
        with resolved.open("rb"):
            pass
    except OSError as error:
        raise ReadingError(f"{text}: {error.strerror or error}") from error
    except ValueError as error:  # a NUL character
        raise ReadingError(f"{text!r}: is no path") from error
    return resolved


def _format(file: Path) -> str:
    """GDAL's name of the driver, or `osm.pbf`, `osm`, `GeoJSON`, `GeoParquet`."""
    with file.open("rb") as opened:
        head = opened.read(4096)
    if not head:
        raise ReadingError(f"{file}: is empty")
    for magic, name in _ARCHIVES.items():
        if head.startswith(magic):
            raise ReadingError(f"{file}: is a {name} archive; unpack it first")
    if head.startswith(b"SQLite format 3\x00"):
        if head[68:72] in _GEOPACKAGE_IDS:
            return "GPKG"
        raise ReadingError(f"{file}: is an SQLite database, but no GeoPackage (its application id is not GPKG)")
    if head[:4] == b"\x00\x00\x27\x0a":
        if file.suffix.lower() != ".shp":
            raise ReadingError(f"{file}: is a part of a Shapefile; name its .shp")
        return "ESRI Shapefile"
    if head.startswith(b"fgb\x03fgb"):
        return "FlatGeobuf"
    if head.startswith(b"PAR1"):
        return "GeoParquet"
    if b"OSMHeader" in head[:24]:
        return "osm.pbf"
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip(b" \t\r\n")
    if text[:1] in (b"{", b"\x1e"):
        return "GeoJSON"
    if text.startswith(b"<") and b"<osm" in head:
        return "osm"
    raise ReadingError(f"{file}: is of no format that is read here: {FORMATS}")
