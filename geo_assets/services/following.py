"""What tiles show, followed through the feature store's log of changes instead of asked for as a whole each time.

Asking for the digests of a dense tile costs a microsecond a feature; the log costs as much as what changed. Whoever
builds the same tiles again and again looks them up once and then follows. Where the log does not reach, or tells of
another history (a backup was restored), the digests are asked for: they are the truth, this is a short cut to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from geo_assets.services.build_worker import boxes_of
from geo_assets.services.encoding import Shown, shown_of
from geo_assets.tiles import workkey
from geo_assets.tiles.encode.assembly import halves
from geo_assets.tiles.encode.varint import Unsigned
from resources.feature_store.protocol import Changes, Position, TileBox

if TYPE_CHECKING:
    from geo_assets.stack import Stack

FOLLOWED_FROM = 200
"""Features from which a tile is followed: with fewer, asking costs no more."""

CHANGES_REMEMBERED = 1_000
"""Features whose last change is remembered: of tiles that are looked at less often, the digests are asked for."""

FEW_CHANGES = 4
"""Changes up to which each is looked for by itself."""

FEW_MOVES = 64
"""Features that leave a tile or come into it up to which what stays between them is copied as a whole."""

FOLLOWED_TIMES = 500
"""How often a tile is followed before its digests are asked for again: nothing that a log missed stays for good."""


@dataclass(frozen=True, slots=True)
class Followed:
    """What a tile showed."""

    shown: Shown
    """By ascending digest, its source digest known."""
    high: Unsigned
    """(features) first half of each digest."""
    at: int
    """Number of the last change that is in it."""
    times: int
    """How often it was followed since it was asked for."""


class Follower:
    """Follows the tiles that it is asked for. One thread calls it.

    Args:
        stack: The ports.
        max_bytes: Most that it remembers of tiles; those that nobody asked for the longest go first.
    """

    def __init__(self, stack: Stack, max_bytes: int) -> None:
        self._stack, self.max_bytes = stack, max_bytes
        self._tiles: OrderedDict[str, Followed] = OrderedDict()
        self._nbytes = 0
        self._position: Position | None = None
        """Up to where the log was read."""
        self._asked: Position | None = None
        """Up to where digests went that were asked for since, where that is further."""
        self._recent = _Recent()

    def __len__(self) -> int:
        """How many tiles it follows."""
        return len(self._tiles)

    @property
    def nbytes(self) -> int:
        """Bytes that it remembers of tiles."""
        return self._nbytes

    def shown(self, keys: Sequence[str], anew: Collection[str] = ()) -> list[Shown]:
        """What tiles show: at least every change that was committed before the call.

        Args:
            keys: Partition keys, each once.
            anew: Those of them whose digests are asked for in any case.
        """
        self._catch_up()
        boxes = boxes_of(keys, self._stack.layers)
        found: dict[str, Shown] = {}
        for key, box in zip(keys, boxes, strict=True):
            followed = self._tiles.get(key)
            if followed is None or key in anew or followed.at < self._recent.floor or followed.times >= FOLLOWED_TIMES:
                continue
            followed = self._brought_up(followed, box)
            self._keep(key, followed)
            found[key] = followed.shown
        asked = [number for number, key in enumerate(keys) if key not in found]
        if asked:
            digests = self._stack.features.digests([boxes[number] for number in asked])
            if self._position is None:
                self._position = digests.position
            if self._position != digests.position:
                self._asked = digests.position
            for number, shown in zip(asked, shown_of(digests), strict=True):
                found[keys[number]] = shown
                self._drop(keys[number])
                if len(shown.number) >= FOLLOWED_FROM:
                    # What changed since the log was read may be in it already, and comes once more.
                    followed = _by_digest(shown, self._position.number)
                    self._keep(keys[number], followed)
                    found[keys[number]] = followed.shown
        return [found[key] for key in keys]

    def _catch_up(self) -> None:
        """Read on in the log; where that cannot be, forget everything."""
        if self._position is None:
            return
        store = self._stack.features
        changes = store.changes(self._position, CHANGES_REMEMBERED)
        if self._asked is not None and store.changes(self._asked, CHANGES_REMEMBERED) is None:
            changes = None
        self._asked = None
        if changes is None:
            self._tiles.clear()
            self._nbytes = 0
            self._position, self._recent = None, _Recent()
            return
        self._position = changes.position
        self._recent.add(changes)

    def _brought_up(self, followed: Followed, box: TileBox) -> Followed:
        assert self._position is not None
        shown, high = self._recent.brought_up(followed, box)
        return Followed(shown, high, self._position.number, followed.times + 1)

    def _keep(self, key: str, followed: Followed) -> None:
        self._drop(key)
        size = _nbytes(followed.shown)
        if size > self.max_bytes:
            return
        self._tiles[key] = followed
        self._nbytes += size
        while self._nbytes > self.max_bytes:
            self._drop(next(iter(self._tiles)))

    def _drop(self, key: str) -> None:
        dropped = self._tiles.pop(key, None)
        if dropped is not None:
            self._nbytes -= _nbytes(dropped.shown)


class _Recent:
    """The last change of each feature that changed lately, in the order of the changes.

    What changed again stays where it was until there is no room: it says then that the feature leaves, as the later
    change says too, and nothing of where it shows.
    """

    def __init__(self) -> None:
        self.floor = 0
        """Number of the last change of any feature that is no longer remembered."""
        self._count = 0
        self._columns = _Columns.of(0)

    def add(self, changes: Changes) -> None:
        """Remember these, which are later than all others."""
        more = len(changes.number)
        if not more:
            return
        columns = self._columns
        known = columns.number[: self._count]
        if more <= FEW_CHANGES:
            again = np.concatenate([(known == number).nonzero()[0] for number in changes.number.tolist()])
        else:
            again = np.isin(known, changes.number).nonzero()[0]
        columns.shows[again] = False
        columns.last[again] = False
        if self._count + more > len(columns.change):
            self._make_room(more)
            columns = self._columns
        order = changes.change.argsort(kind="stable")
        place = slice(self._count, self._count + more)
        columns.change[place] = changes.change[order]
        columns.number[place] = changes.number[order]
        columns.shows[place] = changes.shows[order]
        columns.last[place] = True
        columns.digest[place] = changes.digest[order]
        columns.high[place] = halves(columns.digest[place])[0]
        columns.vertices[place] = changes.vertices[order]
        columns.time_ms[place] = changes.time_ms[order]
        columns.zooms[:, place] = changes.zooms[order].T
        columns.box[:, place] = changes.box[order].T
        self._count += more

    def _make_room(self, more: int) -> None:
        """Leave out what changed again, and of the rest the oldest."""
        stay = self._columns.last[: self._count].nonzero()[0]
        gone = stay[: max(0, len(stay) + more - CHANGES_REMEMBERED)]
        if len(gone):
            self.floor = int(self._columns.change[gone[-1]])
        stay = stay[len(gone) :]
        self._columns = self._columns.taken(stay, 2 * max(CHANGES_REMEMBERED, len(stay) + more))
        self._count = len(stay)

    def brought_up(self, followed: Followed, box: TileBox) -> tuple[Shown, Unsigned]:
        """What a tile shows after all changes, and first halves of its digests; the same objects if none concerns it.

        What changed leaves it, and comes back if it shows there.
        """
        shown, columns = followed.shown, self._columns
        first = int(columns.change[: self._count].searchsorted(followed.at, "right"))
        if first == self._count:
            return shown, followed.high
        new = slice(first, self._count)
        gone = _places_of(shown.number, columns.number[new])
        zooms, (west, south, east, north) = columns.zooms[:, new], columns.box[:, new]
        here = (
            columns.shows[new] & (west <= box.east) & (east >= box.west) & (south <= box.north) & (north >= box.south)
        )
        here &= (zooms[0] <= box.zoom) & (zooms[1] >= box.zoom)
        come = first + here.nonzero()[0]
        if not len(gone) and not len(come):
            return shown, followed.high
        coming = columns.high[come]
        if len(come) > 1:
            order = coming.argsort(kind="stable")
            come, coming = come[order], coming[order]
        moved = _Moves.of(len(shown.number), gone, followed.high.searchsorted(coming), come)
        digest, high = moved.column(shown.digest, columns.digest), moved.column(followed.high, columns.high)
        vertices = moved.column(shown.vertices_each, columns.vertices)
        time_ms = moved.column(shown.time_each, columns.time_ms)
        exchanged = Shown(
            digest=digest,
            number=moved.column(shown.number, columns.number),
            vertices_each=vertices,
            time_each=time_ms,
            vertices=int(vertices.sum()),
            data_time_ms=int(time_ms.max(initial=0)),
            source_digest=_source_digest(digest, high),
        )
        return exchanged, high


@dataclass(frozen=True, slots=True)
class _Columns:
    """Room for changes."""

    change: npt.NDArray[np.int64]
    number: npt.NDArray[np.int64]
    shows: npt.NDArray[np.bool_]
    last: npt.NDArray[np.bool_]
    """Whether its feature did not change again."""
    digest: npt.NDArray[np.uint8]
    high: Unsigned
    vertices: npt.NDArray[np.int64]
    time_ms: npt.NDArray[np.int64]
    zooms: npt.NDArray[np.int64]
    """(2, changes)"""
    box: npt.NDArray[np.float64]
    """(4, changes)"""

    @classmethod
    def of(cls, room: int) -> _Columns:
        ints = [np.zeros(room, np.int64) for _ in range(4)]
        return cls(
            change=ints[0], number=ints[1], shows=np.zeros(room, np.bool_), last=np.zeros(room, np.bool_),
            digest=np.zeros((room, 16), np.uint8), high=np.zeros(room, np.uint64), vertices=ints[2], time_ms=ints[3],
            zooms=np.zeros((2, room), np.int64), box=np.zeros((4, room)),
        )  # fmt: skip

    def taken(self, index: npt.NDArray[np.int64], room: int) -> _Columns:
        """Some of them, in more room."""
        result, count = _Columns.of(room), len(index)
        for ours, theirs in (
            (self.change, result.change), (self.number, result.number), (self.shows, result.shows),
            (self.last, result.last), (self.digest, result.digest), (self.high, result.high),
            (self.vertices, result.vertices), (self.time_ms, result.time_ms),
        ):  # fmt: skip
            theirs[:count] = ours[index]
        result.zooms[:, :count], result.box[:, :count] = self.zooms[:, index], self.box[:, index]
        return result


@dataclass(frozen=True, slots=True)
class _Moves:
    """Which rows of a table stay, and which rows of another one come in between."""

    pieces: tuple[tuple[bool, int, int], ...]
    """Whether of the other, begin and end of each run; nothing where there are many."""
    index: npt.NDArray[np.int64]
    """The rows, those of the other behind all of the first; only where there are many."""

    @classmethod
    def of(
        cls, count: int, gone: npt.NDArray[np.int64], place: npt.NDArray[np.int64], come: npt.NDArray[np.int64]
    ) -> _Moves:
        """Of a table of so many rows.

        Args:
            count: Rows of it.
            gone: Those that go, ascending.
            place: Before which of them each comes, ascending.
            come: Rows of the other.
        """
        if len(gone) + len(come) > FEW_MOVES:
            # Nothing moves across a row that goes: what comes in its place comes before it.
            index = np.insert(np.arange(count), place, count + come)
            goes = np.zeros(count, np.bool_)
            goes[gone] = True
            leaves = index < count
            leaves[leaves] = goes[index[leaves]]
            return cls((), index[~leaves])
        pieces: list[tuple[bool, int, int]] = []
        at = 0
        moves = [(where, 0, row) for where, row in zip(place.tolist(), come.tolist(), strict=True)]
        for where, goes, row in sorted([*moves, *((row, 1, 0) for row in gone.tolist())]):
            if at < where:
                pieces.append((False, at, where))
            at = where + goes
            if not goes:
                pieces.append((True, row, row + 1))
        pieces.append((False, at, count))
        return cls(tuple(pieces), gone[:0])

    def column(self, ours: npt.NDArray[Any], others: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A column of the table after it."""
        if not self.pieces:
            return np.concatenate([ours, others])[self.index]
        return np.concatenate([(others if other else ours)[begin:end] for other, begin, end in self.pieces])


_BUCKETS = 1 << 16


def _places_of(number: npt.NDArray[np.int64], wanted: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where any of some numbers stands among others, each once, ascending."""
    if len(wanted) <= FEW_CHANGES:
        found = [place for each in wanted.tolist() for place in (number == each).nonzero()[0].tolist()]
        return np.array(sorted(set(found)), np.int64)
    # By their last bits first, looked up in what fits a cache: few are left to be compared.
    bucket = np.zeros(_BUCKETS, np.bool_)
    bucket[wanted & (_BUCKETS - 1)] = True
    perhaps = bucket.take(number & (_BUCKETS - 1)).nonzero()[0]
    if len(perhaps):
        exact = set(wanted.tolist())
        perhaps = perhaps[[each in exact for each in number[perhaps].tolist()]]
    return perhaps


def _by_digest(shown: Shown, at: int) -> Followed:
    """The same sorted by digest, in arrays of its own.

    So it is hashed and matched in a quarter of the time; and an answer of the store is cut from one for all tiles.
    """
    high = halves(shown.digest)[0]
    order = high.argsort(kind="stable")
    digest, high = shown.digest[order], high[order]
    ordered = replace(
        shown,
        digest=digest,
        number=shown.number[order],
        vertices_each=shown.vertices_each[order],
        time_each=shown.time_each[order],
        source_digest=_source_digest(digest, high),
    )
    return Followed(ordered, high, at, 0)


def _source_digest(digest: npt.NDArray[np.uint8], high: Unsigned) -> str:
    """The source digest of a tile of digests that ascend by their first half."""
    if (high[1:] > high[:-1]).all():
        return workkey.ordered_source_digest(digest)
    (found,) = workkey.source_digests(1, np.zeros(len(digest), np.int64), digest)
    return found


def _nbytes(shown: Shown) -> int:
    # Digest and its first half, number, vertices and time of each; of each array some hundred bytes beside its content.
    return 1_200 + (16 + 8 + 8 + 8 + 8) * len(shown.number)
