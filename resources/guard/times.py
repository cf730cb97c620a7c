"""Times to live as guards take them: seconds in, whole milliseconds to the store."""

from __future__ import annotations

import math


def milliseconds(ttl_s: float) -> int:
    """A time to live in whole milliseconds, at least one.

    Raises:
        ValueError: It is not a number of seconds above 0.
    """
    if not (math.isfinite(ttl_s) and ttl_s > 0):
        raise ValueError(f"ttl_s {ttl_s} is not a number of seconds above 0")
    return max(1, int(ttl_s * 1000))
