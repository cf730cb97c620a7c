"""One `up` for one production stack: two that want it, one that is killed, and a Postgres that ends its sessions."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from geo_assets.configuration import ConfigurationError
from geo_assets.services.sole_up import AlreadyRunningElsewhere, SoleUp
from geo_assets.settings import Settings
from geo_assets_tests.postgres_rooms import PostgresRoom, postgres_room
from geo_assets_tests.waiting import until

HOLDER = """
import sys, time
from geo_assets.services.sole_up import SoleUp
from geo_assets.settings import Settings
SoleUp(Settings(postgres_url=sys.argv[1], postgres_schema=sys.argv[2]), print).take()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def room() -> Iterator[PostgresRoom]:
    with postgres_room() as room:
        yield room


@pytest.fixture
def sole(room: PostgresRoom) -> Iterator[Callable[..., SoleUp]]:
    made: list[SoleUp] = []

    def make(say: Callable[[str], None] = lambda _: None, **changes: Any) -> SoleUp:
        settings = Settings(**{"postgres_url": room.url, "postgres_schema": room.schema, **changes})
        made.append(SoleUp(settings, say, look_s=0.1))
        return made[-1]

    yield make
    for one in made:
        one.release()


def end_sessions(room: PostgresRoom) -> None:
    """What a restart of the server does to the holder's session."""
    with psycopg.connect(room.url, autocommit=True) as db:
        db.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s",
            (f"geo_assets {room.schema}_dagster up",),
        )


def test_a_second_one_is_refused_in_a_line_that_names_the_setting_until_the_first_ends(
    sole: Callable[..., SoleUp], room: PostgresRoom
) -> None:
    first, second = sole(), sole()
    first.take()
    with pytest.raises(AlreadyRunningElsewhere, match="GEO_ASSETS_POSTGRES_SCHEMA") as refused:
        second.take()
    assert f"{room.schema}_dagster" in str(refused.value)
    assert "\n" not in str(refused.value)
    first.release()
    second.take()
    assert second.held


def test_another_schema_is_another_stack(sole: Callable[..., SoleUp], room: PostgresRoom) -> None:
    sole().take()
    sole(postgres_schema=f"{room.schema}_b").take()


def test_a_holder_killed_with_9_leaves_the_lock_free_at_once(sole: Callable[..., SoleUp], room: PostgresRoom) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, room.url, room.schema], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(AlreadyRunningElsewhere):
            sole().take()
    finally:
        holder.kill()
        holder.wait()
    sole().take()


def test_a_session_that_the_server_ended_is_taken_again_by_itself(
    sole: Callable[..., SoleUp], room: PostgresRoom
) -> None:
    said: list[str] = []
    first = sole(said.append)
    first.take()
    end_sessions(room)
    until(lambda: "held again" in " ".join(said))
    with pytest.raises(AlreadyRunningElsewhere):
        sole().take()


def test_one_that_lost_the_stack_meanwhile_says_so_once_and_has_it_again_afterwards(
    sole: Callable[..., SoleUp], room: PostgresRoom
) -> None:
    said: list[str] = []
    first = SoleUp(Settings(postgres_url=room.url, postgres_schema=room.schema), said.append, look_s=1.5)  # type: ignore[arg-type]
    try:
        first.take()
        end_sessions(room)
        second = sole()
        second.take()
        until(lambda: any("ANOTHER" in text for text in said))
        time.sleep(3.5)
        assert sum("ANOTHER" in text for text in said) == 1
        second.release()
        until(lambda: first.held)
    finally:
        first.release()


def test_a_server_that_is_away_is_one_line_that_names_the_setting_and_no_password() -> None:
    settings = Settings(postgres_url="postgresql://me:secret@127.0.0.1:1/map")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="GEO_ASSETS_POSTGRES_URL") as refused:
        SoleUp(settings, lambda _: None).take()
    assert "secret" not in str(refused.value)


@pytest.mark.timeout(120)
def test_up_in_another_home_on_the_same_stack_ends_in_one_line_and_changes_nothing(
    sole: Callable[..., SoleUp], room: PostgresRoom, tmp_path: Path
) -> None:
    from geo_assets_tests.running_platform import Platform

    sole().take()
    platform = Platform(
        tmp_path / "home",
        GEO_ASSETS_STACK="production",
        GEO_ASSETS_POSTGRES_URL=room.url,
        GEO_ASSETS_POSTGRES_SCHEMA=room.schema,
        GEO_ASSETS_KAFKA_SERVERS="127.0.0.1:1",
        GEO_ASSETS_REDIS_URL="redis://127.0.0.1:1/0",
        GEO_ASSETS_TILE_STORE_URL="s3://nowhere/here",
    )
    done = platform.command("up")
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "GEO_ASSETS_POSTGRES_SCHEMA" in done.stderr
    assert not (tmp_path / "home" / "stack.json").exists()
    assert not (tmp_path / "home" / "up.json").exists()
    with psycopg.connect(room.url) as db:
        assert db.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (room.schema,)).fetchone() is None
