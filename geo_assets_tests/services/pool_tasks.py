"""What the pool's tests run inside worker processes: importable by name, as a fork server needs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence


def misbehave(tasks: Sequence[str]) -> list[str]:
    """`hang`, `die` and `raise` do so; anything else comes back in capitals with the worker's pid."""
    answers: list[str] = []
    for task in tasks:
        if task == "hang":
            time.sleep(3600)
        if task == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if task == "raise":
            raise ValueError("a task that raises")
        answers.append(task.upper())
    return answers


def pids(tasks: Sequence[int]) -> list[int]:
    """The worker's pid, once for each task."""
    return [os.getpid() for _ in tasks]


def boom() -> None:
    """An initializer that cannot do its work."""
    raise OSError("no room to start")
