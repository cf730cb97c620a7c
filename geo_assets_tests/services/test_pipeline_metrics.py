"""What the pipeline is behind with, as Prometheus reads it; a port that is away costs its own figures alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from geo_assets.events import topics
from geo_assets.services.alerting import VALUE, Channel, Condition, State
from geo_assets.services.pipeline_metrics import PipelineMetrics
from geo_assets.stack import Stack
from geo_assets_tests.waiting import until
from geo_assets_tests.world import World, feature
from resources.alerts.protocol import Alert, Message
from resources.event_log.protocol import LogUnavailable


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "home")
    yield made
    made.close()


def figures(metrics: PipelineMetrics) -> dict[tuple[str, ...], float]:
    """Name and label values -> value, as a scraper reads them."""
    registry = CollectorRegistry()
    registry.register(metrics)
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def test_it_says_what_is_dirty_by_zoom_and_region_and_since_when(world: World) -> None:
    world.edit(feature(1, 1), event_id="a")
    world.mark_hints()
    metrics = PipelineMetrics(lambda: Stack(world.settings))
    metrics.look(world.stack)
    found = figures(metrics)
    dirty = world.stack.ledger.counts().dirty_live
    assert found["dirty_tiles", "live"] == dirty > 0
    assert sum(value for key, value in found.items() if key[0] == "partition_lag") == dirty
    assert {key[1][:2] for key in found if key[0] == "partition_lag" and key[2] == "14"} == {"12"}
    assert 0 < found["oldest_dirty_seconds",] < 60


def test_it_says_how_far_each_reader_is_behind_and_what_died(world: World) -> None:
    world.edit(b"{not json", event_id="a")
    world.edit(feature(1, 1), event_id="b")
    world.build_dirty()
    metrics = PipelineMetrics(lambda: Stack(world.settings))
    metrics.look(world.stack)
    found = figures(metrics)
    # Nobody committed for the group of ingest here.
    assert found["log_lag_records", topics.RAW] == 2
    assert 0 < found["log_lag_seconds", topics.RAW] < 60
    assert found["log_lag_records", topics.TILES] == found["log_lag_seconds", topics.TILES] == 0
    assert found["log_retention_seconds",] == world.settings.retention_s
    assert found["dead_letters_total", "schema"] == 1
    assert found["dead_letters_total", "timeout"] == 0
    # Only a process with dagster pays what the catalog is owed.
    assert found["outbox_oldest_seconds", "catalog"] > 0
    assert found["outbox_oldest_seconds", "announce"] == 0


def test_it_says_which_alerts_stand_and_which_channel_takes_none(world: World) -> None:
    alert = Alert("k", "firing", "error", "check", "tiles/crs", "x")
    sending = Message("alert_1", time.time_ns() // 1_000_000 - 60_000, (alert,))
    state = State(firing={"k": Condition(alert, "d")}, channels={"hook": Channel(sending=sending)})
    world.stack.ledger.set_value(VALUE, state.to_json())
    metrics = PipelineMetrics(lambda: Stack(world.settings))
    metrics.look(world.stack)
    found = figures(metrics)
    assert (found["alerts_firing", "error"], found["alerts_firing", "warning"]) == (1, 0)
    assert 59 < found["alerts_undelivered_seconds", "hook"] < 120


def test_a_log_that_is_away_costs_its_own_figures_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise LogUnavailable("the log is away")

    monkeypatch.setattr(type(world.stack.log), "extents", away)
    metrics = PipelineMetrics(lambda: Stack(world.settings))
    metrics.look(world.stack)
    found = figures(metrics)
    assert found["pipeline_readable", "ledger"] == 1
    assert found["pipeline_readable", "log"] == 0
    assert ("dirty_tiles", "live") in found
    assert not any(key[0].startswith("log_lag") for key in found)


def test_the_thread_reads_by_itself_and_ends(world: World) -> None:
    world.edit(feature(1, 1), event_id="b")
    metrics = PipelineMetrics(lambda: Stack(world.settings), every_s=0.05)
    metrics.start()
    until(lambda: ("watermark_seconds", "all") in figures(metrics), why="it has read", every=0.05)
    metrics.stop()
    assert not metrics.is_alive()
