"""The operations of published tilesets, for `/openapi.json`."""

from __future__ import annotations

from typing import Any, Final

from geo_assets.services import openapi as oa
from geo_assets.services.problems import MEDIA_TYPE as PROBLEM
from geo_assets.services.tileserver import models
from geo_assets.tiles.tile import MAX_ZOOM

_NAME: Final = oa.Parameter(
    "name", "path", "Of the tileset.", {"type": "string", "pattern": "^[a-z0-9_-]{1,63}$"}, True
)
_VERSION: Final = oa.Parameter(
    "version", "path", "Such as 7-3fa94c1b02de.", {"type": "string", "pattern": "^[1-9][0-9]{0,8}-[0-9a-f]{12}$"}, True
)
_POINTER: Final = "30 s for the version in force, for good where the path names the version."


def _number(name: str, description: str, most: int) -> oa.Parameter:
    return oa.Parameter(name, "path", description, {"type": "integer", "minimum": 0, "maximum": most}, True)


def operations() -> list[oa.Operation]:
    """TileJSON, tiles and archives: of the version in force, and of each version."""
    found: list[oa.Operation] = []
    for what, path, parameters in (
        ("", "/tilesets/{name}", [_NAME]),
        ("Version", "/tilesets/{name}/{version}", [_NAME, _VERSION]),
    ):
        of = "a version of a published tileset" if what else "a published tileset, the version in force"
        unknown = oa.Answer("There is no such tileset, version or tile.", {PROBLEM: models.ProblemDocument})
        away = oa.Answer("The archive or a port does not answer.", {PROBLEM: models.ProblemDocument})
        kept = {"Cache-Control": _POINTER, "ETag": "Entity tag of the content."}
        found += [
            oa.Operation(
                "get",
                f"{path}.json",
                f"getTileset{what}TileJson",
                f"TileJSON 3.0 of {of}",
                {
                    200: oa.Answer(
                        "TileJSON; its tiles are those of the version.", {"application/json": _OBJECT}, kept
                    ),
                    304: oa.Answer("The client has it."),
                    404: unknown,
                    503: away,
                },
                tag="tilesets",
                parameters=parameters,
            ),
            oa.Operation(
                "get",
                f"{path}/{{z}}/{{x}}/{{y}}.mvt",
                f"getTileset{what}Tile",
                f"A tile of {of}",
                {
                    200: oa.Answer(
                        "The tile, as gzip where the client accepts it.",
                        {
                            "application/vnd.mapbox-vector-tile": {
                                "type": "string",
                                "contentMediaType": "application/vnd.mapbox-vector-tile",
                            }
                        },
                        kept,
                    ),
                    204: oa.Answer("Nothing is drawn in it, or it is outside the region."),
                    304: oa.Answer("The client has it."),
                    404: unknown,
                    503: away,
                },
                tag="tilesets",
                parameters=[
                    *parameters,
                    _number("z", "Zoom.", MAX_ZOOM),
                    _number("x", "Column from the west.", (1 << MAX_ZOOM) - 1),
                    _number("y", "Row from the north.", (1 << MAX_ZOOM) - 1),
                ],
            ),
            oa.Operation(
                "get",
                f"{path}.pmtiles",
                f"getTileset{what}Archive",
                f"The PMTiles archive of {of}; `.mbtiles` where it was published so",
                {
                    200: oa.Answer("The archive.", {"application/vnd.pmtiles": _BYTES}, kept),
                    206: oa.Answer("The range of it that was asked for.", {"application/vnd.pmtiles": _BYTES}),
                    304: oa.Answer("The client has it."),
                    404: unknown,
                    416: oa.Answer("There is no byte in the range.", {PROBLEM: models.ProblemDocument}),
                    503: away,
                },
                tag="tilesets",
                parameters=[*parameters, oa.Parameter("Range", "header", "One range of bytes.", {"type": "string"})],
            ),
        ]
    return found


_OBJECT: Final[dict[str, Any]] = {"type": "object"}
_BYTES: Final[dict[str, Any]] = {"type": "string", "contentMediaType": "application/vnd.pmtiles"}
