"""The ledger's tables in Postgres, one migration a version. No rows and no rules.

They are the tables of the embedded ledger (sqlite_schema, where the columns are explained) with three differences:
`zoom` and `work` follow from the other columns by themselves; marks come from a sequence; and the total of commits is
spread over rows, so that no two committers wait for each other's disk.
"""

from __future__ import annotations

from resources.migrations import Migration

COMPONENT = "ledger"

COMMIT_SLOTS = 16
"""Rows of the total of commits; a connection counts in the one its process id chooses."""

# Keys compare byte by byte, as in every other place that sorts them, whatever the database's own collation is.
# A fifth of each page of tiles is kept free: a build changes each row several times.
_TABLES = (
    "CREATE SEQUENCE mark_counter",
    "CREATE TABLE commit_total (slot smallint PRIMARY KEY, value bigint NOT NULL) WITH (fillfactor = 50)",
    f"INSERT INTO commit_total SELECT slot, 0 FROM generate_series(0, {COMMIT_SLOTS - 1}) AS slot",
    """CREATE TABLE tile (
        key text COLLATE "C" PRIMARY KEY,
        revision bigint NOT NULL DEFAULT 0,
        work_key text,
        content_hash text,
        bytes bigint NOT NULL DEFAULT 0,
        empty boolean NOT NULL DEFAULT true,
        built_at_ms bigint NOT NULL DEFAULT 0,
        data_time_ms bigint NOT NULL DEFAULT 0,
        wanted_live bigint NOT NULL DEFAULT 0,
        wanted_backfill bigint NOT NULL DEFAULT 0,
        forced_live bigint NOT NULL DEFAULT 0,
        forced_backfill bigint NOT NULL DEFAULT 0,
        built bigint NOT NULL DEFAULT 0,
        dirty_since_ms bigint NOT NULL DEFAULT 0,
        attempts integer NOT NULL DEFAULT 0,
        given_up bigint NOT NULL DEFAULT 0,
        error text,
        lease text,
        lease_until_ms bigint NOT NULL DEFAULT 0,
        manifest text,
        marked_ms bigint NOT NULL DEFAULT 0,
        cleared bigint NOT NULL DEFAULT 0,
        backfill_alone bigint NOT NULL DEFAULT 0,
        forced_alone bigint NOT NULL DEFAULT 0,
        zoom integer NOT NULL GENERATED ALWAYS AS (coalesce(substring(key from '^[0-9]{1,4}')::integer, 0)) STORED,
        work smallint GENERATED ALWAYS AS (
            CASE WHEN greatest(wanted_live, wanted_backfill) <= greatest(built, given_up) THEN NULL
                 WHEN wanted_live > built THEN 0 ELSE 1 END) STORED
    ) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05)""",
    "CREATE INDEX tile_work ON tile (work, dirty_since_ms, key) WHERE work IS NOT NULL",
    "CREATE INDEX tile_published ON tile (zoom, key) WHERE content_hash IS NOT NULL",
    """CREATE TABLE read_position (
        topic_id text NOT NULL, partition integer NOT NULL, next_offset bigint NOT NULL,
        PRIMARY KEY (topic_id, partition)) WITH (fillfactor = 50)""",
    """CREATE TABLE owed (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        duty text NOT NULL,
        key text COLLATE "C" NOT NULL,
        revision bigint NOT NULL,
        content_hash text,
        work_key text NOT NULL,
        bytes bigint NOT NULL,
        outcome text NOT NULL,
        built_at_ms bigint NOT NULL,
        data_time_ms bigint NOT NULL,
        details text NOT NULL
    ) WITH (autovacuum_vacuum_scale_factor = 0.05)""",
    "CREATE INDEX owed_duty ON owed (duty, id)",
    """CREATE TABLE batch (
        number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        id text NOT NULL UNIQUE,
        keys text[] NOT NULL,
        attempt integer NOT NULL,
        kind text NOT NULL,
        state text NOT NULL,
        created_ms bigint NOT NULL,
        lease_until_ms bigint NOT NULL,
        manifest text,
        run_id text,
        ended_ms bigint NOT NULL DEFAULT 0)""",
    """CREATE TABLE manifest (
        number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        id text NOT NULL UNIQUE,
        title text NOT NULL,
        kind text NOT NULL,
        state text NOT NULL,
        created_ms bigint NOT NULL,
        tiles bigint NOT NULL,
        mark bigint NOT NULL,
        forced boolean NOT NULL DEFAULT false,
        parameters text NOT NULL,
        problem text)""",
    """CREATE TABLE manifest_tile (
        manifest bigint NOT NULL, key text COLLATE "C" NOT NULL, PRIMARY KEY (manifest, key))""",
    "CREATE TABLE named_value (name text PRIMARY KEY, value text NOT NULL)",
)

MIGRATIONS = (
    Migration(1, "tiles, positions, outbox, batches, manifests, values", _TABLES),
    Migration(
        2,
        "indexes of leases, tiles given up, ended batches and manifests of a tile",
        (
            "CREATE INDEX tile_lease ON tile (lease) WHERE lease IS NOT NULL",
            "CREATE INDEX tile_given_up ON tile (given_up) WHERE given_up > 0",
            "CREATE INDEX batch_open ON batch (number) WHERE state <> 'ended'",
            "CREATE INDEX batch_ended ON batch (ended_ms) WHERE state = 'ended'",
            "CREATE INDEX manifest_tile_key ON manifest_tile (key)",
        ),
    ),
)
