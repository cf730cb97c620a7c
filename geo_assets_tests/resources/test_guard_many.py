from __future__ import annotations

from pathlib import Path

import pytest

from resources.guard.sqlite import SqliteGuard


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def guard(tmp_path: Path, clock: Clock):
    guard = SqliteGuard(tmp_path / "guard.db", clock=clock)
    yield guard
    guard.close()


def test_many_keys_are_set_and_those_that_were_there_keep_their_value(guard: SqliteGuard) -> None:
    assert guard.set_if_absent("b", "first", 60) is None
    assert guard.set_many_if_absent({"a": "1", "b": "2", "c": "3"}, 60) == {"b": "first"}
    assert guard.get_many(["a", "b", "c", "d"]) == {"a": "1", "b": "first", "c": "3"}


def test_a_key_past_its_time_is_not_there_and_may_be_set_again(guard: SqliteGuard, clock: Clock) -> None:
    guard.set_many_if_absent({"a": "1"}, 60)
    clock.now += 61
    assert guard.get_many(["a"]) == {}
    assert guard.set_many_if_absent({"a": "2"}, 60) == {}
    assert guard.get("a") == "2"


def test_none_at_all_is_no_fault(guard: SqliteGuard) -> None:
    assert guard.set_many_if_absent({}, 60) == {}
    assert guard.get_many([]) == {}


@pytest.mark.parametrize("key", ['quote"d', "back\\slash", "a.b[0]$", "naïve ☃", "new\nline", "'; DROP TABLE keys; --"])
def test_any_text_is_a_key(guard: SqliteGuard, key: str) -> None:
    assert guard.set_many_if_absent({key: key}, 60) == {}
    assert guard.get(key) == key
    assert guard.get_many([key]) == {key: key}
    assert guard.set_if_absent(key, "other", 60) == key
