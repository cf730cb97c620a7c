"""Freshness: no tile waits too long, be it a single one that is stuck while all others move."""

import time

from geo_assets.checks.audit import SHOWN, Audit, check_of
from geo_assets.stack import Stack
from geo_assets.tiles import rules
from geo_assets.tiles.rules import Fault
from resources.ledger.protocol import TileState


def audit(stack: Stack) -> Audit:
    """Look for live edits that wait too long, tiles that were given up, and backfills as old as the log's retention."""
    ledger, settings = stack.ledger, stack.settings
    now_ms = time.time_ns() // 1_000_000
    counts = ledger.counts()
    limit_ms = round(settings.freshness_limit_s * 1000)
    stuck = ledger.dirty(SHOWN, kind="live", min_age_ms=limit_ms, unleased=False)
    faults = [_fault(state, "an edit of it waits", now_ms, limit_ms) for state in stuck]
    if counts.given_up:
        faults += [
            Fault("freshness", state.key, f"its builds failed {state.attempts} times: {state.error or 'no word why'}")
            for state in _given_up(stack)
        ]
    verdict = rules.freshness(counts.oldest_dirty_ms, now_ms, settings.retention_s * 1000)
    if not verdict.passed and not stuck:
        faults += [
            _fault(state, "a backfill of it waits", now_ms, round(verdict.limit))
            for state in ledger.dirty(SHOWN, kind="backfill", min_age_ms=round(verdict.limit), unleased=False)
        ]
    numbers = {
        "lag_s": round(verdict.value / 1000, 1),
        "limit_s": settings.freshness_limit_s,
        "dirty_live": counts.dirty_live,
        "dirty_backfill": counts.dirty_backfill,
        "given_up": counts.given_up,
    }
    looked_at = counts.dirty_live + counts.dirty_backfill + counts.given_up
    passed = not faults and verdict.passed
    if passed:
        summary = verdict.summary
    else:
        more = "+" if len(stuck) == SHOWN else ""
        summary = (
            f"{len(stuck)}{more} tiles wait for longer than {settings.freshness_limit_s:g} s, "
            f"{counts.given_up:,} were given up; {verdict.summary}"
        )
    return Audit(looked_at, faults or verdict.faults, summary, passed=passed, numbers=numbers)


def _fault(state: TileState, problem: str, now_ms: int, limit_ms: int) -> Fault:
    waits = f"{(now_ms - state.dirty_since_ms) / 1000:,.0f} s"
    return Fault("freshness", state.key, problem, waits, f"{limit_ms / 1000:g} s")


def _given_up(stack: Stack) -> list[TileState]:
    """The first of them. There is no index of their keys: read through, which is done only where there are any."""
    found: list[TileState] = []
    for state in stack.ledger.scan(published=False):
        if state.dirty and state.given_up >= state.wanted:
            found.append(state)
            if len(found) == SHOWN:
                break
    return found


freshness = check_of(
    "freshness",
    "No tile waits for an edit longer than GEO_ASSETS_FRESHNESS_LIMIT_S (900 s), none was given up, and no backfill "
    "waits for 70 % of the log's retention.",
    audit,
)
