"""What the fast lane counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from geo_assets.services.edit_stages import StageHistograms
from geo_assets.services.tracing import SPANS

REGISTRY = CollectorRegistry()
RECORDS = Counter("geo_assets_lane_records_total", "Hints read from [tiles].", registry=REGISTRY)
TILES = Counter("geo_assets_lane_tiles_total", "Tiles looked at, by outcome.", ["outcome"], registry=REGISTRY)
WAITING = Gauge("geo_assets_lane_waiting_tiles", "Tiles in the lane's hands.", registry=REGISTRY)
BUDGET_IN_USE = Gauge("geo_assets_lane_budget_vertices", "Vertices of the tiles under way.", registry=REGISTRY)
BUDGET_WAITING = Gauge("geo_assets_lane_budget_waiting_tiles", "Tiles that wait for the budget.", registry=REGISTRY)
BUDGET_OLDEST = Gauge(
    "geo_assets_lane_budget_oldest_wait_seconds", "How long the one has waited that waits longest.", registry=REGISTRY
)
TURN_SECONDS = Histogram(
    "geo_assets_lane_turn_seconds",
    "Of one turn that built something: take, read, encode, commit, announce.",
    buckets=(0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
    registry=REGISTRY,
)
POLL_GAP = Gauge(
    "geo_assets_lane_poll_gap_seconds", "Longest time between two polls in the last minute.", registry=REGISTRY
)
NOT_ASKING = Gauge(
    "geo_assets_lane_not_asking_seconds",
    "Since when it has asked for no records, as it has enough in hand; 0: it asks.",
    registry=REGISTRY,
)
PAUSED = Gauge("geo_assets_lane_paused_partitions", "Partitions of the hints that are paused.", registry=REGISTRY)
OUTAGES_SEEN = Counter("geo_assets_lane_outages_total", "Turns given up as a port was away.", registry=REGISTRY)
STAGES = StageHistograms(REGISTRY)
REGISTRY.register(SPANS)
