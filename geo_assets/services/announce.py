"""Tell map clients of committed tiles: the ledger's announce duties become records of `[tile-updated]`.

Caches forget a tile before clients hear of it, or they would fetch the old bytes. One that cannot be reached holds
nothing back: the purge stays owed, and clients hear again once it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog

from geo_assets.events import topics
from geo_assets.events.records import TileUpdated
from geo_assets.logs import tells_debug
from geo_assets.services import purging, tracing
from geo_assets.services.dead_letters import now_ms
from geo_assets.services.edit_stages import NONE, Stamps, stamps_in
from geo_assets.services.event_ids import ids_in
from geo_assets.tiles.tile import Tile
from resources.event_log.protocol import LogUnavailable, NewRecord
from resources.ledger.protocol import Duty, Owed

if TYPE_CHECKING:
    from geo_assets.services.edit_stages import StageHistograms
    from geo_assets.stack import Stack

log = structlog.get_logger()

SWEEP_AGE_MS = 5_000
"""How old an unpaid announcement is before somebody else pays it: its committer needs milliseconds."""

PURGE_PAGE = 1_000
"""Purges between two payments: a second's worth."""


def passed(row: Owed, committed_us: int = 0) -> Stamps:
    """The stages that the edit behind a commit passed, up to this announcement of it; `NONE` where nobody stamped it.

    Args:
        row: The announce duty of the commit.
        committed_us: When the commit was durable, where the caller made it. Else the ledger's own time counts, of when
            the transaction began, in milliseconds: it is not before what was stamped ahead of it.
    """
    stamps = stamps_in(row.details)
    if stamps == NONE:
        return NONE
    if not stamps.committed:
        stamps = stamps.at("committed", committed_us or max(stamps.built, stamps.taken, row.built_at_ms * 1_000))
    return stamps.at("announced")


def announcement(row: Owed, *, again: bool = False) -> NewRecord:
    """The record that tells clients of one commit; `again`: that caches may have shown them the tile before it."""
    return _record(row, NONE if again else passed(row), again=again)


def _record(row: Owed, stamps: Stamps, *, again: bool = False) -> NewRecord:
    tile = Tile.from_key(row.key)
    value = TileUpdated.model_validate(
        {
            "z": tile.z,
            "x": tile.x,
            "y": tile.y,
            "hash": row.content_hash,
            "revision": row.revision,
            "outcome": row.outcome,
            "bytes": row.bytes,
            "built_at_ms": row.built_at_ms,
            "data_time_ms": row.data_time_ms,
            "again": again,
            "stages": stamps.to_members() or None,
        }
    )
    return NewRecord(topics.TILE_UPDATED, row.key, value.model_dump_json(exclude_defaults=True).encode())


def announce(
    stack: Stack,
    rows: Sequence[Owed],
    *,
    purged: Sequence[Owed] = (),
    stages: StageHistograms | None = None,
    committed_us: int = 0,
) -> int:
    """Announce these commits and pay the rows. A log that cannot take them leaves them owed.

    Args:
        stack: The ports.
        rows: Announce duties.
        purged: Purge duties of the same commits that were seen to; paid in the same transaction.
        stages: Where to note how long the stages from `taken` to `announced` took.
        committed_us: As for `passed`.

    Returns:
        How many commits were announced.
    """
    if not rows:
        return 0
    stamps = [passed(row, committed_us) for row in rows]
    try:
        records = [_record(row, one) for row, one in zip(rows, stamps, strict=True)]
        if tracing.ACTIVE is None:
            stack.log.append(records)
        else:
            traces = [tracing.trace_in(row.details) for row in rows]
            with tracing.Sending("announce tile", traces, [row.key for row in rows]) as sending:
                stack.log.append(sending.relayed(records))
    except LogUnavailable as fault:
        log.warning("announcements stay owed", rows=len(rows), error=str(fault))
        return 0
    if tells_debug(log):
        for row in rows:
            if ids := ids_in(row.details):
                log.debug("announced", tile=row.key, revision=row.revision, event_ids=ids)
    if stages is not None:
        stages.observe(stamps, "taken", "built", "committed", "announced")
    stack.ledger.pay([row.id for row in (*rows, *purged)])
    return len(rows)


def sweep_announcements(stack: Stack, *, min_age_ms: int = SWEEP_AGE_MS) -> int:
    """Pay what a dead process left. Twice is harmless: clients ignore a revision not above the one they have."""
    sweep_purges(stack, min_age_ms=min_age_ms)
    paid = 0
    while rows := stack.ledger.owed("announce", 1_000, min_age_ms=min_age_ms):
        sent = announce(stack, rows)
        paid += sent
        if not sent:
            break
    return paid


def sweep_purges(stack: Stack, *, min_age_ms: int = SWEEP_AGE_MS) -> int:
    """Make the purges that failed, or that a dead process left, and the second ones that are due; how many were made.

    A tile whose first purge was late is announced again: its clients may have fetched what the cache still had.
    """
    paid = 0
    again_ms = int(stack.settings.purge_again_s * 1000)
    due: list[tuple[Duty, int]] = [("purge", min_age_ms), ("purge_again", max(min_age_ms, again_ms))]
    for duty, age_ms in due:
        while rows := stack.ledger.owed(duty, PURGE_PAGE, min_age_ms=age_ms):
            purged = purging.purge(stack, rows, now_ms=now_ms())
            if not purged or (duty == "purge" and not _announce_again(stack, purged)):
                break
            stack.ledger.pay([row.id for row in purged])
            paid += len(purged)
    return paid


def _announce_again(stack: Stack, purged: Sequence[Owed]) -> bool:
    newest = {row.key: row for row in sorted(purged, key=lambda row: row.revision)}
    try:
        stack.log.append([announcement(row, again=True) for row in newest.values()])
    except LogUnavailable as fault:
        log.warning("purges stay owed until they can be announced", rows=len(purged), error=str(fault))
        return False
    log.info("announced again after a late purge", tiles=len(newest))
    return True
