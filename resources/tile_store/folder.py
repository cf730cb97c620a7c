"""The embedded tile store: a folder, an object a file, a name its path below the root."""

from __future__ import annotations

import bisect
import contextlib
import os
import stat
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from resources.tile_store.names import INCOMING, check_name, check_prefix, check_range
from resources.tile_store.protocol import StoredObject, TileStoreError, TileStoreUnavailable

LEFTOVER_AFTER_S = 3_600.0
"""A put takes milliseconds; what has been incoming for an hour belongs to a process that died."""
_FOLDER_RACES = 100
_TICK_NS = 2_000_000_000
"""The coarsest clock of a file system that is met: FAT's."""
_SYNCED_FOLDERS = 10_000
_WRITE_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)


class FolderTileStore:
    """A tile store in a folder (`TileStore`).

    A put writes into `.incoming`, syncs, renames, and syncs the object's folder. Those above it, up to the root, may be
    as new as the object and are synced unless they are seen to be unchanged since they were: on a busy disk each sync
    costs a millisecond or more, and a tile's name has four levels.

    A name cannot be both an object and a folder of objects, as it can in S3: that put is a TileStoreError.

    Args:
        root: The folder; it is made. All of it must be one file system.

    Raises:
        TileStoreUnavailable: It cannot be made or written.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()
        self._incoming = self.root / INCOMING
        self._next_sweep = 0.0
        self._synced: OrderedDict[Path, tuple[int, int]] = OrderedDict()
        """Folder -> inode and time of its last change as of when it was synced."""
        try:
            self._incoming.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unavailable("made", self.root, error) from error
        self._sweep_when_due()

    def put(self, name: str, data: bytes, *, metadata: Mapping[str, str] | None = None) -> None:
        """Write atomically and durably (see `TileStore.put`). A folder has no place for metadata."""
        self.put_stream(name, [data])

    def put_stream(self, name: str, pieces: Iterable[bytes], *, metadata: Mapping[str, str] | None = None) -> None:
        """Write atomically and durably, a piece at a time (see `TileStore.put_stream`)."""
        target = self._path(name)
        self._sweep_when_due()
        written = self._incoming / uuid.uuid4().hex
        named = False
        try:
            self._write(written, pieces)
            self._name(written, target)
            named = True
            _sync_folder(target.parent)
            folder = target.parent
            while folder != self.root:
                folder = folder.parent
                self._sync_if_changed(folder)
        except FileNotFoundError as error:
            raise TileStoreUnavailable(f"{self.root} was removed while {name!r} was put") from error
        except (NotADirectoryError, IsADirectoryError) as error:
            raise TileStoreError(f"{name!r} is in the way of a folder or a folder in its way: {error}") from error
        except OSError as error:
            raise self._unavailable("written", target, error) from error
        finally:
            if not named:
                with contextlib.suppress(OSError):
                    written.unlink()

    def get(self, name: str) -> bytes | None:
        """The bytes, or None when there is no such object."""
        path = self._path(name)
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except OSError as error:
            raise self._unavailable("read", path, error) from error

    def get_range(self, name: str, start: int, length: int) -> bytes | None:
        """Some of the bytes (see `TileStore.get_range`), or None when there is no such object."""
        check_range(start, length)
        path = self._path(name)
        try:
            with open(path, "rb") as file:
                file.seek(start)
                return file.read(length)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except OSError as error:
            raise self._unavailable("read", path, error) from error

    def exists(self, name: str) -> bool:
        """Whether there is such an object."""
        path = self._path(name)
        try:
            return stat.S_ISREG(path.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise self._unavailable("read", path, error) from error

    def delete(self, names: Sequence[str]) -> int:
        """Delete these and the folders that are empty then; how many objects went.

        A deletion is not synced: after a power failure an object may be back, as one that nobody names.
        """
        count = 0
        for path in [self._path(name) for name in names]:
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                continue
            except OSError as error:
                if path.is_dir():  # macOS and POSIX say EPERM for the unlink of a folder.
                    continue
                raise self._unavailable("deleted", path, error) from error
            count += 1
            # rmdir takes empty folders only; a put that finds its folder gone makes it again.
            with contextlib.suppress(OSError):
                for folder in path.parents:
                    if folder == self.root:
                        break
                    folder.rmdir()
        return count

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """Objects whose name begins with `prefix`, in name order, read a folder at a time."""
        check_prefix(prefix)
        self._sweep_when_due()
        return self._below(prefix.rpartition("/")[0], prefix)

    def close(self) -> None:
        """Nothing to release."""

    def sweep(self, now_s: float | None = None) -> int:
        """Delete what a process that died left in `.incoming`; how many files went. Runs by itself once an hour."""
        oldest_s = (time.time() if now_s is None else now_s) - LEFTOVER_AFTER_S
        count = 0
        with contextlib.suppress(OSError), os.scandir(self._incoming) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_mtime < oldest_s:
                        os.unlink(entry.path)
                        count += 1
        return count

    def _sweep_when_due(self) -> None:
        if time.monotonic() >= self._next_sweep:
            self._next_sweep = time.monotonic() + LEFTOVER_AFTER_S
            self.sweep()

    def _path(self, name: str) -> Path:
        check_name(name)
        return self.root / name

    def _write(self, path: Path, pieces: Iterable[bytes]) -> None:
        try:
            descriptor = os.open(path, _WRITE_NEW, 0o666)
        except FileNotFoundError:
            self._incoming.mkdir(exist_ok=True)
            descriptor = os.open(path, _WRITE_NEW, 0o666)
        try:
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _name(self, written: Path, target: Path) -> None:
        for _ in range(_FOLDER_RACES):
            try:
                os.replace(written, target)
                return
            except FileNotFoundError:
                # The folder is not there yet; or a delete took it, empty as it was, in between.
                if not written.exists():
                    raise
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
            except FileExistsError as error:
                # An object stands where the folder should; or the folder was there, and is gone again by now.
                if target.parent.is_file():
                    raise NotADirectoryError(str(error)) from error
            except FileNotFoundError:
                continue  # A delete took a folder on the way.
        raise TileStoreUnavailable(f"the folder of {target} was removed {_FOLDER_RACES} times while it was put")

    def _sync_if_changed(self, folder: Path) -> None:
        """Sync a folder whose entries have changed since this process synced it, by whomever."""
        try:
            facts = os.stat(folder)
        except FileNotFoundError:
            return  # As in `_sync_folder`.
        seen = facts.st_ino, facts.st_mtime_ns
        if self._synced.get(folder) == seen:
            return
        _sync_folder(folder)
        # Within one tick of the file system's clock a second change leaves the same time: only an old one tells.
        if time.time_ns() - facts.st_mtime_ns > _TICK_NS:
            self._synced[folder] = seen
            while len(self._synced) > _SYNCED_FOLDERS:
                self._synced.popitem(last=False)

    def _below(self, folder: str, prefix: str) -> Iterator[StoredObject]:
        try:
            with os.scandir(self.root / folder) as entries:
                # A folder sorts as what its objects' names begin with: "a.b" comes before "a/b".
                found = sorted(
                    (entry.name + "/" if entry.is_dir(follow_symlinks=False) else entry.name) for entry in entries
                )
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise self._unavailable("listed", self.root / folder, error) from error
        start = folder + "/" if folder else ""
        for part in found[bisect.bisect_left(found, prefix[len(start) :]) if len(prefix) > len(start) else 0 :]:
            name = start + part
            if not name.startswith(prefix):
                return
            if not folder and part == INCOMING + "/":
                continue
            if part.endswith("/"):
                yield from self._below(name[:-1], "")
                continue
            with contextlib.suppress(FileNotFoundError):  # Deleted since the folder was read.
                facts = os.stat(self.root / name, follow_symlinks=False)
                if stat.S_ISREG(facts.st_mode):
                    yield StoredObject(name, facts.st_size, facts.st_mtime_ns // 1_000_000)

    @staticmethod
    def _unavailable(what: str, path: Path, error: OSError) -> TileStoreUnavailable:
        return TileStoreUnavailable(f"{path} cannot be {what}: {error.strerror or error}")


def _sync_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    except FileNotFoundError:
        # The object was deleted, and its folder with it, by somebody who saw it: there is nothing to keep.
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
