"""Building in the Postgres ledger: leases, what was found unchanged, commits with their outbox, failures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from resources.ledger.postgres_reading import latest_stamp
from resources.ledger.postgres_schema import COMMIT_SLOTS
from resources.ledger.postgres_tables import (
    STATE,
    Connection,
    LedgerTables,
    Row,
    changed,
    fetched,
    is_storable,
    lock,
    make,
    plain,
    state,
)
from resources.ledger.protocol import Commit, Duty, Failure, Owed, Settle, TileState

A = TypeVar("A", Settle, Commit, Failure)

_OWED = "id, duty, key, revision, content_hash, work_key, bytes, outcome, built_at_ms, data_time_ms, details"

# What a build that held means for the row. In SET, columns are what they were before; {built} is what it becomes.
_ANSWERED = """attempts = CASE WHEN given_up > a.wanted THEN attempts ELSE 0 END,
    error = CASE WHEN given_up > a.wanted THEN error END,
    given_up = CASE WHEN given_up > a.wanted THEN given_up ELSE 0 END,
    dirty_since_ms = CASE WHEN greatest(wanted_live, wanted_backfill) > {built} THEN marked_ms ELSE 0 END,
    lease = NULL, lease_until_ms = 0"""

_SETTLE = f"""UPDATE tile SET
       work_key = CASE WHEN a.wanted >= built THEN a.work_key ELSE tile.work_key END,
       data_time_ms = CASE WHEN a.wanted >= built AND a.data_time_ms > 0 THEN a.data_time_ms
                           ELSE tile.data_time_ms END,
       built = greatest(built, a.wanted), {_ANSWERED.format(built="greatest(built, a.wanted)")}
   FROM unnest(%s::text[], %s::bigint[], %s::bigint[], %s::text[], %s::bigint[])
        AS a (key, revision, wanted, work_key, data_time_ms)
   WHERE tile.key = a.key AND tile.revision = a.revision AND a.wanted >= cleared
   RETURNING tile.key"""

_COMMIT = f"""UPDATE tile SET
       revision = tile.revision + 1, work_key = a.work_key, content_hash = a.content_hash,
       bytes = CASE WHEN a.content_hash IS NULL THEN 0 ELSE a.bytes END, empty = a.content_hash IS NULL,
       built_at_ms = %s, data_time_ms = a.data_time_ms, built = a.wanted, {_ANSWERED.format(built="a.wanted")}
   FROM unnest(%s::text[], %s::bigint[], %s::bigint[], %s::text[], %s::text[], %s::bigint[], %s::bigint[])
        AS a (key, revision, wanted, work_key, content_hash, bytes, data_time_ms)
   WHERE tile.key = a.key AND tile.revision = a.revision AND built <= a.wanted
   RETURNING tile.key"""

_OWE = f"""INSERT INTO owed (duty, key, revision, content_hash, work_key, bytes, outcome, built_at_ms, data_time_ms,
                             details)
   SELECT duty, key, revision, content_hash, work_key, bytes, outcome, %s, data_time_ms, details
   FROM unnest(%s::text[], %s::text[], %s::bigint[], %s::text[], %s::text[], %s::bigint[], %s::text[], %s::bigint[],
               %s::text[]) WITH ORDINALITY
        AS d (duty, key, revision, content_hash, work_key, bytes, outcome, data_time_ms, details, ordinal)
   ORDER BY ordinal
   RETURNING {_OWED}"""


class Building(LedgerTables):
    """The protocol's methods of builders, and the outbox they write."""

    def take(self, keys: Sequence[str], owner: str, ttl_s: float) -> dict[str, TileState]:
        """Lease those that are free, expired or already this owner's, and read them in the same transaction."""

        def work(db: Connection) -> list[Row]:
            return self._lease(db, lock(db, keys, new=True), owner, ttl_s)

        return {row[0]: state(row) for row in self.write(work, again=True)}

    def _lease(self, db: Connection, keys: Sequence[str], owner: str, ttl_s: float) -> list[Row]:
        """Lease what is free of rows that are locked."""
        now = self._now()
        return fetched(
            db,
            f"""UPDATE tile SET lease = %(owner)s, lease_until_ms = %(until)s
                WHERE key = ANY(%(keys)s) AND (lease IS NULL OR lease = %(owner)s OR lease_until_ms <= %(now)s)
                RETURNING {STATE}""",
            {"owner": owner, "until": now + round(ttl_s * 1000), "keys": list(keys), "now": now},
        )

    def renew(self, owner: str, ttl_s: float) -> int:
        """Extend every lease of this owner; how many."""
        return self.write(lambda db: self._renew(db, [owner], ttl_s), again=True)

    def _renew(self, db: Connection, owners: Sequence[str], ttl_s: float) -> int:
        self._lock_leased(db, owners)
        until = self._now() + round(ttl_s * 1000)
        return changed(db, "UPDATE tile SET lease_until_ms = %s WHERE lease = ANY(%s)", (until, list(owners)))

    def free(self, owner: str, keys: Sequence[str] | None = None) -> None:
        """Give up this owner's leases, of these tiles or of all."""
        self.write(lambda db: self._free(db, owner, keys), again=True)

    def _free(self, db: Connection, owner: str, keys: Sequence[str] | None = None) -> None:
        if keys is None:
            self._lock_leased(db, [owner])
            changed(db, "UPDATE tile SET lease = NULL, lease_until_ms = 0 WHERE lease = %s", (owner,))
        else:
            changed(
                db,
                "UPDATE tile SET lease = NULL, lease_until_ms = 0 WHERE key = ANY(%s) AND lease = %s",
                (lock(db, keys), owner),
            )

    @staticmethod
    def _lock_leased(db: Connection, owners: Sequence[str]) -> None:
        fetched(
            db,
            """SELECT count(*) FROM (
                   SELECT FROM tile WHERE lease = ANY(%s) ORDER BY key FOR NO KEY UPDATE) AS locked""",
            (list(owners),),
        )

    def settle(self, settles: Sequence[Settle]) -> set[str]:
        """Each conditional on the revision as read; keys that held. A lease on it ends. Attempts start anew.

        `built` never sinks: where a newer mark was settled meanwhile, this one held and changes nothing but the lease.
        """
        asked = _first_of_each(settles)
        if not asked:
            return set()
        columns = _columns([(s.key, s.revision, s.wanted, s.work_key, s.data_time_ms) for s in asked])

        def work(db: Connection) -> set[str]:
            _lock_as_read(db, asked)
            return {row[0] for row in fetched(db, _SETTLE, columns)}

        return self.write(work, again=True)

    def commit(self, commits: Sequence[Commit]) -> dict[str, list[Owed]]:
        """Each conditional on the revision as read, with one outbox row a duty; only keys that held are in the answer.

        A commit whose mark as read is below what was settled meanwhile, at the same revision, does not hold either:
        it shows features older than those found unchanged. Of two commits of one tile in a call the first counts.
        """
        asked = _first_of_each(commits)
        if not asked:
            return {}
        columns = _columns(
            [(c.key, c.revision, c.wanted, c.work_key, c.content_hash, c.bytes, c.data_time_ms) for c in asked]
        )
        now = self._now()

        def work(db: Connection) -> dict[str, list[Owed]]:
            _lock_as_read(db, asked)
            held = {row[0] for row in fetched(db, _COMMIT, (now, *columns))}
            answer: dict[str, list[Owed]] = {commit.key: [] for commit in asked if commit.key in held}
            duties = [
                (
                    duty,
                    c.key,
                    c.revision + 1,
                    c.content_hash,
                    c.work_key,
                    0 if c.content_hash is None else c.bytes,
                    plain(c.outcome),
                    c.data_time_ms,
                    plain(c.details),
                )
                for c in asked
                if c.key in held
                for duty in c.duties
            ]
            if duties:
                for row in fetched(db, _OWE, (now, *_columns(duties))):
                    answer[row[2]].append(Owed(*row))
            if held:
                changed(
                    db,
                    "UPDATE commit_total SET value = value + %s WHERE slot = pg_backend_pid() %% %s",
                    (len(held), COMMIT_SLOTS),
                )
            return answer

        return self.write(work)

    def fail(self, failures: Sequence[Failure], *, max_attempts: int) -> set[str]:
        """Charge one attempt each, keep the error, end the lease; the keys that are given up with this one.

        A newer mark has started the attempts anew, so a build that began before it is not charged; nor is one that
        somebody else's build has answered.
        """
        asked = _first_of_each(failures)
        if not asked:
            return set()

        def work(db: Connection) -> list[Row]:
            keys = lock(db, (failure.key for failure in asked), new=True)
            changed(db, "UPDATE tile SET lease = NULL, lease_until_ms = 0 WHERE key = ANY(%s)", (keys,))
            return fetched(
                db,
                """UPDATE tile SET attempts = attempts + 1, error = a.error,
                       given_up = CASE WHEN attempts + 1 >= %s THEN a.wanted ELSE given_up END
                   FROM unnest(%s::text[], %s::bigint[], %s::text[]) AS a (key, wanted, error)
                   WHERE tile.key = a.key AND a.wanted > built AND greatest(wanted_live, wanted_backfill) <= a.wanted
                   RETURNING tile.key, attempts""",
                (max_attempts, *_columns([(f.key, f.wanted, plain(f.error)) for f in asked])),
            )

        return {key for key, attempts in self.write(work) if attempts >= max_attempts}

    def owed(self, duty: Duty, limit: int = 1_000, *, min_age_ms: int = 0) -> list[Owed]:
        """Unpaid rows, oldest first and at least so old (the committer pays its own at once)."""
        rows = self.rows(
            f"SELECT {_OWED} FROM owed WHERE duty = %s AND built_at_ms <= %s ORDER BY id LIMIT %s",
            (duty, latest_stamp(self._now(), min_age_ms), limit),
        )
        return [Owed(*row) for row in rows]

    def pay(self, ids: Sequence[int]) -> None:
        """Delete paid rows."""
        wanted = sorted(set(ids))
        if wanted:
            # In the order of ids: two that pay the same rows must not wait for each other in a circle.
            self.write(
                lambda db: changed(
                    db,
                    """DELETE FROM owed WHERE id IN (
                           SELECT id FROM owed WHERE id = ANY(%s::bigint[]) ORDER BY id FOR UPDATE)""",
                    (wanted,),
                ),
                again=True,
            )


def _first_of_each(asked: Sequence[A]) -> list[A]:
    """The first of each tile whose key a row can have."""
    first: dict[str, A] = {}
    for one in asked:
        if is_storable(one.key):
            first.setdefault(one.key, one)
    return list(first.values())


def _lock_as_read(db: Connection, asked: Sequence[Settle] | Sequence[Commit]) -> None:
    """Lock the tiles. A tile nobody ever wanted reads as revision 0: what was read so needs a row first."""
    make(db, (one.key for one in asked if one.revision == 0))
    lock(db, (one.key for one in asked))


def _columns(rows: Iterable[Sequence[object]]) -> list[list[object]]:
    """Rows turned into one array a column, as `unnest` takes them."""
    return [list(column) for column in zip(*rows, strict=True)]
