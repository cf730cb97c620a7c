"""Which dead letters to send again, and sending many: what the command line and the job replay_dead_letters share."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from geo_assets.events import topics
from geo_assets.events.dead_letter import REASONS, STAGES, DeadLetter
from geo_assets.services.dead_letters import Listed, home_of, list_dead_letters, read_letter, replay
from geo_assets.services.resending import TooMuchWaits

if TYPE_CHECKING:
    from geo_assets.stack import Stack

CHUNK = 20
"""Letters sent at once: each may hold a megabyte."""

TOLD_EVERY = 1_000
"""Letters between two words of how far it is."""


class ChoiceError(ValueError):
    """What is asked for names nothing that there is; the message names the field, the value and what it may be."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which letters. None: whatever it is.

    Args:
        reason: One of `REASONS`.
        source: Whose.
        stage: One of `STAGES`.
        since_ms: Those that died from then on, milliseconds since the epoch, UTC.

    Raises:
        ChoiceError: There is no such reason or stage.
    """

    reason: str | None = None
    source: str | None = None
    stage: str | None = None
    since_ms: int | None = None

    def __post_init__(self) -> None:
        for name, value, known in (("reason", self.reason, REASONS), ("stage", self.stage, STAGES)):
            if value is not None and value not in known:
                raise ChoiceError(f"{name} {value[:80]!r} is none of {', '.join(known)}")

    @property
    def narrow(self) -> bool:
        """Whether it says anything."""
        return any(one is not None for one in (self.reason, self.source, self.stage, self.since_ms))

    def wants(self, letter: DeadLetter) -> bool:
        """Whether a letter is one of them."""
        return (
            (self.reason is None or letter.reason == self.reason)
            and (self.source is None or letter.source == self.source)
            and (self.stage is None or letter.stage == self.stage)
            and (self.since_ms is None or letter.at_ms >= self.since_ms)
        )


_AGO = re.compile(r"(\d{1,6})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def moment_of(text: str) -> int:
    """Milliseconds since the epoch of `2h` ago, or of a time in RFC 3339.

    Raises:
        ChoiceError: It is neither, or says no zone.
    """
    ago = _AGO.fullmatch(text)
    if ago is not None:
        return time.time_ns() // 1_000_000 - int(ago[1]) * _SECONDS[ago[2]] * 1_000
    try:
        said = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        raise ChoiceError(
            f"since {text[:40]!r} is neither 30s, 15m, 2h or 3d nor a time such as 2026-05-01T12:00Z"
        ) from None
    if said.tzinfo is None:
        raise ChoiceError(f"since {text[:40]!r} says no zone: end it with Z or an offset such as +02:00")
    return int(said.timestamp() * 1_000)


def select(stack: Stack, chosen: Chosen, *, every: bool = False) -> list[Listed]:
    """The letters chosen, oldest first, without their payloads.

    Args:
        stack: The ports.
        chosen: Which.
        every: Also those that were replayed.
    """
    rows = list_dead_letters(stack.log, chosen.wants, payloads=False)
    return [one for one in rows if every or one.replayed_ms is None]


def homes(rows: Sequence[Listed]) -> Mapping[str, int]:
    """Topic -> how many letters would go there."""
    return dict(sorted(Counter(home_of(one.letter) for one in rows).items()))


@dataclass(slots=True)
class Sent:
    """What became of letters that were to be sent.

    Args:
        count: How many went.
        unfit: Why others did not, a line each.
        triggers: Whether some wait for the routing run.
    """

    count: int
    unfit: list[str]
    triggers: bool = False


def send(
    stack: Stack,
    rows: Sequence[Listed],
    payload: bytes | None = None,
    told: Callable[[int], None] = lambda _: None,
) -> Sent:
    """Send letters piece by piece, each to where it came from; one that cannot be sent costs only itself.

    Args:
        stack: The ports.
        rows: What to send.
        payload: A mended payload instead; only with a single letter.
        told: Told now and then how many were looked at.
    """
    done = Sent(0, [])
    for start in range(0, len(rows), CHUNK):
        piece = rows[start : start + CHUNK]
        try:
            done.count += replay(stack, [read_letter(stack.log, one) for one in piece], payload=payload)
        except (LookupError, ValueError, TooMuchWaits):
            for one in piece:
                try:
                    done.count += replay(stack, [read_letter(stack.log, one)], payload=payload)
                except (LookupError, ValueError, TooMuchWaits) as fault:
                    done.unfit.append(str(fault))
        done.triggers = done.triggers or any(home_of(one.letter) == topics.TRIGGERS for one in piece)
        if (start + CHUNK) % TOLD_EVERY == 0:
            told(start + CHUNK)
    return done
