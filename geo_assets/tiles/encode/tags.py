"""Attributes to tags: properties become columns of codes into sorted tables of distinct keys and values.

Values keep their JSON type and exact value. Which MVT value they become:

    false, true           bool_value
    integer 0 .. 2^64-1   uint_value
    integer -2^63 .. -1   sint_value
    integer beyond        string_value of its digits (a double would be another number)
    1.5, 1.0, 1e3         double_value; 1, 1.0 and true are three values
    "text"                string_value
    [..], {..}            string_value of its JSON text: keys sorted, no spaces
    null                  the key is left out
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import itemgetter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from geo_assets.tiles.encode.ragged import Bools, Ints, offsets, spread
from geo_assets.tiles.encode.varint import Bytes, ragged_varints

ID_PROPERTY = "_id"
"""Property under which an id that is no uint64 reaches the map, for `promoteId`.

A feature with an own attribute of this name in the tile keeps it: its id then stands under the next free `__id`, ….
"""

_ENCODER = msgspec.json.Encoder(order="deterministic")


@dataclass(frozen=True, slots=True)
class Blobs:
    """Byte strings in one array, told apart by offsets."""

    data: Bytes
    bounds: Ints

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def take(self, index: Ints) -> tuple[Bytes, Ints]:
        """The strings of these numbers, joined, and the length of each."""
        starts = self.bounds[index]
        lengths = self.bounds[index + 1] - starts
        return self.data[spread(starts, lengths)], lengths


@dataclass(frozen=True, slots=True)
class Tags:
    """The attributes of rows as codes: row i has `key[k], value[k]`, k in `bounds[i]..bounds[i + 1]`, keys ascending.

    Codes are ranks in the sorted distinct keys and values, so that their order depends on neither rows nor batch.
    `keys` and `values` hold each one as its field of an MVT layer, tag and length included.
    """

    bounds: Ints
    key: Ints
    value: Ints
    keys: Blobs
    values: Blobs


def parse(properties: Sequence[str]) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Properties of rows as dictionaries, and by row what is wrong with those that are no JSON object."""
    try:
        rows: Any = msgspec.json.decode(f"[{','.join(properties)}]", type=list[dict[str, Any]])
        if len(rows) == len(properties):
            return rows, {}
    except (msgspec.DecodeError, UnicodeError):
        pass
    rows, wrong = [], {}
    for number, text in enumerate(properties):
        row: Any = None
        try:
            row = json.loads(text, parse_float=_float, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            wrong[number] = f"properties: {error}"
        if row is not None and not isinstance(row, dict):
            wrong[number] = f"properties are a JSON {type(row).__name__}, not an object"
        rows.append(row if isinstance(row, dict) else {})
    return rows, wrong


def tags(
    rows: Sequence[dict[str, Any]], layer: Ints, allowed: Sequence[frozenset[str] | None], ids: dict[int, Any]
) -> Tags:
    """Lay the attributes of rows out as codes.

    Args:
        rows: Properties of each row.
        layer: (rows) number of the layer a row is in.
        allowed: By layer the attributes that go into a tile; None for all.
        ids: By row an id that has to be a property.
    """
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    names = list(chain.from_iterable(rows))
    values = list(chain.from_iterable(map(dict.values, rows)))
    row = np.repeat(np.arange(len(rows)), lengths)
    distinct = sorted(set(names))
    number = dict(zip(distinct, range(len(distinct)), strict=True))
    key = _codes(number, names)
    keep = np.ones(len(names), np.bool_)
    if any(some is not None for some in allowed):
        table = np.array([[some is None or name in some for name in distinct] for some in allowed], np.bool_)
        keep = table.reshape(len(allowed), len(distinct))[layer[row], key]
    if ids:
        taken: set[tuple[int, str]] = set()
        own = [name for name in distinct if name.endswith(ID_PROPERTY) and not name[: -len(ID_PROPERTY)].strip("_")]
        for name in own:
            taken.update(zip(row[keep & (key == number[name])].tolist(), repeat(name)))
        more: list[str] = []
        for of in ids:
            name = ID_PROPERTY
            while (of, name) in taken:
                name = f"_{name}"
            more.append(name)
        names += more
        values += ids.values()
        distinct = sorted({*distinct, *more})
        number = dict(zip(distinct, range(len(distinct)), strict=True))
        key = _codes(number, names)
        row = np.concatenate([row, np.fromiter(ids, np.int64, len(ids))])
        keep = np.concatenate([keep, np.ones(len(ids), np.bool_)])
    value, value_fields, present = _values(values)
    keep &= present
    if not keep.all():
        row, key, value = row[keep], key[keep], value[keep]
    order = row * max(1, len(distinct)) + key
    if len(order) and not (order[1:] > order[:-1]).all():
        by = np.argsort(order, kind="stable")
        row, key, value = row[by], key[by], value[by]
    return Tags(offsets(np.bincount(row, minlength=len(rows))), key, value, _texts(distinct, b"\x1a"), value_fields)


def _values(values: list[Any]) -> tuple[Ints, Blobs, Bools]:
    """Codes of values, the sorted distinct values as MVT fields, and which values are there at all (not null)."""
    code = np.zeros(len(values), np.int64)
    present = np.ones(len(values), np.bool_)
    types = list(map(type, values))
    kinds = dict.fromkeys(types)
    numbers = dict(zip(kinds, range(len(kinds)), strict=True))
    of_type = _codes(numbers, types)
    texts: list[tuple[Ints, list[str]]] = []
    blobs: list[Blobs] = []
    base = 0

    def pick(kind: type) -> tuple[Ints, list[Any]]:
        index = np.flatnonzero(of_type == numbers[kind])
        if len(index) == len(values):
            return index, values
        return index, [values[index[0]]] if len(index) == 1 else list(itemgetter(*index.tolist())(values))

    if bool in kinds:
        index, some = pick(bool)
        code[index] = np.fromiter(some, np.int64, len(some))
        blobs.append(Blobs(np.frombuffer(b"\x22\x02\x38\x00\x22\x02\x38\x01", np.uint8), np.array([0, 4, 8])))
        base = 2
    if int in kinds:
        index, some = pick(int)
        try:
            numeric = np.array(some, np.int64)
        except OverflowError:
            low, high = -(1 << 63), 1 << 64
            beyond = np.fromiter((not low <= each < high for each in some), np.bool_, len(some))
            texts.append((index[beyond], [str(each) for each in some if not low <= each < high]))
            index = index[~beyond]
            some = [each for each in some if low <= each < high]
            negative = np.fromiter((each < 0 for each in some), np.bool_, len(some))
            bits = np.fromiter((each & 0xFFFFFFFFFFFFFFFF for each in some), np.uint64, len(some))
        else:
            negative = numeric < 0
            bits = numeric.view(np.uint64)
        for which, tag, zigzag in ((negative, 0x30, True), (~negative, 0x28, False)):
            if which.any():
                unique, inverse = np.unique(bits[which], return_inverse=True)
                code[index[which]] = base + inverse
                signed = unique.view(np.int64)
                blobs.append(_integers(((signed << 1) ^ (signed >> 63)).view(np.uint64) if zigzag else unique, tag))
                base += len(unique)
    if float in kinds:
        index, some = pick(float)
        # By bits: 0.0 and -0.0 are two values.
        unique, inverse = np.unique(np.array(some, np.float64).view(np.uint64), return_inverse=True)
        code[index] = base + inverse
        field = np.empty((len(unique), 11), np.uint8)
        field[:, :3] = (0x22, 9, 0x19)
        field[:, 3:] = unique.astype("<u8").view(np.uint8).reshape(-1, 8)
        blobs.append(Blobs(field.reshape(-1), np.arange(len(unique) + 1) * 11))
        base += len(unique)
    if type(None) in kinds:
        present[of_type == numbers[type(None)]] = False
    for kind in kinds:
        if kind is str:
            texts.append(pick(str))
        elif kind not in (bool, int, float, type(None)):
            index, some = pick(kind)
            texts.append((index, [_json(each) for each in some]))
    if texts:
        distinct = sorted(set().union(*(some for _, some in texts)))
        number = dict(zip(distinct, range(base, base + len(distinct)), strict=True))
        for index, some in texts:
            code[index] = _codes(number, some)
        blobs.append(_texts(distinct, b"\x22", b"\x0a"))
    return code, _join(blobs), present


def _integers(values: npt.NDArray[np.uint64], tag: int) -> Blobs:
    """Layer fields `values` of one integer each."""
    data, lengths = ragged_varints(values)
    head = np.empty((len(values), 3), np.uint8)
    head[:, 0], head[:, 1], head[:, 2] = 0x22, lengths + 1, tag
    bounds = offsets(lengths + 3)
    result = np.empty(int(bounds[-1]), np.uint8)
    result[(bounds[:-1, None] + np.arange(3)).reshape(-1)] = head.reshape(-1)
    result[spread(bounds[:-1] + 3, lengths)] = data
    return Blobs(result, bounds)


def _texts(texts: Sequence[str], outer: bytes, inner: bytes = b"") -> Blobs:
    """Layer fields of one text each: a key, or a value with the tag of its own."""
    fields: list[bytes] = []
    for text in texts:
        data = _utf8(text)
        if inner:
            data = inner + _varint(len(data)) + data
        fields.append(outer + _varint(len(data)) + data)
    return Blobs(
        np.frombuffer(b"".join(fields), np.uint8), offsets(np.fromiter(map(len, fields), np.int64, len(fields)))
    )


def _join(blobs: list[Blobs]) -> Blobs:
    if not blobs:
        return Blobs(np.zeros(0, np.uint8), np.zeros(1, np.int64))
    return Blobs(
        np.concatenate([blob.data for blob in blobs]), offsets(np.concatenate([np.diff(blob.bounds) for blob in blobs]))
    )


def _codes(number: dict[Any, int], items: Iterable[Any]) -> Ints:
    found = list(map(number.__getitem__, items))
    return np.array(found, np.int64)


def _utf8(text: str) -> bytes:
    """UTF-8; half a surrogate pair, which JSON can spell and Unicode does not have, becomes U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    result = bytearray()
    while value > 0x7F:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)


def _json(value: Any) -> str:
    return _ENCODER.encode(value).decode()


def _float(text: str) -> float | str:
    """A number too large for a double stays what it is, as text."""
    value = float(text)
    return value if math.isfinite(value) else text


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")
