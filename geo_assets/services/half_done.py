"""What somebody began and nobody ended: found by looking at ports alone, and mended by doing the rest of it.

All of it mends itself within seconds while everything runs; what is found here is older than that, so that whoever
should have ended it is dead, away or broken. Mending is safe beside them: each step is one that they would do, and may
be done twice. Nothing is deleted but what garbage collection deletes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Literal

import structlog

from geo_assets.ports import TILES_FOLDER, tile_object
from geo_assets.services import garbage, outbox, pins
from geo_assets.services.announce import sweep_announcements, sweep_purges
from geo_assets.services.dead_letters import now_ms
from geo_assets.services.fence_features import send_fences
from geo_assets.services.tileset import keeping, registry
from geo_assets.tiles.tile import Tile, TileError
from resources.guard.protocol import GuardUnavailable
from resources.ledger.protocol import Commit, Duty, object_name

if TYPE_CHECKING:
    from geo_assets.stack import Stack
    from resources.ledger.protocol import Manifest, TileState

log = structlog.get_logger()

Kind = Literal["lease", "outbox", "object", "manifest", "import", "publication", "pin"]

GRACE_MS = 15 * 60_000
"""How old something is before it is called half done: what mends it by itself does so within a minute, and an audit
that finds work under way would wake somebody for nothing."""

SEEN_VALUE = "half-done.outbox"
"""The ledger's named value: rows of the feature store's outbox say nothing of their age, so the newest one that was
there at the last looks is remembered."""

MOST = 1_000
"""Most of one kind that are found, and mended, at a time."""

DUTIES: tuple[Duty, ...] = ("announce", "purge", "purge_again", "catalog")


@dataclass(frozen=True, slots=True)
class HalfDone:
    """One thing that somebody began and nobody ended."""

    kind: Kind
    subject: str
    """A tile's key, or the id of a batch, a manifest, an import, a publication or a pin; a duty."""
    problem: str
    since_ms: int = 0
    """Since when, milliseconds since the epoch, UTC; 0: nobody knows."""
    count: int = 1
    """Rows, tiles or objects of it."""
    tile: str | None = None
    """The first tile that it holds: where a person looks on the map."""


def find(stack: Stack, *, grace_ms: int = GRACE_MS, at_ms: int | None = None) -> list[HalfDone]:
    """Everything that is half done for longer than the grace. Looks, and changes nothing of it.

    Args:
        stack: The ports.
        grace_ms: How old something must be, milliseconds.
        at_ms: Now, milliseconds since the epoch, UTC.
    """
    at = now_ms() if at_ms is None else at_ms
    return [
        *_leases(stack, at - grace_ms),
        *_owed(stack, grace_ms),
        *_edits_owed(stack, at, grace_ms),
        *_objects(stack, at, grace_ms),
        *_manifests(stack, at - grace_ms),
        *_imports(stack),
        *_publications(stack, at),
        *_pins(stack, at),
    ]


def mend(
    stack: Stack,
    found: Sequence[HalfDone],
    *,
    pay_catalog: Callable[[], int] | None = None,
    grace_ms: int = GRACE_MS,
    at_ms: int | None = None,
) -> dict[str, int]:
    """End what was found; how much of each kind. It may be done again, and beside whoever should have done it.

    Args:
        stack: The ports.
        found: What `find` found.
        pay_catalog: Pays the catalog duties of commits; None leaves them to a process that has Dagster.
        grace_ms: As for `find`.
        at_ms: Now, milliseconds since the epoch, UTC.
    """
    at = now_ms() if at_ms is None else at_ms
    kinds = {one.kind for one in found}
    done: dict[str, int] = {}
    if "lease" in kinds:
        done["lease"] = sum(_end_lease(stack, one) for one in found if one.kind == "lease")
    if "outbox" in kinds:
        done["outbox"] = _pay(stack, found, pay_catalog)
    if "object" in kinds:
        moved = sum(_move_past(stack, one.subject) for one in found if one.kind == "object")
        done["object"] = moved + garbage.collect_objects(stack, now_ms=at)
    if "manifest" in kinds:
        done["manifest"] = sum(
            _end_manifest(stack, one.subject, at - grace_ms) for one in found if one.kind == "manifest"
        )
    if "import" in kinds:
        done["import"] = outbox.sweep_imports(stack)
    if "publication" in kinds:
        names = sorted({one.subject.partition("/")[0] for one in found if one.kind == "publication"})
        done["publication"] = sum(keeping.sweep(stack, name) for name in names)
    if "pin" in kinds:
        done["pin"] = pins.forget_expired(stack.ledger, at)
    log.info("mended what was half done", **{kind: count for kind, count in done.items() if count})
    return done


# -- leases --------------------------------------------------------------------------------------------------------


def _leases(stack: Stack, before: int) -> Iterator[HalfDone]:
    for batch in stack.ledger.batches()[:MOST]:
        if batch.lease_until_ms < before:
            yield HalfDone(
                "lease",
                batch.id,
                f"the batch is {batch.state}, and nobody renewed its lease: its run is gone, or no sensor runs",
                batch.lease_until_ms,
                len(batch.keys),
                min(batch.keys, default=None),
            )
    open_batches = {batch.id for batch in stack.ledger.batches()}
    owners: dict[str, list[TileState]] = {}
    for state in stack.ledger.dirty(MOST, unleased=False):
        if state.lease and state.lease not in open_batches and state.lease_until_ms < before:
            owners.setdefault(state.lease, []).append(state)
    for owner, states in owners.items():
        problem = "it took tiles and neither built nor freed them"
        yield HalfDone("lease", owner, problem, states[0].lease_until_ms, len(states), min(one.key for one in states))


def _end_lease(stack: Stack, one: HalfDone) -> int:
    ledger = stack.ledger
    if any(batch.id == one.subject for batch in ledger.batches()):
        ledger.end_batch(one.subject)
    else:
        ledger.free(one.subject)
    return one.count


# -- outboxes ------------------------------------------------------------------------------------------------------


def _owed(stack: Stack, grace_ms: int) -> Iterator[HalfDone]:
    for duty in DUTIES:
        later_ms = int(stack.settings.purge_again_s * 1000) if duty == "purge_again" else 0
        rows = stack.ledger.owed(duty, MOST, min_age_ms=grace_ms + later_ms)
        if rows:
            yield HalfDone(
                "outbox",
                duty,
                f"commits owe it, the oldest of {rows[0].key} revision {rows[0].revision}",
                rows[0].built_at_ms,
                len(rows),
            )


def _edits_owed(stack: Stack, at: int, grace_ms: int) -> list[HalfDone]:
    """Rows of edits that were there at a look which is a grace ago."""
    text = stack.ledger.get_value(SEEN_VALUE)
    looks: list[list[int]] = json.loads(text) if text else []
    old = [newest for seen, newest in looks if at - seen >= grace_ms]
    rows = [row for row in stack.features.owed(MOST) if row.kind != "manifest"]
    late = [row for row in rows if old and row.id <= old[-1]]
    # Of the looks that are a grace ago the last one says it all.
    kept = [look for look in looks if at - look[0] < grace_ms]
    kept = [*([look for look in looks if at - look[0] >= grace_ms][-1:]), *kept]
    if rows and (not kept or at - kept[-1][0] >= grace_ms // 4 or grace_ms == 0):
        kept.append([at, rows[-1].id])
    wanted = json.dumps(kept[-8:]) if rows else None
    if wanted != text:
        stack.ledger.set_value(SEEN_VALUE, wanted, expect=text)
    kinds = sorted({row.kind for row in late})
    return [
        HalfDone(
            "outbox",
            f"edits: {kind}",
            "edits are stored, and the log was never told of what they touch: ingest is gone, or the log away",
            count=sum(row.kind == kind for row in late),
        )
        for kind in kinds
    ]


def _pay(stack: Stack, found: Sequence[HalfDone], pay_catalog: Callable[[], int] | None) -> int:
    duties = {one.subject for one in found if one.kind == "outbox"}
    paid = 0
    if any(duty.startswith("edits") for duty in duties):
        paid += send_fences(stack) + outbox.send_hints(stack) + len(outbox.plan_wide(stack))
    if duties & {"purge", "purge_again"}:
        paid += sweep_purges(stack)
    if "announce" in duties:
        paid += sweep_announcements(stack)
    if "catalog" in duties and pay_catalog is not None:
        paid += pay_catalog()
    return paid


# -- objects -------------------------------------------------------------------------------------------------------


def _objects(stack: Stack, at: int, grace_ms: int) -> Iterator[HalfDone]:
    """Objects that no row names, and that garbage collection did not take."""
    garbage_ms = int(stack.settings.garbage_grace_s * 1000)
    objects = stack.tiles.list(TILES_FOLDER)
    found = 0
    while (page := list(islice(objects, garbage.PAGE))) and found < MOST:
        for one in garbage.superseded(stack, page):
            if one.since_ms + garbage_ms + grace_ms <= at:
                found += 1
                problem = f"{one.stored.name} is superseded, and garbage collection did not take it"
                yield HalfDone("object", one.key, problem, one.since_ms)
        old = [one for one in page if one.modified_ms + grace_ms <= at]
        parsed = [(one, *named) for one in old if (named := garbage.parse(one)) is not None]
        states = stack.ledger.read(sorted({key for _, key, _ in parsed}))
        for stored, key, revision in parsed:
            if revision > states[key].revision:
                found += 1
                problem = f"{stored.name} was never committed: its builder died, the ledger has {states[key].revision}"
                yield HalfDone("object", key, problem, stored.modified_ms)


def _move_past(stack: Stack, key: str) -> int:
    """Let a tile's revision pass that of an object which was never committed, so that garbage collection may take it.

    The object itself must not be deleted: its builder may only be slow. After this its commit no longer holds. What the
    tile shows stays as it is: the same bytes under the next revision.
    """
    ledger = stack.ledger
    state = ledger.read([key])[key]
    try:
        Tile.from_key(key)
    except TileError:
        return 0
    above = [
        revision
        for stored in stack.tiles.list(f"{TILES_FOLDER}{Tile.from_key(key).path}/")
        if (parsed := garbage.parse(stored)) is not None and (revision := parsed[1]) > state.revision
    ]
    if not above:
        return 0
    if state.revision == 0 or state.dirty or (state.content_hash is None and not state.empty) or state.work_key is None:
        if not state.dirty:
            ledger.mark([key])
        return 1  # Its next build commits a revision of its own.
    if state.object_name is not None and state.content_hash is not None:
        data = stack.tiles.get(tile_object(state.object_name))
        if data is None:
            return 0  # The check `integrity` is for that.
        stack.tiles.put(tile_object(object_name(key, state.revision + 1, state.content_hash)), data)
    held = ledger.commit(
        [
            Commit(
                key,
                state.revision,
                state.built,
                state.work_key,
                None if state.empty else state.content_hash,
                state.bytes,
                state.data_time_ms,
                "emptied" if state.empty else "built",
            )
        ]
    )
    return len(held)


# -- manifests and imports -----------------------------------------------------------------------------------------


def _manifests(stack: Stack, before: int) -> Iterator[HalfDone]:
    collecting = {row.group for row in stack.features.owed(outbox.PAGE, kind="manifest")}
    for manifest in stack.ledger.manifests(MOST):
        if _is_stuck(manifest, before) and manifest.id not in collecting:
            yield HalfDone(
                "manifest",
                manifest.id,
                f"{manifest.kind} {manifest.title!r} was written in part and never marked: nothing of it is built",
                manifest.created_ms,
                manifest.tiles,
            )


def _is_stuck(manifest: Manifest, before: int) -> bool:
    return manifest.state == "writing" and manifest.created_ms < before


def _end_manifest(stack: Stack, manifest_id: str, before: int) -> int:
    """Give up a manifest whose tiles may not be all: marking it would build less than was asked for, and say done.

    A repair and a very wide edit are asked for still, by their own sign, and are written anew under the same id.
    """
    manifest = outbox.manifest_or_none(stack, manifest_id)
    if manifest is None or not _is_stuck(manifest, before):
        return 0
    if manifest.kind in ("repair", "wide"):
        return len(outbox.plan_wide(stack))
    stack.ledger.cancel_manifest(manifest_id)
    return 1


def _imports(stack: Stack) -> Iterator[HalfDone]:
    """Imports that stored features, and died before their tiles were marked. Not known while the guard is away."""
    rows = stack.features.owed(outbox.PAGE, kind="manifest")
    for group in sorted({row.group for row in rows}):
        try:
            lease = stack.guard.acquire(outbox.IMPORT_LEASE + group, "half-done", 5)
        except GuardUnavailable as away:
            log.warning("cannot see which imports live", error=str(away))
            return
        if lease is None:
            continue
        stack.guard.release(lease)
        count = sum(row.group == group for row in rows)
        yield HalfDone("import", group, "its features are stored, its tiles were never marked", count=count)


# -- publications and pins -----------------------------------------------------------------------------------------


def _publications(stack: Stack, at: int) -> Iterator[HalfDone]:
    for name in registry.names(stack.ledger):
        try:
            tileset = registry.read(stack.ledger, name)
        except registry.UnknownTileset:
            continue
        for version, claim in tileset.claims.items():
            if claim.until_ms and not registry.lives(claim, at):
                yield HalfDone("publication", f"{name}/{version}", "its publisher died while it wrote", claim.until_ms)


def _pins(stack: Stack, at: int) -> Iterator[HalfDone]:
    for pin in pins.expired_pins(stack.ledger, at):
        yield HalfDone("pin", pin.id, f"{pin.what}: its reader died, and let nothing go", pin.until_ms)
