"""Batches in the Postgres ledger: tiles leased together for one run."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from itertools import chain

from resources.ledger.postgres_building import Building
from resources.ledger.postgres_tables import Connection, Row, changed, fetched, lock
from resources.ledger.protocol import Batch, MarkKind, UnknownBatch

_BATCH = "id, keys, attempt, kind, state, created_ms, lease_until_ms, manifest, run_id"


class Batches(Building):
    """The protocol's methods of batches. A batch's row is locked after the tiles, by everybody who locks both."""

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
        now = self._now()
        until = now + round(ttl_s * 1000)

        def work(db: Connection) -> list[Batch]:
            opened: list[Batch] = []
            lock(db, chain.from_iterable(groups), new=True)
            for group in groups:
                batch_id = uuid.uuid4().hex
                leased = {row[0] for row in self._lease(db, group, batch_id, ttl_s)}
                keys = tuple(key for key in dict.fromkeys(group) if key in leased)
                if not keys:
                    continue
                changed(
                    db,
                    """INSERT INTO batch (id, keys, attempt, kind, state, created_ms, lease_until_ms, manifest)
                       VALUES (%s, %s, %s, %s, 'queued', %s, %s, %s)""",
                    (batch_id, list(keys), attempt, kind, now, until, manifest),
                )
                opened.append(Batch(batch_id, keys, attempt, kind, "queued", now, until, manifest))
            return opened

        return self.write(work)

    def batch(self, batch_id: str) -> Batch:
        """One batch.

        Raises:
            UnknownBatch: There is none of that id.
        """
        return _the_batch(self.rows(f"SELECT {_BATCH} FROM batch WHERE id = %s", (batch_id,)), batch_id)

    def batches(self, *, open_only: bool = True) -> list[Batch]:
        """Batches, oldest first."""
        where = "WHERE state <> 'ended'" if open_only else ""
        return [_as_batch(row) for row in self.rows(f"SELECT {_BATCH} FROM batch {where} ORDER BY number")]

    def start_batch(self, batch_id: str, run_id: str, ttl_s: float) -> Batch:
        """Its run began: state running, leases renewed. One that was ended meanwhile stays so, and its state says it.

        Raises:
            UnknownBatch: There is none of that id.
        """

        def work(db: Connection) -> Batch:
            # Locked before its state is looked at: whoever ends it frees its leases first, and waits here for that.
            self._lock_leased(db, [batch_id])
            until = self._now() + round(ttl_s * 1000)
            started = fetched(
                db,
                f"""UPDATE batch SET state = 'running', run_id = %s, lease_until_ms = %s
                    WHERE id = %s AND state <> 'ended' RETURNING {_BATCH}""",
                (run_id, until, batch_id),
            )
            if not started:
                return _the_batch(fetched(db, f"SELECT {_BATCH} FROM batch WHERE id = %s", (batch_id,)), batch_id)
            changed(db, "UPDATE tile SET lease_until_ms = %s WHERE lease = %s", (until, batch_id))
            return _as_batch(started[0])

        return self.write(work)

    def renew_batches(self, batch_ids: Sequence[str], ttl_s: float) -> None:
        """Extend the leases of the tiles still held by these batches."""
        ids = sorted(set(batch_ids))
        if not ids:
            return
        until = self._now() + round(ttl_s * 1000)

        def work(db: Connection) -> None:
            self._renew(db, ids, ttl_s)
            fetched(db, "SELECT 1 FROM batch WHERE id = ANY(%s) ORDER BY id FOR NO KEY UPDATE", (ids,))
            changed(db, "UPDATE batch SET lease_until_ms = %s WHERE id = ANY(%s) AND state <> 'ended'", (until, ids))

        self.write(work)

    def end_batch(self, batch_id: str) -> None:
        """Its run ended or is gone: its leases are free, its state ended. Again, or for an unknown one: no change."""

        def work(db: Connection) -> None:
            self._free(db, batch_id)
            changed(
                db,
                "UPDATE batch SET state = 'ended', ended_ms = %s WHERE id = %s AND state <> 'ended'",
                (self._now(), batch_id),
            )

        self.write(work)

    def forget_batches(self, ended_before_ms: int) -> int:
        """Delete batches that ended before this time; how many."""
        return self.write(
            lambda db: changed(db, "DELETE FROM batch WHERE state = 'ended' AND ended_ms < %s", (ended_before_ms,))
        )


def _as_batch(row: Row) -> Batch:
    return Batch(row[0], tuple(row[1]), *row[2:])


def _the_batch(rows: list[Row], batch_id: str) -> Batch:
    if not rows:
        raise UnknownBatch(f"no batch {batch_id!r}: it was never opened, or ended so long ago that it is forgotten")
    return _as_batch(rows[0])
