"""Dead letters in the catalog: observed when some came, as numbers and tables that hold no payload."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from dagster import build_sensor_context
from dagster._core.definitions.observe import observe
from dagster._serdes import serialize_value

from geo_assets.assets.dead_letters import OBSERVE_EVERY_MS, dead_letters, observe_if_news
from geo_assets.assets.stack_resource import StackResource
from geo_assets.catalog import DEAD_LETTERS
from geo_assets.definitions import defs
from geo_assets.events import topics
from geo_assets.events.dead_letter import DeadLetter
from geo_assets.services.dead_letters import now_ms, scan_topic, write_dead_letters
from geo_assets_tests.dagster_world import World, world
from resources.event_log.protocol import LogUnavailable
from sensors.dead_letter_counts import dead_letter_counts


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with world(tmp_path, monkeypatch) as made:
        yield made


def die(here: World, number: int, reason: str = "schema", source: str = "city") -> None:
    letter = DeadLetter.make(
        reason=reason, stage="route", explanation="at 24.9384", source=source, at_ms=now_ms(),
        payload=f'{{"n": {number}, "lon": 24.9384}}'.encode(), headers={"kind": "positions"},
    )  # fmt: skip
    write_dead_letters(here.stack, [letter])


def observations(here: World):
    return here.instance.fetch_observations(DEAD_LETTERS, limit=10).records


def test_it_is_observed_when_some_came_and_not_again_before_an_hour(here: World) -> None:
    now = now_ms()
    assert observe_if_news(here.stack, here.instance, now)[1], "the first look"
    assert not observe_if_news(here.stack, here.instance, now + 60_000)[1]
    die(here, 1)
    die(here, 2, "timeout", "gateway")
    assert observe_if_news(here.stack, here.instance, now + 120_000)[1]
    assert not observe_if_news(here.stack, here.instance, now + 180_000)[1]
    assert observe_if_news(here.stack, here.instance, now + 120_000 + OBSERVE_EVERY_MS)[1]

    shown = observations(here)[1].asset_observation.metadata
    assert (shown["dead_letters"].value, shown["last_day"].value, shown["per_hour"].value) == (2, 2, 0.08)
    assert (shown["ever_schema"].value, shown["ever_timeout"].value) == (1, 1)
    assert [dict(record.data) for record in shown["by_reason_and_source"].records] == [
        {"reason": "schema", "source": "city", "dead_letters": 1},
        {"reason": "timeout", "source": "gateway", "dead_letters": 1},
    ]
    assert shown["by_hour"].records[0].data["reasons"] == "schema 1, timeout 1"
    assert "geo-assets dead-letters replay --reason schema" in shown["what_to_do"].md_str
    assert "/locations/geo_assets/jobs/replay_dead_letters/playground" in shown["what_to_do"].md_str


def test_nothing_of_a_payload_or_a_place_is_in_the_catalog(here: World) -> None:
    die(here, 1)
    observe_if_news(here.stack, here.instance, now_ms())
    (record,) = observations(here)
    assert "24.9384" not in serialize_value(record.event_log_entry)


def test_it_can_be_observed_from_the_ui(here: World) -> None:
    die(here, 1)
    assert observe([dead_letters], instance=here.instance, resources={"stack": StackResource()}).success
    assert observations(here)[0].asset_observation.metadata["dead_letters"].value == 1


def test_the_sensor_says_how_many_and_a_log_that_is_away_skips_it(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluate() -> str:
        context = build_sensor_context(instance=here.instance, resources={"stack": StackResource()})
        return dead_letter_counts(context).skip_reason.skip_message

    die(here, 1)
    assert evaluate() == "1 dead letters ever, 1 within a day"

    def away(*_: object) -> None:
        raise LogUnavailable("the log is away")

    monkeypatch.setattr(type(here.stack.log), "extents", away)
    assert "the log is away" in evaluate()


def test_its_rate_is_checked_under_the_name_it_had() -> None:
    keys = defs.resolve_asset_graph().asset_check_keys
    assert [key.asset_key for key in keys if key.name == "dead_letter_rate"] == [DEAD_LETTERS]


# -- the job -------------------------------------------------------------------------------------------------------


def broken_edit(here: World, number: int, source: str = "city") -> None:
    """A dead letter of ingest whose payload is an edit."""
    letter = DeadLetter.make(
        reason="unknown_crs", stage="validate", explanation="no CRS", source=source, at_ms=now_ms(),
        event_id=f"e{number}", payload=f'{{"type": "Feature", "id": {number}}}'.encode(),
        headers={"kind": "features", "source": source},
    )  # fmt: skip
    write_dead_letters(here.stack, [letter])


def replay(here: World, **config: object):
    return defs.resolve_job_def("replay_dead_letters").execute_in_process(
        run_config={"ops": {"replay": {"config": config}}}, instance=here.instance, raise_on_error=False
    )


def said(result) -> dict[str, object]:
    (event,) = [event for event in result.all_events if event.event_type_value == "STEP_OUTPUT"]
    return {name: value.value for name, value in event.step_output_data.metadata.items()}


def raw(here: World) -> list[str | None]:
    return [record.headers.get("event-id") for record in scan_topic(here.stack.log, topics.RAW)]


def test_the_job_sends_what_is_chosen_once(here: World) -> None:
    for number in range(3):
        broken_edit(here, number)
    broken_edit(here, 3, source="other")
    die(here, 4)

    assert said(replay(here, reason="unknown_crs", source="city", dry_run=True)) == {
        "chosen": 3, "left": 0, "to": "3 to raw", "sent": 0, "dry_run": True
    }  # fmt: skip
    assert raw(here) == []
    assert said(replay(here, reason="unknown_crs", source="city", since="1h", limit=2))["sent"] == 2
    assert said(replay(here, reason="unknown_crs", source="city"))["sent"] == 1
    assert said(replay(here, reason="unknown_crs", source="city")) == {
        "chosen": 0, "left": 0, "to": "nowhere", "sent": 0, "unfit": 0, "dry_run": False
    }  # fmt: skip
    assert raw(here) == ["e0", "e1", "e2"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "name reason, source, stage or since, or say every: true"),
        ({"reason": "bad luck"}, "reason 'bad luck' is none of schema"),
        ({"since": "yesterday"}, "since 'yesterday' is neither"),
        ({"since": "2026-05-01T12:00"}, "says no zone"),
    ],
)
def test_the_job_refuses_a_choice_that_is_none(here: World, config: dict[str, object], expected: str) -> None:
    result = replay(here, **config)
    (event,) = [event for event in result.all_events if event.event_type_value == "STEP_FAILURE"]
    assert expected in event.step_failure_data.user_failure_data.description


def test_the_launchpad_offers_the_job_with_its_defaults(here: World) -> None:
    from dagster import validate_run_config

    job = defs.resolve_job_def("replay_dead_letters")
    config = validate_run_config(job, {})["ops"]["replay"]["config"]
    assert config == {
        "reason": "", "source": "", "stage": "", "since": "", "every": False, "limit": 10_000, "dry_run": False
    }  # fmt: skip
