"""The ledger's tables in SQLite, their indexes and their version. No rows and no rules."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence

from resources.snapshots import SnapshotFile

VERSION = 1
STEPS: Mapping[int, Sequence[str]] = {}
"""By version, the statements that bring a file of the version before to it; TABLES are those of the last one."""

COMPATIBLE: Mapping[int, int] = {}
"""By version, the oldest one whose programs still work on its files, where its step only adds."""

# `work` says whether, and in which order, a tile is to be built: 0 live, 1 backfill, NULL nothing to do (clean, or
# given up at its newest mark). Plain columns, because SQLite answers from an index alone only for those; the check
# keeps `work` true whoever writes it.
# `cleared` is the mark of the last integrity fault: what was read before it must not bring the work key back.
# `backfill_alone` and `forced_alone` are backfill marks outside any manifest: what stands when a manifest is cancelled.
TABLES = """
CREATE TABLE IF NOT EXISTS counter (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT OR IGNORE INTO counter VALUES ('mark', 0), ('commits', 0);
CREATE TABLE IF NOT EXISTS tile (
    key TEXT PRIMARY KEY,
    revision INTEGER NOT NULL DEFAULT 0,
    work_key TEXT,
    content_hash TEXT,
    bytes INTEGER NOT NULL DEFAULT 0,
    empty INTEGER NOT NULL DEFAULT 1,
    built_at_ms INTEGER NOT NULL DEFAULT 0,
    data_time_ms INTEGER NOT NULL DEFAULT 0,
    wanted_live INTEGER NOT NULL DEFAULT 0,
    wanted_backfill INTEGER NOT NULL DEFAULT 0,
    forced_live INTEGER NOT NULL DEFAULT 0,
    forced_backfill INTEGER NOT NULL DEFAULT 0,
    built INTEGER NOT NULL DEFAULT 0,
    dirty_since_ms INTEGER NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0,
    given_up INTEGER NOT NULL DEFAULT 0,
    error TEXT,
    lease TEXT,
    lease_until_ms INTEGER NOT NULL DEFAULT 0,
    manifest TEXT,
    marked_ms INTEGER NOT NULL DEFAULT 0,
    cleared INTEGER NOT NULL DEFAULT 0,
    backfill_alone INTEGER NOT NULL DEFAULT 0,
    forced_alone INTEGER NOT NULL DEFAULT 0,
    zoom INTEGER NOT NULL,
    work INTEGER,
    CHECK (work IS CASE WHEN max(wanted_live, wanted_backfill) <= max(built, given_up) THEN NULL
                        WHEN wanted_live > built THEN 0 ELSE 1 END)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS tile_work ON tile (work, dirty_since_ms, key) WHERE work IS NOT NULL;
CREATE INDEX IF NOT EXISTS tile_published ON tile (zoom, key, bytes) WHERE content_hash IS NOT NULL;
CREATE INDEX IF NOT EXISTS tile_given_up ON tile (given_up) WHERE given_up > 0;
CREATE INDEX IF NOT EXISTS tile_lease ON tile (lease, lease_until_ms) WHERE lease IS NOT NULL;
CREATE TABLE IF NOT EXISTS position (
    topic_id TEXT NOT NULL, partition INTEGER NOT NULL, next_offset INTEGER NOT NULL,
    PRIMARY KEY (topic_id, partition)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS owed (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    duty TEXT NOT NULL,
    key TEXT NOT NULL,
    revision INTEGER NOT NULL,
    content_hash TEXT,
    work_key TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    outcome TEXT NOT NULL,
    built_at_ms INTEGER NOT NULL,
    data_time_ms INTEGER NOT NULL,
    details TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS owed_duty ON owed (duty, id);
CREATE TABLE IF NOT EXISTS batch (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    keys TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    kind TEXT NOT NULL,
    state TEXT NOT NULL,
    created_ms INTEGER NOT NULL,
    lease_until_ms INTEGER NOT NULL,
    manifest TEXT,
    run_id TEXT,
    ended_ms INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS batch_open ON batch (number) WHERE state <> 'ended';
CREATE INDEX IF NOT EXISTS batch_ended ON batch (ended_ms) WHERE state = 'ended';
CREATE TABLE IF NOT EXISTS manifest (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    title TEXT NOT NULL,
    kind TEXT NOT NULL,
    state TEXT NOT NULL,
    created_ms INTEGER NOT NULL,
    tiles INTEGER NOT NULL,
    mark INTEGER NOT NULL,
    forced INTEGER NOT NULL DEFAULT 0,
    parameters TEXT NOT NULL,
    problem TEXT
);
CREATE TABLE IF NOT EXISTS manifest_tile (
    manifest INTEGER NOT NULL, key TEXT NOT NULL, PRIMARY KEY (manifest, key)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS manifest_tile_key ON manifest_tile (key);
CREATE TABLE IF NOT EXISTS named_value (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""

# Where a bulk statement finds its rows; in memory, one a connection.
_SCRATCH = """
CREATE TEMP TABLE asked (
    key TEXT PRIMARY KEY, revision INTEGER, wanted INTEGER, work_key TEXT, content_hash TEXT, bytes INTEGER,
    data_time_ms INTEGER, outcome TEXT, details TEXT
) WITHOUT ROWID;
CREATE TEMP TABLE asked_duty (key TEXT, ordinal INTEGER, duty TEXT);
"""


class LedgerFile(SnapshotFile):
    """The ledger's file: each connection has scratch tables for bulk statements."""

    def prepare_connection(self, connection: sqlite3.Connection) -> None:
        """Make the scratch tables."""
        super().prepare_connection(connection)
        # Keys and hashes are no secrets; overwriting deleted outbox rows with zeros would double their cost.
        connection.execute("PRAGMA secure_delete = OFF")
        connection.executescript(_SCRATCH)
