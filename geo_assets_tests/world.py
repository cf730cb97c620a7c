"""A small world for tests: every port for real in a temporary home, and short ways to edit, ingest and build."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import shapely

from geo_assets.events import topics
from geo_assets.ports import tile_object
from geo_assets.services.build import TileBuilder, TileResult
from geo_assets.services.hints import read_slice
from geo_assets.services.ingest import Ingest, Outcome
from geo_assets.settings import Settings
from geo_assets.stack import Stack
from geo_assets.tiles.tile import Tile
from geo_assets_tests.waiting import until
from resources.event_log.protocol import NewRecord, Record
from resources.ledger.protocol import TileState

LAYERS = """
max_zoom: 16
layers:
  - {name: buildings, min_zoom: 12, min_pixels: 0}
  - {name: pois, min_zoom: 10}
"""

SOURCES = """
sources:
  city:
    secrets: [whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw]
    default_crs: EPSG:4326
    default_layer: buildings
"""

HERE = (24.9441, 60.1690)
"""Lon, lat in degrees where the tests' buildings stand."""


def settings_for(home: Path, /, **changes: Any) -> Settings:
    """Settings of a home with two layers and the source `city`."""
    home.mkdir(parents=True, exist_ok=True)
    for name, text in (("layers.yaml", LAYERS), ("sources.yaml", SOURCES)):
        if not (home / name).exists():
            (home / name).write_text(text)
    values: dict[str, Any] = {"log_partitions": 2, "ingest_workers": 1, "build_workers": 1, **changes, "home": home}
    return Settings(**values)


def feature(
    number: int | str = 1,
    version: int = 1,
    *,
    at: tuple[float, float] = HERE,
    size: float = 0.0004,
    layer: str = "buildings",
    **properties: Any,
) -> dict[str, Any]:
    """A square building, `size` degrees a side, whose south-west corner is `at` (lon, lat)."""
    lon, lat = at
    ring = [[lon, lat], [lon + size, lat], [lon + size, lat + size / 2], [lon, lat + size / 2], [lon, lat]]
    return {
        "type": "Feature",
        "id": number,
        "version": version,
        "layer": layer,
        "geometry": {"type": "Polygon", "coordinates": [ring]},
        "properties": {"version": version, **properties},
    }


class World:
    """Everything in one process: edits go in, tiles come out."""

    def __init__(self, home: Path, /, **changes: Any) -> None:
        self.settings = settings_for(home, **changes)
        self.stack = Stack(self.settings).ensure()
        self._ingest: Ingest | None = None
        self.races = 0

    def close(self) -> None:
        if self._ingest is not None:
            self._ingest.close()
        self.stack.close()

    @property
    def ingest(self) -> Ingest:
        if self._ingest is None:
            self._ingest = Ingest(self.stack)
        return self._ingest

    # -- in ----------------------------------------------------------------------------------------------------------
    def send(self, body: Any, *, event_id: str | None = None, source: str = "city", **headers: str) -> Record:
        """Put a body into `[raw]`, as the edge would."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {
            topics.HEADER_SOURCE: source,
            topics.HEADER_KIND: "features",
            **{k.replace("_", "-"): v for k, v in headers.items()},
        }
        if event_id is not None:
            named[topics.HEADER_EVENT_ID] = event_id
        (position,) = self.stack.log.append([NewRecord(topics.RAW, f"{source}:{event_id}", data, named)])
        (record,) = self.stack.log.read(topics.RAW, position.partition, position.offset, 1)
        return record

    def edit(self, body: Any, **more: Any) -> Outcome:
        """Send a body and ingest it; what became of it."""
        record = self.send(body, **more)
        (outcome,) = self.ingest.work([record])
        return outcome

    def retention_takes(self, topic: str) -> None:
        """Everything that a topic holds now is past its retention."""
        log, servers = self.stack.log, self.settings.kafka_servers
        if servers is None:
            log.enforce_retention(now_ms=2**50)
            return
        from confluent_kafka import TopicPartition
        from confluent_kafka.admin import AdminClient

        name = self.settings.kafka_topic_prefix + topic
        ends = [TopicPartition(name, partition, extent.end) for partition, extent in log.extents(topic).items()]
        admin = AdminClient({"bootstrap.servers": servers})  # Kept: what it promised never comes once it is gone.
        for deleted in admin.delete_records(ends).values():
            deleted.result()

    # -- between -----------------------------------------------------------------------------------------------------
    def mark_hints(self) -> int:
        """What the sensor does first: raise the marks of the hints in the log."""
        log, ledger = self.stack.log, self.stack.ledger
        counted = 0
        for topic in topics.TILE_HINTS:
            topic_id = log.topic_id(topic)
            positions = ledger.positions(topic_id)
            for partition, extent in log.extents(topic).items():
                start = positions.get(partition, extent.begin)
                while records := log.read(topic, partition, start, 5_000):
                    part = read_slice(records, start)
                    start = part.next_offset
                    counted += ledger.mark_from_log(topic_id, partition, part.hints, start)
        return counted

    def build_dirty(self, **more: Any) -> list[TileResult]:
        """Mark and build until nothing is dirty; every result."""
        self.mark_hints()
        results: list[TileResult] = []
        with TileBuilder(self.stack, "tests", inline=True, **more) as builder:
            while dirty := self.stack.ledger.dirty(10_000, unleased=False):
                results.extend(builder.build([state.key for state in dirty]))
        return results

    # -- out ---------------------------------------------------------------------------------------------------------
    def state(self, key: str) -> TileState:
        """The ledger's row of a tile."""
        return self.stack.ledger.read([key])[key]

    def tile(self, key: str) -> bytes:
        """The uncompressed bytes that the tile server would serve; empty where there is no object."""
        name = self.state(key).object_name
        if name is None:
            return b""
        stored = self.stack.tiles.get(tile_object(name))
        assert stored is not None, f"the ledger names {name}, and it is not there"
        return gzip.decompress(stored)

    def properties(self, key: str, layer: str = "buildings") -> list[dict[str, Any]]:
        """Attributes of a layer's features in a tile as served."""
        from geo_assets.tiles.decode import decode

        data = self.tile(key)
        return [dict(f.properties) for one in decode(data) if one.name == layer for f in one.features] if data else []

    def published(self) -> dict[str, TileState]:
        """Every tile that has an object, by key."""
        return {state.key: state for state in self.stack.ledger.scan()}

    def announced(self) -> list[dict[str, Any]]:
        """Every announcement in the log."""
        from geo_assets.services.dead_letters import scan_topic

        return [json.loads(r.value or b"{}") for r in scan_topic(self.stack.log, topics.TILE_UPDATED)]

    def letters(self) -> list[Any]:
        """Every dead letter in the log."""
        from geo_assets.services.dead_letters import list_dead_letters

        return [one.letter for one in list_dead_letters(self.stack.log)]


def work_off(world: World, ingest: Ingest | None = None) -> None:
    """Let ingest work until it has committed the end of the log: with a broker, a moment of nothing is no end.

    Args:
        world: Where.
        ingest: Which; the world's own where it is None.
    """

    def at_the_end() -> bool:
        (ingest or world.ingest).run_once(timeout_s=0.2)
        committed = world.stack.log.committed(topics.INGEST_GROUP, topics.RAW)
        return all(committed.get(p, 0) >= e.end for p, e in world.stack.log.extents(topics.RAW).items() if e.end)

    until(at_the_end, why="ingest has committed the end of the log")


def tiles_touched(geometries: Iterable[Any], zooms: Sequence[int], buffer: float) -> set[str]:
    """Brute force: every tile near the geometries whose buffered box one of them meets (EPSG:3857, closed boxes)."""
    from geo_assets.tiles.zooms import to_mercator

    touched: set[str] = set()
    for geometry in geometries:
        drawn = shapely.transform(
            shapely.geometry.shape(geometry) if isinstance(geometry, dict) else geometry, to_mercator
        )
        west, south, east, north = drawn.bounds
        for zoom in zooms:
            side = 2 * 20037508.342789244 / 2**zoom
            first_x, last_x = int((west + 20037508.342789244) // side) - 1, int((east + 20037508.342789244) // side) + 1
            first_y, last_y = (
                int((20037508.342789244 - north) // side) - 1,
                int((20037508.342789244 - south) // side) + 1,
            )
            for x in range(max(0, first_x), min(2**zoom - 1, last_x) + 1):
                for y in range(max(0, first_y), min(2**zoom - 1, last_y) + 1):
                    tile = Tile(zoom, x, y)
                    w, s, e, n = tile.bounds_3857
                    grown = shapely.box(w - buffer * side, s - buffer * side, e + buffer * side, n + buffer * side)
                    if shapely.intersects(drawn, grown):
                        touched.add(tile.key)
    return touched
