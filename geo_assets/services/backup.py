"""Backup of feature store and ledger, of either stack, and what makes the platform right again after a restore.

A backup is one file: a tar archive of what stores and ledger hold, of fences and the routing run's snapshot, and
`backup.json`, which says how far `[raw]` had been ingested when it began. Tiles are not in it, nor is Dagster's
catalog: both follow from the features. Nor are layers.yaml and sources.yaml, which are the user's own files and hold
secrets.

After a restore the log is ahead of the store, clients and caches have seen revisions that do not exist any more, and
objects may be gone that the ledger names. `after_restore` mends all of it; every step bears being done again.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import tarfile
import tempfile
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from geo_assets import __version__
from geo_assets.events import topics
from geo_assets.ports import TILES_FOLDER, tile_object
from geo_assets.services import geofence_snapshots
from geo_assets.services.geofence_backup import GeofenceState, GeofenceStateMoves, copy_state, make_right, put_back
from geo_assets.services.migrating import migrate_all, versions
from geo_assets.services.purging import tile_url
from geo_assets.services.supervisor import Supervisor
from geo_assets.services.tileserver.stream import EPOCH_NAME
from geo_assets.stack import Stack
from geo_assets.tiles.tile import Tile, TileError
from resources import postgres_dump
from resources.postgres import explained

if TYPE_CHECKING:
    from geo_assets.settings import Settings

log = structlog.get_logger()

FORMAT = 2
"""Of the archive; a later one is refused."""

CONTENTS = "backup.json"
PAGE = 2_000


class BackupError(Exception):
    """A backup that cannot be made or restored; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Part:
    """One component in the archive."""

    component: str
    """`feature_store` or `ledger`."""
    kind: str
    """`file` or `postgres`."""
    member: str
    """Its file in the archive; two components in one database share one."""
    version: int
    """Of its tables."""
    schema: str = ""
    """In Postgres."""


@dataclass(frozen=True, slots=True)
class Backup:
    """What a backup holds."""

    made_at_ms: int
    program: str
    raw_topic_id: str
    raw_next: Mapping[int, int]
    """Partition of `[raw]` to the next offset that ingest had not yet acknowledged."""
    parts: tuple[Part, ...]
    geofences: GeofenceState
    format: int = FORMAT


@dataclass(frozen=True, slots=True)
class Restored:
    """What `after_restore` did."""

    tiles: int
    """Marked, all of them."""
    cleared: int
    """Of those, how many whose object was gone."""
    replayed: int
    """Records of `[raw]` that ingest reads again."""
    lost: int
    """Records of `[raw]` after the backup that retention has taken: their edits have to be sent again."""
    unpurged: int
    """Tiles that a cache did not forget; it keeps them for an hour at most."""
    other_topic: int | None = None
    """None where `[raw]` is the backup's own topic. Where it was made anew: how many records of the backup's are in
    the backup. What it accepted after them is gone with it, and nothing can tell how much that was."""
    routing_anew: bool = False
    """Positions had been routed, and there is no snapshot to go on from: nobody is in any fence at first."""


# -- making -----------------------------------------------------------------------------------------------------------
def make_backup(settings: Settings, path: Path) -> Backup:
    """Write a backup to a new file, readable by its owner alone. Services may go on.

    The position of `[raw]` is read first and the store after it: what is ingested in between is in the store and comes
    again after a restore, where its event keys make it a duplicate. The other way round it would be lost.

    Raises:
        BackupError: The file is there already, or a component cannot be copied.
        LogError: The log cannot be read.
    """
    if path.exists():
        raise BackupError(f"{path} is there already: name another file")
    with Stack(settings) as stack:
        raw_topic_id, raw_next = stack.log.topic_id(topics.RAW), _raw_position(stack)
    with tempfile.TemporaryDirectory(prefix=".backup-", dir=path.absolute().parent) as folder:
        parts = tuple(_copied(settings, Path(folder)))
        with Stack(settings) as stack:
            try:
                geofences = copy_state(stack, Path(folder))
            except GeofenceStateMoves as fault:
                raise BackupError(f"{fault}: try again") from None
        made = Backup(time.time_ns() // 1_000_000, __version__, raw_topic_id, raw_next, parts, geofences)
        unfinished = Path(folder) / "archive"
        with open(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            # The dumps of Postgres are compressed already; files of SQLite become a third at the cheapest level.
            with tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as archive:
                contents = Path(folder) / CONTENTS
                contents.write_text(json.dumps(asdict(made), indent=1))
                for name in (CONTENTS, *dict.fromkeys(part.member for part in parts), *geofences.objects):
                    archive.add(Path(folder) / name, name)
            file.flush()
            os.fsync(file.fileno())
        # Whole or not at all, whatever ends this process.
        os.replace(unfinished, path)
    return made


def _raw_position(stack: Stack) -> dict[int, int]:
    committed = stack.log.committed(topics.INGEST_GROUP, topics.RAW)
    return {
        partition: committed.get(partition, extent.begin) for partition, extent in stack.log.extents(topics.RAW).items()
    }


def _copied(settings: Settings, folder: Path) -> Iterator[Part]:
    """Copy each component into the folder."""
    dumped: dict[str, str] = {}
    for each in versions(settings):
        if each.found != each.known:
            raise BackupError(
                f"{each.component} has version {each.found}, this program works with {each.known}: "
                "run `geo-assets migrate` first"
            )
        url, setting = _url_of(settings, each.component)
        if url is None:
            member = _file_of(settings, each.component).name
            _copy_file(_file_of(settings, each.component), folder / member)
            yield Part(each.component, "file", member, each.found)
            continue
        member = dumped.get(url)
        if member is None:
            member = dumped[url] = f"{each.component}.dump"
            with explained(BackupError, setting, url), _dump_errors():
                postgres_dump.dump(url, settings.postgres_schema, folder / member)
        yield Part(each.component, "postgres", member, each.found, settings.postgres_schema)


def _copy_file(path: Path, to: Path) -> None:
    """A consistent copy of a database file while others write it."""
    try:
        with (
            contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as source,
            contextlib.closing(sqlite3.connect(to)) as target,
        ):
            # In one step: it reads one snapshot, and in WAL mode no writer waits for a reader.
            source.backup(target)
    except sqlite3.Error as fault:
        raise BackupError(f"{path} cannot be copied: {fault}") from None


# -- restoring --------------------------------------------------------------------------------------------------------
def read_contents(path: Path) -> Backup:
    """What a backup holds.

    Raises:
        BackupError: It is none, or of a later program's format.
    """
    with _readable(path), tarfile.open(path, "r:gz") as archive:
        member = archive.extractfile(CONTENTS)
        assert member is not None
        found: dict[str, Any] = json.load(member)
        if found["format"] > FORMAT:
            raise BackupError(
                f"{path} has format {found['format']}, this program knows up to {FORMAT}: use a newer one"
            )
        return Backup(
            found["made_at_ms"],
            found["program"],
            found["raw_topic_id"],
            {int(partition): offset for partition, offset in found["raw_next"].items()},
            tuple(Part(**part) for part in found["parts"]),
            _geofences(found.get("geofences", {"values": {}, "objects": []})),
            found["format"],
        )


def _geofences(found: Mapping[str, Any]) -> GeofenceState:
    """What an archive of format 1 has nothing of."""
    if not all(str(name).startswith("geofence/") for name in found["objects"]):
        raise ValueError("objects outside geofence/")
    return GeofenceState(dict(found["values"]), tuple(found["objects"]))


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """What an archive that is damaged, or none of ours, makes of its reader becomes one line."""
    try:
        yield
    except (tarfile.TarError, zlib.error, EOFError, KeyError, TypeError, ValueError, AssertionError):
        raise BackupError(f"{path} is no backup of geo-assets, or damaged") from None
    except OSError as fault:
        raise BackupError(f"{path}: {fault.strerror or 'no backup of geo-assets'}") from None


def restore(settings: Settings, path: Path) -> Restored:
    """Put back what a backup holds in place of what is there, then `after_restore`. Everything must be stopped.

    What was there before is gone afterwards. A restore that was interrupted is done again from its start.

    Raises:
        BackupError: It is no backup of this stack, or something still runs; nothing was changed.
        AlreadyRunning: `geo-assets up` runs in this home; nothing was changed.
    """
    backup = read_contents(path)
    for part in backup.parts:
        _refuse_mismatch(settings, part)
    settings.home.mkdir(parents=True, exist_ok=True)
    home = Supervisor(settings.home, lambda _, text: log.info(text))
    home.claim()
    try:
        with tempfile.TemporaryDirectory(prefix=".restore-", dir=settings.home) as folder:
            with _readable(path), tarfile.open(path, "r:gz") as archive:
                for name in (*dict.fromkeys(part.member for part in backup.parts), *backup.geofences.objects):
                    archive.extract(name, folder, filter="data")
            done: set[tuple[str, str | None]] = set()
            for part in backup.parts:
                url, setting = _url_of(settings, part.component)
                if (part.member, url) in done:
                    continue
                done.add((part.member, url))
                if url is None:
                    _put_file(Path(folder) / part.member, _file_of(settings, part.component))
                else:
                    with explained(BackupError, setting, url), _dump_errors():
                        postgres_dump.restore(url, settings.postgres_schema, Path(folder) / part.member)
            migrate_all(settings)
            with Stack(settings) as stack:
                if backup.format > 1:
                    put_back(stack, backup.geofences, Path(folder))
                return after_restore(stack, backup)
    finally:
        home.stop()


def _refuse_mismatch(settings: Settings, part: Part) -> None:
    url, setting = _url_of(settings, part.component)
    kind = "file" if url is None else "postgres"
    if kind != part.kind:
        raise BackupError(f"the backup's {part.component} is of kind {part.kind}, the settings name a {kind}")
    known = next(each.known for each in versions(settings) if each.component == part.component)
    if part.version > known:
        raise BackupError(
            f"the backup's {part.component} has version {part.version}, this program knows up to {known}: "
            "use a newer one"
        )
    if url is None:
        return
    if part.schema != settings.postgres_schema:
        raise BackupError(
            f"the backup is of schema {part.schema}: set GEO_ASSETS_POSTGRES_SCHEMA={part.schema} to restore it"
        )
    with explained(BackupError, setting, url):
        others = postgres_dump.sessions(url, settings.postgres_schema)
    if others:
        raise BackupError(
            f"{others} sessions of geo-assets are open in schema {part.schema}: stop edge, ingest, tile servers, "
            "Dagster and runs first"
        )


def _put_file(source: Path, target: Path) -> None:
    """Put a database file in another's place; a process that has that one open refuses to write from then on."""
    with contextlib.closing(sqlite3.connect(source)) as database:
        (answer,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if answer != "ok":
        raise BackupError(f"{target.name} in the backup is damaged: {answer}")
    for beside in ("-wal", "-shm"):
        Path(f"{source}{beside}").unlink(missing_ok=True)
        Path(f"{target}{beside}").unlink(missing_ok=True)
    with source.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(source, target)


# -- after ------------------------------------------------------------------------------------------------------------
def after_restore(stack: Stack, backup: Backup | None) -> Restored:
    """Make the platform right again after feature store and ledger were put back to an earlier state.

    Args:
        stack: The ports; no service may run yet.
        backup: What was restored. None where it was restored by other means: `[raw]` is then read from its oldest
            record on, which is safe (what was applied is a duplicate) and slower.

    Raises:
        LogError, LedgerError, TileStoreError: A port is away: do it again.
    """
    # The revisions that clients know may be given away again: they must forget them and reload.
    stack.ledger.set_value(EPOCH_NAME, uuid.uuid4().hex)
    routed = stack.ledger.get_value(geofence_snapshots.VALUE) is not None
    routing_anew = not make_right(stack) and routed
    cleared = _clear_lost(stack)
    keys = sorted(state.key for state in stack.ledger.scan(published=False))
    name = f"restore-{backup.made_at_ms if backup else 'other'}-{time.time_ns() // 1_000_000}"
    if keys:
        stack.ledger.write_manifest(name, "restored from a backup", "repair", keys)
        stack.ledger.mark_manifest(name)
    unpurged = _purge(stack, keys)
    replayed, lost, other_topic = _rewind(stack, backup)
    if lost:
        log.warning("edits after the backup are past the log's retention: send them again", records=lost)
    if other_topic is not None:
        log.warning("[raw] was made anew: what the backup's accepted after it is gone, unknown how much")
    return Restored(len(keys), cleared, replayed, lost, unpurged, other_topic, routing_anew)


def _clear_lost(stack: Stack) -> int:
    """Clear tiles whose object was collected since the backup: with their work key they would seem to be built."""
    named = {tile_object(state.object_name): state.key for state in stack.ledger.scan() if state.object_name}
    for stored in stack.tiles.list(TILES_FOLDER):
        named.pop(stored.name, None)
    lost = iter(sorted(named.values()))
    while page := list(islice(lost, PAGE)):
        stack.ledger.clear(page)
    return len(named)


def _purge(stack: Stack, keys: list[str]) -> int:
    """Make the caches forget these tiles: where the content comes out as the ledger says, no commit would."""
    if stack.purge is None:
        return 0
    failed = 0
    for start in range(0, len(keys), PAGE):
        failed += len(stack.purge.purge(list(_urls(stack, keys[start : start + PAGE]))))
    return failed


def _urls(stack: Stack, keys: list[str]) -> Iterator[str]:
    for key in keys:
        with contextlib.suppress(TileError):
            yield tile_url(stack.settings, Tile.from_key(key))


def _rewind(stack: Stack, backup: Backup | None) -> tuple[int, int, int | None]:
    """Set ingest's position in `[raw]` back to the backup's.

    Returns:
        Records to read again; records that are known to be gone; and, where the topic is another one than the backup's,
        the records of that one up to the backup's position.
    """
    same = backup is not None and backup.raw_topic_id == stack.log.topic_id(topics.RAW)
    replayed = lost = 0
    position: dict[int, int] = {}
    for partition, extent in stack.log.extents(topics.RAW).items():
        wanted = extent.begin
        if backup is not None:
            # Of a topic made anew, every record came after the backup.
            wanted = backup.raw_next.get(partition, extent.begin) if same else 0
        lost += max(0, extent.begin - wanted)
        position[partition] = min(max(wanted, extent.begin), extent.end)
        replayed += extent.end - position[partition]
    stack.log.commit(topics.INGEST_GROUP, topics.RAW, position)
    return replayed, lost, None if backup is None or same else sum(backup.raw_next.values())


# -- where the components are -----------------------------------------------------------------------------------------
def _url_of(settings: Settings, component: str) -> tuple[str | None, str]:
    """A component's URL, None where it is a file, and the setting that names it."""
    own, setting = {
        "feature_store": (settings.feature_store_url, "GEO_ASSETS_FEATURE_STORE_URL"),
        "ledger": (settings.ledger_url, "GEO_ASSETS_LEDGER_URL"),
    }[component]
    url = own or settings.postgres_url
    return (url.get_secret_value() if url else None), (setting if own else "GEO_ASSETS_POSTGRES_URL")


def _file_of(settings: Settings, component: str) -> Path:
    return settings.home / {"feature_store": "features.gpkg", "ledger": "ledger.db"}[component]


@contextlib.contextmanager
def _dump_errors() -> Iterator[None]:
    try:
        yield
    except postgres_dump.DumpError as fault:
        raise BackupError(str(fault)) from None
