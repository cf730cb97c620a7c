"""A small published map for tests of the tile server: embedded adapters, tiles put and announced as builds do it."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from geo_assets import ports
from geo_assets.services.announce import announcement
from geo_assets.services.tileserver import Options, create_app
from geo_assets.settings import Settings
from geo_assets.tiles.layers import Layer, LayerSet
from geo_assets.tiles.tile import Tile
from geo_assets.tiles.workkey import compress, tile_hash
from geo_assets_tests.services.running import running
from geo_assets_tests.waiting import patient
from resources.ledger.protocol import Commit

LAYERS = LayerSet(
    (
        Layer("landuse", attributes=("class", "name")),
        Layer("roads", min_zoom=11, description="Streets."),
        Layer("buildings", min_zoom=13),
        Layer("manholes", min_zoom=15),
    ),
    max_zoom=18,
    attribution="© the mappers",
)
HERE = Tile(14, 9327, 4739)


class TileWorld:
    """A ledger, a store and a log, and what builds do to them."""

    def __init__(self, home: Path, layers: LayerSet = LAYERS, **settings: Any) -> None:
        self.settings = Settings(home=home, **settings)
        self.layers = layers
        home.mkdir(parents=True, exist_ok=True)
        self.ledger = ports.open_ledger(self.settings)
        self.tiles = ports.open_tile_store(self.settings)
        self.log = ports.open_log(self.settings)

    def publish(self, tile: Tile, data: bytes | None, *, tell: bool = True, put: bool = True) -> int:
        """Commit the tile's next revision (None empties it), announce it, and give the revision."""
        before = self.ledger.read([tile.key])[tile.key]
        content_hash = None if data is None else tile_hash(data)
        if data is not None and put:
            name = f"{tile.path}/{before.revision + 1}-{content_hash[:16]}"
            self.tiles.put(ports.tile_object(name), compress(data))
        commit = Commit(
            tile.key, before.revision, before.wanted, "0" * 16, content_hash, len(data or b""), 0,
            "emptied" if data is None else "built", duties=("announce",),
        )  # fmt: skip
        (owed,) = self.ledger.commit([commit])[tile.key]
        if tell:
            self.log.append([announcement(owed)])
        self.ledger.pay([owed.id])
        return before.revision + 1

    def object_name(self, tile: Tile) -> str:
        """The current object's name in the store."""
        name = self.ledger.read([tile.key])[tile.key].object_name
        assert name is not None
        return ports.tile_object(name)

    @contextmanager
    def served(self, **options: Any) -> Iterator[httpx.Client]:
        """A client of a real server of this map."""
        app = create_app(self.ledger, self.tiles, self.log, self.layers, self.settings, Options(**options))
        with (
            running(app, on_stop=app.state.end_streams) as url,
            httpx.Client(base_url=url, timeout=patient(30)) as client,
        ):
            yield client

    def close(self) -> None:
        for port in (self.ledger, self.tiles, self.log):
            port.close()


class Event(dict[str, Any]):
    """A server-sent event: `event`, `id`, `data`, `retry` where they were sent, `: ` for a comment."""

    @property
    def tile(self) -> str:
        body = json.loads(self["data"])
        return f"{body['z']}/{body['x']}/{body['y']}"

    @property
    def body(self) -> Any:
        return json.loads(self["data"])


class Stream:
    """An open stream, read in a thread: the change stream unless another path is named."""

    def __init__(
        self, client: httpx.Client, resume: str | None = None, path: str = "/events", **parameters: Any
    ) -> None:
        self._events: queue.Queue[Event | None] = queue.Queue()
        self._opened: queue.Queue[httpx.Response | Exception] = queue.Queue()
        headers = {} if resume is None else {"Last-Event-ID": resume}
        self._arguments = (client.base_url.join(path), parameters, headers)
        self.id: str | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        opened = self._opened.get(timeout=patient(30))
        if isinstance(opened, Exception):
            raise opened
        self.response = opened

    def _read(self) -> None:
        url, parameters, headers = self._arguments
        try:
            with httpx.stream("GET", url, params=parameters, headers=headers, timeout=patient(30)) as response:
                self._opened.put(response)
                event = Event()
                for line in response.iter_lines():
                    if line:
                        name, _, value = line.partition(":")
                        event[name or ":"] = value.removeprefix(" ")
                    else:
                        self._events.put(event)
                        event = Event()
        except Exception as error:
            self._opened.put(error)
        finally:
            self._events.put(None)

    def next(self) -> Event | None:
        """The next event that says something (data or a heartbeat); None at the end of the stream."""
        while True:
            event = self._events.get(timeout=patient(30))
            if event is None:
                return None
            self.id = event.get("id", self.id)
            if "data" in event or ":" in event:
                return event

    def changes(self, number: int) -> list[Event]:
        """The next so many changes."""
        found: list[Event] = []
        while len(found) < number:
            event = self.next()
            assert event is not None, "the stream ended"
            if "data" in event:
                found.append(event)
        return found

    def started(self) -> Stream:
        """Wait for the point from which the stream is live."""
        while True:
            event = self._events.get(timeout=patient(30))
            assert event is not None
            self.id = event.get("id", self.id)
            if "id" in event and "data" not in event:
                return self

    def named(self, name: str) -> Any:
        """The body of the next event of a name."""
        while True:
            event = self._events.get(timeout=patient(30))
            assert event is not None, "the stream ended"
            if event.get("event") == name:
                return event.body

    def silent(self, seconds: float = 0.3) -> bool:
        """Whether no change comes for a while."""
        try:
            while True:
                event = self._events.get(timeout=seconds)
                if event is None or "data" in event:
                    return False
        except queue.Empty:
            return True
