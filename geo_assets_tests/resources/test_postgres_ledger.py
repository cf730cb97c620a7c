"""The production ledger under the contract, against the model, and what is its own: locks, restarts, versions."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
from hypothesis import HealthCheck, settings

from geo_assets_tests.postgres_rooms import PostgresRoom, postgres_room
from geo_assets_tests.real_services import settings_of
from geo_assets_tests.resources import test_ledger
from geo_assets_tests.resources.contract_ledger import (
    OTHER,
    REPOSITORY,
    THIRD,
    TILE,
    Connect,
    LedgerContract,
    RaceContract,
    committed,
    keys_of,
    settled,
)
from geo_assets_tests.waiting import patient
from resources import postgres
from resources.ledger import postgres_tables
from resources.ledger.postgres import PostgresLedger
from resources.ledger.postgres_schema import COMPONENT, MIGRATIONS
from resources.ledger.protocol import Commit, Failure, Hint, Ledger, LedgerUnavailable
from resources.migrations import Migration, SchemaBehind, SchemaTooNew, migrate
from resources.postgres import conninfo


@pytest.fixture
def room() -> Iterator[PostgresRoom]:
    with postgres_room() as room:
        migrate(room.url, room.schema, COMPONENT, MIGRATIONS)
        yield room


@pytest.fixture
def connect(room: PostgresRoom) -> Connect:
    def opened(clock):
        # A process that a test killed may have left its last statement to the server.
        room.wait_until_idle()
        return PostgresLedger(room.url, room.schema, clock_ms=clock)

    return opened


@pytest.fixture
def opening(room: PostgresRoom) -> str:
    return (
        "from resources.ledger.postgres import PostgresLedger\n"
        f"ledger = PostgresLedger({room.url!r}, {room.schema!r}, pool=2)"
    )


class TestPostgresLedger(LedgerContract):
    pass


class TestPostgresLedgerRaces(RaceContract):
    # A prime, so that no step of the walk is always the same; the embedded ledger walks them all.
    every = 17

    @pytest.fixture
    def connect(self, room: PostgresRoom) -> Connect:
        # Ten thousand short transactions, none of which has to outlive a power failure.
        url = f"{room.url}&options=-c%20synchronous_commit%3Doff"
        return lambda clock: PostgresLedger(url, room.schema, clock_ms=clock)


class AgainstTheModel(test_ledger.AgainstTheModel):
    """The same walk as the embedded ledger's, in a schema of its own each time."""

    def opened(self, ends: ExitStack) -> Ledger:
        """An empty ledger by this machine's clock."""
        room = ends.enter_context(postgres_room())
        migrate(room.url, room.schema, COMPONENT, MIGRATIONS)
        return PostgresLedger(f"{room.url}&options=-c%20synchronous_commit%3Doff", room.schema, clock_ms=self.clock)


TestAgainstTheModel = AgainstTheModel.TestCase
TestAgainstTheModel.settings = settings(
    max_examples=15, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture
def ledger(room: PostgresRoom) -> Iterator[PostgresLedger]:
    ledger = PostgresLedger(room.url, room.schema, pool=8)
    yield ledger
    ledger.close()


def together(*work: Callable[[], object]) -> None:
    """Run them at once; the first error of any is raised here."""
    errors: list[BaseException] = []

    def run(one: Callable[[], object]) -> None:
        try:
            one()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_importing_it_brings_neither_numpy_nor_dagster() -> None:
    heavy = "('numpy', 'shapely', 'pyarrow', 'dagster', 'sqlalchemy')"
    code = f"import sys, resources.ledger.postgres; print([m for m in {heavy} if m in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).strip() == "[]"


def test_a_schema_that_was_never_migrated_says_what_to_run() -> None:
    with postgres_room() as room, pytest.raises(SchemaBehind, match="geo-assets migrate") as found:
        PostgresLedger(room.url, room.schema)
    assert room.schema in str(found.value)
    assert "GEO_ASSETS_LEDGER_URL" in str(found.value)


def test_tables_of_a_later_version_are_refused(room: PostgresRoom) -> None:
    later = Migration(len(MIGRATIONS) + 1, "of the future", ("CREATE TABLE future (id bigint)",))
    migrate(room.url, room.schema, COMPONENT, [*MIGRATIONS, later])
    with pytest.raises(SchemaTooNew, match="newer one"):
        PostgresLedger(room.url, room.schema)


def test_a_ledger_of_the_version_before_is_upgraded_with_everything_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with postgres_room() as room:
        migrate(room.url, room.schema, COMPONENT, MIGRATIONS[:-1])
        with monkeypatch.context() as older:
            older.setattr(postgres_tables, "MIGRATIONS", MIGRATIONS[:-1])
            ledger = PostgresLedger(room.url, room.schema)
            keys = keys_of(500)
            ledger.mark_from_log("t", 0, [Hint(i, key) for i, key in enumerate(keys)], len(keys))
            read = ledger.take(keys, "me", 60)
            ledger.commit([committed(state) for state in list(read.values())[:300]])
            ledger.write_manifest("m", "t", "backfill", keys[:100])
            ledger.mark_manifest("m")
            ledger.set_value("epoch", "7")
            before = ledger.counts(), ledger.read(keys), ledger.owed("announce"), ledger.manifests()
            ledger.close()
        with pytest.raises(SchemaBehind, match=f"version {len(MIGRATIONS) - 1}"):
            PostgresLedger(room.url, room.schema)
        assert migrate(room.url, room.schema, COMPONENT, MIGRATIONS) == [len(MIGRATIONS)]
        ledger = PostgresLedger(room.url, room.schema)
        assert (ledger.counts(), ledger.read(keys), ledger.owed("announce"), ledger.manifests()) == before
        assert ledger.positions("t") == {0: 500}
        assert ledger.get_value("epoch") == "7"
        assert ledger.cancel_manifest("m") > 0
        ledger.close()


def test_a_server_that_cannot_be_reached_is_unavailable_in_one_line_without_the_password() -> None:
    with pytest.raises(LedgerUnavailable, match="GEO_ASSETS_LEDGER_URL") as found:
        PostgresLedger("postgresql://me:secret-word@127.0.0.1:1/maps")
    assert "127.0.0.1:1/maps" in str(found.value)
    assert "secret-word" not in str(found.value)
    assert "\n" not in str(found.value)


def test_whoever_works_on_the_same_tiles_never_waits_in_a_circle(
    ledger: PostgresLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "ATTEMPTS", 1)  # A deadlock would be an error.
    keys = keys_of(200)
    ledger.write_manifest("m", "t", "backfill", keys)
    ends = time.monotonic() + 4

    def loop(seed: int) -> Callable[[], None]:
        chance = random.Random(seed)

        def work() -> None:
            for turn in range(1_000):
                if time.monotonic() > ends:
                    return
                some = chance.sample(keys, 60)
                ledger.mark(some)
                ledger.mark_from_log("t", seed % 2, [Hint(turn, key) for key in chance.sample(keys, 20)], turn + 1)
                read = list(ledger.take(some, f"owner {seed}", 1).values())
                ledger.settle([settled(state) for state in read[:10]])
                ledger.commit([committed(state) for state in read[10:30]])
                ledger.fail([Failure(state.key, state.wanted, "boom") for state in read[30:40]], max_attempts=2)
                ledger.renew(f"owner {seed}", 1)
                ledger.clear(chance.sample(keys, 5))
                batches = ledger.open_batches([chance.sample(keys, 20), chance.sample(keys, 20)], kind="live", ttl_s=1)
                ledger.renew_batches([batch.id for batch in batches], 1)
                for batch in batches:
                    ledger.end_batch(batch.id)
                ledger.mark_manifest("m")
                ledger.write_manifest(f"m{seed}-{turn}", "t", "backfill", chance.sample(keys, 30))
                ledger.mark_manifest(f"m{seed}-{turn}")
                ledger.manifests(5)
                ledger.cancel_manifest(f"m{seed}-{turn}")
                ledger.pay([row.id for row in ledger.owed("announce", 50)])
                ledger.free(f"owner {seed}")

        return work

    together(*(loop(seed) for seed in range(5)))
    assert ledger.counts().tiles == len(keys)


def test_rule_1_marks_raised_at_once_lose_none_and_what_is_served_never_goes_back(ledger: PostgresLedger) -> None:
    features, guard, marking = 0, threading.Lock(), threading.Event()

    def marker(partition: int) -> Callable[[], None]:
        def work() -> None:
            nonlocal features
            for offset in range(40):
                with guard:
                    features += 1
                ledger.mark_from_log("t", partition, [Hint(offset, TILE), Hint(offset, OTHER)], offset + 1)

        return work

    def build(owner: str) -> bool:
        state = ledger.take([TILE], owner, 0).get(TILE)
        if state is None or not state.dirty:
            return False
        ledger.commit([committed(state, content_hash=f"{features:064x}", duties=("announce",))])
        return True

    def builder(owner: str) -> Callable[[], None]:
        def work() -> None:
            while not marking.is_set():
                build(owner)

        return work

    def markers() -> None:
        try:
            together(*(marker(partition) for partition in range(3)))
        finally:
            marking.set()

    together(markers, builder("one"), builder("two"))
    while build("last"):
        pass
    state = ledger.read([TILE])[TILE]
    assert not state.dirty
    assert state.content_hash == f"{features:064x}"
    shown = [row.content_hash for row in sorted(ledger.owed("announce", 100_000), key=lambda row: row.revision)]
    assert shown == sorted(shown)  # type: ignore[type-var]
    assert len(shown) == state.revision
    assert ledger.positions("t") == {0: 40, 1: 40, 2: 40}


def test_the_same_hints_from_two_readers_count_once(ledger: PostgresLedger) -> None:
    counted: list[int] = []

    def reader() -> None:
        for start in range(0, 200, 10):
            hints = [Hint(offset, keys[offset]) for offset in range(start, start + 10)]
            counted.append(ledger.mark_from_log("t", 0, hints, start + 10))

    keys = keys_of(200)
    together(reader, reader, reader)
    assert sum(counted) == 200
    assert ledger.positions("t") == {0: 200}


def test_a_marks_value_is_larger_than_that_of_a_transaction_it_waited_for(
    ledger: PostgresLedger, room: PostgresRoom
) -> None:
    ledger.mark([TILE])
    with psycopg.connect(conninfo(room.url, room.schema)) as open_one:
        postgres_tables.lock(open_one, [TILE])
        raised: list[int] = []
        waiting = threading.Thread(target=lambda: raised.append(ledger.mark([TILE, OTHER])))
        waiting.start()
        time.sleep(0.2)
        assert waiting.is_alive()
        # Taken after the other began to wait: had that one its value already, it would be the smaller one.
        value = postgres_tables.next_mark(open_one)
        # Another tile's mark does not wait.
        assert ledger.mark([THIRD]) > value
        open_one.commit()
        waiting.join(patient(30))
    assert raised[0] > value


def test_a_total_of_commits_counts_every_one_of_many_committers(ledger: PostgresLedger) -> None:
    keys = keys_of(400)

    def work(part: list[str]) -> Callable[[], None]:
        def commit() -> None:
            for key in part:
                ledger.commit([Commit(key, 0, 0, "w", "a" * 64, 1, 1, "built")])

        return commit

    together(*(work(keys[start : start + 100]) for start in range(0, 400, 100)))
    assert ledger.counts().revision_sum == 400
    assert ledger.counts().owed == {"announce": 400, "catalog": 400}


def test_errors_and_titles_may_hold_what_postgres_cannot(ledger: PostgresLedger) -> None:
    ledger.mark([TILE])
    wanted = ledger.read([TILE])[TILE].wanted
    ledger.fail([Failure(TILE, wanted, "a NUL \0 and half of a pair \ud83d")], max_attempts=3)
    assert (ledger.read([TILE])[TILE].error or "").startswith("a NUL")
    assert ledger.refuse_manifest("m", "t\0", "backfill", "p\0", parameters='{"a": 1}').state == "refused"
    assert ledger.set_value("name", "v\0")


def test_work_is_found_by_index_among_two_hundred_thousand_tiles(ledger: PostgresLedger, room: PostgresRoom) -> None:
    with psycopg.connect(conninfo(room.url, room.schema)) as db:
        db.execute(
            """INSERT INTO tile (key, revision, content_hash, wanted_live, built)
               SELECT '14:' || i, 1, 'a', 1, 1 FROM generate_series(1, 200000) AS i"""
        )
    ledger.mark(keys_of(200))
    assert len(ledger.dirty(1_000)) == 200
    with psycopg.connect(conninfo(room.url, room.schema)) as db:
        plan = db.execute(
            """EXPLAIN SELECT key FROM tile WHERE work IS NOT NULL AND work BETWEEN 0 AND 1
               ORDER BY work, dirty_since_ms, key LIMIT 1000"""
        ).fetchall()
    assert any("tile_work" in row[0] for row in plan)


def test_rule_2_a_server_killed_and_back_has_every_commit_that_was_acknowledged(tmp_path: Path) -> None:
    from scripts.local_services import Services

    settings_of("postgres")  # Skips, or fails, where it cannot run.
    services = Services(tmp_path / "services")
    try:
        services.start("postgres")
        url = services.settings()["GEO_ASSETS_POSTGRES_URL"]
        migrate(url, "geo_assets", COMPONENT, MIGRATIONS)
        ledger = PostgresLedger(url)
        keys = keys_of(40)
        revisions = dict.fromkeys(keys, 0)
        refused: list[str] = []
        stop = threading.Event()

        def worker(part: list[str]) -> Callable[[], None]:
            def work() -> None:
                while not stop.is_set():
                    try:
                        ledger.mark(part)
                        read = ledger.take(part, part[0], 60)
                        for key in ledger.commit([committed(state) for state in read.values()]):
                            revisions[key] = read[key].revision + 1
                    except LedgerUnavailable as fault:
                        refused.append(str(fault))
                        time.sleep(0.05)

            return work

        def siege() -> None:
            try:
                time.sleep(1)
                for _ in range(2):
                    services.kill("postgres")
                    time.sleep(0.2)
                    services.start("postgres")
                    back, deadline = sum(revisions.values()), time.monotonic() + patient(60)
                    while sum(revisions.values()) < back + 400 and time.monotonic() < deadline:
                        time.sleep(0.05)
                    assert sum(revisions.values()) >= back + 400
            finally:
                stop.set()

        together(worker(keys[:20]), worker(keys[20:]), siege)
        states = ledger.read(keys)
        assert all(states[key].revision >= revisions[key] for key in keys)
        counts = ledger.counts()
        assert counts.revision_sum == sum(state.revision for state in states.values()) == counts.owed["announce"]
        assert all("GEO_ASSETS_LEDGER_URL" in fault and "\n" not in fault for fault in refused)
        ledger.close()
    finally:
        services.remove()
