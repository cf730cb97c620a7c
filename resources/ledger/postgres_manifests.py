"""Manifests in the Postgres ledger: the tiles of a backfill, its marks, its progress, its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from resources.ledger.postgres_marking import Marking
from resources.ledger.postgres_tables import Connection, Row, changed, fetched, lock, next_mark, number, plain, storable
from resources.ledger.protocol import Manifest, Progress, UnknownManifest

_MANIFEST = "id, title, kind, state, created_ms, tiles, mark, parameters, problem"

# Whether every tile of the marked manifest `m` is answered or given up.
_ALL_ANSWERED = """m.state = 'marked' AND NOT EXISTS (
    SELECT 1 FROM manifest_tile AS t JOIN tile ON tile.key = t.key
    WHERE t.manifest = m.number AND tile.built < m.mark AND tile.given_up < m.mark)"""

_DIRTY_OF = "SELECT count(*) FROM tile WHERE key = ANY(%s) AND greatest(wanted_live, wanted_backfill) > built"

# Marks of other manifests, or outside any, that stand where this one's are taken back.
_STANDS = """WITH a AS (
    SELECT t.key, greatest(t.backfill_alone, coalesce(max(o.mark), 0)) AS wanted, t.backfill_alone,
           greatest(t.forced_alone, coalesce(max(o.mark) FILTER (WHERE o.forced), 0)) AS forced,
           (array_agg(o.id ORDER BY o.mark DESC NULLS LAST))[1] AS manifest
    FROM tile AS t
    LEFT JOIN manifest_tile AS other ON other.key = t.key AND other.manifest <> %(number)s
    LEFT JOIN manifest AS o ON o.number = other.manifest AND o.mark > 0 AND o.state <> 'cancelled'
    WHERE t.key = ANY(%(keys)s) AND (t.wanted_backfill = %(mark)s OR t.forced_backfill = %(mark)s)
    GROUP BY t.key)
UPDATE tile SET
    manifest = CASE WHEN wanted_backfill <> %(mark)s THEN tile.manifest WHEN a.wanted > a.backfill_alone THEN a.manifest
               END,
    wanted_backfill = CASE WHEN wanted_backfill = %(mark)s THEN a.wanted ELSE wanted_backfill END,
    forced_backfill = CASE WHEN forced_backfill = %(mark)s THEN a.forced ELSE forced_backfill END,
    dirty_since_ms = CASE WHEN greatest(wanted_live, CASE WHEN wanted_backfill = %(mark)s THEN a.wanted
                                                          ELSE wanted_backfill END) <= built
                          THEN 0 ELSE dirty_since_ms END
FROM a WHERE tile.key = a.key"""


class Manifests(Marking):
    """The protocol's methods of manifests. A manifest's row is locked before the tiles, by everybody who locks both."""

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

        def work(db: Connection) -> Manifest:
            self._begin(db, manifest_id, title, kind, "writing", parameters, None)
            manifest, of, _ = self._locked(db, manifest_id)
            if manifest.state != "writing":
                return manifest
            changed(
                db,
                "INSERT INTO manifest_tile SELECT %s, k FROM unnest(%s::text[]) AS k ON CONFLICT DO NOTHING",
                (of, storable(keys)),
            )
            tiles = number(db, "SELECT count(*) FROM manifest_tile WHERE manifest = %s", (of,))
            changed(db, "UPDATE manifest SET tiles = %s WHERE number = %s", (tiles, of))
            if cap is not None and tiles > cap:
                changed(db, "DELETE FROM manifest_tile WHERE manifest = %s", (of,))
                changed(
                    db,
                    "UPDATE manifest SET state = 'refused', problem = %s WHERE number = %s",
                    (f"{tiles} tiles are over the cap of {cap}", of),
                )
            return self._locked(db, manifest_id)[0]

        return self.write(work)

    def refuse_manifest(
        self, manifest_id: str, title: str, kind: str, problem: str, *, parameters: str = "{}"
    ) -> Manifest:
        """Keep it as `refused` with the problem and no tiles; one that is there already is returned as it is."""

        def work(db: Connection) -> Manifest:
            self._begin(db, manifest_id, title, kind, "refused", parameters, problem)
            return self._locked(db, manifest_id)[0]

        return self.write(work)

    def mark_manifest(self, manifest_id: str, *, force: bool = False) -> Manifest:
        """Raise the backfill marks of all its tiles to one new counter value; unless it is `writing`, no change.

        Raises:
            UnknownManifest: There is none of that id.
        """

        def work(db: Connection) -> Manifest:
            manifest, of, _ = self._locked(db, manifest_id)
            if manifest.state != "writing":
                return manifest
            keys = lock(db, _keys_of(db, of), new=True)
            mark = next_mark(db)
            self._mark_backfill(db, keys, mark, force=force, manifest=manifest_id)
            changed(
                db,
                "UPDATE manifest SET state = 'marked', mark = %s, forced = %s WHERE number = %s",
                (mark, force, of),
            )
            return self._locked(db, manifest_id)[0]

        return self.write(work)

    def forget_manifests(self, created_before_ms: int) -> int:
        """Delete manifests written before this time of which nothing is to come: done, cancelled, refused; how many."""
        numbers = [
            row[0]
            for row in self.rows(
                """SELECT number FROM manifest
                   WHERE created_ms < %s AND state IN ('done', 'cancelled', 'refused') ORDER BY number""",
                (created_before_ms,),
            )
        ]

        def work(of: int) -> Callable[[Connection], None]:
            def forget(db: Connection) -> None:
                changed(db, "DELETE FROM manifest_tile WHERE manifest = %s", (of,))
                changed(db, "DELETE FROM manifest WHERE number = %s", (of,))

            return forget

        for of in numbers:
            self.write(work(of))
        return len(numbers)

    def manifest(self, manifest_id: str) -> Manifest:
        """One manifest. One whose tiles are all answered or given up reads as `done`.

        Raises:
            UnknownManifest: There is none of that id.
        """
        rows = self.rows(
            f"SELECT {_MANIFEST}, number, {_ALL_ANSWERED} FROM manifest AS m WHERE id = %s", (manifest_id,)
        )
        if rows and rows[0][-1]:
            self._note_done([rows[0][-2]])
            rows = self.rows(f"SELECT {_MANIFEST} FROM manifest WHERE id = %s", (manifest_id,))
        return _the_manifest(rows, manifest_id)

    def manifests(self, limit: int = 100) -> list[Manifest]:
        """Newest first. One whose tiles are all answered or given up reads as `done`."""
        query = f"SELECT {_MANIFEST}, number, {_ALL_ANSWERED} FROM manifest AS m ORDER BY number DESC LIMIT %s"
        rows = self.rows(query, (limit,))
        if done := [row[-2] for row in rows if row[-1]]:
            self._note_done(done)
            rows = self.rows(query, (limit,))
        return [Manifest(*row[:9]) for row in rows]

    def manifest_keys(self, manifest_id: str) -> list[str]:
        """Its tiles, in key order.

        Raises:
            UnknownManifest: There is none of that id.
        """
        rows = self.rows(
            """SELECT t.key FROM manifest AS m LEFT JOIN manifest_tile AS t ON t.manifest = m.number
               WHERE m.id = %s ORDER BY t.key""",
            (manifest_id,),
        )
        if not rows:
            raise _unknown(manifest_id)
        return [row[0] for row in rows if row[0] is not None]

    def progress(self, manifest_id: str) -> Progress:
        """How far it got.

        Raises:
            UnknownManifest: There is none of that id.
        """
        rows = self.rows(
            """SELECT m.tiles, count(*) FILTER (WHERE m.mark > 0 AND tile.built >= m.mark),
                      count(*) FILTER (WHERE m.mark > 0 AND tile.built < m.mark AND tile.given_up >= m.mark)
               FROM manifest AS m LEFT JOIN manifest_tile AS t ON t.manifest = m.number AND m.mark > 0
               LEFT JOIN tile ON tile.key = t.key
               WHERE m.id = %s GROUP BY m.number""",
            (manifest_id,),
        )
        if not rows:
            raise _unknown(manifest_id)
        return Progress(*rows[0])

    def cancel_manifest(self, manifest_id: str) -> int:
        """Take back its own backfill marks and no other; how many tiles are no longer wanted.

        Where another manifest, or a backfill mark outside any, wants the tile as well, that mark stands again. One that
        is refused, or done with every tile built, stays what it is.

        Raises:
            UnknownManifest: There is none of that id.
        """

        def work(db: Connection) -> int:
            manifest, of, _ = self._locked(db, manifest_id)
            if manifest.state == "refused" or (manifest.state == "done" and not self._any_unbuilt(db, of)):
                return 0
            changed(db, "UPDATE manifest SET state = 'cancelled' WHERE number = %s", (of,))
            if manifest.mark == 0:
                return 0
            keys = lock(db, _keys_of(db, of))
            before = number(db, _DIRTY_OF, (keys,))
            changed(db, _STANDS, {"number": of, "keys": keys, "mark": manifest.mark})
            return before - number(db, _DIRTY_OF, (keys,))

        return self.write(work)

    def _begin(
        self, db: Connection, manifest_id: str, title: str, kind: str, state: str, parameters: str, problem: str | None
    ) -> None:
        """Make the manifest's row, unless there is one."""
        changed(
            db,
            """INSERT INTO manifest (id, title, kind, state, created_ms, tiles, mark, parameters, problem)
               VALUES (%s, %s, %s, %s, %s, 0, 0, %s, %s) ON CONFLICT DO NOTHING""",
            (
                manifest_id,
                plain(title),
                kind,
                state,
                self._now(),
                plain(parameters),
                None if problem is None else plain(problem),
            ),
        )

    @staticmethod
    def _locked(db: Connection, manifest_id: str) -> tuple[Manifest, int, bool]:
        """The manifest, its number and whether it forces; its row is locked until the transaction ends."""
        rows = fetched(
            db, f"SELECT {_MANIFEST}, number, forced FROM manifest WHERE id = %s FOR NO KEY UPDATE", (manifest_id,)
        )
        return _the_manifest(rows, manifest_id), rows[0][9], rows[0][10]

    @staticmethod
    def _any_unbuilt(db: Connection, of: int) -> bool:
        return bool(
            number(
                db,
                """SELECT count(*) FROM (
                       SELECT FROM manifest AS m JOIN manifest_tile AS t ON t.manifest = m.number
                       JOIN tile ON tile.key = t.key WHERE m.number = %s AND tile.built < m.mark LIMIT 1) AS unbuilt""",
                (of,),
            )
        )

    def _note_done(self, numbers: Sequence[int]) -> None:
        """Remember what was found, so that nobody has to look through its tiles again."""

        def work(db: Connection) -> None:
            wanted = sorted(numbers)
            fetched(db, "SELECT 1 FROM manifest WHERE number = ANY(%s) ORDER BY number FOR NO KEY UPDATE", (wanted,))
            changed(db, "UPDATE manifest SET state = 'done' WHERE state = 'marked' AND number = ANY(%s)", (wanted,))

        self.write(work)


def _keys_of(db: Connection, of: int) -> list[str]:
    return [row[0] for row in fetched(db, "SELECT key FROM manifest_tile WHERE manifest = %s", (of,))]


def _the_manifest(rows: list[Row], manifest_id: str) -> Manifest:
    if not rows:
        raise _unknown(manifest_id)
    return Manifest(*rows[0][:9])


def _unknown(manifest_id: str) -> UnknownManifest:
    return UnknownManifest(f"no manifest {manifest_id!r}")
