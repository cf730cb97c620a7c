"""The rules by which positions are judged: what is late, too far in the future, a jump, too coarse, silent.

They are part of a snapshot, as the revision of the fences is: a replay judges as it was judged.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

DAY_MS = 86_400_000


class RuleError(ValueError):
    """A rule outside its range; the message names it, its value and its limit."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a tracker.

    Args:
        lateness_ms: How far the watermark is past enter + dwell when DWELL fires for a device that said nothing since.
        max_future_ms: How far a device's time may be after the receipt of its record; clocks without a network drift a
            second a day, and a minute is a clock that was set by hand.
        max_speed_mps: Metres a second beyond which a fix is a jump; an airliner flies 300. 0: nothing is a jump.
        recover_after: Fixes that agree with each other after which a jump is where the device is.
        max_accuracy_m: Radius beyond which a fix is too coarse to say anything about fences.
        silent_ms: A device of which the watermark has moved on for as long is forgotten; its stays end.
        crossings: Whether a fence that is passed between two fixes gives ENTER and EXIT.
        crossing_gap_ms: Time between two fixes beyond which nothing is known of the way between.
        max_devices: Devices remembered at once; one more is an error of the batch that brings it, before it changed
            anything. 400 bytes each, with an id of 15 characters and one stay.
        max_stays: Stays (a device in a fence) at once; a position that brings more is an error of its own, before it
            changed anything. 40 bytes each, and 32 in a snapshot: five for each device of `max_devices`.
    """

    lateness_ms: int = 5_000
    max_future_ms: int = 60_000
    max_speed_mps: float = 350.0
    recover_after: int = 3
    max_accuracy_m: float = 200.0
    silent_ms: int = 7 * DAY_MS
    crossings: bool = False
    crossing_gap_ms: int = 300_000
    max_devices: int = 2_000_000
    max_stays: int = 10_000_000

    def __post_init__(self) -> None:
        limits = {
            "lateness_ms": (0, DAY_MS),
            "max_future_ms": (0, 366 * DAY_MS),
            "max_speed_mps": (0, 1e9),
            "recover_after": (1, 100),
            "max_accuracy_m": (0, 10_000),
            "silent_ms": (1_000, 366 * DAY_MS),
            "crossing_gap_ms": (1, 366 * DAY_MS),
            "max_devices": (1, 100_000_000),
            "max_stays": (1, 1_000_000_000),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise RuleError(f"{name}: {value} is outside {low}..{high}")

    def members(self) -> dict[str, int | float | bool]:
        """Name -> value, for a snapshot."""
        return {rule.name: getattr(self, rule.name) for rule in fields(self)}
