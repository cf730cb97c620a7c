from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import time
from pathlib import Path

import pytest

from geo_assets_tests.resources.contract_tile_store import TileStoreContract, TileStoreHarness
from geo_assets_tests.resources.tile_store_processes import put_on_a_full_disk, put_without_permission
from geo_assets_tests.waiting import patient
from resources.tile_store.folder import INCOMING, FolderTileStore
from resources.tile_store.protocol import InvalidName, TileStore, TileStoreError, TileStoreUnavailable

spawn = multiprocessing.get_context("spawn")


class TestFolderTileStore(TileStoreContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> TileStoreHarness:
        return TileStoreHarness(open=functools.partial(FolderTileStore, tmp_path / "store"))

    def fresh(self, tmp_path_factory: pytest.TempPathFactory) -> TileStore:
        return FolderTileStore(tmp_path_factory.mktemp("store"))


@pytest.fixture
def store(tmp_path: Path) -> FolderTileStore:
    return FolderTileStore(tmp_path / "store")


def test_an_object_is_a_file_of_its_name(store: FolderTileStore) -> None:
    store.put("tiles/14/1/2/1-ab.mvt.gz", b"x")
    assert (store.root / "tiles/14/1/2/1-ab.mvt.gz").read_bytes() == b"x"


def test_folders_that_a_delete_empties_go_with_it(store: FolderTileStore) -> None:
    store.put("tiles/14/1/2/a", b"x")
    store.put("tiles/14/3/4/a", b"x")
    store.delete(["tiles/14/1/2/a"])
    assert not (store.root / "tiles/14/1").exists()
    store.delete(["tiles/14/3/4/a"])
    assert os.listdir(store.root) == [INCOMING]


def test_what_is_incoming_is_no_object(store: FolderTileStore) -> None:
    (store.root / INCOMING / "leftover").write_bytes(b"half")
    assert list(store.list()) == []
    assert list(store.list(".inc")) == []
    with pytest.raises(InvalidName):
        store.get(f"{INCOMING}/leftover")
    with pytest.raises(InvalidName):
        store.list(f"{INCOMING}/")


def test_leftovers_are_swept_after_an_hour_and_not_before(store: FolderTileStore) -> None:
    old, young = store.root / INCOMING / "old", store.root / INCOMING / "young"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 3_700,) * 2)
    os.utime(young, (time.time() - 3_500,) * 2)
    store.put("kept", b"x")
    os.utime(store.root / "kept", (0, 0))
    FolderTileStore(store.root)
    assert (old.exists(), young.exists(), store.exists("kept")) == (False, True, True)
    assert store.sweep(time.time() + 200) == 1


def test_a_put_leaves_nothing_incoming(store: FolderTileStore) -> None:
    store.put("a", b"x")
    with pytest.raises(TileStoreError):
        store.put("a/b", b"x")
    assert os.listdir(store.root / INCOMING) == []


def test_an_object_and_a_folder_cannot_have_one_name_and_the_error_says_so(store: FolderTileStore) -> None:
    store.put("a/b", b"x")
    for name in ("a", "a/b/c", "a/b/c/d"):
        with pytest.raises(TileStoreError, match=r"in the way|in its way"):
            store.put(name, b"x")
    assert [o.name for o in store.list()] == ["a/b"]


def test_a_link_out_of_the_root_is_not_followed_by_a_listing(store: FolderTileStore, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(b"x")
    (store.root / "link").symlink_to(tmp_path / "outside")
    (store.root / "file").symlink_to(tmp_path / "outside" / "secret")
    assert list(store.list()) == []


def test_a_full_disk_is_unavailable_and_leaves_no_part(store: FolderTileStore) -> None:
    results = spawn.Queue()
    process = spawn.Process(target=put_on_a_full_disk, args=(str(store.root), results))
    process.start()
    message = results.get(timeout=patient(60))
    process.join(patient(30))
    assert process.exitcode == 0
    assert "too-large cannot be written" in message
    assert [o.name for o in store.list()] == ["a/after", "before"]
    assert os.listdir(store.root / INCOMING) == []


@pytest.mark.parametrize("below", ["", "new"], ids=["the root", "a folder to be made"])
def test_a_folder_that_cannot_be_written_gives_one_clear_line(tmp_path: Path, below: str) -> None:
    root = tmp_path / "readonly"
    root.mkdir()
    root.chmod(0o555)
    results = spawn.Queue()
    process = spawn.Process(target=put_without_permission, args=(str(root / below), results))
    process.start()
    message = results.get(timeout=patient(60))
    process.join(patient(30))
    root.chmod(0o755)
    if message == "cannot":
        pytest.skip("this process cannot give up root's powers")
    assert message == f"{root / below} cannot be made: Permission denied"


def test_a_root_below_a_file_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TileStoreUnavailable, match="cannot be made"):
        FolderTileStore(tmp_path / "file" / "store")


def test_a_store_whose_incoming_folder_was_removed_makes_it_again(store: FolderTileStore) -> None:
    (store.root / INCOMING).rmdir()
    store.put("a", b"x")
    assert store.get("a") == b"x"


def test_the_resource_hands_out_a_plain_client(tmp_path: Path) -> None:
    from resources.tile_store.resource import TileStoreResource

    assert isinstance(TileStoreResource(root=str(tmp_path / "store")).client(), FolderTileStore)


def synced_by(store: FolderTileStore, name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Folders that a put syncs, from the object's up to the root."""
    folders: list[str] = []

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_dir():
            folders.append("." if path == store.root else str(path.relative_to(store.root)))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        store.put(name, b"x")
    return folders


def age(root: Path) -> None:
    """As if nothing had been changed there for a minute."""
    for folder in [root, *(path for path in root.rglob("*") if path.is_dir())]:
        before = os.stat(folder).st_mtime - 60
        os.utime(folder, (before, before))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_put_syncs_each_folder_that_may_be_as_new_as_its_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderTileStore(tmp_path / "store")
    every = ["14/1/2", "14/1", "14", "."]
    assert synced_by(store, "14/1/2/1-a", monkeypatch) == every
    assert synced_by(store, "14/1/2/2-b", monkeypatch) == every, "too young to tell two changes apart by their time"
    age(store.root)
    assert synced_by(store, "14/1/2/3-c", monkeypatch) == every, "seen unchanged for the first time"
    assert synced_by(store, "14/1/2/4-d", monkeypatch) == ["14/1/2"]

    assert synced_by(store, "14/1/3/1-e", monkeypatch) == ["14/1/3", "14/1"], "an entry of the one above"
    # Another process deletes the folder and makes it anew.
    age(store.root)
    synced_by(store, "14/1/2/5-f", monkeypatch)
    other = FolderTileStore(store.root)
    other.delete([f"14/1/2/{name}" for name in ("1-a", "2-b", "3-c", "4-d", "5-f")])
    assert not (store.root / "14/1/2").exists()
    other.put("14/1/2/6-g", b"x")
    assert synced_by(store, "14/1/2/7-h", monkeypatch) == ["14/1/2", "14/1"]
