"""What an alert says, and what alerts promise: one message to one channel, or an error that says why not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

Status = Literal["firing", "resolved"]
Severity = Literal["error", "warning"]


class AlertsMisconfigured(Exception):
    """The channels cannot be told from the settings; the message names the setting and shows no secret."""


class NotDelivered(Exception):
    """A channel did not take a message. It may have: whoever sends it again says the same id.

    Args:
        channel: Which.
        problem: Why, in a line without secrets.
        retry_after_s: How long the receiver asked to be left alone; 0 where it did not.
    """

    def __init__(self, channel: str, problem: str, retry_after_s: float = 0.0) -> None:
        super().__init__(f"{channel}: {problem}")
        self.channel, self.problem, self.retry_after_s = channel, problem, retry_after_s


@dataclass(frozen=True, slots=True)
class Failing:
    """One thing that fails: a partition, or what else a check names.

    Args:
        subject: Partition key, or a name.
        problem: What is wrong with it.
        map_url: Link to the map; empty for what is nowhere.
    """

    subject: str
    problem: str = ""
    map_url: str = ""


@dataclass(frozen=True, slots=True)
class Alert:
    """One condition: a check that fails in a region, or a job whose runs fail for one cause.

    Args:
        key: The same as long as it is the same condition: receivers group by it.
        status: `resolved` is told once, when it is over.
        severity: `error` should wake somebody.
        kind: `check` or `run`.
        name: `asset/check`, or the job.
        summary: One line.
        region: Quadkey of the smallest tile that holds all that fails; empty where there is none.
        count: How much fails; of runs, how many failed.
        failing: Some of what fails.
        url: The check or the run in the UI.
        map_url: The region on the map; empty where there is none.
        since_ms: Since when, milliseconds since the epoch, UTC.
        at_ms: When this was found.
    """

    key: str
    status: Status
    severity: Severity
    kind: Literal["check", "run"]
    name: str
    summary: str
    region: str = ""
    count: int = 0
    failing: tuple[Failing, ...] = ()
    url: str = ""
    map_url: str = ""
    since_ms: int = 0
    at_ms: int = 0


@dataclass(frozen=True, slots=True)
class Message:
    """What is told at once.

    Args:
        id: The same on every try: receivers drop what they have by it.
        at_ms: When it was composed, milliseconds since the epoch, UTC.
        alerts: At least one.
    """

    id: str
    at_ms: int
    alerts: tuple[Alert, ...]


@runtime_checkable
class Alerts(Protocol):
    """Sends messages. It keeps nothing and tries once: who sends it again, and when, is the caller's."""

    @property
    def channels(self) -> tuple[str, ...]:
        """Names of the places that are told, each on its own. Stable, and without secrets."""
        ...

    def send(self, channel: str, message: Message) -> None:
        """Tell one channel; when it returns, the channel has taken the message. Bounded in time.

        Raises:
            NotDelivered: It did not take it, or did not say so in time.
            KeyError: There is no such channel.
        """
        ...

    def close(self) -> None:
        """Release connections."""
        ...
