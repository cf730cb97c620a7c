"""A tile put together from encoded features: those that did not change are neither read, drawn nor encoded again.

`encode_features` encodes, `changed` exchanges some features for others, `assembled` makes the tile. Its bytes are those
of `encode_tiles` for the same features, whatever came and went before: which numbers the keys and values of a layer
have is worked out anew each time, and every feature is written with them before its body, which is kept.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from geo_assets.tiles.encode import CHUNK_COORDINATES
from geo_assets.tiles.encode.framing import bodies, layer_message
from geo_assets.tiles.encode.grid import Draw, draw
from geo_assets.tiles.encode.ragged import Bools, Ints, Numbers, offsets, spread, where
from geo_assets.tiles.encode.records import EncodedTile, LeftOut, TileFeatures, in_order
from geo_assets.tiles.encode.rows import Rows
from geo_assets.tiles.encode.tags import key_field, place_of_value
from geo_assets.tiles.encode.varint import Unsigned
from geo_assets.tiles.layers import LayerSet
from geo_assets.tiles.tile import Tile

_VALUE_BYTES = 64
"""Most that a value takes in memory beside its field: a text as long as the field, a place in a list, a bound."""
_OVERHEAD_BYTES = 6_000
"""Of the arrays themselves, whatever is in them."""

_MOST_RUNS = 200
"""Runs up to which an array is copied run by run: a slice costs as much as some thirty single items."""
_FEW_NEW = 16
"""Items up to which each is put into its place; beyond, sorting all of them anew is quicker."""


@dataclass(frozen=True, slots=True)
class _Runs:
    """Numbers in some order, as runs of neighbours: few where little changed, and each is copied as a whole."""

    begin: Ints
    end: Ints

    @classmethod
    def of(cls, index: Ints) -> Self:
        """The runs of an order."""
        if not len(index):
            return cls(index, index)
        breaks = where(index[1:] != index[:-1] + 1)
        return cls(index[np.concatenate([[0], breaks + 1])], index[np.concatenate([breaks, [len(index) - 1]])] + 1)

    def pairs(self) -> Iterable[tuple[int, int]]:
        """Begin and end of each run."""
        return zip(self.begin.tolist(), self.end.tolist(), strict=True)

    def within(self, bounds: Ints) -> Self:
        """The same of what lies between bounds: the tags of items, the bytes of strings."""
        return type(self)(bounds[self.begin], bounds[self.end])

    def take(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The items of an array in this order."""
        if len(self.begin) > _MOST_RUNS:
            return array[spread(self.begin, self.end - self.begin)]
        return np.concatenate([array[:0], *(array[first:last] for first, last in self.pairs())])


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Runs of something in which those of a few items stand in the place of others."""

    pieces: tuple[tuple[int, int, int, int], ...]
    """Begin and end of what stays before each place, begin and end of what comes there."""
    rest: int
    """Where what stays behind the last place begins."""

    @classmethod
    def of(cls, places: Sequence[int], bounds: Ints, more_bounds: Ints) -> Self:
        """Of items by their place, whose runs lie between bounds: each of the others comes into one place."""
        at = 0
        pieces: list[tuple[int, int, int, int]] = []
        more: list[int] = more_bounds.tolist()
        for number, place in enumerate(places):
            pieces.append((at, int(bounds[place]), more[number], more[number + 1]))
            at = int(bounds[place + 1])
        return cls(tuple(pieces), at)

    def joined(self, ours: bytes, more: bytes) -> bytes:
        """Bytes so exchanged."""
        parts: list[bytes] = []
        for first, last, begin, end in self.pieces:
            parts += (ours[first:last], more[begin:end])
        return b"".join((*parts, ours[self.rest :]))

    def arrays(self, ours: npt.NDArray[Any], more: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Arrays so exchanged."""
        parts: list[npt.NDArray[Any]] = []
        for first, last, begin, end in self.pieces:
            parts += (ours[first:last], more[begin:end])
        return np.concatenate((*parts, ours[self.rest :]))


@dataclass(frozen=True, slots=True)
class Strings:
    """Byte strings one after the other, told apart by bounds."""

    data: bytes
    bounds: Ints

    def take(self, runs: _Runs) -> Self:
        """The strings of these numbers."""
        parts = [self.data[first:last] for first, last in runs.within(self.bounds).pairs()]
        return type(self)(b"".join(parts), offsets(runs.take(self.lengths)))

    @property
    def lengths(self) -> Ints:
        """Bytes of each."""
        return self.bounds[1:] - self.bounds[:-1]

    def followed_by(self, more: Self) -> Self:
        """These strings, then the others."""
        return type(self)(self.data + more.data, np.concatenate([self.bounds, more.bounds[1:] + len(self.data)]))


@dataclass(frozen=True, slots=True)
class EncodedFeatures:
    """The features that one tile shows, encoded for it. It never changes: what is made of it is another one.

    A feature is known by its digest. Items are what is drawn of features, none or up to three a feature, in the order
    in which they are written.
    """

    high: Unsigned
    """(features) first half of the digest, ascending."""
    low: Unsigned
    """(features) second half of it."""
    left_out: tuple[tuple[int, LeftOut], ...]
    """By number of the feature."""
    feature: Numbers
    layer: Numbers
    source: Numbers
    text: Numbers
    """(items) 0 where the id is a number, else from 1 on the place of the id's text among `texts`."""
    id: Unsigned
    box: Numbers
    """(items, 4) lowest x, y and highest x, y in tile units."""
    bodies: Strings
    """What each is written with but for its id and tags: see `framing.bodies`."""
    tag_counts: Numbers
    key: Numbers
    """(tags) place among `names`."""
    value: Numbers
    """(tags) place among `values`."""
    sources: list[bytes]
    texts: list[bytes]
    names: list[str]
    values: list[Any]
    """As in `Tags.plain`, texts as UTF-8 (half a surrogate pair passing)."""
    fields: Strings
    """The same as fields of a layer."""

    def __len__(self) -> int:
        return len(self.high)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in memory, and some more."""
        texts = [*self.sources, *self.texts, *self.names]
        arrays = (
            self.high, self.low, self.feature, self.layer, self.source, self.text, self.id, self.box,
            self.bodies.bounds, self.tag_counts, self.key, self.value, self.fields.bounds,
        )  # fmt: skip
        return (
            _OVERHEAD_BYTES
            + sum(array.nbytes for array in arrays)
            + len(self.bodies.data)
            + 2 * len(self.fields.data)
            + _VALUE_BYTES * (len(self.values) + len(texts))
            # A name may be of characters of four bytes each.
            + 4 * sum(map(len, texts))
            + 512 * len(self.left_out)
        )

    @classmethod
    def none(cls) -> Self:
        """No features."""
        ints, own_ids, strings = np.zeros(0, np.int32), np.zeros(0, np.uint64), Strings(b"", np.zeros(1, np.int64))
        return cls(
            high=own_ids, low=own_ids, left_out=(), feature=ints, layer=ints, source=ints, text=ints, id=own_ids,
            box=ints.reshape(0, 4), bodies=strings, tag_counts=ints, key=ints, value=ints,
            sources=[], texts=[], names=[], values=[], fields=strings,
        )  # fmt: skip

    def digests(self) -> npt.NDArray[np.uint8]:
        """Digests of the features, shape (n, 16)."""
        return np.column_stack([self.high, self.low]).astype(">u8").view(np.uint8)

    def match(self, digests: npt.NDArray[np.uint8]) -> tuple[Bools, Ints]:
        """Hold it against what the tile is to show.

        Args:
            digests: Of all features that it is to show, each once, shape (n, 16).

        Returns:
            Which features stay, and the positions in `digests` of those that are missing here.
        """
        keep, found = _compiled().matched(self.high, self.low, *halves(digests))
        return keep, where(~found)

    def changed(self, keep: Bools, more: Self) -> Self:
        """Some of these features, and others.

        Args:
            keep: (features) which stay.
            more: What comes in; none of it is among those that stay.
        """
        if keep.all() and not len(more):
            return self
        exchanged = self._exchanged(keep, more)
        if exchanged is not None:
            return exchanged
        feature, high, low = self._features(keep, more)
        count = len(self)
        left_out = [(int(feature[of]), left) for of, left in self.left_out if keep[of]]
        left_out += [(int(feature[count + of]), left) for of, left in more.left_out]
        stay = where(keep[self.feature])

        # From here on everything is numbered as if the others stood behind these.
        items, counts = len(self.layer), np.concatenate([self.tag_counts, more.tag_counts])
        tag_bounds = offsets(counts)
        sources, source, _ = _union(self.sources, more.sources, self.source, more.source, stay)
        ours, others = where(self.text > 0), where(more.text > 0)
        text = np.concatenate([self.text, more.text])
        texts, place_of_text, _ = _union(
            self.texts, more.texts, self.text[ours] - 1, more.text[others] - 1, where(keep[self.feature[ours]])
        )
        text[np.concatenate([ours, items + others])] = place_of_text + 1
        layer, own_id = np.concatenate([self.layer, more.layer]), np.concatenate([self.id, more.id])
        # Items of one feature stay in their order: they come side by side, sorted by kind.
        item = _in_order((layer, source, text, own_id), stay, np.arange(items, len(layer)))
        of_items = _Runs.of(item)
        of_tags = of_items.within(tag_bounds)
        own = _Runs.of(stay).within(tag_bounds).take(np.arange(len(self.key)))
        names, key, _ = _union(self.names, more.names, self.key, more.key, own)
        values, value, origin = _union(self.values, more.values, self.value, more.value, own, place_of_value)

        return replace(
            self,
            high=high,
            low=low,
            left_out=tuple(left_out),
            feature=feature[of_items.take(np.concatenate([self.feature, more.feature + np.int32(count)]))],
            layer=of_items.take(layer),
            source=of_items.take(source),
            text=of_items.take(text),
            id=of_items.take(own_id),
            box=of_items.take(np.concatenate([self.box, more.box])),
            bodies=self.bodies.followed_by(more.bodies).take(of_items),
            tag_counts=of_items.take(counts),
            key=of_tags.take(key),
            value=of_tags.take(value),
            sources=sources,
            texts=texts,
            names=names,
            values=values,
            fields=self.fields if origin is None else self.fields.followed_by(more.fields).take(origin),
        )

    def _exchanged(self, keep: Bools, more: Self) -> Self | None:
        """The same where each item that comes takes the place of one that goes, as when features were edited.

        Nothing moves then but what stands behind the places themselves. None where it is not so.
        """
        count, few = len(more.layer), not self.left_out and not more.left_out and len(more.layer) <= _FEW_NEW
        if not few:
            return None
        gone = where(~keep[self.feature])
        if not count or len(gone) != count:
            return None
        source, text = _places(self.sources, more.sources), _places(self.texts, more.texts)
        if source is None or text is None:
            return None
        text = np.concatenate([np.zeros(1, np.int32), text + np.int32(1)])
        if not (
            (self.layer[gone] == more.layer).all()
            and (self.id[gone] == more.id).all()
            and (self.source[gone] == source[more.source]).all()
            and (self.text[gone] == text[more.text]).all()
        ):
            return None
        number, high, low = self._features(keep, more)
        feature = number[self.feature]
        feature[gone] = number[len(self) + more.feature]
        places: list[int] = gone.tolist()
        of_items = _Exchange.of(places, self.bodies.bounds, more.bodies.bounds)
        tag_bounds = offsets(self.tag_counts)
        of_tags = _Exchange.of(places, tag_bounds, offsets(more.tag_counts))
        old_tags = spread(tag_bounds[gone], self.tag_counts[gone].astype(np.int64))
        names, key, more_key, _ = _exchanged_table(self.names, more.names, self.key, more.key, old_tags)
        values, value, more_value, origin = _exchanged_table(
            self.values, more.values, self.value, more.value, old_tags, place_of_value
        )
        lengths = self.bodies.lengths
        lengths[gone] = more.bodies.lengths

        def with_more(name: str) -> npt.NDArray[Any]:
            array = getattr(self, name).copy()
            array[gone] = getattr(more, name)
            return array

        return replace(
            self,
            high=high,
            low=low,
            feature=feature,
            box=with_more("box"),
            bodies=Strings(of_items.joined(self.bodies.data, more.bodies.data), offsets(lengths)),
            tag_counts=with_more("tag_counts"),
            key=of_tags.arrays(key, more_key),
            value=of_tags.arrays(value, more_value),
            names=names,
            values=values,
            fields=self.fields if origin is None else self.fields.followed_by(more.fields).take(origin),
        )

    def _features(self, keep: Bools, more: Self) -> tuple[Numbers, Unsigned, Unsigned]:
        """New numbers of these features and the others behind them (-1 for those that go), and all digests in order."""
        high, low, number = _compiled().merged_digests(self.high, self.low, keep, more.high, more.low)
        return number, high, low

    def assembled(self, tile: Tile, layers: LayerSet) -> EncodedTile:
        """Make the tile.

        Args:
            tile: The one that the features are encoded for.
            layers: The layers they are encoded by.
        """
        compiled = _compiled()
        items = self.layer.searchsorted(np.arange(len(layers.names) + 1))
        of_layers = offsets(self.tag_counts)[items]
        key, keys, key_bounds = compiled.numbered(self.key, of_layers, len(self.names))
        value, values, value_bounds = compiled.numbered(self.value, of_layers, len(self.values))
        body, fields = np.frombuffer(self.bodies.data, np.uint8), np.frombuffer(self.fields.data, np.uint8)
        data, bounds = compiled.written(self.id, self.text == 0, self.tag_counts, key, value, body, self.bodies.bounds)
        whole = data.data
        messages: list[bytes] = []
        ends: list[int] = bounds[items].tolist()
        for number, name in enumerate(layers.names):
            if ends[number] == ends[number + 1]:
                continue
            used: list[int] = keys[key_bounds[number] : key_bounds[number + 1]].tolist()
            messages.append(
                layer_message(
                    name.encode(),
                    whole[ends[number] : ends[number + 1]],
                    b"".join([key_field(self.names[place]) for place in used]),
                    compiled.joined(
                        fields, self.fields.bounds, values[value_bounds[number] : value_bounds[number + 1]]
                    ).data,
                    layers.extent,
                )
            )
        left_out = in_order(left for _, left in self.left_out)
        return EncodedTile(tile, b"".join(messages), len(self.layer), left_out, self._extent())

    def _extent(self) -> tuple[int, int, int, int] | None:
        if not len(self.box):
            return None
        # Row by row: numpy is ten times slower along the other axis.
        box = self.box.T.copy()
        west, north = box[:2].min(axis=1).tolist()
        east, south = box[2:].max(axis=1).tolist()
        return west, north, east, south


def encode_features(
    features: TileFeatures, digest: npt.NDArray[np.uint8], layers: LayerSet, draw: Draw = draw
) -> list[EncodedFeatures]:
    """Encode features for the tiles that show them.

    Args:
        features: Columns of features and the pairs that say which tile shows which, each pair once. Two features of one
            tile differ in source or id.
        digest: (rows, 16) digest of each row: of layer, source, id and content.
        layers: The layers, in drawing order, and the grid.
        draw: As for `encode_tiles`.

    Returns:
        Encoded features for each of `features.tiles`, in their order.
    """
    rows = Rows(features, layers, draw)
    high, low = halves(digest)
    return [each for piece in rows.pieces(CHUNK_COORDINATES) for each in _encoded(rows, high, low, *piece)]


def _encoded(
    rows: Rows, high: Unsigned, low: Unsigned, tiles: Sequence[Tile], pair_tile: Ints, pair_row: Ints
) -> Iterable[EncodedFeatures]:
    """Encoded features of some of the tiles."""
    drawn = rows.drawn(tiles, pair_tile, pair_row)
    body, body_bounds = bodies(drawn.shapes)
    lowest, highest = drawn.shapes.bounds()
    box = np.hstack([lowest, highest]).astype(np.int32)
    every = body.tobytes()
    pairs: list[int] = pair_tile.searchsorted(np.arange(len(tiles) + 1)).tolist()
    left_out: list[list[tuple[int, LeftOut]]] = [[] for _ in tiles]
    for number, of, reason in drawn.left_out:
        left_out[number].append((of, rows.left_out(of, reason)))
    items: list[int] = drawn.tile.searchsorted(np.arange(len(tiles) + 1)).tolist()
    # An edited feature shows in a tile of each zoom: what is the same in all of them is laid out once.
    parts: dict[tuple[int, ...], dict[str, Any]] = {}
    for number in range(len(tiles)):
        # Features by digest, and the number of each row among them.
        shown = pair_row[pairs[number] : pairs[number + 1]]
        shown = shown[high[shown].argsort(kind="stable")]
        feature_of = dict(zip(shown.tolist(), range(len(shown)), strict=True))
        first, last = items[number], items[number + 1]
        of_items: list[int] = drawn.row[first:last].tolist()
        alike = tuple(of_items)
        part = parts.get(alike)
        if part is None:
            part = _part_of_rows(rows, drawn.row[first:last], of_items)
            if len(alike) <= _FEW_ITEMS:
                parts[alike] = part
        bounds = body_bounds[first : last + 1]
        yield EncodedFeatures(
            high=high[shown],
            low=low[shown],
            left_out=tuple((feature_of[of], left) for of, left in left_out[number]),
            feature=np.array([feature_of[each] for each in of_items], np.int32),
            box=box[first:last].copy(),
            bodies=Strings(every[int(bounds[0]) : int(bounds[-1])], bounds - bounds[0]),
            **part,
        )


_FEW_ITEMS = 16
"""Items up to which it pays to look whether another tile has the same."""
_FEW_CODES = 200
"""Codes that are sorted by themselves; beyond, as an array."""


def _part_of_rows(rows: Rows, row: Ints, of_items: list[int]) -> dict[str, Any]:
    """What of `EncodedFeatures` hangs on the rows of the items alone and on no tile."""
    columns = rows.features
    sources, source = _coded([_bytes(columns.source[each]) for each in of_items])
    texts: list[bytes] = []
    text = np.zeros(len(row), np.int32)
    other = where(~rows.has_id[row])
    if len(other):
        without_id: list[int] = row[other].tolist()
        texts, place = _coded([_bytes(columns.feature_id[each]) for each in without_id])
        text[other] = place + 1
    counts = rows.tags.bounds[row + 1] - rows.tags.bounds[row]
    tag = spread(rows.tags.bounds[row], counts)
    names, key = _distinct(rows.tags.key[tag])
    values, value = _distinct(rows.tags.value[tag])
    fields, field_bytes = rows.tags.values.take(np.array(values, np.int64))
    return {
        "layer": rows.layer[row].astype(np.int32),
        "source": source,
        "text": text,
        "id": rows.ids[row],
        "tag_counts": counts.astype(np.int32),
        "key": key,
        "value": value,
        "sources": sources,
        "texts": texts,
        "names": [rows.tags.names[place] for place in names],
        "values": [_small(rows.tags.plain[place]) for place in values],
        "fields": Strings(fields.tobytes(), offsets(field_bytes)),
    }


def _distinct(codes: Ints) -> tuple[list[int], Numbers]:
    """The distinct ones, sorted, and the place of each among them."""
    if len(codes) > _FEW_CODES:
        found, places = np.unique(codes, return_inverse=True)
        return found.tolist(), places.astype(np.int32)
    own: list[int] = codes.tolist()
    distinct = sorted(set(own))
    place = dict(zip(distinct, range(len(distinct)), strict=True))
    return distinct, np.array([place[each] for each in own], np.int32)


def halves(digests: npt.NDArray[np.uint8]) -> tuple[Unsigned, Unsigned]:
    """First and second eight bytes of digests of shape (n, 16), as numbers that sort as the bytes do."""
    both = np.ascontiguousarray(digests, np.uint8).reshape(-1, 16).view(">u8").astype(np.uint64)
    return both[:, 0], both[:, 1]


def _coded(items: list[bytes]) -> tuple[list[bytes], Numbers]:
    """The distinct ones, sorted, and the place of each among them."""
    distinct = sorted(set(items))
    place = dict(zip(distinct, range(len(distinct)), strict=True))
    return distinct, np.array([place[each] for each in items], np.int32)


def _bytes(text: str) -> bytes:
    """A text as bytes that sort as the text does."""
    return text.encode("utf-8", "surrogatepass")


def _small(value: Any) -> Any:
    return _bytes(value) if isinstance(value, str) else value


def warm() -> None:
    """Compile or load what the first tile that is put together would wait for."""
    _compiled()


@functools.cache
def _compiled() -> ModuleType:
    """Imported when something is put together, as who builds whole tiles needs none of it."""
    from geo_assets.tiles.encode import compiled

    compiled.warm()
    return compiled


def _in_order(keys: tuple[npt.NDArray[Any], ...], sorted_already: Ints, others: Ints) -> Ints:
    """Numbers of items, sorted by keys.

    Args:
        keys: (all items) what they are sorted by, the first key first.
        sorted_already: Numbers of items, sorted by the keys.
        others: Numbers of others, sorted by the keys; none has the keys of one of the former.
    """
    if len(others) > _FEW_NEW:
        both = np.concatenate([sorted_already, others])
        return both[np.lexsort([key[both] for key in reversed(keys)])]
    if not len(others):
        return sorted_already
    columns = [key[sorted_already] for key in keys]
    places: list[int] = []
    for other in others.tolist():
        first, last = 0, len(sorted_already)
        for key, column in zip(keys, columns, strict=True):
            here = column[first:last]
            first, last = (first + int(here.searchsorted(key[other], side)) for side in ("left", "right"))
        places.append(first)
    return np.insert(sorted_already, places, others)


def _itself(value: Any) -> Any:
    return value


def _union(
    table: list[Any],
    more: list[Any],
    code: Numbers,
    more_code: Numbers,
    stays: Ints,
    place: Callable[[Any], Any] = _itself,
) -> tuple[list[Any], Numbers, _Runs | None]:
    """One sorted table of two, without what nobody uses.

    Args:
        table: Sorted, each once.
        more: Sorted, each once, all of them used.
        code: Places in `table`.
        more_code: Places in `more`.
        stays: Which of `code` are still used.
        place: What they are sorted by.

    Returns:
        The table; `code` and `more_code` as places in it (those that are not used anywhere); where each entry comes
        from, in `table` or behind its end in `more`, None when `table` stays as it is.
    """
    at, known = _found(table, more, place)
    used = np.zeros(len(table), np.bool_)
    used[code[stays]] = True
    used[at[known]] = True
    if used.all() and known.all():
        return table, np.concatenate([code, at[more_code].astype(np.int32)]), None
    merged, origin, to = _merged(table, more, at, known, used)
    return merged, to[np.concatenate([code, more_code + np.int32(len(table))])], origin


def _exchanged_table(
    table: list[Any],
    more: list[Any],
    code: Numbers,
    more_code: Numbers,
    gone: Ints,
    place: Callable[[Any], Any] = _itself,
) -> tuple[list[Any], Numbers, Numbers, _Runs | None]:
    """As `_union`, where it is known which few of `code` are no longer used, and all others are.

    Returns:
        The table; `code` as places in it; `more_code` as places in it; where each entry comes from.
    """
    at, known = _found(table, more, place)
    old = code[gone]
    perhaps: set[int] = set(old.tolist()) - set(at[known].tolist())
    unused: list[int] = []
    if perhaps:
        # Counted, not looked up: a tag that goes may stand beside thousands that have the same value.
        before, going = (_compiled().occurrences(each, len(table)) for each in (code, old))
        unused = [each for each in perhaps if before[each] == going[each]]
    if not unused and known.all():
        return table, code, at[more_code].astype(np.int32), None
    used = np.ones(len(table), np.bool_)
    used[unused] = False
    merged, origin, to = _merged(table, more, at, known, used)
    return merged, to[code], to[more_code + np.int32(len(table))], origin


def _found(table: list[Any], more: list[Any], place: Callable[[Any], Any]) -> tuple[Ints, Bools]:
    """Where each of `more` is in the sorted table or would be, and whether it is there."""
    count = len(table)
    at: list[int] = []
    known: list[bool] = []
    for each in more:
        wanted = place(each)
        index = bisect_left(table, wanted, key=place)
        at.append(index)
        known.append(index < count and place(table[index]) == wanted)
    return np.array(at, np.int64), np.array(known, np.bool_)


def _merged(table: list[Any], more: list[Any], at: Ints, known: Bools, used: Bools) -> tuple[list[Any], _Runs, Numbers]:
    """One sorted table of what is used of the first and what is new of the second; see `_union`.

    Returns:
        The table, where each entry comes from, and the new place of each old one, those of `more` behind the others.
    """
    origin, to = _compiled().merged_table(used, at, known)
    runs = _Runs.of(origin)
    both = table + more
    merged: list[Any] = []
    for first, last in runs.pairs():
        merged += both[first:last]
    return merged, runs, to


def _places(table: list[bytes], more: list[bytes]) -> Numbers | None:
    """The place of each in a sorted table; None where one is not in it."""
    at, known = _found(table, more, _itself)
    return at.astype(np.int32) if known.all() else None
