"""The job `shadow_diff`: what another recipe or other libraries would change. A thin shell over services/shadow.py."""

import base64
import json
from pathlib import Path
from typing import Any

from dagster import (
    Config,
    Failure,
    MetadataValue,
    OpExecutionContext,
    Output,
    in_process_executor,
    job,
    op,
)
from pydantic import Field

from geo_assets.assets.stack_resource import StackResource
from geo_assets.assets.tileset import text_table
from geo_assets.configuration import ConfigurationError
from geo_assets.services.regions import RegionError
from geo_assets.services.shadow import Report, ShadowError, facts_of, shadow, svg_of
from geo_assets.services.tileset.regions import region_of

SHOWN = 50
"""Rows of the table of tiles; the report in the tile store has all."""

PICTURE_BYTES = 250_000
"""Most bytes of the picture in a run's metadata, which Dagster keeps in its event log; base64 adds a third."""


class ShadowConfig(Config):
    """What to compare. With no field set: 500 tiles of the map, as published and as this process would build them."""

    layers_file: str = Field(default="", description="YAML with other layers, on the machine of the code server.")
    engine: str = Field(default="", description="Another engine: numpy or st_asmvt.")
    python: str = Field(default="", description="Interpreter with other libraries, such as /opt/next/bin/python.")
    bbox: str = Field(default="", description="Region: west,south,east,north in degrees. With none, the whole map.")
    geojson: str = Field(default="", description="Region: GeoJSON text with polygons, EPSG:4326.")
    file: str = Field(default="", description="Region: GeoJSON file, on the machine of the code server.")
    h3: list[str] = Field(default=[], description="Region: H3 cells, such as 891126d3623ffff.")
    feature: str = Field(
        default="", description="Region: a polygon of the feature store: SOURCE:ID, or LAYER/ATTRIBUTE=VALUE."
    )
    zooms: str = Field(default="", description="Zooms, such as 12-16; empty: all that the layers are built for.")
    sample: int = Field(default=500, ge=0, description="So many tiles of it; 0: all of a region.")
    worst: int = Field(default=3, ge=0, le=12, description="Tiles in the picture.")
    cap: int = Field(default=0, ge=0, description="Tiles a region may have; 0: GEO_ASSETS_MANIFEST_CAP.")
    fail_on_difference: bool = Field(default=False, description="Fail the run where any tile differs.")


def metadata_of(report: Report, worst: int) -> dict[str, Any]:
    """What the run shows: numbers, a table of what differs, and the worst tiles as a picture."""
    result: dict[str, Any] = {
        "differing_tiles": len(report.differing),
        "tiles": report.tiles,
        "out_of_date": report.out_of_date,
        "bytes_before": report.before_bytes,
        "bytes_after": report.after_bytes,
        "features_left_out": len(report.left_out),
        "rules_broken": len(report.faults),
        "seconds": round(report.seconds, 2),
        "compared": text_table(("what", "is"), facts_of(report)),
        "shadow": report.prefix or "",
    }
    if report.differing:
        rows = [
            (
                one.tile,
                "; ".join(
                    f"{layer} +{kinds['added']} -{kinds['removed']} ~{kinds['changed']}"
                    for layer, kinds in one.layers.items()
                )
                or "; ".join(one.notes),
                f"{one.before_bytes:,} → {one.after_bytes:,}",
                f"{(one.before_hash or 'empty')[:12]} → {(one.after_hash or 'empty')[:12]}",
                one.map,
            )
            for one in report.differing[:SHOWN]
        ]
        result["differing"] = text_table(("tile", "features", "bytes", "hash", "map"), rows)
        drawn = svg_of(report, most=worst, limit_bytes=PICTURE_BYTES) if worst else None
        if drawn is not None:
            encoded = base64.b64encode(drawn.encode()).decode()
            result["worst"] = MetadataValue.md(f"![before, after, difference](data:image/svg+xml;base64,{encoded})")
        first = report.differing[0]
        result["worst_changes"] = MetadataValue.md(f"`{first.tile}`\n```\n{json.dumps(first.changes, indent=1)}\n```")
    return result


@op(description="Builds tiles by another recipe beside the map, and compares them with the map's.")
def compare_shadow(context: OpExecutionContext, config: ShadowConfig, stack: StackResource) -> Output[int]:
    """Compare; how many tiles differ."""
    with stack.opened() as opened:
        try:
            region = region_of(
                opened,
                region=Path(config.file) if config.file else None,
                geojson=config.geojson or None,
                bbox=config.bbox or None,
                cells=config.h3,
                feature=config.feature or None,
                zooms=config.zooms or None,
                cap=config.cap or None,
            )
            report = shadow(
                opened,
                region,
                sample=config.sample or None,
                layers_file=Path(config.layers_file) if config.layers_file else None,
                engine=config.engine or None,
                python=Path(config.python) if config.python else None,
                worst=max(config.worst, 1),
            )
        except (ShadowError, RegionError, ConfigurationError) as fault:
            raise Failure(str(fault), allow_retries=False) from None
    metadata = metadata_of(report, config.worst)
    context.log.info(report.summary())
    if report.differs and config.fail_on_difference:
        raise Failure(report.summary(), metadata=metadata, allow_retries=False)
    return Output(len(report.differing), metadata=metadata)


@job(
    name="shadow_diff",
    executor_def=in_process_executor,
    description="Builds a sample or a region by another recipe, engine or interpreter, and tells what would change.",
)
def shadow_diff() -> None:
    """One step: build and compare."""
    compare_shadow()
