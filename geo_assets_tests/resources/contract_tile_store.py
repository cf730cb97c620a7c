"""What every tile store must do, adapter by adapter: subclass `TileStoreContract` and give it a `harness` fixture."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from geo_assets_tests.resources.tile_store_processes import put_and_delete, put_large_ones_until_killed
from geo_assets_tests.waiting import patient
from resources.tile_store.protocol import InvalidName, StoredObject, TileStore

spawn = multiprocessing.get_context("spawn")

BAD_NAMES = {
    "empty": "",
    "absolute": "/etc/passwd",
    "up": "../x",
    "up inside": "tiles/../../x",
    "up at the end": "tiles/..",
    "here": "./x",
    "here inside": "tiles/./x",
    "backslash": "tiles\\..\\x",
    "nul": "tiles/\x00",
    "newline": "tiles/a\nb",
    "delete character": "tiles/\x7f",
    "upper control character": "tiles/\x85",
    "empty part": "tiles//x",
    "folder": "tiles/",
    "lone surrogate": "tiles/\ud800",
    "too long": "/".join(["x" * 200] * 6),
    "part too long": "tiles/" + "x" * 256,
    "part too long in bytes": "tiles/" + "ü" * 128,
}


@dataclass(frozen=True)
class TileStoreHarness:
    """How the suite gets at an adapter. `open` is pickled, so that other processes open the same store."""

    open: Callable[[], TileStore]


class TileStoreContract:
    """The promises of resources/tile_store/protocol.py, one test each."""

    @pytest.fixture
    def harness(self) -> TileStoreHarness:
        raise AssertionError("a subclass names its adapter")

    @pytest.fixture
    def store(self, harness: TileStoreHarness) -> Iterator[TileStore]:
        store = harness.open()
        yield store
        store.close()

    def test_it_is_a_tile_store(self, store: TileStore) -> None:
        assert isinstance(store, TileStore)

    @pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 8_000], ids=["empty", "small", "2 MB"])
    def test_what_was_put_comes_back_byte_for_byte(self, store: TileStore, data: bytes) -> None:
        store.put("tiles/14/9326/4742/1-abc.mvt.gz", data, metadata={"revision": "1"})
        assert store.get("tiles/14/9326/4742/1-abc.mvt.gz") == data
        assert store.exists("tiles/14/9326/4742/1-abc.mvt.gz")

    @pytest.mark.parametrize("size", [0, 3, 20_000_003], ids=["empty", "small", "20 MB"])
    def test_what_came_in_pieces_comes_back_byte_for_byte(self, store: TileStore, size: int) -> None:
        data = bytes(range(251)) * (size // 251 + 1)
        data = data[:size]
        pieces = [data[start : start + 999_983] for start in range(0, size, 999_983)]
        store.put_stream("tilesets/city/1-abc/tiles.pmtiles", [b"", *pieces, b""], metadata={"tiles": "3"})
        assert store.get("tilesets/city/1-abc/tiles.pmtiles") == data
        assert [(o.name, o.size) for o in store.list()] == [("tilesets/city/1-abc/tiles.pmtiles", size)]

    def test_pieces_that_break_off_leave_no_object_and_their_own_error(self, store: TileStore) -> None:
        class Broke(Exception):
            pass

        def pieces(count: int) -> Iterator[bytes]:
            for _ in range(count):
                yield b"x" * 1_000_000
            raise Broke

        store.put("kept/old", b"old")
        for count, name in ((0, "a/none"), (1, "kept/old"), (18, "a/many")):
            with pytest.raises(Broke):
                store.put_stream(name, pieces(count))
        assert [o.name for o in store.list()] == ["kept/old"]
        assert store.get("kept/old") == b"old"

    def test_a_range_ends_where_the_object_ends(self, store: TileStore) -> None:
        data = bytes(range(256))
        store.put("a/b", data)
        assert store.get_range("a/b", 0, 1) == b"\0"
        assert store.get_range("a/b", 10, 20) == data[10:30]
        assert store.get_range("a/b", 250, 1_000) == data[250:]
        assert store.get_range("a/b", 256, 1) == b""
        assert store.get_range("a/b", 9_999, 5) == b""
        assert store.get_range("a/c", 0, 5) is None
        for start, length in ((-1, 5), (0, 0), (0, -1)):
            with pytest.raises(ValueError, match="range"):
                store.get_range("a/b", start, length)
        with pytest.raises(InvalidName):
            store.get_range("../b", 0, 5)

    def test_what_was_never_put_is_none_and_no_error(self, store: TileStore) -> None:
        store.put("a/b", b"x")
        for name in ("nothing", "a", "a/c", "a/b/c", "z/y/x"):
            assert store.get(name) is None
            assert not store.exists(name)

    def test_the_same_name_again_replaces(self, store: TileStore) -> None:
        store.put("a/b", b"long old content")
        store.put("a/b", b"new")
        assert store.get("a/b") == b"new"
        assert [o.name for o in store.list()] == ["a/b"]

    def test_a_deleted_object_is_gone_and_only_it(self, store: TileStore) -> None:
        for name in ("a/b/c", "a/b/d", "a/e"):
            store.put(name, b"x")
        assert store.delete(["a/b/c", "a/nothing", "a/b", "nothing/at/all"]) == 1
        assert [o.name for o in store.list()] == ["a/b/d", "a/e"]
        assert store.delete([]) == 0
        assert store.delete(["a/b/d", "a/e"]) == 2
        assert list(store.list()) == []

    def test_a_name_can_be_put_again_after_it_was_deleted(self, store: TileStore) -> None:
        for n in range(3):
            store.put("a/b/c", str(n).encode())
            assert store.get("a/b/c") == str(n).encode()
            store.delete(["a/b/c"])

    @pytest.mark.parametrize("name", BAD_NAMES.values(), ids=BAD_NAMES)
    def test_rule_13_a_name_that_could_leave_the_room_is_refused_everywhere(self, store: TileStore, name: str) -> None:
        store.put("kept", b"x")
        with pytest.raises(InvalidName):
            store.put(name, b"x")
        with pytest.raises(InvalidName):
            store.get(name)
        with pytest.raises(InvalidName):
            store.exists(name)
        with pytest.raises(InvalidName):
            store.delete(["kept", name])
        assert [o.name for o in store.list()] == ["kept"]

    @pytest.mark.parametrize("prefix", ["../", "/", "a/../", "a\\", "a\n"])
    def test_a_prefix_is_judged_like_a_name(self, store: TileStore, prefix: str) -> None:
        with pytest.raises(InvalidName):
            store.list(prefix)

    def test_names_of_any_other_kind_are_fine(self, store: TileStore) -> None:
        names = ["ü/漢字/🗺.mvt", "a b/c:d", "...", ".hidden", "x" * 255, "UPPER", "trailing.", "%2e%2e/x"]
        for name in names:
            store.put(name, name.encode())
        assert [o.name for o in store.list()] == sorted(names)
        assert all(store.get(name) == name.encode() for name in names)

    def test_a_listing_is_in_name_order_and_says_size_and_time(self, store: TileStore) -> None:
        before = time.time() * 1000
        # "." and "-" sort before "/", digits after it: a folder is no place of its own in the order of names.
        names = ["a/x", "a.b", "a-b/x", "a0", "a/", "a/y/z", "a/y.z", "b", "A"]
        names.remove("a/")
        for name in names:
            store.put(name, name.encode())
        found = list(store.list())
        assert [o.name for o in found] == sorted(names)
        for item in found:
            assert isinstance(item, StoredObject)
            assert item.size == len(item.name)
            assert before - 2_000 <= item.modified_ms <= time.time() * 1000 + 2_000

    def test_a_prefix_is_of_the_name_and_need_not_be_a_folder(self, store: TileStore) -> None:
        names = ["tiles/1/2/3", "tiles/1/20/3", "tiles/1/21", "tiles/12/2", "tiles/2", "tilesets/x", "tile"]
        for name in names:
            store.put(name, b"x")
        for prefix in [
            "",
            "t",
            "tiles",
            "tiles/",
            "tiles/1",
            "tiles/1/",
            "tiles/1/2",
            "tiles/1/2/",
            "tiles/1/21",
            "x",
            "x/y",
        ]:
            assert [o.name for o in store.list(prefix)] == sorted(n for n in names if n.startswith(prefix)), prefix

    # One test, run for each adapter in one process: that is what this check warns of, and what a contract is for.
    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    @given(
        names=st.lists(
            st.lists(st.sampled_from(["a", "b", "a.b", "a-", "0", "é"]), min_size=1, max_size=4), max_size=12
        ),
        prefix=st.lists(st.sampled_from(["a", "b", "a.", "0"]), max_size=3),
    )
    def test_any_listing_agrees_with_sorting_and_filtering(
        self, names: list[list[str]], prefix: list[str], tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        # Names end alike, so that none is the folder of another (which a folder cannot hold).
        store = self.fresh(tmp_path_factory)
        wanted = {"/".join([*parts, "object"]) for parts in names}
        for name in wanted:
            store.put(name, b"x")
        begins = "/".join(prefix)
        assert [o.name for o in store.list(begins)] == sorted(n for n in wanted if n.startswith(begins))
        store.delete(list(wanted))
        assert list(store.list()) == []
        store.close()

    def fresh(self, tmp_path_factory: pytest.TempPathFactory) -> TileStore:
        """An empty store, for examples that each need one."""
        raise AssertionError("a subclass names its adapter")

    def test_a_listing_goes_on_while_objects_come_and_go(self, store: TileStore) -> None:
        names = [f"t/{n:03}/x" for n in range(60)]
        for name in names:
            store.put(name, b"x")
        listing = store.list()
        seen = [next(listing).name for _ in range(10)]
        store.delete(names[30:40])
        store.put("t/zzz", b"x")
        seen += [o.name for o in listing]
        assert seen == sorted(seen)
        assert set(names[:30] + names[40:]) <= set(seen)

    def test_a_reader_sees_a_whole_object_or_another_whole_one(self, store: TileStore) -> None:
        contents = [bytes([n]) * 300_000 for n in range(4)]
        store.put("a/b", contents[0])
        stop = threading.Event()

        def write() -> None:
            n = 0
            while not stop.is_set():
                n += 1
                store.put("a/b", contents[n % 4])

        writer = threading.Thread(target=write)
        writer.start()
        try:
            assert all(store.get("a/b") in contents for _ in range(100))
        finally:
            stop.set()
            writer.join()

    def test_puts_and_deletes_in_one_folder_do_not_disturb_each_other(self, harness: TileStoreHarness) -> None:
        processes = [spawn.Process(target=put_and_delete, args=(harness.open, f"p{n}", 80)) for n in range(3)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(patient(120))
            assert process.exitcode == 0
        store = harness.open()
        assert [o.name for o in store.list()] == [f"shared/deep/p{n}-kept" for n in range(3)]
        store.close()

    def test_a_put_that_was_killed_leaves_a_whole_object_or_none(self, harness: TileStoreHarness) -> None:
        store = harness.open()
        for attempt in range(3):
            going = spawn.Event()
            process = spawn.Process(target=put_large_ones_until_killed, args=(harness.open, f"k{attempt}", going))
            process.start()
            assert going.wait(patient(60))
            time.sleep(0.011 * (attempt + 1))
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join(patient(30))
        found = list(store.list())
        assert found
        assert {o.size for o in found} == {1_000_000}
        assert all(o.name.startswith("k") for o in found)
        store.close()
