"""Tables with a geometry: GeoPackage, Shapefile and FlatGeobuf by GDAL (pyogrio), GeoParquet by pyarrow; all as Arrow.

Arrow keeps 64-bit integers, booleans and nulls what they are, which GDAL's other ways into Python do not.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyogrio
import pyogrio.errors
import pyogrio.raw

from geo_assets.events.dead_letter import Refused
from geo_assets.services.reading.mapping import LayerMapping
from geo_assets.services.reading.reading import Reading, ReadingError, Table, Unfit, feature_json, kinds_of_wkb, own_id

_BATCH_ROWS = 2_000
"""Rows held at once: with 1,000 vertices each, 32 MB."""

# GDAL 3.12's own Arrow reader of FlatGeobuf begins its buffer anew after a row without geometry: the rows behind it get
# the wrong bytes. The one that all drivers share does not.
pyogrio.set_gdal_config_options({"OGR_FLATGEOBUF_STREAM_BASE_IMPL": "YES"})

_FAULTS = (
    pa.ArrowException,
    pyogrio.errors.DataSourceError,
    pyogrio.errors.DataLayerError,
    OSError,
    RuntimeError,
    ValueError,
)


def open_table(
    path: Path, driver: str, mapping: LayerMapping, table: str | None, layers: Collection[str] | None = None
) -> Reading:
    """Read a file by GDAL; every table of it that has a geometry, or the one that is named.

    Args:
        path: A local file, resolved.
        driver: GDAL's name of the driver that the content calls for; another one is refused.
        mapping: Rules, and the columns of id and version. Without an id column the id is the file's name and the
            row's number in it, and of a GeoPackage the table's name between them.
        table: Of a GeoPackage, the table to read.
        layers: The map's layers: a table called like one goes into it where the rule names none. None: any table.

    Raises:
        ReadingError: GDAL cannot read it, there is no such table or column, or two tables are of different CRS.
    """
    if driver == "ESRI Shapefile":
        _need_whole_shapefile(path)
    with _told(path):
        names = [str(name) for name, kind in pyogrio.list_layers(path) if kind is not None]
    if table is not None and table not in names:
        raise ReadingError(f"{path}: has no table {table!r} with a geometry; there are {', '.join(names) or 'none'}")
    if not names:
        if driver == "FlatGeobuf":  # its one table always has a geometry
            raise ReadingError(f"{path}: is damaged: it ends within its header or index")
        raise ReadingError(f"{path}: has no table with a geometry")
    chosen = names if table is None else [table]
    total = 0
    tables: list[Table] = []
    systems: dict[str | None, str] = {}
    for name in chosen:
        with _told(path):
            info = pyogrio.read_info(path, layer=name, force_feature_count=True)
        if info["driver"] != driver:
            raise ReadingError(f"{path}: GDAL takes it for {info['driver']}, its content is {driver}")
        total += max(0, int(info["features"]))
        systems.setdefault(_code(info["crs"]), name)
        columns = [*map(str, info["fields"]), str(info["fid_column"])]
        _need_columns(path, mapping, columns)
        tables.append(Table(name, frozenset(columns)))
    if len(systems) > 1:
        pairs = ", ".join(f"{name} in {_short(crs)}" for crs, name in systems.items())
        raise ReadingError(f"{path}: its tables are of different CRS ({pairs}); name one with its table")

    def read(left_out: Counter[str]) -> Iterator[bytes | Unfit]:
        rows = 0
        for number, name in enumerate(chosen):
            with _told(path):
                opened = pyogrio.raw.open_arrow(
                    path,
                    layer=name,
                    return_fids=True,
                    use_pyarrow=True,
                    datetime_as_string=True,
                    batch_size=_BATCH_ROWS,
                )
                with opened as (meta, reader):
                    fid = str(meta["fid_column"]) or reader.schema.names[0]
                    geometry = str(meta["geometry_name"]) or "wkb_geometry"
                    # Numbers of rows begin anew in each file and table, and a source's ids are of all its files.
                    prefix = f"{_file_name(path)}:{name}:" if driver == "GPKG" else f"{_file_name(path)}:"
                    default = name if layers is None or name in layers else None
                    for batch in reader:
                        rows += batch.num_rows
                        yield from _features(batch, geometry, fid, prefix, mapping, name, default, left_out)
            if number == len(chosen) - 1 and rows < total:
                raise ReadingError(f"{path}: is damaged: {rows} of {total} rows could be read")

    return Reading(path, driver, next(iter(systems)), total, read, tables=tuple(tables))


def open_geoparquet(path: Path, mapping: LayerMapping) -> Reading:
    """Read a GeoParquet file with WKB geometries (GeoParquet 1.1).

    Raises:
        ReadingError: It is no Parquet file, has no `geo` metadata, an encoding other than WKB, or no such column.
    """
    with _told(path), pq.ParquetFile(path) as file:
        schema, total = file.schema_arrow, file.metadata.num_rows
    try:
        geo = json.loads((schema.metadata or {})[b"geo"])
        geometry = str(geo["primary_column"])
        column = geo["columns"][geometry]
        encoding = column["encoding"]
    except (KeyError, TypeError, ValueError) as error:
        raise ReadingError(
            f"{path}: is a Parquet file, but no GeoParquet (no `geo` metadata with a geometry)"
        ) from error
    if encoding != "WKB":
        raise ReadingError(f"{path}: its geometry is encoded as {str(encoding)[:40]}; only WKB is read")
    if geometry not in schema.names:
        raise ReadingError(f"{path}: has no column {geometry[:80]!r}, which its metadata names as the geometry")
    _need_columns(path, mapping, schema.names)

    prefix = f"{_file_name(path)}:"

    def read(left_out: Counter[str]) -> Iterator[bytes | Unfit]:
        rows = 0
        with _told(path), pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_BATCH_ROWS):
                numbers = pa.array(range(rows, rows + batch.num_rows), pa.int64())
                numbered = pa.RecordBatch.from_arrays([numbers, *batch.columns], names=["", *batch.schema.names])
                rows += batch.num_rows
                yield from _features(numbered, geometry, "", prefix, mapping, None, None, left_out)

    # Absent means longitude and latitude; null means that nobody knows (GeoParquet 1.1, "crs").
    crs = _projjson_code(column["crs"]) if "crs" in column else "OGC:CRS84"
    return Reading(path, "GeoParquet", crs, total, read, tables=(Table(None, frozenset(schema.names)),))


def _features(
    batch: pa.RecordBatch,
    geometry: str,
    row_id: str,
    prefix: str,
    mapping: LayerMapping,
    table: str | None,
    default: str | None,
    left_out: Counter[str],
) -> Iterator[bytes | Unfit]:
    columns: dict[str, Iterable[Any]] = {}
    shapes: Iterable[bytes | None] = ()
    numbers: Iterable[int] = ()
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name == geometry:
            shapes = (column.storage if isinstance(column, pa.ExtensionArray) else column).to_pylist()
            continue
        if name == row_id:
            numbers = column.to_pylist()
            if name != mapping.id:
                continue
        if _is_binary(column.type):
            left_out[f"column {name}: bytes are no attribute (rows)"] += len(column)
            continue
        columns[name] = map(_json_value, column.to_pylist()) if _needs_care(column.type) else column.to_pylist()
    names = list(columns)
    rows = zip(*columns.values(), strict=True) if columns else iter([()] * batch.num_rows)
    for number, shape, row in zip(numbers, shapes, rows, strict=True):
        values = dict(zip(names, row, strict=True))
        rule = mapping.rule(values, kinds_of_wkb(shape), table=table)
        if rule is None:
            left_out["no rule fits"] += 1
            continue
        feature_id: Any = f"{prefix}{number}"
        fault: Refused | None = None
        if mapping.id is not None:
            try:
                feature_id = own_id(values.get(mapping.id), mapping.id)
            except Refused as refusal:
                feature_id, fault = None, refusal
        if mapping.id == row_id and row_id:
            values.pop(row_id, None)
        version = values.get(mapping.version) if mapping.version is not None else None
        if isinstance(version, float) and version.is_integer():
            version = int(version)
        layer = rule.layer if rule.layer is not None else default
        raw = feature_json(feature_id, version, layer, rule.properties(values), None if shape is None else shape.hex())
        yield raw if fault is None else Unfit(raw, fault)


def _file_name(path: Path) -> str:
    """The file's name for ids: text, whatever bytes the system calls it by."""
    return os.fsencode(path.name).decode(errors="replace")


def _need_columns(path: Path, mapping: LayerMapping, names: list[str]) -> None:
    for column in (mapping.id, mapping.version):
        if column is not None and column not in names:
            raise ReadingError(f"{path}: has no column {column!r}; there are {', '.join(n for n in names if n)[:300]}")


def _need_whole_shapefile(path: Path) -> None:
    """GDAL reads a Shapefile that was cut off as one with fewer shapes; its headers say how long it should be."""
    with path.open("rb") as file:
        file.seek(24)
        declared = 2 * int.from_bytes(file.read(4), "big")  # 16-bit words (ESRI Shapefile, July 1998, table 1)
    table = next((p for p in (path.with_suffix(".dbf"), path.with_suffix(".DBF")) if p.exists()), None)
    lengths = [(path, declared)]
    if table is not None:
        with table.open("rb") as file:
            head = file.read(12)
        rows, start, row = (int.from_bytes(head[a:b], "little") for a, b in ((4, 8), (8, 10), (10, 12)))
        lengths.append((table, start + rows * row))
    for part, length in lengths:
        size = part.stat().st_size
        if size < length:
            raise ReadingError(f"{part}: is damaged: {size} bytes are there of {length}")


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Whatever the libraries raise, as one line; what they warn of is not for the user."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ReadingError:
        raise
    except _FAULTS as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ReadingError(f"{path}: cannot be read: {line[:300]}") from error


def _is_binary(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)


def _needs_care(kind: pa.DataType) -> bool:
    """Whether some value of the type is none of JSON's own."""
    types = pa.types
    return not (
        types.is_integer(kind) or types.is_boolean(kind) or types.is_string(kind) or types.is_large_string(kind)
    )


def _json_value(value: Any) -> Any:
    """The value as JSON has it: dates as ISO 8601, no NaN and no infinity."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case decimal.Decimal():
            if not value.is_finite():
                return None
            return int(value) if value == value.to_integral_value() else float(value)
        case datetime.datetime() | datetime.date() | datetime.time():
            return value.isoformat()
        case list() | tuple():
            return [_json_value(entry) for entry in value]
        case dict():
            return {str(name): _json_value(entry) for name, entry in value.items()}
        case bytes():
            return value.hex()
        case _:
            return str(value)


def _code(crs: str | None) -> str | None:
    """A CRS as `AUTHORITY:CODE` where PROJ knows one for it, else as it stands (and ingest refuses it by name)."""
    if crs is None or len(crs) <= 40:
        return crs
    import pyproj
    from pyproj.exceptions import CRSError

    try:
        found = pyproj.CRS.from_wkt(crs).to_authority(min_confidence=100)
    except CRSError:
        return crs
    return crs if found is None else ":".join(found)


def _projjson_code(crs: Any) -> str | None:
    if crs is None:
        return None
    identity: Any = crs.get("id") if isinstance(crs, dict) else None
    if isinstance(identity, dict) and "authority" in identity and "code" in identity:
        return f"{identity['authority']}:{identity['code']}"
    import pyproj
    from pyproj.exceptions import CRSError

    try:
        found = pyproj.CRS.from_json_dict(crs).to_authority(min_confidence=100)
    except (CRSError, TypeError, AttributeError):
        found = None
    return json.dumps(crs) if found is None else ":".join(found)


def _short(crs: str | None) -> str:
    return "none" if crs is None else crs[:40]
