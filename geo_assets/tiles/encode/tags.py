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
import struct
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, count, repeat
from math import copysign, isfinite
from typing import Any

import msgspec
import numpy as np

from geo_assets.tiles.encode.ragged import Bools, Ints, offsets, spread
from geo_assets.tiles.encode.varint import VARINTS, Bytes

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
    `keys` and `values` hold each one as its field of an MVT layer, tag and length included; `names` and `plain` are
    the same keys and values before that.
    """

    bounds: Ints
    key: Ints
    value: Ints
    keys: Blobs
    values: Blobs
    names: list[str]
    plain: list[Any]


def parse(properties: Sequence[str]) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Properties of rows as dictionaries, and by row what is wrong with those that are no JSON object."""
    none: dict[int, str] = {}
    try:
        rows: Any = msgspec.json.decode(f"[{','.join(properties)}]", type=list[dict[str, Any]])
        if len(rows) == len(properties):
            return rows, none
    except (msgspec.DecodeError, UnicodeError):
        pass
    rows, wrong = [], none
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
    lengths = np.array(list(map(len, rows)), np.int64)
    names = list(chain.from_iterable(rows))
    values: list[Any] = list(chain.from_iterable(own.values() for own in rows))
    row: Ints = np.arange(len(rows)).repeat(lengths)
    distinct = sorted(set(names))
    number = dict(zip(distinct, range(len(distinct)), strict=True))
    key = _codes(number, names)
    keep: Bools | None = None
    if any(some is not None for some in allowed):
        table = np.array([[some is None or name in some for name in distinct] for some in allowed], np.bool_)
        keep = table.reshape(len(allowed), len(distinct))[layer[row], key]
    if ids:
        taken: set[tuple[int, str]] = set()
        for name in distinct:
            if name.endswith(ID_PROPERTY) and not name[: -len(ID_PROPERTY)].strip("_"):
                own = key == number[name]
                taken.update(zip(row[own if keep is None else own & keep].tolist(), repeat(name)))
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
        row = np.concatenate([row, np.array(list(ids), np.int64)])
        if keep is not None:
            keep = np.concatenate([keep, np.ones(len(ids), np.bool_)])
    value, table, fields, nulls = _values(values)
    if nulls:
        keep = value >= 0 if keep is None else keep & (value >= 0)
    if keep is not None and not keep.all():
        row, key, value = row[keep], key[keep], value[keep]
    if keep is not None or ids:
        lengths = np.bincount(row, minlength=len(rows))
    order = row * max(1, len(distinct)) + key
    if len(order) and not (order[1:] > order[:-1]).all():
        by = order.argsort(kind="stable")
        key, value = key[by], value[by]
    keys = _blobs(list(map(key_field, distinct)))
    return Tags(offsets(lengths), key, value, keys, _blobs(fields), distinct, table)


def value_codes(values: list[Any]) -> tuple[list[int], list[bytes]]:
    """Codes of values, -1 for null, and the sorted distinct values as MVT fields."""
    found, table, _, fields = _distinct(values)
    code = dict(zip(table, range(len(table)), strict=True))
    return [code.get(number, -1) for number in found], fields


def _values(values: list[Any]) -> tuple[Ints, list[Any], list[bytes], bool]:
    """`value_codes` as an array, the sorted distinct values, the same as fields, and whether there are nulls."""
    found, table, plain, fields = _distinct(values)
    number = np.array(found, np.int64)
    code = np.full(number.max(initial=-1) + 1, -1, np.int64)
    code[table] = np.arange(len(table))
    return code[number], plain, fields, len(table) < len(code)


def _distinct(values: list[Any]) -> tuple[list[int], list[int], list[Any], list[bytes]]:
    """Number of each value among the distinct ones, those numbers in the order of the table, its values and fields."""
    plain = values
    kinds = set(map(type, values))
    if not kinds <= _PLAIN:
        plain = [each if type(each) in _PLAIN else _json(each) for each in values]
    values = plain
    if float in kinds and 0.0 in values:
        # Equal for Python, and two values all the same.
        values = [
            _NEGATIVE_ZERO if type(each) is float and not each and copysign(1.0, each) < 0 else each for each in values
        ]
    # By type and value: 1, 1.0 and true are equal for Python too.
    next_number = count().__next__
    numbers: defaultdict[type, defaultdict[Any, int]] = defaultdict(lambda: defaultdict(next_number))
    found = [numbers[type(value)][value] for value in values]
    table: list[int] = []
    distinct: list[Any] = []
    fields: list[bytes] = []
    for kind in _ORDER:
        number = numbers.get(kind)
        if number is not None:
            some = sorted(number)
            if kind is int and not (some[0] >= _LOWEST and some[-1] <= _HIGHEST):
                return _distinct([str(each) if type(each) is int and _beyond(each) else each for each in plain])
            table += map(number.__getitem__, some)
            distinct += some
            fields += map(_FIELDS[kind], some)
    return found, table, distinct, fields


def place_of_value(value: Any) -> tuple[int, Any]:
    """What the distinct values of a table are sorted by.

    Args:
        value: One of them, as in `Tags.plain`; a text may be given as UTF-8, which sorts alike.
    """
    return _PLACE[type(value)], value


class _NegativeZero:
    """What -0.0 is in the tables."""

    __slots__ = ()

    def __lt__(self, other: object) -> bool:
        return False


_NEGATIVE_ZERO = _NegativeZero()
_LOWEST, _HIGHEST = -(1 << 63), (1 << 64) - 1
_PLAIN = frozenset((bool, int, float, str, type(None)))
_ORDER = (bool, int, _NegativeZero, float, str)
"""Order of types in a table of values."""
_PLACE = {kind: place for place, kind in enumerate(_ORDER)} | {bytes: len(_ORDER) - 1}


@lru_cache(maxsize=10_000)
def _integer(value: int) -> bytes:
    return _field(b"\x22", b"\x28" + VARINTS[value] if value >= 0 else b"\x30" + VARINTS[-2 * value - 1])


def _beyond(value: int) -> bool:
    return not _LOWEST <= value <= _HIGHEST


def _text(value: str) -> bytes:
    data = _utf8(value)
    if len(data) < 0x7E:
        return b"\x22%c\x0a%c%b" % (len(data) + 2, len(data), data)
    return _field(b"\x22", _field(b"\x0a", data))


_double = partial(struct.Struct("<3sd").pack, b"\x22\x09\x19")
_FIELDS: dict[type, Callable[[Any], bytes]] = {
    bool: lambda value: b"\x22\x02\x38\x01" if value else b"\x22\x02\x38\x00",
    int: _integer,
    _NegativeZero: lambda _: _double(-0.0),
    float: _double,
    str: _text,
}


@lru_cache(maxsize=10_000)
def key_field(name: str) -> bytes:
    """A key as its field of an MVT layer."""
    return _field(b"\x1a", _utf8(name))


def _field(tag: bytes, data: bytes) -> bytes:
    return tag + VARINTS[len(data)] + data


def _blobs(fields: list[bytes]) -> Blobs:
    return Blobs(np.frombuffer(b"".join(fields), np.uint8), offsets(np.array(list(map(len, fields)), np.int64)))


def _codes(number: dict[str, int], items: list[str]) -> Ints:
    return np.array(list(map(number.__getitem__, items)), np.int64)


def _utf8(text: str) -> bytes:
    """UTF-8; half a surrogate pair, which JSON can spell and Unicode does not have, becomes U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


def _json(value: Any) -> str:
    return _ENCODER.encode(value).decode()


def _float(text: str) -> float | str:
    """A number too large for a double stays what it is, as text."""
    value = float(text)
    return value if isfinite(value) else text


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")
