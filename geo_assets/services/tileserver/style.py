"""How layers look: a light city style for names the field knows, a plain look for everybody's own.

No sprites, no glyph server: symbols are circles, and labels use a font of the viewer's machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from geo_assets.tiles.layers import Layer, LayerSet

SOURCE: Final = "tiles"
"""Name of the vector source in the style."""

FONT: Final = ["sans-serif"]

BACKGROUND: Final = "#f7f4ef"
WATER: Final = "#aad3e8"
WATER_LINE: Final = "#8fc0da"
WATER_TEXT: Final = "#3f7899"
HALO: Final = "rgba(255,255,255,0.9)"

ROLES: Final[dict[str, str]] = {
    name: role
    for role, names in {
        "landuse": ("landuse", "landcover", "land", "green", "park", "parks", "forest", "forests", "vegetation"),
        "water": ("water", "lakes", "ocean", "sea", "water_polygons"),
        "waterways": ("waterways", "waterway", "rivers", "streams", "water_lines"),
        "paths": ("paths", "path", "footways", "trails"),
        "roads": ("roads", "road", "streets", "street", "highways", "transportation"),
        "rail": ("rail", "railway", "railways", "tram", "transit"),
        "buildings": ("buildings", "building"),
        "parcels": ("parcels", "parcel", "cadastre", "lots"),
        "boundaries": ("boundaries", "boundary", "admin", "borders"),
        "trees": ("trees", "tree"),
        "stops": ("stops", "stop", "stations"),
        "pois": ("pois", "poi", "amenities", "points_of_interest"),
        "localities": ("localities", "locality", "neighbourhoods", "suburbs"),
        "places": ("places", "place", "cities", "towns", "settlements"),
    }.items()
    for name in names
}
"""Layer name to what it is taken for. A name that is not here gets the plain look."""

PALETTE: Final = ("#7c5cbf", "#d1495b", "#2a9d8f", "#e08e2b", "#3a6ea5", "#8a9a2b", "#b0508e", "#5b7f95")
"""Colours of the plain look, told apart by people with the common colour-vision deficiencies as far as eight can be."""

_CLASS: Final = [
    "coalesce",
    ["get", "class"],
    ["get", "kind"],
    ["get", "type"],
    ["get", "highway"],
    ["get", "railway"],
    "",
]
_NAME: Final = ["coalesce", ["get", "name"], ["get", "label"], ["get", "title"]]
_HAS_NAME: Final = ["any", ["has", "name"], ["has", "label"], ["has", "title"]]
_AREA: Final = ["in", ["geometry-type"], ["literal", ["Polygon", "MultiPolygon"]]]
_LINE: Final = ["in", ["geometry-type"], ["literal", ["LineString", "MultiLineString"]]]
_POINT: Final = ["in", ["geometry-type"], ["literal", ["Point", "MultiPoint"]]]

_GREEN: Final = (
    "park",
    "garden",
    "grass",
    "forest",
    "wood",
    "meadow",
    "scrub",
    "grassland",
    "heath",
    "village_green",
    "recreation_ground",
    "cemetery",
    "allotments",
    "nature_reserve",
    "golf_course",
    "flowerbed",
    "wetland",
    "green",
)
_SPORT: Final = ("pitch", "playground", "track", "sports_centre")
_SQUARE: Final = ("pedestrian", "footway", "square", "platform", "marketplace")
_LEARNING: Final = (
    "school",
    "university",
    "college",
    "kindergarten",
    "hospital",
    "education",
    "institutional",
    "religious",
)
_WORK: Final = ("commercial", "retail", "industrial", "railway", "construction", "parking")

# Road classes from the least to the greatest, with widths in pixels at zooms 12, 15 and 18, fill and casing.
_ROADS: Final[tuple[tuple[str, tuple[str, ...], tuple[float, float, float], str, str], ...]] = (
    ("service", ("service", "road"), (0.0, 1.2, 7), "#ffffff", "#ddd5c9"),
    ("pedestrian", ("pedestrian", "living_street", "busway"), (0.3, 2.0, 12), "#f4efe6", "#d8cfc1"),
    ("minor", ("residential", "unclassified", "minor", "street"), (0.6, 3.4, 17), "#ffffff", "#d6ccbe"),
    ("tertiary", ("tertiary", "tertiary_link"), (1.1, 4.8, 21), "#ffffff", "#cfc3b1"),
    ("secondary", ("secondary", "secondary_link"), (1.5, 5.8, 24), "#fdf3cf", "#d9c07c"),
    ("primary", ("primary", "primary_link"), (1.9, 6.8, 27), "#fde6ab", "#dcb163"),
    ("trunk", ("trunk", "trunk_link", "motorway", "motorway_link"), (2.3, 7.8, 30), "#fbcf9d", "#d99850"),
)


def role_of(name: str) -> str | None:
    """What a layer of this name is taken for; None when the name says nothing."""
    return ROLES.get(name.lower().replace("-", "_"))


def build_style(layers: LayerSet, source: dict[str, Any], *, name: str = "geo_assets") -> dict[str, Any]:
    """A MapLibre style (version 8) that shows every layer.

    Args:
        layers: The map's layers. Those of a known name are drawn in the order maps are read in, the others above them
            in their own order.
        source: The style's vector source.
        name: The style's name.

    Returns:
        The style as plain JSON values.
    """
    drawn: dict[str, list[Layer]] = {}
    plain: list[Layer] = []
    for layer in layers.layers:
        role = role_of(layer.name)
        if role is None:
            plain.append(layer)
        else:
            drawn.setdefault(role, []).append(layer)
    shapes: list[dict[str, Any]] = [
        {"id": "background", "type": "background", "paint": {"background-color": BACKGROUND}}
    ]
    labels: list[dict[str, Any]] = []
    for role, shape in _SHAPES:
        for layer in drawn.get(role, ()):
            shapes.extend(_placed(layer, part) for part in shape(layer.name))
    for index, layer in enumerate(plain):
        shapes.extend(_placed(layer, part) for part in _plain(layer.name, PALETTE[index % len(PALETTE)]))
    for role, label in _LABELS:
        for layer in drawn.get(role, ()):
            labels.extend(_placed(layer, part) for part in label(layer.name))
    for index, layer in enumerate(plain):
        labels.append(_placed(layer, _plain_label(layer.name, PALETTE[index % len(PALETTE)])))
    return {"version": 8, "name": name, "sources": {SOURCE: source}, "layers": shapes + labels}


def _placed(layer: Layer, part: dict[str, Any]) -> dict[str, Any]:
    """A style layer of a tile layer; it shows no lower than the layer begins."""
    result = {"source": SOURCE, "source-layer": layer.name, **part}
    lowest = max(float(part.get("minzoom", 0)), float(layer.min_zoom))
    if lowest > 0:
        result["minzoom"] = lowest
    return result


def _zoomed(*stops: float) -> list[Any]:
    """An exponential ramp over (zoom, value) pairs: roads keep about their width on the ground."""
    return ["interpolate", ["exponential", 1.6], ["zoom"], *stops]


def _one_of(*classes: str) -> list[Any]:
    return ["in", _CLASS, ["literal", list(classes)]]


def _landuse(name: str) -> list[dict[str, Any]]:
    colour = [
        "match",
        _CLASS,
        list(_GREEN),
        "#d3e8c4",
        list(_SPORT),
        "#c9e6cd",
        list(_SQUARE),
        "#f1ece3",
        ["sand", "beach"],
        "#f5ecc9",
        ["bare_rock"],
        "#e2deda",
        list(_LEARNING),
        "#f3ead9",
        list(_WORK),
        "#efebe8",
        ["residential"],
        "#f2eee8",
        "#dfe9d2" if name.lower() not in ("landuse", "land") else "#f0ece5",
    ]
    return [
        {
            "id": f"{name}-fill",
            "type": "fill",
            "paint": {"fill-color": colour, "fill-opacity": ["interpolate", ["linear"], ["zoom"], 10, 0.7, 14, 1]},
        },
        {
            "id": f"{name}-edge",
            "type": "line",
            "minzoom": 15,
            "filter": ["all", _AREA, _one_of(*_SPORT, *_SQUARE)],
            "paint": {"line-color": "#c8c9b4", "line-width": 0.7},
        },
    ]


def _water(name: str) -> list[dict[str, Any]]:
    return [
        {"id": f"{name}-fill", "type": "fill", "filter": _AREA, "paint": {"fill-color": WATER}},
        {"id": f"{name}-edge", "type": "line", "minzoom": 12, "paint": {"line-color": WATER_LINE, "line-width": 0.8}},
    ]


def _waterways(name: str) -> list[dict[str, Any]]:
    width = ["match", _CLASS, ["river", "canal"], 3.0, ["coastline"], 1.4, 1.2]
    return [
        {
            "id": f"{name}-line",
            "type": "line",
            "layout": {"line-cap": "round", "line-join": "round"},
            "paint": {
                "line-color": WATER_LINE,
                "line-width": ["interpolate", ["linear"], ["zoom"], 10, ["*", 0.5, width], 18, ["*", 1.6, width]],
            },
        }
    ]


def _buildings(name: str) -> list[dict[str, Any]]:
    return [
        {
            "id": f"{name}-fill",
            "type": "fill",
            "filter": _AREA,
            "paint": {
                "fill-color": [
                    "case",
                    ["boolean", ["feature-state", "hover"], False],
                    "#d4bfa0",
                    [
                        "match",
                        _CLASS,
                        ["church", "cathedral", "chapel", "public", "government", "civic", "museum", "train_station"],
                        "#e6d3ba",
                        "#e6ddd1",
                    ],
                ],
                "fill-opacity": ["interpolate", ["linear"], ["zoom"], 13, 0.6, 15, 1],
            },
        },
        {
            "id": f"{name}-edge",
            "type": "line",
            "minzoom": 14,
            "paint": {"line-color": "#cbbca6", "line-width": ["interpolate", ["linear"], ["zoom"], 14, 0.3, 18, 1.1]},
        },
    ]


def _paths(name: str) -> list[dict[str, Any]]:
    colour = ["match", _CLASS, ["cycleway"], "#7fa3c7", ["steps"], "#c58f74", "#cdb89a"]
    return [
        {
            "id": f"{name}-casing",
            "type": "line",
            "minzoom": 15,
            "layout": {"line-cap": "round", "line-join": "round"},
            "paint": {"line-color": "#ffffff", "line-opacity": 0.8, "line-width": _zoomed(15, 1.8, 18, 5)},
        },
        {
            "id": f"{name}-line",
            "type": "line",
            "layout": {"line-join": "round"},
            "paint": {
                "line-color": colour,
                "line-width": _zoomed(14, 0.6, 18, 2.2),
                "line-dasharray": ["literal", [3, 1.4]],
                "line-opacity": ["interpolate", ["linear"], ["zoom"], 14, 0.5, 16, 1],
            },
        },
    ]


def _roads(name: str) -> list[dict[str, Any]]:
    known = [c for _, classes, *_ in _ROADS for c in classes]
    casings: list[dict[str, Any]] = []
    fills: list[dict[str, Any]] = []
    for kind, classes, (far, mid, near), fill, casing in _ROADS:
        picked: list[Any] = _one_of(*classes)
        if kind == "minor":  # a road of no known class is drawn as a street
            picked = ["any", picked, ["!", _one_of(*known)]]
        layout = {"line-cap": "round", "line-join": "round"}
        shown = {"minzoom": 14.0} if kind == "service" else {}
        tunnel = ["case", ["boolean", ["get", "tunnel"], False], 0.35, 1]
        casings.append(
            {
                "id": f"{name}-{kind}-casing",
                "type": "line",
                **shown,
                "filter": ["all", _LINE, picked],
                "layout": layout,
                "paint": {
                    "line-color": casing,
                    "line-opacity": tunnel,
                    "line-width": _zoomed(12, far + (0.8 if far else 0), 15, mid + 1.5, 18, near + 2.5),
                },
            }
        )
        fills.append(
            {
                "id": f"{name}-{kind}",
                "type": "line",
                **shown,
                "filter": ["all", _LINE, picked],
                "layout": layout,
                "paint": {
                    "line-color": fill,
                    "line-opacity": tunnel,
                    "line-width": _zoomed(12, far, 15, mid, 18, near),
                },
            }
        )
    return casings + fills


def _rail(name: str) -> list[dict[str, Any]]:
    light = _one_of("tram", "subway", "light_rail")
    under = ["boolean", ["get", "tunnel"], False]
    return [
        {
            "id": f"{name}-light",
            "type": "line",
            "minzoom": 14,
            "filter": light,
            "paint": {
                "line-color": "#b3a6b8",
                "line-width": _zoomed(14, 0.6, 18, 1.8),
                "line-opacity": ["case", under, 0.3, 0.9],
            },
        },
        {
            "id": f"{name}-track",
            "type": "line",
            "filter": ["!", light],
            "paint": {
                "line-color": "#a29a94",
                "line-width": _zoomed(12, 0.9, 18, 3.6),
                "line-opacity": ["case", under, 0.3, 1],
            },
        },
        {
            "id": f"{name}-sleepers",
            "type": "line",
            "minzoom": 14,
            "filter": ["!", light],
            "paint": {
                "line-color": "#f7f4ef",
                "line-width": _zoomed(14, 0.7, 18, 2.2),
                "line-dasharray": ["literal", [3, 3]],
                "line-opacity": ["case", under, 0.3, 1],
            },
        },
    ]


def _parcels(name: str) -> list[dict[str, Any]]:
    return [
        {
            "id": f"{name}-fill",
            "type": "fill",
            "filter": _AREA,
            "paint": {"fill-color": "#e5a33d", "fill-opacity": 0.06},
        },
        {
            "id": f"{name}-edge",
            "type": "line",
            "paint": {"line-color": "#c0843a", "line-width": _zoomed(13, 0.4, 18, 1.4)},
        },
    ]


def _boundaries(name: str) -> list[dict[str, Any]]:
    return [
        {
            "id": f"{name}-line",
            "type": "line",
            "layout": {"line-join": "round"},
            "paint": {
                "line-color": "#9a7fa8",
                "line-width": _zoomed(4, 0.8, 14, 2.2),
                "line-dasharray": ["literal", [4, 2, 1, 2]],
            },
        }
    ]


def _trees(name: str) -> list[dict[str, Any]]:
    return [
        {
            "id": f"{name}-dot",
            "type": "circle",
            "paint": {"circle-color": "#8fbf7f", "circle-opacity": 0.65, "circle-radius": _zoomed(16, 1.4, 20, 9)},
        }
    ]


def _dots(colour: Any, minzoom: float, far: float, near: float) -> Callable[[str], list[dict[str, Any]]]:
    def shape(name: str) -> list[dict[str, Any]]:
        return [
            {
                "id": f"{name}-dot",
                "type": "circle",
                "minzoom": minzoom,
                "paint": {
                    "circle-color": colour,
                    "circle-radius": ["interpolate", ["linear"], ["zoom"], minzoom, far, 19, near],
                    "circle-stroke-color": "#ffffff",
                    "circle-stroke-width": ["interpolate", ["linear"], ["zoom"], minzoom, 0.5, 18, 1.4],
                },
            }
        ]

    return shape


_POI_COLOUR: Final = [
    "match",
    _CLASS,
    ["restaurant", "cafe", "bar", "pub", "fast_food", "food_court", "ice_cream", "biergarten", "nightclub"],
    "#d9803f",
    ["hotel", "hostel", "guest_house", "apartment"],
    "#7a6bb5",
    [
        "museum",
        "attraction",
        "artwork",
        "gallery",
        "viewpoint",
        "memorial",
        "monument",
        "theatre",
        "cinema",
        "arts_centre",
    ],
    "#a8577e",
    ["hospital", "clinic", "doctors", "dentist", "pharmacy"],
    "#cf4a4a",
    ["playground", "sports_centre", "fitness_centre", "slipway"],
    "#4f9a5b",
    "#6e8399",
]

_SHAPES: Final[tuple[tuple[str, Callable[[str], list[dict[str, Any]]]], ...]] = (
    ("landuse", _landuse),
    ("water", _water),
    ("waterways", _waterways),
    ("parcels", _parcels),
    ("paths", _paths),
    ("roads", _roads),
    ("rail", _rail),
    ("buildings", _buildings),
    ("trees", _trees),
    ("boundaries", _boundaries),
    ("stops", _dots("#3f7fbf", 15, 1.8, 5.0)),
    ("pois", _dots(_POI_COLOUR, 16, 1.4, 4.6)),
)
"""From the ground up."""


def _text(colour: Any, size: Any, **layout: Any) -> dict[str, Any]:
    return {
        "layout": {"text-field": _NAME, "text-font": FONT, "text-size": size, "text-max-width": 8, **layout},
        "paint": {"text-color": colour, "text-halo-color": HALO, "text-halo-width": 1.4},
    }


def _area_label(colour: Any, minzoom: float) -> Callable[[str], list[dict[str, Any]]]:
    def label(name: str) -> list[dict[str, Any]]:
        size = ["interpolate", ["linear"], ["zoom"], 12, 10, 18, 14]
        return [
            {
                "id": f"{name}-label",
                "type": "symbol",
                "minzoom": minzoom,
                "filter": ["all", _AREA, _HAS_NAME],
                **_text(colour, size),
            }
        ]

    return label


def _line_label(colour: str, minzoom: float) -> Callable[[str], list[dict[str, Any]]]:
    def label(name: str) -> list[dict[str, Any]]:
        size = ["interpolate", ["linear"], ["zoom"], 13, 10, 18, 14]
        layout = {"symbol-placement": "line", "symbol-spacing": 350, "text-max-angle": 35, "text-padding": 6}
        return [
            {
                "id": f"{name}-label",
                "type": "symbol",
                "minzoom": minzoom,
                "filter": ["all", _LINE, _HAS_NAME],
                **_text(colour, size, **layout),
            }
        ]

    return label


def _dot_label(colour: str, minzoom: float) -> Callable[[str], list[dict[str, Any]]]:
    def label(name: str) -> list[dict[str, Any]]:
        layout = {"text-anchor": "top", "text-offset": ["literal", [0, 0.55]], "text-padding": 4, "text-optional": True}
        return [
            {
                "id": f"{name}-label",
                "type": "symbol",
                "minzoom": minzoom,
                "filter": _HAS_NAME,
                **_text(colour, 11, **layout),
            }
        ]

    return label


def _place_label(far: float, near: float, colour: str, until: float) -> Callable[[str], list[dict[str, Any]]]:
    def label(name: str) -> list[dict[str, Any]]:
        size = ["interpolate", ["linear"], ["zoom"], 4, far, 15, near]
        spaced = {"text-letter-spacing": 0.06, "text-padding": 8}
        return [
            {
                "id": f"{name}-label",
                "type": "symbol",
                "maxzoom": until,
                "filter": _HAS_NAME,
                **_text(colour, size, **spaced),
            }
        ]

    return label


def _house_numbers(name: str) -> list[dict[str, Any]]:
    return [
        {"id": f"{name}-name", "type": "symbol", "minzoom": 16, "filter": _HAS_NAME, **_text("#7d6b55", 11)},
        {
            "id": f"{name}-number",
            "type": "symbol",
            "minzoom": 17.2,
            "filter": ["has", "housenumber"],
            "layout": {"text-field": ["to-string", ["get", "housenumber"]], "text-font": FONT, "text-size": 10},
            "paint": {"text-color": "#9a8872", "text-halo-color": "#efe8de", "text-halo-width": 1},
        },
    ]


_LABELS: Final[tuple[tuple[str, Callable[[str], list[dict[str, Any]]]], ...]] = (
    ("buildings", _house_numbers),
    ("landuse", _area_label(["match", _CLASS, [*_GREEN, *_SPORT], "#5f7f4f", "#857c70"], 15)),
    ("trees", lambda _: []),
    ("pois", _dot_label("#5c5750", 17)),
    ("stops", _dot_label("#35658f", 16)),
    ("paths", _line_label("#8a7a64", 17)),
    ("waterways", _line_label(WATER_TEXT, 14)),
    ("roads", _line_label("#5d574f", 14)),
    ("water", _area_label(WATER_TEXT, 12)),
    ("localities", _place_label(10, 14, "#75706a", 16)),
    ("places", _place_label(11, 24, "#3b3733", 14)),
)
"""From the least to the most important: where two would overlap, the later one stays."""


def _plain(name: str, colour: str) -> list[dict[str, Any]]:
    return [
        {"id": f"{name}-fill", "type": "fill", "filter": _AREA, "paint": {"fill-color": colour, "fill-opacity": 0.22}},
        {
            "id": f"{name}-edge",
            "type": "line",
            "filter": _AREA,
            "paint": {"line-color": colour, "line-width": _zoomed(10, 0.6, 18, 1.6)},
        },
        {
            "id": f"{name}-line",
            "type": "line",
            "filter": _LINE,
            "layout": {"line-cap": "round", "line-join": "round"},
            "paint": {"line-color": colour, "line-width": _zoomed(8, 1.0, 18, 4)},
        },
        {
            "id": f"{name}-dot",
            "type": "circle",
            "filter": _POINT,
            "paint": {
                "circle-color": colour,
                "circle-radius": ["interpolate", ["linear"], ["zoom"], 6, 2, 18, 6],
                "circle-stroke-color": "#ffffff",
                "circle-stroke-width": 1.2,
            },
        },
    ]


def _plain_label(name: str, colour: str) -> dict[str, Any]:
    placed = {"text-anchor": "top", "text-offset": ["literal", [0, 0.5]]}
    return {"id": f"{name}-label", "type": "symbol", "minzoom": 14, "filter": _HAS_NAME, **_text(colour, 11, **placed)}
