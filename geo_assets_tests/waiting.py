"""How long tests wait: until something is so, and never for ever. A limit here is a net, not a claim of speed.

A test that passes pays nothing for a generous limit, so each is meant for a busy machine; where the machine is busier
still, GEO_ASSETS_TEST_PATIENCE multiplies them all, pytest's own for a test (`conftest.py`) and the browser's too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE = "GEO_ASSETS_TEST_PATIENCE"
"""The factor by which whatever must not hang may take longer here; 1 unless told otherwise."""

T = TypeVar("T")


def patient(seconds: float) -> float:
    """What must not take for ever may take this long on this machine."""
    return seconds * float(os.environ.get(PATIENCE) or 1)


def until(ready: Callable[[], T], seconds: float = 60, *, why: str = "", every: float = 0.02) -> T:
    """Ask until the answer is true, and give it.

    Args:
        ready: What is asked.
        seconds: When to give up, on a machine that does nothing else.
        why: What is waited for, for the sentence of a failure.
        every: Seconds between two questions.

    Raises:
        AssertionError: It did not come true in time; the sentence has the last answer.
    """
    limit = patient(seconds)
    deadline = time.monotonic() + limit
    while not (answer := ready()):
        assert time.monotonic() < deadline, (
            f"{why or 'what the test waits for'}: not within {limit:g} s (last answer: {answer!r})"
        )
        time.sleep(every)
    return answer
