"""The router and a broker of its own that is killed and started again: one broker, as each costs many seconds.

What it is to show: within the breaker's threshold outside callers' triggers go to disk and nothing blocks; when the
broker is back exactly one probe closes the breaker; the spool drains in order; what is replayed is not told twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from geo_assets.flow.breaker import Breaker, BreakerState
from geo_assets.services.router import Router, RouterOptions
from geo_assets_tests.resources.contract_event_log import read_all
from geo_assets_tests.resources.kafka_broker import GuardedKafka, started
from geo_assets_tests.services.test_router import TOPIC, by_device, of, told
from geo_assets_tests.waiting import patient, until
from resources.event_log.kafka import KafkaEventLog
from resources.event_log.kafka_options import KafkaOptions
from resources.event_log.protocol import TopicSpec

pytestmark = pytest.mark.service("kafka")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedKafka]:
    broker = started(tmp_path_factory.mktemp("broker") / "kafka")
    yield broker
    broker.remove()


def under_way(router: Router) -> int:
    """Triggers sent and not acknowledged, as its gauge tells it."""
    return int(router.metrics.registry.get_sample_value("geofence_router_under_way") or 0)


@pytest.mark.parametrize("delivery_timeout_s", [60.0, 3.0], ids=["what is under way waits", "deliveries fail"])
def test_rule_2_a_broker_killed_under_load_loses_nothing_and_keeps_each_device_in_order(
    broker: GuardedKafka, tmp_path: Path, delivery_timeout_s: float
) -> None:
    options = KafkaOptions(
        broker.setting("GEO_ASSETS_KAFKA_SERVERS"),
        topic_prefix=f"{delivery_timeout_s:g}.",
        delivery_timeout_s=delivery_timeout_s,
        request_timeout_s=4.0,
    )
    log = KafkaEventLog(options)
    log.ensure_topics([TopicSpec("triggers", partitions=4)])
    router = Router(
        log, 1, RouterOptions(spool_folder=tmp_path / "spool", open_s=1.0), dead_letters=lambda letters: None
    )
    states: list[BreakerState] = []
    router.breaker = Breaker(router.options.failures, router.options.open_s, changed=states.append)
    router.start()
    stop, longest, slowest, faults = threading.Event(), [0.0], [0.0], list[BaseException]()
    outside = [f"outside-{n}" for n in range(20)]
    pulled = [f"pulled-{n}" for n in range(20)]
    counts = {"outside": 0, "pulled": 0}

    def submit() -> None:
        try:
            while not stop.wait(0.005):
                before = time.monotonic()
                router.submit(of(outside, [counts["outside"] + 1]))
                counts["outside"] += 1
                longest[0] = max(longest[0], time.monotonic() - before)
        except BaseException as fault:
            faults.append(fault)

    def pull() -> None:
        try:
            while not stop.is_set():
                if router.ready(0.05):
                    router.route(of(pulled, [counts["pulled"] + 1]))
                    counts["pulled"] += 1
                    time.sleep(0.005)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=submit), threading.Thread(target=pull)]
    for thread in threads:
        thread.start()
    # Not while it rests after a stall of this machine: of what was pulled, something is to be under way.
    until(lambda: router.counts["routed"] > 2_000 and router.breaker.closed and router.in_flight > 0, every=0.001)

    killed = time.monotonic()
    broker.kill()
    until(lambda: not router.breaker.closed)
    # Twenty failures of 25 ms; the rest is the kill, and the machine's other work.
    assert time.monotonic() - killed < patient(20)
    pulled_then = counts["pulled"]
    for sequence in range(1, 21):
        receipt = router.submit(of(["outside-main"], [sequence]))
        began = time.monotonic()
        assert router.wait(receipt, patient(30))
        slowest[0] = max(slowest[0], time.monotonic() - began)
    # On disk, with fsync, while nothing answers.
    assert slowest[0] < patient(10)
    until(lambda: router.counts["spooled"] > 500)
    if delivery_timeout_s < 5:
        # What was pulled and under way fails, and goes again. None was where the machine stalled just before the kill,
        # and the breaker was open already: what counts is that all of it is told at the end.
        until(lambda: router.counts["again"] > 0 or not under_way(router), why="deliveries fail")
    else:
        time.sleep(0.5)
    assert counts["pulled"] <= pulled_then + 1
    broker.start({})
    until(lambda: router.breaker.closed)
    routed = router.counts["routed"]
    until(lambda: router.counts["drained"] > 0 and router.counts["routed"] > routed + 500)
    stop.set()
    for thread in threads:
        thread.join(patient(30))
    assert faults == []
    # A submit takes a lock and appends to a queue: what is more is the machine's other work.
    assert longest[0] < patient(5)
    assert router.settle(patient(60))
    until(lambda: router.held == 0 and router.spool is not None and not router.spool.waiting)
    found = told(log)
    expected = {device: list(range(1, counts["outside"] + 1)) for device in outside}
    expected |= {device: list(range(1, counts["pulled"] + 1)) for device in pulled}
    expected["outside-main"] = list(range(1, 21))
    assert by_device(found) == expected
    if delivery_timeout_s > 5:
        assert len(found) == 20 * (counts["outside"] + counts["pulled"] + 1)
    # One mark in each of the four partitions at the start, and one probe for each time that the breaker closed: once,
    # unless the machine was too busy for the ceiling. A probe follows each pause, and never two at a time.
    assert states.count("closed") >= 1
    assert sum(record.key is None for record in read_all(log, TOPIC)) == 4 + states.count("closed")
    assert states[0] == "open"
    assert {(a, b) for a, b in pairwise(states)} <= {
        ("open", "half-open"), ("half-open", "open"), ("half-open", "closed"), ("closed", "open")
    }  # fmt: skip
    assert router.close()

    # What comes again, as after a kill, is known by the tail and fires nothing.
    again = Router(log, 2, RouterOptions(spool_folder=tmp_path / "spool"), dead_letters=lambda letters: None)
    again.start(thread=False)
    again.route(found)
    assert again.settle(patient(60))
    assert (again.counts["routed"], again.counts["deduped"]) == (0, len(found))
    assert again.close()
    assert len(told(log)) == len(found)
    log.close()
