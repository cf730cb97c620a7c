"""The tables of the feature store's GeoPackage, as the specification and this project want them. No rows and no rules.

Specification: OGC GeoPackage 1.3 (tables: annex C; R-tree: annex F.3, with the triggers of 1.4, which also stand
upserts). The tables whose names begin with `ga_` are the store's own. Only `ga_layer` is registered, as attributes:
GDAL then leaves the others out of its list of layers.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence

from resources.feature_store.gpkg_geometry import SRS_ID, register_functions
from resources.snapshots import SnapshotFile

VERSION = 2
_CHANGES = (
    "CREATE TABLE ga_change (number INTEGER PRIMARY KEY AUTOINCREMENT, fid INTEGER NOT NULL, mark INTEGER NOT NULL)"
)
STEPS: Mapping[int, Sequence[str]] = {2: (_CHANGES,)}
"""By version, the statements that bring a file of the version before to it; `_make` makes the last one."""
COMPATIBLE: Mapping[int, int] = {}
"""By version, the oldest one whose programs still work on its files, where its step only adds."""

VERSION_QUERY = "SELECT value FROM ga_meta WHERE name = 'schema'"
OLDEST_QUERY = "SELECT value FROM ga_meta WHERE name = 'oldest'"
APPLICATION_ID = 0x47504B47  # "GPKG"
USER_VERSION = 10_300  # 1.3.0: what GDAL of Debian 12 opens without a warning

TABLE, COLUMN = "features", "geom"
RTREE = f"rtree_{TABLE}_{COLUMN}"

_WGS84 = (
    'GEOGCS["WGS 84",DATUM["WGS_1984",SPHEROID["WGS 84",6378137,298.257223563,AUTHORITY["EPSG","7030"]],'
    'AUTHORITY["EPSG","6326"]],PRIMEM["Greenwich",0,AUTHORITY["EPSG","8901"]],'
    'UNIT["degree",0.0174532925199433,AUTHORITY["EPSG","9122"]],AXIS["Latitude",NORTH],AXIS["Longitude",EAST],'
    'AUTHORITY["EPSG","4326"]]'
)
_SYSTEMS = [
    ("Undefined Cartesian", -1, "NONE", -1, "undefined", "undefined Cartesian coordinate reference system"),
    ("Undefined geographic", 0, "NONE", 0, "undefined", "undefined geographic coordinate reference system"),
    ("WGS 84", SRS_ID, "EPSG", 4326, _WGS84, "longitude and latitude in degrees on the WGS 84 ellipsoid"),
]

_NOW = "(strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))"

# Geometry and properties stand last: a query for digests never reads so far into a row.
_TABLES = [
    """CREATE TABLE gpkg_spatial_ref_sys (
        srs_name TEXT NOT NULL, srs_id INTEGER PRIMARY KEY, organization TEXT NOT NULL,
        organization_coordsys_id INTEGER NOT NULL, definition TEXT NOT NULL, description TEXT)""",
    f"""CREATE TABLE gpkg_contents (
        table_name TEXT NOT NULL PRIMARY KEY, data_type TEXT NOT NULL, identifier TEXT UNIQUE,
        description TEXT DEFAULT '', last_change DATETIME NOT NULL DEFAULT {_NOW}, min_x DOUBLE, min_y DOUBLE,
        max_x DOUBLE, max_y DOUBLE, srs_id INTEGER,
        CONSTRAINT fk_gc_r_srs_id FOREIGN KEY (srs_id) REFERENCES gpkg_spatial_ref_sys (srs_id))""",
    """CREATE TABLE gpkg_geometry_columns (
        table_name TEXT NOT NULL, column_name TEXT NOT NULL, geometry_type_name TEXT NOT NULL, srs_id INTEGER NOT NULL,
        z TINYINT NOT NULL, m TINYINT NOT NULL, CONSTRAINT pk_geom_cols PRIMARY KEY (table_name, column_name),
        CONSTRAINT uk_gc_table_name UNIQUE (table_name),
        CONSTRAINT fk_gc_tn FOREIGN KEY (table_name) REFERENCES gpkg_contents (table_name),
        CONSTRAINT fk_gc_srs FOREIGN KEY (srs_id) REFERENCES gpkg_spatial_ref_sys (srs_id))""",
    """CREATE TABLE gpkg_extensions (
        table_name TEXT, column_name TEXT, extension_name TEXT NOT NULL, definition TEXT NOT NULL, scope TEXT NOT NULL,
        CONSTRAINT ge_tce UNIQUE (table_name, column_name, extension_name))""",
    f"""CREATE TABLE {TABLE} (
        fid INTEGER PRIMARY KEY AUTOINCREMENT NOT NULL,
        source TEXT NOT NULL, feature_id TEXT NOT NULL, layer TEXT NOT NULL, version INTEGER NOT NULL,
        min_zoom INTEGER NOT NULL, max_zoom INTEGER NOT NULL, vertex_count INTEGER NOT NULL,
        event_time_ms INTEGER NOT NULL, west REAL, south REAL, east REAL, north REAL,
        digest BLOB NOT NULL, content_hash TEXT NOT NULL, properties TEXT NOT NULL, {COLUMN} GEOMETRY)""",
    f"CREATE UNIQUE INDEX {TABLE}_identity ON {TABLE} (source, feature_id)",
    f"CREATE INDEX {TABLE}_layer ON {TABLE} (layer)",
    f"CREATE VIRTUAL TABLE {RTREE} USING rtree(id, minx, maxx, miny, maxy)",
    # The box and the zooms: one more R-tree, so that a tile of zoom 0 does not walk every building of a country.
    "CREATE VIRTUAL TABLE ga_place USING rtree(id, minx, maxx, miny, maxy, minzoom, maxzoom)",
    """CREATE TABLE ga_tombstone (
        source TEXT NOT NULL, feature_id TEXT NOT NULL, version INTEGER NOT NULL, content_hash TEXT NOT NULL,
        written_ms INTEGER NOT NULL, PRIMARY KEY (source, feature_id)) WITHOUT ROWID""",
    "CREATE INDEX ga_tombstone_age ON ga_tombstone (written_ms)",
    "CREATE TABLE ga_applied (event_key TEXT PRIMARY KEY, written_ms INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE INDEX ga_applied_age ON ga_applied (written_ms)",
    """CREATE TABLE ga_outbox (
        id INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL,
        headers TEXT NOT NULL, "group" TEXT NOT NULL)""",
    'CREATE INDEX ga_outbox_kind ON ga_outbox (kind, "group", id)',
    _CHANGES,
    "CREATE TABLE ga_layer (fid INTEGER PRIMARY KEY AUTOINCREMENT NOT NULL, layer TEXT NOT NULL UNIQUE)",
    "CREATE TABLE ga_meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
]

_BOX_OF_NEW = f"ST_MinX(NEW.{COLUMN}), ST_MaxX(NEW.{COLUMN}), ST_MinY(NEW.{COLUMN}), ST_MaxY(NEW.{COLUMN})"
_NEW_SHOWS = f"(NEW.{COLUMN} NOTNULL AND NOT ST_IsEmpty(NEW.{COLUMN}))"
_NEW_HIDES = f"(NEW.{COLUMN} ISNULL OR ST_IsEmpty(NEW.{COLUMN}))"
_OLD_SHOWED = f"(OLD.{COLUMN} NOTNULL AND NOT ST_IsEmpty(OLD.{COLUMN}))"
_OLD_HID = f"(OLD.{COLUMN} ISNULL OR ST_IsEmpty(OLD.{COLUMN}))"
_ON = f"ON {TABLE} WHEN"

_TRIGGERS = {
    "insert": f"""AFTER INSERT {_ON} {_NEW_SHOWS}
        BEGIN INSERT OR REPLACE INTO {RTREE} VALUES (NEW.fid, {_BOX_OF_NEW}); END""",
    "update6": f"""AFTER UPDATE OF {COLUMN} {_ON} OLD.fid = NEW.fid AND {_NEW_SHOWS} AND {_OLD_SHOWED}
        BEGIN UPDATE {RTREE} SET minx = ST_MinX(NEW.{COLUMN}), maxx = ST_MaxX(NEW.{COLUMN}),
            miny = ST_MinY(NEW.{COLUMN}), maxy = ST_MaxY(NEW.{COLUMN}) WHERE id = NEW.fid; END""",
    "update7": f"""AFTER UPDATE OF {COLUMN} {_ON} OLD.fid = NEW.fid AND {_NEW_SHOWS} AND {_OLD_HID}
        BEGIN INSERT INTO {RTREE} VALUES (NEW.fid, {_BOX_OF_NEW}); END""",
    "update2": f"""AFTER UPDATE OF {COLUMN} {_ON} OLD.fid = NEW.fid AND {_NEW_HIDES}
        BEGIN DELETE FROM {RTREE} WHERE id = OLD.fid; END""",
    "update5": f"""AFTER UPDATE {_ON} OLD.fid != NEW.fid AND {_NEW_SHOWS}
        BEGIN DELETE FROM {RTREE} WHERE id = OLD.fid;
              INSERT OR REPLACE INTO {RTREE} VALUES (NEW.fid, {_BOX_OF_NEW}); END""",
    "update4": f"""AFTER UPDATE {_ON} OLD.fid != NEW.fid AND {_NEW_HIDES}
        BEGIN DELETE FROM {RTREE} WHERE id IN (OLD.fid, NEW.fid); END""",
    "delete": f"""AFTER DELETE {_ON} OLD.{COLUMN} NOT NULL
        BEGIN DELETE FROM {RTREE} WHERE id = OLD.fid; END""",
}

# Where a bulk statement finds its rows; in memory, one a connection.
_SCRATCH = """
CREATE TEMP TABLE asked (number INTEGER PRIMARY KEY, source TEXT, feature_id TEXT);
CREATE TEMP TABLE box (number INTEGER PRIMARY KEY, zoom INTEGER, west REAL, south REAL, east REAL, north REAL);
"""


class GeoPackageFile(SnapshotFile):
    """The GeoPackage: made on the first opening, refused when it is not this store's or of a later version."""

    def prepare_connection(self, connection: sqlite3.Connection) -> None:
        """Make the scratch tables and the functions that the triggers call."""
        super().prepare_connection(connection)
        register_functions(connection)
        connection.executescript(_SCRATCH)

    def _prepare(self, connection: sqlite3.Connection) -> None:
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            connection.execute("PRAGMA journal_mode = WAL")
        if self._found_version(connection) is None:
            connection.execute("BEGIN IMMEDIATE")
            if self._found_version(connection) is None:
                _make(connection)
                self._note_oldest(connection, self._oldest_after(self._version))
            connection.execute("COMMIT")
            # GDAL looks for the application id in the file itself, and would miss it in the write-ahead log.
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._bring_up_to_date(connection)

    def _found_version(self, connection: sqlite3.Connection) -> int | None:
        tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not tables:
            return None
        found = connection.execute(VERSION_QUERY).fetchone() if "ga_meta" in tables else None
        if found is None:
            raise self._failed(
                f"{self.path} is a database of somebody else's, with tables {', '.join(sorted(tables)[:5])}"
            )
        return found[0]

    def _note_version(self, connection: sqlite3.Connection, version: int) -> None:
        connection.execute("UPDATE ga_meta SET value = ? WHERE name = 'schema'", (version,))

    def _found_oldest(self, connection: sqlite3.Connection) -> int | None:
        found = connection.execute(OLDEST_QUERY).fetchone()
        return None if found is None else found[0]

    def _note_oldest(self, connection: sqlite3.Connection, oldest: int) -> None:
        connection.execute("DELETE FROM ga_meta WHERE name = 'oldest'")
        if oldest != self._found_version(connection):
            connection.execute("INSERT INTO ga_meta (name, value) VALUES ('oldest', ?)", (oldest,))


def _make(connection: sqlite3.Connection) -> None:
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {USER_VERSION}")
    for statement in _TABLES:
        connection.execute(statement)
    for name, body in _TRIGGERS.items():
        connection.execute(f"CREATE TRIGGER {RTREE}_{name} {body}")
    connection.executemany("INSERT INTO gpkg_spatial_ref_sys VALUES (?, ?, ?, ?, ?, ?)", _SYSTEMS)
    register(connection, TABLE, "Every feature of every layer")
    connection.execute(
        "INSERT INTO gpkg_extensions VALUES (?, ?, 'gpkg_rtree_index', ?, 'write-only')",
        (TABLE, COLUMN, "http://www.geopackage.org/spec120/#extension_rtree"),
    )
    connection.execute(
        "INSERT INTO gpkg_contents (table_name, data_type, identifier) VALUES ('ga_layer', 'attributes', 'ga_layer')"
    )
    connection.execute("INSERT INTO ga_meta VALUES ('schema', ?), ('watermark', 0)", (VERSION,))


def register(connection: sqlite3.Connection, table: str, description: str) -> None:
    """List a table or view, so that GDAL and QGIS show it as a layer of that name."""
    connection.execute(
        """INSERT INTO gpkg_contents (table_name, data_type, identifier, description, srs_id)
           VALUES (?, 'features', ?, ?, ?)""",
        (table, table, description, SRS_ID),
    )
    connection.execute("INSERT INTO gpkg_geometry_columns VALUES (?, ?, 'GEOMETRY', ?, 0, 0)", (table, COLUMN, SRS_ID))


def show_layer(connection: sqlite3.Connection, layer: str) -> None:
    """Make the view that shows one layer by its name, unless the name is taken; nothing depends on it."""
    connection.execute("INSERT OR IGNORE INTO ga_layer (layer) VALUES (?)", (layer,))
    taken = connection.execute("SELECT 1 FROM sqlite_master WHERE lower(name) = lower(?)", (layer,)).fetchone()
    if taken or not layer or layer.lower().startswith(("gpkg_", "rtree_", "sqlite_", "ga_")):
        return
    name, value = layer.replace('"', '""'), layer.replace("'", "''")
    connection.execute(
        f"""CREATE VIEW "{name}" AS SELECT fid, {COLUMN}, source, feature_id, version, properties, min_zoom, max_zoom,
            vertex_count, event_time_ms FROM {TABLE} WHERE layer = '{value}'"""
    )
    register(connection, layer, f"Features of layer {layer}")
