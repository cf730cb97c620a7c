"""How a reader of the embedded log hears of an append by another process at once: a file for each topic is touched.

Only Linux has what it takes here (inotify, over the C library); elsewhere, and where the kernel gives no more of it,
nobody hears and readers look at the log now and then. Looking stays the guarantee: a touch may be missed.
"""

from __future__ import annotations

import ctypes
import os
import select
import sys
import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

# inotify(7), sys/inotify.h: the same numbers on every architecture.
_IN_ATTRIB = 0x4
_IN_NONBLOCK = os.O_NONBLOCK if sys.platform != "win32" else 0
_READ_BYTES = 65_536


class Bells:
    """The bells of one log: one a topic, for all processes that share the folder.

    Args:
        folder: Where their files are; made when the first one is needed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, int] = {}
        self._lock = threading.Lock()

    def ring(self, topics: Iterable[int]) -> None:
        """Tell every reader of these topics (by row id) that there is something new. Costs microseconds, never fails.

        Where a bell cannot be rung, readers look a little later.
        """
        for topic in topics:
            with suppress(OSError):
                os.utime(self._file(topic))

    def ear(self, topics: Iterable[int]) -> Ear | None:
        """What hears the bells of these topics from now on; None where nobody can."""
        if sys.platform != "linux":
            return None
        try:
            for topic in topics:
                self._file(topic)
            return Ear([self._path(topic) for topic in topics])
        except (OSError, AttributeError):
            return None

    def _path(self, topic: int) -> Path:
        return self._folder / str(topic)

    def _file(self, topic: int) -> int:
        found = self._files.get(topic)
        if found is not None:
            return found
        with self._lock:
            if topic not in self._files:
                self._folder.mkdir(parents=True, exist_ok=True)
                opened = os.open(self._path(topic), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
                weakref.finalize(self, os.close, opened)
                self._files[topic] = opened
            return self._files[topic]


class Ear:
    """Hears bells, for one thread.

    Args:
        paths: The bells' files.

    Raises:
        OSError: The kernel has no more watches to give, or a file is not there.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        self._descriptor = library.inotify_init1(_IN_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        # Not before nobody uses it any more: a number that is closed under a waiting thread is soon another file's.
        weakref.finalize(self, os.close, self._descriptor)
        for path in paths:
            if library.inotify_add_watch(self._descriptor, os.fsencode(path), _IN_ATTRIB) < 0:
                raise OSError(ctypes.get_errno(), "inotify_add_watch", str(path))
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)

    def wait(self, seconds: float) -> bool:
        """Until a bell rings or was rung since the last time, at most so long; whether one did."""
        if not self._poll.poll(max(0.0, seconds) * 1000):
            return False
        # One read takes all there is room for; the rest rings again.
        with suppress(BlockingIOError):
            os.read(self._descriptor, _READ_BYTES)
        return True
