"""The embedded feature store: the protocol on one GeoPackage, which QGIS and GDAL open while it is in use.

They may read it; an edit there would bypass version guard, digests and outbox, so edits come through `apply` alone.
Every write is one transaction; reading for many tiles is one join of their boxes with an R-tree.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from resources.feature_store.edits import Identity, Standing, check, decide, source_times
from resources.feature_store.gpkg_geometry import to_blob, wkb_of
from resources.feature_store.gpkg_schema import COMPATIBLE, RTREE, STEPS, TABLE, VERSION, GeoPackageFile, show_layer
from resources.feature_store.protocol import (
    CHANGES_KEPT,
    Applied,
    Changes,
    Edit,
    Feature,
    FeatureRows,
    FeatureStoreError,
    FeatureStoreUnavailable,
    OutboxRow,
    Plan,
    Position,
    SourceTimes,
    StoreCounts,
    TileBox,
    TileDigests,
    TileFeatureRows,
)
from resources.snapshots import LOCK_TIMEOUT_S

SCAN_PIECE = 1_000
"""Features a scan reads at once: their geometries are a megabyte or so, and no snapshot is held meanwhile."""

FEW_BOXES = 100
"""Boxes up to which digests are collected box by box; of thousands, which share features, those are fetched once."""

_WATERMARK_OF, _RECEIVED_OF = "watermark:", "received:"
"""Before a source's name: names in `ga_meta` of how current it is."""

_COLUMNS = (
    "source, feature_id, layer, version, geom, west, south, east, north, properties, content_hash, digest, min_zoom, "
    "max_zoom, vertex_count, event_time_ms"
)
_QUALIFIED = ", ".join(f"f.{column}" for column in _COLUMNS.split(", "))
_UPSERT = f"""INSERT INTO {TABLE} ({_COLUMNS}) VALUES ({", ".join("?" * 16)})
    ON CONFLICT (source, feature_id) DO UPDATE SET
    {", ".join(f"{column} = excluded.{column}" for column in _COLUMNS.split(", ")[2:])}"""

# The R-tree holds 32-bit floats rounded outwards: it finds too much by a hair, and the exact boxes decide in numpy. One
# text of numbers a box instead of a row a pair: parsing it is several times faster than making the Python objects.
# The index keeps numbers of 32 bits, rounded outwards but for those nearer to 0 than the smallest of them: they are 0
# there. Hence it is asked a little wider; what decides is the row itself.
_TINY = 1e-37
_NEAR = f"""place.minx <= box.east + {_TINY} AND place.maxx >= box.west - {_TINY}
    AND place.miny <= box.north + {_TINY} AND place.maxy >= box.south - {_TINY}
    AND place.minzoom <= box.zoom AND place.maxzoom >= box.zoom"""
_PAIRS = f"""SELECT box.number, group_concat(place.id) FROM box CROSS JOIN ga_place AS place
    WHERE {_NEAR} GROUP BY box.number ORDER BY box.number"""

# A row a box here too, and no row a feature: a third of the time where tiles share few features.
_DIGESTS = f"""SELECT box.number, count(*), group_concat(hex(f.digest), ''), group_concat(f.vertex_count),
        group_concat(f.fid), group_concat(f.event_time_ms)
    FROM box CROSS JOIN ga_place AS place CROSS JOIN {TABLE} AS f ON f.fid = place.id
    WHERE {_NEAR} AND f.west <= box.east AND f.east >= box.west AND f.south <= box.north AND f.north >= box.south
    GROUP BY box.number ORDER BY box.number"""

_POSITION = "SELECT number, mark FROM ga_change ORDER BY number DESC LIMIT 1"
_CHANGES = f"""SELECT c.fid, max(c.number), f.min_zoom <= f.max_zoom AND f.west IS NOT NULL, f.digest, f.vertex_count,
        f.event_time_ms, f.min_zoom, f.max_zoom, f.west, f.south, f.east, f.north
    FROM ga_change AS c LEFT JOIN {TABLE} AS f ON f.fid = c.fid
    WHERE c.number > ? GROUP BY c.fid ORDER BY c.fid"""
_NOTHING = bytes(16), 0, 0, 1, 0, 0.0, 0.0, 0.0, 0.0
"""In place of what is left of a feature that shows nowhere."""

Ints = npt.NDArray[np.int64]

_Pairs = tuple[Ints, npt.NDArray[np.uint8], Ints, Ints, Ints]
"""Of each pair of box and feature: the box, the feature's digest, vertices, number and time."""


class GeoPackageStore:
    """The feature store in a GeoPackage.

    Args:
        path: The file; made with its folder when it is not there.
        lock_timeout_s: How long a transaction waits for another process's.

    Raises:
        FeatureStoreUnavailable: The file cannot be opened for writing now; the message says why.
        FeatureStoreError: It is no feature store, or one that a later version of the program wrote.
    """

    def __init__(self, path: Path | str, *, lock_timeout_s: float = LOCK_TIMEOUT_S) -> None:
        self._file = GeoPackageFile(
            path,
            schema="",
            version=VERSION,
            synchronous="FULL",
            unavailable=FeatureStoreUnavailable,
            failed=FeatureStoreError,
            lock_timeout_s=lock_timeout_s,
            steps=STEPS,
            compatible=COMPATIBLE,
        )

    # -- writing -----------------------------------------------------------------------------------------------------
    def apply(self, edits: Sequence[Edit], plan: Plan, *, now_ms: int) -> list[Applied]:
        """Apply a batch in one durable transaction: all of it or nothing.

        Args:
            edits: In order; two edits of one feature see each other.
            plan: Called once, inside the transaction, with the changes in order.
            now_ms: Milliseconds since the epoch, UTC: when tombstones and event keys were written.

        Returns:
            How each edit ended, in the same order.

        Raises:
            FeatureStoreUnavailable: Nothing was applied.
            ValueError: An edit that no caller may make: an upsert without its feature, or with another one's.
        """
        check(edits)
        if not edits:
            return []
        with self._file.transaction() as db:
            decided = decide(edits, self._standing(db, edits), self._applied_keys(db, edits))
            self._write(db, decided.last, now_ms)
            if decided.changes:
                newest = max(change.edit.event_time_ms for change in decided.changes)
                db.execute("UPDATE ga_meta SET value = max(value, ?) WHERE name = 'watermark'", (newest,))
                db.execute(
                    """UPDATE gpkg_contents SET last_change = strftime('%Y-%m-%dT%H:%M:%fZ', ? / 1000.0, 'unixepoch')
                       WHERE table_name = ?""",
                    (now_ms, TABLE),
                )
            self._write_times(db, source_times(edits, decided, now_ms))
            db.executemany(
                "INSERT OR IGNORE INTO ga_applied VALUES (?, ?)", ((key, now_ms) for key in sorted(decided.new_keys))
            )
            self._write_outbox(db, plan(decided.changes))
        return decided.applied

    def _write_times(self, db: sqlite3.Connection, times: Mapping[str, SourceTimes]) -> None:
        rows = [
            (f"{kind}{source}", value)
            for source, one in times.items()
            for kind, value in ((_WATERMARK_OF, one.watermark_ms), (_RECEIVED_OF, one.received_ms))
        ]
        db.executemany(
            "INSERT INTO ga_meta VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = max(value, excluded.value)",
            rows,
        )

    def _applied_keys(self, db: sqlite3.Connection, edits: Sequence[Edit]) -> set[str]:
        keys = json.dumps([edit.event_key for edit in edits])
        rows = db.execute(
            "SELECT event_key FROM ga_applied WHERE event_key IN (SELECT value FROM json_each(?))", (keys,)
        )
        return {row[0] for row in rows}

    def _standing(self, db: sqlite3.Connection, edits: Sequence[Edit]) -> dict[Identity, Standing]:
        self._ask(db, {(edit.source, edit.feature_id) for edit in edits})
        standing: dict[Identity, Standing] = {
            (row[0], row[1]): (row[2], row[3], None)
            for row in db.execute(
                """SELECT t.source, t.feature_id, t.version, t.content_hash FROM asked AS a
                   CROSS JOIN ga_tombstone AS t ON t.source = a.source AND t.feature_id = a.feature_id"""
            )
        }
        for row in db.execute(
            f"""SELECT {_QUALIFIED} FROM asked AS a
                CROSS JOIN {TABLE} AS f ON f.source = a.source AND f.feature_id = a.feature_id"""
        ):
            feature = _feature(row)
            standing[feature.source, feature.feature_id] = feature.version, feature.content_hash, feature
        return standing

    def _ask(self, db: sqlite3.Connection, identities: Iterable[tuple[str, str]]) -> None:
        db.execute("DELETE FROM asked")
        db.executemany("INSERT INTO asked (source, feature_id) VALUES (?, ?)", sorted(identities))

    def _write(self, db: sqlite3.Connection, changed: Mapping[Identity, Edit], now_ms: int) -> None:
        """Leave each changed feature as its last edit says: a row, or a tombstone."""
        upserts = [edit.feature for edit in changed.values() if edit.action == "upsert" and edit.feature is not None]
        deletes = [edit for edit in changed.values() if edit.action == "delete"]
        if upserts:
            known = {row[0] for row in db.execute("SELECT layer FROM ga_layer")}
            for layer in sorted({feature.layer for feature in upserts} - known):
                show_layer(db, layer)
            db.executemany(_UPSERT, map(_row, upserts))
            self._ask(db, ((feature.source, feature.feature_id) for feature in upserts))
            db.execute(
                """DELETE FROM ga_tombstone WHERE (source, feature_id) IN (SELECT source, feature_id FROM asked)"""
            )
            self._replace_places(db)
            _note_changes(db)
        if deletes:
            self._ask(db, ((edit.source, edit.feature_id) for edit in deletes))
            _note_changes(db)
            db.execute(f"DELETE FROM ga_place WHERE id IN ({_ASKED})")
            db.execute(f"DELETE FROM {TABLE} WHERE fid IN ({_ASKED})")
            db.executemany(
                "INSERT OR REPLACE INTO ga_tombstone VALUES (?, ?, ?, ?, ?)",
                [(edit.source, edit.feature_id, edit.version, edit.content_hash, now_ms) for edit in deletes],
            )

    def _replace_places(self, db: sqlite3.Connection) -> None:
        """Bring the places of the features in `asked` up to their rows."""
        found = f"asked AS a CROSS JOIN {TABLE} AS f ON f.source = a.source AND f.feature_id = a.feature_id"
        shows = "f.west IS NOT NULL AND f.min_zoom <= f.max_zoom"
        db.execute(f"DELETE FROM ga_place WHERE id IN (SELECT f.fid FROM {found} WHERE NOT ({shows}))")
        db.execute(
            f"""INSERT OR REPLACE INTO ga_place
                SELECT f.fid, f.west, f.east, f.south, f.north, f.min_zoom, f.max_zoom FROM {found} WHERE {shows}"""
        )

    def _write_outbox(self, db: sqlite3.Connection, rows: Sequence[OutboxRow]) -> None:
        db.executemany(
            'INSERT INTO ga_outbox (kind, key, value, headers, "group") VALUES (?, ?, ?, ?, ?)',
            [(row.kind, row.key, row.value, json.dumps(dict(row.headers)), row.group) for row in rows],
        )

    def forget_keys(self, event_keys: Sequence[str]) -> None:
        """Release event keys (a dead letter frees its own, so that its replay is no duplicate)."""
        with self._file.transaction() as db:
            db.execute(
                "DELETE FROM ga_applied WHERE event_key IN (SELECT value FROM json_each(?))",
                (json.dumps(list(event_keys)),),
            )

    def set_zooms(self, limits: Mapping[tuple[str, str], tuple[int, int]]) -> None:
        """Rewrite (source, feature id) -> (min_zoom, max_zoom) in one transaction, for a changed layer."""
        with self._file.transaction() as db:
            db.executemany(
                f"UPDATE {TABLE} SET min_zoom = ?, max_zoom = ? WHERE source = ? AND feature_id = ?",
                [(*zooms, *identity) for identity, zooms in limits.items()],
            )
            self._ask(db, limits)
            self._replace_places(db)
            _note_changes(db)

    def expire(self, *, tombstones_before_ms: int, keys_before_ms: int) -> tuple[int, int]:
        """Delete tombstones and applied keys written before these times; how many of each went."""
        with self._file.transaction() as db:
            tombstones = db.execute("DELETE FROM ga_tombstone WHERE written_ms < ?", (tombstones_before_ms,)).rowcount
            keys = db.execute("DELETE FROM ga_applied WHERE written_ms < ?", (keys_before_ms,)).rowcount
        return tombstones, keys

    # -- outbox ------------------------------------------------------------------------------------------------------
    def owed(self, limit: int = 10_000, *, kind: str | None = None, group: str | None = None) -> list[OutboxRow]:
        """Outbox rows, oldest first."""
        conditions = [f"{name} = ?" for name, value in (("kind", kind), ('"group"', group)) if value is not None]
        where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
        values = [value for value in (kind, group) if value is not None]
        with self._file.reading() as db:
            rows = db.execute(
                f'SELECT kind, key, value, headers, "group", id FROM ga_outbox {where} ORDER BY id LIMIT ?',
                (*values, limit),
            ).fetchall()
        return [OutboxRow(row[0], row[1], row[2], json.loads(row[3]), row[4], row[5]) for row in rows]

    def pay(self, ids: Sequence[int]) -> None:
        """Delete outbox rows that the log (or the ledger) acknowledged."""
        # A power failure may bring rows back that were paid: they are sent once more.
        with self._file.transaction("NORMAL") as db:
            db.execute(
                "DELETE FROM ga_outbox WHERE id IN (SELECT value FROM json_each(?))", (json.dumps(sorted(set(ids))),)
            )

    # -- reading for tiles -------------------------------------------------------------------------------------------
    def digests(self, boxes: Sequence[TileBox]) -> TileDigests:
        """Digests of the features that show in each box: one snapshot, one query for thousands of boxes."""
        with self._file.reading() as db:
            position = _position(db)
            pairs = self._digests_by_box(db, boxes) if len(boxes) <= FEW_BOXES else self._digests_at_once(db, boxes)
        pair_tile, digest, vertices, numbers, time_ms = pairs
        newest = np.zeros(len(boxes), np.int64)
        if len(pair_tile):
            starts = np.flatnonzero(np.diff(pair_tile, prepend=-1))
            newest[pair_tile[starts]] = np.maximum.reduceat(time_ms, starts)
        return TileDigests(pair_tile, digest, vertices, numbers, time_ms, newest, position)

    def _digests_by_box(self, db: sqlite3.Connection, boxes: Sequence[TileBox]) -> _Pairs:
        self._ask_boxes(db, boxes)
        rows = db.execute(_DIGESTS).fetchall()
        tiles, counts, digests, vertices, numbers, times = zip(*rows, strict=True) if rows else [()] * 6
        return (
            np.array(tiles, np.int64).repeat(np.array(counts, np.int64)),
            np.frombuffer(bytes.fromhex("".join(digests)), np.uint8).reshape(-1, 16),
            _listed(vertices),
            _listed(numbers),
            _listed(times),
        )

    def _digests_at_once(self, db: sqlite3.Connection, boxes: Sequence[TileBox]) -> _Pairs:
        pair_tile, pair_row, rows = self._pairs(db, boxes, "digest, vertex_count, event_time_ms")
        vertices, numbers, times = (_ints(rows, column)[pair_row] for column in (6, 0, 7))
        return pair_tile, _digests(rows, 5)[pair_row], vertices, numbers, times

    def changes(self, since: Position, limit: int) -> Changes | None:
        """What changed since a position; None where that is too much, too long ago, or of another history."""
        with self._file.reading() as db:
            position = _position(db)
            known = db.execute("SELECT mark FROM ga_change WHERE number = ?", (since.number,)).fetchone()
            if known != (since.mark,) or position.number - since.number > limit:
                return None
            rows = db.execute(_CHANGES, (since.number,)).fetchall()
        left = [row[3:] if row[2] else _NOTHING for row in rows]
        return Changes(
            position=position,
            number=_ints(rows, 0),
            change=_ints(rows, 1),
            shows=np.array([bool(row[2]) for row in rows], np.bool_),
            digest=_digests(left, 0),
            vertices=_ints(left, 1),
            time_ms=_ints(left, 2),
            zooms=np.array([row[3:5] for row in left], np.int64).reshape(-1, 2),
            box=np.array([row[5:9] for row in left], np.float64).reshape(-1, 4),
        )

    def features(self, boxes: Sequence[TileBox]) -> TileFeatureRows:
        """The features that show in each box: one snapshot, one query for thousands of boxes."""
        with self._file.reading() as db:
            pair_tile, pair_row, rows = self._pairs(
                db, boxes, "digest, vertex_count, event_time_ms, source, feature_id, layer, geom, properties"
            )
        # What the R-tree found and the exact boxes refused is in no pair and leaves no row.
        used, pair_row = np.unique(pair_row, return_inverse=True)
        if len(used) != len(rows):
            rows = [rows[i] for i in used.tolist()]
        columns = list(zip(*rows, strict=True)) if rows else [()] * 13
        return TileFeatureRows(
            source=columns[8],
            feature_id=columns[9],
            layer=columns[10],
            geometry=[wkb_of(blob) for blob in columns[11]],
            properties=columns[12],
            digest=_digests(rows, 5),
            vertex_count=_ints(rows, 6),
            event_time_ms=_ints(rows, 7),
            pair_tile=pair_tile,
            pair_row=pair_row.astype(np.int64, copy=False),
        )

    def rows(self, numbers: Sequence[int]) -> FeatureRows:
        """Features by the store's own numbers, as they are now; those without geometry are left out."""
        with self._file.reading() as db:
            rows = db.execute(
                f"""SELECT source, feature_id, layer, geom, properties, digest
                    FROM json_each(?) CROSS JOIN {TABLE} ON fid = value WHERE west IS NOT NULL""",
                (json.dumps(sorted(set(numbers))),),
            ).fetchall()
        columns = list(zip(*rows, strict=True)) if rows else [()] * 6
        return FeatureRows(
            source=columns[0],
            feature_id=columns[1],
            layer=columns[2],
            geometry=[wkb_of(blob) for blob in columns[3]],
            properties=columns[4],
            digest=_digests(rows, 5),
        )

    def _ask_boxes(self, db: sqlite3.Connection, boxes: Sequence[TileBox]) -> None:
        db.execute("DELETE FROM box")
        db.executemany(
            "INSERT INTO box VALUES (?, ?, ?, ?, ?, ?)",
            ((number, b.zoom, b.west, b.south, b.east, b.north) for number, b in enumerate(boxes)),
        )

    def _pairs(
        self, db: sqlite3.Connection, boxes: Sequence[TileBox], columns: str
    ) -> tuple[Ints, Ints, list[tuple[Any, ...]]]:
        """Which box meets which feature, and the distinct features.

        Returns:
            Pairs as index of the box (ascending) and index of the row, and the rows: fid, west, south, east, north,
            then `columns`.
        """
        self._ask_boxes(db, boxes)
        found = db.execute(_PAIRS).fetchall()
        if not found:
            return np.zeros(0, np.int64), np.zeros(0, np.int64), []
        lists = [_listed([text]) for _, text in found]
        pair_tile = np.repeat([number for number, _ in found], [len(ids) for ids in lists]).astype(np.int64)
        fids, pair_row = np.unique(np.concatenate(lists), return_inverse=True)
        rows = db.execute(
            f"""SELECT fid, west, south, east, north, {columns} FROM json_each(?) CROSS JOIN {TABLE} ON fid = value""",
            (json.dumps(fids.tolist()),),
        ).fetchall()
        exact = np.array([row[1:5] for row in rows], np.float64)[pair_row]
        asked = np.array([(b.west, b.south, b.east, b.north) for b in boxes], np.float64)[pair_tile]
        # West and south of one against east and north of the other, both ways; closed boxes.
        meets = (exact[:, :2] <= asked[:, 2:]).all(axis=1) & (asked[:, :2] <= exact[:, 2:]).all(axis=1)
        return pair_tile[meets], pair_row[meets].astype(np.int64, copy=False), rows

    # -- reading -----------------------------------------------------------------------------------------------------
    def get(self, source: str, feature_id: str) -> Feature | None:
        """One feature."""
        with self._file.reading() as db:
            row = db.execute(
                f"SELECT {_COLUMNS} FROM {TABLE} WHERE source = ? AND feature_id = ?", (source, feature_id)
            ).fetchone()
        return _feature(row) if row else None

    def scan(
        self,
        *,
        source: str | None = None,
        layer: str | None = None,
        bbox: tuple[float, float, float, float] | None = None,
    ) -> Iterator[Feature]:
        """Features in no order, read in pieces: with a box, eight bytes a feature in it are held, else nothing.

        Args:
            source: Only this source's.
            layer: Only this layer's.
            bbox: Only those whose box meets this one: west, south, east, north in degrees, closed.
        """
        where, values = [], []
        for name, value in (("source", source), ("layer", layer)):
            if value is not None:
                where.append(f"AND {name} = ?")
                values.append(value)
        if bbox is not None:
            yield from self._scan_box(" ".join(where), values, bbox)
            return
        last = 0
        while True:
            with self._file.reading() as db:
                piece = db.execute(
                    f"""SELECT {_COLUMNS}, fid FROM {TABLE} WHERE fid > ? {" ".join(where)}
                        ORDER BY fid LIMIT {SCAN_PIECE}""",
                    (last, *values),
                ).fetchall()
            yield from map(_feature, piece)
            if len(piece) < SCAN_PIECE:
                return
            last = piece[-1][-1]

    def _scan_box(self, where: str, values: list[str], bbox: tuple[float, float, float, float]) -> Iterator[Feature]:
        west, south, east, north = bbox
        with self._file.reading() as db:
            found = db.execute(
                f"SELECT id FROM {RTREE} WHERE minx <= ? AND maxx >= ? AND miny <= ? AND maxy >= ?",
                (east + _TINY, west - _TINY, north + _TINY, south - _TINY),
            )
            fids = array("q", (row[0] for row in found))
        for start in range(0, len(fids), SCAN_PIECE):
            with self._file.reading() as db:
                piece = db.execute(
                    f"""SELECT {_COLUMNS} FROM json_each(?) CROSS JOIN {TABLE} ON fid = value
                        WHERE west <= ? AND east >= ? AND south <= ? AND north >= ? {where}""",
                    (json.dumps(fids[start : start + SCAN_PIECE].tolist()), east, west, north, south, *values),
                ).fetchall()
            yield from map(_feature, piece)

    def counts(self) -> StoreCounts:
        """What is in the store."""
        with self._file.reading() as db:
            by_layer = dict(db.execute(f"SELECT layer, count(*) FROM {TABLE} GROUP BY layer").fetchall())
            tombstones, keys, outbox, watermark = db.execute(
                """SELECT (SELECT count(*) FROM ga_tombstone), (SELECT count(*) FROM ga_applied),
                          (SELECT count(*) FROM ga_outbox), (SELECT value FROM ga_meta WHERE name = 'watermark')"""
            ).fetchone()
            times = dict(db.execute("SELECT name, value FROM ga_meta WHERE name LIKE '%:%'").fetchall())
        sources = {
            name.removeprefix(_RECEIVED_OF): SourceTimes(
                times.get(_WATERMARK_OF + name.removeprefix(_RECEIVED_OF), 0), at
            )
            for name, at in sorted(times.items())
            if name.startswith(_RECEIVED_OF)
        }
        return StoreCounts(by_layer, tombstones, keys, outbox, watermark, sources)

    def close(self) -> None:
        """Release files and connections."""
        self._file.close()


_ASKED = f"""SELECT f.fid FROM asked AS a CROSS JOIN {TABLE} AS f
    ON f.source = a.source AND f.feature_id = a.feature_id"""
"""Numbers of the features that are asked for."""


def _note_changes(db: sqlite3.Connection) -> None:
    """Write into the log that the features in `asked` changed; its oldest entries make room."""
    db.execute(f"INSERT INTO ga_change (fid, mark) SELECT fid, ? FROM ({_ASKED})", (secrets.randbits(62),))
    db.execute(f"DELETE FROM ga_change WHERE number <= (SELECT max(number) FROM ga_change) - {CHANGES_KEPT}")


def _position(db: sqlite3.Connection) -> Position:
    return Position(*(db.execute(_POSITION).fetchone() or (0, 0)))


def _row(feature: Feature) -> tuple[Any, ...]:
    box = feature.bbox or (None, None, None, None)
    return (
        feature.source,
        feature.feature_id,
        feature.layer,
        feature.version,
        None if feature.geometry is None else to_blob(feature.geometry, feature.bbox),
        *box,
        feature.properties,
        feature.content_hash,
        feature.digest,
        feature.min_zoom,
        feature.max_zoom,
        feature.vertex_count,
        feature.event_time_ms,
    )


def _feature(row: tuple[Any, ...]) -> Feature:
    geometry = None if row[4] is None else wkb_of(row[4])
    bbox = None if row[5] is None else (row[5], row[6], row[7], row[8])
    return Feature(row[0], row[1], row[2], row[3], geometry, bbox, row[9], row[10], row[11], *row[12:16])


def _digests(rows: Sequence[tuple[Any, ...]], column: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"".join([row[column] for row in rows]), np.uint8).reshape(-1, 16)


def _listed(texts: Sequence[str]) -> Ints:
    """Numbers that a query listed, one text a box."""
    return np.fromstring(",".join(texts), np.int64, sep=",")


def _ints(rows: Sequence[tuple[Any, ...]], column: int) -> Ints:
    return np.fromiter((row[column] for row in rows), np.int64, len(rows))
