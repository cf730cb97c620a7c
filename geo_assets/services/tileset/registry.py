"""Which versions a tileset has and which is in force: one value of the ledger a tileset, moved by compare-and-set.

A version is claimed before its first byte is written. A claim whose owner died is void from the moment that somebody
says so here, and only then are its objects deleted: a publisher that was merely slow finds that out before it could
put what is half gone in force.
"""

from __future__ import annotations

import os
import re
import socket
import time
import uuid
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from geo_assets.ports import TILESETS_FOLDER
from geo_assets.tiles.tileset import check_name, version_name, version_number

if TYPE_CHECKING:
    from collections.abc import Callable

    from resources.ledger.protocol import Ledger

INDEX = "tilesets"
"""The ledger's named value: names of all tilesets."""

HISTORY_KEPT = 500
"""Moves of the pointer that are remembered: some 100 bytes each in one value."""

CLAIM_S = 300.0
"""How long a claim holds without its owner, as a pin does."""

FORGET_MS = 3_600_000
"""How long a void claim is remembered after its objects are deleted: an owner that slept writes nothing later."""


LONGEST_PIN_S = 100 * 365.25 * 86_400
"""Longest that a pin is given an end: a hundred years. Later moments are none that a calendar can show."""


class TilesetError(Exception):
    """A tileset that cannot be published, moved or pruned so; the message says why and what to do."""


class UnknownTileset(TilesetError):
    """No tileset, or no version of it, of that name."""


class ClaimLost(TilesetError):
    """A publication took so long without a sign of life that its claim was given up."""


@dataclass(frozen=True, slots=True)
class File:
    """One file (or folder) of a version."""

    object: str
    """Name in the tile store; of a folder, its prefix."""
    bytes: int
    sha256: str
    """Of a folder: of the list of its tiles."""


@dataclass(frozen=True, slots=True)
class Version:
    """A published version. What more there is to say stands in its manifest."""

    version: str
    published_at_ms: int
    title: str
    """Of the region."""
    tiles: int
    zooms: tuple[int, int]
    files: dict[str, File]
    """`pmtiles`, `mbtiles`, `folder`."""
    watermark_ms: int = 0
    """Newest event time applied when the ledger was read; 0 of a version that was published before this was kept."""
    commits: int = 0
    """Commits of all tiles by then."""

    @property
    def bytes(self) -> int:
        """Of all its files."""
        return sum(file.bytes for file in self.files.values())


@dataclass(frozen=True, slots=True)
class Move:
    """A move of the pointer, or a version that went."""

    at_ms: int
    what: str
    """`published`, `rolled back`, `moved` or `pruned`."""
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class ReaderPin:
    """A reader that goes on with a version whatever is in force; 0 has no end."""

    id: str
    version: str
    reader: str
    until_ms: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """A version that is being written; void at 0."""

    until_ms: int
    owner: str
    voided_ms: int = 0


@dataclass(frozen=True, slots=True)
class Tileset:
    """A tileset as the ledger keeps it."""

    name: str
    current: str | None = None
    next: int = 1
    versions: tuple[Version, ...] = ()
    """Oldest first."""
    history: tuple[Move, ...] = ()
    claims: dict[str, Claim] = field(default_factory=dict[str, Claim])
    pins: tuple[ReaderPin, ...] = ()

    def version(self, wanted: str) -> Version:
        """A version by its name or its number.

        Raises:
            UnknownTileset: There is none.
        """
        for one in self.versions:
            if wanted in (one.version, str(version_number(one.version))):
                return one
        there = ", ".join(one.version for one in self.versions[-10:]) or "none"
        raise UnknownTileset(f"tileset {self.name} has no version {wanted[:40]!r}; there is {there}")

    @property
    def in_force(self) -> Version | None:
        """The version that the pointer names."""
        return next((one for one in self.versions if one.version == self.current), None)

    def pinned(self, now_ms: int) -> set[str]:
        """Versions that a reader goes on with."""
        return {pin.version for pin in self.pins if not pin.until_ms or pin.until_ms > now_ms}


def now_ms() -> int:
    """Milliseconds since the epoch, UTC."""
    return time.time_ns() // 1_000_000


def value_name(name: str) -> str:
    """Name of the ledger's value."""
    return f"tileset:{check_name(name)}"


def object_name(name: str, version: str, file: str) -> str:
    """Name of an object in the tile store."""
    return f"{TILESETS_FOLDER}{name}/{version}/{file}"


def names(ledger: Ledger) -> list[str]:
    """All tilesets, sorted."""
    text = ledger.get_value(INDEX)
    return sorted(msgspec.json.decode(text, type=list[str])) if text else []


def read(ledger: Ledger, name: str) -> Tileset:
    """A tileset.

    Raises:
        UnknownTileset: There is none of that name.
    """
    text = ledger.get_value(value_name(name))
    if text is None:
        there = ", ".join(names(ledger)) or "none"
        raise UnknownTileset(f"there is no tileset {name}; there is {there} (geo-assets publish makes one)")
    return _decoded(text)


@lru_cache(maxsize=64)
def _decoded(text: str) -> Tileset:
    return msgspec.json.decode(text, type=Tileset)


def _change(ledger: Ledger, name: str, change: Callable[[Tileset], Tileset], *, make: bool = False) -> Tileset:
    """Compare-and-set until it holds; what stands then."""
    while True:
        text = ledger.get_value(value_name(name))
        if text is None and not make:
            read(ledger, name)
        before = Tileset(name) if text is None else _decoded(text)
        after = change(before)
        after = replace(after, history=after.history[-HISTORY_KEPT:])
        if after == before and text is not None:
            return after
        if ledger.set_value(value_name(name), msgspec.json.encode(after).decode(), expect=text):
            return after


def _enter(ledger: Ledger, name: str) -> None:
    while True:
        text = ledger.get_value(INDEX)
        known = msgspec.json.decode(text, type=list[str]) if text else []
        if name in known or ledger.set_value(INDEX, msgspec.json.encode([*known, name]).decode(), expect=text):
            return


# -- claims -----------------------------------------------------------------------------------------------------------
def this_process() -> str:
    """Host, process and when it began: whether it lives can be told on its own host."""
    import psutil

    return f"{socket.gethostname()}|{os.getpid()}|{psutil.Process().create_time():.2f}"


def lives(claim: Claim, at_ms: int) -> bool:
    """Whether a claim holds: it has not run out, and its owner is not known to be dead."""
    import psutil

    if claim.until_ms <= at_ms:
        return False
    host, _, rest = claim.owner.partition("|")
    match = re.fullmatch(r"(\d+)\|([\d.]+)", rest)
    if host != socket.gethostname() or match is None:
        return True
    try:
        return f"{psutil.Process(int(match[1])).create_time():.2f}" == match[2]
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True


def claim(ledger: Ledger, name: str, digest: str, *, owner: str, ttl_s: float = CLAIM_S) -> str:
    """Claim the next version; its name."""
    made: list[str] = []

    def claimed(tileset: Tileset) -> Tileset:
        version = version_name(tileset.next, digest)
        made.append(version)
        held = Claim(now_ms() + int(ttl_s * 1000), owner)
        return replace(tileset, next=tileset.next + 1, claims={**tileset.claims, version: held})

    # First the index: a name without a tileset is nothing, a tileset that nobody finds could not be swept.
    _enter(ledger, check_name(name))
    _change(ledger, name, claimed, make=True)
    return made[-1]


def renew(ledger: Ledger, name: str, version: str, *, ttl_s: float = CLAIM_S) -> None:
    """Hold the claim for longer.

    Raises:
        ClaimLost: It was given up.
    """

    def renewed(tileset: Tileset) -> Tileset:
        held = _held(tileset, version)
        return replace(
            tileset, claims={**tileset.claims, version: replace(held, until_ms=now_ms() + int(ttl_s * 1000))}
        )

    _change(ledger, name, renewed)


def _held(tileset: Tileset, version: str) -> Claim:
    held = tileset.claims.get(version)
    if held is None or not held.until_ms:
        raise ClaimLost(f"the claim of {tileset.name}/{version} was given up: its publisher was silent for too long")
    return held


def void(ledger: Ledger, name: str, at_ms: int, *versions: str, grace_ms: int | None = None) -> list[str]:
    """Give up claims; void versions, whose objects may be deleted now.

    Args:
        ledger: The ledger.
        name: Of the tileset.
        at_ms: Now, milliseconds since the epoch, UTC.
        versions: Claims to give up whatever they say.
        grace_ms: Besides these, give up every claim that ran out so long ago. None: every one whose owner is dead, be
            it that the claim ran out or that its process is known to be gone.
    """

    def dead(one: Claim) -> bool:
        return not lives(one, at_ms) if grace_ms is None else one.until_ms + grace_ms <= at_ms

    def voided(tileset: Tileset) -> Tileset:
        claims = {
            version: Claim(0, one.owner, one.voided_ms or at_ms) if version in versions or dead(one) else one
            for version, one in tileset.claims.items()
        }
        return replace(tileset, claims=claims)

    return [version for version, one in _change(ledger, name, voided).claims.items() if not one.until_ms]


def forget(ledger: Ledger, name: str, at_ms: int) -> None:
    """Forget claims that have been void for so long that nobody writes for them. Delete their objects first."""
    _change(
        ledger,
        name,
        lambda tileset: replace(
            tileset,
            claims={
                version: one
                for version, one in tileset.claims.items()
                if one.until_ms or one.voided_ms + FORGET_MS > at_ms
            },
        ),
    )


# -- the pointer ------------------------------------------------------------------------------------------------------
def publish(ledger: Ledger, name: str, version: Version) -> tuple[Tileset, bool]:
    """Put a claimed version among the published ones, and in force unless a later one has been published meanwhile.

    Returns:
        The tileset, and whether the version is in force.

    Raises:
        ClaimLost: Its claim was given up.
    """

    def published(tileset: Tileset) -> Tileset:
        _held(tileset, version.version)
        claims = {key: one for key, one in tileset.claims.items() if key != version.version}
        versions = tuple(
            sorted((*tileset.versions, version), key=lambda one: version_number(one.version)),
        )
        newest = versions[-1] is version
        move = Move(now_ms(), "published", tileset.current, version.version)
        return replace(
            tileset,
            claims=claims,
            versions=versions,
            current=version.version if newest else tileset.current,
            history=(*tileset.history, move) if newest else tileset.history,
        )

    tileset = _change(ledger, name, published)
    return tileset, tileset.current == version.version


def target_of(tileset: Tileset, to: str | None) -> Version:
    """Where a roll-back would go: see `roll_back`."""
    if to is not None:
        target = tileset.version(to)
    else:
        number = version_number(tileset.current) if tileset.current else 0
        older = [one for one in tileset.versions if version_number(one.version) < number]
        if not older:
            raise TilesetError(
                f"tileset {tileset.name} has no version before {tileset.current or 'none'}; name one by --to, "
                f"geo-assets tilesets show {tileset.name} lists them"
            )
        target = older[-1]
    if target.version == tileset.current:
        raise TilesetError(f"tileset {tileset.name}: {target.version} is in force already")
    return target


def roll_back(ledger: Ledger, name: str, to: str | None = None) -> tuple[str | None, Version]:
    """Move the pointer; no tile is touched.

    Args:
        ledger: The ledger.
        name: Of the tileset.
        to: Version or its number; None is the one before the one in force.

    Returns:
        The version that was in force, and the one that is now.

    Raises:
        UnknownTileset: No such tileset or version.
        TilesetError: There is none before, or it is in force already.
    """
    moved: list[tuple[str | None, Version]] = []

    def rolled(tileset: Tileset) -> Tileset:
        target = target_of(tileset, to)
        moved.append((tileset.current, target))
        older_now = tileset.current is None or version_number(target.version) < version_number(tileset.current)
        move = Move(now_ms(), "rolled back" if older_now else "moved", tileset.current, target.version)
        return replace(tileset, current=target.version, history=(*tileset.history, move))

    _change(ledger, name, rolled)
    return moved[-1]


def prune(ledger: Ledger, name: str, keep: int) -> list[Version]:
    """Take old versions from the list: all but the newest `keep`, the one in force, and those that a reader pinned.

    Their objects may be deleted then, and are found again by their void claims if that is cut short.

    Returns:
        The versions that went.
    """
    gone: list[Version] = []

    def pruned(tileset: Tileset) -> Tileset:
        at_ms = now_ms()
        safe = {one.version for one in tileset.versions[len(tileset.versions) - keep :]} if keep else set[str]()
        safe |= tileset.pinned(at_ms) | {tileset.current or ""}
        gone[:] = [one for one in tileset.versions if one.version not in safe]
        lost = {one.version for one in gone}
        return replace(
            tileset,
            versions=tuple(one for one in tileset.versions if one.version not in lost),
            claims={**tileset.claims, **{version: Claim(0, "pruned", at_ms) for version in lost}},
            history=(*tileset.history, *(Move(at_ms, "pruned", one.version, None) for one in gone)),
            pins=tuple(pin for pin in tileset.pins if pin.version not in lost),
        )

    if keep < 0:
        raise TilesetError(f"keep {keep} is below 0")
    _change(ledger, name, pruned)
    return gone


def pin(ledger: Ledger, name: str, version: str, reader: str, *, for_s: float | None = None) -> ReaderPin:
    """Keep a version from being pruned while a reader goes on with it.

    Raises:
        UnknownTileset: No such tileset or version.
        TilesetError: A reader without a name, or a time that is too long.
    """
    if not reader.strip():
        raise TilesetError("reader is empty: say who goes on with the version, so that somebody can be asked")
    if for_s is not None and not for_s <= LONGEST_PIN_S:
        raise TilesetError(f"a pin for {for_s:g} s is above {LONGEST_PIN_S:g} s; without a time it has no end")
    made: list[ReaderPin] = []

    def pinned(tileset: Tileset) -> Tileset:
        at_ms = now_ms()
        until = 0 if for_s is None else at_ms + int(for_s * 1000)
        made.append(ReaderPin(uuid.uuid4().hex[:8], tileset.version(version).version, reader, until))
        kept = (one for one in tileset.pins if not one.until_ms or one.until_ms > at_ms)
        return replace(tileset, pins=(*kept, made[-1]))

    _change(ledger, name, pinned)
    return made[-1]


def unpin(ledger: Ledger, name: str, pin_id: str) -> bool:
    """Let go of a reader's pin; whether it was there."""
    found: list[Any] = []

    def unpinned(tileset: Tileset) -> Tileset:
        found[:] = [one for one in tileset.pins if one.id == pin_id]
        return replace(tileset, pins=tuple(one for one in tileset.pins if one.id != pin_id))

    _change(ledger, name, unpinned)
    return bool(found)
