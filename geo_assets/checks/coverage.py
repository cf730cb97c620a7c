"""Coverage: what a backfill said it would build is there."""

from geo_assets.checks.audit import Audit, check_of
from geo_assets.stack import Stack
from geo_assets.tiles import rules
from geo_assets.tiles.rules import Fault
from resources.ledger.protocol import Manifest, TileState

MANIFESTS = 20
"""Newest manifests looked at: older ones were judged when they were new, and newer ones rebuilt what they held."""


def audit(stack: Stack) -> Audit:
    """Compare the newest manifests with the ledger. A tile that is still waiting for its run counts as neither."""
    floor = stack.settings.coverage_floor
    looked_at = waiting = 0
    lowest = 1.0
    failing: list[Fault] = []
    missing: list[Fault] = []
    judged = [m for m in stack.ledger.manifests(MANIFESTS) if m.state in ("marked", "done") and m.tiles]
    for manifest in judged:
        looked_at += manifest.tiles
        progress = stack.ledger.progress(manifest.id)
        if progress.done == progress.tiles:
            continue
        states = stack.ledger.read(stack.ledger.manifest_keys(manifest.id))
        ended = {key: state for key, state in states.items() if _answered(manifest, state) or _given_up(state)}
        waiting += len(states) - len(ended)
        if not ended:
            continue
        present = [key for key, state in ended.items() if _answered(manifest, state)]
        verdict = rules.coverage(present, ended, floor, subject=manifest.title or manifest.id)
        lowest = min(lowest, verdict.value)
        missing += verdict.faults
        if not verdict.passed:
            failing.append(Fault("coverage", manifest.id, verdict.summary, round(verdict.value, 5), floor))
    if not judged:
        summary = "no manifest was written yet"
    elif failing:
        summary = f"{len(failing)} of {len(judged)} manifests are below the floor of {floor:.2%}"
    else:
        summary = f"{len(judged)} manifests: at least {lowest:.2%} of what ended is there, floor {floor:.2%}"
    numbers = {"manifests": len(judged), "waiting": waiting, "lowest": round(lowest, 5), "floor": floor}
    return Audit(looked_at, [*failing, *missing], summary, passed=not failing, numbers=numbers)


def _answered(manifest: Manifest, state: TileState) -> bool:
    return state.built >= manifest.mark or not state.dirty


def _given_up(state: TileState) -> bool:
    return state.dirty and state.given_up >= state.wanted


coverage = check_of(
    "coverage",
    "Of each of the 20 newest manifests at least 99.5 % (GEO_ASSETS_COVERAGE_FLOOR) of the tiles are there, with an "
    "object or as empty.",
    audit,
)
