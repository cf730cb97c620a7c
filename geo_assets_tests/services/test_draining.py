"""Services as real processes that are asked to end in the middle of their work."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from geo_assets.events import topics
from geo_assets.events.signature import sign
from geo_assets.services import metrics_port
from geo_assets.services.draining import TOO_LATE, Drain
from geo_assets.services.lane import health
from geo_assets.services.metrics_port import Readiness, serve_metrics
from geo_assets.services.pool import WorkerPool, WorkersUnavailable
from geo_assets.services.routing_lease import NAME as ROUTING
from geo_assets_tests.running_platform import free_ports
from geo_assets_tests.services.one_service import Service, service
from geo_assets_tests.stacks import STACKS, environment_of, fields_of
from geo_assets_tests.waiting import patient, until
from geo_assets_tests.world import HERE, World, feature, work_off
from resources.event_log.protocol import NewRecord

pytestmark = pytest.mark.timeout(600)

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@pytest.fixture(params=STACKS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[World, dict[str, str]]]:
    """A map, and the environment of services of it."""
    from geo_assets.services.migrating import migrate_all
    from geo_assets.settings import Settings

    with environment_of(request.param) as environment:
        if environment:
            migrate_all(Settings(**fields_of(environment)))
        one = World(tmp_path / "home", **fields_of(environment))
        try:
            yield one, environment
        finally:
            one.close()


def members(world: World, group: str) -> int:
    """Members that a broker knows in a group; 0 on the embedded log, which has no groups to leave."""
    if world.settings.kafka_servers is None:
        return 0
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": world.settings.kafka_servers})
    asked = admin.describe_consumer_groups([world.settings.kafka_topic_prefix + group])
    return sum(len(future.result().members) for future in asked.values())


def beats(world: World) -> dict[str, health.Beat]:
    return health.read_beats(world.stack.ledger.get_value(health.VALUE))


def signed(number: int) -> tuple[bytes, dict[str, str]]:
    body = json.dumps({**feature(number), "event_id": f"e{number}"}).encode()
    headers = {"content-type": "application/json", "x-source": "city"}
    return body, headers | sign(SECRET, f"m{number}", int(time.time()), body)


class Load(threading.Thread):
    """Sends one request after the other over one connection until the service is not ready, as a balancer would."""

    def __init__(self, send: Callable[[httpx.Client], int], leave: threading.Event) -> None:
        super().__init__(daemon=True)
        self._send, self._leave = send, leave
        self.statuses: list[int | str] = []
        self.start()

    def run(self) -> None:
        with httpx.Client(timeout=patient(60), trust_env=False) as client:
            while not self._leave.is_set():
                time.sleep(0.01)
                try:
                    self.statuses.append(self._send(client))
                except httpx.TransportError as fault:
                    self.statuses.append(f"{type(fault).__name__}: {fault}")


def ready_until(one: Service, leave: threading.Event) -> None:
    """Look at `/readyz` until it says no; then nothing more is sent."""
    until(lambda: one.status("/readyz") == 503, why="it is not ready any more", every=0.05)
    leave.set()


def test_edge_that_ends_refuses_and_loses_no_request(tmp_path: Path) -> None:
    world = World(tmp_path / "home")
    numbers = iter(range(1, 1_000_000))
    lock = threading.Lock()
    one_of_each: set[int] = set()

    with service("edge", world.settings.home, GEO_ASSETS_SHUTDOWN_DELAY_S="1.5") as edge:
        edge.wait_until_ready()

        def post(client: httpx.Client) -> int:
            with lock:
                number = next(numbers)
            body, headers = signed(number)
            status = client.post(f"{edge.url}/v1/features", content=body, headers=headers).status_code
            one_of_each.add(number)
            return status

        began, go_on = threading.Event(), threading.Event()
        slow: list[int] = []

        def upload() -> None:
            body, headers = signed(999_999)

            def halves() -> Iterator[bytes]:
                yield body[:50]
                began.set()
                go_on.wait(patient(60))
                yield body[50:]

            slow.append(
                httpx.post(
                    f"{edge.url}/v1/features", content=halves(), headers=headers, timeout=patient(30)
                ).status_code
            )

        uploading = threading.Thread(target=upload)
        uploading.start()
        leave = threading.Event()
        loads = [Load(post, leave) for _ in range(3)]
        until(
            lambda: all(len(load.statuses) > 5 for load in loads) and began.is_set(),
            why="requests are answered",
            every=0.2,
        )
        edge.end()
        ready_until(edge, leave)
        assert edge.status("/healthz") == 200
        for load in loads:
            load.join(patient(60))
        # Longer than anything is taken: what is under way is waited for.
        time.sleep(1.7)
        go_on.set()
        uploading.join(patient(60))
        assert edge.exit_code() == 0

    answered = [status for load in loads for status in load.statuses]
    assert set(answered) == {202}, answered
    assert slow == [202]
    stored = sum(extent.end - extent.begin for extent in world.stack.log.extents(topics.RAW).values())
    assert stored == len(answered) + 1
    world.close()


def test_tile_server_that_ends_closes_streams_with_a_resume_point_and_refuses_no_request(tmp_path: Path) -> None:
    world = World(tmp_path / "home")
    with service("tiles", world.settings.home, GEO_ASSETS_SHUTDOWN_DELAY_S="1") as tiles:
        tiles.wait_until_ready()
        lines: list[str] = []
        opened, closed = threading.Event(), threading.Event()

        def listen() -> None:
            with httpx.stream("GET", f"{tiles.url}/events", timeout=patient(120), trust_env=False) as stream:
                for line in stream.iter_lines():
                    lines.append(line)
                    opened.set()
            closed.set()

        threading.Thread(target=listen, daemon=True).start()
        assert opened.wait(patient(60))
        leave = threading.Event()
        loads = [
            Load(lambda client: client.get(f"{tiles.url}/tiles/14/9327/4739.mvt").status_code, leave) for _ in range(3)
        ]
        until(lambda: all(len(load.statuses) > 5 for load in loads), why="tiles are answered", every=0.2)
        tiles.end()
        ready_until(tiles, leave)
        for load in loads:
            load.join(patient(60))
        assert closed.wait(patient(60))
        assert tiles.exit_code() == 0

    assert {status for load in loads for status in load.statuses} == {204}
    last = [line for line in lines if line][-2:]
    assert last[0].startswith("retry: ")
    assert last[1].startswith("id: ")
    assert len(last[1]) > 10
    world.close()


def test_ingest_that_ends_leaves_nothing_half_done_and_its_group(world: tuple[World, dict[str, str]]) -> None:
    one, environment = world
    total = 60
    for number in range(total):
        one.send(feature(number + 1, at=(HERE[0] + number * 0.001, HERE[1])), event_id=f"e{number}")
    with service("ingest", one.settings.home, **environment) as ingest:
        until(lambda: one.stack.features.counts().applied_keys, 180, why="something is stored", every=0.02)
        # More, and something heavy: the end comes in the middle of it.
        heavy = [feature(10_000 + n, at=(HERE[0] + n * 0.0001, HERE[1] + 0.05)) for n in range(600)]
        one.send({"type": "FeatureCollection", "features": heavy}, event_id="heavy")
        for number in range(total, 2 * total):
            one.send(feature(number + 1, at=(HERE[0] + number * 0.001, HERE[1])), event_id=f"e{number}")
        assert ingest.status("/healthz") == 200
        ingest.end(group=True)
        assert ingest.exit_code() == 0, "\n".join(ingest.lines)
    assert members(one, topics.INGEST_GROUP) == 0

    work_off(one)

    assert one.stack.features.counts().by_layer["buildings"] == 2 * total + 600
    letters = sum(extent.end - extent.begin for extent in one.stack.log.extents(topics.DEAD_LETTERS).values())
    assert letters == 0


def test_a_lane_that_ends_frees_its_tiles_and_leaves_its_group(world: tuple[World, dict[str, str]]) -> None:
    one, environment = world
    with service("live", one.settings.home, **environment) as live:
        live.wait_until_ready()
        for number in range(80):
            one.edit(feature(number + 1, at=(HERE[0] + number * 0.002, HERE[1])))
        until(lambda: beats(one), 180, why="the lane tells of itself", every=0.2)
        live.end(group=True)
        assert live.exit_code() == 0, "\n".join(live.lines)
    assert members(one, "live") == 0
    assert beats(one) == {}
    left = {state.key for state in one.stack.ledger.dirty(10_000, unleased=False)}
    assert {state.key for state in one.stack.ledger.dirty(10_000)} == left


def test_a_router_that_ends_frees_its_lease(tmp_path: Path) -> None:
    world = World(tmp_path / "home")
    with service("route", world.settings.home) as route:
        until(
            lambda: world.stack.guard.acquire(ROUTING, "another", 0.05) is None, 180, why="it has the lease", every=0.2
        )
        value = json.dumps({"device_id": "d", "lon": HERE[0], "lat": HERE[1], "time_ms": time.time_ns() // 10**6})
        world.stack.log.append([NewRecord(topics.POSITIONS, "d", value.encode(), {})] * 50)
        route.end()
        assert route.exit_code() == 0, "\n".join(route.lines)
    assert world.stack.guard.acquire(ROUTING, "another", 1.0) is not None
    world.close()


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    world = World(tmp_path / "home")
    world.close()
    with service("edge", world.settings.home, GEO_ASSETS_SHUTDOWN_DELAY_S="600") as edge:
        edge.wait_until_ready()
        edge.end()
        until(lambda: edge.status("/readyz") == 503, why="it is not ready any more", every=0.2)
        edge.end()
        assert edge.exit_code() == 128 + signal.SIGTERM


def test_a_grace_that_is_over_gives_work_up_and_then_ends_the_process() -> None:
    program = """
import time
from geo_assets.services.draining import PROCESS
PROCESS.on_signals(0.1)
PROCESS.when_late(lambda: print("given up", flush=True))
print("up", flush=True)
while True:
    time.sleep(0.1)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.terminate()
    assert "given up\n" in process.stdout.readlines()
    assert process.wait(patient(60)) == TOO_LATE


def _sleep(tasks: Any) -> list[float]:
    for seconds in tasks:
        time.sleep(seconds)
    return list(tasks)


def test_work_that_is_given_up_is_no_tasks_fault() -> None:
    pool = WorkerPool(1, 3000.0)
    pool.warm()
    threading.Timer(0.5, pool.give_up).start()

    with pytest.raises(WorkersUnavailable):
        list(pool.map(_sleep, [[3000.0]]))
    with pytest.raises(WorkersUnavailable):
        pool.start(_sleep, 0.0)


def test_whoever_waits_for_work_that_is_given_up_is_told_even_of_what_no_process_has_begun() -> None:
    for wait_s in (0.0, 0.05, 0.2):
        pool = WorkerPool(1, 3000.0)
        futures = [pool.start(_sleep, 3000.0) for _ in range(3)]
        time.sleep(wait_s)
        pool.give_up()

        for future in futures:
            assert future.done()
            with pytest.raises(WorkersUnavailable):
                pool.outcome(future)


def test_the_metrics_port_says_whether_its_service_works(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Drain()
    monkeypatch.setattr(metrics_port, "PROCESS", process)
    registry = CollectorRegistry()
    Counter("looks_total", "Looks.", registry=registry).inc()
    ready = Readiness("it starts")
    (port,) = free_ports(1)
    end = serve_metrics(registry, "127.0.0.1", port, ready)
    assert end is not None

    def ask(path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False, timeout=patient(30))

    try:
        assert (ask("/healthz").status_code, ask("/readyz").status_code) == (200, 503)
        assert ask("/readyz").json()["detail"] == "it starts"
        ready.waits_for = None
        assert ask("/readyz").status_code == 200
        assert "looks_total 1.0" in ask("/metrics").text
        assert ask("/else").status_code == 404
        process.stop.set()
        assert (ask("/healthz").status_code, ask("/readyz").status_code) == (200, 503)
    finally:
        end()
