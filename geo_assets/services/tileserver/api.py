"""The tile server's operations, from which `/openapi.json` is made."""

from __future__ import annotations

from typing import Any, Final

from geo_assets.services import openapi as oa
from geo_assets.services.problems import MEDIA_TYPE as PROBLEM
from geo_assets.services.tileserver import models, published_api
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
                503: _problem("Every place is taken, or the log cannot be read."),
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
        description="Tiles as the ledger names them, and a stream of what changed.",
        models=[models.TileChange],
        servers=[url],
    )
