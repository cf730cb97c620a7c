"""The janitor: it takes Jobs whose runs have ended, and never one whose run is alive."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from dagster import DagsterInstance, DagsterRunStatus, job, op
from dagster._core.remote_origin import RegisteredCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin
from hypothesis import given
from hypothesis import strategies as st

from geo_assets.kubernetes import janitor
from geo_assets.kubernetes.api import RUN_LABEL, ApiAway, Jobs
from geo_assets.kubernetes.janitor import ENDED_S, UNKNOWN_S, Left, Run, WrongStorage, reason, sweep
from geo_assets_tests.kubernetes.api_stand_in import Answer, Asked, StandIn, fault, stand_in

NOW = time.time()


@op
def nothing() -> None: ...


@job
def empty() -> None:
    nothing()


@pytest.fixture
def server() -> Iterator[StandIn]:
    with stand_in() as running:
        yield running


@pytest.fixture
def instance() -> Iterator[DagsterInstance]:
    with DagsterInstance.ephemeral() as made:
        yield made


def run_of(instance: DagsterInstance, status: DagsterRunStatus) -> str:
    # Dagster keeps none in its queue of which it does not know where the job's code is.
    place = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("geo_assets"), "__repository__")
    origin = RemoteJobOrigin(place, "empty")
    return instance.create_run_for_job(empty, status=status, remote_job_origin=origin).run_id


def listed(run_id: str, *, age_s: float = 3_600, **status: object) -> dict[str, object]:
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(NOW - age_s))
    about = {
        "name": f"dagster-run-{run_id}", "uid": f"uid-{run_id}", "labels": {RUN_LABEL: run_id},
        "creationTimestamp": created,
    }  # fmt: skip
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": about, "status": status}


def serve(server: StandIn, *jobs: dict[str, object]) -> None:
    def answer(asked: Asked) -> Answer:
        if asked.method == "GET":
            return 200, {"apiVersion": "batch/v1", "kind": "JobList", "metadata": {}, "items": list(jobs)}
        return 200, {"kind": "Status", "status": "Success"}

    server.answer = answer


def deleted(server: StandIn) -> list[str]:
    return [one.path.partition("dagster-run-")[2].partition("?")[0] for one in server.asked if one.method == "DELETE"]


@given(st.floats(0, 1e7), st.floats(0, 1e7) | st.none())
def test_a_job_whose_run_is_alive_is_never_taken(age_s: float, end_s: float | None) -> None:
    left = Left("dagster-run-x", "u", "x", NOW - age_s)

    assert reason(left, Run(ended=False, end_s=end_s), NOW) is None


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_a_job_is_taken_some_time_after_its_run_has_ended(age_s: float, since_s: float) -> None:
    left = Left("dagster-run-x", "u", "x", NOW - age_s)

    taken = reason(left, Run(ended=True, end_s=NOW - since_s), NOW) is not None
    # A Job that was made after its run had ended, by a launch that was in doubt, has the same time.
    assert taken == (NOW - max(NOW - since_s, NOW - age_s) > ENDED_S)
    assert (reason(left, None, NOW) is not None) == (NOW - (NOW - age_s) > UNKNOWN_S)


def test_ended_runs_and_unknown_ones_lose_their_jobs_and_no_others(
    server: StandIn, instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, canceled = run_of(instance, DagsterRunStatus.FAILURE), run_of(instance, DagsterRunStatus.CANCELED)
    alive = [
        run_of(instance, status)
        for status in DagsterRunStatus
        if status not in (DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED)
    ]
    done = run_of(instance, DagsterRunStatus.SUCCESS)
    young, unknown, stranger = run_of(instance, DagsterRunStatus.FAILURE), "a" * 8, "b" * 8
    serve(
        server,
        listed(failed, active=1), listed(canceled), *[listed(one, active=1) for one in alive],
        listed(done, conditions=[{"type": "Complete", "status": "True"}]),
        listed(young, age_s=10, active=1), listed(unknown), listed(stranger, age_s=10),
    )  # fmt: skip

    took, left = sweep(instance, Jobs(host=server.host), "geo-assets", NOW)

    assert sorted(deleted(server)) == sorted([failed, canceled, unknown])
    assert (took, left) == (3, 5 + len(alive))
    assert {one.body["preconditions"]["uid"] for one in server.asked if one.body} == {
        f"uid-{one}" for one in (failed, canceled, unknown)
    }


def test_a_run_is_asked_for_again_before_its_job_is_taken(
    server: StandIn, instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_of(instance, DagsterRunStatus.SUCCESS)
    late = "c" * 8
    serve(server, listed(late, active=1))
    looks: list[list[str]] = []
    ask = janitor.runs_of

    def seen_late(instance: DagsterInstance, ids: object) -> dict[str, Run]:
        looks.append(list(ids))  # pyright: ignore[reportArgumentType]
        return ask(instance, looks[-1]) if len(looks) == 1 else {late: Run(ended=False)}

    monkeypatch.setattr(janitor, "runs_of", seen_late)

    assert sweep(instance, Jobs(host=server.host), "geo-assets", NOW) == (0, 1)
    assert looks == [[late], [late]]
    assert deleted(server) == []


def test_one_sweep_takes_a_bounded_number(
    server: StandIn, instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(janitor, "MOST", 2)
    serve(server, *[listed(run_of(instance, DagsterRunStatus.FAILURE)) for _ in range(5)])

    assert sweep(instance, Jobs(host=server.host), "geo-assets", NOW) == (2, 5)
    assert len(deleted(server)) == 2


def test_rule_13_an_empty_storage_takes_no_job(server: StandIn, instance: DagsterInstance) -> None:
    serve(server, listed("a" * 8), listed("b" * 8))

    with pytest.raises(WrongStorage, match="GEO_ASSETS_DAGSTER_POSTGRES_URL"):
        sweep(instance, Jobs(host=server.host), "geo-assets", NOW)
    assert deleted(server) == []


def test_an_api_that_is_away_is_one_line(server: StandIn, instance: DagsterInstance) -> None:
    server.answers(fault(503, "ServiceUnavailable", "starting"))

    with pytest.raises(ApiAway) as told:
        sweep(instance, Jobs(host=server.host, patience_s=0.1), "geo-assets", NOW)
    assert "\n" not in str(told.value)
