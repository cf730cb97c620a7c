"""A tile of few features, feature by feature: the same bytes as `tags` and `framing` make, without arrays.

A call of numpy costs about as much as a feature costs here, and laying a tile out as arrays takes hundreds of them.
What decides about bytes (the order of values, their fields, the geometry's way to the grid) is shared with the arrays'
way and not written twice; a property test holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from geo_assets.tiles.encode.shapes import LINE, POINT, Shapes
from geo_assets.tiles.encode.tags import ID_PROPERTY, key_field, value_codes
from geo_assets.tiles.encode.varint import VARINTS, zigzag_deltas

FEATURES = 96
"""Features up to which a tile that comes alone goes this way."""

DIGITS = 20
"""Digits of the largest uint64: what has more is no MVT id, and is not read as a number."""

_CLOSE_PATH = b"\x0f"
_MOVE_TO_ONE = b"\x09"
_TYPES = tuple(b"\x18%c\x22" % kind for kind in range(4))


def own_tags(properties: Mapping[str, Any], allowed: frozenset[str] | None, other_id: Any) -> Mapping[str, Any]:
    """The attributes of a feature that go into a tile, an id that is no uint64 among them.

    Args:
        properties: Attributes of the feature.
        allowed: Those that its layer shows; None for all.
        other_id: The id, when it has to be an attribute; else None.
    """
    own = properties if allowed is None else {name: properties[name] for name in properties if name in allowed}
    if other_id is not None:
        name = ID_PROPERTY
        while name in own:
            name = f"_{name}"
        own = {**own, name: other_id}
    return own


def own_id(text: str) -> int | None:
    """The MVT id that an id's JSON text is; None when it is no uint64."""
    if not text.isdecimal() or len(text) > DIGITS:
        return None
    value = int(text)
    return value if value < 1 << 64 and str(value) == text else None


def commands(shapes: Shapes) -> list[bytes]:
    """Commands and parameters of each shape as varints (Mapbox Vector Tile 2.1, sections 4.3.1 to 4.3.4)."""
    numbers: list[int] = zigzag_deltas(shapes.xy, shapes.item_points()[:-1]).ravel().tolist()
    varint = VARINTS.__getitem__
    parameters = list(map(varint, numbers))
    points: list[int] = (2 * shapes.points).tolist()
    rings: list[int] = shapes.rings.tolist()
    join = b"".join
    result: list[bytes] = []
    kinds: list[int] = shapes.kind.tolist()
    for item, kind in enumerate(kinds):
        ring, last = rings[item], rings[item + 1]
        begin = points[ring]
        if kind == POINT:
            end = points[last]
            result.append(varint((end - begin) // 2 << 3 | 1) + join(parameters[begin:end]))
            continue
        path = b""
        while ring < last:
            ring += 1
            end = points[ring]
            path += _MOVE_TO_ONE + parameters[begin] + parameters[begin + 1]
            path += varint(((end - begin) // 2 - 1) << 3 | 2) + join(parameters[begin + 2 : end])
            if kind != LINE:
                path += _CLOSE_PATH
            begin = end
        result.append(path)
    return result


def frame_layer(
    name: bytes,
    ids: Sequence[int | None],
    tags: Sequence[Mapping[str, Any]],
    kinds: Sequence[int],
    geometry: Sequence[bytes],
    extent: int,
) -> bytes:
    """The layer message of features in their order, tag and length of the tile's field included.

    Args:
        name: Name of the layer as UTF-8.
        ids: (features) MVT id, None where there is none.
        tags: (features) attributes.
        kinds: (features) POINT, LINE or POLYGON.
        geometry: (features) commands.
        extent: Units a side of a tile.
    """
    varint = VARINTS.__getitem__
    join = b"".join
    codes, fields = value_codes([value for own in tags for value in own.values()])
    if -1 in codes:
        # Nulls are left out, and keys that have nothing else.
        code = iter(codes)
        tags = [{name: value for name, value in own.items() if next(code) >= 0} for own in tags]
        codes = [code for code in codes if code >= 0]
    keys = sorted(set(chain.from_iterable(tags)))
    key_number = {key: varint(place) for place, key in enumerate(keys)}
    value_numbers = list(map(varint, codes))
    begin = 0
    parts = [b"\x78\x02\x0a", varint(len(name)), name]
    for identifier, own, kind, path in zip(ids, tags, kinds, geometry, strict=True):
        message = _TYPES[kind] + varint(len(path)) + path
        if own:
            end = begin + len(own)
            pairs = sorted(zip(own, value_numbers[begin:end], strict=True))
            begin = end
            data = join([key_number[key] + value for key, value in pairs])
            message = b"\x12" + varint(len(data)) + data + message
        if identifier is not None:
            message = b"\x08" + varint(identifier) + message
        parts += (b"\x12", varint(len(message)), message)
    parts += map(key_field, keys)
    parts += fields
    parts += (b"\x28", varint(extent))
    data = join(parts)
    return b"\x1a" + varint(len(data)) + data
