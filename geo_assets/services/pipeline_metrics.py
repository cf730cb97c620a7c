"""What the pipeline as a whole is behind with, for Prometheus: lag, dirty tiles, dead letters, what is owed, alerts.

Read in a thread every ten seconds and told as it was found then: a scrape waits for no port, and no scraper loads one.
docs/alerts.md lists the rules that go by these.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from geo_assets.services import alerting, currency, dead_letter_counts

if TYPE_CHECKING:
    from geo_assets.stack import Stack

log = structlog.get_logger()

EVERY_S = 10.0
"""How often the ports are read."""

COUNT_EVERY_S = 60.0
"""How often the feature store is: counting its layers takes a while."""

STALE_S = 60.0
"""After so long without an answer the figures of a port are not told any more."""

PREFIX_LENGTH = 3
"""Of the quadkey prefixes of `partition_lag`: 64 at each zoom at most."""

_DUTIES = ("purge", "purge_again", "announce", "catalog")


class PipelineMetrics(threading.Thread, Collector):
    """The figures of one process: a thread that reads, and a collector that tells.

    Args:
        open_stack: Opens ports of its own.
        every_s: Between two readings.
    """

    def __init__(self, open_stack: Callable[[], Stack], every_s: float = EVERY_S) -> None:
        super().__init__(daemon=True, name="pipeline-metrics")
        self._open, self._every_s = open_stack, every_s
        self._stop_asked = threading.Event()
        self._found: dict[str, tuple[float, list[Metric]]] = {}
        self._up: dict[str, bool] = {}

    def stop(self) -> None:
        """Ask it to end and wait for the reading under way."""
        self._stop_asked.set()
        if self.is_alive():
            self.join(timeout=10)

    def run(self) -> None:
        """Read until asked to stop."""
        counted = -COUNT_EVERY_S
        with self._open() as stack:
            while True:
                self.look(stack)
                if time.monotonic() - counted >= COUNT_EVERY_S:
                    self.count(stack)
                    counted = time.monotonic()
                if self._stop_asked.wait(self._every_s):
                    return

    def look(self, stack: Stack) -> None:
        """Read the log, the ledger and what is counted from both. One that is away costs its own figures alone."""
        self._try("ledger", lambda: list(of_ledger(stack)))
        self._try("log", lambda: list(of_log(stack)))
        self._try("dead letters", lambda: list(of_dead_letters(stack)))
        self._try("alerts", lambda: list(of_alerts(stack)))

    def count(self, stack: Stack) -> None:
        """Read what the feature store has to count for."""
        self._try("features", lambda: list(of_features(stack)))
        self._try("tilesets", lambda: list(of_tilesets(stack)))

    def _try(self, name: str, read: Callable[[], list[Metric]]) -> None:
        try:
            self._found[name] = (time.monotonic(), read())
            self._up[name] = True
        except Exception as fault:
            if self._up.get(name, True):
                log.warning("figures not readable", of=name, error=f"{type(fault).__name__}: {fault}")
            self._up[name] = False

    def describe(self) -> Iterator[Metric]:
        """Nothing beforehand: what there is depends on what can be read."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The figures as they were found last, and which could be read."""
        readable = GaugeMetricFamily("pipeline_readable", "Whether these figures can be read now.", labels=["figures"])
        for name, up in list(self._up.items()):
            readable.add_metric([name.replace(" ", "_")], float(up))
        yield readable
        oldest = time.monotonic() - STALE_S - COUNT_EVERY_S
        for at, metrics in list(self._found.values()):
            if at >= oldest:
                yield from metrics


def _gauge(name: str, meaning: str, values: Mapping[tuple[str, ...], float], *labels: str) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, meaning, labels=list(labels))
    for names, value in values.items():
        family.add_metric(list(names), value)
    return family


def _age_s(since_ms: int, now_s: float) -> float:
    return max(0.0, now_s - since_ms / 1000) if since_ms else 0.0


def of_ledger(stack: Stack) -> Iterator[Metric]:
    """Dirty tiles, by zoom and region and in all, and what commits owe."""
    now_s = time.time()
    lags = stack.ledger.lag(PREFIX_LENGTH)
    yield _gauge(
        "partition_lag", "Dirty tiles by zoom and quadkey prefix.",
        {(str(lag.zoom), lag.prefix): lag.tiles for lag in lags}, "zoom", "quadkey_prefix",
    )  # fmt: skip
    counts = stack.ledger.counts()
    yield _gauge(
        "dirty_tiles", "Tiles that somebody wants looked at, by kind of mark.",
        {("live",): counts.dirty_live, ("backfill",): counts.dirty_backfill}, "kind",
    )  # fmt: skip
    yield GaugeMetricFamily(
        "oldest_dirty_seconds", "How long the longest-waiting tile waits.", value=_age_s(counts.oldest_dirty_ms, now_s)
    )
    # A backfill may take hours, and nobody waits for it as for an edit.
    live = stack.ledger.dirty(1, kind="live", unleased=False)
    yield GaugeMetricFamily(
        "oldest_live_dirty_seconds", "How long the edit waits that has waited longest for its tile.",
        value=_age_s(live[0].dirty_since_ms, now_s) if live else 0.0,
    )  # fmt: skip
    yield GaugeMetricFamily("given_up_tiles", "Tiles whose builds failed too often.", value=counts.given_up)
    ages: dict[tuple[str, ...], float] = {}
    for duty in _DUTIES:
        oldest = stack.ledger.owed(duty, 1)
        ages[duty,] = _age_s(oldest[0].built_at_ms, now_s) if oldest else 0.0
    yield _gauge("outbox_oldest_seconds", "Age of the oldest duty of a commit that is not paid.", ages, "duty")


def of_log(stack: Stack) -> Iterator[Metric]:
    """How far the readers of the log are behind, in records and in seconds."""
    now_ms = time.time_ns() // 1_000_000
    readers = currency.readers(stack)
    records = {(one.topic,): float(one.records) for one in readers}
    seconds = {(one.topic,): one.age_s(now_ms) for one in readers}
    yield _gauge("log_lag_records", "Records that a topic's reader has not worked off.", records, "topic")
    yield _gauge("log_lag_seconds", "Age of the oldest of them.", seconds, "topic")
    yield GaugeMetricFamily(
        "log_retention_seconds", "How long the log keeps a record.", value=stack.settings.retention_s
    )


def of_dead_letters(stack: Stack) -> Iterator[Metric]:
    """Dead letters by reason; counted here where nobody else has yet."""
    counts = dead_letter_counts.advance(stack, time.time_ns() // 1_000_000)
    # Not before all are counted: what was there at the start is no rate.
    if counts.behind:
        return
    family = CounterMetricFamily("dead_letters", "Dead letters by reason, ever.", labels=["reason"])
    for reason in dead_letter_counts.REASONS:
        family.add_metric([reason], counts.reasons.get(reason, 0))
    yield family
    yield CounterMetricFamily("dead_letters_replayed", "Dead letters sent again, ever.", value=counts.replayed)


def of_alerts(stack: Stack) -> Iterator[Metric]:
    """What stands, and which channel has not taken its message."""
    state = alerting.State.from_json(stack.ledger.get_value(alerting.VALUE))
    firing: dict[tuple[str, ...], float] = {("error",): 0, ("warning",): 0}
    for condition in state.firing.values():
        firing[condition.alert.severity,] += 1
    yield _gauge("alerts_firing", "Checks that fail, by region, and jobs whose runs fail.", firing, "severity")
    now_s = time.time()
    waits = {
        (name,): _age_s(channel.sending.at_ms, now_s) if channel.sending else 0.0
        for name, channel in state.channels.items()
    }
    yield _gauge("alerts_undelivered_seconds", "Since when a channel has not taken its message.", waits, "channel")


def of_features(stack: Stack) -> Iterator[Metric]:
    """How current the sources are, and what ingest still owes the log."""
    counts = stack.features.counts()
    now_s = time.time()
    times = {"all": counts.watermark_ms, **{name: one.watermark_ms for name, one in counts.sources.items()}}
    yield _gauge(
        "watermark_seconds", "How long ago the newest thing applied happened, by source and of all.",
        {(name,): _age_s(ms, now_s) for name, ms in times.items() if ms}, "source",
    )  # fmt: skip
    yield _gauge(
        "source_silent_seconds", "How long ago something new of a source came in.",
        {(name,): _age_s(one.received_ms, now_s) for name, one in counts.sources.items() if one.received_ms}, "source",
    )  # fmt: skip
    yield GaugeMetricFamily("features_outbox_rows", "Hints not sent to the log yet.", value=counts.outbox)


def of_tilesets(stack: Stack) -> Iterator[Metric]:
    """How current the published tilesets are."""
    found = currency.tilesets(stack)
    now_s = time.time()
    yield _gauge(
        "tileset_published_seconds", "How long ago the version in force was published.",
        {(one.name,): _age_s(one.published_ms, now_s) for one in found}, "tileset",
    )  # fmt: skip
    yield _gauge(
        "tileset_behind_seconds", "From the watermark of the version in force to the newest thing applied since.",
        {(one.name,): one.behind_s for one in found if one.behind_s is not None}, "tileset",
    )  # fmt: skip
