"""What tiles show, followed through the feature store's log of changes instead of asked for as a whole each time.

Asking for the digests of a dense tile costs a microsecond a feature; the log costs as much as what changed. Whoever
builds the same tiles again and again looks them up once and then follows. Where the log does not reach, or tells of
another history (a backup was restored), the digests are asked for: they are the truth, this is a short cut to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from geo_assets.services.build_worker import boxes_of
from geo_assets.services.encoding import Shown, shown_of
from geo_assets.tiles.encode.assembly import halves
from resources.feature_store.protocol import Changes, Position, TileBox

if TYPE_CHECKING:
    from geo_assets.stack import Stack

FOLLOWED_FROM = 200
"""Features from which a tile is followed: with fewer, asking costs no more."""

CHANGES_REMEMBERED = 1_000
"""Features whose last change is remembered: of tiles that are looked at less often, the digests are asked for."""

FEW_CHANGES = 16
"""Changes up to which each is looked for by itself."""

FOLLOWED_TIMES = 500
"""How often a tile is followed before its digests are asked for again: nothing that a log missed stays for good."""


@dataclass(frozen=True, slots=True)
class Followed:
    """What a tile showed."""

    shown: Shown
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
        self._recent: Changes | None = None
        self._floor = 0
        """Number of the last change of any feature that is not in `_recent` any more."""

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
            if followed is None or key in anew or followed.at < self._floor or followed.times >= FOLLOWED_TIMES:
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
                    self._keep(keys[number], Followed(_by_digest(shown), self._position.number, 0))
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
            self._nbytes = self._floor = 0
            self._position = self._recent = None
            return
        self._position = changes.position
        if len(changes.number):
            self._recent = changes if self._recent is None else _joined(self._recent, changes)
            more = len(self._recent.number) - CHANGES_REMEMBERED
            if more > 0:
                order = self._recent.change.argsort()
                self._floor = int(self._recent.change[order[more - 1]])
                self._recent = _some(self._recent, order[more:])

    def _brought_up(self, followed: Followed, box: TileBox) -> Followed:
        assert self._position is not None
        shown, recent = followed.shown, self._recent
        if recent is not None:
            new = recent.change > followed.at
            if new.any():
                shown = _exchanged(shown, recent, new, box)
        return Followed(shown, self._position.number, followed.times + 1)

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


def _by_digest(shown: Shown) -> Shown:
    """The same sorted by digest, in arrays of its own.

    So it is hashed and matched in a quarter of the time; and an answer of the store is cut from one for all tiles.
    """
    order = halves(shown.digest)[0].argsort(kind="stable")
    return replace(
        shown,
        digest=shown.digest[order],
        number=shown.number[order],
        vertices_each=shown.vertices_each[order],
        time_each=shown.time_each[order],
    )


def _exchanged(shown: Shown, changes: Changes, new: np.ndarray, box: TileBox) -> Shown:
    """What the tile shows after some of the changes: what changed leaves it, and comes back if it shows there."""
    index = np.flatnonzero(new)
    stay = np.ones(len(shown.number), np.bool_)
    if len(index) <= FEW_CHANGES:
        for number in changes.number[index].tolist():
            stay &= shown.number != number
    else:
        stay = ~np.isin(shown.number, changes.number[index])
    zooms, (west, south, east, north) = changes.zooms[index], changes.box[index].T
    here = index[
        changes.shows[index]
        & (zooms[:, 0] <= box.zoom) & (zooms[:, 1] >= box.zoom)
        & (west <= box.east) & (east >= box.west) & (south <= box.north) & (north >= box.south)
    ]  # fmt: skip
    left = np.flatnonzero(stay)
    if len(left) == len(stay) and not len(here):
        return shown
    # What is left is in order: each of the few others is put into its place.
    come = halves(changes.digest[here])[0]
    order = come.argsort(kind="stable")
    here = here[order]
    place = halves(shown.digest)[0][left].searchsorted(come[order])
    index = np.insert(left, place, len(stay) + np.arange(len(here)))

    def column(ours: np.ndarray, others: np.ndarray) -> np.ndarray:
        return np.concatenate([ours, others[here]])[index]

    vertices, time_ms = column(shown.vertices_each, changes.vertices), column(shown.time_each, changes.time_ms)
    return Shown(
        digest=column(shown.digest, changes.digest),
        number=column(shown.number, changes.number),
        vertices_each=vertices,
        time_each=time_ms,
        vertices=int(vertices.sum()),
        data_time_ms=int(time_ms.max(initial=0)),
    )


def _joined(before: Changes, after: Changes) -> Changes:
    """Both, of what changed twice the last."""
    before = _some(before, np.flatnonzero(~np.isin(before.number, after.number)))
    columns = {
        each.name: np.concatenate([getattr(before, each.name), getattr(after, each.name)])
        for each in fields(Changes)
        if each.name != "position"
    }
    return replace(after, **columns)


def _some(changes: Changes, index: np.ndarray) -> Changes:
    columns = {each.name: getattr(changes, each.name)[index] for each in fields(Changes) if each.name != "position"}
    return replace(changes, **columns)


def _nbytes(shown: Shown) -> int:
    # Digest, number, vertices and time of each; of each array some hundred bytes beside its content.
    return 1_000 + (16 + 8 + 8 + 8) * len(shown.number)
