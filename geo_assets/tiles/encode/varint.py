"""Varints of whole arrays at once (Protocol Buffers encoding, base 128)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from geo_assets.tiles.encode.ragged import Floats, Ints

Bytes = npt.NDArray[np.uint8]
Unsigned = npt.NDArray[np.uint64]

_ONE_BYTE, _TWO_BYTES = np.uint64(1 << 7), np.uint64(1 << 14)
_KEPT = 1 << 15
"""Numbers below are kept once they were met: tags, lengths and most steps of a geometry in a tile of 4,096 units."""


def varint(value: int) -> bytes:
    """One number as a varint."""
    result = bytearray()
    while value > 0x7F:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)


class _Varints(dict[int, bytes]):
    def __missing__(self, value: int) -> bytes:
        result = varint(value)
        if value < _KEPT:
            self[value] = result
        return result


VARINTS = _Varints()
"""`VARINTS[n]` is `varint(n)`, looked up instead of calculated."""


def zigzag_deltas(xy: Floats, first: Ints) -> Unsigned:
    """Steps from each coordinate to the next as zigzag integers; those at `first` step from 0, 0."""
    whole = xy.astype(np.int64)
    delta = whole.copy()
    delta[1:] -= whole[:-1]
    delta[first] = whole[first]
    return ((delta << 1) ^ (delta >> 63)).view(np.uint64)


def sizes(values: Unsigned) -> Ints:
    """Bytes that each value takes: 1 to 10."""
    result = (values >= _ONE_BYTE).astype(np.int64)
    result += 1
    # Few take more than two bytes.
    more = (values >= _TWO_BYTES).nonzero()[0]
    if len(more):
        result[more] = 2 + sizes(values[more] >> np.uint64(14))
    return result


def ragged_varints(values: Unsigned, lengths: Ints | None = None) -> tuple[Bytes, Ints]:
    """All values as varints, one after the other, and the bytes that each takes."""
    if lengths is None:
        lengths = sizes(values)
    ends = lengths.cumsum()
    if not len(values):
        return np.zeros(0, np.uint8), lengths
    result = np.empty(int(ends[-1]), np.uint8)
    position = ends - lengths
    left = lengths
    while True:
        more = left > 1
        low = values.astype(np.uint8)
        np.bitwise_and(low, 0x7F, out=low)
        low |= more.view(np.uint8) << np.uint8(7)
        result[position] = low
        again = np.flatnonzero(more)
        if not len(again):
            return result, lengths
        values = values[again] >> np.uint64(7)
        position = position[again] + 1
        left = left[again] - 1
