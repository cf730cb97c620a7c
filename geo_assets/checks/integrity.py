"""Integrity: the store holds the bytes that the ledger names. What does not is built again."""

from geo_assets.checks.audit import Audit, check_of, sample
from geo_assets.ports import tile_object
from geo_assets.stack import Stack
from geo_assets.tiles import rules
from geo_assets.tiles.rules import Fault
from geo_assets.tiles.tile import Tile
from resources.ledger.protocol import TileState

HASHED_TILES = 5_000
"""Objects read and hashed by an audit: half a millisecond each from a local disk."""


def audit(stack: Stack) -> Audit:
    """Hash a sample of the objects; a fault forgets what the ledger believed, so that the next build commits anew."""
    looked_at = 0
    faults: list[Fault] = []
    broken: list[str] = []
    for state in sample(stack.ledger, "integrity", HASHED_TILES):
        if state.object_name is None:
            continue
        looked_at += 1
        found = _faults_of(stack, state)
        if found:
            faults += found
            broken.append(state.key)
    if broken:
        stack.ledger.clear(broken)
        summary = f"{len(broken):,} of {looked_at:,} objects are gone or damaged; their tiles are built again"
    else:
        summary = f"{looked_at:,} objects are what the ledger says"
    return Audit(looked_at, faults, summary, passed=not broken, numbers={"cleared": len(broken)})


def _faults_of(stack: Stack, state: TileState) -> list[Fault]:
    tile = Tile.from_key(state.key)
    assert state.object_name is not None
    found = rules.integrity(tile, state.content_hash, stack.tiles.get(tile_object(state.object_name)))
    if found:
        now = stack.ledger.read([state.key])[state.key]
        if (now.revision, now.content_hash) != (state.revision, state.content_hash):
            return []  # Committed anew while the audit read: the old object was allowed to go.
    return found


integrity = check_of(
    "integrity",
    "Each object's bytes have the hash that the ledger names. A tile whose object is gone or damaged is marked, and "
    "built again. Looks at 5,000 objects: those built last, and in turn every other one.",
    audit,
)
