from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets.services.spool import Spool, SpoolFull, SpoolInUse
from geo_assets_tests.waiting import until

spawn = multiprocessing.get_context("spawn")


def entries(first: int, count: int) -> list[bytes]:
    return [b"%08d" % n + b"x" * (n % 50) for n in range(first, first + count)]


steps = st.lists(st.tuples(st.sampled_from(["append", "drain", "read", "reopen"]), st.integers(1, 30)), max_size=40)


@given(steps)
@settings(max_examples=60, deadline=None)
def test_what_was_appended_is_read_once_drained_in_order_whatever_happens_between(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    spool = Spool(folder, segment_bytes=500)
    made = drained = 0
    for what, count in steps:
        if what == "append":
            spool.append(entries(made, count))
            made += count
        elif what == "drain":
            found, behind = spool.read(max_entries=count)
            assert found == entries(drained, min(count, made - drained))
            spool.advance(behind)
            drained += len(found)
        elif what == "reopen":
            spool.close()
            spool = Spool(folder, segment_bytes=500)
        else:
            assert list(spool.entries()) == entries(drained, made - drained)
        assert spool.empty == (made == drained)
    assert len(list(folder.glob("*.segment"))) <= (made - drained) // 8 + 2
    spool.close()


@pytest.mark.parametrize("cut", [1, 5, 9, 20, 60])
def test_a_torn_end_costs_only_what_no_append_returned_for(tmp_path: Path, cut: int) -> None:
    spool = Spool(tmp_path)
    spool.append(entries(0, 10))
    (segment,) = tmp_path.glob("*.segment")
    whole = segment.stat().st_size
    spool.append(entries(10, 10))
    spool.close()
    with segment.open("r+b") as file:
        file.truncate(whole + cut)
    spool = Spool(tmp_path)
    kept = list(spool.entries())
    assert kept == entries(0, len(kept))
    assert len(kept) >= 10
    spool.append(entries(len(kept), 5))
    assert list(spool.entries()) == entries(0, len(kept) + 5)
    spool.close()


def test_it_has_a_limit_and_takes_all_or_none(tmp_path: Path) -> None:
    spool = Spool(tmp_path, limit_bytes=500)
    spool.append(entries(0, 10))
    with pytest.raises(SpoolFull, match="500"):
        spool.append(entries(10, 30))
    assert list(spool.entries()) == entries(0, 10)
    _, behind = spool.read()
    spool.advance(behind)
    spool.append(entries(10, 10))
    assert list(spool.entries()) == entries(10, 10)
    spool.close()


def test_an_entry_larger_than_a_piece_is_read_whole(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    large = b"l" * 300_000
    spool.append([b"a", large, b"b"])
    assert spool.read(max_entries=1)[0] == [b"a"]
    assert list(spool.entries()) == [b"a", large, b"b"]
    spool.close()


def test_a_damaged_word_of_how_far_it_was_drained_drains_from_the_beginning(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.append(entries(0, 10))
    spool.advance(spool.read(max_entries=5)[1])
    spool.close()
    (tmp_path / "head").write_bytes(b"damaged")
    spool = Spool(tmp_path)
    assert list(spool.entries()) == entries(0, 10)
    spool.close()


def test_a_folder_belongs_to_one_process(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    with pytest.raises(SpoolInUse):
        Spool(tmp_path)
    spool.close()
    Spool(tmp_path).close()


def append_for_ever(folder: Path, told: object) -> None:
    spool = Spool(folder, segment_bytes=20_000)
    n = 0
    while True:
        spool.append(entries(n, 7))
        n += 7
        told.value = n  # type: ignore[attr-defined]


def test_rule_2_a_process_killed_while_it_appends_loses_nothing_that_append_returned_for(tmp_path: Path) -> None:
    told = spawn.Value("q", 0)
    process = spawn.Process(target=append_for_ever, args=(tmp_path, told))
    process.start()
    until(lambda: told.value >= 700, why="it has appended a while", every=0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    spool = Spool(tmp_path)
    found = list(spool.entries())
    assert len(found) >= told.value >= 700
    assert found == entries(0, len(found))
    spool.close()
