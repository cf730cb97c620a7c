"""The canary: what this process's libraries make of a fixed sample, compared with what the release is known to make.

Known coordinates in several reference systems go to EPSG:4326; features, some of them hard, are validated, mended and
built into tiles. The answers are held against a lock file, or against what is published. Nothing is written and no
service is needed, but for the ledger's and the feature store's where published tiles are asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources as packaged
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from geo_assets import configuration
from geo_assets.events.crs import to_wgs84
from geo_assets.events.dead_letter import Refused
from geo_assets.events.sources import Source
from geo_assets.events.validate import FeatureContext, ValidEdit, validate_all
from geo_assets.services import build_worker, engines
from geo_assets.services.shadow_worker import hello
from geo_assets.tiles import workkey
from geo_assets.tiles.encode import TileFeatures, encode_tiles
from geo_assets.tiles.layers import LayerSet
from geo_assets.tiles.tile import Tile
from geo_assets.tiles.zooms import tile_boxes, visible

if TYPE_CHECKING:
    from geo_assets.stack import Stack

PLACES: tuple[tuple[str, float, float], ...] = (
    ("EPSG:3857", 2776935.23, 8437333.11),
    ("EPSG:4258", 24.9441, 60.1690),
    ("EPSG:3067", 385620.5, 6672112.25),
    ("EPSG:3879", 25496920.125, 6673412.75),
    ("EPSG:32635", 385720.0, 6672312.0),
    ("EPSG:2393", 3385700.0, 6675000.0),
    ("EPSG:2154", 652381.0, 6862047.0),
    ("EPSG:25832", 691875.6, 5334734.2),
    ("EPSG:31467", 3500000.0, 5400000.0),
    ("EPSG:27700", 530000.0, 180000.0),
    ("EPSG:28992", 155000.0, 463000.0),
    ("EPSG:2056", 2600000.0, 1200000.0),
    ("EPSG:3035", 4321000.0, 3210000.0),
    ("EPSG:3413", 0.0, -1000000.0),
    ("EPSG:2193", 1748735.0, 5427916.0),
    ("EPSG:6677", -5995.0, -35367.0),
    ("EPSG:2263", 980000.0, 195000.0),
    ("EPSG:5070", 1000000.0, 2000000.0),
)
"""CRS, and x before y in its unit: projections of every kind, and datums that differ by a hundred metres."""

DIGITS = 9
"""Of a degree that are compared: a tenth of a millimetre. Processors differ beyond the twelfth."""

TILES: tuple[tuple[int, int, int], ...] = (
    *((6, 63, 35), (6, 0, 35), (6, 36, 1), (6, 4, 0), (8, 145, 74), (10, 582, 296), (11, 1165, 592), (11, 681, 710)),
    *((12, 2331, 1185), (12, 2082, 1448), (13, 4663, 2371), (14, 9327, 4742), (15, 18654, 9484), (15, 18655, 9484)),
    *((16, 37308, 18969), (16, 37308, 18968), (16, 37309, 18969), (17, 74616, 37939), (17, 74617, 37939)),
    *((18, 149233, 75879), (18, 149234, 75879), (18, 149235, 75879), (0, 0, 0)),
)
"""z, x, y. The last one is empty."""

RECEIVED_MS = 1_700_000_000_000


class LockError(ValueError):
    """A file that is no canary's lock."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What libraries make of the sample."""

    libraries: Mapping[str, str]
    answers: Mapping[str, str]
    """`crs EPSG:3067` -> lon, lat; `feature 12` and `tile 14/9327/4740` -> hash, or why there is none."""

    def to_json(self) -> str:
        """As a lock file has it."""
        value = {"libraries": dict(self.libraries), "answers": dict(self.answers)}
        return json.dumps(value, indent=1, ensure_ascii=False) + "\n"

    @staticmethod
    def from_json(text: str) -> Answers:
        """A lock file's text.

        Raises:
            LockError: It is none.
        """
        try:
            value = json.loads(text)
            found = Answers(dict(value["libraries"]), dict(value["answers"]))
        except (ValueError, TypeError, KeyError) as fault:
            raise LockError(f"no lock of the canary: {fault}") from None
        if not found.answers or not all(isinstance(one, str) for one in found.answers.values()):
            raise LockError("no lock of the canary: it has no answers")
        return found


@dataclass(frozen=True, slots=True)
class Difference:
    """One answer that is another."""

    what: str
    expected: str
    """Empty where nothing was expected."""
    found: str
    """Empty where there is nothing."""


def lock_file() -> Path:
    """The release's own answers."""
    return Path(str(packaged.files("geo_assets").joinpath("canary", "lock.json")))


def answers() -> Answers:
    """What this process makes of the sample: the same wherever the same libraries are."""
    folder = Path(str(packaged.files("geo_assets")))
    layers_value = yaml.safe_load(configuration.sample_layers_text())
    layers = configuration.parse_layers(layers_value, "layers")
    found = {f"crs {crs}": _place(crs, x, y) for crs, x, y in PLACES}
    edits: list[ValidEdit] = []
    for name, result in _features(folder / "canary" / "features.json", layers):
        if isinstance(result, Refused):
            found[f"feature {name}"] = f"refused: {result.reason}"
        else:
            # Of the place to DIGITS of a degree: it was reprojected, mended and cut.
            found[f"feature {name}"] = _rounded(result)
            edits.append(result)
    for (z, x, y), data in zip(TILES, _build(edits, layers), strict=True):
        found[f"tile {z}/{x}/{y}"] = workkey.tile_hash(data)[:32] if data else "empty"
    return Answers({name: str(version) for name, version in hello(layers_value)["libraries"].items()}, found)


def compare(expected: Answers, found: Answers) -> list[Difference]:
    """Answers that differ, in the order of the sample; what only one side has is among them."""
    names = list(dict.fromkeys((*expected.answers, *found.answers)))
    pairs = ((name, expected.answers.get(name, ""), found.answers.get(name, "")) for name in names)
    return [Difference(name, before, after) for name, before, after in pairs if before != after]


def published(stack: Stack, most: int) -> tuple[int, list[Difference]]:
    """Tiles that are published and would be others if this process built them; of how many.

    Args:
        stack: The map; it is only read.
        most: At most so many tiles, spread over all of them.

    Tiles that wait to be built are left out: they are to change.
    """
    from geo_assets.services.shadow import sample_of
    from geo_assets.services.shadow_build import CHUNK_TILES
    from geo_assets.services.tileset.snapshot import Region

    whole = Region("the whole map", tuple(range(stack.layers.max_zoom + 1)))
    keys = sorted(sample_of(stack, whole, most))
    looked, differing = 0, list[Difference]()
    for start in range(0, len(keys), CHUNK_TILES):
        chunk = keys[start : start + CHUNK_TILES]
        states = stack.ledger.read(chunk)
        chunk = [key for key in chunk if states[key].wanted <= states[key].built and states[key].revision]
        if not chunk:
            continue
        rows = stack.features.features(build_worker.boxes_of(chunk, stack.layers))
        features = TileFeatures(
            source=rows.source,
            feature_id=rows.feature_id,
            layer=rows.layer,
            geometry=rows.geometry,
            properties=rows.properties,
            tiles=[Tile.from_key(key) for key in chunk],
            pair_tile=rows.pair_tile,
            pair_row=rows.pair_row,
        )
        for key, tile in zip(chunk, engines.encode(stack, features), strict=True):
            looked += 1
            before = states[key].content_hash or "empty"
            after = workkey.tile_hash(tile.data) if tile.data else "empty"
            if before != after:
                differing.append(Difference(f"tile {tile.tile.path}", before[:32], after[:32]))
    return looked, differing


def _place(crs: str, x: float, y: float) -> str:
    try:
        made, operation = to_wgs84(crs, np.array([[x, y]]))
    except Refused as fault:
        return f"refused: {fault.reason}"
    lon, lat = made[0].tolist()
    return f"{lon:.{DIGITS}f}, {lat:.{DIGITS}f}; accuracy {operation.accuracy_m}"


def _features(path: Path, layers: LayerSet) -> Iterator[tuple[str, ValidEdit | Refused]]:
    source = Source("canary", default_crs="EPSG:4326", repair="make_valid")
    context = FeatureContext(source, layers, "canary", RECEIVED_MS, in_collection=True)
    values: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    texts = [json.dumps(value).encode() for value in values]
    for value, result in zip(values, validate_all(texts, context), strict=True):
        yield json.dumps(value["id"]), result


def _rounded(edit: ValidEdit) -> str:
    """Hash of a stored feature whose coordinates are rounded: what differs in the last bit is the processor's."""
    import shapely

    text = ""
    if edit.geometry is not None:
        shape = shapely.from_wkb(edit.geometry)
        places = np.round(shapely.get_coordinates(shape), DIGITS) + 0.0
        text = f"{shape.geom_type} {places.shape[0]} " + hashlib.sha256(places.astype("<f8").tobytes()).hexdigest()
    told = f"{edit.layer} {edit.properties} {edit.min_zoom}-{edit.max_zoom} {edit.repaired} {text}"
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def _build(edits: Sequence[ValidEdit], layers: LayerSet) -> list[bytes]:
    tiles = [Tile(*place) for place in TILES]
    boxes = tile_boxes([tile.key for tile in tiles], layers.buffer_fraction)
    pairs = [
        (index, row)
        for index, (tile, (west, south, east, north)) in enumerate(zip(tiles, boxes.tolist(), strict=True))
        for row, edit in enumerate(edits)
        if edit.bbox is not None
        and visible(edit.min_zoom, edit.max_zoom, tile.z)
        and edit.bbox[0] <= east
        and edit.bbox[2] >= west
        and edit.bbox[1] <= north
        and edit.bbox[3] >= south
    ]
    of_tile, of_row = np.array(pairs, np.int64).reshape(-1, 2).T
    features = TileFeatures(
        source=[edit.source for edit in edits],
        feature_id=[edit.feature_id for edit in edits],
        layer=[edit.layer for edit in edits],
        geometry=[edit.geometry for edit in edits],
        properties=[edit.properties for edit in edits],
        tiles=tiles,
        pair_tile=of_tile,
        pair_row=of_row,
    )
    return [one.data for one in encode_tiles(features, layers)]
