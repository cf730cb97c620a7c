"""When a fence is in force: weekly windows on the wall clock of a zone, asked about event times.

Nothing here knows what a fence is, or what time it is now.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, cast
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import numpy.typing as npt

from geo_assets.events.dead_letter import Refused
from geo_assets.events.json_text import shorten

DAYS = ("Mo", "Tu", "We", "Th", "Fr", "Sa", "Su")
MINUTES_OF_A_WEEK = 7 * 24 * 60
MAX_WINDOWS = 100
"""Windows that a schedule may list; a week has 168 hours."""

FORM = 'such as {"zone": "Europe/Helsinki", "windows": ["Mo-Fr 08:00-17:30", "Sa,Su 22:00-06:00"]}'

_WINDOW = re.compile(r"([A-Z][a-z](?:[-,][A-Z][a-z])*) ([0-9]{2}):([0-9]{2})-([0-9]{2}):([0-9]{2})", re.ASCII)


class Schedule(msgspec.Struct, frozen=True):
    """Weekly windows on the wall clock of a zone.

    A window is `DAYS HH:MM-HH:MM`: days as `Mo`, `Mo-Fr` or `Mo,We,Fr`, the end not included, `24:00` allowed as an
    end. One that ends at or before its start goes on to the next day. A fence is in force in the union of its windows,
    by the clock on the wall: an hour that daylight saving skips or repeats is skipped or repeated here too.

    Args:
        zone: Name of a time zone (IANA), such as `Europe/Helsinki`.
        windows: The windows as they were written.
    """

    zone: str
    windows: tuple[str, ...]

    @classmethod
    def read(cls, value: object) -> Schedule:
        """The schedule of a `schedule` member.

        Args:
            value: An object with `zone` and `windows`.

        Raises:
            Refused: `schema`; the member, its value and its form are named.
        """
        if not isinstance(value, Mapping):
            raise _refused("schedule", value, "is no object")
        members = cast(Mapping[str, Any], value)
        zone, windows = members.get("zone"), members.get("windows")
        if not isinstance(zone, str):
            raise _refused("schedule.zone", zone, "is no name of a time zone")
        try:
            ZoneInfo(zone)
        except (KeyError, ValueError, OSError):
            raise _refused("schedule.zone", zone, "is no time zone that is known here") from None
        if not isinstance(windows, list | tuple) or not 1 <= len(cast(list[Any], windows)) <= MAX_WINDOWS:
            raise _refused("schedule.windows", windows, f"is no list of 1 to {MAX_WINDOWS} windows")
        made = cls(zone, tuple(str(window) for window in cast(list[Any], windows)))
        _week(made.windows)
        return made

    def in_force(self, time_ms: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Whether the fence is in force.

        Args:
            time_ms: (n) event times, milliseconds since the epoch, UTC.

        Returns:
            (n) answers.
        """
        minutes, which = np.unique(np.asarray(time_ms, np.int64) // 60_000, return_inverse=True)
        zone = ZoneInfo(self.zone)
        local = np.fromiter(
            (_minute_of_week(datetime.fromtimestamp(minute * 60, zone)) for minute in minutes.tolist()),
            np.int64,
            len(minutes),
        )
        return _week(self.windows)[local][which.reshape(-1)]


def _minute_of_week(local: datetime) -> int:
    return (local.weekday() * 24 + local.hour) * 60 + local.minute


@lru_cache(maxsize=1024)
def _week(windows: tuple[str, ...]) -> npt.NDArray[np.bool_]:
    """Which minutes of the week, from Monday 00:00, lie in a window."""
    week = np.zeros(MINUTES_OF_A_WEEK, np.bool_)
    for window in windows:
        match = _WINDOW.fullmatch(window)
        if match is None:
            raise _refused("schedule.windows", window, "is no window")
        hours = [int(text) for text in match.groups()[1:]]
        start, end = hours[0] * 60 + hours[1], hours[2] * 60 + hours[3]
        if hours[1] > 59 or hours[3] > 59 or start >= 24 * 60 or end > 24 * 60:
            raise _refused("schedule.windows", window, "has a time that no day has")
        length = end - start if end > start else end - start + 24 * 60
        for day in _days(match[1], window):
            week[(np.arange(length) + day * 24 * 60 + start) % MINUTES_OF_A_WEEK] = True
    week.flags.writeable = False
    return week


def _days(text: str, window: str) -> Sequence[int]:
    days: list[int] = []
    for piece in text.split(","):
        ends = piece.split("-")
        if len(ends) > 2 or any(end not in DAYS for end in ends):
            raise _refused("schedule.windows", window, f"names a day that is none of {', '.join(DAYS)}")
        first, last = DAYS.index(ends[0]), DAYS.index(ends[-1])
        days += [day % 7 for day in range(first, last + 1 if last >= first else last + 8)]
    return days


def _refused(field: str, value: object, explanation: str) -> Refused:
    return Refused("schema", field, shorten(value), FORM, explanation)
