"""Framing to bytes: features of many tiles as one array of integers, turned into protobuf in one call.

Everything in a feature message is a varint (field keys, lengths, id, tags, geometry), so the features of all tiles are
laid out by cumulative sums first and encoded last. Mapbox Vector Tile 2.1, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from geo_assets.tiles.encode.ragged import Bools, Ints, offsets, spread, sums, where
from geo_assets.tiles.encode.shapes import LINE, POINT, POLYGON, Shapes
from geo_assets.tiles.encode.tags import Tags
from geo_assets.tiles.encode.varint import Bytes, Unsigned, ragged_varints, sizes, varint, zigzag_deltas

_MOVE_TO, _LINE_TO, _CLOSE_PATH = 1, 2, 15
"""Command integers of section 4.3.1; the first two still want their count, `id | count << 3`."""


@dataclass(frozen=True, slots=True)
class Features:
    """Features in the order in which they are written, those of one group (a layer of a tile) side by side.

    `shapes[i]` has integer coordinates in valid order, rings unclosed; `row[i]` says whose tags and id it has.
    """

    group: Ints
    row: Ints
    shapes: Shapes


def geometry(shapes: Shapes) -> tuple[Unsigned, Ints]:
    """Command and parameter integers of each shape, and how many each has (sections 4.3.1 to 4.3.4)."""
    ring_kind = shapes.kind
    if len(shapes.shell) > len(shapes.kind):
        ring_kind = ring_kind.repeat(shapes.rings[1:] - shapes.rings[:-1])
    starts = shapes.points[:-1]
    lengths = shapes.lengths()
    zigzag = zigzag_deltas(shapes.xy, shapes.item_points()[:-1])
    # A ring is MoveTo(1) x y LineTo(n - 1) …, a polygon's then ClosePath; an item's points are MoveTo(n) ….
    point = ring_kind == POINT
    extra = np.where(point, 1, np.where(ring_kind == LINE, 2, 3))
    ring_bounds = offsets(2 * lengths + extra)
    result = np.empty(int(ring_bounds[-1]), np.uint64)
    begin = ring_bounds[:-1]
    result[begin] = np.where(point, lengths << 3 | _MOVE_TO, 1 << 3 | _MOVE_TO)
    longer = where(~point)
    result[begin[longer] + 3] = (lengths[longer] - 1) << 3 | _LINE_TO
    closed = where(ring_kind == POLYGON)
    result[ring_bounds[1:][closed] - 1] = _CLOSE_PATH
    # Where x of each coordinate goes: after the ring's commands so far.
    place = (begin + 1 - 2 * starts).repeat(lengths) + 2 * np.arange(len(zigzag))
    if len(longer):
        after = (~point).repeat(lengths)
        after[starts] = False
        place += after
    result[place] = zigzag[:, 0]
    result[place + 1] = zigzag[:, 1]
    bounds = ring_bounds[shapes.rings]
    return result, bounds[1:] - bounds[:-1]


def frame(
    features: Features, groups: int, tags: Tags, ids: Unsigned, has_id: Bools, names: list[bytes], extent: int
) -> list[bytes]:
    """The layer messages of all groups, tag and length of the tile's field included; b"" for a group without features.

    Args:
        features: The features, sorted by group.
        groups: How many groups there are.
        tags: Attributes of rows.
        ids: (rows) MVT ids.
        has_id: (rows) whether the row has one.
        names: (groups) name of the layer as UTF-8.
        extent: Units a side of a tile.
    """
    row, group = features.row, features.group
    count = len(row)
    tag_starts = tags.bounds[row]
    tag_counts = tags.bounds[row + 1] - tag_starts
    flat = spread(tag_starts, tag_counts)
    tag_group = group.repeat(tag_counts)
    key, key_fields, key_bounds = tables(tag_group, tags.key[flat], groups, len(tags.keys))
    value, value_fields, value_bounds = tables(tag_group, tags.value[flat], groups, len(tags.values))
    commands, command_counts = geometry(features.shapes)

    # Bytes of each part of a feature, then of the whole: what lengths have to say.
    tag_bounds = offsets(tag_counts)
    command_bounds = offsets(command_counts)
    total = len(key)
    each_size = sizes(np.concatenate([key, value, commands]))
    tag_bytes = sums(each_size[:total] + each_size[total : 2 * total], tag_bounds)
    command_bytes = sums(each_size[2 * total :], command_bounds)
    with_id = has_id[row]
    with_tags = tag_counts > 0
    id_values = ids[row]
    heads = sizes(np.concatenate([tag_bytes.view(np.uint64), command_bytes.view(np.uint64), id_values]))
    message = with_tags * (1 + heads[:count] + tag_bytes)
    message += 3 + heads[count : 2 * count] + command_bytes
    message += with_id * (1 + heads[2 * count :])

    # [0x12 length] [0x08 id]? [0x12 length key value …]? [0x18 type] [0x22 length command …], all of it varints.
    tags_at = 2 + 2 * with_id
    tags_end = tags_at + with_tags * (2 + 2 * tag_counts)
    bounds = offsets(tags_end + 4 + command_counts)
    values = np.empty(int(bounds[-1]), np.uint64)
    begin = bounds[:-1]
    values[begin] = 0x12
    values[begin + 1] = message
    some = where(with_id)
    at = begin[some] + 2
    values[at] = 0x08
    values[at + 1] = id_values[some]
    some = where(with_tags)
    at = (begin + tags_at)[some]
    values[at] = 0x12
    values[at + 1] = tag_bytes[some]
    at = (begin + tags_at + 2 - 2 * tag_bounds[:-1]).repeat(tag_counts) + 2 * np.arange(len(key))
    values[at] = key
    values[at + 1] = value
    at = begin + tags_end
    values[at] = 0x18
    values[at + 1] = features.shapes.kind
    values[at + 2] = 0x22
    values[at + 3] = command_bytes
    values[(at + 4 - command_bounds[:-1]).repeat(command_counts) + np.arange(len(commands))] = commands
    data, _ = ragged_varints(values)

    feature_bytes = message + 1 + sizes(message.view(np.uint64))
    per_group = offsets(np.bincount(group, minlength=groups))
    data_bounds = offsets(feature_bytes)[per_group]
    keys, key_lengths = tags.keys.take(key_fields)
    value_data, value_lengths = tags.values.take(value_fields)
    key_ends = offsets(key_lengths)[key_bounds]
    value_ends = offsets(value_lengths)[value_bounds]
    whole, keys_view, values_view = data.data, keys.data, value_data.data
    result = [b""] * groups
    numbers: list[int] = where(per_group[1:] > per_group[:-1]).tolist()
    for number in numbers:
        result[number] = layer_message(
            names[number],
            whole[data_bounds[number] : data_bounds[number + 1]],
            keys_view[key_ends[number] : key_ends[number + 1]],
            values_view[value_ends[number] : value_ends[number + 1]],
            extent,
        )
    return result


def layer_message(
    name: bytes, features: bytes | memoryview, keys: bytes | memoryview, values: bytes | memoryview, extent: int
) -> bytes:
    """A layer of a tile, tag and length of the tile's field included, of its fields in the order in which they stand.

    Args:
        name: Name of the layer as UTF-8.
        features: Its features.
        keys: Its table of keys.
        values: Its table of values.
        extent: Units a side of a tile.
    """
    parts = (b"\x78\x02\x0a" + varint(len(name)) + name, features, keys, values, b"\x28" + varint(extent))
    return b"".join((b"\x1a", varint(sum(map(len, parts))), *parts))


def bodies(shapes: Shapes) -> tuple[Bytes, Ints]:
    """What a feature's message ends with, type and geometry, of each shape; and where each begins and the last ends.

    What stands before it depends on the tables of keys and values: see `compiled.written`.
    """
    commands, counts = geometry(shapes)
    command_bounds = offsets(counts)
    command_bytes = sums(sizes(commands), command_bounds)
    bounds = offsets(4 + counts)
    values = np.empty(int(bounds[-1]), np.uint64)
    begin = bounds[:-1]
    values[begin] = 0x18
    values[begin + 1] = shapes.kind
    values[begin + 2] = 0x22
    values[begin + 3] = command_bytes
    values[(begin + 4 - command_bounds[:-1]).repeat(counts) + np.arange(len(commands))] = commands
    data, _ = ragged_varints(values)
    return data, offsets(3 + sizes(command_bytes.view(np.uint64)) + command_bytes)


def tables(group: Ints, code: Ints, groups: int, codes: int) -> tuple[Unsigned, Ints, Ints]:
    """Tables of the codes in use by group, ascending: each item's number in its table, the tables, their bounds.

    Args:
        group: (items) number of the group, a layer of a tile.
        code: (items) code of the key or value.
        groups: How many groups there are.
        codes: How many codes there are.
    """
    pair = group * codes + code
    if groups * codes <= 4 * len(code) + 4096:
        used = np.zeros(groups * codes, np.bool_)
        used[pair] = True
        rank = used.cumsum()
        table = where(used)
        number = rank[pair] - 1
    else:
        table, number = np.unique(pair, return_inverse=True)
    bounds = np.searchsorted(table, np.arange(groups + 1) * codes)
    local = number - bounds[group]
    return local.astype(np.uint64), table % max(1, codes), bounds
