"""Marking in the Postgres ledger: what is wanted, and how far `[tiles]` was read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from resources.ledger.postgres_tables import (
    Connection,
    LedgerTables,
    changed,
    is_storable,
    lock,
    next_mark,
    number,
)
from resources.ledger.protocol import Hint, MarkKind

# What a newer mark means for a row, of whichever kind it is. In SET, columns are what they were before.
_WANTED_ANEW = """dirty_since_ms = CASE WHEN work IS NULL THEN %(now)s ELSE dirty_since_ms END,
    marked_ms = %(now)s, attempts = 0, given_up = 0"""


class Marking(LedgerTables):
    """The protocol's methods that raise marks."""

    def positions(self, topic_id: str) -> dict[int, int]:
        """Next offset of each partition that was ever marked from; an absent one starts at the oldest record."""
        rows = self.rows("SELECT partition, next_offset FROM read_position WHERE topic_id = %s", (topic_id,))
        return {row[0]: row[1] for row in rows}

    def mark_from_log(self, topic_id: str, partition: int, hints: Sequence[Hint], next_offset: int) -> int:
        """In one transaction: raise the live marks of the hints at or above the position, move it to `next_offset`.

        The position's row is locked first and the tiles after it, by everybody who locks both.
        """

        def work(db: Connection) -> int:
            changed(
                db,
                "INSERT INTO read_position VALUES (%s, %s, 0) ON CONFLICT DO NOTHING",
                (topic_id, partition),
            )
            position = number(
                db,
                "SELECT next_offset FROM read_position WHERE topic_id = %s AND partition = %s FOR NO KEY UPDATE",
                (topic_id, partition),
            )
            new = [hint for hint in hints if hint.offset >= position and is_storable(hint.key)]
            if new:
                keys = lock(db, (hint.key for hint in new), new=True)
                forced = {hint.key for hint in new if hint.force}
                mark = next_mark(db)
                self._mark_live(db, [key for key in keys if key not in forced], mark, force=False)
                self._mark_live(db, sorted(forced), mark, force=True)
            if next_offset > position:
                changed(
                    db,
                    "UPDATE read_position SET next_offset = %s WHERE topic_id = %s AND partition = %s",
                    (next_offset, topic_id, partition),
                )
            return len(new)

        return self.write(work, again=True)

    def reset_position(self, topic_id: str, partition: int, next_offset: int) -> None:
        """Set a position outright."""
        self.write(
            lambda db: changed(
                db,
                """INSERT INTO read_position VALUES (%s, %s, %s)
                   ON CONFLICT (topic_id, partition) DO UPDATE SET next_offset = excluded.next_offset""",
                (topic_id, partition, next_offset),
            )
        )

    def mark(self, keys: Sequence[str], *, kind: MarkKind = "live", force: bool = False) -> int:
        """Raise marks to one new counter value, which is returned. Attempts and given_up start anew."""

        def work(db: Connection) -> int:
            wanted = lock(db, keys, new=True)
            mark = next_mark(db)
            if kind == "live":
                self._mark_live(db, wanted, mark, force=force)
            else:
                self._mark_backfill(db, wanted, mark, force=force, manifest=None)
            return mark

        return self.write(work)

    def clear(self, keys: Sequence[str]) -> None:
        """After an integrity fault: forget work key and content hash (the revision stays) and mark the tiles live.

        A settle of what was read before this one does not hold any more: it would bring the work key back.
        """

        def work(db: Connection) -> None:
            wanted = lock(db, keys, new=True)
            mark = next_mark(db)
            self._mark_live(db, wanted, mark, force=False)
            changed(
                db,
                "UPDATE tile SET work_key = NULL, content_hash = NULL, cleared = %s WHERE key = ANY(%s)",
                (mark, wanted),
            )

        self.write(work)

    def _mark_live(self, db: Connection, keys: Sequence[str], mark: int, *, force: bool) -> None:
        """Raise the live marks of rows that are locked."""
        if keys:
            changed(
                db,
                f"""UPDATE tile SET wanted_live = %(mark)s, forced_live = greatest(forced_live, %(forced)s),
                       {_WANTED_ANEW} WHERE key = ANY(%(keys)s)""",
                {"mark": mark, "forced": mark if force else 0, "now": self._now(), "keys": keys},
            )

    def _mark_backfill(
        self, db: Connection, keys: Iterable[str], mark: int, *, force: bool, manifest: str | None
    ) -> None:
        """Raise the backfill marks of rows that are locked."""
        alone = manifest is None
        changed(
            db,
            f"""UPDATE tile SET
                   wanted_backfill = %(mark)s, forced_backfill = greatest(forced_backfill, %(forced)s),
                   backfill_alone = greatest(backfill_alone, %(alone)s),
                   forced_alone = greatest(forced_alone, %(forced_alone)s),
                   manifest = %(manifest)s, {_WANTED_ANEW} WHERE key = ANY(%(keys)s)""",
            {
                "mark": mark,
                "forced": mark if force else 0,
                "alone": mark if alone else 0,
                "forced_alone": mark if alone and force else 0,
                "manifest": manifest,
                "now": self._now(),
                "keys": list(keys),
            },
        )
