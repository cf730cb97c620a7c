"""Edits of the sample: buildings that move back and forth, so that tiles have work too."""

from __future__ import annotations

import json
import threading
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import shapely

from geo_assets.events.signature import sign
from geo_assets.services.sample import BUILDING, CENTRE
from geo_assets.services.simulate.sending import problem_of
from geo_assets.services.simulate.tally import SimulationError, Tally

if TYPE_CHECKING:
    import httpx

    from geo_assets.events.sources import Source
    from geo_assets.stack import Stack
    from resources.feature_store.protocol import Feature

BUILDINGS = 50
"""Buildings that move, so that edits in a row are of other tiles."""

STEP = (0.0002, 0.0)
"""Lon, lat in degrees, eleven metres: enough to see at zoom 16."""

MARK = "simulated_move"
"""Property of a building that has been moved: whoever finds it so knows where it belongs."""


@dataclass(slots=True)
class _Building:
    id: Any
    layer: str
    version: int
    properties: dict[str, Any]
    home: Any
    moved: bool


def find_buildings(stack: Stack, source: str) -> list[_Building]:
    """Simple buildings around the middle of the sample; not the one of the ready-made edit.

    Raises:
        SimulationError: There is none.
    """
    lon, lat = CENTRE
    box = (lon - 0.006, lat - 0.004, lon + 0.006, lat + 0.004)
    kept = stack.ledger.get_value(BUILDING)
    found: list[_Building] = []
    for feature in stack.features.scan(source=source, layer="buildings", bbox=box):
        if feature.geometry is not None and feature.vertex_count <= 60 and feature.feature_id != kept:
            found.append(_building(feature))
            if len(found) == BUILDINGS:
                break
    if not found:
        raise SimulationError(
            f"the source {source} has no buildings in central Helsinki to move; `geo-assets up --sample` brings them"
        )
    return found


def _building(feature: Feature) -> _Building:
    properties: dict[str, Any] = json.loads(feature.properties)
    moved = properties.pop(MARK, None) is not None
    shape = shapely.from_wkb(feature.geometry)
    if moved:
        shape = shapely.transform(shape, lambda points: points - STEP)
    return _Building(json.loads(feature.feature_id), feature.layer, feature.version, properties, shape, moved)


class Edits:
    """Posts an edit when one is due, one after the other; at the end every building is back where it was.

    Args:
        url: Of the edge.
        source: Who signs.
        buildings: Of `find_buildings`.
        rate_s: Edits a second.
        tally: Where they are counted.
    """

    def __init__(self, url: str, source: Source, buildings: list[_Building], rate_s: float, tally: Tally) -> None:
        self._url, self._source, self._tally = url.rstrip("/"), source, tally
        self._buildings, self._rate_s = buildings, rate_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="simulate-edits", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and move back what is moved."""
        self._stop.set()
        self._thread.join(timeout=30.0)

    def _run(self) -> None:
        import httpx

        began, posted = time.monotonic(), 0
        with httpx.Client(timeout=35.0, trust_env=False) as client:
            while not self._stop.is_set():
                due = int((time.monotonic() - began) * self._rate_s)
                if posted >= due:
                    self._stop.wait(min(0.5, (posted + 1) / self._rate_s - (time.monotonic() - began)))
                    continue
                self._move(client, self._buildings[posted % len(self._buildings)])
                posted += 1
            for building in self._buildings:
                if building.moved:
                    self._move(client, building)

    def _move(self, client: httpx.Client, building: _Building) -> None:
        import httpx

        building.version += 1
        moved = not building.moved
        shape = shapely.transform(building.home, lambda points: points + STEP) if moved else building.home
        body = json.dumps(
            {
                "type": "Feature",
                "id": building.id,
                "version": building.version,
                "action": "update",
                "layer": building.layer,
                "geometry": json.loads(shapely.to_geojson(shape)),
                "properties": building.properties | ({MARK: True} if moved else {}),
            }
        ).encode()
        headers = {"content-type": "application/geo+json", "x-source": self._source.name}
        headers |= sign(self._source.secrets[0], f"simulate-{uuid.uuid4().hex}", int(time.time()), body)
        self._tally.add("edits due")
        try:
            answer = client.post(f"{self._url}/v1/features", content=body, headers=headers)
        except httpx.TransportError as fault:
            self._tally.answered("unreachable")
            self._tally.problem = f"edge {self._url} cannot be reached: {fault}"
            return
        self._tally.answered(answer.status_code)
        if answer.status_code == 202:
            building.moved = moved
            self._tally.add("edits taken")
        else:
            self._tally.add("edits refused")
            self._tally.problem = problem_of(answer)
