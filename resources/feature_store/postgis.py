"""The feature store in PostGIS: the protocol on one schema of a Postgres database, for many processes at once.

Anybody may read its views; an edit there would bypass version guard, digests and outbox, so edits come through `apply`
alone. What `apply` writes and in which order is in `postgis_writing`, the queries for tiles are in `postgis_reading`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from resources.feature_store import postgis_mvt as mvt
from resources.feature_store import postgis_reading as reading
from resources.feature_store import postgis_writing as writing
from resources.feature_store.edits import check, decide, source_times
from resources.feature_store.postgis_schema import COMPONENT, MIGRATIONS
from resources.feature_store.protocol import (
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
from resources.migrations import SchemaError
from resources.migrations import check as check_schema
from resources.postgres import conninfo, explained, open_pool, where, with_retries

T = TypeVar("T")
Connection = psycopg.Connection[tuple[Any, ...]]

SETTING = "GEO_ASSETS_FEATURE_STORE_URL or GEO_ASSETS_POSTGRES_URL"

SCAN_PIECE = 1_000
"""Features a scan fetches at once: their geometries are a megabyte or so."""


class PostgisStore:
    """The feature store in PostGIS.

    Args:
        url: `postgresql://user:password@host:port/database`; of several hosts, the one that may be written to.
        schema: Where its tables are; `geo-assets migrate` makes them.
        pool: Most connections of this process.

    Raises:
        FeatureStoreUnavailable: The server cannot be used now; the message says why and names the setting.
        SchemaError: PostGIS or the tables are missing, or of another version than this program's.
    """

    def __init__(self, url: str, schema: str = "geo_assets", pool: int = 4) -> None:
        self._schema = schema
        with _explained(url):
            # A query for thousands of tiles looks expensive; compiling it takes longer than running it.
            given = conninfo_to_dict(url).get("options")
            self._url = make_conninfo(url, options=f"{given} -c jit=off" if given else "-c jit=off")
            self._pool = open_pool(self._url, schema, pool, autocommit=True)
        try:
            with self._reading() as db:
                self._check(db)
        except BaseException:
            self._pool.close()
            raise

    def _check(self, db: Connection) -> None:
        try:
            check_schema(db, self._schema, COMPONENT, MIGRATIONS)
            found = db.execute("SELECT to_regtype('geometry')").fetchone()
            if found is None or found[0] is None:
                raise SchemaError("PostGIS is missing: run CREATE EXTENSION postgis as a superuser")
        except SchemaError as error:
            raise type(error)(f"Postgres at {where(self._url)} ({SETTING}): {error}") from None

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with _explained(self._url), self._pool.connection() as db:
            yield db

    def _write(self, work: Callable[[Connection], T]) -> T:
        """Do `work` in a transaction, and again from its start when the server or another's row ended it."""

        def once() -> T:
            with self._pool.connection() as db, db.transaction():
                return work(db)

        with _explained(self._url):
            return with_retries(once)

    # -- writing -----------------------------------------------------------------------------------------------------
    def apply(self, edits: Sequence[Edit], plan: Plan, *, now_ms: int) -> list[Applied]:
        """Apply a batch in one durable transaction: all of it or nothing.

        Args:
            edits: In order; two edits of one feature see each other.
            plan: Called inside the transaction with the changes in order; again, with what changes then, when the
                transaction has to begin again.
            now_ms: Milliseconds since the epoch, UTC: when tombstones and event keys were written.

        Returns:
            How each edit ended, in the same order.

        Raises:
            FeatureStoreUnavailable: Nothing was applied; or the server went away while it committed, and did or did
                not. Its event keys then make the same batch a duplicate.
            FeatureStoreError: PostGIS refuses one of the geometries.
            ValueError: An edit that no caller may make: an upsert without its feature, or with another one's.
        """
        check(edits)
        if not edits:
            return []

        def work(db: Connection) -> list[Applied]:
            standing, tombstones, keys_before = writing.begin(db, edits, now_ms)
            decided = decide(edits, standing, keys_before)
            writing.write_rows(db, decided.last, standing, now_ms)
            if refused := {edit.event_key for edit in edits} - keys_before - decided.new_keys.keys():
                writing.forget_keys(db, sorted(refused))
            owed = plan(decided.changes)
            if owed or decided.new_keys:
                writing.write_totals(db, decided, tombstones, source_times(edits, decided, now_ms))
                writing.write_changes(db, decided.last)
                writing.write_outbox(db, owed)
            return decided.applied

        if len(edits) > writing.FEW:
            return self._write(work)

        def at_once() -> list[Applied]:
            # Two trips to the server for the whole of it, where one for each statement takes longer than their work.
            with self._pool.connection() as db, writing.races_told(), db.pipeline():
                # By hand: psycopg's own transaction makes two trips more. Where this ends with an error, the pool
                # rolls back.
                db.execute("BEGIN")
                applied = work(db)
                db.execute("COMMIT")
            return applied

        with _explained(self._url):
            return with_retries(at_once)

    def forget_keys(self, event_keys: Sequence[str]) -> None:
        """Release event keys (a dead letter frees its own, so that its replay is no duplicate)."""

        def work(db: Connection) -> None:
            if gone := writing.forget_keys(db, event_keys):
                db.execute("UPDATE totals SET applied_keys = applied_keys - %s", (gone,))

        self._write(work)

    def set_zooms(self, limits: Mapping[tuple[str, str], tuple[int, int]]) -> None:
        """Rewrite (source, feature id) -> (min_zoom, max_zoom) in one transaction, for a changed layer."""
        if not limits:
            return
        rows = [(*identity, *zooms) for identity, zooms in limits.items()]
        columns = [list(column) for column in zip(*rows, strict=True)]

        def work(db: Connection) -> None:
            db.execute(_SET_ZOOMS, columns)
            db.execute("SELECT FROM totals FOR UPDATE")
            writing.write_changes(db, limits)

        self._write(work)

    def expire(self, *, tombstones_before_ms: int, keys_before_ms: int) -> tuple[int, int]:
        """Delete tombstones and applied keys written before these times; how many of each went."""

        def work(db: Connection) -> tuple[int, int]:
            tombstones = db.execute(_EXPIRE, (tombstones_before_ms,)).rowcount
            keys = db.execute("DELETE FROM applied_keys WHERE written_ms < %s", (keys_before_ms,)).rowcount
            if tombstones or keys:
                db.execute(
                    "UPDATE totals SET tombstones = tombstones - %s, applied_keys = applied_keys - %s",
                    (tombstones, keys),
                )
            return tombstones, keys

        return self._write(work)

    # -- outbox ------------------------------------------------------------------------------------------------------
    def owed(self, limit: int = 10_000, *, kind: str | None = None, group: str | None = None) -> list[OutboxRow]:
        """Outbox rows, oldest first."""
        with self._reading() as db:
            rows = db.cursor(binary=True).execute(_OWED, {"kind": kind, "group": group, "limit": limit}).fetchall()
        return [OutboxRow(row[0], row[1], row[2], json.loads(row[3]), row[4], row[5]) for row in rows]

    def pay(self, ids: Sequence[int]) -> None:
        """Delete outbox rows that the log (or the ledger) acknowledged."""

        def once() -> None:
            with self._pool.connection() as db:
                db.execute(_PAY, (sorted(set(ids)),))

        with _explained(self._url):
            with_retries(once)

    # -- reading for tiles -------------------------------------------------------------------------------------------
    def digests(self, boxes: Sequence[TileBox]) -> TileDigests:
        """Digests of the features that show in each box: one snapshot, one query for thousands of boxes."""
        with self._reading() as db:
            return reading.digests(db, boxes)

    def features(self, boxes: Sequence[TileBox]) -> TileFeatureRows:
        """The features that show in each box: one snapshot, one query for thousands of boxes."""
        with self._reading() as db:
            return reading.features(db, boxes)

    def changes(self, since: Position, limit: int) -> Changes | None:
        """What changed since a position; None where that is too much, too long ago, or of another history."""
        with self._reading() as db:
            return reading.changes(db, since, limit)

    def rows(self, numbers: Sequence[int]) -> FeatureRows:
        """Features by the store's own numbers, as they are now; those without geometry are left out."""
        with self._reading() as db:
            return reading.rows(db, numbers)

    # -- drawing tiles -----------------------------------------------------------------------------------------------
    @cached_property
    def mvt_version(self) -> str:
        """What in the server a drawn geometry depends on, when it was first asked for; see `postgis_mvt`."""
        with self._reading() as db:
            return mvt.version(db)

    def draw(self, geometries: Sequence[bytes], *, extent: int, buffer: int) -> bytes:
        """Draw geometries into their tiles by ST_AsMVT; see `postgis_mvt.draw`.

        Raises:
            FeatureStoreUnavailable: The server cannot be asked now.
            FeatureStoreError: PostGIS cannot draw one of them.
        """
        with self._reading() as db:
            return mvt.draw(db, geometries, extent=extent, buffer=buffer)

    # -- reading -----------------------------------------------------------------------------------------------------
    def get(self, source: str, feature_id: str) -> Feature | None:
        """One feature."""
        with self._reading() as db:
            row = db.cursor(binary=True).execute(_GET.encode(), (source, feature_id)).fetchone()
        return writing.feature_of(row) if row else None

    def scan(
        self,
        *,
        source: str | None = None,
        layer: str | None = None,
        bbox: tuple[float, float, float, float] | None = None,
    ) -> Iterator[Feature]:
        """Features in no order and one snapshot, read in pieces, on a connection that is not of the pool.

        Args:
            source: Only this source's.
            layer: Only this layer's.
            bbox: Only those whose box meets this one: west, south, east, north in degrees, closed.
        """
        conditions = ["s.deleted_ms IS NULL"]
        conditions += ["s.source = %(source)s"] if source is not None else []
        conditions += ["s.layer = %(layer)s"] if layer is not None else []
        conditions += [_MEETS] if bbox is not None else []
        values: dict[str, Any] = {"source": source, "layer": layer}
        values |= dict(zip(("west", "south", "east", "north"), bbox or (), strict=False))
        query = f"SELECT {writing.READ} FROM standing AS s WHERE {' AND '.join(conditions)}"
        # A slow reader must not keep the pool's connections from the edits that it may make itself.
        with _explained(self._url), psycopg.connect(conninfo(self._url, self._schema)) as db:
            cursor = db.cursor("scan", binary=True)
            cursor.itersize = SCAN_PIECE
            yield from map(writing.feature_of, cursor.execute(query.encode(), values))

    def counts(self) -> StoreCounts:
        """What is in the store: counted as it changes, the outbox alone is counted now."""
        with self._reading() as db:
            found = db.execute(_COUNTS).fetchone()
        assert found is not None
        by_layer, tombstones, keys, outbox, watermark, times = found
        sources = {source: SourceTimes(*one) for source, one in sorted(times.items())}
        return StoreCounts(by_layer, tombstones, keys, outbox, watermark, sources)

    def close(self) -> None:
        """Release files and connections."""
        self._pool.close()


_SET_ZOOMS = """WITH a AS (
        SELECT s.fid, a.min_zoom, a.max_zoom
        FROM unnest(%s::text[], %s::text[], %s::int2[], %s::int2[]) AS a (source, feature_id, min_zoom, max_zoom)
        JOIN standing AS s ON s.source = a.source AND s.feature_id = a.feature_id
        WHERE s.deleted_ms IS NULL
        ORDER BY s.source, s.feature_id FOR UPDATE OF s)
    UPDATE standing AS s SET min_zoom = a.min_zoom, max_zoom = a.max_zoom FROM a
    WHERE s.fid = a.fid AND (s.min_zoom, s.max_zoom) <> (a.min_zoom, a.max_zoom)"""

_EXPIRE = """DELETE FROM standing WHERE fid IN (
    SELECT fid FROM standing WHERE deleted_ms < %s ORDER BY source, feature_id FOR UPDATE)"""

_OWED = """SELECT kind, key, value, headers, "group", id FROM outbox
    WHERE (%(kind)s::text IS NULL OR kind = %(kind)s) AND (%(group)s::text IS NULL OR "group" = %(group)s)
    ORDER BY id LIMIT %(limit)s"""

# Nobody waits for the server's disk: rows that its crash brings back are sent once more.
_PAY = """DELETE FROM outbox WHERE id IN (SELECT id FROM outbox WHERE id = ANY(%s::int8[]) ORDER BY id FOR UPDATE)
    RETURNING set_config('synchronous_commit', 'off', true)"""

_GET = f"""SELECT {writing.READ} FROM standing AS s
    WHERE s.source = %s AND s.feature_id = %s AND s.deleted_ms IS NULL"""

_MEETS = """s.geom && ST_MakeEnvelope(%(west)s, %(south)s, %(east)s, %(north)s, 4326)
    AND s.west <= %(east)s AND s.east >= %(west)s AND s.south <= %(north)s AND s.north >= %(south)s"""

_COUNTS = """SELECT
    (SELECT coalesce(json_object_agg(layer, features), '{}') FROM layer_totals WHERE features > 0),
    tombstones, applied_keys, (SELECT count(*) FROM outbox), watermark_ms,
    (SELECT coalesce(json_object_agg(source, json_build_array(watermark_ms, received_ms)), '{}') FROM source_times)
    FROM totals"""


@contextmanager
def _explained(url: str) -> Iterator[None]:
    """Faults as the port's, in one line that names server and setting."""
    try:
        with explained(FeatureStoreUnavailable, SETTING, url):
            yield
    except (psycopg.errors.InternalError_, psycopg.DataError) as error:
        # What PostGIS says of a geometry, or Postgres of a text that it cannot hold.
        problem = error.diag.message_primary or error
        raise FeatureStoreError(f"Postgres at {where(url)} ({SETTING}): {problem}") from error
    except psycopg.DatabaseError as error:
        # Without a code it is not the server's word but the client library's, of a connection that broke in a COPY.
        # Class 25: the session or its transaction was ended while it waited.
        if error.sqlstate is not None and not error.sqlstate.startswith("25"):
            raise
        problem = " ".join(str(error).split())
        raise FeatureStoreUnavailable(f"Postgres at {where(url)} ({SETTING}): {problem}") from None
