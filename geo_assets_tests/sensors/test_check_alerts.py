"""Alerts through a real Dagster instance, on SQLite and on Postgres, to a real receiver on loopback."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from dagster import (
    AssetCheckEvaluation,
    AssetCheckSeverity,
    AssetKey,
    DagsterEvent,
    DagsterEventType,
    EventLogEntry,
    build_sensor_context,
    job,
    op,
)
from dagster._core.storage.event_log.schema import SqlEventLogStorageTable
from dagster._serdes import serialize_value

from geo_assets.assets.stack_resource import StackResource
from geo_assets.catalog import DEAD_LETTERS, TILES
from geo_assets.checks.audit import Audit, result_of
from geo_assets.definitions import defs
from geo_assets.jobs import BATCH_TAG
from geo_assets.ports import tile_object
from geo_assets.services.alerting import QUIET_MS, VALUE, State
from geo_assets.services.build import TileBuilder
from geo_assets.tiles.rules import Fault
from geo_assets.tiles.tile import Tile, common_prefix
from geo_assets_tests.dagster_world import World, postgres_instance, tiles_around, world
from geo_assets_tests.waiting import patient
from geo_assets_tests.webhook import Webhook, webhook
from resources.ledger.protocol import LedgerUnavailable
from resources.ledger.sqlite import SqliteLedger
from sensors.check_alerts import Tick, check_alerts, tick

HOME = Tile(14, 9_327, 4_741)
FAR = Tile(14, 4_823, 6_160)

KNOWN = sorted(f"{k.asset_key.to_user_string()}/{k.name}" for k in defs.resolve_asset_graph().asset_check_keys)


@pytest.fixture
def receiver() -> Iterator[Webhook]:
    with webhook() as made:
        yield made


@pytest.fixture(params=["sqlite", "postgres"])
def both(
    request: pytest.FixtureRequest, receiver: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    """A world whose Dagster keeps its events in SQLite, and one in Postgres."""
    with world(tmp_path, monkeypatch, alert_webhook_urls=receiver.url) as made:
        if request.param == "sqlite":
            yield made
            return
        with postgres_instance(tmp_path, monkeypatch) as instance:
            made.instance = instance
            yield made


@pytest.fixture
def here(receiver: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with world(tmp_path, monkeypatch, alert_webhook_urls=receiver.url) as made:
        yield made


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def ticked(here: World, later_s: float = 0.0) -> Tick:
    return tick(here.stack, here.instance, KNOWN, now_ms() + int(later_s * 1000))


def build(here: World, *tiles: Tile) -> None:
    for tile in tiles:
        here.put_square(tile.key, tile)
    with TileBuilder(here.stack, "test", inline=True) as builder:
        assert [result.outcome for result in builder.build([tile.key for tile in tiles])] == ["built"] * len(tiles)


def lose(here: World, *tiles: Tile) -> None:
    for tile in tiles:
        state = here.ledger.read([tile.key])[tile.key]
        here.stack.tiles.delete([tile_object(state.object_name or "")])


def mend(here: World) -> None:
    keys = [state.key for state in here.ledger.dirty(100)]
    with TileBuilder(here.stack, "mend", inline=True) as builder:
        assert {result.outcome for result in builder.build(keys)} == {"built"}


def audit(here: World) -> None:
    """A run of the job `audit`: every check."""
    assert defs.resolve_job_def("audit").execute_in_process(instance=here.instance).success


def evaluation(
    name: str,
    *failing: Tile,
    passed: bool = False,
    severity: AssetCheckSeverity = AssetCheckSeverity.ERROR,
    asset: AssetKey = TILES,
) -> AssetCheckEvaluation:
    """A result as the checks of this house make it."""
    faults = [Fault("rule", tile.path, "is broken") for tile in failing]
    found = result_of(Audit(10, faults, f"{len(faults)} broken", passed, severity=severity), "http://tiles")
    return AssetCheckEvaluation(asset, name, passed, found.metadata, None, severity, found.description)


def store(here: World, found: AssetCheckEvaluation, *, age_s: float = 0.0, copies: int = 1) -> None:
    """Put evaluations into Dagster's event log, as if runs had made them that long ago."""
    at = time.time() - age_s
    event = DagsterEvent(DagsterEventType.ASSET_CHECK_EVALUATION.value, "audit", event_specific_data=found)
    entry = EventLogEntry(None, 10, "", "run", at, job_name="audit", dagster_event=event)
    row = {
        "run_id": "run", "event": serialize_value(entry), "dagster_event_type": event.event_type_value,
        "timestamp": here.instance.event_log_storage._event_insert_timestamp(entry), "asset_key": '["tiles"]',
    }  # fmt: skip
    with here.instance.event_log_storage.index_connection() as connection:
        connection.execute(SqlEventLogStorageTable.insert(), [row] * copies)


def told(receiver: Webhook) -> list[list[tuple[str, str]]]:
    """Name and status of each alert, message by message."""
    return [[(alert["name"], alert["status"]) for alert in body["alerts"]] for body in receiver.bodies]


def state_of(here: World) -> State:
    return State.from_json(here.ledger.get_value(VALUE))


def test_a_fault_is_told_once_and_so_is_its_end(both: World, receiver: Webhook) -> None:
    first, second = tiles_around(HOME, 2)
    build(both, first, second)
    assert ticked(both).told == []
    lose(both, first)
    audit(both)

    ticked(both)
    ticked(both)

    (body,) = receiver.bodies
    (alert,) = body["alerts"]
    assert (alert["name"], alert["status"], alert["severity"]) == ("tiles/integrity", "firing", "error")
    assert alert["region"] == first.quadkey
    assert [one["subject"] for one in alert["failing"]] == [first.key]
    assert alert["failing"][0]["map_url"].startswith("http://127.0.0.1:8788/#14/")
    assert alert["url"] == "http://127.0.0.1:3000/assets/tiles?view=checks&checkDetail=integrity"
    mend(both)
    audit(both)
    ticked(both)
    ticked(both)
    assert [(a["name"], a["status"]) for body in receiver.bodies[1:] for a in body["alerts"]] == [
        ("tiles/integrity", "resolved")
    ]
    assert receiver.bodies[1]["alerts"][0]["since"] == alert["since"]


def test_what_cannot_be_delivered_for_three_ticks_is_delivered_once_after(both: World, receiver: Webhook) -> None:
    build(both, HOME)
    lose(both, HOME)
    audit(both)
    receiver.status = 503
    for later_s in (0.0, 6.0, 17.0):
        assert ticked(both, later_s).refused
    receiver.status = 204

    assert ticked(both, 40.0).told
    assert ticked(both, 41.0).told == []

    ids = [body["id"] for body in receiver.bodies]
    assert len(ids) == 4
    assert len(set(ids)) == 1


def test_webhooks_are_told_at_the_same_time_so_that_one_that_hangs_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with webhook() as first, webhook() as second, webhook() as third:
        urls = ",".join(each.url for each in (first, second, third))
        with world(tmp_path, monkeypatch, alert_webhook_urls=urls) as here:
            build(here, HOME)
            lose(here, HOME)
            audit(here)
            send, all_asked = here.stack.alerts.send, threading.Barrier(3)

            def hangs(channel: str, message: Any) -> None:
                # Until the others are asked too.
                all_asked.wait(patient(30))
                send(channel, message)

            monkeypatch.setattr(here.stack.alerts, "send", hangs)
            assert len(ticked(here).told) == 3


def test_an_alert_has_one_entry_a_check_and_region_in_one_message_and_keeps_the_severity(
    here: World, receiver: Webhook
) -> None:
    ticked(here)
    _, neighbour = tiles_around(HOME, 2)
    store(here, evaluation("integrity", HOME, neighbour, FAR))
    store(here, evaluation("dead_letter_rate", severity=AssetCheckSeverity.WARN, asset=DEAD_LETTERS))

    ticked(here)

    (body,) = receiver.bodies
    assert [(a["name"], a["severity"], a["count"], a["region"]) for a in body["alerts"]] == [
        ("tiles/integrity", "error", 1, FAR.quadkey),
        ("tiles/integrity", "error", 2, common_prefix([HOME.quadkey, neighbour.quadkey])),
        ("dead_letters/dead_letter_rate", "warning", 0, ""),
    ]


def test_the_same_result_is_not_told_again_and_another_one_is(here: World, receiver: Webhook) -> None:
    ticked(here)
    first, second = tiles_around(HOME, 2)
    for failing in ((first,), (first,), (first, second), (first, second)):
        store(here, evaluation("topology", *failing))
        ticked(here)
    assert [alert["count"] for body in receiver.bodies for alert in body["alerts"]] == [1, 2]


def test_what_was_found_before_the_first_tick_is_not_told_unless_it_is_new(here: World, receiver: Webhook) -> None:
    store(here, evaluation("topology", HOME), age_s=7_200)
    store(here, evaluation("integrity", HOME), age_s=30)

    ticked(here)

    assert told(receiver) == [[("tiles/integrity", "firing")]]


def test_thousands_of_results_are_one_message_of_the_newest(
    here: World, receiver: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticked(here)
    store(here, evaluation("topology", HOME), copies=700)
    store(here, evaluation("integrity", HOME), copies=700)
    store(here, evaluation("topology", passed=True))

    while ticked(here).behind:
        assert receiver.bodies == [], "nobody is told before the newest is read"

    # What began and ended meanwhile is told as over.
    assert told(receiver) == [[("tiles/integrity", "firing"), ("tiles/topology", "resolved")]]
    # What nobody can still be writing is not read again.
    ticked(here, 61)
    ticked(here, 122)
    read = list[int]()
    pages = here.instance.event_log_storage.get_logs_for_all_runs_by_log_id

    def counted(*args: Any, **more: Any) -> Any:
        page = pages(*args, **more)
        read.append(len(page))
        return page

    monkeypatch.setattr(here.instance.event_log_storage, "get_logs_for_all_runs_by_log_id", counted)
    ticked(here, 123)
    assert read
    assert sum(read) < 10


def test_a_result_that_becomes_visible_after_a_newer_one_is_not_lost(here: World, receiver: Webhook) -> None:
    ticked(here)
    store(here, evaluation("topology", passed=True))
    store(here, evaluation("integrity", passed=True))
    with here.instance.event_log_storage.index_connection() as connection:
        # As on Postgres: a lower id that is committed later.
        late = connection.execute(
            SqlEventLogStorageTable.select().order_by(SqlEventLogStorageTable.c.id).limit(1)
        ).mappings().one()  # fmt: skip
        connection.execute(SqlEventLogStorageTable.delete().where(SqlEventLogStorageTable.c.id == late["id"]))
    ticked(here)
    store(here, evaluation("topology", HOME))
    with here.instance.event_log_storage.index_connection() as connection:
        newest = connection.execute(
            SqlEventLogStorageTable.select().order_by(SqlEventLogStorageTable.c.id.desc()).limit(1)
        ).mappings().one()  # fmt: skip
        connection.execute(
            SqlEventLogStorageTable.update()
            .where(SqlEventLogStorageTable.c.id == newest["id"])
            .values(id=late["id"])
        )  # fmt: skip

    ticked(here, 5)

    assert told(receiver) == [[("tiles/topology", "firing")]]


def test_a_storage_that_was_made_anew_is_read_from_its_beginning(here: World, receiver: Webhook) -> None:
    store(here, evaluation("topology", passed=True), copies=50)
    ticked(here)
    with here.instance.event_log_storage.index_connection() as connection:
        connection.execute(SqlEventLogStorageTable.delete())
    store(here, evaluation("integrity", HOME))

    ticked(here)

    assert told(receiver) == [[("tiles/integrity", "firing")]]


def test_a_tick_that_dies_after_it_sent_sends_the_same_message_again(
    here: World, receiver: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticked(here)
    store(here, evaluation("topology", HOME))
    stored: list[str | None] = []
    whole = SqliteLedger.set_value

    def dies_at_the_second(self: SqliteLedger, name: str, value: str | None, **more: object) -> bool:
        stored.append(value)
        if len(stored) == 2:
            raise LedgerUnavailable("gone")
        return whole(self, name, value, **more)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(SqliteLedger, "set_value", dies_at_the_second)
        with pytest.raises(LedgerUnavailable):
            ticked(here)
    store(here, evaluation("integrity", HOME))

    ticked(here, 5)
    ticked(here, 10)

    assert told(receiver) == [
        [("tiles/topology", "firing")], [("tiles/topology", "firing")], [("tiles/integrity", "firing")]
    ]  # fmt: skip
    ids = [body["id"] for body in receiver.bodies]
    assert ids[0] == ids[1] != ids[2]


def test_a_check_that_no_longer_exists_is_over(here: World, receiver: Webhook) -> None:
    ticked(here)
    store(here, evaluation("topology", HOME))
    ticked(here)

    tick(here.stack, here.instance, [name for name in KNOWN if name != "tiles/topology"], now_ms())

    assert told(receiver) == [[("tiles/topology", "firing")], [("tiles/topology", "resolved")]]


def fail(here: World, error: str, *, times: int = 1, tags: Sequence[dict[str, str]] = ({},)) -> list[str]:
    """Runs of the job `build_tiles` that die of an error; their ids."""

    @op
    def breaks() -> None:
        raise ValueError(f"{error}\nand a second line")

    @job
    def build_tiles() -> None:
        breaks()

    return [
        build_tiles.execute_in_process(
            instance=here.instance, raise_on_error=False, tags=tags[number % len(tags)]
        ).run_id
        for number in range(times)
    ]  # fmt: skip


def succeed(here: World) -> None:
    @op
    def works() -> None: ...

    @job
    def build_tiles() -> None:
        works()

    assert build_tiles.execute_in_process(instance=here.instance).success


def test_runs_that_fail_for_one_cause_are_told_once_with_their_batch_and_then_that_it_is_over(
    both: World, receiver: Webhook
) -> None:
    ticked(both)
    tags = [{BATCH_TAG: f"b{number}", "geo_assets/region": "12020"} for number in range(3)]
    runs = fail(both, "tile 14:12020013321101 of postgresql://me:secret@db/x died", times=3, tags=tags)
    ticked(both)
    fail(both, "tile 14:12020013321102 of postgresql://me:secret@db/x died", tags=tags)
    ticked(both, 5)

    (body,) = receiver.bodies
    (alert,) = body["alerts"]
    assert (alert["kind"], alert["name"], alert["severity"]) == ("run", "build_tiles", "warning")
    assert alert["summary"] == "ValueError: tile 14:12020013321101 of postgresql://db/x died"
    assert (alert["count"], alert["region"]) == (3, "12020")
    assert {one["problem"] for one in alert["failing"]} == {"batch b0", "batch b1", "batch b2"}
    assert alert["url"] in {f"http://127.0.0.1:3000/runs/{run}" for run in runs}
    succeed(both)
    ticked(both, 10)
    assert len(receiver.bodies) == 1, "others may still fail so"
    ticked(both, QUIET_MS / 1000 + 10)
    assert [(a["status"], a["summary"]) for a in receiver.bodies[1]["alerts"]] == [
        ("resolved", "runs succeed again; 4 runs failed so")
    ]


def test_a_run_of_no_batch_that_fails_wakes_somebody_and_another_error_is_another_alert(
    here: World, receiver: Webhook
) -> None:
    ticked(here)
    fail(here, "disk is full", tags=[{"dagster/partition": "14:12020013321101"}])
    fail(here, "no such table")

    ticked(here)

    (body,) = receiver.bodies
    assert {(a["severity"], a["summary"], a["failing"][0]["problem"]) for a in body["alerts"]} == {
        ("error", "ValueError: disk is full", "partition 14:12020013321101"), ("error", "ValueError: no such table", "")
    }  # fmt: skip


def test_the_sensor_as_dagster_calls_it_never_fails_and_shows_where_it_reads(
    here: World, receiver: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate():
        return check_alerts(
            build_sensor_context(
                instance=here.instance,
                repository_def=defs.get_repository_def(),
                resources={"stack": StackResource()},
            )
        )

    assert evaluate().skip_reason.skip_message == "nothing is wrong"
    receiver.status = 500
    store(here, evaluation("topology", HOME))

    result = evaluate()

    assert re.fullmatch(
        r"not delivered: 127\.0\.0\.1:\d+#[0-9a-f]{6}, it answered 500; "
        r"1 messages are not delivered yet; 1 alerts stand",
        result.skip_reason.skip_message,
    )
    assert "ASSET_CHECK_EVALUATION" in result.cursor

    def away(*_: object) -> str:
        raise LedgerUnavailable("the ledger is away")

    monkeypatch.setattr(SqliteLedger, "get_value", away)
    assert "the ledger is away" in evaluate().skip_reason.skip_message
