"""The tile server's routes: each handler parses a request, asks one of the neighbouring modules, and answers."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import msgspec
import structlog
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from geo_assets import configuration, ports
from geo_assets.services import http_server, problems
from geo_assets.services.purging import tile_path
from geo_assets.services.tileserver import api, coverage, models, style
from geo_assets.services.tileserver.drawing import Drawing, can_draw, layer_of
from geo_assets.services.tileserver.fences import MOST_FENCES, FenceMap
from geo_assets.services.tileserver.heat import HOUR_MINUTES, HeatMap
from geo_assets.services.tileserver.http import (
    IMMUTABLE,
    REVALIDATE,
    SHARED,
    SHARED_EMPTY,
    Envelope,
    accepts_gzip,
    conditional,
    etag_matches,
)
from geo_assets.services.tileserver.live import LiveHub, TooManyOfOne, Wanted
from geo_assets.services.tileserver.metrics import MEDIA_TYPE as METRICS_TYPE
from geo_assets.services.tileserver.metrics import Metrics
from geo_assets.services.tileserver.private import SameOrigin
from geo_assets.services.tileserver.published import PublishedTilesets
from geo_assets.services.tileserver.serving import IntegrityFault, TileReader, entity_tag
from geo_assets.services.tileserver.static import INSTALL, PAGE, VENDOR, StaticFiles
from geo_assets.services.tileserver.stream import ChangeHub, Filter, NotReady, TooManyClients
from geo_assets.services.tileserver.waiting import WaitingMap
from geo_assets.tiles.tile import MAX_ZOOM, Box, Tile, TileError
from resources.event_log.protocol import LogError
from resources.ledger.protocol import LedgerError
from resources.tile_store.protocol import TileStoreError

if TYPE_CHECKING:
    from geo_assets.events.sources import Source
    from geo_assets.settings import Settings
    from geo_assets.tiles.layers import LayerSet
    from resources.event_log.protocol import EventLog
    from resources.ledger.protocol import Ledger
    from resources.tile_store.protocol import TileStore

MVT: Final = "application/vnd.mapbox-vector-tile"
JSON: Final = "application/json"
GEOJSON: Final = "application/geo+json"
SAVE: Final = "/fences"
PRIVATE: Final = frozenset({"/live", SAVE})
"""What only the server's own page may ask for."""
GRACE_S: Final = 5.0
"""Seconds that a stream has to end by itself when the server stops; less than the server waits for all of them."""

_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Options:
    """How much the server takes on.

    Args:
        cache_bytes: Tile objects kept in memory: 64 MB are a few thousand tiles, a city's busy ones.
        heartbeat_s: Seconds between heartbeats of a stream: proxies close what is silent for 30 to 60.
        send_timeout_s: Longest that a client may take nothing of its stream.
        max_clients: Streams at once.
        queue_changes: Changes that may wait for one client.
        replay_records: Records that a resume may read again.
        counts_keep_s: How long the map's bounds are kept before the ledger is asked again.
        max_live_clients: Live streams at once: each costs a search of the devices that moved, three times a second.
        max_live_of_one: Of these, to one client address: nobody takes every place, and an office behind one has some.
    """

    cache_bytes: int = 64_000_000
    heartbeat_s: float = 15.0
    send_timeout_s: float = 30.0
    max_clients: int = 5_000
    queue_changes: int = 2_000
    replay_records: int = 20_000
    counts_keep_s: float = 5.0
    max_live_clients: int = 100
    max_live_of_one: int = 25


class _Stream(EventSourceResponse):
    """A change stream; a client that takes nothing for too long is let go, and comes back with its resume point."""

    def __init__(self, *args: Any, metrics: Metrics, ended: Callable[[], None] = lambda: None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._metrics, self._ended = metrics, ended

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            self._metrics.drops.inc()
            structlog.get_logger().info("stream let go", reason="the client took nothing in time")
        finally:
            self._ended()


class _TileServer:
    """What the handlers share."""

    def __init__(
        self,
        ledger: Ledger,
        tiles: TileStore,
        log: EventLog,
        layers: LayerSet,
        settings: Settings,
        options: Options,
        source: Source | None,
    ) -> None:
        self.ledger, self.store, self.layers, self.settings, self.options = ledger, tiles, layers, settings, options
        self.metrics = Metrics(ledger)
        self.reader = TileReader(ledger, tiles, self.metrics, options.cache_bytes)
        self.hub = ChangeHub(
            log,
            ledger,
            self.metrics,
            max_clients=options.max_clients,
            queue_changes=options.queue_changes,
            replay_records=options.replay_records,
        )
        self.draws = settings.takes_fences and can_draw()
        self.heat_map, self.waiting_map = HeatMap(log), WaitingMap(ledger, layers.max_zoom)
        # Whoever looks at these waits for those who look already, and never keeps tiles from being read.
        self.lookers = anyio.CapacityLimiter(2)
        self.fences = FenceMap(ledger, tiles, settings.draw_source if self.draws else None)
        self.live_hub = LiveHub(
            log,
            self.fences,
            self.metrics,
            shows_devices=settings.shows_devices,
            max_clients=options.max_live_clients,
            max_of_one=options.max_live_of_one,
        )
        self.drawing = (
            Drawing(log, self.fences, settings.draw_source, layer_of(layers, source), self.metrics)
            if self.draws
            else None
        )
        self.same_origin = SameOrigin(settings.tiles_url)
        self.files = StaticFiles()
        self.version = metadata.version("geo-assets")
        self._public_host = urlsplit(settings.tiles_url).netloc
        self._box: tuple[float, Box | None, int] = (0.0, None, 0)
        self._openapi = msgspec.json.encode(api.openapi(settings.tiles_url, self.version, layers.max_zoom))
        self.page_policy = _content_security_policy(settings)

    # -- tiles -------------------------------------------------------------------------------------------------------
    async def tile(self, request: Request) -> Response:
        tile = self._tile_of(request)
        have, gzipped = request.headers.get("if-none-match"), accepts_gzip(request.headers.get("accept-encoding"))
        served = await anyio.to_thread.run_sync(self.reader.read, tile, have, gzipped)
        state = served.state
        if state.content_hash is None:
            # Its own Cache-Control: an empty tile that a cache kept would hide the first thing drawn in it.
            kept = SHARED_EMPTY if self._is_purged(request, tile) else REVALIDATE
            return Response(status_code=204, headers={"Cache-Control": kept, "X-Tile-Revision": str(state.revision)})
        headers = self._tile_headers(request, tile, state.content_hash, state.revision)
        if served.data is None:
            return Response(status_code=304, headers=headers)
        if gzipped:
            headers["Content-Encoding"] = "gzip"
        if request.method == "GET":
            self.metrics.tile_bytes.inc(len(served.data))
        return Response(served.data, media_type=MVT, headers=headers)

    def _tile_of(self, request: Request) -> Tile:
        values: dict[str, int] = {}
        for name in ("z", "x", "y"):
            text = request.path_params[name]
            if not _NUMBER.fullmatch(text):
                raise problems.ProblemError(404, "tile", f"{name} is not a whole number.", field=name, value=text)
            values[name] = int(text)
        if values["z"] > self.layers.max_zoom:
            raise problems.ProblemError(
                404, "tile", f"Tiles end at zoom {self.layers.max_zoom}; draw them larger beyond it.",
                field="z", value=values["z"], limit=self.layers.max_zoom,
            )  # fmt: skip
        last = (1 << values["z"]) - 1
        for name in ("x", "y"):
            if values[name] > last:
                raise problems.ProblemError(
                    404,
                    "tile",
                    f"At zoom {values['z']} {name} goes from 0 to {last}.",
                    field=name,
                    value=values[name],
                    limit=last,
                )
        return Tile(values["z"], values["x"], values["y"])

    def _is_purged(self, request: Request, tile: Tile) -> bool:
        """Whether a cache that keeps the answer is told when it changes: the request's URL is, to the letter, the one.

        Any other way to write it (a query, an escaped digit, another name of the host) would be an entry that stays.
        A bare `?` at the end is the one that cannot be told from here: caches should drop it, as ours does.
        """
        asked = request.scope
        return (
            bool(self.settings.purge_urls)
            and not asked["query_string"]
            and asked.get("raw_path") == tile_path(tile).encode()
            and request.headers.get("host") == self._public_host
        )

    def _tile_headers(self, request: Request, tile: Tile, content_hash: str, revision: int) -> dict[str, str]:
        # Weak: the gzip and the plain form share it, and clients compare If-None-Match weakly anyway.
        wanted = request.query_params.get("v", "")
        named = wanted == str(revision) or (len(wanted) >= 16 and content_hash.startswith(wanted))
        kept = SHARED if self._is_purged(request, tile) else REVALIDATE
        return {
            "ETag": entity_tag(content_hash),
            "Vary": "Accept-Encoding",
            "Cache-Control": IMMUTABLE if named else kept,
            "X-Tile-Revision": str(revision),
        }

    # -- documents ---------------------------------------------------------------------------------------------------
    async def tilejson(self, request: Request) -> Response:
        box, published = await anyio.to_thread.run_sync(self._bounds)
        shown = box or coverage.WORLD
        layers = [
            models.VectorLayer(
                id=layer.name,
                description=layer.description,
                minzoom=layer.min_zoom,
                maxzoom=min(layer.max_zoom, self.layers.max_zoom),
                fields=dict.fromkeys(layer.attributes or (), "Attribute"),
            )
            for layer in self.layers.layers
        ]
        answer = models.TileJson(
            name="geo_assets",
            description="Live vector tiles.",
            version=f"{self.version}.0" if self.version.count(".") == 1 else self.version,
            tiles=[self.settings.tiles_url + "/tiles/{z}/{x}/{y}.mvt"],
            minzoom=0,
            maxzoom=self.layers.max_zoom,
            bounds=(shown.west, shown.south, shown.east, shown.north),
            center=coverage.center(shown, self.layers.max_zoom),
            attribution=self.layers.attribution,
            vector_layers=layers,
            live=models.ChangeStream(
                events=f"{self.settings.tiles_url}/events", resume=self.hub.resume_point, published=published
            ),
        )
        return _document(request, answer.model_dump_json().encode())

    def _bounds(self) -> tuple[Box | None, int]:
        """The published tiles' box, None when it is not known or there is none, and their number."""
        until, box, published = self._box
        if time.monotonic() >= until:
            counts = self.ledger.counts()
            box, published = coverage.bounds(self.ledger, counts), counts.published
            self._box = (time.monotonic() + self.options.counts_keep_s, box, published)
        return box, published

    async def style(self, request: Request) -> Response:
        # Tiles are named here, not by `url`: TileJSON's bounds say where data is now, and a map that keeps to them
        # would never ask for what is drawn outside later.
        source = {
            "type": "vector",
            "tiles": [self.settings.tiles_url + "/tiles/{z}/{x}/{y}.mvt"],
            "minzoom": 0,
            "maxzoom": self.layers.max_zoom,
            "attribution": self.layers.attribution,
        }
        return _document(request, msgspec.json.encode(style.build_style(self.layers, source)))

    async def openapi(self, request: Request) -> Response:
        return _document(request, self._openapi)

    async def page_config(self, request: Request) -> Response:
        answer = models.PageConfig(
            dagster_url=self.settings.dagster_url,
            tiles_url=self.settings.tiles_url,
            edge_url=self.settings.edge_url,
            version=self.version,
            maplibre=self.files.has_vendor,
            devices=self.settings.shows_devices,
            draw=self.draws,
            draw_source=self.settings.draw_source,
            fence_layers=[layer.name for layer in self.layers.layers if layer.fences],
            install=INSTALL,
        )
        return _document(request, answer.model_dump_json().encode())

    async def coverage(self, request: Request) -> Response:
        _only(request, "bbox", "zoom")
        if "bbox" not in request.query_params:
            raise problems.ProblemError(
                400, "parameter", "bbox is needed: west,south,east,north in degrees.", field="bbox"
            )
        box = _box(request.query_params["bbox"])
        zoom = _whole(request, "zoom", None, 0, self.layers.max_zoom)
        try:
            answer = await anyio.to_thread.run_sync(coverage.coverage, self.ledger, box, zoom)
        except coverage.TooWide as error:
            raise problems.ProblemError(
                400,
                "too-wide",
                f"The box holds {error.tiles} tiles of zoom {zoom}; ask for a smaller one, or a lower zoom.",
                field="bbox",
                value=error.tiles,
                limit=coverage.MOST_TILES,
            ) from None
        return Response(
            answer.model_dump_json(exclude_none=True), media_type=JSON, headers={"Cache-Control": "no-store"}
        )

    async def heat(self, request: Request) -> Response:
        _only(request, "bbox", "zoom", "minutes")
        zoom = _whole(request, "zoom", None, 0, MAX_ZOOM)
        minutes = _whole(request, "minutes", HOUR_MINUTES, 1, HOUR_MINUTES)
        return await self._looked_up(request, self.heat_map.collection, _wanted_box(request), zoom, minutes)

    async def waiting(self, request: Request) -> Response:
        _only(request, "bbox", "zoom")
        zoom = _whole(request, "zoom", None, 0, MAX_ZOOM)
        return await self._looked_up(request, self.waiting_map.collection, _wanted_box(request), zoom)

    async def _looked_up(self, request: Request, look: Callable[..., dict[str, Any]], *asked: Any) -> Response:
        zipped = accepts_gzip(request.headers.get("accept-encoding"))

        def encoded() -> bytes:
            body = msgspec.json.encode(look(*asked))
            return gzip.compress(body, 1, mtime=0) if zipped else body

        body = await anyio.to_thread.run_sync(encoded, limiter=self.lookers)
        headers = {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}
        return Response(
            body, media_type=GEOJSON, headers={**headers, "Content-Encoding": "gzip"} if zipped else headers
        )

    # -- changes -----------------------------------------------------------------------------------------------------
    async def events(self, request: Request) -> Response:
        _only(request, "bbox", "min_zoom", "max_zoom", "last_event_id")
        low = _whole(request, "min_zoom", 0, 0, MAX_ZOOM)
        high = _whole(request, "max_zoom", MAX_ZOOM, 0, MAX_ZOOM)
        if low > high:
            raise problems.ProblemError(
                400, "parameter", "min_zoom is above max_zoom.", field="min_zoom", value=low, limit=high
            )
        bbox = request.query_params.get("bbox")
        wanted = Filter(low, high, None if bbox is None else _box(bbox))
        resume = request.headers.get("last-event-id") or request.query_params.get("last_event_id")
        try:
            client = self.hub.client(wanted)
        except TooManyClients:
            raise problems.unavailable("Every place for a stream is taken.", 10) from None
        except NotReady:
            raise problems.unavailable("The log of changes cannot be read yet.", 2) from None

        def heartbeat() -> ServerSentEvent:
            # An id without data moves the browser's resume point past what its filter left out.
            return ServerSentEvent(comment="heartbeat", id=client.resume, sep="\n")

        return _Stream(
            self.hub.follow(client, resume),
            ping=self.options.heartbeat_s,
            ping_message_factory=heartbeat,
            send_timeout=self.options.send_timeout_s,
            sep="\n",
            # The hub ends streams properly when the server stops; the library's own way cuts them off.
            shutdown_grace_period=GRACE_S,
            metrics=self.metrics,
            headers={"Cache-Control": "no-store, no-transform"},
        )

    # -- fences and devices ------------------------------------------------------------------------------------------
    async def fence_collection(self, request: Request) -> Response:
        _only(request, "bbox", "limit")
        box = request.query_params.get("bbox")
        wanted = None if box is None else _box(box)
        limit = _whole(request, "limit", MOST_FENCES, 1, MOST_FENCES)
        headers = request.headers
        zipped = accepts_gzip(headers.get("accept-encoding"))
        body, etag = await anyio.to_thread.run_sync(
            self._collection, wanted, limit, headers.get("if-none-match"), zipped
        )
        fixed = {"Cache-Control": REVALIDATE, "ETag": etag, "Vary": "Accept-Encoding"}
        if body is None:
            return Response(status_code=304, headers=fixed)
        if zipped:
            fixed["Content-Encoding"] = "gzip"
        return Response(body, media_type=GEOJSON, headers=fixed)

    def _collection(self, box: Box | None, limit: int, have: str | None, zipped: bool) -> tuple[bytes | None, str]:
        """The body, None where the client has it, and its entity tag."""
        standing = self.fences.current()
        asked = f"{self.draws}|{box}|{limit}|{standing.name}"
        etag = f'W/"{hashlib.sha256(asked.encode()).hexdigest()[:32]}"'
        if etag_matches(have, etag):
            return None, etag
        body = standing.collection(box, limit)
        # The fastest level: a view of thousands of circles is some megabytes, and is asked for once.
        return gzip.compress(body, 1, mtime=0) if zipped else body, etag

    async def live(self, request: Request) -> Response:
        self.same_origin.check(request, writes=False)
        _only(request, "bbox", "show")
        box = request.query_params.get("bbox")
        shown = request.query_params.get("show", "fences").split(",")
        if not shown or not set(shown) <= {"fences", "devices", "triggers"}:
            raise problems.ProblemError(
                400, "parameter", "show names what to tell, separated by commas.",
                field="show", value=request.query_params.get("show"), limit="fences,devices,triggers",
            )  # fmt: skip
        personal = sorted({"devices", "triggers"} & set(shown))
        if personal and not self.settings.shows_devices:
            raise problems.ProblemError(
                403, "devices", "This server shows no devices; GEO_ASSETS_DEVICE_VIEW says whether it may.",
                field="show", value=personal[0], limit="fences",
            )  # fmt: skip
        wanted = Wanted(None if box is None else _box(box), "devices" in shown, "triggers" in shown)
        try:
            # Behind a trusted proxy it is what the proxy says.
            client = self.live_hub.client(wanted, request.client.host if request.client else "")
        except TooManyOfOne:
            raise problems.ProblemError(
                429, "streams", "Your address has its share of the live streams; close one, or come again later.",
                limit=self.options.max_live_of_one, headers={"Retry-After": "10"},
            ) from None  # fmt: skip
        except TooManyClients:
            raise problems.unavailable("Every place for a live stream is taken.", 10) from None
        return _Stream(
            self.live_hub.follow(client),
            ping=self.options.heartbeat_s,
            send_timeout=self.options.send_timeout_s,
            sep="\n",
            shutdown_grace_period=GRACE_S,
            metrics=self.metrics,
            ended=partial(self.live_hub.leave, client),
            headers={"Cache-Control": "no-store, no-transform"},
        )

    async def save_fence(self, request: Request) -> Response:
        if self.drawing is None:
            raise problems.ProblemError(
                403, "drawing", "This server takes no fences; GEO_ASSETS_DRAW_FENCES says whether it may."
            )
        self.same_origin.check(request, writes=True)
        saved = await self.drawing.save(request)
        return Response(
            saved.model_dump_json(), status_code=202, media_type=JSON, headers={"Cache-Control": "no-store"}
        )

    # -- the page ----------------------------------------------------------------------------------------------------
    async def static(self, request: Request) -> Response:
        path = request.url.path
        file = await anyio.to_thread.run_sync(self.files.get, path)
        if file is None:
            raise problems.ProblemError(
                404, "not-installed", f"The map library is not installed; run `{INSTALL}`.", field="path", value=path
            )
        headers = {"Content-Security-Policy": self.page_policy} if path == "/" else {}
        return conditional(request, file.body, file.media_type, file.etag, zipped=file.zipped, headers=headers)

    # -- for operators -----------------------------------------------------------------------------------------------
    async def healthz(self, _: Request) -> Response:
        return _health(models.Health(status="ok"))

    async def readyz(self, _: Request) -> Response:
        checks = await anyio.to_thread.run_sync(self._checks)
        sound = all(result == "ok" for result in checks.values())
        return _health(models.Health(status="ok" if sound else "unavailable", checks=checks))

    def _checks(self) -> dict[str, str]:
        checks: dict[str, str] = {}
        for name, look in (
            ("ledger", lambda: self.ledger.get_value("sse-epoch")),
            ("tiles", lambda: self.store.exists("tiles/ready")),
        ):
            try:
                look()
                checks[name] = "ok"
            except (LedgerError, TileStoreError) as error:
                checks[name] = str(error)[:200] or type(error).__name__
        checks["changes"] = "ok" if self.hub.ready else "the log cannot be read"
        return checks

    async def prometheus(self, _: Request) -> Response:
        body = await anyio.to_thread.run_sync(self.metrics.exposition)
        return Response(body, headers={"Content-Type": METRICS_TYPE, "Cache-Control": "no-store"})


def create_app(
    ledger: Ledger,
    tiles: TileStore,
    log: EventLog,
    layers: LayerSet,
    settings: Settings,
    options: Options | None = None,
    *,
    draw_source: Source | None = None,
) -> Starlette:
    """The tile server as an ASGI app. It opens and closes nothing: the ports are the caller's.

    Args:
        ledger: Which object is current, per tile.
        tiles: Where the objects are.
        log: `[tile-updated]` must be declared in it.
        layers: The map's layers.
        settings: Public URLs.
        options: How much the server takes on.
        draw_source: The source of drawn fences, where it is known: it says whether they may be features of a layer.

    Returns:
        The app. A server calls `app.state.end_streams` before it waits for connections; `app.state.hub` is the hub of
        changes, `app.state.live` that of devices and triggers.
    """
    server = _TileServer(ledger, tiles, log, layers, settings, options or Options(), draw_source)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await server.hub.start()
        await server.live_hub.start()
        try:
            yield
        finally:
            await server.live_hub.stop()
            await server.hub.stop()
            if server.drawing is not None:
                await server.drawing.close()

    def end_streams() -> None:
        server.hub.end_streams()
        server.live_hub.end_streams()

    handlers: dict[str, Any] = {
        "/tiles/{z}/{x}/{y}.mvt": server.tile,
        "/tiles.json": server.tilejson,
        "/style.json": server.style,
        "/events": server.events,
        "/coverage": server.coverage,
        "/heat.geojson": server.heat,
        "/waiting.geojson": server.waiting,
        "/fences.geojson": server.fence_collection,
        "/live": server.live,
        "/page.json": server.page_config,
        "/openapi.json": server.openapi,
        "/healthz": server.healthz,
        "/readyz": server.readyz,
        "/metrics": server.prometheus,
        **dict.fromkeys((*PAGE, *VENDOR), server.static),
        **PublishedTilesets(ledger, tiles, settings).handlers(),
    }
    app = Starlette(
        routes=[
            *(Route(path, handler, methods=["GET"]) for path, handler in handlers.items()),
            Route(SAVE, server.save_fence, methods=["POST"]),
        ],
        middleware=[
            Middleware(
                Envelope,
                metrics=server.metrics,
                kind=_kind,
                known=_known({**handlers, SAVE: server.save_fence}),
                private=PRIVATE,
            )
        ],
        exception_handlers={
            **problems.exception_handlers(),
            IntegrityFault: _integrity,
            LedgerError: _port_away,
            TileStoreError: _port_away,
            LogError: _port_away,
        },
        lifespan=lifespan,
    )
    # `/tiles/` is nothing, and nothing redirects: a redirect would repeat the caller's host.
    app.router.redirect_slashes = False
    app.state.hub = server.hub
    app.state.live = server.live_hub
    app.state.end_streams = end_streams
    app.state.metrics = server.metrics
    return app


def run(settings: Settings) -> None:
    """Serve tiles, changes and the map page until SIGTERM or SIGINT.

    Raises:
        ConfigurationError: The layers cannot be used.
        ListenError: The address cannot be listened on.
        LedgerError, TileStoreError, LogError: A port cannot be opened.
    """
    layers = configuration.load_layers(settings)
    with contextlib.ExitStack() as stack:
        ledger, tiles, log = ports.open_ledger(settings), ports.open_tile_store(settings), ports.open_log(settings)
        for port in (ledger, tiles, log):
            stack.callback(port.close)
        app = create_app(ledger, tiles, log, layers, settings, draw_source=_draw_source(settings))
        http_server.serve(
            app,
            host=settings.host,
            port=settings.tiles_port,
            service="tileserver",
            setting="GEO_ASSETS_TILES_PORT",
            forwarded_allow_ips=settings.forwarded_allow_ips,
            on_stop=app.state.end_streams,
            grace_s=settings.drain_s,
            delay_s=settings.shutdown_delay_s,
        )


def _draw_source(settings: Settings) -> Source | None:
    """The source of drawn fences as it is configured here; None where it is not, as in a pod without secrets."""
    if not settings.takes_fences:
        return None
    try:
        return configuration.load_sources(settings).get(settings.draw_source)
    except configuration.ConfigurationError as fault:
        structlog.get_logger().info("drawn fences go to [fences] alone", reason=str(fault))
        return None


# -- answers ---------------------------------------------------------------------------------------------------------
def _document(request: Request, body: bytes) -> Response:
    return conditional(request, body, JSON, f'W/"{hashlib.sha256(body).hexdigest()[:32]}"')


def _health(answer: models.Health) -> Response:
    return Response(
        answer.model_dump_json(),
        status_code=200 if answer.status == "ok" else 503,
        media_type=JSON,
        headers={"Cache-Control": "no-store"},
    )


async def _integrity(_: Request, error: Exception) -> Response:
    detail = f"{str(error)[:1].upper()}{str(error)[1:]}; it is marked, and built again."
    return problems.problem_response(problems.ProblemError(503, "integrity", detail, headers={"Retry-After": "10"}))


async def _port_away(_: Request, error: Exception) -> Response:
    structlog.get_logger().warning("port does not answer", error=str(error), kind=type(error).__name__)
    return problems.problem_response(problems.unavailable("The ledger, the store or the log does not answer now.", 2))


def _content_security_policy(settings: Settings) -> str:
    """No inline script, no other origin than the tile server's public one."""
    url = urlsplit(settings.tiles_url)
    public = f"{url.scheme}://{url.netloc}"
    policy = {
        "default-src": "'none'",
        "script-src": "'self'",
        "worker-src": "'self'",
        "style-src": "'self'",
        "img-src": "'self' data: blob:",
        "connect-src": f"'self' {public}",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'self'",
    }
    return "; ".join(f"{name} {sources}" for name, sources in policy.items())


def _kind(path: str) -> str:
    first = path[1:].partition("/")[0]
    if first in (
        "tiles",
        "events",
        "coverage",
        "heat.geojson",
        "waiting.geojson",
        "fences.geojson",
        "fences",
        "live",
        "metrics",
        "healthz",
        "readyz",
        "tilesets",
        "tiles.json",
        "style.json",
        "openapi.json",
    ):
        return first
    return "page" if path in PAGE or path in VENDOR or path == "/page.json" else "other"


def _known(handlers: Mapping[str, Any]) -> Any:
    return lambda path: (
        path in handlers
        or (path.startswith("/tiles/") and path.endswith(".mvt") and path.count("/") == 4)
        or path.startswith("/tilesets/")
    )


# -- parameters ------------------------------------------------------------------------------------------------------
def _only(request: Request, *names: str) -> None:
    """A parameter given twice is a mistake that nobody should have to find out by looking at a map."""
    for name in names:
        if len(request.query_params.getlist(name)) > 1:
            raise problems.ProblemError(400, "parameter", f"{name} is given more than once.", field=name, limit=1)


def _whole(request: Request, name: str, default: int | None, low: int, high: int) -> int:
    text = request.query_params.get(name)
    if text is None and default is not None:
        return default
    if text is None or not _NUMBER.fullmatch(text) or not low <= int(text) <= high:
        raise problems.ProblemError(
            400,
            "parameter",
            f"{name} must be a whole number from {low} to {high}.",
            field=name,
            value=text,
            limit=[low, high],
        )
    return int(text)


def _wanted_box(request: Request) -> Box | None:
    text = request.query_params.get("bbox")
    return None if text is None else _box(text)


def _box(text: str) -> Box:
    """West, south, east, north in degrees; west above east crosses the date line."""
    explained = (
        "bbox must be west,south,east,north in degrees: longitudes -180..180, latitudes -90..90, south at most north."
    )
    parts = text.split(",")
    try:
        if len(parts) != 4:
            raise ValueError(text)
        box = Box(*(float(part) for part in parts))
        if not (-180 <= box.west <= 180 and -180 <= box.east <= 180 and -90 <= box.south <= box.north <= 90):
            raise ValueError(text)
    except (ValueError, TileError):
        raise problems.ProblemError(
            400, "parameter", explained, field="bbox", value=text, limit=[-180.0, -90.0, 180.0, 90.0]
        ) from None
    return box
