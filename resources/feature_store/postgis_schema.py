"""The tables of the feature store in PostGIS, and the steps that bring them up to date. No rows and no rules.

One table holds what stands for each (source, feature id), tombstones among it, so that one unique index and one row
lock guard its version. What is alive, and what is not, are views of it: `features` is the layer for QGIS.
"""

from __future__ import annotations

from resources.migrations import Migration

COMPONENT = "feature_store"

PLACE = "ST_MakeLine(ST_MakePoint({west}, {south}, {first}), ST_MakePoint({east}, {north}, {last}))"
"""The diagonal of a box in degrees and zooms: what the index of `standing` holds, and what is asked of it.

With the zooms in it, a tile of zoom 0 does not walk every building of a country.
"""

_PLACE = PLACE.format(west="west", south="south", first="min_zoom", east="east", north="north", last="max_zoom")

# A trusted language and no right needed where PostGIS is there already. Two schemas migrated at once may both miss it.
_EXTENSION = """
DO $$
BEGIN
    IF to_regtype('geometry') IS NOT NULL THEN
        RETURN;
    END IF;
    IF EXISTS (SELECT FROM pg_extension WHERE extname = 'postgis') THEN
        RAISE EXCEPTION 'the extension postgis is in schema %, not in public',
            (SELECT extnamespace::regnamespace FROM pg_extension WHERE extname = 'postgis');
    END IF;
    CREATE EXTENSION postgis SCHEMA public;
EXCEPTION
    WHEN unique_violation OR duplicate_object THEN
        NULL;
    WHEN feature_not_supported OR undefined_file OR insufficient_privilege THEN
        RAISE EXCEPTION USING ERRCODE = 'feature_not_supported',
            MESSAGE = format('PostGIS is missing (%s): install it and run CREATE EXTENSION postgis as a superuser',
                             SQLERRM);
END
$$"""

MIGRATIONS: tuple[Migration, ...] = (
    Migration(
        1,
        "Features, applied keys and outbox",
        (
            _EXTENSION,
            # Text is compared by its bytes: as Python does, and without the locale of a machine.
            # Geometry and properties stand last: a query for digests never reads so far into a row.
            """CREATE TABLE standing (
                fid bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
                version bigint NOT NULL, event_time_ms bigint NOT NULL, deleted_ms bigint,
                west float8, south float8, east float8, north float8,
                vertex_count integer NOT NULL, min_zoom smallint NOT NULL, max_zoom smallint NOT NULL,
                digest bytea, source text COLLATE "C" NOT NULL, feature_id text COLLATE "C" NOT NULL,
                layer text COLLATE "C" NOT NULL, content_hash text COLLATE "C" NOT NULL,
                properties text COLLATE "C" NOT NULL, geom geometry(Geometry, 4326),
                UNIQUE (source, feature_id),
                CHECK (deleted_ms IS NOT NULL OR octet_length(digest) = 16),
                CHECK (deleted_ms IS NULL OR (geom IS NULL AND west IS NULL))
            ) WITH (fillfactor = 90)""",
            "ALTER TABLE standing ALTER COLUMN properties SET COMPRESSION lz4",
            f"""CREATE INDEX standing_place ON standing USING gist (({_PLACE}) gist_geometry_ops_nd)
                WHERE west IS NOT NULL AND min_zoom <= max_zoom""",
            "CREATE INDEX standing_geom ON standing USING gist (geom)",
            "CREATE INDEX standing_layer ON standing (layer) WHERE deleted_ms IS NULL",
            "CREATE INDEX standing_deleted ON standing (deleted_ms) WHERE deleted_ms IS NOT NULL",
            """CREATE VIEW features AS SELECT fid, source, feature_id, layer, version, properties, min_zoom, max_zoom,
                vertex_count, event_time_ms, geom FROM standing WHERE deleted_ms IS NULL""",
            """CREATE VIEW tombstones AS SELECT source, feature_id, version, content_hash, deleted_ms AS written_ms
                FROM standing WHERE deleted_ms IS NOT NULL""",
            """CREATE TABLE applied_keys (event_key text COLLATE "C" PRIMARY KEY, written_ms bigint NOT NULL)""",
            "CREATE INDEX applied_keys_age ON applied_keys (written_ms)",
            """CREATE TABLE outbox (
                id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, kind text COLLATE "C" NOT NULL,
                key text COLLATE "C" NOT NULL, value bytea NOT NULL, headers text NOT NULL,
                "group" text COLLATE "C" NOT NULL)""",
            'CREATE INDEX outbox_kind ON outbox (kind, "group", id)',
            # One row, which every transaction that applies edits updates last: it counts, and whoever holds it is the
            # only one who commits outbox rows, so that their ids ascend in the order of the commits.
            """CREATE TABLE totals (
                one_row boolean PRIMARY KEY DEFAULT true CHECK (one_row), applied_keys bigint NOT NULL DEFAULT 0,
                tombstones bigint NOT NULL DEFAULT 0, watermark_ms bigint NOT NULL DEFAULT 0
            ) WITH (fillfactor = 10)""",
            "INSERT INTO totals DEFAULT VALUES",
            """CREATE TABLE layer_totals (
                layer text COLLATE "C" PRIMARY KEY, features bigint NOT NULL) WITH (fillfactor = 10)""",
        ),
    ),
    Migration(
        2,
        "how current each source is",
        (
            """CREATE TABLE source_times (
                source text COLLATE "C" PRIMARY KEY, watermark_ms bigint NOT NULL, received_ms bigint NOT NULL
            ) WITH (fillfactor = 10)""",
            """INSERT INTO source_times
                SELECT source, max(event_time_ms), 0 FROM standing WHERE deleted_ms IS NULL GROUP BY source""",
        ),
    ),
    Migration(
        3,
        "a log of what changed",
        (
            # Written by whoever holds the row of `totals`, so that its numbers ascend in the order of the commits.
            """CREATE TABLE changes (
                number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, fid bigint NOT NULL, mark bigint NOT NULL
            )""",
        ),
    ),
)
