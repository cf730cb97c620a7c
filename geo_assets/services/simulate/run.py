"""One simulation, from first position to summary: each leaves when it is due, whatever became of earlier ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from geo_assets.services.sample import folder
from geo_assets.services.simulate.edits import Edits, find_buildings
from geo_assets.services.simulate.sending import EdgeSender, LogSender, Sender
from geo_assets.services.simulate.tally import SimulationError, Tally
from geo_assets.services.simulate.watching import Watch
from geo_assets.simulation.fleet import Fate, Fleet, Sent
from geo_assets.simulation.routes import read_routes

if TYPE_CHECKING:
    from geo_assets.events.sources import Source
    from geo_assets.stack import Stack

STEP_S = {"edge": 0.1, "log": 0.02}
"""How often it is looked what is due: on the average a position leaves half as much after its time. A body costs the
edge a millisecond, however few positions are in it."""

STEP_ROWS = 20_000
"""Most positions made at once: a tenth of a second of work, so that a stop is noticed."""

DRAIN_S = 15.0
"""How long what waits at the end may take."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is simulated.

    Args:
        devices: How many.
        rate_s: Positions of each a second.
        minutes: Of simulated time; None until stopped.
        speed_up: Minutes simulated in one minute.
        seed: Of the devices.
        via: To the edge, or straight to the log.
        url: Of the edge.
        prefix: Before each device's id.
        late: Share of positions that are late.
        duplicates: Share that is sent twice.
        jumps: Share that is far away.
        edits_s: Edits a second.
        watch: Whether triggers are watched.
    """

    devices: int = 200
    rate_s: float = 1.0
    minutes: float | None = 10.0
    speed_up: float = 1.0
    seed: int = 1
    via: Literal["edge", "log"] = "edge"
    url: str = ""
    prefix: str = ""
    late: float = 0.0
    duplicates: float = 0.0
    jumps: float = 0.0
    edits_s: float = 0.0
    watch: bool = False


class Simulation:
    """Devices that move and send.

    Args:
        stack: Log, features, ledger.
        source: Who signs.
        options: What is simulated.
        clock: Seconds since the epoch.

    Raises:
        SimulationError: It cannot begin; one line says why.
        FleetError, RouteError: A number is outside its range.
    """

    def __init__(self, stack: Stack, source: Source, options: Options, clock: Callable[[], float] = time.time) -> None:
        if not source.secrets and (options.via == "edge" or options.edits_s):
            raise SimulationError(f"source {source.name} has no secret to sign with")
        if options.speed_up != 1 and options.minutes is None:
            raise SimulationError(
                "a simulation that is sped up ends at the present: say for how many minutes it goes on"
            )
        self._stack, self._source, self._options, self._clock = stack, source, options, clock
        self.tally = Tally()
        self._began_s = clock()
        # Sped up it begins so far back that it ends now: times that are to come would be refused.
        minutes = 0.0 if options.minutes is None else options.minutes
        self._first_ms = int(self._began_s * 1_000 - minutes * 60_000 * (1 - 1 / options.speed_up))
        self._last_ms = None if options.minutes is None else int(self._first_ms + minutes * 60_000)
        self._until_ms = self._first_ms
        self._ended_s: float | None = None
        self.fleet = Fleet(
            read_routes((folder() / "routes.json").read_bytes()),
            options.devices,
            seed=options.seed,
            interval_ms=1_000 / options.rate_s,
            start_ms=self._first_ms,
            prefix=options.prefix,
            late=options.late,
            duplicates=options.duplicates,
            jumps=options.jumps,
        )
        self._sender: Sender | None = None

    @property
    def asked_s(self) -> float:
        """Positions a second that are due, on the clock of this machine."""
        return self._options.devices * self._options.rate_s * self._options.speed_up

    def due_ms(self, event_ms: float) -> float:
        """The time at which an event time is due, milliseconds since the epoch."""
        return self._began_s * 1_000 + (event_ms - self._first_ms) / self._options.speed_up

    def run(self, stop: threading.Event, show: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
        """Go on until the minutes are over or it is stopped.

        Args:
            stop: Set to end it sooner.
            show: Called now and then with what `report` says.

        Returns:
            The last report.

        Raises:
            SimulationError: It cannot go on.
        """
        options = self._options
        buildings = find_buildings(self._stack, self._source.name) if options.edits_s else []
        self._sender = sender = (
            EdgeSender(options.url, self._source, self.tally)
            if options.via == "edge"
            else LogSender(self._stack.log, self.tally)
        )
        watch = Watch(self._stack.log, self.fleet.ids, self.due_ms, self.tally) if options.watch else None
        edits = Edits(options.url, self._source, buildings, options.edits_s, self.tally) if options.edits_s else None
        try:
            shown_s, step_s = 0.0, STEP_S[options.via]
            while not stop.is_set() and not self._over:
                began = time.monotonic()
                self._step(sender)
                if show is not None and began - shown_s >= 0.25:
                    shown_s = began
                    show(self.report())
                if self._behind_s < step_s:
                    stop.wait(max(0.0, step_s - (time.monotonic() - began)))
        finally:
            sender.close(min(DRAIN_S, 3.0) if stop.is_set() else DRAIN_S)
            self._ended_s = self._clock()
            if edits is not None:
                edits.close()
            if watch is not None:
                watch.close(0.2 if stop.is_set() else 2.0, 15.0)
        return self.report()

    @property
    def _over(self) -> bool:
        return self._last_ms is not None and self._until_ms >= self._last_ms

    @property
    def _behind_s(self) -> float:
        """Seconds by which making positions is behind what is due."""
        target = self._last_ms if self._over and self._last_ms is not None else self._until_ms
        return max(0.0, self._clock() - self.due_ms(target) / 1_000)

    def _step(self, sender: Sender) -> None:
        options = self._options
        now_ms = self._first_ms + (self._clock() - self._began_s) * 1_000 * options.speed_up
        most_ms = STEP_ROWS * 1_000 / (options.devices * options.rate_s)
        until = int(min(now_ms, self._until_ms + max(1.0, most_ms)))
        if self._last_ms is not None:
            until = min(until, self._last_ms)
        if until <= self._until_ms:
            sender.send(self._nothing, self.fleet.ids)
            return
        sent = self.fleet.between(self._until_ms, until)
        self._until_ms = until
        counts = np.bincount(sent.fate, minlength=len(Fate)).tolist()
        self.tally.made((fate.name.lower(), counts[fate]) for fate in Fate if counts[fate])
        sender.send(sent, self.fleet.ids)

    @property
    def _nothing(self) -> Sent:
        return self.fleet.between(self._until_ms, self._until_ms)

    def report(self) -> dict[str, Any]:
        """Where it stands, as plain JSON values."""
        seconds = (self._ended_s or self._clock()) - self._began_s
        members = self.tally.members()
        return {
            "devices": len(self.fleet),
            "watched": self._options.watch,
            "seconds": round(seconds, 1),
            "asked_s": round(self.asked_s, 1),
            "achieved_s": round(members["sent"] / seconds, 1) if seconds > 0 else 0.0,
            "waiting": self._sender.waiting if self._sender is not None else 0,
            "behind_s": 0.0 if self._ended_s is not None else round(self._behind_s, 2),
            **members,
        }
