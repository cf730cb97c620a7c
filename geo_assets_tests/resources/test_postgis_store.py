"""The feature store in PostGIS under the contract and beside the embedded one; its own: locks, plans, faults."""

from __future__ import annotations

import itertools
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from geo_assets_tests.postgres_rooms import PostgresRoom, postgres_room
from geo_assets_tests.real_services import room as name_of_a_room
from geo_assets_tests.real_services import settings_of
from geo_assets_tests.resources.contract_feature_store import (
    WORLD,
    Box,
    Connect,
    FeatureStoreContract,
    delete,
    feature,
    hint,
    no_plan,
    run_elsewhere,
    upsert,
)
from geo_assets_tests.waiting import patient
from resources.feature_store import postgis_reading, postgis_writing
from resources.feature_store.geopackage import GeoPackageStore
from resources.feature_store.postgis import PostgisStore
from resources.feature_store.postgis_schema import COMPONENT, MIGRATIONS
from resources.feature_store.protocol import (
    Change,
    Edit,
    FeatureStore,
    FeatureStoreError,
    FeatureStoreUnavailable,
    OutboxRow,
    TileBox,
)
from resources.migrations import SchemaBehind, SchemaError, SchemaTooNew, migrate

SETTINGS = "GEO_ASSETS_FEATURE_STORE_URL or GEO_ASSETS_POSTGRES_URL"


@pytest.fixture
def room() -> Iterator[PostgresRoom]:
    with postgres_room() as room:
        migrate(room.url, room.schema, COMPONENT, MIGRATIONS)
        yield room


@pytest.fixture
def connect(room: PostgresRoom) -> Connect:
    def opened() -> PostgisStore:
        # A process that a test killed may have left its last statement to the server.
        room.wait_until_idle()
        return PostgisStore(room.url, room.schema)

    return opened


@pytest.fixture
def opening(room: PostgresRoom) -> str:
    return (
        "from resources.feature_store.postgis import PostgisStore\n"
        f"store = PostgisStore({room.url!r}, {room.schema!r}, pool=2)"
    )


class TestPostgisStore(FeatureStoreContract):
    pass


@pytest.fixture
def store(room: PostgresRoom) -> Iterator[PostgisStore]:
    store = PostgisStore(room.url, room.schema)
    yield store
    store.close()


def direct(room: PostgresRoom) -> psycopg.Connection:
    """A connection of nobody in particular, as QGIS or psql would have."""
    return psycopg.connect(room.url, autocommit=True, options=f"-c search_path={room.schema},public")


# -- beside the embedded store ---------------------------------------------------------------------------------------
_THIRDS = st.integers(-30, 30).map(lambda n: n / 3)
_COORDINATES = st.one_of(_THIRDS, _THIRDS.map(lambda x: float(np.nextafter(x, 90))), st.floats(-80, 80, width=64))
_BOXES = st.tuples(_COORDINATES, _COORDINATES, _COORDINATES, _COORDINATES).map(
    lambda c: (min(c[0], c[2]), min(c[1], c[3]), max(c[0], c[2]), max(c[1], c[3]))
)
_ZOOMS = st.sampled_from([(0, 22), (14, 18), (3, 15), (13, 14), (1, 0), (22, 22)])


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    edits=st.lists(
        st.tuples(st.integers(1, 6), st.integers(1, 3), st.none() | _BOXES, _ZOOMS, st.booleans()), max_size=25
    ),
    zooms=st.dictionaries(st.integers(1, 6), _ZOOMS, max_size=3),
    asked=st.lists(st.tuples(st.integers(0, 22), _BOXES), max_size=12),
)
def test_both_stores_end_alike_and_show_the_same_in_every_box(
    room: PostgresRoom,
    store: PostgisStore,
    tmp_path_factory: pytest.TempPathFactory,
    edits: list,
    zooms: dict,
    asked: list,
) -> None:
    with direct(room) as db:
        db.execute("TRUNCATE standing, applied_keys, outbox, layer_totals, source_times")
        db.execute("UPDATE totals SET applied_keys = 0, tombstones = 0, watermark_ms = 0")
    embedded = GeoPackageStore(tmp_path_factory.mktemp("oracle") / "features.gpkg")
    production = store
    batch: list[Edit] = []
    for number, (of, version, box, limits, deleted) in enumerate(edits):
        made = feature(str(of), version, box=box, zooms=limits, content=str(number % 3), time_ms=number + 1)
        edit = delete(str(of), version) if deleted else upsert(made)
        batch.append(replace(edit, event_key=f"{number % 20}"))
    for start in range(0, len(batch), 7):
        ends = [each.apply(batch[start : start + 7], _hints, now_ms=start) for each in (embedded, production)]
        assert ends[0] == ends[1]
    for each in (embedded, production):
        each.set_zooms({("city", str(of)): limits for of, limits in zooms.items()})
    boxes = [TileBox(str(i), zoom, *box) for i, (zoom, box) in enumerate(asked)]
    assert _answers(embedded, boxes) == _answers(production, boxes)
    assert embedded.counts() == production.counts()
    assert [replace(row, id=0) for row in embedded.owed()] == [replace(row, id=0) for row in production.owed()]
    for of in range(1, 7):
        assert embedded.get("city", str(of)) == production.get("city", str(of))
    for bbox in [None, *(box for _, box in asked)]:
        found = [sorted(f.feature_id for f in each.scan(bbox=bbox)) for each in (embedded, production)]
        assert found[0] == found[1]
    embedded.close()


def _hints(changes: Sequence[Change]) -> list[OutboxRow]:
    return [hint(f"0:{change.edit.version}") for change in changes]


def _answers(store: FeatureStore, boxes: list[TileBox]) -> tuple:
    digests, rows = store.digests(boxes), store.features(boxes)
    shown = sorted(
        (tile, rows.source[r], rows.feature_id[r], rows.layer[r], rows.geometry[r], rows.properties[r],
         bytes(rows.digest[r]), int(rows.vertex_count[r]), int(rows.event_time_ms[r]))
        for tile, r in zip(rows.pair_tile.tolist(), rows.pair_row.tolist(), strict=True)
    )  # fmt: skip
    pairs = sorted(zip(digests.pair_tile.tolist(), map(bytes, digests.pair_digest), digests.pair_vertices, strict=True))
    named = store.rows(digests.pair_number.tolist())
    by_number = sorted(
        zip(named.source, named.feature_id, named.layer, named.geometry, named.properties, map(bytes, named.digest),
            strict=True)
    )  # fmt: skip
    return shown, pairs, digests.data_time_ms.tolist(), sorted(rows.feature_id), by_number


# -- many at once ----------------------------------------------------------------------------------------------------
def test_ids_of_outbox_rows_ascend_in_the_order_of_the_commits(room: PostgresRoom, store: PostgisStore) -> None:
    seen: list[int] = []
    done = threading.Event()

    def watch() -> None:
        other = PostgisStore(room.url, room.schema)
        while True:
            last = done.is_set()
            seen.extend(row.id for row in other.owed() if row.id > (seen[-1] if seen else 0))
            if last:
                break
        other.close()

    def edit(writer: int) -> None:
        for i in range(40):
            owed = [hint("0:")] * (1 + i % 3)
            store.apply([upsert(feature(f"{writer}{i}"))], lambda _, owed=owed: owed, now_ms=5)

    watcher = threading.Thread(target=watch)
    writers = [threading.Thread(target=edit, args=(writer,)) for writer in range(3)]
    for thread in [watcher, *writers]:
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    watcher.join()
    # A reader that goes on behind the last id it has seen misses none.
    assert seen == [row.id for row in store.owed()]


def test_whoever_follows_the_log_of_changes_misses_none_of_many_writers(
    room: PostgresRoom, store: PostgisStore
) -> None:
    store.apply([upsert(feature("0", zooms=(0, 22)))], no_plan, now_ms=5)
    position = store.digests([WORLD]).position
    done = threading.Event()
    seen: dict[int, bytes] = {}

    def watch() -> None:
        nonlocal position
        other = PostgisStore(room.url, room.schema)
        while True:
            last = done.is_set()
            changes = other.changes(position, 10_000)
            assert changes is not None
            seen.update(zip(changes.number.tolist(), map(bytes, changes.digest), strict=True))
            position = changes.position
            if last:
                break
        other.close()

    def edit(writer: int) -> None:
        for i in range(40):
            version = i + 1
            made = [feature(f"{writer}{n}", version, content=f"{i}", zooms=(0, 22)) for n in range(1 + i % 3)]
            # Beyond a hundred edits a batch takes another way; zooms are rewritten without any edit.
            more = [feature(f"{writer}{1_000 + n}", version, zooms=(0, 22)) for n in range(101 if i % 20 == 7 else 0)]
            store.apply(list(map(upsert, made + more)), no_plan, now_ms=5)
            if i % 5 == 0:
                store.set_zooms({("city", f"{writer}0"): (i % 3, 22)})

    watcher = threading.Thread(target=watch)
    writers = [threading.Thread(target=edit, args=(writer,)) for writer in range(1, 4)]
    for thread in [watcher, *writers]:
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    watcher.join()
    standing = store.digests([WORLD])
    now = dict(zip(standing.pair_number.tolist(), map(bytes, standing.pair_digest), strict=True))
    assert len(now) == 1 + 3 * (3 + 101)
    assert {number: seen.get(number) for number in now if number in seen} == {n: now[n] for n in seen}
    assert len(seen) == len(now) - 1


def test_a_feature_made_deleted_and_changed_by_many_at_once_ends_as_its_newest_version_says(
    room: PostgresRoom, store: PostgisStore
) -> None:
    stores = [PostgisStore(room.url, room.schema) for _ in range(3)]
    ids = [str(i) for i in range(12)]
    faults: list[BaseException] = []

    def edit(number: int) -> None:
        # Each in another order, and each version by one writer alone: whatever comes first, the highest stands.
        try:
            for turn in range(12):
                version = turn * 3 + number + 1
                order = ids[turn:] + ids[:turn] if number % 2 else ids[::-1]
                edits = [
                    delete(i, version) if version % 5 == 0 else upsert(feature(i, version, content=str(version)))
                    for i in order
                ]
                stores[number].apply(edits, no_plan, now_ms=5)
                stores[number].set_zooms({("city", i): (14, 18) for i in order})
                stores[number].forget_keys([edit.event_key for edit in edits[:2]])
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=edit, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert {f.version for f in store.scan()} == {36}
    counts = store.counts()
    assert counts == replace(counts, by_layer={"buildings": 12}, tombstones=0)
    with direct(room) as db:
        assert db.execute("SELECT count(*) FROM applied_keys").fetchone() == (counts.applied_keys,)
    for each in stores:
        each.close()


def test_rule_1_a_delete_and_an_older_create_of_an_unknown_feature_at_once_leave_the_tombstone(
    room: PostgresRoom, store: PostgisStore
) -> None:
    other = PostgisStore(room.url, room.schema)
    for i in range(25):
        barrier = threading.Barrier(2)

        def create(i: int = i, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            other.apply([upsert(feature(str(i), 1))], no_plan, now_ms=5)

        thread = threading.Thread(target=create)
        thread.start()
        barrier.wait()
        store.apply([delete(str(i), 2)], no_plan, now_ms=5)
        thread.join()
    assert list(store.scan()) == []
    assert store.counts().tombstones == 25
    other.close()


def test_rule_2_processes_that_bring_the_same_event_key_for_different_features_apply_one(
    store: PostgisStore, opening: str
) -> None:
    code = """
applied = 0
for i in range(60):
    done = store.apply([upsert(feature(str(i) + NAME), f"key {i}")], no_plan, now_ms=5)
    applied += done[0].outcome == "applied"
print(applied)
"""
    processes = [run_elsewhere(opening, code.replace("NAME", repr(str(n)))) for n in range(2)]
    assert sum(int(process.communicate(timeout=patient(60))[0]) for process in processes) == 60
    assert store.counts().applied_keys == 60


def test_a_scan_takes_no_connection_from_the_pool(room: PostgresRoom) -> None:
    store = PostgisStore(room.url, room.schema, pool=1)
    store.apply([upsert(feature(str(i))) for i in range(5)], no_plan, now_ms=5)
    for one, other in itertools.product(store.scan(), store.scan()):
        store.apply([upsert(replace(one, version=2), f"{one.feature_id} {other.feature_id}")], no_plan, now_ms=5)
    assert {f.version for f in store.scan()} == {2}
    store.close()
    assert room.backends() == []


# -- one snapshot, by index, durable ---------------------------------------------------------------------------------
def _city(store: PostgisStore, count: int = 3_000) -> None:
    side = int(count**0.5)
    boxes: list[Box] = [
        (i % side / 100, i // side / 100, i % side / 100 + 0.004, i // side / 100 + 0.004) for i in range(count)
    ]
    edits = [upsert(feature(str(i), box=box, zooms=(14, 18))) for i, box in enumerate(boxes)]
    store.apply([*edits, upsert(feature("wide", zooms=(0, 18)))], no_plan, now_ms=5)


@pytest.mark.parametrize(("zoom", "index"), [(15, "standing_geom"), (0, "standing_place")])
def test_digests_are_found_by_an_index_that_reads_little_more_than_what_shows(
    room: PostgresRoom, store: PostgisStore, zoom: int, index: str
) -> None:
    _city(store)
    box = WORLD if zoom == 0 else TileBox("t", 15, 0.0, 0.0, 0.05, 0.05)
    asked = {name: f"{{{getattr(box, name)}}}" for name in ("zoom", "west", "south", "east", "north")} | {
        "zoom": f"{{{zoom}}}"
    }
    with direct(room) as db:
        db.execute("ANALYZE standing")
        query = f"EXPLAIN (ANALYZE, FORMAT json) {postgis_reading.DIGESTS}"
        found = db.execute(query.encode(), asked).fetchall()
    nodes = list(_nodes(found[0][0][0]["Plan"]))
    (used,) = [node for node in nodes if node.get("Index Name") == index]
    assert used["Actual Loops"] == 1
    assert used["Actual Rows"] + used.get("Rows Removed by Filter", 0) <= 40
    assert not [node for node in nodes if node["Node Type"] == "Seq Scan"]


def _nodes(plan: dict) -> Iterator[dict]:
    yield plan
    for part in plan.get("Plans", ()):
        yield from _nodes(part)


def test_an_edit_is_durable_even_where_the_server_answers_early(room: PostgresRoom) -> None:
    store = PostgisStore(f"{room.url}&options=-c%20synchronous_commit%3Doff", room.schema, pool=1)
    chosen: list[str] = []

    def plan(changes: Sequence[Change]) -> list[OutboxRow]:
        return [hint("0:")]

    with store._pool.connection() as db:  # pyright: ignore[reportPrivateUsage]
        assert db.execute("SHOW synchronous_commit").fetchone() == ("off",)
        # Deferred triggers run at the commit, when the transaction's last setting holds.
        db.execute("CREATE TABLE said (how text)")
        db.execute(
            """CREATE FUNCTION say() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                 INSERT INTO said VALUES (current_setting('synchronous_commit')); RETURN NULL; END $$"""
        )
        db.execute(
            """CREATE CONSTRAINT TRIGGER say AFTER INSERT ON outbox DEFERRABLE INITIALLY DEFERRED
               FOR EACH ROW EXECUTE FUNCTION say()"""
        )
    store.apply([upsert(feature())], plan, now_ms=5)
    with store._pool.connection() as db:  # pyright: ignore[reportPrivateUsage]
        chosen = [row[0] for row in db.execute("SELECT how FROM said")]
    assert chosen == ["on"]
    store.close()


# -- what people see -------------------------------------------------------------------------------------------------
def test_views_show_features_and_tombstones_apart(room: PostgresRoom, store: PostgisStore) -> None:
    store.apply([upsert(feature("1")), upsert(feature("2", box=None)), delete("3")], no_plan, now_ms=7)
    with direct(room) as db:
        seen = db.execute("SELECT feature_id, ST_XMin(geom), ST_SRID(geom) FROM features ORDER BY 1").fetchall()
        assert seen == [("1", 10.0, 4326), ("2", None, None)]
        assert db.execute("SELECT feature_id, version, written_ms FROM tombstones").fetchall() == [("3", 2, 7)]
        geometry = db.execute(
            "SELECT srid, type FROM geometry_columns WHERE f_table_schema = %s AND f_table_name = 'features'",
            (room.schema,),
        ).fetchone()
        assert geometry == (4326, "GEOMETRY")


# -- faults ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"password": "wrong-secret"}, "password authentication failed"),
        ({"port": "1"}, "refused"),
        ({"host": "no-such-host.invalid"}, "resolve|known|address"),
        ({"dbname": "no_such_database"}, "does not exist"),
    ],
)
def test_what_keeps_a_store_from_opening_is_one_line_that_names_the_setting_and_no_password(
    room: PostgresRoom, change: dict[str, str], said: str
) -> None:
    parts = {**conninfo_to_dict(room.url), **change}
    secret = str(parts["password"])
    url = "postgresql://{user}:{password}@{host}:{port}/{dbname}".format(**parts)
    with pytest.raises(FeatureStoreUnavailable, match=said) as caught:
        PostgisStore(url, room.schema)
    message = str(caught.value)
    assert SETTINGS in message
    assert f"{parts['host']}:{parts['port']}" in message
    assert secret not in message
    assert "\n" not in message


def test_a_url_that_is_none_is_not_repeated_with_its_password(room: PostgresRoom) -> None:
    with pytest.raises(FeatureStoreUnavailable, match=SETTINGS) as caught:
        PostgisStore("postgresql://user:secret@host:port:1/db name", room.schema)
    assert "secret" not in str(caught.value)


def test_missing_older_and_newer_tables_are_each_told_with_what_to_do(room: PostgresRoom) -> None:
    with pytest.raises(SchemaBehind, match=f"{SETTINGS}.*geo-assets migrate"):
        PostgisStore(room.url, name_of_a_room())
    with direct(room) as db:
        db.execute("INSERT INTO schema_versions VALUES (%s, 99, 'later')", (COMPONENT,))
    with pytest.raises(SchemaTooNew, match=f"{SETTINGS}.*99"):
        PostgisStore(room.url, room.schema)


def test_a_table_that_is_gone_is_told_with_what_to_do(room: PostgresRoom, store: PostgisStore) -> None:
    with direct(room) as db:
        db.execute("DROP TABLE outbox")
    with pytest.raises(FeatureStoreUnavailable, match=f"{SETTINGS}.*outbox.*geo-assets migrate"):
        store.owed()


def test_a_database_without_postgis_says_so_when_it_is_migrated_and_when_it_is_opened() -> None:
    running = settings_of("postgres")
    name = name_of_a_room()
    database = sql.Identifier(name)
    url = running["GEO_ASSETS_POSTGRES_URL"].rpartition("/")[0] + f"/{name}"
    admin = running["TEST_POSTGRES_ADMIN_URL"]
    with psycopg.connect(admin, autocommit=True) as db:
        db.execute(sql.SQL("CREATE DATABASE {} OWNER geo_assets").format(database))
    try:
        with pytest.raises(psycopg.errors.FeatureNotSupported, match=r"PostGIS is missing.*CREATE EXTENSION postgis"):
            migrate(url, "geo_assets", COMPONENT, MIGRATIONS)
        with psycopg.connect(admin.rpartition("/")[0] + f"/{name}", autocommit=True) as db:
            db.execute("CREATE EXTENSION postgis")
        migrate(url, "geo_assets", COMPONENT, MIGRATIONS)
        PostgisStore(url).close()
        with psycopg.connect(admin.rpartition("/")[0] + f"/{name}", autocommit=True) as db:
            db.execute("SET client_min_messages = error")
            db.execute("DROP EXTENSION postgis CASCADE")
        with pytest.raises(SchemaError, match=f"{SETTINGS}.*PostGIS is missing"):
            PostgisStore(url)
    finally:
        with psycopg.connect(admin, autocommit=True) as db:
            db.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(database))


def test_rule_1_a_geometry_that_postgis_refuses_leaves_nothing_of_the_batch(store: PostgisStore) -> None:
    open_ring = struct.pack("<BIII8d", 1, 3, 1, 4, 0, 0, 1, 0, 1, 1, 0, 1)
    edits = [upsert(feature("1")), upsert(replace(feature("2"), geometry=open_ring))]
    with pytest.raises(FeatureStoreError, match=f"{SETTINGS}.*closed rings") as caught:
        store.apply(edits, no_plan, now_ms=5)
    assert not isinstance(caught.value, FeatureStoreUnavailable)
    assert store.counts().applied_keys == 0
    assert store.apply(edits[:1], no_plan, now_ms=5)[0].outcome == "applied"


@pytest.mark.parametrize("when", ["before", "while it copies", "while it plans", "without a word"])
def test_rule_1_a_session_that_the_server_ends_is_unavailable_and_leaves_nothing(
    room: PostgresRoom, store: PostgisStore, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def end_sessions() -> None:
        with direct(room) as db:
            db.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s AND pid <> "
                "pg_backend_pid()",
                (room.schema,),
            )
        time.sleep(0.1)

    def plan(changes: Sequence[Change]) -> list[OutboxRow]:
        if when == "while it plans":
            end_sessions()
        return [hint("0:")]

    copied = postgis_writing._copy  # pyright: ignore[reportPrivateUsage]

    def copying(db: Any, statement: str, types: Sequence[str], rows: list[tuple]) -> None:
        def slowly() -> Iterator[tuple]:
            for number, row in enumerate(rows):
                if when == "while it copies" and number == len(rows) // 2:
                    end_sessions()
                if when == "without a word" and number == len(rows) // 2:
                    with socket.socket(fileno=os.dup(db.fileno())) as line:
                        line.shutdown(socket.SHUT_RDWR)
                yield row

        copied(db, statement, types, slowly())

    monkeypatch.setattr(postgis_writing, "_copy", copying)
    edits = [upsert(feature(str(i))) for i in range(2_000)]
    if when == "before":
        end_sessions()
        # Found out and replaced before anything was asked of it.
        assert {one.outcome for one in store.apply(edits, plan, now_ms=5)} == {"applied"}
        return
    with pytest.raises(FeatureStoreUnavailable, match=SETTINGS) as caught:
        store.apply(edits, plan, now_ms=5)
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert store.counts().applied_keys == 0
    assert store.apply(edits, no_plan, now_ms=5)[0].outcome == "applied"


def test_every_connection_in_use_is_unavailable_and_passes(room: PostgresRoom) -> None:
    store = PostgisStore(room.url, room.schema, pool=1)
    store._pool.timeout = 0.3  # pyright: ignore[reportPrivateUsage]
    with store._pool.connection(), pytest.raises(FeatureStoreUnavailable, match=SETTINGS):  # pyright: ignore[reportPrivateUsage]
        store.apply([upsert(feature())], no_plan, now_ms=5)
    assert store.apply([upsert(feature())], no_plan, now_ms=5)[0].outcome == "applied"
    store.close()


def test_rule_1_a_server_killed_and_back_is_used_again_and_has_lost_nothing(tmp_path: Path) -> None:
    from scripts.local_services import Services

    settings_of("postgres")  # Skips, or fails, where it cannot run.
    services = Services(tmp_path / "services")
    try:
        services.start("postgres")
        url = services.settings()["GEO_ASSETS_POSTGRES_URL"]
        migrate(url, "geo_assets", COMPONENT, MIGRATIONS)
        store = PostgisStore(url)
        applied: set[str] = set()
        refused: list[str] = []
        unexpected: list[BaseException] = []
        stop = threading.Event()

        def edit(writer: int) -> None:
            for number in itertools.count():
                if stop.is_set():
                    return
                name = f"{writer}-{number}"
                while True:
                    try:
                        # One that was stored without an answer changes nothing when it is sent again, and owes nothing.
                        edits = [upsert(feature(json.dumps(name)))]
                        store.apply(edits, lambda changes: [hint("0:") for _ in changes], now_ms=5)
                        applied.add(json.dumps(name))
                        break
                    except FeatureStoreUnavailable as fault:
                        refused.append(str(fault))
                        time.sleep(0.05)
                    except BaseException as fault:
                        unexpected.append(fault)
                        return

        threads = [threading.Thread(target=edit, args=(writer,)) for writer in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(1.0)
        services.kill("postgres")
        time.sleep(0.3)
        services.start("postgres")
        back = len(applied)
        deadline = time.monotonic() + patient(60)
        while len(applied) < back + 20 and not unexpected and time.monotonic() < deadline:
            time.sleep(0.05)
        stop.set()
        for thread in threads:
            thread.join()
        assert unexpected == []
        assert len(applied) >= back + 20
        assert all(SETTINGS in fault and "\n" not in fault for fault in refused)
        assert {f.feature_id for f in store.scan()} == applied
        counts = store.counts()
        assert (counts.outbox, counts.applied_keys) == (len(applied), len(applied))
        store.close()
    finally:
        services.remove()
