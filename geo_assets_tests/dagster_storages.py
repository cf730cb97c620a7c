"""Instances of Dagster on both of its storages, as `geo-assets up` makes them, and events of any age in them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest
import sqlalchemy as db
from dagster import DagsterInstance
from dagster._core.instance import RUNLESS_RUN_ID
from psycopg import sql

from geo_assets_tests.dagster_world import ROOT, _empty_storage
from geo_assets_tests.postgres_rooms import postgres_room


@contextmanager
def instance_on(stack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DagsterInstance]:
    """An instance: `embedded` on SQLite, `production` in a schema of its own on the real Postgres."""
    monkeypatch.setenv("DAGSTER_EVENT_BATCH_SIZE", "1000")
    if stack == "embedded":
        folder = tmp_path / "dagster"
        shutil.copytree(_empty_storage(), folder)
        monkeypatch.setenv("DAGSTER_HOME", str(folder))
        monkeypatch.setenv("GEO_ASSETS_DAGSTER_STORAGE", str(folder))
        with DagsterInstance.from_config(str(folder)) as instance:
            yield instance
        return
    with postgres_room() as room:
        with psycopg.connect(room.url, autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(room.schema)))
        url = f"{room.url}&options={quote(f'-csearch_path={room.schema}', safe='')}"
        monkeypatch.setenv("GEO_ASSETS_DAGSTER_POSTGRES_URL", url)
        monkeypatch.setenv("GEO_ASSETS_DAGSTER_STORAGE", str(tmp_path / "dagster"))
        folder = tmp_path / "dagster"
        folder.mkdir()
        text = (ROOT / "deploy" / "dagster.yaml").read_text()
        local = (ROOT / "dagster.yaml").read_text()
        from geo_assets.dagster_home import _LOGS

        logs = _LOGS.search(local)
        assert logs is not None
        (folder / "dagster.yaml").write_text(_LOGS.sub(lambda _: logs[0], text))
        with DagsterInstance.from_config(str(folder)) as instance:
            yield instance


def age(instance: DagsterInstance, seconds: float) -> None:
    """Make everything that is stored older by so many seconds; databases of single runs but for their files' times."""
    storage = instance.event_log_storage
    with storage.index_connection() as connection:
        _older(connection, "event_logs", "timestamp", seconds)
        _older(connection, "asset_check_executions", "evaluation_event_timestamp", seconds)
        _older(connection, "asset_check_executions", "create_timestamp", seconds)
    if storage.is_run_sharded:
        for run_id in [*storage.get_all_run_ids(), RUNLESS_RUN_ID]:
            with storage.run_connection(run_id) as connection:
                _older(connection, "event_logs", "timestamp", seconds)
    with instance.run_storage.connect() as connection:
        _older(connection, "runs", "update_timestamp", seconds)
        _older(connection, "bulk_actions", "timestamp", seconds)
        connection.exec_driver_sql(
            f"UPDATE runs SET start_time = start_time - {seconds}, end_time = end_time - {seconds}"
        )
    with instance.schedule_storage.connect() as connection:
        _older(connection, "job_ticks", "timestamp", seconds)


def _older(connection, table: str, column: str, seconds: float) -> None:
    if connection.dialect.name == "sqlite":
        value = f"strftime('%Y-%m-%d %H:%M:%f000', {column}, '-{seconds} seconds')"
    else:
        value = f"{column} - interval '{seconds} seconds'"
    connection.execute(db.text(f"UPDATE {table} SET {column} = {value}".replace(":%", "\\:%")))
