"""A broker of its own that is killed under load: one test, as each costs a start and a recovery."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from geo_assets_tests.needs import missing
from geo_assets_tests.resources.contract_event_log import read_all
from geo_assets_tests.resources.log_processes import after
from resources.event_log.kafka import KafkaEventLog
from resources.event_log.kafka_options import KafkaOptions
from resources.event_log.protocol import LogUnavailable, NewRecord, Position, TopicSpec
from scripts.local_services.faults import MissingProgram
from scripts.local_services.services import Services


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Services]:
    services = Services(tmp_path / "services")
    try:
        services.start("kafka")
    except MissingProgram as fault:
        missing(str(fault))
    yield services
    services.remove("kafka")


@pytest.mark.service("kafka")
def test_rule_2_a_broker_killed_under_load_loses_nothing_acknowledged_and_needs_no_hand(broker: Services) -> None:
    options = KafkaOptions(broker.settings()["GEO_ASSETS_KAFKA_SERVERS"], request_timeout_s=4.0)
    log = KafkaEventLog(options)
    log.ensure_topics([TopicSpec("t")])
    # The first question of all about a group, while its coordinator is only being made.
    assert log.committed("g", "t") == {}

    stop = threading.Event()
    lock = threading.Lock()
    acknowledged: dict[Position, bytes] = {}
    refused: list[LogUnavailable] = []
    polled: set[tuple[int, int]] = set()
    faults: list[BaseException] = []

    def append(name: int) -> None:
        n = 0
        while not stop.is_set():
            n += 1
            value = f"{name} {n}".encode()
            try:
                (position,) = log.append([NewRecord("t", f"k{name}", value)])
            except LogUnavailable as error:
                refused.append(error)
                continue
            with lock:
                acknowledged[position] = value

    def consume() -> None:
        consumer = log.consumer("g", ["t"])
        while not (stop.is_set() and len(polled) >= len(acknowledged)) and time.monotonic() < deadline:
            try:
                records = consumer.poll(timeout_s=0.5)
                consumer.commit(after(records))
            except LogUnavailable:
                consumer.seek_to_committed()
                continue
            polled.update((r.partition, r.offset) for r in records)
        consumer.close()

    def look() -> None:
        while not stop.is_set():
            try:
                for partition, extent in log.extents("t").items():
                    log.read("t", partition, extent.begin, max_records=10)
            except LogUnavailable:
                pass
            stop.wait(0.5)

    def guarded(work: Any, *args: Any) -> None:
        try:
            work(*args)
        except BaseException as fault:
            faults.append(fault)

    deadline = time.monotonic() + 150
    threads = [threading.Thread(target=guarded, args=(append, name)) for name in range(4)]
    threads += [threading.Thread(target=guarded, args=(work,)) for work in (consume, look)]
    for thread in threads:
        thread.start()
    while len(polled) < 100 and time.monotonic() < deadline:
        time.sleep(0.05)

    broker.kill("kafka")
    time.sleep(1.0)
    began = time.monotonic()
    broker.start("kafka")
    before = len(acknowledged)
    while len(acknowledged) < before + 200 and time.monotonic() < deadline:
        time.sleep(0.05)
    recovery_s = time.monotonic() - began
    stop.set()
    for thread in threads:
        thread.join(60)

    assert faults == []
    assert len(acknowledged) >= before + 200
    assert recovery_s < 60
    found = {Position(r.partition, r.offset): r.value for r in read_all(log, "t")}
    assert acknowledged.items() <= found.items()
    # What was refused may stand there too, but nothing stands there twice.
    assert len(set(found.values())) == len(found)
    assert {tuple(position) for position in acknowledged} <= polled
    assert sum(log.committed("g", "t").values()) >= len(acknowledged)
    for error in refused:
        assert "GEO_ASSETS_KAFKA_SERVERS" in str(error)
    log.close()
