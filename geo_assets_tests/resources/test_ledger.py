"""The embedded ledger under the contract, against a model of it, and what is its own: files, locks, indexes."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from geo_assets_tests.resources.contract_ledger import (
    REPOSITORY,
    TILE,
    Clock,
    Connect,
    LedgerContract,
    RaceContract,
    committed,
    keys_of,
)
from geo_assets_tests.waiting import patient
from resources.ledger.protocol import Commit, Failure, Hint, Ledger, LedgerError, LedgerUnavailable, Settle, TileState
from resources.ledger.sqlite import SqliteLedger


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / "ledger.db"


@pytest.fixture
def connect(path: Path) -> Connect:
    return lambda clock: SqliteLedger(path, clock_ms=clock)


@pytest.fixture
def opening(path: Path) -> str:
    return f"from resources.ledger.sqlite import SqliteLedger\nledger = SqliteLedger({str(path)!r})"


class TestSqliteLedger(LedgerContract):
    pass


class TestSqliteLedgerRaces(RaceContract):
    @pytest.fixture
    def connect(self) -> Iterator[Connect]:
        # Ten thousand short transactions: in memory where the machine has room for files there.
        memory = Path("/dev/shm")
        with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
            yield lambda clock: SqliteLedger(Path(folder) / "ledger.db", clock_ms=clock)


def test_importing_it_brings_neither_numpy_nor_dagster() -> None:
    code = "import sys, resources.ledger.sqlite; print([m for m in ('numpy', 'dagster') if m in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).strip() == "[]"


def test_a_ledger_of_a_newer_schema_is_refused_with_one_clear_error(path: Path) -> None:
    SqliteLedger(path).close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE schema_version SET version = 99")
    with pytest.raises(LedgerError, match="99"):
        SqliteLedger(path)


def test_a_file_that_is_no_database_is_named(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(LedgerError, match=r"ledger\.db"):
        SqliteLedger(path)


def test_a_ledger_locked_too_long_is_unavailable_and_works_again_afterwards(path: Path) -> None:
    ledger = SqliteLedger(path, lock_timeout_s=0.2)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerUnavailable, match="locked"):
        ledger.mark([TILE])
    assert not ledger.read([TILE])[TILE].dirty
    other.execute("ROLLBACK")
    ledger.mark([TILE])
    assert ledger.read([TILE])[TILE].dirty


def test_a_full_disk_is_unavailable_and_leaves_nothing_of_the_transaction(path: Path) -> None:
    ledger = SqliteLedger(path)
    ledger.mark([TILE])
    db = ledger._file.connection()  # pyright: ignore[reportPrivateUsage]
    pages = db.execute("PRAGMA page_count").fetchone()[0]
    db.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(LedgerUnavailable, match="disk full"):
        ledger.mark(keys_of(5_000))
    db.execute("PRAGMA max_page_count = 1000000")
    assert ledger.counts().tiles == 1
    ledger.mark(keys_of(5_000))


def test_a_home_that_cannot_be_made_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(LedgerUnavailable, match="file"):
        SqliteLedger(tmp_path / "file" / "ledger.db")


def test_a_read_only_ledger_is_unavailable_for_marks(path: Path) -> None:
    ledger = SqliteLedger(path)
    ledger._file.connection().execute("PRAGMA query_only = ON")  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(LedgerUnavailable, match="read-only"):
        ledger.mark([TILE])


def test_many_processes_may_make_the_file_at_once(path: Path) -> None:
    code = f"from resources.ledger.sqlite import SqliteLedger; print(SqliteLedger({str(path)!r}).mark(['0:']))"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, text=True, stdout=subprocess.PIPE)
        for _ in range(4)
    ]
    assert sorted(int(process.communicate(timeout=patient(60))[0]) for process in processes) == [1, 2, 3, 4]


def test_a_commit_is_synced_to_the_disk(path: Path) -> None:
    db = SqliteLedger(path)._file.connection()  # pyright: ignore[reportPrivateUsage]
    assert db.execute("PRAGMA synchronous").fetchone()[0] == 2
    assert db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"


def test_a_reader_does_not_wait_for_a_writer(path: Path) -> None:
    ledger = SqliteLedger(path)
    ledger.mark([TILE])
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    seen: list[bool] = []
    thread = threading.Thread(target=lambda: seen.append(ledger.read([TILE])[TILE].dirty))
    thread.start()
    thread.join(patient(30))
    assert seen == [True]


def test_work_is_found_by_index_among_half_a_million_tiles(path: Path) -> None:
    ledger = SqliteLedger(path)
    with ledger._file.transaction() as db:  # pyright: ignore[reportPrivateUsage]
        db.execute(
            """WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 499999)
               INSERT INTO tile (key, zoom, work, revision, content_hash, wanted_live, built)
               SELECT '14:' || i, 14, NULL, 1, 'a', 1, 1 FROM n"""
        )
    ledger.mark(keys_of(200))
    hundreds = 0

    def worked() -> int:
        nonlocal hundreds
        hundreds += 1
        return 0

    with ledger._file.reading() as db:  # pyright: ignore[reportPrivateUsage]
        db.set_progress_handler(worked, 100)
    assert len(ledger.dirty(1_000)) == 200
    # Instructions of the database: a scan takes some for each tile of the table.
    assert 0 < hundreds * 100 < 100_000


class AgainstTheModel(RuleBasedStateMachine):
    """Every method that moves a tile, in any order, against the protocol written as plain Python."""

    keys = ("0:", "1:2", "2:13", "14:12020013321101")
    some = st.lists(st.sampled_from(keys), min_size=1, max_size=4, unique=True)

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.ends = ExitStack()
        self.ledger = self.opened(self.ends)
        self.counter = 0
        numbers = ("revision", "live", "alone", "alone_forced", "live_forced", "built", "attempts", "given_up", "until")
        numbers += ("cleared", "since", "marked")
        self.tiles: dict[str, dict[str, int | str | None]] = {
            key: {**dict.fromkeys(numbers, 0), "work_key": None, "content": None, "lease": None} for key in self.keys
        }
        self.manifests: dict[str, dict[str, object]] = {}
        self.reads: list[TileState] = []
        self.position = 0
        self.owed = 0

    def opened(self, ends: ExitStack) -> Ledger:
        """An empty ledger by this machine's clock; what is to be done at the end goes to `ends`."""
        folder = ends.enter_context(tempfile.TemporaryDirectory())
        return SqliteLedger(Path(folder) / "ledger.db", clock_ms=self.clock)

    def teardown(self) -> None:
        self.ledger.close()
        self.ends.close()

    def of_manifests(self, key: str, only_forced: bool = False) -> int:
        marks = [m["mark"] for m in self.manifests.values() if key in m["keys"] and (m["forced"] or not only_forced)]
        return max([0, *marks])

    def backfill(self, key: str) -> int:
        return max(self.tiles[key]["alone"], self.of_manifests(key))

    def wanted(self, key: str) -> int:
        return max(self.tiles[key]["live"], self.backfill(key))

    def workable(self, key: str) -> bool:
        return self.wanted(key) > max(self.tiles[key]["built"], self.tiles[key]["given_up"])

    def raise_mark(self, keys: list[str], change: Callable[[dict], None]) -> int:
        self.counter += 1
        for key in keys:
            tile = self.tiles[key]
            if not self.workable(key):
                tile["since"] = self.clock.now
            change(tile)
            tile.update(attempts=0, given_up=0, marked=self.clock.now)
        return self.counter

    @rule(keys=some, force=st.booleans())
    def mark_live(self, keys, force):
        mark = self.raise_mark(keys, lambda tile: tile.update(live=self.counter))
        for key in keys:
            if force:
                self.tiles[key]["live_forced"] = mark
        assert self.ledger.mark(keys, force=force) == mark

    @rule(keys=some, force=st.booleans())
    def mark_backfill(self, keys, force):
        mark = self.raise_mark(keys, lambda tile: tile.update(alone=self.counter))
        for key in keys:
            if force:
                self.tiles[key]["alone_forced"] = mark
        assert self.ledger.mark(keys, kind="backfill", force=force) == mark

    @rule(keys=st.lists(st.sampled_from(keys), max_size=3), behind=st.integers(0, 2))
    def mark_from_log(self, keys, behind):
        first = max(0, self.position - behind)
        hints = [Hint(first + i, key) for i, key in enumerate(keys)]
        new = [hint for hint in hints if hint.offset >= self.position]
        if new:
            self.raise_mark(list({hint.key for hint in new}), lambda tile: tile.update(live=self.counter))
        assert self.ledger.mark_from_log("t", 0, hints, first + len(keys)) == len(new)
        self.position = max(self.position, first + len(keys))
        assert self.ledger.positions("t") == {0: self.position}

    @rule(keys=some)
    def clear(self, keys):
        self.raise_mark(keys, lambda tile: tile.update(live=self.counter, cleared=self.counter, work_key=None))
        for key in keys:
            self.tiles[key]["content"] = None
        self.ledger.clear(keys)

    @rule(ms=st.integers(1, 2_000))
    def time_passes(self, ms):
        self.clock.now += ms

    @rule(keys=some, owner=st.sampled_from("ab"), ttl=st.sampled_from([0.5, 1.0]))
    def take(self, keys, owner, ttl):
        free = [
            key for key in keys
            if self.tiles[key]["lease"] in (None, owner) or self.tiles[key]["until"] <= self.clock.now
        ]  # fmt: skip
        for key in free:
            self.tiles[key].update(lease=owner, until=self.clock.now + round(ttl * 1000))
        taken = self.ledger.take(keys, owner, ttl)
        assert set(taken) == set(free)
        self.reads.extend(taken.values())

    @rule(owner=st.sampled_from("ab"))
    def free(self, owner):
        for tile in self.tiles.values():
            if tile["lease"] == owner:
                tile.update(lease=None, until=0)
        self.ledger.free(owner)

    @precondition(lambda self: self.reads)
    @rule(data=st.data(), work=st.sampled_from("uvw"))
    def settle(self, data, work):
        read = data.draw(st.sampled_from(self.reads))
        tile = self.tiles[read.key]
        holds = tile["revision"] == read.revision and read.wanted >= tile["cleared"]
        if holds:
            if read.wanted >= tile["built"]:
                tile["work_key"] = work
            self.answered(read.key, max(tile["built"], read.wanted), read.wanted)
        got = self.ledger.settle([Settle(read.key, read.revision, read.wanted, work)])
        assert got == ({read.key} if holds else set())

    @precondition(lambda self: self.reads)
    @rule(data=st.data(), content=st.sampled_from(["x", "y", None]))
    def commit(self, data, content):
        read = data.draw(st.sampled_from(self.reads))
        tile = self.tiles[read.key]
        holds = tile["revision"] == read.revision and tile["built"] <= read.wanted
        if holds:
            tile.update(revision=read.revision + 1, work_key="k", content=content)
            self.answered(read.key, read.wanted, read.wanted)
            self.owed += 1
        got = self.ledger.commit(
            [Commit(read.key, read.revision, read.wanted, "k", content, 1, 1, "built", duties=("announce",))]
        )
        assert set(got) == ({read.key} if holds else set())

    def answered(self, key: str, built: int, wanted: int) -> None:
        tile = self.tiles[key]
        tile.update(built=built, lease=None, until=0)
        if tile["given_up"] <= wanted:
            tile.update(attempts=0, given_up=0)
        tile["since"] = tile["marked"] if self.wanted(key) > built else 0

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def fail(self, data):
        read = data.draw(st.sampled_from(self.reads))
        tile = self.tiles[read.key]
        tile.update(lease=None, until=0)
        given_up = set()
        if read.wanted > tile["built"] and self.wanted(read.key) <= read.wanted:
            tile["attempts"] += 1
            if tile["attempts"] >= 2:
                tile["given_up"] = read.wanted
                given_up = {read.key}
        assert self.ledger.fail([Failure(read.key, read.wanted, "boom")], max_attempts=2) == given_up

    @rule(name=st.sampled_from("mno"), keys=some, force=st.booleans())
    def write_and_mark_manifest(self, name, keys, force):
        if name not in self.manifests:
            mark = self.raise_mark(keys, lambda tile: None)
            # Only now: whether a tile was at work before must not see the new mark.
            self.manifests[name] = {"keys": keys, "mark": mark, "forced": force}
        self.ledger.write_manifest(name, name, "backfill", keys)
        self.ledger.mark_manifest(name, force=force)
        assert self.ledger.manifest_keys(name) == sorted(self.manifests[name]["keys"])

    @precondition(lambda self: self.manifests)
    @rule(data=st.data())
    def cancel_manifest(self, data):
        name = data.draw(st.sampled_from(sorted(self.manifests)))
        keys = self.manifests[name]["keys"]
        before = {key for key in keys if self.wanted(key) > self.tiles[key]["built"]}
        self.manifests[name]["mark"] = 0
        clean = {key for key in before if self.wanted(key) <= self.tiles[key]["built"]}
        for key in clean:
            self.tiles[key]["since"] = 0
        assert self.ledger.cancel_manifest(name) == len(clean)

    @invariant()
    def they_agree(self):
        states = self.ledger.read(self.keys)
        for key, state in states.items():
            tile = self.tiles[key]
            assert state.revision == tile["revision"]
            assert (state.work_key, state.content_hash) == (tile["work_key"], tile["content"])
            assert (state.wanted_live, state.wanted_backfill) == (tile["live"], self.backfill(key))
            forced = max(tile["live_forced"], tile["alone_forced"], self.of_manifests(key, only_forced=True))
            assert state.forced == forced
            assert (state.built, state.attempts, state.given_up) == (tile["built"], tile["attempts"], tile["given_up"])
            assert (state.lease, state.lease_until_ms) == (tile["lease"], tile["until"])
            if state.dirty:
                assert state.dirty_since_ms == tile["since"]
        free = [k for k in self.keys if self.tiles[k]["until"] <= self.clock.now and self.workable(k)]
        live = {k: self.tiles[k]["live"] > self.tiles[k]["built"] for k in self.keys}
        zoom = {k: 0 if live[k] else -int(k.partition(":")[0]) for k in free}
        order = sorted(free, key=lambda k: (not live[k], self.tiles[k]["since"], zoom[k], k))
        assert [state.key for state in self.ledger.dirty(10)] == order
        counts = self.ledger.counts()
        assert counts.dirty_live == sum(self.workable(k) and live[k] for k in self.keys)
        assert counts.dirty_backfill == sum(self.workable(k) and not live[k] for k in self.keys)
        assert counts.given_up == sum(
            self.wanted(k) > self.tiles[k]["built"] and not self.workable(k) for k in self.keys
        )
        assert counts.revision_sum == sum(self.tiles[k]["revision"] for k in self.keys)
        assert counts.owed.get("announce", 0) == self.owed


TestAgainstTheModel = AgainstTheModel.TestCase
TestAgainstTheModel.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_a_commit_of_one_tile_is_durable_before_it_returns(path: Path) -> None:
    ledger = SqliteLedger(path)
    ledger.commit([committed(TileState(TILE))])
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as other:
        assert other.execute("SELECT revision FROM tile").fetchone() == (1,)
