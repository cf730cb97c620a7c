"""The tile server's operations, from which `/openapi.json` is made."""

from __future__ import annotations

from typing import Any, Final

from geo_assets.events.models import FenceEvent
from geo_assets.services import openapi as oa
from geo_assets.services.problems import MEDIA_TYPE as PROBLEM
from geo_assets.services.tileserver import models, published_api
from geo_assets.services.tileserver.fences import MOST_FENCES
from geo_assets.services.tileserver.heat import HOUR_MINUTES
from geo_assets.tiles.tile import MAX_ZOOM

JSON: Final = "application/json"
_TEXT: Final = {"type": "string"}
_BOX: Final = "West, south, east, north in degrees, separated by commas; west above east crosses the date line."
_DEGREES: Final = r"-?[0-9]{1,3}(\.[0-9]{1,15})?"
_BOX_SCHEMA: Final = {
    "type": "string",
    "pattern": f"^{_DEGREES}(,{_DEGREES}){{3}}$",
    "examples": ["24.93,60.16,24.96,60.18"],
}


def _problem(description: str) -> oa.Answer:
    return oa.Answer(description, {PROBLEM: models.ProblemDocument})


def _later(description: str) -> oa.Answer:
    return oa.Answer(
        description, {PROBLEM: models.ProblemDocument}, {"Retry-After": "Seconds after which to ask again."}
    )


def _document(model: Any, description: str) -> dict[int, oa.Answer]:
    return {
        200: oa.Answer(description, {JSON: model}, {"ETag": "Weak entity tag of the document."}),
        304: oa.Answer("The client has it."),
    }


def _whole(name: str, where: Any, description: str, most: int, *, required: bool = False) -> oa.Parameter:
    return oa.Parameter(name, where, description, {"type": "integer", "minimum": 0, "maximum": most}, required)


def operations(max_zoom: int) -> list[oa.Operation]:
    """Every operation. `max_zoom` is the last zoom that is built."""
    unavailable = _problem("Ledger, store or log do not answer now; Retry-After says when to ask again.")
    return [
        oa.Operation(
            "get",
            "/tiles/{z}/{x}/{y}.mvt",
            "getTile",
            "A tile",
            {
                200: oa.Answer(
                    "The tile, as gzip where the client accepts it.",
                    {
                        "application/vnd.mapbox-vector-tile": {
                            "type": "string",
                            "contentMediaType": "application/vnd.mapbox-vector-tile",
                        }
                    },
                    {
                        "ETag": "sha256 of the uncompressed tile, as a weak entity tag.",
                        "X-Tile-Revision": "The ledger's counter for this tile.",
                        "Cache-Control": "`no-cache`, or `s-maxage` for caches that are purged; immutable when `v` "
                        "names the current revision or hash.",
                    },
                ),
                204: oa.Answer(
                    "Nothing is drawn in it, or it was never built.",
                    headers={"X-Tile-Revision": "0 when it was never built."},
                ),
                304: oa.Answer("The client has it."),
                404: _problem("There is no such tile: a number is malformed or out of range."),
                503: _problem("The tile's object is missing or damaged, or a port does not answer."),
            },
            tag="tiles",
            parameters=[
                _whole("z", "path", "Zoom.", max_zoom),
                _whole("x", "path", "Column from the west.", (1 << max_zoom) - 1),
                _whole("y", "path", "Row from the north.", (1 << max_zoom) - 1),
                oa.Parameter(
                    "v", "query", "Revision, or at least 16 digits of the hash, that the caller expects.", _TEXT
                ),
            ],
        ),
        oa.Operation(
            "get",
            "/tiles.json",
            "getTileJson",
            "TileJSON 3.0 of the tiles",
            {**_document(models.TileJson, "TileJSON."), 503: unavailable},
            tag="tiles",
        ),
        oa.Operation(
            "get",
            "/style.json",
            "getStyle",
            "A MapLibre style that shows every layer",
            _document({"type": "object"}, "Style."),
            tag="tiles",
        ),
        oa.Operation(
            "get",
            "/events",
            "getEvents",
            "Changes of tiles, as they are committed (server-sent events)",
            {
                200: oa.Answer(
                    "Unnamed events carry a TileChange; `reset` says that everything must be loaded again, `dropped` "
                    "that the client was too slow and should connect again. Every id is a resume point.",
                    {"text/event-stream": {"type": "string"}},
                ),
                400: _problem("A parameter is malformed."),
                503: _later("Every place is taken, or the log cannot be read."),
            },
            tag="changes",
            parameters=[
                oa.Parameter("bbox", "query", _BOX, _BOX_SCHEMA),
                _whole("min_zoom", "query", "First zoom to hear of.", MAX_ZOOM),
                _whole("max_zoom", "query", "Last zoom to hear of.", MAX_ZOOM),
                oa.Parameter("last_event_id", "query", "Resume point, where the header cannot be set.", _TEXT),
                oa.Parameter("Last-Event-ID", "header", "Resume point, as browsers send it.", _TEXT),
            ],
        ),
        oa.Operation(
            "get",
            "/coverage",
            "getCoverage",
            "What the ledger knows of every tile of a box at one zoom",
            {
                200: oa.Answer("The tiles.", {JSON: models.Coverage}),
                400: _problem("A parameter is malformed, or the box holds too many tiles."),
                503: unavailable,
            },
            tag="tiles",
            parameters=[
                oa.Parameter("bbox", "query", _BOX, _BOX_SCHEMA, required=True),
                _whole("zoom", "query", "Zoom of the tiles.", max_zoom, required=True),
            ],
        ),
        oa.Operation(
            "get",
            "/heat.geojson",
            "getHeat",
            "Where tiles were built in the last minutes, by H3 cell",
            {
                200: oa.Answer("The cells.", {"application/geo+json": models.HeatCollection}),
                400: _problem("A parameter is malformed."),
                503: unavailable,
            },
            tag="operation",
            parameters=[
                oa.Parameter("bbox", "query", _BOX, _BOX_SCHEMA),
                _whole(
                    "zoom",
                    "query",
                    "Of the map that shows them: it decides how large they are.",
                    MAX_ZOOM,
                    required=True,
                ),
                oa.Parameter(
                    "minutes",
                    "query",
                    "How far back; 60 unless named.",
                    {"type": "integer", "minimum": 1, "maximum": HOUR_MINUTES},
                ),
            ],
        ),
        oa.Operation(
            "get",
            "/waiting.geojson",
            "getWaiting",
            "Dirty tiles by quadkey prefix, and how long the oldest waits",
            {
                200: oa.Answer("The prefixes.", {"application/geo+json": models.WaitingCollection}),
                400: _problem("A parameter is malformed."),
                503: unavailable,
            },
            tag="operation",
            parameters=[
                oa.Parameter("bbox", "query", _BOX, _BOX_SCHEMA),
                _whole(
                    "zoom",
                    "query",
                    "Of the map that shows them: it decides how large they are.",
                    MAX_ZOOM,
                    required=True,
                ),
            ],
        ),
        oa.Operation(
            "get",
            "/fences.geojson",
            "getFences",
            "The standing fences of a box, as they judge positions",
            {
                200: oa.Answer(
                    "The fences.",
                    {"application/geo+json": models.FenceCollection},
                    {"ETag": "Weak entity tag of the set and the question."},
                ),
                304: oa.Answer("The client has them."),
                400: _problem("A parameter is malformed."),
                503: unavailable,
            },
            tag="geofences",
            parameters=[
                oa.Parameter("bbox", "query", _BOX, _BOX_SCHEMA),
                oa.Parameter(
                    "limit",
                    "query",
                    "Most fences; of more, the largest.",
                    {"type": "integer", "minimum": 1, "maximum": MOST_FENCES},
                ),
            ],
        ),
        oa.Operation(
            "post",
            "/fences",
            "saveFence",
            "Save a fence that was drawn on the page, or delete one",
            {
                202: oa.Answer("In the log.", {JSON: models.SavedFence}),
                400: _problem("A member is at fault."),
                403: _problem("Not from the server's own page, of another source, or the server takes no fences."),
                404: _problem("A deletion of what is not there."),
                408: _problem("The body stopped coming."),
                409: _problem("The fence has a higher version of its own upstream."),
                413: _problem("Larger than what is drawn by hand."),
                415: _problem("Not JSON in UTF-8."),
                422: _problem("It is no fence: `field`, `value` and `limit` say why."),
                503: unavailable,
            },
            description="For the map page alone: no secret is asked for, but the Origin must be the server's own, and "
            "`GEO_ASSETS_DRAW_FENCES` must allow it. Other programs sign and post to the edge.",
            tag="geofences",
            request={JSON: FenceEvent, "application/geo+json": FenceEvent},
        ),
        oa.Operation(
            "get",
            "/live",
            "getLive",
            "Devices, triggers and changes of fences (server-sent events), for the map page",
            {
                200: oa.Answer(
                    "`fences` carries FencesChanged, `devices` Devices (three times a second at most), `triggers` "
                    "Triggers.",
                    {"text/event-stream": {"type": "string"}},
                ),
                400: _problem("A parameter is malformed."),
                403: _problem("Not from the server's own page, or the server shows no devices."),
                429: _later("This client address has its share of the places."),
                503: _later("Every place is taken."),
            },
            tag="geofences",
            parameters=[
                oa.Parameter("show", "query", "What to tell, comma separated: fences, devices, triggers.", _TEXT),
                oa.Parameter("bbox", "query", "Devices outside it are not told. " + _BOX, _BOX_SCHEMA),
            ],
        ),
        oa.Operation(
            "get",
            "/page.json",
            "getPageConfig",
            "What the map page must know",
            _document(models.PageConfig, "Configuration."),
            tag="page",
        ),
        *published_api.operations(),
        oa.Operation(
            "get",
            "/healthz",
            "getHealth",
            "Whether the process lives",
            {200: oa.Answer("It does.", {JSON: models.Health})},
            tag="operation",
        ),
        oa.Operation(
            "get",
            "/readyz",
            "getReadiness",
            "Whether ledger, store and log answer",
            {
                200: oa.Answer("They do.", {JSON: models.Health}),
                503: oa.Answer("Not all of them.", {JSON: models.Health}),
            },
            tag="operation",
        ),
        oa.Operation(
            "get",
            "/metrics",
            "getMetrics",
            "Figures for Prometheus",
            {200: oa.Answer("Text format 0.0.4.", {"text/plain": _TEXT})},
            tag="operation",
        ),
    ]


def openapi(url: str, version: str, max_zoom: int) -> dict[str, Any]:
    """The OpenAPI 3.1 document.

    Args:
        url: The server's public URL.
        version: The product's version.
        max_zoom: Last zoom that is built.
    """
    return oa.document(
        "geo_assets tile server",
        version,
        operations(max_zoom),
        description="Tiles as the ledger names them, a stream of what changed, and the geofences above them.",
        models=[models.TileChange, models.FencesChanged, models.Devices, models.Triggers],
        servers=[url],
    )
