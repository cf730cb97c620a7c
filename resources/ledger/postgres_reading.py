"""Reading the Postgres ledger: rows, scans, the work that is there, totals. Each answer is one statement's snapshot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from resources.ledger.postgres_tables import STATE, LedgerTables, state, storable
from resources.ledger.protocol import Lag, LedgerCounts, MarkKind, TileState

SCAN_PIECE = 2_000
"""Rows a scan reads at once: a megabyte, and no snapshot held while the caller thinks."""

_COUNTS = """SELECT
    (SELECT count(*) FROM tile),
    (SELECT coalesce(json_agg(json_build_array(zoom, tiles, bytes) ORDER BY zoom), '[]') FROM
        (SELECT zoom, count(*) AS tiles, sum(bytes) AS bytes FROM tile WHERE content_hash IS NOT NULL GROUP BY zoom)
        AS published),
    (SELECT coalesce(json_agg(json_build_array(work, tiles, oldest)), '[]') FROM
        (SELECT work, count(*) AS tiles, min(dirty_since_ms) AS oldest FROM tile WHERE work IS NOT NULL GROUP BY work)
        AS dirty),
    (SELECT count(*) FROM tile WHERE given_up > 0 AND given_up > built
        AND greatest(wanted_live, wanted_backfill) BETWEEN built + 1 AND given_up),
    (SELECT count(*) FROM tile WHERE lease IS NOT NULL AND lease_until_ms > %s),
    (SELECT coalesce(json_object_agg(duty, rows), '{}') FROM
        (SELECT duty, count(*) AS rows FROM owed GROUP BY duty) AS unpaid),
    (SELECT sum(value)::bigint FROM commit_total)"""


class Reading(LedgerTables):
    """The protocol's methods that change nothing."""

    def read(self, keys: Sequence[str]) -> dict[str, TileState]:
        """Rows of these tiles; every key asked for is in the answer."""
        states = {key: TileState(key) for key in keys}
        if wanted := storable(states):
            rows = self.rows(f"SELECT {STATE} FROM tile WHERE key = ANY(%s)", (wanted,))
            states.update((row[0], state(row)) for row in rows)
        return states

    def scan(
        self, *, zooms: Sequence[int] | None = None, prefix: str | None = None, published: bool = True
    ) -> Iterator[TileState]:
        """Rows in key order (as text), in pieces; each piece is a snapshot of its own, the whole is not."""
        only = "AND content_hash IS NOT NULL" if published else ""
        first_piece, next_piece = (
            f"SELECT {STATE} FROM tile WHERE key {compare} %s AND key < %s {only} ORDER BY key LIMIT {SCAN_PIECE}"
            for compare in (">=", ">")
        )
        for first, below in key_ranges(zooms, prefix):
            query, last = first_piece, first
            while True:
                piece = [state(row) for row in self.rows(query, (last, below))]
                yield from piece
                if len(piece) < SCAN_PIECE:
                    break
                query, last = next_piece, piece[-1].key

    def dirty(
        self, limit: int, *, kind: MarkKind | None = None, min_age_ms: int = 0, unleased: bool = True
    ) -> list[TileState]:
        """Dirty tiles in order of work: live before backfill, then since when they are dirty, then zoom and key."""
        now = self._now()
        free = "AND lease_until_ms <= %(now)s" if unleased else ""
        rows = self.rows(
            f"""SELECT {STATE} FROM tile
                WHERE work IS NOT NULL AND work BETWEEN %(first)s AND %(last)s AND dirty_since_ms <= %(oldest)s {free}
                ORDER BY work, dirty_since_ms, work * -zoom, key LIMIT %(limit)s""",
            {
                "first": 1 if kind == "backfill" else 0,
                "last": 0 if kind == "live" else 1,
                "oldest": latest_stamp(now, min_age_ms),
                "now": now,
                "limit": limit,
            },
        )
        return [state(row) for row in rows]

    def counts(self) -> LedgerCounts:
        """Totals. A tile given up at its newest mark counts as given up, not as dirty."""
        ((tiles, zooms, dirty, given_up, leased, owed, commits),) = self.rows(_COUNTS, (self._now(),))
        work = {kind: (count, oldest) for kind, count, oldest in dirty}
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
        rows = self.rows(
            """SELECT zoom, substr(key, strpos(key, ':') + 1, %s) AS prefix, count(*), min(dirty_since_ms)
               FROM tile WHERE work IS NOT NULL GROUP BY zoom, prefix ORDER BY zoom, prefix""",
            (prefix_length,),
        )
        return [Lag(*row) for row in rows]


def latest_stamp(now: int, min_age_ms: int) -> int:
    """Latest stamp that is old enough. Without an age every stamp is: a clock that went back hides no work."""
    return now - min_age_ms if min_age_ms > 0 else 2**63 - 1


def key_ranges(zooms: Sequence[int] | None, prefix: str | None) -> list[tuple[str, str]]:
    """Ranges of keys, first one included and last one not, that hold these zooms below this prefix, in key order."""
    if zooms is None and not prefix:
        return [("", "\x7f")]
    prefix = prefix or ""
    wanted = range(len(prefix), 23) if zooms is None else {z for z in zooms if z >= len(prefix)}
    return [(f"{z}:{prefix}", f"{z}:{prefix}\x7f") for z in sorted(wanted, key=str)]
