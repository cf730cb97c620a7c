"""Per-device order is kept and nothing is lost or doubled in effect: routing is killed, the log goes away, fences move.

Scaled here; whole, with two hundred thousand positions, ten kills and three outages, in `make soak`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from geo_assets.events import topics
from geo_assets.services.fences import FenceBook
from geo_assets.services.geofence_snapshots import in_force
from geo_assets.stack import Stack
from geo_assets_tests.geofence_world import post_fences
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
from geo_assets_tests.stacks import settings_from
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


def ordeal(
    environment: dict[str, str],
    folder: Path,
    *,
    devices: int,
    fixes: int,
    a_second: float,
    blows: list[str],
    outage: Callable[[str], None],
    fences_every_s: float,
) -> Found:
    """Post positions, strike meanwhile, and judge.

    Args:
        environment: Of the routing processes.
        folder: For what they say.
        devices: How many.
        fixes: Of each.
        a_second: Positions appended a second.
        blows: `kill` (of the routing process), or the name of an outage.
        outage: Makes one: returns when it is over.
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
            for number, blow in enumerate(blows):
                until(lambda at=number: poster.sent >= (at + 0.5) / len(blows) * len(records), 600, "positions posted")
                if blow != "kill":
                    outage(blow)
                    continue
                epoch = in_force(stack.ledger).epoch
                time.sleep(chance.uniform(0.0, 1.0))
                keeper.kill()
                # The next one is killed at any moment of its life, too: but not before it has one.
                until(
                    lambda epoch=epoch: (keeper.keep(), in_force(stack.ledger).epoch > epoch)[1],
                    90,
                    "the next run begins",
                )
            until(lambda: (keeper.keep(), poster.sent == len(records))[1], 600, "all positions posted")
            mover.end()
            posted_s = time.monotonic() - began

            def done() -> bool:
                keeper.keep()
                stored, standing = in_force(stack.ledger), FenceBook(stack).standing()
                try:
                    positions, fences = stack.log.extents(topics.POSITIONS), stack.log.extents(topics.FENCES)
                except LogError:
                    return False
                read = all(stored.offsets.get(p, 0) == e.end for p, e in positions.items())
                folded = all(standing.offsets.get(p, 0) == e.end for p, e in fences.items())
                return read and folded and stored.revision == standing.revision

            until(done, 120, "all is routed and all fences are in force", every=0.1)
            assert keeper.running is not None
            assert keeper.running.end() == 0, keeper.running.said[-3_000:]
            changes = watcher.end()
        finally:
            watcher.stop.set()
            keeper.finish()
        routed_s = time.monotonic() - began
        found = judge(stack, journey, changes)
        print(
            f"{len(records):,} positions posted in {posted_s:.1f} s (pieces again: {poster.again}), all routed at "
            f"{routed_s:.1f} s, judged at {time.monotonic() - began:.1f} s; {keeper.kills} kills, "
            f"{keeper.started} processes, ended by themselves {keeper.ended}, epochs {found.epochs}; "
            f"{mover.changes} fence changes in {len(changes)} sets; "
            f"{found.valid:,} triggers that count, {found.repeated} repeated, {found.void} void"
        )
        assert keeper.kills == blows.count("kill")
        assert found.epochs > keeper.kills
        assert len(changes) >= 3
    return found


def outages_of(broker: GuardedKafka, away_s: float) -> Callable[[str], None]:
    def outage(blow: str) -> None:
        (broker.kill if blow == "broker killed" else broker.stop)()
        time.sleep(away_s)
        broker.start({})

    return outage


@pytest.mark.service("kafka")
@pytest.mark.timeout(180)
def test_rule_2_on_kafka_kills_and_an_outage_lose_nothing_and_double_nothing(
    broker: GuardedKafka, tmp_path: Path
) -> None:
    environment = environment_in(tmp_path, GEO_ASSETS_KAFKA_SERVERS=broker.setting("GEO_ASSETS_KAFKA_SERVERS"))
    found = ordeal(
        environment, tmp_path, devices=100, fixes=100, a_second=800, blows=["kill", "broker stopped", "kill"],
        outage=outages_of(broker, 1.0), fences_every_s=1.5,
    )  # fmt: skip
    assert found.valid > 1_000
