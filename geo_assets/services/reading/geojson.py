"""GeoJSON and GeoJSONSeq files, by the reader that ingest has for bodies: ids and numbers stay what they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from geo_assets.events import collection
from geo_assets.events.dead_letter import Refused
from geo_assets.events.json_text import JsonError, canonical, loads
from geo_assets.services.reading.mapping import LayerMapping
from geo_assets.services.reading.reading import Reading, ReadingError, Unfit, kinds_of_type, own_id

_CONTENT_TYPES = {
    ".geojsonl": "application/geo+json-seq",
    ".geojsons": "application/geo+json-seq",
    ".ndjson": "application/x-ndjson",
}


def open_geojson(path: Path, mapping: LayerMapping | None, layer: str | None) -> Reading:
    """Read a Feature, a FeatureCollection, or a sequence of Features.

    Args:
        path: The file.
        mapping: Rules by geometry and properties; None takes each feature as it stands.
        layer: Layer of features that name none, where there is no mapping.

    Raises:
        ReadingError: The file as a whole is no GeoJSON.
    """
    content_type = _CONTENT_TYPES.get(path.suffix.lower())
    with path.open("rb") as body:
        try:
            info = collection.first_pass(body, content_type)
        except Refused as fault:
            raise ReadingError(f"{path}: {_line(fault)}") from fault

    defaults = dict(info.members)
    if layer is not None:
        defaults.setdefault("layer", layer)

    def read(left_out: Counter[str]) -> Iterator[bytes | Unfit]:
        with path.open("rb") as body:
            for item in collection.features(body, info.form, content_type=content_type):
                if item.fault is not None:
                    if item.raw:
                        yield Unfit(item.raw, item.fault)
                    else:  # too long to be kept
                        left_out[_line(item.fault)[:200]] += 1
                elif mapping is None and not defaults:
                    yield item.raw
                else:
                    shaped = _shaped(item.raw, mapping, defaults, left_out)
                    if shaped is not None:
                        yield shaped

    name = "GeoJSONSeq" if info.form == "sequence" else "GeoJSON"
    return Reading(path, name, _crs(path, info.crs), info.count, read)


def _shaped(
    raw: bytes, mapping: LayerMapping | None, defaults: Mapping[str, Any], left_out: Counter[str]
) -> bytes | Unfit | None:
    """The feature with what it did not say itself, and as the mapping wants it; None where no rule fits."""
    try:
        value = loads(raw)
    except JsonError:
        return raw  # its own fault, which ingest names
    if not isinstance(value, dict):
        return raw
    feature = cast("dict[str, Any]", value)
    for name, default in defaults.items():
        if feature.get(name) is None:
            feature[name] = default
    fault: Refused | None = None
    if mapping is not None:
        properties = feature.get("properties")
        values: dict[str, Any] = cast("dict[str, Any]", properties) if isinstance(properties, dict) else {}
        geometry = feature.get("geometry")
        kind = cast("dict[str, Any]", geometry).get("type") if isinstance(geometry, dict) else None
        rule = mapping.rule(values, kinds_of_type(kind if isinstance(kind, str) else None))
        if rule is None:
            left_out["no rule fits"] += 1
            return None
        if rule.layer is not None:
            feature["layer"] = rule.layer
        if mapping.version is not None and values.get(mapping.version) is not None:
            feature["version"] = values[mapping.version]
        if mapping.id is not None:
            try:
                feature["id"] = own_id(values.get(mapping.id), mapping.id)
            except Refused as refusal:
                fault = refusal
        feature["properties"] = rule.properties(values)
    try:
        shaped = canonical(feature).encode()
    except JsonError:
        shaped = raw
    return shaped if fault is None else Unfit(shaped, fault)


def _crs(path: Path, declared: Any) -> str | None:
    """The collection's `crs` member (GeoJSON 2008) as a name."""
    if declared is None:
        return None
    from geo_assets.events.crs import crs_name

    try:
        return crs_name(declared)
    except Refused as fault:
        raise ReadingError(f"{path}: {_line(fault)}") from fault


def _line(fault: Refused) -> str:
    return " ".join(str(fault).split())
