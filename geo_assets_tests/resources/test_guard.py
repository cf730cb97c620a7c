from __future__ import annotations

import functools
import sqlite3
from pathlib import Path

import pytest

from geo_assets_tests.resources.contract_guard import GuardContract, GuardHarness
from resources.guard.protocol import GuardUnavailable
from resources.guard.sqlite import SqliteGuard


class _Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class TestSqliteGuard(GuardContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> GuardHarness:
        clock = _Clock()
        return GuardHarness(
            open=lambda: SqliteGuard(tmp_path / "guard.db", clock=clock),
            open_elsewhere=functools.partial(SqliteGuard, tmp_path / "guard.db"),
            advance=clock.advance,
            tick_s=10.0,
        )


def test_a_grant_is_synced_and_a_key_is_not(tmp_path: Path) -> None:
    guard = SqliteGuard(tmp_path / "guard.db")
    connection = guard._file.connection()
    guard.set_if_absent("k", "v", 60)
    assert connection.execute("PRAGMA synchronous").fetchone()[0] == 1
    guard.acquire("n", "a", 60)
    assert connection.execute("PRAGMA synchronous").fetchone()[0] == 2
    guard.close()


def test_a_locked_guard_is_unavailable_for_writing_and_still_finds_duplicates(tmp_path: Path) -> None:
    guard = SqliteGuard(tmp_path / "guard.db", lock_timeout_s=0.2)
    guard.set_if_absent("k", "v", 60)
    other = sqlite3.connect(tmp_path / "guard.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert guard.set_if_absent("k", "w", 60) == "v"
    with pytest.raises(GuardUnavailable, match="locked"):
        guard.set_if_absent("new", "v", 60)
    other.execute("ROLLBACK")
    other.close()
    assert guard.set_if_absent("new", "v", 60) is None
    guard.close()


def test_a_damaged_or_missing_guard_is_unavailable_and_no_other_error(tmp_path: Path) -> None:
    (tmp_path / "guard.db").write_bytes(b"not a database, but long enough to look at" * 100)
    with pytest.raises(GuardUnavailable):
        SqliteGuard(tmp_path / "guard.db")
    (tmp_path / "file").write_text("")
    with pytest.raises(GuardUnavailable):
        SqliteGuard(tmp_path / "file" / "guard.db")


def test_a_closed_guard_is_unavailable(tmp_path: Path) -> None:
    guard = SqliteGuard(tmp_path / "guard.db")
    guard.close()
    with pytest.raises(GuardUnavailable, match="closed"):
        guard.get("k")


def test_many_expired_keys_go_in_pieces(tmp_path: Path) -> None:
    clock = _Clock()
    guard = SqliteGuard(tmp_path / "guard.db", clock=clock)
    with guard._file.transaction() as connection:
        connection.executemany("INSERT INTO keys VALUES (?, 'v', 0)", [(str(n),) for n in range(12_000)])
    assert guard.expire() == 12_000
    guard.close()


def test_the_resource_hands_out_a_plain_client(tmp_path: Path) -> None:
    from resources.guard.resource import GuardResource

    client = GuardResource(path=str(tmp_path / "guard.db")).client()
    assert isinstance(client, SqliteGuard)
    client.close()
