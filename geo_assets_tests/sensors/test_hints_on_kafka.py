"""The sensor's reading of `[tiles]` from both logs, and what it does when retention was faster."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from geo_assets.events import topics
from geo_assets.ports import topic_specs
from geo_assets.services.lost_records import RecordsLost, losses_of
from geo_assets.tiles.tile import Tile
from geo_assets_tests.dagster_world import World, world
from geo_assets_tests.resources.kafka_harness import add_partitions, expire, own_topics
from geo_assets_tests.waiting import patient, until
from resources.event_log.kafka import KafkaEventLog
from resources.event_log.kafka_options import KafkaOptions
from resources.event_log.protocol import NewRecord
from sensors import tile_updates as sensor
from sensors.tile_updates import tick

HOME = Tile(14, 9_327, 4_741)


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.service("kafka"))])
def here(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with world(tmp_path, monkeypatch, offset_out_of_range="stop") as made:
        if request.param == "embedded":
            yield made
            return
        with own_topics() as options:
            on_kafka(made, options)
            yield made


def on_kafka(here: World, options: KafkaOptions) -> None:
    """The same world with its log on Kafka."""
    here.stack.log.close()
    here.stack.log = KafkaEventLog(options)
    here.stack.log.ensure_topics(topic_specs(here.stack.settings))


def lose_hints(here: World) -> None:
    here.hint(*[HOME.key] * 3)
    tick(here.stack, here.instance)
    here.hint(*[HOME.key] * 4)
    log = here.stack.log
    if isinstance(log, KafkaEventLog):
        expire(log, topics.TILES)
    else:
        log.enforce_retention(now_ms=2**50)
    here.hint(HOME.key)


def test_told_to_stop_the_tick_fails_with_a_line_and_moves_nothing(here: World) -> None:
    lose_hints(here)
    topic_id = here.stack.log.topic_id(topics.TILES)
    before = here.ledger.positions(topic_id)
    for _ in range(2):
        with pytest.raises(RecordsLost) as raised:
            tick(here.stack, here.instance)
    line = str(raised.value)
    for part in ("4 records of tiles/", "position", "oldest", "newest", "GEO_ASSETS_OFFSET_OUT_OF_RANGE=reset"):
        assert part in line
    assert "\n" not in line
    assert here.ledger.positions(topic_id) == before
    assert here.ledger.get_value(sensor.REPAIR_VALUE) is None


def test_told_to_go_on_the_tick_asks_for_a_repair_and_status_keeps_showing_the_loss(here: World) -> None:
    lose_hints(here)
    here.stack.settings = here.stack.settings.model_copy(update={"offset_out_of_range": "reset"})
    done = tick(here.stack, here.instance)
    assert "repair_coverage" in [request.job_name for request in done.requests]
    assert (losses_of(here.ledger)["tiles"].records, done.read) == (4, 1)


@pytest.mark.service("kafka")
def test_a_tick_reads_and_marks_ten_thousand_records_of_kafka_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world(tmp_path, monkeypatch) as here, own_topics() as options:
        on_kafka(here, options)
        keys = [Tile(14, HOME.x + n % 50, HOME.y + n // 50 % 40).key for n in range(10_000)]
        here.stack.log.append([NewRecord(topics.TILES, key, None) for key in keys])
        began = time.monotonic()
        done = sensor.Tick()
        sensor._mark(here.stack, int(time.time() * 1000), done)
        seconds = time.monotonic() - began
        assert (done.read, done.marked, len(here.ledger.dirty(5_000))) == (10_000, 10_000, 2_000)
        assert seconds < patient(20)
        assert here.stack.log.committed(sensor.GROUP, topics.TILES) == done.positions[topics.TILES]


@pytest.mark.service("kafka")
def test_a_partition_that_was_added_to_the_topic_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with world(tmp_path, monkeypatch) as here, own_topics() as options:
        on_kafka(here, options)
        here.hint(HOME.key)
        tick(here.stack, here.instance)
        count = here.stack.log.topics()[topics.TILES].partitions
        add_partitions(options, topics.TILES, count + 1)
        until(lambda: count in here.stack.log.extents(topics.TILES), why="the partition is seen", every=0.2)
        here.stack.log.append([NewRecord(topics.TILES, Tile(14, 1, 1).key, None, partition=count)])
        done = tick(here.stack, here.instance)
        assert (done.read, done.positions[topics.TILES][count]) == (1, 1)
