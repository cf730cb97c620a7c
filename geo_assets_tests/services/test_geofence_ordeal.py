"""Per-device order is kept and nothing is lost or doubled in effect: routing is killed, the log goes away, fences move.

Scaled here; whole, with two hundred thousand positions, ten kills and three outages, in `make soak`.
"""

from __future__ import annotations

import random
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

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
from geo_assets_tests.services.geofence_ordeal import (
    LATENESS_MS,
    MOVING,
    STEP_MS,
    Found,
    Journey,
    Keeper,
    Mover,
    Poster,
    Watcher,
    judge,
    moving_fence,
    standing_fences,
    until,
)
from geo_assets_tests.stacks import environment_of, settings_from
from resources.event_log.protocol import LogError


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedKafka]:
    broker = started(tmp_path_factory.mktemp("broker") / "kafka")
    yield broker
    broker.remove()


def environment_in(folder: Path, **more: str) -> dict[str, str]:
    return {
        "GEO_ASSETS_HOME": str(folder / "home"),
        "GEO_ASSETS_LOG_PARTITIONS": "3",
        "GEO_ASSETS_GEOFENCE_LATENESS_S": f"{LATENESS_MS / 1000:g}",
        **more,
    }


@dataclass(frozen=True)
class Blows:
    """What strikes, spread evenly over the positions.

    Args:
        order: `kill`: the routing process; `kill, one stands by`; `outage`: of the log; `kill in an outage`; `pause`:
            until another has taken over, and then it goes on.
        outage: Takes the log away, calls what it is given, and brings the log back.
    """

    order: Sequence[str]
    outage: Callable[[Callable[[], None]], None]

    @property
    def kills(self) -> int:
        return sum("kill" in blow for blow in self.order)

    def strike(self, blow: str, keeper: Keeper, stack: Stack, chance: random.Random) -> None:
        """Strike, and wait until a run routes again."""
        ledger = stack.ledger
        if blow == "outage":
            self.outage(lambda: None)
            return
        time.sleep(chance.uniform(0.0, 1.0))
        epoch, following, paused = in_force(ledger).epoch, None, None
        if blow == "kill, one stands by":
            following = keeper.another()
            time.sleep(2.0)
        if blow == "kill in an outage":
            self.outage(keeper.kill)
        elif blow == "pause":
            # In the middle of its work: positions read ahead, triggers under way.
            told = sum(e.end for e in stack.log.extents(topics.TRIGGERS).values())
            until(lambda: sum(e.end for e in stack.log.extents(topics.TRIGGERS).values()) > told + 50, 60, "it tells")
            paused = keeper.keep()
            paused.signal(signal.SIGSTOP)
            keeper.running = keeper.another()
        else:
            keeper.kill(following)
        until(lambda: (keeper.keep(), in_force(ledger).epoch > epoch)[1], 90, "the next run begins")
        if paused is not None:
            # The next one has claimed the snapshot, and is marking partitions or routes by now.
            time.sleep(chance.uniform(0.0, 0.5))
            paused.signal(signal.SIGCONT)
            assert paused.process.wait(30) == 3, (paused.process.returncode, paused.said[-3_000:])


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
    """Post positions, strike meanwhile, and judge.

    Args:
        environment: Of the routing processes.
        folder: For what they say.
        blows: What strikes.
        devices: How many.
        fixes: Of each.
        a_second: Positions appended a second.
        fences_every_s: Between changes of fences.
    """
    chance = random.Random(11)
    journey = Journey(devices, fixes, time.time_ns() // 1_000_000 - fixes * STEP_MS)
    records = journey.records()
    keeper = Keeper(environment, folder / "route.log")
    began = time.monotonic()
    with Stack(settings_from(environment)) as stack:
        post_fences(stack, standing_fences() + [moving_fence(n, 1) for n in range(MOVING)])
        watcher = Watcher(stack)
        try:
            keeper.keep()
            until(lambda: in_force(stack.ledger).epoch, 60, "the first run begins")
            poster, mover = Poster(stack, records, a_second), Mover(stack, fences_every_s)
            for number, blow in enumerate(blows.order):
                share = (number + 0.5) / len(blows.order) * len(records)
                until(lambda share=share: (keeper.keep(), poster.sent >= share)[1], 600, "positions posted")
                blows.strike(blow, keeper, stack, chance)
            until(lambda: (keeper.keep(), poster.sent == len(records))[1], 600, "all positions posted")
            mover.end()
            posted_s = time.monotonic() - began
            until(lambda: (keeper.keep(), all_in_force(stack))[1], 120, "all is routed, all fences are in force", 0.1)
            assert keeper.running is not None
            assert keeper.running.end() == 0, keeper.running.said[-3_000:]
            changes = watcher.end()
        finally:
            watcher.stop.set()
            keeper.finish()
        routed_s = time.monotonic() - began
        found, epochs = judge(stack, journey, changes), current_epoch(stack.ledger)
    print(
        f"{len(records):,} positions posted in {posted_s:.1f} s (pieces again: {poster.again}), all routed at "
        f"{routed_s:.1f} s, judged at {time.monotonic() - began:.1f} s; {keeper.kills} kills, "
        f"{keeper.started} processes, ended by themselves {keeper.ended}, {epochs} epochs ({found.epochs} marked); "
        f"{mover.changes} fence changes in {len(changes)} sets; "
        f"{found.valid:,} triggers that count, {found.repeated} repeated, {found.void} void"
    )
    assert keeper.kills == blows.kills
    assert epochs > len(blows.order) - blows.order.count("outage")
    assert len(changes) >= 3
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
        meanwhile()
        time.sleep(away_s)
        broker.start({})

    return outage


def locks_of(file: Path, away_s: float) -> Callable[[Callable[[], None]], None]:
    """A log that another program keeps locked: nothing can be written."""

    def outage(meanwhile: Callable[[], None]) -> None:
        with sqlite3.connect(file, isolation_level=None) as connection:
            connection.execute("BEGIN IMMEDIATE")
            meanwhile()
            time.sleep(away_s)
            connection.execute("ROLLBACK")
        connection.close()

    return outage


SOME = ["kill", "kill in an outage", "pause"]
MANY = [
    "kill", "outage", "kill, one stands by", "kill", "pause", "kill in an outage", "kill, one stands by", "kill",
    "kill in an outage", "pause", "kill, one stands by", "kill", "kill",
]  # fmt: skip
"""Ten kills, three outages, and two runs that are paused and overtaken."""


@pytest.mark.service("kafka")
@pytest.mark.timeout(180)
def test_rule_2_on_kafka_kills_and_an_outage_lose_nothing_and_double_nothing(
    broker: GuardedKafka, tmp_path: Path
) -> None:
    environment = environment_in(tmp_path, GEO_ASSETS_KAFKA_SERVERS=broker.setting("GEO_ASSETS_KAFKA_SERVERS"))
    blows = Blows(SOME, outages_of(broker, 0.5))
    ordeal(environment, tmp_path, blows, devices=50, fixes=200, a_second=1_000, fences_every_s=1.0)


@pytest.mark.timeout(180)
def test_rule_2_on_the_embedded_log_kills_and_a_lock_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    environment = environment_in(tmp_path)
    blows = Blows(SOME, locks_of(tmp_path / "home" / "event-log.db", 6.0))
    found = ordeal(environment, tmp_path, blows, devices=50, fixes=200, a_second=1_000, fences_every_s=1.0)
    # What a run that was overtaken sends is refused: there is nothing for a reader to pass over.
    assert found.void == 0


@pytest.mark.soak
@pytest.mark.service("kafka", "redis", "postgres", "s3")
@pytest.mark.timeout(3_600)
def test_rule_2_two_hundred_thousand_positions_ten_kills_and_three_outages_of_kafka(
    broker: GuardedKafka, tmp_path: Path
) -> None:
    servers = {**settings_of("redis", "postgres", "s3"), **{n: broker.setting(n) for n in ["GEO_ASSETS_KAFKA_SERVERS"]}}
    with environment_of("production", servers) as production:
        environment = environment_in(tmp_path, **production)
        migrate_all(settings_from(environment))
        blows = Blows(MANY, outages_of(broker, 5.0))
        ordeal(environment, tmp_path, blows, devices=200, fixes=1_000, a_second=1_500, fences_every_s=1.0)


@pytest.mark.soak
@pytest.mark.timeout(3_600)
def test_rule_2_two_hundred_thousand_positions_ten_kills_and_three_locks_of_the_embedded_log(tmp_path: Path) -> None:
    environment = environment_in(tmp_path)
    blows = Blows(MANY, locks_of(tmp_path / "home" / "event-log.db", 12.0))
    ordeal(environment, tmp_path, blows, devices=200, fixes=1_000, a_second=1_500, fences_every_s=1.0)
