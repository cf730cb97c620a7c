"""The tile server's figures for Prometheus, in a registry of their own: two apps in one process do not mix."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from geo_assets.services.edit_stages import StageHistograms
from resources.ledger.protocol import LedgerError

if TYPE_CHECKING:
    from resources.ledger.protocol import Ledger

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus text format, which every scraper reads."""


class Metrics:
    """Counters of one app.

    Args:
        ledger: Its totals are read at each scrape.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "tileserver_requests_total", "Requests by kind and status.", ("kind", "status"), registry=self.registry
        )
        self.seconds = Histogram(
            "tileserver_request_seconds",
            "Time to the whole answer, streams left out.",
            ("kind",),
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0),
            registry=self.registry,
        )
        self.tile_bytes = Counter("tileserver_tile_bytes_total", "Bytes of tile bodies sent.", registry=self.registry)
        self.cache = Counter(
            "tileserver_cache_total", "Look-ups of tile objects by result.", ("result",), registry=self.registry
        )
        self.cache_bytes = Gauge("tileserver_cache_bytes", "Bytes that the object cache holds.", registry=self.registry)
        self.integrity = Counter(
            "tileserver_integrity_faults_total",
            "Objects of a current revision that were `missing` or `damaged`.",
            ("fault",),
            registry=self.registry,
        )
        for fault in ("missing", "damaged"):
            self.integrity.labels(fault)
        self.clients = Gauge("tileserver_sse_clients", "Open change streams.", registry=self.registry)
        self.events = Counter("tileserver_sse_events_total", "Changes put into streams.", registry=self.registry)
        self.suppressed = Counter(
            "tileserver_sse_suppressed_total",
            "Announcements of a revision that was told before.",
            registry=self.registry,
        )
        self.unreadable = Counter(
            "tileserver_sse_unreadable_total", "Announcements that could not be read.", registry=self.registry
        )
        self.drops = Counter(
            "tileserver_sse_drops_total", "Streams ended because the client was slow.", registry=self.registry
        )
        self.resets = Counter(
            "tileserver_sse_resets_total", "Resets sent, by cause.", ("cause",), registry=self.registry
        )
        self.replayed = Counter(
            "tileserver_sse_replayed_total", "Records read again for clients that resume.", registry=self.registry
        )
        self.lag = Histogram(
            "tileserver_sse_lag_seconds",
            "From the append of an announcement to the streams.",
            buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0, 10.0),
            registry=self.registry,
        )
        self.stages = StageHistograms(self.registry)
        self.live_clients = Gauge("tileserver_live_clients", "Open live streams.", registry=self.registry)
        self.live_coalesced = Counter(
            "tileserver_live_coalesced_total",
            "Rounds in which a client was still busy with the one before, and waits for the newest.",
            registry=self.registry,
        )
        self.live_skipped = Counter(
            "tileserver_live_skipped_total",
            "Records of `positions` or `triggers` that the live stream passed over: more than it shows.",
            ("topic",),
            registry=self.registry,
        )
        self.fences_saved = Counter(
            "tileserver_fences_saved_total", "Fences drawn on the page, by outcome.", ("outcome",),
            registry=self.registry,
        )  # fmt: skip
        self.log_faults = Counter(
            "tileserver_log_faults_total", "Reads of the log that failed.", registry=self.registry
        )
        self.registry.register(_LedgerTotals(ledger))

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format. Reads the ledger: call it off the event loop."""
        return generate_latest(self.registry)


class _LedgerTotals(Collector):
    """What the ledger holds, read when scraped and kept for a moment, so that scrapers cannot load it."""

    KEEP_S = 2.0

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._kept: list[Metric] = []
        self._until = 0.0

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        now = time.monotonic()
        if now >= self._until:
            try:
                self._kept = self._read()
            except LedgerError as error:
                structlog.get_logger().warning("ledger totals not readable", error=str(error))
                self._kept = []
            self._until = now + self.KEEP_S
        return self._kept

    def _read(self) -> list[Metric]:
        counts = self._ledger.counts()
        tiles = GaugeMetricFamily("ledger_tiles", "Tiles in the ledger.", value=counts.tiles)
        published = GaugeMetricFamily("ledger_published_tiles", "Tiles that have an object, by zoom.", labels=["zoom"])
        for zoom, number in sorted(counts.by_zoom.items()):
            published.add_metric([str(zoom)], number)
        dirty = GaugeMetricFamily(
            "ledger_dirty_tiles", "Tiles that somebody wants looked at, by kind of mark.", labels=["kind"]
        )
        dirty.add_metric(["live"], counts.dirty_live)
        dirty.add_metric(["backfill"], counts.dirty_backfill)
        given_up = GaugeMetricFamily(
            "ledger_given_up_tiles", "Tiles whose builds failed too often.", value=counts.given_up
        )
        owed = GaugeMetricFamily("ledger_owed", "Duties of commits not paid yet.", labels=["duty"])
        for duty, number in sorted(counts.owed.items()):
            owed.add_metric([duty], number)
        age = max(0.0, time.time() - counts.oldest_dirty_ms / 1000) if counts.oldest_dirty_ms else 0.0
        oldest = GaugeMetricFamily("ledger_oldest_dirty_seconds", "How long the longest-waiting tile waits.", value=age)
        size = GaugeMetricFamily("ledger_bytes", "Uncompressed bytes of all published tiles.", value=counts.bytes)
        return [tiles, published, dirty, given_up, owed, oldest, size]
