"""Faults of a port that are no record's and no tile's: the work is done again when they are over."""

from __future__ import annotations

from geo_assets.services.pool import WorkersUnavailable
from resources.event_log.protocol import LogUnavailable
from resources.feature_store.protocol import FeatureStoreUnavailable
from resources.guard.protocol import GuardUnavailable
from resources.ledger.protocol import LedgerUnavailable
from resources.tile_store.protocol import TileStoreUnavailable

OUTAGES = (
    LogUnavailable,
    FeatureStoreUnavailable,
    LedgerUnavailable,
    TileStoreUnavailable,
    GuardUnavailable,
    WorkersUnavailable,
)
"""Somebody is away, full or locked for now."""
