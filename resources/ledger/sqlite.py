"""The embedded ledger: the protocol on one SQLite file that many processes and threads share.

Every method is one transaction; bulk is set-based SQL over a JSON array of keys or a scratch table. Imports neither
numpy nor dagster: the tile server reads the ledger in a slim image.
"""

from __future__ import annotations

import json
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from resources.ledger.protocol import (
    Batch,
    BatchState,
    Commit,
    Duty,
    Failure,
    Hint,
    Lag,
    LedgerCounts,
    LedgerError,
    LedgerUnavailable,
    Manifest,
    MarkKind,
    Owed,
    Progress,
    Settle,
    TileState,
    UnknownBatch,
    UnknownManifest,
)
from resources.ledger.sqlite_schema import COMPATIBLE, STEPS, TABLES, VERSION, LedgerFile
from resources.snapshots import LOCK_TIMEOUT_S
from resources.sqlite import Synchronous

SCAN_PIECE = 2_000
"""Rows a scan reads at once: a megabyte, and no read transaction held while the caller thinks."""

_REPEATABLE: Synchronous = "NORMAL"
"""For what is done again when a power failure takes it back: hints are read again from the position in the same
transaction, a lease is nobody's any more, a settle finds the same, a duty is paid twice. Killed processes lose none of
it. The next commit of the other kind makes all before it durable, and a sync each would be most of an edit's time."""

_STATE = """key, revision, work_key, content_hash, bytes, empty, built_at_ms, data_time_ms, wanted_live,
    wanted_backfill, max(forced_live, forced_backfill), built, dirty_since_ms, attempts, given_up, error, lease,
    lease_until_ms, manifest"""
_OWED = "id, duty, key, revision, content_hash, work_key, bytes, outcome, built_at_ms, data_time_ms, details"
_BATCH = "id, keys, attempt, kind, state, created_ms, lease_until_ms, manifest, run_id"
_MANIFEST = "id, title, kind, state, created_ms, tiles, mark, parameters, problem, number, forced"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class SqliteLedger:
    """The ledger in a SQLite file.

    Keys are the caller's to validate: a key that is no partition key is stored as it is and comes back from `dirty()`
    like any other. One that is not ASCII, which no partition key can be, is never stored: it reads as a tile nobody
    wanted, and a hint that names it does not count.

    Args:
        path: The file; made with its folder when it is not there.
        clock_ms: Milliseconds since the epoch, UTC, for leases and stamps; no key or revision depends on it.
        lock_timeout_s: How long a transaction waits for another process's.

    Raises:
        LedgerUnavailable: The file cannot be opened for writing now; the message says why.
        LedgerError: It is no ledger, or one that a later version of the program wrote.
    """

    def __init__(
        self, path: Path | str, clock_ms: Callable[[], int] = _now_ms, *, lock_timeout_s: float = LOCK_TIMEOUT_S
    ) -> None:
        self._now = clock_ms
        self._file = LedgerFile(
            path,
            schema=TABLES,
            version=VERSION,
            synchronous="FULL",
            unavailable=LedgerUnavailable,
            failed=LedgerError,
            lock_timeout_s=lock_timeout_s,
            steps=STEPS,
            compatible=COMPATIBLE,
        )

    # -- reading -----------------------------------------------------------------------------------------------------
    def read(self, keys: Sequence[str]) -> dict[str, TileState]:
        """Rows of these tiles; every key asked for is in the answer."""
        states = {key: TileState(key) for key in keys}
        with self._file.reading() as db:
            rows = db.execute(
                f"SELECT {_STATE} FROM tile WHERE key IN (SELECT value FROM json_each(?))", (_array(states),)
            )
            states.update((row[0], _state(row)) for row in rows)
        return states

    def scan(
        self, *, zooms: Sequence[int] | None = None, prefix: str | None = None, published: bool = True
    ) -> Iterator[TileState]:
        """Rows in key order (as text), in pieces; each piece is a snapshot of its own, the whole is not."""
        only = "AND content_hash IS NOT NULL" if published else ""
        query = f"SELECT {_STATE} FROM tile WHERE key >= ? AND key < ? {only} ORDER BY key LIMIT {SCAN_PIECE}"
        for first, below in _ranges(zooms, prefix):
            while True:
                with self._file.reading() as db:
                    piece = [_state(row) for row in db.execute(query, (first, below))]
                yield from piece
                if len(piece) < SCAN_PIECE:
                    break
                first = piece[-1].key + "\0"

    def dirty(
        self, limit: int, *, kind: MarkKind | None = None, min_age_ms: int = 0, unleased: bool = True
    ) -> list[TileState]:
        """Dirty tiles in order of work: live before backfill, then since when they are dirty, then zoom and key."""
        now = self._now()
        free = "AND lease_until_ms <= ?" if unleased else "AND ? IS NOT NULL"
        orders = ("dirty_since_ms, key", "dirty_since_ms, zoom DESC, key")
        found: list[TileState] = []
        with self._file.reading() as db:
            for work in (0, 1) if kind is None else (0,) if kind == "live" else (1,):
                if len(found) < limit:
                    query = f"""SELECT {_STATE} FROM tile WHERE work = ? AND dirty_since_ms <= ? {free}
                                ORDER BY {orders[work]} LIMIT ?"""
                    rows = db.execute(query, (work, _oldest(now, min_age_ms), now, limit - len(found)))
                    found.extend(_state(row) for row in rows)
        return found

    def counts(self) -> LedgerCounts:
        """Totals. A tile given up at its newest mark counts as given up, not as dirty."""
        with self._file.reading() as db:
            tiles = _number(db.execute("SELECT count(*) FROM tile"))
            zooms = db.execute(
                "SELECT zoom, count(*), sum(bytes) FROM tile WHERE content_hash IS NOT NULL GROUP BY zoom"
            ).fetchall()
            work = {
                kind: (number, oldest)
                for kind, number, oldest in db.execute(
                    "SELECT work, count(*), min(dirty_since_ms) FROM tile WHERE work IS NOT NULL GROUP BY work"
                )
            }
            given_up = _number(
                db.execute(
                    """SELECT count(*) FROM tile WHERE given_up > 0 AND given_up > built
                       AND max(wanted_live, wanted_backfill) BETWEEN built + 1 AND given_up"""
                )
            )
            leased = _number(
                db.execute("SELECT count(*) FROM tile WHERE lease IS NOT NULL AND lease_until_ms > ?", (self._now(),))
            )
            owed = dict(db.execute("SELECT duty, count(*) FROM owed GROUP BY duty").fetchall())
            commits = _number(db.execute("SELECT value FROM counter WHERE name = 'commits'"))
        return LedgerCounts(
            tiles=tiles,
            published=sum(row[1] for row in zooms),
            dirty_live=work.get(0, (0, 0))[0],
            dirty_backfill=work.get(1, (0, 0))[0],
            given_up=given_up,
            leased=leased,
            owed=owed,
            oldest_dirty_ms=min((oldest for _, oldest in work.values()), default=0),
            by_zoom={row[0]: row[1] for row in zooms},
            bytes=sum(row[2] for row in zooms),
            revision_sum=commits,
        )

    def lag(self, prefix_length: int = 4) -> list[Lag]:
        """What is dirty and not given up, by zoom and quadkey prefix, in that order."""
        with self._file.reading() as db:
            rows = db.execute(
                """SELECT CAST(key AS INTEGER) AS z, substr(key, instr(key, ':') + 1, ?) AS p,
                          count(*), min(dirty_since_ms)
                   FROM tile WHERE work IS NOT NULL GROUP BY z, p ORDER BY z, p""",
                (prefix_length,),
            ).fetchall()
        return [Lag(*row) for row in rows]

    # -- marking -----------------------------------------------------------------------------------------------------
    def positions(self, topic_id: str) -> dict[int, int]:
        """Next offset of each partition that was ever marked from; an absent one starts at the oldest record."""
        with self._file.reading() as db:
            rows = db.execute("SELECT partition, next_offset FROM position WHERE topic_id = ?", (topic_id,)).fetchall()
        return dict(rows)

    def mark_from_log(self, topic_id: str, partition: int, hints: Sequence[Hint], next_offset: int) -> int:
        """In one transaction: raise the live marks of the hints at or above the position, move it to `next_offset`."""
        with self._file.transaction(_REPEATABLE) as db:
            row = db.execute(
                "SELECT next_offset FROM position WHERE topic_id = ? AND partition = ?", (topic_id, partition)
            ).fetchone()
            position = row[0] if row else 0
            new = [hint for hint in hints if hint.offset >= position and hint.key.isascii()]
            if new:
                forced = {hint.key for hint in new if hint.force}
                mark = self._next_mark(db)
                self._mark_live(db, {hint.key for hint in new} - forced, mark, force=False)
                self._mark_live(db, forced, mark, force=True)
            if row is None or next_offset > position:
                db.execute(
                    "INSERT OR REPLACE INTO position VALUES (?, ?, ?)",
                    (topic_id, partition, max(next_offset, position)),
                )
        return len(new)

    def reset_position(self, topic_id: str, partition: int, next_offset: int) -> None:
        """Set a position outright."""
        with self._file.transaction() as db:
            db.execute("INSERT OR REPLACE INTO position VALUES (?, ?, ?)", (topic_id, partition, next_offset))

    def mark(self, keys: Sequence[str], *, kind: MarkKind = "live", force: bool = False) -> int:
        """Raise marks to one new counter value, which is returned. Attempts and given_up start anew."""
        with self._file.transaction() as db:
            mark = self._next_mark(db)
            if kind == "live":
                self._mark_live(db, keys, mark, force=force)
            else:
                self._mark_backfill(db, keys, mark, force=force, manifest=None)
        return mark

    def clear(self, keys: Sequence[str]) -> None:
        """After an integrity fault: forget work key and content hash (the revision stays) and mark the tiles live.

        A settle of what was read before this one does not hold any more: it would bring the work key back.
        """
        with self._file.transaction() as db:
            mark = self._next_mark(db)
            self._mark_live(db, keys, mark, force=False)
            db.execute(
                """UPDATE tile SET work_key = NULL, content_hash = NULL, cleared = ?
                   WHERE key IN (SELECT value FROM json_each(?))""",
                (mark, _array(keys)),
            )

    def _next_mark(self, db: sqlite3.Connection) -> int:
        return _number(db.execute("UPDATE counter SET value = value + 1 WHERE name = 'mark' RETURNING value"))

    def _mark_live(self, db: sqlite3.Connection, keys: Iterable[str], mark: int, *, force: bool) -> None:
        db.execute(
            """INSERT INTO tile (key, zoom, work, wanted_live, forced_live, dirty_since_ms, marked_ms)
               SELECT value, CAST(value AS INTEGER), 0, :mark, :forced, :now, :now FROM json_each(:keys) WHERE true
               ON CONFLICT (key) DO UPDATE SET
                   work = 0, wanted_live = excluded.wanted_live, forced_live = max(forced_live, excluded.forced_live),
                   dirty_since_ms = CASE WHEN work IS NULL THEN excluded.marked_ms ELSE dirty_since_ms END,
                   marked_ms = excluded.marked_ms, attempts = 0, given_up = 0""",
            {"mark": mark, "forced": mark if force else 0, "now": self._now(), "keys": _array(keys)},
        )

    def _mark_backfill(
        self, db: sqlite3.Connection, keys: Iterable[str], mark: int, *, force: bool, manifest: str | None
    ) -> None:
        alone = manifest is None
        db.execute(
            """INSERT INTO tile (key, zoom, work, wanted_backfill, forced_backfill, backfill_alone, forced_alone,
                                 manifest, dirty_since_ms, marked_ms)
               SELECT value, CAST(value AS INTEGER), 1, :mark, :forced, :alone, :forced_alone, :manifest,
                      :now, :now FROM json_each(:keys) WHERE true
               ON CONFLICT (key) DO UPDATE SET
                   work = CASE WHEN wanted_live > built THEN 0 ELSE 1 END,
                   wanted_backfill = excluded.wanted_backfill,
                   forced_backfill = max(forced_backfill, excluded.forced_backfill),
                   backfill_alone = max(backfill_alone, excluded.backfill_alone),
                   forced_alone = max(forced_alone, excluded.forced_alone),
                   manifest = excluded.manifest,
                   dirty_since_ms = CASE WHEN work IS NULL THEN excluded.marked_ms ELSE dirty_since_ms END,
                   marked_ms = excluded.marked_ms, attempts = 0, given_up = 0""",
            {
                "mark": mark,
                "forced": mark if force else 0,
                "alone": mark if alone else 0,
                "forced_alone": mark if alone and force else 0,
                "manifest": manifest,
                "now": self._now(),
                "keys": _array(keys),
            },
        )

    # -- building ----------------------------------------------------------------------------------------------------
    def take(self, keys: Sequence[str], owner: str, ttl_s: float) -> dict[str, TileState]:
        """Lease those that are free, expired or already this owner's, and read them in the same transaction."""
        with self._file.transaction(_REPEATABLE) as db:
            states = [_state(row) for row in self._lease(db, keys, owner, ttl_s)]
        return {state.key: state for state in states}

    def _lease(self, db: sqlite3.Connection, keys: Iterable[str], owner: str, ttl_s: float) -> list[tuple[object, ...]]:
        now, array = self._now(), _array(keys)
        db.execute(
            "INSERT OR IGNORE INTO tile (key, zoom) SELECT value, CAST(value AS INTEGER) FROM json_each(?)", (array,)
        )
        return db.execute(
            f"""UPDATE tile SET lease = ?, lease_until_ms = ?
                WHERE key IN (SELECT value FROM json_each(?)) AND (lease IS NULL OR lease = ? OR lease_until_ms <= ?)
                RETURNING {_STATE}""",
            (owner, now + round(ttl_s * 1000), array, owner, now),
        ).fetchall()

    def renew(self, owner: str, ttl_s: float) -> int:
        """Extend every lease of this owner; how many."""
        with self._file.transaction(_REPEATABLE) as db:
            return self._renew(db, owner, ttl_s)

    def _renew(self, db: sqlite3.Connection, owner: str, ttl_s: float) -> int:
        until = self._now() + round(ttl_s * 1000)
        return db.execute("UPDATE tile SET lease_until_ms = ? WHERE lease = ?", (until, owner)).rowcount

    def free(self, owner: str, keys: Sequence[str] | None = None) -> None:
        """Give up this owner's leases, of these tiles or of all."""
        with self._file.transaction(_REPEATABLE) as db:
            self._free(db, owner, keys)

    def _free(self, db: sqlite3.Connection, owner: str, keys: Sequence[str] | None = None) -> None:
        if keys is None:
            db.execute("UPDATE tile SET lease = NULL, lease_until_ms = 0 WHERE lease = ?", (owner,))
        else:
            db.execute(
                """UPDATE tile SET lease = NULL, lease_until_ms = 0
                   WHERE key IN (SELECT value FROM json_each(?)) AND lease = ?""",
                (_array(keys), owner),
            )

    def settle(self, settles: Sequence[Settle]) -> set[str]:
        """Each conditional on the revision as read; keys that held. A lease on it ends. Attempts start anew.

        `built` never sinks: where a newer mark was settled meanwhile, this one held and changes nothing but the lease.
        """
        rows = [(s.key, s.revision, s.wanted, s.work_key, s.data_time_ms) for s in settles if s.key.isascii()]
        with self._file.transaction(_REPEATABLE) as db:
            self._ask(
                db,
                "INSERT OR IGNORE INTO asked (key, revision, wanted, work_key, data_time_ms) VALUES (?,?,?,?,?)",
                rows,
            )
            # In RETURNING, and in SET, only the tile's row as it was is visible: hence one condition and CASEs.
            held = db.execute(
                f"""UPDATE tile SET
                       work = {_work("max(built, a.wanted)")},
                       work_key = CASE WHEN a.wanted >= built THEN a.work_key ELSE tile.work_key END,
                       data_time_ms = CASE WHEN a.wanted >= built AND a.data_time_ms > 0 THEN a.data_time_ms
                                           ELSE tile.data_time_ms END,
                       built = max(built, a.wanted),
                       attempts = CASE WHEN given_up > a.wanted THEN attempts ELSE 0 END,
                       error = CASE WHEN given_up > a.wanted THEN error END,
                       given_up = CASE WHEN given_up > a.wanted THEN given_up ELSE 0 END,
                       dirty_since_ms = CASE WHEN max(wanted_live, wanted_backfill) > max(built, a.wanted)
                                             THEN marked_ms ELSE 0 END,
                       lease = NULL, lease_until_ms = 0
                   FROM asked AS a
                   WHERE tile.key = a.key AND tile.revision = a.revision AND a.wanted >= cleared
                   RETURNING tile.key"""
            ).fetchall()
        return {row[0] for row in held}

    def commit(self, commits: Sequence[Commit]) -> dict[str, list[Owed]]:
        """Each conditional on the revision as read, with one outbox row a duty; only keys that held are in the answer.

        A commit whose mark as read is below what was settled meanwhile, at the same revision, does not hold either:
        it shows features older than those found unchanged. Of two commits of one tile in a call the first counts.
        """
        now = self._now()
        rows = [
            (c.key, c.revision, c.wanted, c.work_key, c.content_hash, c.bytes, c.data_time_ms, c.outcome, c.details)
            for c in commits
            if c.key.isascii()
        ]
        duties: dict[str, list[tuple[str, int, str]]] = {}
        for c in commits:
            duties.setdefault(c.key, [(c.key, i, duty) for i, duty in enumerate(c.duties)])
        with self._file.transaction() as db:
            self._ask(db, "INSERT OR IGNORE INTO asked VALUES (?,?,?,?,?,?,?,?,?)", rows)
            held = db.execute(
                f"""UPDATE tile SET
                       work = {_work("a.wanted")},
                       revision = tile.revision + 1, work_key = a.work_key, content_hash = a.content_hash,
                       bytes = CASE WHEN a.content_hash IS NULL THEN 0 ELSE a.bytes END, empty = a.content_hash IS NULL,
                       built_at_ms = :now, data_time_ms = a.data_time_ms, built = a.wanted,
                       attempts = CASE WHEN given_up > a.wanted THEN attempts ELSE 0 END,
                       error = CASE WHEN given_up > a.wanted THEN error END,
                       given_up = CASE WHEN given_up > a.wanted THEN given_up ELSE 0 END,
                       dirty_since_ms = CASE WHEN max(wanted_live, wanted_backfill) > a.wanted
                                             THEN marked_ms ELSE 0 END,
                       lease = NULL, lease_until_ms = 0
                   FROM asked AS a
                   WHERE tile.key = a.key AND tile.revision = a.revision AND built <= a.wanted
                   RETURNING tile.key""",
                {"now": now},
            ).fetchall()
            if not held:
                return {}
            db.execute("UPDATE counter SET value = value + ? WHERE name = 'commits'", (len(held),))
            owing = [duty for (key,) in held for duty in duties[key]]
            db.execute("DELETE FROM asked_duty")
            db.executemany("INSERT INTO asked_duty VALUES (?, ?, ?)", owing)
            written = db.execute(
                f"""INSERT INTO owed (duty, key, revision, content_hash, work_key, bytes, outcome, built_at_ms,
                                      data_time_ms, details)
                    SELECT d.duty, a.key, a.revision + 1, a.content_hash, a.work_key,
                           CASE WHEN a.content_hash IS NULL THEN 0 ELSE a.bytes END, a.outcome, ?,
                           a.data_time_ms, a.details
                    FROM asked_duty AS d CROSS JOIN asked AS a ON a.key = d.key ORDER BY d.rowid
                    RETURNING {_OWED}""",
                (now,),
            ).fetchall()
        answer: dict[str, list[Owed]] = {key: [] for (key,) in held}
        for row in written:
            answer[row[2]].append(Owed(*row))
        return answer

    def fail(self, failures: Sequence[Failure], *, max_attempts: int) -> set[str]:
        """Charge one attempt each, keep the error, end the lease; the keys that are given up with this one.

        A newer mark has started the attempts anew, so a build that began before it is not charged; nor is one that
        somebody else's build has answered.
        """
        rows = [(f.key, f.wanted, f.error) for f in failures if f.key.isascii()]
        with self._file.transaction() as db:
            self._ask(db, "INSERT OR IGNORE INTO asked (key, wanted, details) VALUES (?, ?, ?)", rows)
            db.execute("INSERT OR IGNORE INTO tile (key, zoom) SELECT key, CAST(key AS INTEGER) FROM asked")
            db.execute("UPDATE tile SET lease = NULL, lease_until_ms = 0 FROM asked AS a WHERE tile.key = a.key")
            charged = db.execute(
                """UPDATE tile SET attempts = attempts + 1, error = a.details,
                       given_up = CASE WHEN attempts + 1 >= :most THEN a.wanted ELSE given_up END,
                       work = CASE WHEN attempts + 1 >= :most THEN NULL ELSE work END
                   FROM asked AS a
                   WHERE tile.key = a.key AND a.wanted > built AND max(wanted_live, wanted_backfill) <= a.wanted
                   RETURNING tile.key, attempts""",
                {"most": max_attempts},
            ).fetchall()
        return {key for key, attempts in charged if attempts >= max_attempts}

    def _ask(self, db: sqlite3.Connection, insert: str, rows: Sequence[tuple[object, ...]]) -> None:
        """Put the rows of a bulk statement where it finds them, and make sure that their tiles have a row."""
        db.execute("DELETE FROM asked")
        db.executemany(insert, rows)
        if any(row[1] == 0 for row in rows):
            # A tile nobody ever wanted reads as revision 0, and what was read so can be settled or committed.
            db.execute(
                "INSERT OR IGNORE INTO tile (key, zoom) SELECT key, CAST(key AS INTEGER) FROM asked WHERE revision = 0"
            )

    # -- outbox ------------------------------------------------------------------------------------------------------
    def owed(self, duty: Duty, limit: int = 1_000, *, min_age_ms: int = 0) -> list[Owed]:
        """Unpaid rows, oldest first and at least so old (the committer pays its own at once)."""
        with self._file.reading() as db:
            rows = db.execute(
                f"SELECT {_OWED} FROM owed WHERE duty = ? AND built_at_ms <= ? ORDER BY id LIMIT ?",
                (duty, _oldest(self._now(), min_age_ms), limit),
            ).fetchall()
        return [Owed(*row) for row in rows]

    def pay(self, ids: Sequence[int]) -> None:
        """Delete paid rows."""
        with self._file.transaction(_REPEATABLE) as db:
            db.execute("DELETE FROM owed WHERE id IN (SELECT value FROM json_each(?))", (json.dumps(sorted(set(ids))),))

    # -- batches -----------------------------------------------------------------------------------------------------
    def open_batches(
        self,
        groups: Sequence[Sequence[str]],
        *,
        kind: MarkKind,
        ttl_s: float,
        attempt: int = 1,
        manifest: str | None = None,
    ) -> list[Batch]:
        """Lease each group under a batch of its own, in one transaction; the batch's id is the owner of its leases."""
        opened: list[Batch] = []
        now = self._now()
        until = now + round(ttl_s * 1000)
        with self._file.transaction() as db:
            for group in groups:
                batch_id = uuid.uuid4().hex
                leased = {row[0] for row in self._lease(db, group, batch_id, ttl_s)}
                keys = tuple(key for key in dict.fromkeys(group) if key in leased)
                if not keys:
                    continue
                db.execute(
                    """INSERT INTO batch (id, keys, attempt, kind, state, created_ms, lease_until_ms, manifest)
                       VALUES (?, ?, ?, ?, 'queued', ?, ?, ?)""",
                    (batch_id, json.dumps(keys), attempt, kind, now, until, manifest),
                )
                opened.append(Batch(batch_id, keys, attempt, kind, "queued", now, until, manifest))
        return opened

    def batch(self, batch_id: str) -> Batch:
        """One batch.

        Raises:
            UnknownBatch: There is none of that id.
        """
        with self._file.reading() as db:
            return self._batch(db, batch_id)

    def _batch(self, db: sqlite3.Connection, batch_id: str) -> Batch:
        row = db.execute(f"SELECT {_BATCH} FROM batch WHERE id = ?", (batch_id,)).fetchone()
        if row is None:
            raise UnknownBatch(f"no batch {batch_id!r}: it was never opened, or ended so long ago that it is forgotten")
        return _as_batch(row)

    def batches(self, *, open_only: bool = True) -> list[Batch]:
        """Batches, oldest first."""
        where = "WHERE state <> 'ended'" if open_only else ""
        with self._file.reading() as db:
            return [_as_batch(row) for row in db.execute(f"SELECT {_BATCH} FROM batch {where} ORDER BY number")]

    def start_batch(self, batch_id: str, run_id: str, ttl_s: float) -> Batch:
        """Its run began: state running, leases renewed. One that was ended meanwhile stays so, and its state says it.

        Raises:
            UnknownBatch: There is none of that id.
        """
        with self._file.transaction() as db:
            if self._batch(db, batch_id).state != "ended":
                self._renew(db, batch_id, ttl_s)
                db.execute(
                    "UPDATE batch SET state = 'running', run_id = ?, lease_until_ms = ? WHERE id = ?",
                    (run_id, self._now() + round(ttl_s * 1000), batch_id),
                )
            return self._batch(db, batch_id)

    def renew_batches(self, batch_ids: Sequence[str], ttl_s: float) -> None:
        """Extend the leases of the tiles still held by these batches."""
        until = self._now() + round(ttl_s * 1000)
        array = json.dumps(list(batch_ids))
        with self._file.transaction() as db:
            db.execute(
                "UPDATE tile SET lease_until_ms = ? WHERE lease IN (SELECT value FROM json_each(?))", (until, array)
            )
            db.execute(
                """UPDATE batch SET lease_until_ms = ?
                   WHERE id IN (SELECT value FROM json_each(?)) AND state <> 'ended'""",
                (until, array),
            )

    def end_batch(self, batch_id: str) -> None:
        """Its run ended or is gone: its leases are free, its state ended. Again, or for an unknown one: no change."""
        with self._file.transaction() as db:
            self._free(db, batch_id)
            db.execute(
                "UPDATE batch SET state = 'ended', ended_ms = ? WHERE id = ? AND state <> 'ended'",
                (self._now(), batch_id),
            )

    def forget_batches(self, ended_before_ms: int) -> int:
        """Delete batches that ended before this time; how many."""
        with self._file.transaction() as db:
            return db.execute("DELETE FROM batch WHERE state = 'ended' AND ended_ms < ?", (ended_before_ms,)).rowcount

    # -- manifests ---------------------------------------------------------------------------------------------------
    def write_manifest(
        self,
        manifest_id: str,
        title: str,
        kind: str,
        keys: Sequence[str],
        *,
        parameters: str = "{}",
        cap: int | None = None,
    ) -> Manifest:
        """Write the tiles, without marking them: one transaction.

        Writing the same id again adds tiles while it is `writing`; later it changes nothing. Over the cap it is kept as
        `refused` with the number and no tiles.
        """
        with self._file.transaction() as db:
            db.execute(
                """INSERT OR IGNORE INTO manifest (id, title, kind, state, created_ms, tiles, mark, parameters)
                   VALUES (?, ?, ?, 'writing', ?, 0, 0, ?)""",
                (manifest_id, title, kind, self._now(), parameters),
            )
            manifest, number, _ = self._manifest(db, manifest_id)
            if manifest.state != "writing":
                return manifest
            db.execute("INSERT OR IGNORE INTO manifest_tile SELECT ?, value FROM json_each(?)", (number, _array(keys)))
            tiles = _number(db.execute("SELECT count(*) FROM manifest_tile WHERE manifest = ?", (number,)))
            db.execute("UPDATE manifest SET tiles = ? WHERE number = ?", (tiles, number))
            if cap is not None and tiles > cap:
                db.execute("DELETE FROM manifest_tile WHERE manifest = ?", (number,))
                db.execute(
                    "UPDATE manifest SET state = 'refused', problem = ? WHERE number = ?",
                    (f"{tiles} tiles are over the cap of {cap}", number),
                )
            return self._manifest(db, manifest_id)[0]

    def refuse_manifest(
        self, manifest_id: str, title: str, kind: str, problem: str, *, parameters: str = "{}"
    ) -> Manifest:
        """Keep it as `refused` with the problem and no tiles; one that is there already is returned as it is."""
        with self._file.transaction() as db:
            db.execute(
                """INSERT OR IGNORE INTO manifest (id, title, kind, state, created_ms, tiles, mark, parameters, problem)
                   VALUES (?, ?, ?, 'refused', ?, 0, 0, ?, ?)""",
                (manifest_id, title, kind, self._now(), parameters, problem),
            )
            return self._manifest(db, manifest_id)[0]

    def mark_manifest(self, manifest_id: str, *, force: bool = False) -> Manifest:
        """Raise the backfill marks of all its tiles to one new counter value; unless it is `writing`, no change.

        Raises:
            UnknownManifest: There is none of that id.
        """
        with self._file.transaction() as db:
            manifest, number, _ = self._manifest(db, manifest_id)
            if manifest.state != "writing":
                return manifest
            mark = self._next_mark(db)
            keys = [row[0] for row in db.execute("SELECT key FROM manifest_tile WHERE manifest = ?", (number,))]
            self._mark_backfill(db, keys, mark, force=force, manifest=manifest_id)
            db.execute(
                "UPDATE manifest SET state = 'marked', mark = ?, forced = ? WHERE number = ?",
                (mark, int(force), number),
            )
            return self._manifest(db, manifest_id)[0]

    def forget_manifests(self, created_before_ms: int) -> int:
        """Delete manifests written before this time of which nothing is to come: done, cancelled, refused; how many."""
        with self._file.reading() as db:
            numbers = [
                row[0]
                for row in db.execute(
                    """SELECT number FROM manifest
                       WHERE created_ms < ? AND state IN ('done', 'cancelled', 'refused') ORDER BY number""",
                    (created_before_ms,),
                )
            ]
        for number in numbers:
            # Each by itself: one of twenty thousand tiles holds the write lock for a tenth of a second.
            with self._file.transaction() as db:
                db.execute("DELETE FROM manifest_tile WHERE manifest = ?", (number,))
                db.execute("DELETE FROM manifest WHERE number = ?", (number,))
        return len(numbers)

    def manifest(self, manifest_id: str) -> Manifest:
        """One manifest. One whose tiles are all answered or given up reads as `done`.

        Raises:
            UnknownManifest: There is none of that id.
        """
        with self._file.reading() as db:
            manifest, number, _ = self._manifest(db, manifest_id)
            done = manifest.state == "marked" and self._all_answered(db, number, manifest.mark)
        if done:
            self._note_done([number])
            return self.manifest(manifest_id)
        return manifest

    def manifests(self, limit: int = 100) -> list[Manifest]:
        """Newest first. One whose tiles are all answered or given up reads as `done`."""
        query = f"SELECT {_MANIFEST} FROM manifest ORDER BY number DESC LIMIT ?"
        with self._file.reading() as db:
            rows = db.execute(query, (limit,)).fetchall()
            done = [row[9] for row in rows if row[3] == "marked" and self._all_answered(db, row[9], row[6])]
        if done:
            self._note_done(done)
            with self._file.reading() as db:
                rows = db.execute(query, (limit,)).fetchall()
        return [Manifest(*row[:9]) for row in rows]

    def manifest_keys(self, manifest_id: str) -> list[str]:
        """Its tiles, in key order.

        Raises:
            UnknownManifest: There is none of that id.
        """
        with self._file.reading() as db:
            number = self._manifest(db, manifest_id)[1]
            rows = db.execute("SELECT key FROM manifest_tile WHERE manifest = ? ORDER BY key", (number,)).fetchall()
        return [row[0] for row in rows]

    def progress(self, manifest_id: str) -> Progress:
        """How far it got.

        Raises:
            UnknownManifest: There is none of that id.
        """
        with self._file.reading() as db:
            manifest, number, _ = self._manifest(db, manifest_id)
            if manifest.mark == 0:
                return Progress(manifest.tiles, 0, 0)
            done, failed = db.execute(
                """SELECT total(built >= :mark), total(built < :mark AND given_up >= :mark)
                   FROM manifest_tile AS m JOIN tile ON tile.key = m.key WHERE m.manifest = :number""",
                {"mark": manifest.mark, "number": number},
            ).fetchone()
        return Progress(manifest.tiles, int(done), int(failed))

    def cancel_manifest(self, manifest_id: str) -> int:
        """Take back its own backfill marks and no other; how many tiles are no longer wanted.

        Where another manifest, or a backfill mark outside any, wants the tile as well, that mark stands again. One that
        is refused, or done with every tile built, stays what it is.

        Raises:
            UnknownManifest: There is none of that id.
        """
        with self._file.transaction() as db:
            manifest, number, _ = self._manifest(db, manifest_id)
            if manifest.state == "refused" or (
                manifest.state == "done" and not self._any(db, number, manifest.mark, "built < :mark")
            ):
                return 0
            db.execute("UPDATE manifest SET state = 'cancelled' WHERE number = ?", (number,))
            if manifest.mark == 0:
                return 0
            db.execute("DELETE FROM asked")
            db.execute(
                """INSERT INTO asked (key, wanted, revision, work_key)
                   SELECT t.key, max(t.backfill_alone, ifnull(max(o.mark), 0)),
                          max(t.forced_alone, ifnull(max(CASE WHEN o.forced THEN o.mark END), 0)), o.id
                   FROM manifest_tile AS m JOIN tile AS t ON t.key = m.key
                   LEFT JOIN manifest_tile AS other ON other.key = m.key AND other.manifest <> m.manifest
                   LEFT JOIN manifest AS o
                       ON o.number = other.manifest AND o.mark > 0 AND o.state <> 'cancelled'
                   WHERE m.manifest = :number AND (t.wanted_backfill = :mark OR t.forced_backfill = :mark)
                   GROUP BY t.key""",
                {"number": number, "mark": manifest.mark},
            )
            before = _number(db.execute(_DIRTY_OF_ASKED))
            stands = "CASE WHEN wanted_backfill = :mark THEN a.wanted ELSE wanted_backfill END"
            db.execute(
                f"""UPDATE tile SET
                       work = {_work("built", stands)},
                       manifest = CASE WHEN wanted_backfill <> :mark THEN tile.manifest
                                       WHEN a.wanted > backfill_alone THEN a.work_key END,
                       wanted_backfill = {stands},
                       forced_backfill = CASE WHEN forced_backfill = :mark THEN a.revision ELSE forced_backfill END
                   FROM asked AS a WHERE tile.key = a.key""",
                {"mark": manifest.mark},
            )
            db.execute(
                """UPDATE tile SET dirty_since_ms = 0 FROM asked AS a
                   WHERE tile.key = a.key AND max(wanted_live, wanted_backfill) <= built"""
            )
            return before - _number(db.execute(_DIRTY_OF_ASKED))

    def _manifest(self, db: sqlite3.Connection, manifest_id: str) -> tuple[Manifest, int, bool]:
        row = db.execute(f"SELECT {_MANIFEST} FROM manifest WHERE id = ?", (manifest_id,)).fetchone()
        if row is None:
            raise UnknownManifest(f"no manifest {manifest_id!r}")
        return Manifest(*row[:9]), row[9], bool(row[10])

    def _all_answered(self, db: sqlite3.Connection, number: int, mark: int) -> bool:
        return not self._any(db, number, mark, "built < :mark AND given_up < :mark")

    def _any(self, db: sqlite3.Connection, number: int, mark: int, condition: str) -> bool:
        """Whether a tile of a marked manifest meets the condition."""
        query = f"""SELECT EXISTS (SELECT 1 FROM manifest_tile AS m JOIN tile ON tile.key = m.key
                                   WHERE m.manifest = :number AND {condition})"""
        return bool(_number(db.execute(query, {"number": number, "mark": mark})))

    def _note_done(self, numbers: Sequence[int]) -> None:
        """Remember what was found, so that nobody has to look through its tiles again."""
        with self._file.transaction() as db:
            db.execute(
                """UPDATE manifest SET state = 'done'
                   WHERE state = 'marked' AND number IN (SELECT value FROM json_each(?))""",
                (json.dumps(list(numbers)),),
            )

    # -- small durable values -----------------------------------------------------------------------------------------
    def get_value(self, name: str) -> str | None:
        """A named value."""
        with self._file.reading() as db:
            row = db.execute("SELECT value FROM named_value WHERE name = ?", (name,)).fetchone()
        return row[0] if row else None

    def set_value(self, name: str, value: str | None, *, expect: str | Literal["*"] | None = "*") -> bool:
        """Set (None deletes) if the present value is `expect` (None: absent, `*`: whatever); whether it was."""
        with self._file.transaction() as db:
            row = db.execute("SELECT value FROM named_value WHERE name = ?", (name,)).fetchone()
            if expect != "*" and (row[0] if row else None) != expect:
                return False
            if value is None:
                db.execute("DELETE FROM named_value WHERE name = ?", (name,))
            else:
                db.execute("INSERT OR REPLACE INTO named_value VALUES (?, ?)", (name, value))
        return True

    def close(self) -> None:
        """Release files and connections."""
        self._file.close()


_DIRTY_OF_ASKED = """SELECT count(*) FROM asked JOIN tile ON tile.key = asked.key
    WHERE max(wanted_live, wanted_backfill) > built"""


def _work(built: str, wanted_backfill: str = "wanted_backfill") -> str:
    """SQL for the column `work` of a row whose `built` and backfill mark become these expressions."""
    return f"""CASE WHEN max(wanted_live, {wanted_backfill}) <= max({built}, given_up) THEN NULL
        WHEN wanted_live > {built} THEN 0 ELSE 1 END"""


def _oldest(now: int, min_age_ms: int) -> int:
    """Latest stamp that is old enough. Without an age every stamp is: a clock that went back hides no work."""
    return now - min_age_ms if min_age_ms > 0 else 2**63 - 1


def _array(keys: Iterable[str]) -> str:
    """The distinct ASCII keys as a JSON array, sorted: the table is walked in its own order."""
    return json.dumps(sorted({key for key in keys if key.isascii()}))


def _number(cursor: sqlite3.Cursor) -> int:
    # fetchall: a RETURNING statement has done all of its work, and is reset, only when its rows are read.
    return int(cursor.fetchall()[0][0])


def _state(row: tuple[object, ...]) -> TileState:
    return TileState(*row[:5], row[5] == 1, *row[6:])  # pyright: ignore[reportArgumentType, reportCallIssue]


def _as_batch(row: tuple[str, str, int, MarkKind, BatchState, int, int, str | None, str | None]) -> Batch:
    return Batch(row[0], tuple(json.loads(row[1])), *row[2:])


def _ranges(zooms: Sequence[int] | None, prefix: str | None) -> list[tuple[str, str]]:
    """Ranges of keys, first one included and last one not, that hold these zooms below this prefix, in key order."""
    if zooms is None and not prefix:
        return [("", "\x7f")]
    prefix = prefix or ""
    wanted = range(len(prefix), 23) if zooms is None else {z for z in zooms if z >= len(prefix)}
    return [(f"{z}:{prefix}", f"{z}:{prefix}\x7f") for z in sorted(wanted, key=str)]
