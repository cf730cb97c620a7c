"""Edits in PostGIS: the statements of one `apply`, in the order in which every transaction takes its locks.

1. the rows that stand for the batch's features, by source and id (`FOR UPDATE`);
2. the event keys, ascending: inserted, so that whoever brings the same one waits;
3. rows of features that nobody had yet, by source and id. Another transaction may have made one since step 1: then
   nothing of this one stays, and it begins again;
4. the row of `totals`, and with it the right to write outbox rows and changes until the commit.

Nobody who waits at a step holds anything that is waited for at an earlier one, so nobody waits in a circle.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import errors
from psycopg.pq import PipelineStatus

from resources.feature_store.edits import Decided, Identity, Standing
from resources.feature_store.protocol import CHANGES_KEPT, Change, Edit, Feature, OutboxRow, SourceTimes

FEW = 100
"""Edits up to which a transaction is sent in a pipeline, where no COPY can be: 100 rows are as quick as an INSERT."""

_OWED_AT_ONCE = 5_000
"""Outbox rows of one INSERT: a single edit may owe thousands."""

_RACE = "another process has just stored the same feature"

Connection = psycopg.Connection[tuple[Any, ...]]

COLUMNS = {
    "source": "text",
    "feature_id": "text",
    "layer": "text",
    "version": "int8",
    "geom": "bytea",
    "west": "float8",
    "south": "float8",
    "east": "float8",
    "north": "float8",
    "properties": "text",
    "content_hash": "text",
    "digest": "bytea",
    "min_zoom": "int2",
    "max_zoom": "int2",
    "vertex_count": "int4",
    "event_time_ms": "int8",
    "deleted_ms": "int8",
}
"""Columns of `standing` in the order of this module's rows, and the types they travel as. Geometry is WKB."""

READ = ", ".join("ST_AsBinary(s.geom, 'NDR')" if name == "geom" else f"s.{name}" for name in COLUMNS)
"""The same columns, to be read from `standing AS s`."""

_STANDING = f"""SELECT {READ}
    FROM unnest(%s::text[], %s::text[]) AS a (source, feature_id)
    JOIN standing AS s ON s.source = a.source AND s.feature_id = a.feature_id
    ORDER BY s.source, s.feature_id FOR UPDATE OF s"""

_NEW_KEYS = """INSERT INTO applied_keys (event_key, written_ms) SELECT key, %s FROM unnest(%s::text[]) AS key
    ON CONFLICT DO NOTHING RETURNING event_key"""

_COPY = f"COPY standing ({', '.join(COLUMNS)}) FROM STDIN (FORMAT binary)"

_UPDATE = f"""UPDATE standing AS s
    SET {", ".join(f"{n} = " + ("ST_GeomFromWKB(a.geom, 4326)" if n == "geom" else f"a.{n}") for n in [*COLUMNS][2:])}
    FROM unnest({", ".join(f"%b::{kind}[]" for kind in COLUMNS.values())}) AS a ({", ".join(COLUMNS)})
    WHERE s.source = a.source AND s.feature_id = a.feature_id"""

# A server or role may have chosen to answer before the disk has a commit; an edit that was acknowledged is durable.
_TOTALS = """UPDATE totals SET applied_keys = applied_keys + %s, tombstones = tombstones + %s,
        watermark_ms = greatest(watermark_ms, %s)
    RETURNING set_config('synchronous_commit',
        CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END,
        true)"""

_LAYER_TOTALS = """INSERT INTO layer_totals (layer, features)
    SELECT * FROM unnest(%s::text[], %s::int8[]) AS a (layer, features)
    ON CONFLICT (layer) DO UPDATE SET features = layer_totals.features + excluded.features"""

_SOURCE_TIMES = """INSERT INTO source_times (source, watermark_ms, received_ms)
    SELECT * FROM unnest(%s::text[], %s::int8[], %s::int8[]) AS a (source, watermark_ms, received_ms)
    ON CONFLICT (source) DO UPDATE SET watermark_ms = greatest(source_times.watermark_ms, excluded.watermark_ms),
        received_ms = greatest(source_times.received_ms, excluded.received_ms)"""

_INSERT = f"""INSERT INTO standing ({", ".join(COLUMNS)})
    SELECT {", ".join(f"ST_GeomFromWKB(a.{n}, 4326)" if n == "geom" else f"a.{n}" for n in COLUMNS)}
    FROM unnest({", ".join(f"%b::{kind}[]" for kind in COLUMNS.values())}) AS a ({", ".join(COLUMNS)})"""

_OWE = """INSERT INTO outbox (kind, key, value, headers, "group")
    SELECT kind, key, value, headers, grp
    FROM unnest(%b::text[], %b::text[], %b::bytea[], %b::text[], %b::text[]) WITH ORDINALITY
        AS a (kind, key, value, headers, grp, place) ORDER BY place"""

_CHANGED = """INSERT INTO changes (fid, mark) SELECT s.fid, %b::int8
    FROM unnest(%b::text[], %b::text[]) AS a (source, feature_id)
    JOIN standing AS s ON s.source = a.source AND s.feature_id = a.feature_id"""

_FORGET_CHANGES = f"DELETE FROM changes WHERE number <= (SELECT max(number) FROM changes) - {CHANGES_KEPT}"

_OUTBOX = 'COPY outbox (kind, key, value, headers, "group") FROM STDIN (FORMAT binary)'


def begin(
    db: Connection, edits: Sequence[Edit], now_ms: int
) -> tuple[dict[Identity, Standing], set[Identity], set[str]]:
    """Lock and read what stands for the features of these edits, and record their event keys.

    Returns:
        What stands, which of it are tombstones, and the event keys that were there before.
    """
    asked = sorted({(edit.source, edit.feature_id) for edit in edits})
    keys = sorted({edit.event_key for edit in edits})
    # Both are sent before either is read: in a pipeline they are one trip to the server.
    rows = db.cursor(binary=True).execute(_STANDING.encode(), tuple(map(list, zip(*asked, strict=True))))
    recorded = db.execute(_NEW_KEYS, (now_ms, keys))
    standing: dict[Identity, Standing] = {}
    for row in rows.fetchall():
        alive = row[-1] is None
        standing[row[0], row[1]] = row[3], row[10], feature_of(row) if alive else None
    tombstones = {identity for identity, (_, _, feature) in standing.items() if feature is None}
    return standing, tombstones, set(keys) - {row[0] for row in recorded.fetchall()}


@contextmanager
def races_told() -> Iterator[None]:
    """In a pipeline a row that somebody else has just made shows at its end: the transaction begins again all the same.

    Raises:
        psycopg.errors.SerializationFailure: Another transaction has made one of the rows meanwhile.
    """
    try:
        yield
    except errors.UniqueViolation as error:
        raise errors.SerializationFailure(_RACE) from error


def forget_keys(db: Connection, event_keys: Sequence[str]) -> int:
    """Delete event keys; how many there were."""
    return db.execute("DELETE FROM applied_keys WHERE event_key = ANY(%s)", (sorted(set(event_keys)),)).rowcount


def write_rows(
    db: Connection, last: Mapping[Identity, Edit], standing: Mapping[Identity, Standing], now_ms: int
) -> None:
    """Leave each changed feature as its last edit says: a row, or a tombstone.

    Raises:
        psycopg.errors.SerializationFailure: Another transaction has made one of the rows meanwhile.
    """
    rows = [(identity, row_of(last[identity], now_ms)) for identity in sorted(last)]
    known = [row for identity, row in rows if identity in standing]
    new = [row for identity, row in rows if identity not in standing]
    if known:
        db.execute(_UPDATE.encode(), [list(column) for column in zip(*known, strict=True)])
    if new:
        try:
            if _in_pipeline(db):
                db.execute(_INSERT.encode(), [list(column) for column in zip(*new, strict=True)])
            else:
                _copy(db, _COPY, list(COLUMNS.values()), new)
        except errors.UniqueViolation as error:
            raise errors.SerializationFailure(_RACE) from error


def write_totals(
    db: Connection, decided: Decided, tombstones_before: set[Identity], times: Mapping[str, SourceTimes]
) -> None:
    """Count what the batch did, and wait for the right to write outbox rows."""
    layers, tombstones = _counted(decided.changes, decided.last, tombstones_before)
    newest = max((change.edit.event_time_ms for change in decided.changes), default=0)
    db.execute(_TOTALS, (len(decided.new_keys), tombstones, newest))
    if layers:
        db.execute(_LAYER_TOTALS, (list(layers), list(layers.values())))
    if times:
        # In the order of their names: whoever holds `totals` is alone here anyway.
        columns = zip(*((source, *one) for source, one in sorted(times.items())), strict=True)
        db.execute(_SOURCE_TIMES, [list(column) for column in columns])


def write_changes(db: Connection, identities: Iterable[Identity]) -> None:
    """Write into the log that features changed; its oldest entries make room. Whoever calls it holds `totals`."""
    changed = sorted(identities)
    if changed:
        columns = [list(column) for column in zip(*changed, strict=True)]
        db.execute(_CHANGED.encode(), (secrets.randbits(62), *columns))
        db.execute(_FORGET_CHANGES.encode())


def _counted(
    changes: Sequence[Change], last: Mapping[Identity, Edit], tombstones_before: set[Identity]
) -> tuple[dict[str, int], int]:
    layers: Counter[str] = Counter()
    for change in changes:
        if change.before is not None:
            layers[change.before.layer] -= 1
        if change.after is not None:
            layers[change.after.layer] += 1
    tombstones = sum(edit.action == "delete" for edit in last.values()) - len(tombstones_before & set(last))
    return {layer: layers[layer] for layer in sorted(layers) if layers[layer]}, tombstones


def write_outbox(db: Connection, rows: Sequence[OutboxRow]) -> None:
    """Write outbox rows, whose ids then ascend in their order."""
    if rows:
        headers = [json.dumps(dict(row.headers)) for row in rows]
        values = [(r.kind, r.key, r.value, h, r.group) for r, h in zip(rows, headers, strict=True)]
        if _in_pipeline(db):
            for start in range(0, len(values), _OWED_AT_ONCE):
                part = values[start : start + _OWED_AT_ONCE]
                db.execute(_OWE.encode(), [list(column) for column in zip(*part, strict=True)])
            return
        _copy(db, _OUTBOX, ["text", "text", "bytea", "text", "text"], values)


def row_of(edit: Edit, now_ms: int) -> tuple[Any, ...]:
    """The row that an edit leaves, in the order of `COLUMNS`."""
    f = edit.feature
    if edit.action == "delete" or f is None:
        nothing = (None, None, None, None, None)
        return (
            edit.source, edit.feature_id, "", edit.version, *nothing, "", edit.content_hash, None, 1, 0, 0,
            edit.event_time_ms, now_ms,
        )  # fmt: skip
    return (
        f.source, f.feature_id, f.layer, f.version, f.geometry, *(f.bbox or (None, None, None, None)), f.properties,
        f.content_hash, f.digest, f.min_zoom, f.max_zoom, f.vertex_count, f.event_time_ms, None,
    )  # fmt: skip


def feature_of(row: Sequence[Any]) -> Feature:
    """The feature in a row of `READ`."""
    bbox = None if row[5] is None else (row[5], row[6], row[7], row[8])
    return Feature(row[0], row[1], row[2], row[3], row[4], bbox, row[9], row[10], row[11], *row[12:16])


def _in_pipeline(db: Connection) -> bool:
    return db.pgconn.pipeline_status != PipelineStatus.OFF


def _copy(db: Connection, statement: str, types: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> None:
    with db.cursor().copy(statement.encode()) as copy:
        copy.set_types(types)
        for row in rows:
            copy.write_row(row)
