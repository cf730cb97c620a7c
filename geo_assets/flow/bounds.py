"""What a bounded queue does as it fills: pause pulling, then shed outside callers; and when pulling goes on."""

from __future__ import annotations

from dataclasses import dataclass

CAPACITY = 100_000
PAUSE_AT = 0.7
RESUME_AT = 0.5
"""Below the pause by enough that pulling does not stutter: a fifth of the queue is 0.4 s of work at 50,000/s."""
SHED_AT = 0.9


class Shed(Exception):
    """The queue is too full for more of an outside caller's; nothing of what was handed over was taken. Try later."""

    def __init__(self, queue: str, held: int, asked: int, limit: int) -> None:
        super().__init__(
            f"{queue}: {held:,} wait for their acknowledgement, {asked:,} more would exceed {limit:,}; "
            "none of them was taken, try again later"
        )
        self.held, self.asked, self.limit = held, asked, limit


@dataclass(frozen=True, slots=True)
class Bounds:
    """The marks of a bounded queue.

    Args:
        capacity: Most that it holds.
        pause_at: Share of it from which pulling pauses.
        resume_at: Share of it down to which it must empty before pulling goes on.
        shed_at: Share of it above which outside callers are shed.
    """

    capacity: int = CAPACITY
    pause_at: float = PAUSE_AT
    resume_at: float = RESUME_AT
    shed_at: float = SHED_AT

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ValueError(f"capacity: {self.capacity} is below 1")
        if not 0 < self.resume_at < self.pause_at < self.shed_at <= 1:
            raise ValueError(
                f"resume_at {self.resume_at}, pause_at {self.pause_at}, shed_at {self.shed_at}: not 0 < a < b < c <= 1"
            )

    @property
    def shed_limit(self) -> int:
        """Most that outside callers may fill it to."""
        return int(self.capacity * self.shed_at)

    def sheds(self, held: int, more: int) -> bool:
        """Whether an outside caller's `more` are refused while `held` are there."""
        return held + more > self.shed_limit

    def pauses(self, held: int, paused: bool) -> bool:
        """Whether pulling is paused, given whether it was."""
        return held >= self.capacity * (self.resume_at if paused else self.pause_at)
