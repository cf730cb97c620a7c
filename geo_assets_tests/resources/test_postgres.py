"""Postgres as every adapter reaches it: one-line errors without the password, restarts, limits, versioned tables."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
from psycopg import sql

from geo_assets_tests.postgres_rooms import PostgresRoom, postgres_room
from geo_assets_tests.waiting import patient
from resources.migrations import Migration, SchemaBehind, SchemaTooNew, check, migrate, version
from resources.postgres import conninfo, explained, open_pool, where, with_retries

SETTING = "GEO_ASSETS_POSTGRES_URL"


class AwayError(Exception):
    """The port's error of these tests."""


@pytest.fixture
def room() -> Iterator[PostgresRoom]:
    with postgres_room() as room:
        yield room


def changed(url: str, **parts: object) -> str:
    """The URL with another `password`, `port`, `host`, `user` or `database`."""
    split = urlsplit(url)
    user, password = parts.get("user", split.username), parts.get("password", split.password)
    host, port = parts.get("host", split.hostname), parts.get("port", split.port)
    path = f"/{parts['database']}" if "database" in parts else split.path
    return urlunsplit(split._replace(netloc=f"{user}:{password}@{host}:{port}", path=path))


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"password": "not-this-one"}, "password authentication failed"),
        ({"port": 1}, "refused"),
        ({"host": "no-such-host.invalid"}, "no-such-host.invalid"),
        ({"database": "no_such_database"}, "no_such_database"),
        ({"user": "nobody_here", "password": "not-this-one"}, "nobody_here"),
    ],
    ids=["password", "port", "host", "database", "user"],
)
def test_a_server_that_cannot_be_used_is_one_line_with_the_setting_and_no_password(
    room: PostgresRoom, parts: dict[str, object], says: str
) -> None:
    url = changed(room.url, **parts)
    secret = urlsplit(url).password or ""
    began = time.monotonic()
    with pytest.raises(AwayError) as found, explained(AwayError, SETTING, url):
        open_pool(url, room.schema, 2)
    message = str(found.value)
    assert says in message
    assert SETTING in message
    assert "\n" not in message
    assert secret not in message
    assert found.value.__suppress_context__
    assert time.monotonic() - began < patient(15)


def test_a_url_that_is_none_is_named_by_its_setting_and_never_shown() -> None:
    url = "postgres_geo:secret-word@somewhere"
    with pytest.raises(AwayError, match=SETTING) as found, explained(AwayError, SETTING, url):
        open_pool(url, "geo", 1)
    assert "secret-word" not in str(found.value)


def test_what_a_message_says_of_a_server_is_never_its_password() -> None:
    assert where("postgresql://me:secret@db.example:6432/maps") == "db.example:6432/maps as me"
    assert where("postgresql://db.example/maps?password=secret") == "db.example:5432/maps"
    assert "secret" not in where("nonsense:secret@")


def test_what_the_url_says_goes_before_our_own_parameters() -> None:
    given = "postgresql://me@db/maps?connect_timeout=60&options=-c%20lock_timeout%3D1s&application_name=mine"
    parameters = psycopg.conninfo.conninfo_to_dict(conninfo(given, "geo"))
    assert parameters["connect_timeout"] == "60"
    assert parameters["application_name"] == "mine"
    assert str(parameters["options"]).endswith("-c lock_timeout=1s -c search_path=geo,public")
    assert parameters["target_session_attrs"] == "read-write"


def test_connections_that_the_server_ended_are_replaced_without_an_error(room: PostgresRoom) -> None:
    pool = open_pool(room.url, room.schema, 3)
    try:
        for _ in range(3):
            with pool.connection() as one, pool.connection() as two:
                one.execute("SELECT 1")
                two.execute("SELECT 1")
            with psycopg.connect(room.url.partition("?")[0], autocommit=True) as db:
                for pid in room.backends():
                    db.execute("SELECT pg_terminate_backend(%s)", (pid,))
            with pool.connection() as again:
                assert again.execute("SELECT 1").fetchone() == (1,)
    finally:
        pool.close()


def test_a_pool_whose_connections_are_all_in_use_says_so_and_serves_the_next_one(
    room: PostgresRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = open_pool(room.url, room.schema, 1)
    pool.timeout = 0.3
    try:
        with pool.connection(), pytest.raises(AwayError, match="in use"), explained(AwayError, SETTING, room.url):
            pool.getconn()
        with pool.connection() as db:
            assert db.execute("SELECT 1").fetchone() == (1,)
    finally:
        pool.close()


def test_more_threads_than_connections_wait_for_their_turn(room: PostgresRoom) -> None:
    pool = open_pool(room.url, room.schema, 2)
    answers: list[int] = []

    def ask() -> None:
        for _ in range(10):
            with pool.connection() as db:
                answers.append(db.execute("SELECT 1").fetchone()[0])  # type: ignore[index]

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [1] * 80
    assert len(room.backends()) == 2
    pool.close()


def test_a_lock_that_is_not_let_go_is_unavailable_and_not_a_wait_for_ever(room: PostgresRoom) -> None:
    migrate(room.url, room.schema, "test", [ONE])
    pool = open_pool(f"{room.url}&options=-c%20lock_timeout%3D200ms", room.schema, 1)
    with psycopg.connect(conninfo(room.url, room.schema)) as holder:
        holder.execute("LOCK TABLE thing")
        with (
            pytest.raises(AwayError, match="lock timeout"),
            explained(AwayError, SETTING, room.url),
            pool.connection() as db,
        ):
            db.execute("INSERT INTO thing VALUES (1)")
    pool.close()


def test_a_missing_table_or_schema_says_what_to_run(room: PostgresRoom) -> None:
    pool = open_pool(room.url, room.schema, 1)
    with (
        pytest.raises(AwayError, match="geo-assets migrate"),
        explained(AwayError, SETTING, room.url),
        pool.connection() as db,
    ):
        db.execute("SELECT * FROM thing")
    pool.close()


def test_the_victim_of_a_deadlock_is_done_again(room: PostgresRoom) -> None:
    migrate(room.url, room.schema, "test", [ONE])
    with psycopg.connect(conninfo(room.url, room.schema)) as db:
        db.execute("INSERT INTO thing VALUES (1), (2)")
    met = threading.Barrier(2, timeout=patient(30))
    tries: list[int] = []

    def crosswise(first: int, second: int) -> None:
        def work() -> None:
            tries.append(first)
            with psycopg.connect(conninfo(room.url, room.schema)) as db:
                db.execute("UPDATE thing SET id = id WHERE id = %s", (first,))
                if len(tries) <= 2:
                    met.wait()
                db.execute("UPDATE thing SET id = id WHERE id = %s", (second,))

        with_retries(work)

    threads = [threading.Thread(target=crosswise, args=order) for order in ((1, 2), (2, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patient(30))
    assert len(tries) == 3


# -- versions of tables ----------------------------------------------------------------------------------------------
ONE = Migration(1, "things", ("CREATE TABLE thing (id bigint)",))
TWO = Migration(2, "names of things", ("ALTER TABLE thing ADD name text", "UPDATE thing SET name = 'thing ' || id"))
BROKEN = Migration(2, "broken", ("ALTER TABLE thing ADD name text", "SELECT 1/0"))


def rows(room: PostgresRoom, query: str) -> list[tuple]:
    with psycopg.connect(conninfo(room.url, room.schema)) as db:
        return db.execute(query.encode()).fetchall()


def test_steps_are_applied_once_in_order_and_what_is_stored_stays(room: PostgresRoom) -> None:
    assert migrate(room.url, room.schema, "test", [ONE]) == [1]
    assert migrate(room.url, room.schema, "test", [ONE]) == []
    with psycopg.connect(conninfo(room.url, room.schema)) as db:
        db.execute("INSERT INTO thing VALUES (7)")
    assert migrate(room.url, room.schema, "test", [ONE, TWO]) == [2]
    assert rows(room, "SELECT id, name FROM thing") == [(7, "thing 7")]
    assert rows(room, "SELECT component, number, title FROM schema_versions ORDER BY number") == [
        ("test", 1, "things"),
        ("test", 2, "names of things"),
    ]


def test_components_of_one_schema_have_versions_of_their_own(room: PostgresRoom) -> None:
    migrate(room.url, room.schema, "test", [ONE])
    assert migrate(room.url, room.schema, "other", [Migration(1, "others", ("CREATE TABLE other (id bigint)",))]) == [1]
    assert migrate(room.url, room.schema, "test", [ONE, TWO]) == [2]


def test_a_step_that_fails_leaves_the_version_before_it_whole(room: PostgresRoom) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero):
        migrate(room.url, room.schema, "test", [ONE, BROKEN])
    assert rows(room, "SELECT number FROM schema_versions") == [(1,)]
    assert rows(room, "SELECT count(*) FROM pg_attribute WHERE attrelid = 'thing'::regclass AND attname = 'name'") == [
        (0,)
    ]
    assert migrate(room.url, room.schema, "test", [ONE, TWO]) == [2]


def test_tables_of_a_later_version_are_refused_with_both_numbers(room: PostgresRoom) -> None:
    migrate(room.url, room.schema, "test", [ONE, TWO])
    with pytest.raises(SchemaTooNew, match=r"version 2.*up to 1.*newer one"):
        migrate(room.url, room.schema, "test", [ONE])
    with psycopg.connect(room.url) as db:
        with pytest.raises(SchemaTooNew, match=room.schema):
            check(db, room.schema, "test", [ONE])
        check(db, room.schema, "test", [ONE, TWO])


def test_older_or_missing_tables_say_what_to_run(room: PostgresRoom) -> None:
    with psycopg.connect(room.url) as db, pytest.raises(SchemaBehind, match=r"no tables of test.*geo-assets migrate"):
        check(db, room.schema, "test", [ONE])
    migrate(room.url, room.schema, "test", [ONE])
    with psycopg.connect(room.url) as db:
        assert version(db, room.schema, "test") == 1
        with pytest.raises(SchemaBehind, match=r"version 1.*needs 2.*geo-assets migrate"):
            check(db, room.schema, "test", [ONE, TWO])


def test_migrations_at_once_apply_each_step_once(room: PostgresRoom) -> None:
    applied: list[list[int]] = []
    start = threading.Barrier(4)

    def one() -> None:
        start.wait()
        applied.append(migrate(room.url, room.schema, "test", [ONE, TWO]))

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(number for numbers in applied for number in numbers) == [1, 2]


def test_steps_out_of_order_are_a_mistake_of_the_program(room: PostgresRoom) -> None:
    with pytest.raises(ValueError, match="without gaps"):
        migrate(room.url, room.schema, "test", [ONE, replace(TWO, number=3)])


def test_a_user_who_may_not_make_the_schema_can_migrate_one_that_is_there(room: PostgresRoom) -> None:
    role = f"{room.schema}_user"
    with psycopg.connect(room.url, autocommit=True) as db:
        if not db.execute("SELECT rolcreaterole OR rolsuper FROM pg_roles WHERE rolname = current_user").fetchone()[0]:  # type: ignore[index]
            from geo_assets_tests.real_services import settings_of

            db.close()
            admin = settings_of("postgres")["TEST_POSTGRES_ADMIN_URL"]
        else:
            admin = room.url
    with psycopg.connect(admin, autocommit=True) as db:
        name, schema = sql.Identifier(role), sql.Identifier(room.schema)
        db.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'plain'").format(name))
        db.execute(sql.SQL("CREATE SCHEMA {} AUTHORIZATION {}").format(schema, name))
        try:
            limited = changed(room.url, user=role, password="plain")
            assert migrate(limited, room.schema, "test", [ONE]) == [1]
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                migrate(limited, f"{room.schema}_other", "test", [ONE])
        finally:
            db.execute(sql.SQL("DROP OWNED BY {0} CASCADE; DROP ROLE {0}").format(name))
