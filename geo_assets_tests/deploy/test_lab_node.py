"""The lab's node without a cluster: what probes amount to, where connections go, how values are resolved."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.lab.network import Network, free_network, local
from deploy.lab.node.environment import NotConfigured, expand, field, resource, service_links
from deploy.lab.node.logs import tail
from deploy.lab.node.pod import Container, contradicts
from deploy.lab.node.probes import (
    LIVENESS,
    READINESS,
    STARTUP,
    ProbeFailed,
    Prober,
    ProbeState,
    ProbeTimes,
    ask_http,
    ask_tcp,
    port_number,
)
from deploy.lab.node.proxy import Proxy, Turn, routes
from deploy.lab.node.quantities import amount
from geo_assets_tests.waiting import patient
from scripts.local_services.processes import free_ports

ADDRESS = "127.90.0.7"
POD: dict[str, Any] = {
    "metadata": {
        "name": "edge-1", "namespace": "geo-assets", "uid": "u", "labels": {"app.kubernetes.io/component": "edge"},
    },
    "spec": {"serviceAccountName": "service"},
}  # fmt: skip


# Probes.


@given(
    st.sampled_from([STARTUP, READINESS, LIVENESS]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.lists(st.booleans(), max_size=30),
)
def test_a_probe_turns_only_after_so_many_equal_answers_in_a_row(
    kind: str, successes: int, failures: int, answers: list[bool]
) -> None:
    state = ProbeState(kind, ProbeTimes(successes=successes, failures=failures))
    expected = kind == LIVENESS
    for number, answer in enumerate(answers, 1):
        needed = successes if answer else failures
        row = answers[max(0, number - needed) : number]
        if len(row) == needed and set(row) == {answer}:
            expected = answer
        assert state.answer(answer) == expected


def test_a_pod_gets_no_traffic_before_its_first_good_answer_and_is_not_killed_before_a_bad_one() -> None:
    assert not ProbeState(READINESS, ProbeTimes()).passed
    assert not ProbeState(STARTUP, ProbeTimes()).passed
    assert ProbeState(LIVENESS, ProbeTimes()).passed
    assert not ProbeState(LIVENESS, ProbeTimes()).gave_up


def test_a_good_answer_starts_the_count_of_failures_anew() -> None:
    state = ProbeState(LIVENESS, ProbeTimes(failures=3))
    for answer in (False, False, True, False, False):
        state.answer(answer)
    assert not state.gave_up
    state.answer(False)
    assert state.gave_up


def test_times_that_a_probe_does_not_name_are_the_defaults_of_the_api() -> None:
    assert ProbeTimes.of({}) == ProbeTimes(0, 10, 1, 1, 3)
    assert ProbeTimes.of({"periodSeconds": 2, "failureThreshold": 30}) == ProbeTimes(0, 2, 1, 1, 30)


def test_a_port_may_be_named_or_numbered() -> None:
    container = {"name": "main", "ports": [{"name": "http", "containerPort": 8788}]}
    assert port_number("http", container) == 8788
    assert port_number(1234, container) == 1234
    with pytest.raises(ProbeFailed, match="no port named metrics"):
        port_number("metrics", container)


@pytest.mark.parametrize(("status", "good"), [(200, True), (204, True), (302, True), (404, False), (503, False)])
def test_an_http_probe_takes_200_to_399(status: int, good: bool) -> None:
    with answering(f"HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n".encode()) as (host, port):
        if good:
            ask_http({"path": "/readyz", "port": port}, {"name": "main"}, host, 5)
        else:
            with pytest.raises(ProbeFailed, match=str(status)):
                ask_http({"path": "/readyz", "port": port}, {"name": "main"}, host, 5)


def test_a_probe_of_a_port_on_which_nobody_listens_fails() -> None:
    (port,) = free_ports(1)
    with pytest.raises(ProbeFailed):
        ask_tcp({"port": port}, {"name": "main"}, "127.0.0.1", 1)
    with pytest.raises(ProbeFailed):
        ask_http({"port": port}, {"name": "main"}, "127.0.0.1", 1)


def test_a_startup_probe_asks_no_more_once_it_passed() -> None:
    asked: list[str | None] = []
    answers = iter([False, True])

    def ask(timeout_s: float) -> None:
        if not next(answers):
            raise ProbeFailed("not yet")

    prober = Prober(STARTUP, {"periodSeconds": 0.01}, ask, lambda prober, message: asked.append(message))
    prober.start()
    prober.join(patient(30))
    assert not prober.is_alive()
    assert asked == ["not yet", None]
    assert prober.state.passed


# Services.


def service(name: str, address: str | None, port: int = 80, port_name: str | None = None) -> dict[str, Any]:
    named = {"name": port_name} if port_name else {}
    return {
        "metadata": {"name": name, "namespace": "geo-assets"},
        "spec": {"clusterIP": address, "ports": [{"port": port, "protocol": "TCP", **named}]},
    }


def endpoints(name: str, *found: tuple[str, dict[str, bool]], port: int = 8788, port_name: str = "") -> dict[str, Any]:
    return {
        "metadata": {"name": f"{name}-x", "namespace": "geo-assets", "labels": {"kubernetes.io/service-name": name}},
        "ports": [{"port": port, "name": port_name}],
        "endpoints": [{"addresses": [address], "conditions": conditions} for address, conditions in found],
    }


READY = {"ready": True, "serving": True, "terminating": False}
NOT_READY = {"ready": False, "serving": False, "terminating": False}
ENDING = {"ready": False, "serving": True, "terminating": True}


def test_connections_go_to_ready_endpoints_only() -> None:
    found = routes(
        [service("tiles", "10.160.0.9")],
        [endpoints("tiles", ("10.96.1.2", READY), ("10.96.1.3", NOT_READY), ("10.96.1.4", ENDING))],
    )
    assert found == {("127.160.0.9", 80): [("127.96.1.2", 8788)]}


def test_when_none_is_ready_those_that_still_serve_while_they_end_are_taken() -> None:
    slices = [endpoints("tiles", ("10.96.1.3", NOT_READY), ("10.96.1.4", ENDING))]
    assert routes([service("tiles", "10.160.0.9")], slices) == {("127.160.0.9", 80): [("127.96.1.4", 8788)]}


def test_a_service_without_endpoints_has_a_route_to_nowhere_and_a_headless_one_has_none() -> None:
    assert routes([service("tiles", "10.160.0.9"), service("peers", "None")], []) == {("127.160.0.9", 80): []}


def test_a_named_port_goes_to_the_port_of_that_name() -> None:
    slices = [
        endpoints("live", ("10.96.1.2", READY), port=8791, port_name="metrics"),
        endpoints("live", ("10.96.1.2", READY), port=9, port_name="other"),
    ]
    found = routes([service("live", "10.160.0.9", 80, "metrics")], slices)
    assert found == {("127.160.0.9", 80): [("127.96.1.2", 8791)]}


def test_another_namespace_s_service_of_the_same_name_is_another() -> None:
    elsewhere = endpoints("tiles", ("10.96.1.2", READY))
    elsewhere["metadata"]["namespace"] = "other"
    assert routes([service("tiles", "10.160.0.9")], [elsewhere]) == {("127.160.0.9", 80): []}


@given(st.sets(st.integers(1, 20), min_size=1), st.integers(1, 4))
def test_every_endpoint_gets_the_same_number_of_connections(numbers: set[int], rounds: int) -> None:
    turn = Turn()
    turn.endpoints = sorted((f"127.0.0.{number}", 80) for number in numbers)
    given_out = [turn.next() for _ in range(len(numbers) * rounds)]
    assert {given_out.count(each) for each in turn.endpoints} == {rounds}


def test_a_turn_goes_on_when_endpoints_come_and_go() -> None:
    turn = Turn()
    assert turn.next() is None
    turn.endpoints = [("a", 1), ("b", 1), ("c", 1)]
    assert turn.next() == ("a", 1)
    turn.endpoints = [("b", 1), ("c", 1)]
    assert turn.next() == ("b", 1)
    turn.endpoints = [("a", 1)]
    assert turn.next() == ("a", 1)


@contextmanager
def answering(answer: bytes, host: str = "127.0.0.1") -> Iterator[tuple[str, int]]:
    """A server that reads a line, and then answers the same to everyone and closes."""
    with socket.create_server((host, 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield host, server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    opened = Proxy()
    yield opened
    opened.close()


def said_by(where: tuple[str, int]) -> bytes:
    with socket.create_connection(where, timeout=patient(30)) as client:
        client.sendall(b"?\n")
        parts = []
        while part := client.recv(65536):
            parts.append(part)
        return b"".join(parts)


def test_the_proxy_passes_whole_answers_on_in_turn(proxy: Proxy) -> None:
    (port,) = free_ports(1)
    where = ("127.0.0.1", port)
    large = b"a" * 3_000_000
    with answering(large) as first, answering(b"b") as second:
        proxy.set_routes({where: sorted([first, second])})
        answers = [said_by(where) for _ in range(4)]
        assert sorted(answers) == sorted([large, large, b"b", b"b"])
        assert answers[0] != answers[1]
        proxy.set_routes({where: [second]})
        assert [said_by(where) for _ in range(2)] == [b"b", b"b"]


def test_a_connection_is_broken_off_when_nobody_is_ready_and_refused_when_the_service_is_gone(proxy: Proxy) -> None:
    (port,) = free_ports(1)
    where = ("127.0.0.1", port)
    proxy.set_routes({where: []})
    with pytest.raises(ConnectionResetError):
        said_by(where)
    proxy.set_routes({})
    with pytest.raises(ConnectionRefusedError):
        said_by(where)


def test_an_open_connection_stays_where_it_is_when_its_endpoint_is_ready_no_more(proxy: Proxy) -> None:
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        proxy.set_routes({("127.0.0.1", port): [server.getsockname()]})
        with socket.create_connection(("127.0.0.1", port), timeout=patient(30)) as client:
            inside, _ = server.accept()
            proxy.set_routes({("127.0.0.1", port): []})
            with inside:
                inside.sendall(b"last words")
                assert client.recv(100) == b"last words"


# Values.


def test_references_in_commands_and_values_are_resolved_as_the_api_says() -> None:
    values = {"POD_IP": "127.90.0.7"}
    assert expand("-h $(POD_IP)", values) == "-h 127.90.0.7"
    assert expand("$(UNKNOWN) $$(POD_IP) $POD_IP $$", values) == "$(UNKNOWN) $(POD_IP) $POD_IP $"


def test_a_pod_learns_the_address_on_which_it_may_listen() -> None:
    assert field(POD, "status.podIP", ADDRESS, "lab-1") == ADDRESS
    assert field(POD, "metadata.labels['app.kubernetes.io/component']", ADDRESS, "lab-1") == "edge"
    assert field(POD, "spec.nodeName", ADDRESS, "lab-1") == "lab-1"
    with pytest.raises(NotConfigured, match=r"status\.qosClass"):
        field(POD, "status.qosClass", ADDRESS, "lab-1")


def test_limits_come_in_the_divisor_asked_for() -> None:
    container = {"resources": {"limits": {"memory": "512Mi", "cpu": "1500m"}}}
    assert resource(container, {"resource": "limits.memory"}) == str(512 * 2**20)
    assert resource(container, {"resource": "limits.memory", "divisor": "1Mi"}) == "512"
    assert resource(container, {"resource": "limits.cpu"}) == "2"
    assert resource(container, {"resource": "requests.cpu", "divisor": "1m"}) == "1500"


@pytest.mark.parametrize(
    ("written", "number"), [("250m", 0.25), ("2", 2), ("512Mi", 2**29), ("1G", 10**9), ("1.5Gi", 1.5 * 2**30)]
)
def test_quantities_are_read_as_the_api_writes_them(written: str, number: float) -> None:
    assert float(amount(written)) == number


def test_what_is_no_quantity_is_refused() -> None:
    with pytest.raises(ValueError, match="no quantity"):
        amount("much")


def test_service_links_name_the_services_of_the_pod_s_namespace() -> None:
    links = service_links([service("dagster-webserver", "10.160.0.9", 3000), service("peers", "None")], "geo-assets")
    assert links["DAGSTER_WEBSERVER_SERVICE_HOST"] == "127.160.0.9"
    assert links["DAGSTER_WEBSERVER_PORT"] == "tcp://127.160.0.9:3000"
    assert not any(name.startswith("PEERS") for name in links)
    assert service_links([service("tiles", "10.160.0.9")], "default") == {}


def test_addresses_of_the_cluster_stand_for_addresses_of_loopback() -> None:
    network = Network(90)
    assert local(network.pod_address(1, 7)) == "127.90.1.7"
    assert network.service_range == "10.154.0.0/16"
    assert local("127.0.0.1") == "127.0.0.1"


def test_a_lab_takes_a_network_in_which_nothing_listens() -> None:
    taken = [socket.create_server((f"127.{number}.3.4", 0)) for number in range(64, 126)]
    try:
        assert free_network().number in (126, 127)
    finally:
        for each in taken:
            each.close()


def test_logs_are_asked_for_by_their_last_lines() -> None:
    assert tail(b"a\nb\nc\n", 2) == b"b\nc\n"
    assert tail(b"a\nb\nc", None) == b"a\nb\nc"
    assert tail(b"a\n", 0) == b""


# What others write.


def test_a_readiness_that_another_overwrote_is_noticed() -> None:
    written = {"conditions": [{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": "True"}]}
    same = {"conditions": [*written["conditions"], {"type": "PodScheduled", "status": "True"}]}
    taken = {"conditions": [{"type": "Ready", "status": "False", "reason": "NodeNotReady"}]}

    assert not contradicts(written, same)
    assert not contradicts(written, {}), "the API has none yet"
    assert contradicts(written, taken)


# Restarts.


def test_what_ran_when_the_node_was_lost_has_ended_with_it() -> None:
    container = Container({"name": "main"}, {"restartCount": 2, "state": {"running": {"startedAt": "then"}}})
    assert container.exit_code == 137
    assert container.restarts == 2


def test_what_had_ended_before_the_node_was_lost_is_not_run_again() -> None:
    container = Container({"name": "main"}, {"restartCount": 0, "state": {"terminated": {"exitCode": 0}}})
    assert container.exit_code == 0


def test_waits_between_restarts_double() -> None:
    container = Container({"name": "main"}, None)
    waits = []
    for _ in range(4):
        before = container.again_at
        container.ended(1, "Error")
        waits.append(container._backoff)
        assert container.again_at >= before
    assert waits == [1, 2, 4, 8]
