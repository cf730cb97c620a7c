"""Loops over all tags and features of a tile, compiled by numba.

An edit of one feature moves the numbers of values all over its tile. Done with whole arrays that is some forty passes
over them; here each item is looked at once or twice. Nothing else is compiled: whole tiles are encoded in arrays. Who
keeps no encoded features does not import this, as the compiler takes 60 MB and a third of a second.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import numba  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
from numba.core.caching import NullCache  # pyright: ignore[reportMissingTypeStubs]

from geo_assets.tiles.encode.ragged import Bools, Ints, Numbers
from geo_assets.tiles.encode.varint import Bytes, Unsigned

_Function = TypeVar("_Function", bound=Callable[..., Any])


_all: list[Any] = []
_log = logging.getLogger(__name__)


def _compiled(function: _Function) -> _Function:
    """Compiled at its first call, and kept for others: in NUMBA_CACHE_DIR, beside this file or in the user's cache.

    Where none can be written, as in a container, each process compiles for itself, which takes some seconds.
    """
    try:
        made: Any = numba.njit(cache=True, nogil=True)(function)  # pyright: ignore[reportUnknownMemberType]
    except RuntimeError:
        made = numba.njit(nogil=True)(function)  # pyright: ignore[reportUnknownMemberType]
    _all.append(made)
    return made


@_compiled
def numbered(code: Numbers, bounds: Ints, codes: int) -> tuple[Numbers, Ints, Ints]:
    """Tables of the codes in use by layer, ascending, and the number of each tag's code in its table.

    Args:
        code: (tags) code of the key or value.
        bounds: (layers + 1) where the tags of each layer begin.
        codes: How many codes there are.

    Returns:
        Numbers of all tags; the tables, one after the other; where each of them begins and the last ends.
    """
    layers = len(bounds) - 1
    number = np.empty(len(code), np.int32)
    table = np.empty(len(code), np.int64)
    table_bounds = np.zeros(layers + 1, np.int64)
    rank = np.empty(codes, np.int32)
    filled = 0
    for layer in range(layers):
        begin, end = bounds[layer], bounds[layer + 1]
        if begin < end:
            rank[:] = -1
            for tag in range(begin, end):
                rank[code[tag]] = 0
            count = 0
            for each in range(codes):
                if rank[each] == 0:
                    rank[each] = count
                    table[filled + count] = each
                    count += 1
            filled += count
            for tag in range(begin, end):
                number[tag] = rank[code[tag]]
        table_bounds[layer + 1] = filled
    return number, table[:filled].copy(), table_bounds


@_compiled
def _size(value: np.uint64) -> int:
    """Bytes of a number as a varint."""
    size = 1
    while value > np.uint64(0x7F):
        value = value >> np.uint64(7)
        size += 1
    return size


@_compiled
def _put(data: Bytes, at: int, value: np.uint64) -> int:
    """Write a number as a varint; where the next one begins."""
    while value > np.uint64(0x7F):
        data[at] = np.uint8((value & np.uint64(0x7F)) | np.uint64(0x80))
        value = value >> np.uint64(7)
        at += 1
    data[at] = np.uint8(value)
    return at + 1


@_compiled
def written(
    ids: Unsigned,
    with_id: Bools,
    tag_counts: Numbers,
    key: Numbers,
    value: Numbers,
    body: Bytes,
    body_bounds: Ints,
) -> tuple[Bytes, Ints]:
    """Features as they stand in a layer: length, id and tags, then their bodies (see `framing.bodies`).

    `[0x12 length] [0x08 id]? [0x12 length key value …]?`: Mapbox Vector Tile 2.1, section 4.2.

    Args:
        ids: (features) MVT ids.
        with_id: (features) whether the feature has one.
        tag_counts: (features) how many tags each has.
        key: (tags) number of the key in its layer.
        value: (tags) number of the value in its layer.
        body: Type and geometry of all features.
        body_bounds: (features + 1) where each of them begins.

    Returns:
        The bytes, and where each feature begins and the last ends.
    """
    count = len(ids)
    bounds = np.empty(count + 1, np.int64)
    tag_bytes = np.empty(count, np.int64)
    message = np.empty(count, np.int64)
    total, tag = 0, 0
    for each in range(count):
        bounds[each] = total
        length = 0
        for at in range(tag, tag + tag_counts[each]):
            length += _size(np.uint64(key[at])) + _size(np.uint64(value[at]))
        tag += tag_counts[each]
        tag_bytes[each] = length
        whole = body_bounds[each + 1] - body_bounds[each]
        if tag_counts[each]:
            whole += 1 + _size(np.uint64(length)) + length
        if with_id[each]:
            whole += 1 + _size(ids[each])
        message[each] = whole
        total += 1 + _size(np.uint64(whole)) + whole
    bounds[count] = total
    data = np.empty(total, np.uint8)
    tag = 0
    for each in range(count):
        at = bounds[each]
        data[at] = 0x12
        at = _put(data, at + 1, np.uint64(message[each]))
        if with_id[each]:
            data[at] = 0x08
            at = _put(data, at + 1, ids[each])
        if tag_counts[each]:
            data[at] = 0x12
            at = _put(data, at + 1, np.uint64(tag_bytes[each]))
            for number in range(tag, tag + tag_counts[each]):
                at = _put(data, at, np.uint64(key[number]))
                at = _put(data, at, np.uint64(value[number]))
            tag += tag_counts[each]
        for byte in range(body_bounds[each], body_bounds[each + 1]):
            data[at] = body[byte]
            at += 1
    return data, bounds


@_compiled
def matched(high: Unsigned, low: Unsigned, wanted_high: Unsigned, wanted_low: Unsigned) -> tuple[Bools, Bools]:
    """Which digests are wanted, and which of the wanted ones are there.

    Args:
        high: First halves of the digests, ascending.
        low: Second halves.
        wanted_high: First halves of those that are wanted, in any order; ascending is quicker.
        wanted_low: Second halves.
    """
    keep = np.zeros(len(high), np.bool_)
    there = np.zeros(len(wanted_high), np.bool_)
    at = 0
    for each in range(len(wanted_high)):
        first = wanted_high[each]
        if each and first < wanted_high[each - 1]:
            at = 0
        if at + 8 < len(high) and high[at + 8] < first:
            # Far away: by halves.
            last = len(high)
            while at < last:
                middle = (at + last) // 2
                if high[middle] < first:
                    at = middle + 1
                else:
                    last = middle
        while at < len(high) and high[at] < first:
            at += 1
        if at < len(high) and high[at] == first and low[at] == wanted_low[each]:
            keep[at] = True
            there[each] = True
    return keep, there


@_compiled
def merged_digests(
    high: Unsigned, low: Unsigned, keep: Bools, more_high: Unsigned, more_low: Unsigned
) -> tuple[Unsigned, Unsigned, Numbers]:
    """Some digests and others, both ascending, in one order.

    Returns:
        Their halves, and the new number of each: of all of the first (-1 of those that go), then of the others.
    """
    count, more = len(high), len(more_high)
    number = np.full(count + more, -1, np.int32)
    total = more
    for each in range(count):
        total += keep[each]
    new_high, new_low = np.empty(total, np.uint64), np.empty(total, np.uint64)
    at, other = 0, 0
    for each in range(count + 1):
        while other < more and (each == count or more_high[other] < high[each]):
            new_high[at], new_low[at] = more_high[other], more_low[other]
            number[count + other] = at
            at += 1
            other += 1
        if each < count and keep[each]:
            new_high[at], new_low[at] = high[each], low[each]
            number[each] = at
            at += 1
    return new_high, new_low, number


@_compiled
def merged_table(used: Bools, place: Ints, known: Bools) -> tuple[Ints, Numbers]:
    """One sorted table of what is used of one and what another has beside it.

    Args:
        used: (table) which entries stay.
        place: (others) where each of the others is in the table or would be, ascending.
        known: (others) whether it is in the table; those entries stay.

    Returns:
        Where each entry comes from, in the table or behind its end in the others; the new place of each old entry (0
        for those that go), then of the others.
    """
    count, more = len(used), len(place)
    origin = np.empty(count + more, np.int64)
    to = np.zeros(count + more, np.int32)
    at, other = 0, 0
    for each in range(count + 1):
        while other < more and place[other] == each:
            if not known[other]:
                origin[at] = count + other
                to[count + other] = at
                at += 1
            other += 1
        if each < count and used[each]:
            origin[at] = each
            to[each] = at
            at += 1
    for other in range(more):
        if known[other]:
            to[count + other] = to[place[other]]
    return origin[:at].copy(), to


@_compiled
def joined(data: Bytes, bounds: Ints, numbers: Ints) -> Bytes:
    """Some of many strings, one after the other.

    Args:
        data: All of them.
        bounds: (strings + 1) where each begins.
        numbers: Which.
    """
    total = 0
    for each in numbers:
        total += bounds[each + 1] - bounds[each]
    result = np.empty(total, np.uint8)
    at = 0
    for each in numbers:
        for byte in range(bounds[each], bounds[each + 1]):
            result[at] = data[byte]
            at += 1
    return result


@_compiled
def occurrences(code: Numbers, codes: int) -> Ints:
    """How often each code occurs."""
    result = np.zeros(codes, np.int64)
    for each in range(len(code)):
        result[code[each]] += 1
    return result


def warm() -> None:
    """Compile everything, or load what was compiled before.

    What was kept may be damaged, as by a power cut, or there is no room to keep it: neither is a reason not to work.
    """
    if _works():
        return
    for each in _all:
        with suppress(Exception):
            each._cache.flush()
    if _works():
        return
    for each in _all:
        each._cache = NullCache()
    _call_all()


def _works() -> bool:
    """Whether everything can be called with what is kept."""
    try:
        _call_all()
    except Exception as fault:
        _log.warning("compiled anew, as what was kept cannot be used: %s: %s", type(fault).__name__, fault)
        return False
    return True


def _call_all() -> None:
    ints, own, ids = np.zeros(1, np.int32), np.zeros(2, np.int64), np.ones(1, np.uint64)
    yes, body = np.ones(1, np.bool_), np.frombuffer(b"\x00", np.uint8)
    bounds = np.array([0, 1])
    numbered(ints, bounds, 1)
    written(ids, yes, np.ones(1, np.int32), ints, ints, body, bounds)
    matched(ids, ids, ids, ids)
    merged_digests(ids, ids, yes, ids, ids)
    merged_table(yes, own[:1], yes)
    occurrences(ints, 1)
    joined(body, bounds, own[:1])
