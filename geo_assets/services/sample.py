"""The sample: central Helsinki from OpenStreetMap, imported once, with a building to edit."""

from __future__ import annotations

import json
import shlex
import sys
import threading
from collections.abc import Callable
from importlib import resources as packaged
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geo_assets.services.importer import Imported, import_reading
from geo_assets.stack import Stack

if TYPE_CHECKING:
    from geo_assets.settings import Settings
    from resources.feature_store.protocol import Feature

IMPORTED = "sample-imported"
"""Ledger value: id of the manifest of the sample's import."""

EAST = (0.0009, 0.0)
"""How far the ready-made edit moves its building: lon, lat in degrees, some fifty metres."""

CENTRE = (24.9441, 60.1690)
"""Lon, lat of the middle of the sample, degrees: near Helsinki's central railway station."""


def folder() -> Path:
    """Where the sample's files are."""
    return Path(str(packaged.files("geo_assets").joinpath("sample")))


def ensure(settings: Settings, say: Callable[[str], None], stop: threading.Event) -> None:
    """Import the sample if that was not done yet."""
    from geo_assets.services.reading import open_file
    from geo_assets.services.reading.mapping import load_mapping

    with Stack(settings) as stack:
        if stack.ledger.get_value(IMPORTED) is not None:
            return
        say("importing central Helsinki (© OpenStreetMap contributors, ODbL)")
        reading = open_file(folder() / "helsinki.osm.pbf", load_mapping(folder() / "mapping.yaml"))
        source = next(iter(stack.sources.values()))
        done = import_reading(stack, reading, source, stop=stop)
        if stop.is_set():
            return
        stack.ledger.set_value(IMPORTED, done.manifest.id if done.manifest is not None else "")
        say(summary(done))
        _write_edit(stack, settings)


def summary(done: Imported) -> str:
    """One line about an import."""
    parts = [f"{done.changed:,} of {done.read:,} features are new or changed"]
    parts += [f"{count:,} {outcome}" for outcome, count in done.outcomes.items() if outcome != "applied"]
    parts += [f"{count:,} refused ({reason})" for reason, count in done.refused.items()]
    if done.manifest is not None:
        parts.append(f"{done.manifest.tiles:,} tiles to build")
    return ", ".join(parts)


def progress(settings: Settings, say: Callable[[str], None]) -> bool:
    """Say how far the tiles of the newest import are; whether they are all there."""
    with Stack(settings) as stack:
        manifest_id = stack.ledger.get_value(IMPORTED)
        if not manifest_id:
            return True
        now = stack.ledger.progress(manifest_id)
        say(f"tiles built by Dagster: {now.done:,} of {now.tiles:,}")
        return now.done + now.failed >= now.tiles


def edit_file(settings: Settings) -> Path:
    """The ready-made edit."""
    return settings.home / "edit-a-building.geojson"


def edit_command(settings: Settings) -> str | None:
    """One command that edits a building, ready to paste; None when the sample is not here."""
    path = edit_file(settings)
    if not path.exists():
        return None
    program = Path(sys.executable).with_name("geo-assets")
    shown = [_short(program), "--home", _short(settings.home), "post", _short(path)]
    return shlex.join(shown)


def _short(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _write_edit(stack: Stack, settings: Settings) -> None:
    """An edit that moves a building near the middle some fifty metres to the east, as a file to post."""
    import shapely

    lon, lat = CENTRE
    box = (lon - 0.004, lat - 0.002, lon + 0.004, lat + 0.002)
    found: list[Feature] = [
        f for f in stack.features.scan(layer="buildings", bbox=box) if f.geometry and f.vertex_count <= 60
    ]
    if not found:
        return
    chosen = max(found, key=lambda f: (shapely.from_wkb(f.geometry).area, f.feature_id))
    moved = shapely.transform(shapely.from_wkb(chosen.geometry), lambda xy: xy + EAST)
    properties: dict[str, Any] = {**json.loads(chosen.properties), "name": "Moved by an edit"}
    feature = {
        "type": "Feature",
        "id": json.loads(chosen.feature_id),
        "version": chosen.version + 1,
        "action": "update",
        "layer": "buildings",
        "geometry": json.loads(shapely.to_geojson(moved)),
        "properties": properties,
    }
    edit_file(settings).write_text(json.dumps(feature, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
