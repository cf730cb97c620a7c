"""Per-device order is kept and nothing is lost or doubled in effect: routing is killed, the log goes away, fences move.

Scaled here; whole, with two hundred thousand positions, ten kills and three outages, in `make soak`.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import psutil
import pytest

from geo_assets.events import topics
from geo_assets.services.fences import FenceBook
from geo_assets.services.geofence_snapshots import in_force
from geo_assets.services.migrating import migrate_all
from geo_assets.services.trigger_tail import current_epoch
from geo_assets.stack import Stack
from geo_assets_tests.geofence_world import post_fences
from geo_assets_tests.real_services import settings_of
from geo_assets_tests.resources.kafka_broker import GuardedKafka, started
from geo_assets_tests.running_platform import Platform, running
from geo_assets_tests.services.geofence_ordeal import (
    LATENESS_MS,
    MOVING,
    STEP_MS,
    Found,
    Journey,
    Keeper,
    Mover,
    Poster,
    Route,
    Watcher,
    judge,
    moving_fence,
    standing_fences,
    told,
)
from geo_assets_tests.stacks import environment_of, settings_from
from geo_assets_tests.waiting import patient, until
from resources.event_log.protocol import LogError

SNAPSHOT_S = 1.5


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedKafka]:
    broker = started(tmp_path_factory.mktemp("broker") / "kafka")
    yield broker
    broker.remove()


@contextmanager
def production_with(broker: GuardedKafka, folder: Path) -> Iterator[dict[str, str]]:
    """The production stack in a room of its own, on a broker that may be stopped."""
    services = settings_of("redis", "postgres", "s3") | {
        "GEO_ASSETS_KAFKA_SERVERS": broker.setting("GEO_ASSETS_KAFKA_SERVERS")
    }
    with environment_of("production", services) as found:
        environment = environment_in(folder, **found)
        migrate_all(settings_from(environment))
        yield environment


def environment_in(folder: Path, **more: str) -> dict[str, str]:
    return {
        "GEO_ASSETS_HOME": str(folder / "home"),
        "GEO_ASSETS_LOG_PARTITIONS": "3",
        "GEO_ASSETS_GEOFENCE_LATENESS_S": f"{LATENESS_MS / 1000:g}",
        # A kill is followed sooner, and more snapshots are in its way.
        "GEO_ASSETS_GEOFENCE_LEASE_S": "2",
        "GEO_ASSETS_GEOFENCE_SNAPSHOT_S": f"{SNAPSHOT_S:g}",
        **more,
    }


@dataclass(frozen=True)
class Blows:
    """What strikes, spread evenly over the positions.

    Args:
        order: Names of methods of `Ordeal`, with spaces.
        outage: Takes the log away for a while, calls what it is given, and brings the log back.
    """

    order: Sequence[str]
    outage: Callable[[Callable[[], None]], None]

    @property
    def kills(self) -> int:
        return sum("kill" in blow for blow in self.order)


class Ordeal:
    """Positions are posted, fences move, blows fall; afterwards it is judged.

    Args:
        stack: The ports.
        keeper: Keeps a routing process alive.
        blows: What strikes.
        journey: Where devices go.
        a_second: Positions appended a second.
        fences_every_s: Between changes of fences.
    """

    def __init__(
        self, stack: Stack, keeper: Keeper, blows: Blows, journey: Journey, *, a_second: float, fences_every_s: float
    ) -> None:
        self.stack, self.keeper, self.blows, self.journey = stack, keeper, blows, journey
        self.chance = random.Random(11)
        self.gaps: list[float] = []
        self.erased: list[str] = []
        self._a_second, self._fences_every_s = a_second, fences_every_s

    def run(self) -> Found:
        stack, keeper, records = self.stack, self.keeper, self.journey.records()
        began = time.monotonic()
        post_fences(stack, standing_fences() + [moving_fence(n, 1) for n in range(MOVING)])
        watcher = Watcher(stack)
        try:
            keeper.keep()
            self.poster = Poster(stack, records, self._a_second)
            # The sensor asks for no run before there is a position.
            self.poster.allow(1)
            until(lambda: self.epoch, 150, why="the first run begins")
            self.mover = Mover(stack, self._fences_every_s)
            revision = 0
            for number, blow in enumerate(self.blows.order):
                share = int((number + 0.5) / len(self.blows.order) * len(records))
                self.poster.allow(share)
                until(lambda share=share: (keeper.keep(), self.poster.sent >= share)[1], 600, why="positions posted")
                # However slow the machine is: between any two blows fences have moved.
                until(lambda before=revision: (keeper.keep(), self.revision > before)[1], 150, why="fences are adopted")
                revision = self.revision
                self.poster.allow(share + len(records) // len(self.blows.order) // 2)
                getattr(self, blow.replace(" ", "_"))()
            self.poster.allow(len(records))
            until(lambda: (keeper.keep(), self.poster.sent == len(records))[1], 600, why="all positions posted")
            self.mover.end()
            posted_s = time.monotonic() - began
            until(
                lambda: (keeper.keep(), all_in_force(stack))[1],
                300,
                why="all is routed, all fences are in force",
                every=0.1,
            )
            keeper.end()
            changes = watcher.end()
        finally:
            watcher.stop.set()
            keeper.close()
        routed_s = time.monotonic() - began
        found, epochs = judge(stack, self.journey, changes, forgotten=self.erased), current_epoch(stack.ledger)
        print(
            f"{len(records):,} positions posted in {posted_s:.1f} s (pieces again: {self.poster.again}), all routed at "
            f"{routed_s:.1f} s, judged at {time.monotonic() - began:.1f} s; {keeper.kills} kills, {keeper.started} "
            f"runs started, ended by themselves {keeper.ended}, {epochs} epochs ({found.epochs} marked); "
            f"hand-overs {[round(gap, 2) for gap in self.gaps]} s; "
            f"{self.mover.changes} fence changes in {len(changes)} sets; "
            f"{found.valid:,} triggers that count, {found.repeated} repeated, {found.void} void"
        )
        assert keeper.kills == self.blows.kills
        assert epochs > keeper.kills
        assert len(changes) >= len(self.blows.order)
        assert sorted(change.forgotten for change in changes if change.forgotten) == sorted(self.erased)
        return found

    @property
    def epoch(self) -> int:
        """Of the run that has claimed the snapshot."""
        return in_force(self.stack.ledger).epoch

    @property
    def revision(self) -> int:
        """Of the fences in force."""
        return in_force(self.stack.ledger).revision

    # Blows

    def kill(self) -> None:
        """At any moment of a run's life after its claim."""
        time.sleep(self.chance.uniform(0.0, 1.0))
        epoch = self.epoch
        self.keeper.kill()
        self._followed(epoch)

    def kill_with_a_standby(self) -> None:
        epoch, following = self.epoch, self.keeper.another()
        until(lambda: "another run routes" in following.said, 150, why="the next one stands by")
        self.keeper.kill(following)
        self._followed(epoch)

    def outage(self) -> None:
        self.blows.outage(lambda: None)

    def kill_in_an_outage(self) -> None:
        """With triggers told that nobody has acknowledged, long enough for a snapshot that must not be written."""
        self.keeper.ripe()
        self._tells()
        epoch = self.epoch
        self.poster.burst(600, 150)
        self.blows.outage(self.keeper.kill)
        self._followed(epoch)

    def pause(self) -> None:
        """In the middle of its work, until another has taken over; then it goes on."""
        self._tells()
        epoch, paused = self.epoch, self.keeper.keep()
        paused.signal(signal.SIGSTOP)
        self.keeper.running = self.keeper.another()
        self._followed(epoch)
        # The next one has claimed the snapshot, and is marking partitions or routes by now.
        time.sleep(self.chance.uniform(0.0, 0.5))
        paused.signal(signal.SIGCONT)
        assert paused.process.wait(patient(60)) == 3, (paused.process.returncode, paused.said[-3_000:])

    def hand_over(self) -> None:
        """A run ends in order while another stands by."""
        self._tells()
        epoch, ending = self.epoch, self.keeper.keep()
        following = self.keeper.running = self.keeper.another()
        until(lambda: "another run routes" in following.said, 150, why="the next one stands by")
        assert ending.end() == 0, ending.said[-3_000:]
        ended = time.monotonic()
        self._followed(epoch)
        self._tells()
        self.gaps.append(time.monotonic() - ended)

    def erase(self) -> None:
        """A device is forgotten while it and all others go on."""
        self.mover.moves.clear()
        until(lambda: (self.keeper.keep(), self._fences_in_force())[1], 150, why="fences are in force")
        device = self.journey.name(3 + len(self.erased))
        environment = {**os.environ, **self.keeper.environment}
        done = subprocess.run(
            [sys.executable, "-m", "geo_assets.cli", "erase", "--device", device],
            env=environment, capture_output=True, text=True, timeout=patient(120), check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        self.erased.append(device)
        self.mover.moves.set()

    def _followed(self, epoch: int) -> None:
        until(lambda: (self.keeper.keep(), self.epoch > epoch)[1], 150, why="the next run begins")

    def _tells(self) -> None:
        before = told(self.stack)
        self.poster.allow(self.poster.sent + 500)
        until(lambda: (self.keeper.keep(), told(self.stack) > before)[1], 150, why="triggers come")

    def _fences_in_force(self) -> bool:
        standing = FenceBook(self.stack).standing()
        folded = all(standing.offsets.get(p, 0) == e.end for p, e in self.stack.log.extents(topics.FENCES).items())
        return folded and in_force(self.stack.ledger).revision == standing.revision


def ordeal(
    environment: dict[str, str],
    folder: Path,
    blows: Blows,
    *,
    devices: int,
    fixes: int,
    a_second: float,
    fences_every_s: float,
) -> Found:
    """One with `geo-assets route` in processes of their own."""
    journey = Journey(devices, fixes, time.time_ns() // 1_000_000 - fixes * STEP_MS)
    return strike(Keeper(environment, folder / "route.log"), blows, journey, a_second, fences_every_s)


def strike(keeper: Keeper, blows: Blows, journey: Journey, a_second: float, fences_every_s: float) -> Found:
    with Stack(settings_from(keeper.environment)) as stack:
        one = Ordeal(stack, keeper, blows, journey, a_second=a_second, fences_every_s=fences_every_s)
        found = one.run()
    # A second; more where a dozen processes share each core. A lease that is not let go of runs out after five.
    within = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1) / 4)
    assert all(gap < within for gap in one.gaps), (one.gaps, within)
    return found


def all_in_force(stack: Stack) -> bool:
    """Whether a snapshot stands behind all positions and all fences."""
    stored, standing = in_force(stack.ledger), FenceBook(stack).standing()
    try:
        positions, fences = stack.log.extents(topics.POSITIONS), stack.log.extents(topics.FENCES)
    except LogError:
        return False
    read = all(stored.offsets.get(p, 0) == e.end for p, e in positions.items())
    folded = all(standing.offsets.get(p, 0) == e.end for p, e in fences.items())
    return read and folded and stored.revision == standing.revision


def outages_of(broker: GuardedKafka, away_s: float) -> Callable[[Callable[[], None]], None]:
    """A broker that is stopped in order, then killed, in turn."""
    ends = cycle([broker.stop, broker.kill])

    def outage(meanwhile: Callable[[], None]) -> None:
        next(ends)()
        time.sleep(away_s)
        meanwhile()
        broker.start({})

    return outage


def locks_of(file: Path, away_s: float) -> Callable[[Callable[[], None]], None]:
    """A log that another program keeps locked: nothing can be written."""

    def outage(meanwhile: Callable[[], None]) -> None:
        with sqlite3.connect(file, isolation_level=None) as connection:
            connection.execute("BEGIN IMMEDIATE")
            time.sleep(away_s)
            meanwhile()
            connection.execute("ROLLBACK")
        connection.close()

    return outage


FEW = ["kill", "kill in an outage", "pause"]
SOME = ["kill", "erase", "kill in an outage", "hand over", "pause"]
MANY = [
    "kill", "outage", "kill with a standby", "kill", "erase", "pause", "kill in an outage", "hand over", "kill",
    "kill with a standby", "kill in an outage", "erase", "pause", "kill with a standby", "hand over", "kill", "kill",
]  # fmt: skip
"""Ten kills, three outages, two devices forgotten, and two runs that are paused and overtaken."""


@pytest.mark.service("kafka", "redis", "postgres", "s3")
@pytest.mark.timeout(600)
def test_rule_2_on_the_production_stack_kills_and_an_outage_lose_nothing_and_double_nothing(
    broker: GuardedKafka, tmp_path: Path
) -> None:
    with production_with(broker, tmp_path) as environment:
        blows = Blows(FEW, outages_of(broker, 2 * SNAPSHOT_S))
        ordeal(environment, tmp_path, blows, devices=50, fixes=200, a_second=2_000, fences_every_s=1.0)


@pytest.mark.timeout(600)
def test_rule_2_on_the_embedded_log_kills_and_a_lock_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    environment = environment_in(tmp_path)
    blows = Blows(SOME, locks_of(tmp_path / "home" / "event-log.db", 6.0))
    found = ordeal(environment, tmp_path, blows, devices=50, fixes=200, a_second=2_000, fences_every_s=1.0)
    # What a run that was overtaken sends is refused, and each knows what those before it told: a reader has nothing to
    # pass over.
    assert (found.void, found.repeated) == (0, 0)


@pytest.mark.soak
@pytest.mark.service("kafka", "redis", "postgres", "s3")
@pytest.mark.timeout(3_600)
def test_rule_2_two_hundred_thousand_positions_ten_kills_and_three_outages_of_kafka(
    broker: GuardedKafka, tmp_path: Path
) -> None:
    with production_with(broker, tmp_path) as environment:
        blows = Blows(MANY, outages_of(broker, 5.0))
        ordeal(environment, tmp_path, blows, devices=200, fixes=1_000, a_second=1_500, fences_every_s=1.0)


@pytest.mark.soak
@pytest.mark.timeout(3_600)
def test_rule_2_two_hundred_thousand_positions_ten_kills_and_three_locks_of_the_embedded_log(tmp_path: Path) -> None:
    environment = environment_in(tmp_path)
    blows = Blows(MANY, locks_of(tmp_path / "home" / "event-log.db", 12.0))
    ordeal(environment, tmp_path, blows, devices=200, fixes=1_000, a_second=1_500, fences_every_s=1.0)


class Daemon(Keeper):
    """The runs of `geo-assets up`, which the sensor asks for and the daemon starts."""

    def __init__(self, platform: Platform) -> None:
        super().__init__(platform.environment, platform.home)
        self._platform = platform

    def keep(self) -> Route:
        assert self._platform.process is not None
        assert self._platform.process.poll() is None, self._platform.text[-4_000:]
        return None  # type: ignore[return-value]

    def ripe(self) -> None:
        """Wait until a run has worked for so long that the sensor does not bide its time when it is killed."""
        until(self._ripe, 300, why="a run that has worked for a while", every=0.5)

    def kill(self, following: Route | None = None) -> None:
        self.ripe()
        for process in self._ripe():
            process.kill()
        self.kills += 1

    def _ripe(self) -> list[psutil.Process]:
        from geo_assets_tests.ordeal import processes
        from sensors.geofence_positions import SOON_S

        found: list[psutil.Process] = []
        for process in processes(self._platform, "run"):
            with suppress(psutil.NoSuchProcess):
                if process.create_time() < time.time() - SOON_S - 5.0:
                    found.append(process)
        return found

    def end(self) -> None:
        assert self._platform.stop() == 0

    def close(self) -> None:
        return


@pytest.mark.soak
@pytest.mark.service("kafka", "redis", "postgres", "s3")
@pytest.mark.timeout(7_200)
def test_rule_2_two_hundred_thousand_positions_and_ten_killed_runs_of_the_sensor_s(
    broker: GuardedKafka, tmp_path: Path
) -> None:
    order = ["kill", "outage", "kill", "kill", "kill in an outage", "kill", "kill", "kill", "kill in an outage",
             "kill", "kill"]  # fmt: skip
    with (
        production_with(broker, tmp_path) as environment,
        # A run that had read everything would end before it is old enough.
        running(tmp_path / "home", **environment, GEO_ASSETS_GEOFENCE_IDLE_S="600") as platform,
    ):
        journey = Journey(200, 1_000, time.time_ns() // 1_000_000 - 1_000 * STEP_MS)
        strike(Daemon(platform), Blows(order, outages_of(broker, 5.0)), journey, 1_500, 5.0)
