"""Retention takes records that nobody read: ingest stops, or says so and goes on, on both logs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from geo_assets.cli import explain
from geo_assets.events import topics
from geo_assets.services import ingest as ingest_module
from geo_assets.services.ingest import Ingest
from geo_assets.services.lost_records import LOSSES_VALUE, Loss, RecordsLost, losses_of, remember_loss
from geo_assets.services.status import snapshot
from geo_assets_tests.resources.kafka_harness import own_topics
from geo_assets_tests.waiting import patient
from geo_assets_tests.world import World, feature
from resources.event_log.protocol import OffsetOutOfRange
from resources.ledger.sqlite import SqliteLedger

MakeWorld = Callable[..., World]


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.service("kafka"))])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeWorld]:
    """Worlds over one home and one log, as the same process is started anew with other settings."""
    worlds: list[World] = []

    def made(**changes: Any) -> World:
        worlds.append(World(tmp_path, **where, log_partitions=1, **changes))
        return worlds[-1]

    if request.param == "embedded":
        where: dict[str, Any] = {}
        yield made
    else:
        with own_topics() as options:
            where = {"kafka_servers": options.servers, "kafka_topic_prefix": options.topic_prefix}
            yield made
    for world in worlds:
        world.close()


def lose(world: World) -> None:
    """Three records read, four lost, one there."""
    ingest = Ingest(world.stack)
    for number in range(3):
        world.send(feature(number), event_id=f"read{number}")
    done, deadline = 0, time.monotonic() + patient(60)
    while done < 3 and time.monotonic() < deadline:
        done += ingest.run_once(timeout_s=2.0)
    ingest.close()
    for number in range(4):
        world.send(feature(10 + number), event_id=f"lost{number}")
    world.retention_takes(topics.RAW)
    world.send(feature(100), event_id="new")


def ids(world: World) -> list[int]:
    return sorted(int(one.feature_id) for one in world.stack.features.scan())


def test_rule_1_told_to_stop_ingest_ends_with_a_line_and_moves_nothing_until_it_is_told_to_go_on(
    make: MakeWorld,
) -> None:
    world = make(offset_out_of_range="stop")
    lose(world)
    for _ in range(2):
        ingest = Ingest(world.stack)
        with pytest.raises(RecordsLost) as raised:
            ingest.run(threading.Event())
        ingest.close()
    line = explain(raised.value)
    for part in ("4 records of raw/0", "position 3", "oldest 7", "newest 8", "GEO_ASSETS_OFFSET_OUT_OF_RANGE=reset"):
        assert part in line
    assert world.stack.log.committed(topics.INGEST_GROUP, topics.RAW) == {0: 3}
    assert losses_of(world.stack.ledger) == {}
    assert ids(world) == [0, 1, 2]

    ingest = Ingest(make(offset_out_of_range="reset").stack)
    assert ingest.run_once(timeout_s=patient(30)) == 1
    ingest.close()
    assert ids(world) == [0, 1, 2, 100]


def test_rule_1_told_to_go_on_ingest_counts_what_was_lost_and_status_keeps_showing_it(make: MakeWorld) -> None:
    world = make(offset_out_of_range="reset")
    lose(world)
    before = ingest_module.LOST._value.get()
    ingest = Ingest(world.stack)
    # As `geo-assets ingest --once` does it: what is left is worked off all the same.
    assert ingest.run_once(timeout_s=patient(30)) == 1
    ingest.close()
    assert ids(world) == [0, 1, 2, 100]
    assert ingest_module.LOST._value.get() == before + 4
    lost = snapshot(world.stack)["lost"]["raw"]
    assert (lost["records"], lost["times"], lost["partition"], lost["position"], lost["oldest"]) == (4, 1, 0, 3, 7)
    assert lost["at"]
    assert world.stack.log.committed(topics.INGEST_GROUP, topics.RAW) == {0: 8}


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[SqliteLedger]:
    ledger = SqliteLedger(tmp_path / "ledger.db")
    yield ledger
    ledger.close()


def test_losses_add_up_by_topic_and_the_same_one_told_again_counts_once(ledger: SqliteLedger) -> None:
    first = OffsetOutOfRange("raw", 0, 3, 7, 8)
    remember_loss(ledger, first, 1)
    remember_loss(ledger, first, 2)
    remember_loss(ledger, OffsetOutOfRange("raw", 1, 0, 10, 10), 3)
    remember_loss(ledger, OffsetOutOfRange("tiles", 0, 0, 5, 9), 4)
    assert losses_of(ledger) == {"raw": Loss(14, 2, 3, 1, 0, 10, 10), "tiles": Loss(5, 1, 4, 0, 0, 5, 9)}


def test_a_position_beyond_the_end_is_told_and_no_number_is_made_up(ledger: SqliteLedger) -> None:
    remember_loss(ledger, OffsetOutOfRange("raw", 0, 50, 0, 20), 1)
    assert losses_of(ledger)["raw"].records == 0


def test_a_note_that_cannot_be_read_is_begun_anew(ledger: SqliteLedger) -> None:
    ledger.set_value(LOSSES_VALUE, '{"raw": {"colour": 1}}')
    remember_loss(ledger, OffsetOutOfRange("raw", 0, 3, 7, 8), 1)
    assert losses_of(ledger)["raw"].records == 4
