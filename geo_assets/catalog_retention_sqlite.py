"""Retention of Dagster's storages on SQLite: the databases of single runs, and room that goes back to the disk."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy as db
from dagster import DagsterInstance
from dagster._core.instance import RUNLESS_RUN_ID
from dagster._core.storage.event_log import SqliteEventLogStorage
from dagster._core.storage.event_log.schema import SqlEventLogStorageTable
from dagster._core.storage.runs.schema import RunsTable
from dagster._core.storage.sqlite import SQLITE_BUSY_TIMEOUT_SECONDS

from geo_assets.catalog_storage import INCREMENTAL

if TYPE_CHECKING:
    from geo_assets.catalog_retention import Pass

_SHARD = re.compile(r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.db")
"""The database of a run is named by its id. Anything else is left alone."""

LEAST_QUIET_S = 60.0
"""A run's last events may come after its end: its database must have been left alone for so long."""

SHRINK_PAGES = 500
"""Pages given back in one transaction: 2 MB."""

FREE_KEPT = 0.1
"""Part of a file's pages that may be free: the next events use them again."""

REWRITE_BYTES = 200_000_000
"""Largest file that is written anew beside running work, once, so that it can give room back: that takes the write
lock for a second or two, and Dagster waits for thirty. A larger one is left for `geo-assets maintenance --compact`."""


def is_sharded(instance: DagsterInstance) -> bool:
    """Whether events are in SQLite, each run's in a file of its own."""
    return isinstance(instance.event_log_storage, SqliteEventLogStorage)


def _storage(this: Pass) -> SqliteEventLogStorage:
    storage = this.instance.event_log_storage
    assert isinstance(storage, SqliteEventLogStorage)
    return storage


def _folder(this: Pass) -> Path:
    return Path(_storage(this).path_for_shard("index")).parent


def clean_shards(this: Pass) -> None:
    """Delete the databases of runs that ended long ago, and old events from the one of events outside any run.

    What a run's file holds is what the run logged; what the catalog shows is in the index.
    """
    before = this.before(this.keep.steps_s)
    for found in _batches(_folder(this)):
        with this.runs.connect() as connection:
            known = {
                row[0]: row[1:]
                for row in connection.execute(
                    db.select(RunsTable.c.run_id, RunsTable.c.end_time, RunsTable.c.update_timestamp).where(
                        RunsTable.c.run_id.in_([run_id for run_id, _ in found])
                    )
                )
            }
        for run_id, path in found:
            if this.out_of_time:
                return
            if run_id in this.alive or not _is_past(path, known.get(run_id), this.now_s, before.timestamp()):
                continue
            this.removed["databases of runs"] += 1
            if not this.dry:
                # The database first: a write-ahead log without one is nothing, and SQLite discards it.
                for suffix in ("", "-wal", "-shm"):
                    with contextlib.suppress(FileNotFoundError):
                        Path(f"{path}{suffix}").unlink()
    _runless(this)


def _is_past(path: Path, known: Sequence[object] | None, now_s: float, before: float) -> bool:
    """Whether a run's database may go: its run ended before, or is gone, and nobody wrote to it since."""
    try:
        newest = max(
            os.stat(f"{path}{suffix}").st_mtime for suffix in ("", "-wal") if os.path.exists(f"{path}{suffix}")
        )
    except (FileNotFoundError, ValueError):
        return False
    return newest < now_s - LEAST_QUIET_S and (known is None or _ended(known) < before)


def _ended(known: Sequence[object]) -> float:
    end_time, updated = known
    if isinstance(end_time, float | int):
        return float(end_time)
    return updated.replace(tzinfo=UTC).timestamp() if isinstance(updated, datetime) else float("inf")


def _batches(folder: Path) -> Iterator[list[tuple[str, Path]]]:
    found: list[tuple[str, Path]] = []
    for entry in os.scandir(folder):
        match = _SHARD.fullmatch(entry.name)
        if match is None:
            continue
        found.append((match[1], Path(entry.path)))
        if len(found) == 500:
            yield found
            found = []
    if found:
        yield found


def _runless(this: Pass) -> None:
    """Events outside any run are in the index as well, which every query of the catalog reads."""
    storage = _storage(this)
    if not Path(storage.path_for_shard(RUNLESS_RUN_ID)).exists():
        return
    from geo_assets.catalog_retention import windows

    events = SqlEventLogStorageTable.c
    before = this.before(this.keep.steps_s)

    def connect() -> object:
        return storage.run_connection(RUNLESS_RUN_ID)

    for rows in windows(this, connect, (events.id, events.timestamp), events.id):
        doomed = [event_id for event_id, timestamp in rows if timestamp < before]
        statement = SqlEventLogStorageTable.delete().where(events.id.in_(doomed))
        this.delete("events outside runs", connect, [statement], len(doomed))
        if len(doomed) < len(rows):
            break


def shrink(this: Pass) -> int:
    """Give free pages back to the disk, a few at a time; how many bytes."""
    return sum(shrink_file(path, lambda: this.out_of_time) for path in _files(this.instance))


def compact(instance: DagsterInstance) -> int:
    """Write every file anew that cannot give pages back one by one, whatever its size; how many bytes went back."""
    return sum(shrink_file(path, rewrite_bytes=1 << 62) for path in _files(instance))


def _files(instance: DagsterInstance) -> list[Path]:
    storage = instance.event_log_storage
    assert isinstance(storage, SqliteEventLogStorage)
    found = [Path(storage.path_for_shard(name)) for name in ("index", RUNLESS_RUN_ID)]
    for other in (instance.run_storage, instance.schedule_storage):
        url = str(getattr(other, "_conn_string", ""))
        if url.startswith("sqlite:///"):
            found.append(Path(url.removeprefix("sqlite:///")))
    return [path for path in found if path.exists()]


def shrink_file(path: Path, is_late: Callable[[], bool] = bool, *, rewrite_bytes: int = REWRITE_BYTES) -> int:
    """Give the free pages of one database back to the disk; how many bytes.

    Args:
        path: The database.
        is_late: Says when to stop between two steps.
        rewrite_bytes: Largest file that is written anew where it cannot give pages back one by one.
    """
    before = path.stat().st_size
    with contextlib.closing(
        sqlite3.connect(path, timeout=SQLITE_BUSY_TIMEOUT_SECONDS, isolation_level=None)
    ) as connection:
        pages, free, mode = (
            connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "auto_vacuum")
        )
        if mode != INCREMENTAL:
            if free > FREE_KEPT * pages and before <= rewrite_bytes:
                connection.execute(f"PRAGMA auto_vacuum = {INCREMENTAL}")
                connection.execute("VACUUM")
        else:
            while free > FREE_KEPT * pages and not is_late():
                began = time.monotonic()
                # As a script: `execute` takes one step of a statement without columns, and a step is one page.
                connection.executescript(f"PRAGMA incremental_vacuum({SHRINK_PAGES})")
                time.sleep(max(time.monotonic() - began, 0.005))
                pages, free = (
                    connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count")
                )
        # The file itself is cut at a checkpoint. Who reads at this moment keeps it as it is until the next one.
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    return max(before - path.stat().st_size, 0)
