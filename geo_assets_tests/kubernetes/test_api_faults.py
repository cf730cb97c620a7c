"""What a fault of the Kubernetes API means, told by a real HTTP server that refuses, stumbles, hangs or lies."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from dagster._core.launcher.base import WorkerStatus
from kubernetes.client import V1Job, V1ObjectMeta

from geo_assets.kubernetes import api
from geo_assets.kubernetes.api import RUN_LABEL, ApiAway, ApiRefused, Jobs, pause_s
from geo_assets.kubernetes.run_launcher import judge
from geo_assets_tests.kubernetes.api_stand_in import StandIn, fault, stand_in
from geo_assets_tests.waiting import patient

RUN = "0b7c5e6a-5b52-4d8b-9a54-1f1b8ad6a001"
NAME = f"dagster-run-{RUN}"
NOT_FOUND = fault(404, "NotFound", f'jobs.batch "{NAME}" not found', NAME)
QUOTA = fault(403, "Forbidden", f'jobs.batch "{NAME}" is forbidden: exceeded quota: geo-assets', NAME)
EXISTS = fault(409, "AlreadyExists", f'jobs.batch "{NAME}" already exists', NAME)


@pytest.fixture
def server() -> Iterator[StandIn]:
    with stand_in() as running:
        yield running


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(api, "CONNECT_S", patient(5))
    monkeypatch.setattr(api, "READ_S", patient(5))


def a_job(run: str = RUN) -> V1Job:
    return V1Job(metadata=V1ObjectMeta(name=NAME, labels={RUN_LABEL: run}))


def stored(run: str = RUN, **status: object) -> dict[str, object]:
    return {
        "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": NAME, "labels": {RUN_LABEL: run}},
        "status": status,
    }  # fmt: skip


def health(client: Jobs) -> WorkerStatus:
    try:
        found = client.batch_api.read_namespaced_job_status(NAME, "geo-assets")
    except Exception as problem:
        return judge(NAME, problem).status
    return judge(NAME, found.status).status  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    "answer",
    [
        fault(500, "InternalError", "etcd is away"),
        fault(503, "ServiceUnavailable", "starting"),
        fault(504, "Timeout", "slow"),
        fault(429, "TooManyRequests", "later"),
        fault(401, "Unauthorized", "Unauthorized"),
        fault(403, "Forbidden", "no permission", NAME),
        (404, "<html>no such page</html>"),
        fault(404, "NotFound", "the server could not find the requested resource"),
        (502, "<html>bad gateway</html>"),
        None,
    ],
    ids=["500", "503", "504", "429", "401", "403", "a proxy's 404", "no such kind", "502", "dropped"],
)
def test_what_says_nothing_of_the_worker_leaves_its_run_alone(server: StandIn, answer: object) -> None:
    server.answers(answer)  # pyright: ignore[reportArgumentType]

    assert health(Jobs(host=server.host)) is WorkerStatus.RUNNING


def test_an_api_that_nobody_serves_leaves_runs_alone() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host = f"http://127.0.0.1:{free.getsockname()[1]}"

    assert health(Jobs(host=host)) is WorkerStatus.RUNNING


def test_an_api_that_hangs_is_asked_once_and_leaves_runs_alone(
    server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "READ_S", 0.5)
    server.answer = lambda _asked: (server.hanging.wait(20), (200, stored()))[1]

    assert health(Jobs(host=server.host)) is WorkerStatus.RUNNING
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (NOT_FOUND, WorkerStatus.NOT_FOUND),
        ((200, stored(failed=1)), WorkerStatus.FAILED),
        ((200, stored(succeeded=1)), WorkerStatus.FAILED),
        ((200, stored(conditions=[{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}])),
         WorkerStatus.FAILED),
        ((200, stored(conditions=[{"type": "Complete", "status": "True"}])), WorkerStatus.FAILED),
        ((200, stored(active=1)), WorkerStatus.RUNNING),
        ((200, stored(active=1, failed=1)), WorkerStatus.RUNNING),
        ((200, stored()), WorkerStatus.RUNNING),
        ((200, stored(conditions=[{"type": "Failed", "status": "False"}])), WorkerStatus.RUNNING),
    ],
)  # fmt: skip
def test_what_the_api_says_for_certain_decides(server: StandIn, answer: object, expected: WorkerStatus) -> None:
    server.answers(answer)  # pyright: ignore[reportArgumentType]

    assert health(Jobs(host=server.host)) is expected


def test_a_launch_outlasts_an_api_server_that_is_replaced(server: StandIn) -> None:
    server.answers(None, (502, "bad gateway"), fault(429, "TooManyRequests", "later"), QUOTA, (201, stored()))

    Jobs(host=server.host, patience_s=30).create_namespaced_job_with_retries(a_job(), "geo-assets")

    assert [one.method for one in server.asked] == ["POST"] * 5


def test_a_creation_that_timed_out_and_happened_is_a_success(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "READ_S", 1.0)
    server.answer = lambda asked: (
        ((server.hanging.wait(20), None)[1] if len(server.asked) == 1 else EXISTS)
        if asked.method == "POST"
        else (200, stored())
    )

    Jobs(host=server.host, patience_s=30).create_namespaced_job_with_retries(a_job(), "geo-assets")

    assert [one.method for one in server.asked] == ["POST", "POST", "GET"]


def test_a_job_of_this_name_that_is_another_runs_is_no_success(server: StandIn) -> None:
    server.answer = lambda asked: EXISTS if asked.method == "POST" else (200, stored(run="another"))

    with pytest.raises(ApiRefused, match=r"409 Conflict: .*already exists"):
        Jobs(host=server.host, patience_s=30).create_namespaced_job_with_retries(a_job(), "geo-assets")


def test_a_launch_while_the_api_is_away_ends_with_a_line_that_says_so(server: StandIn) -> None:
    server.answers(fault(503, "ServiceUnavailable", "starting"))

    with pytest.raises(ApiAway, match=r"^the Kubernetes API http://\S+ is away \(503 .*starting\): the creation"):
        Jobs(host=server.host, patience_s=0.2).create_namespaced_job_with_retries(a_job(), "geo-assets")
    assert len(server.asked) > 1


def test_what_the_api_refuses_is_not_asked_again(server: StandIn) -> None:
    server.answers(fault(403, "Forbidden", "violates PodSecurity", NAME))

    with pytest.raises(ApiRefused, match="violates PodSecurity"):
        Jobs(host=server.host, patience_s=30).create_namespaced_job_with_retries(a_job(), "geo-assets")
    assert len(server.asked) == 1


def test_a_deletion_takes_the_pods_along_and_only_the_job_that_was_meant(server: StandIn) -> None:
    server.answers((200, {"kind": "Status", "status": "Success"}))

    assert Jobs(host=server.host).delete_job(NAME, "geo-assets", uid="u-1") is True
    (asked,) = server.asked
    assert asked.body["propagationPolicy"] == "Background"
    assert asked.body["preconditions"] == {"uid": "u-1"}


@pytest.mark.parametrize("answer", [NOT_FOUND, fault(409, "Conflict", "the UID in the precondition differs", NAME)])
def test_a_job_that_is_gone_or_another_one_is_not_deleted(server: StandIn, answer: object) -> None:
    server.answers(answer)  # pyright: ignore[reportArgumentType]

    assert Jobs(host=server.host).delete_job(NAME, "geo-assets", uid="u-1") is False


def test_pauses_grow_to_a_bound_and_heed_what_the_api_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "FIRST_PAUSE_S", 0.5)

    assert [pause_s(tries) for tries in (1, 2, 3, 4, 5, 6, 1_000)] == [0.5, 1, 2, 4, 8, 8, 8]
    assert pause_s(1, "3") == 3
    assert pause_s(1, "3600") == 8
    assert pause_s(1, "tomorrow") == 0.5
