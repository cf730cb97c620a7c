"""The sample: central Helsinki from OpenStreetMap, imported once, with a building to edit."""

from __future__ import annotations

import json
import shlex
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import resources as packaged
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shapely

from geo_assets.events.models import FenceEvent
from geo_assets.services.event_records import event_record
from geo_assets.services.importer import Imported, import_reading
from geo_assets.services.reading.reading import Reading, Unfit
from geo_assets.stack import Stack

if TYPE_CHECKING:
    from geo_assets.settings import Settings
    from resources.feature_store.protocol import Feature

MOVED = "Moved by an edit"

BUILDING = "sample-building"
"""Ledger value: feature id of the building that the ready-made edit moves."""

IMPORTED = "sample-imported"
"""Ledger value: id of the manifest of the sample's import."""

FENCED = "sample-fences"
"""Ledger value: that the sample's fences are here, as features of a layer (`drawn`) or on [fences] alone (`sent`)."""

FENCES = "fences.geojson"

EAST = (0.0009, 0.0)
"""How far the ready-made edit moves its building: lon, lat in degrees, some fifty metres."""

DEFAULT_EDGE = "http://127.0.0.1:8787"
"""Where `geo-assets post` sends to in a terminal without settings."""

CENTRE = (24.9441, 60.1690)
"""Lon, lat of the middle of the sample, degrees: near Helsinki's central railway station."""


def folder() -> Path:
    """Where the sample's files are."""
    return Path(str(packaged.files("geo_assets").joinpath("sample")))


def ensure(settings: Settings, say: Callable[[str], None], stop: threading.Event) -> None:
    """Import the sample's features and fences, if that was not done yet."""
    with Stack(settings) as stack:
        fresh = stack.ledger.get_value(IMPORTED) is None
        if fresh:
            say("importing central Helsinki (© OpenStreetMap contributors, ODbL)")
        elif stack.ledger.get_value(FENCED) is not None:
            _write_edit(stack, settings)
            return
        drawn = any(layer.fences for layer in stack.layers.layers)
        readings = [_city()] if fresh else []
        if drawn:
            readings.append(_fences())
        else:
            # A home whose layers were written before there were fences among them.
            send_fences(stack)
        if readings:
            source = next(iter(stack.sources.values()))
            done = import_reading(stack, _joined(readings), source, stop=stop)
            if stop.is_set():
                return
            if fresh:
                stack.ledger.set_value(IMPORTED, done.manifest.id if done.manifest is not None else "")
            say(summary(done))
        stack.ledger.set_value(FENCED, "drawn" if drawn else "sent")
        _write_edit(stack, settings)


def _city() -> Reading:
    from geo_assets.services.reading import open_file
    from geo_assets.services.reading.mapping import load_mapping

    return open_file(folder() / "helsinki.osm.pbf", load_mapping(folder() / "mapping.yaml"))


def _fences() -> Reading:
    from geo_assets.services.reading import open_file

    return open_file(folder() / FENCES)


def _joined(readings: Sequence[Reading]) -> Reading:
    """One after the other, so that each tile is built once for all of them; coordinates are lon/lat in each."""

    def read(left_out: Counter[str]) -> Iterator[bytes | Unfit]:
        for reading in readings:
            yield from reading.read(left_out)

    return replace(readings[0], total=None, read=read)


def send_fences(stack: Stack) -> int:
    """Send the sample's fences, as their source would through the edge; how many.

    Their version is 1: what people made of them since is newer, and stays.
    """
    source = next(iter(stack.sources))
    features = json.loads((folder() / FENCES).read_text(encoding="utf-8"))["features"]
    now_ms = time.time_ns() // 1_000_000
    stack.log.append(
        [
            event_record(
                FenceEvent.model_validate(feature),
                source=source,
                event_id=f"sample-fence-{feature['id']}",
                received_ms=now_ms,
            )
            for feature in features
        ]
    )
    return len(features)


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
    home = [] if settings.home == Path(".geo_assets").absolute() else ["--home", _short(settings.home)]
    # Another terminal has not the ports that this process was given.
    url = [] if settings.edge_url == DEFAULT_EDGE else ["--url", settings.edge_url]
    shown = [_short(program), *home, "post", *url, _short(path)]
    return shlex.join(shown)


def _short(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _write_edit(stack: Stack, settings: Settings) -> None:
    """An edit that moves a building near the middle some fifty metres to the east, or back, as a file to post."""
    building = _building(stack)
    if building is None or building.geometry is None:
        return
    properties: dict[str, Any] = json.loads(building.properties)
    moved = properties.get("name") == MOVED
    shift = (-EAST[0], EAST[1]) if moved else EAST
    geometry = shapely.transform(shapely.from_wkb(building.geometry), lambda xy: xy + shift)
    feature = {
        "type": "Feature",
        "id": json.loads(building.feature_id),
        "version": building.version + 1,
        "action": "update",
        "layer": building.layer,
        "geometry": json.loads(shapely.to_geojson(geometry) or "null"),
        "properties": {**properties, "name": "Moved back by an edit" if moved else MOVED},
    }
    edit_file(settings).write_text(json.dumps(feature, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _building(stack: Stack) -> Feature | None:
    """The building of the ready-made edit: the largest simple one near the middle, the same at every start."""
    source = next(iter(stack.sources))
    known = stack.ledger.get_value(BUILDING)
    if known is not None:
        return stack.features.get(source, known)
    lon, lat = CENTRE
    box = (lon - 0.004, lat - 0.002, lon + 0.004, lat + 0.002)
    best: tuple[float, Feature] | None = None
    for feature in stack.features.scan(source=source, layer="buildings", bbox=box):
        if feature.geometry is not None and feature.vertex_count <= 60:
            area = float(shapely.area(shapely.from_wkb(feature.geometry)))
            if best is None or (area, feature.feature_id) > (best[0], best[1].feature_id):
                best = area, feature
    if best is None:
        return None
    stack.ledger.set_value(BUILDING, best[1].feature_id)
    return best[1]
