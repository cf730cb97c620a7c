"""How a process ends when it is asked to: it takes nothing new, finishes what it has, and is gone within its grace.

The first SIGTERM or SIGINT begins it; `/readyz` is false from then on. A second one ends the process at once, and so
does a grace that is over: everything here bears being killed, so that only work that is done again is lost.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import structlog

log = structlog.get_logger()

LAST_S = 3.0
"""What a process has after its grace, to free leases and leave its groups, before it is ended."""

TOO_LATE = 1
"""Exit code of a process that did not end within its grace."""


class Drain:
    """The end of one process, asked for by a signal.

    Args:
        end: Ends the process with an exit code, whatever else runs in it.
    """

    def __init__(self, end: Callable[[int], object] = os._exit) -> None:
        self.stop = threading.Event()
        """Set as soon as an end is asked for."""
        self.late = threading.Event()
        """Set when the time of what is under way is over: it is given up."""
        self._end = end
        self._give_up: list[Callable[[], object]] = []
        self._asked_with: int | None = None

    @property
    def asked(self) -> bool:
        """Whether an end was asked for."""
        return self.stop.is_set()

    def on_signals(self, grace_s: float, *, delay_s: float = 0.0, begin: Callable[[int], object] | None = None) -> None:
        """Begin to end at the first SIGTERM or SIGINT, end at once at the second. Called by the main thread.

        Args:
            grace_s: What is under way then has as long; after it `when_late` is called, and the process ends within
                three seconds more.
            delay_s: As long before that a service goes on as if nothing were, so that whoever sends it traffic sees
                that it is not ready. Not after SIGINT, which a person sends.
            begin: Called with the signal's number, by the main thread between two of its instructions.
        """

        def asked(number: int, _frame: object) -> None:
            if self._asked_with is not None:
                os.write(2, b"asked a second time to end: ending now\n")
                self._end(128 + number)
                return
            self._asked_with = number
            self.stop.set()
            if begin is not None:
                begin(number)
            wait_s = grace_s + (delay_s if number == signal.SIGTERM else 0.0)
            threading.Thread(target=self._watch, args=(wait_s,), name="drain", daemon=True).start()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, asked)

    def when_late(self, give_up: Callable[[], object]) -> None:
        """Have this called, in a thread of its own, when the grace is over: it makes the process let go of its work."""
        self._give_up.append(give_up)

    def _watch(self, wait_s: float) -> None:
        # A handler may interrupt the writing of a line: what is said of the signal is said here.
        log.info("ending", seconds=wait_s)
        time.sleep(wait_s)
        log.warning("the grace is over: what is under way is given up, and done again elsewhere", seconds=wait_s)
        self.late.set()
        until = time.monotonic() + LAST_S
        for give_up in self._give_up:
            try:
                give_up()
            except Exception as fault:
                log.warning("not given up", error=str(fault), kind=type(fault).__name__)
        time.sleep(max(0.0, until - time.monotonic()))
        log.error("ended in the middle of work: leases end by themselves")
        self._end(TOO_LATE)


PROCESS = Drain()
"""This process's."""
