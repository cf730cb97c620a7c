"""`geo-assets route` killed with -9 again and again while positions come: a consumer sees what one run would tell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest

from geo_assets.events import topics
from geo_assets.geofence.rules import Rules
from geo_assets.services.fences import FenceBook
from geo_assets.services.geofence_snapshots import in_force
from geo_assets.settings import Settings
from geo_assets.stack import Stack
from geo_assets_tests.geofence_world import consistent, expected, fence, marks, post_fences, seen, walk, what
from geo_assets_tests.stacks import environment_of, settings_from


@pytest.fixture(
    params=["embedded", pytest.param("production", marks=pytest.mark.service("kafka", "redis", "postgres", "s3"))]
)
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, str]]:
    from geo_assets.services.migrating import migrate_all

    with environment_of(request.param) as found:
        made = {
            **found, "GEO_ASSETS_HOME": str(tmp_path / "home"), "GEO_ASSETS_LOG_PARTITIONS": "2",
            "GEO_ASSETS_GEOFENCE_IDLE_S": "1.5", "GEO_ASSETS_GEOFENCE_LATENESS_S": "1",
        }  # fmt: skip
        if request.param == "production":
            migrate_all(settings_from(made))
        yield made


class Route:
    """`geo-assets route --until-idle` in a process of its own."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "geo_assets.cli", "route", "--until-idle"],
            env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self) -> str:
        said, _ = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, said
        return said


def until(ready: Callable[[], object], seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)


def told(stack: Stack) -> int:
    return sum(extent.end for extent in stack.log.extents(topics.TRIGGERS).values())


def settings_in(environment: dict[str, str]) -> Settings:
    return settings_from(environment)


def killed_while(stack: Stack, environment: dict[str, str], kills: int, *, moving: bool) -> None:
    records = walk(40, 75)
    pieces = iter([records[start : start + 250] for start in range(0, len(records), 250)])
    post_fences(stack, [fence(n, dwell_s=150 if n % 2 else 400) for n in range(6)])
    version = 1
    running: Route | None = None
    try:
        for kill in range(kills):
            before = told(stack)
            running = Route(environment)
            for piece in islice(pieces, 3):
                stack.log.append(piece)
            # In the middle of telling: some triggers are out, most have no snapshot behind them.
            until(lambda before=before: told(stack) > before + 30)
            if moving:
                version += 1
                post_fences(stack, [fence(n, version=version, shift=0.2 * version, dwell_s=150) for n in range(3)])
            stack.log.append(next(pieces))
            time.sleep(0.05 * kill)
            running.kill()
        running = Route(environment)
        said = running.end()
    finally:
        if running is not None and running.process.poll() is None:
            running.kill()
    assert "idle" in said
    assert marks(stack) == kills + 1


@pytest.mark.timeout(120)
def test_a_routing_process_killed_three_times_tells_what_one_that_lives_would(environment: dict[str, str]) -> None:
    with Stack(settings_in(environment)) as stack:
        killed_while(stack, environment, 3, moving=False)
        found = seen(stack)
        consistent(found)
        book = FenceBook(stack)
        fences = book.index(in_force(stack.ledger).fences).fence_set
        assert what(found) == expected(stack, fences, Rules(lateness_ms=1_000))
        assert sum(map(len, found.values())) > 300


@pytest.mark.timeout(120)
@pytest.mark.parametrize("environment", ["embedded"], indirect=True)
def test_fences_that_move_while_a_routing_process_is_killed_contradict_nobody(environment: dict[str, str]) -> None:
    with Stack(settings_in(environment)) as stack:
        killed_while(stack, environment, 2, moving=True)
        consistent(seen(stack))
        assert in_force(stack.ledger).revision == FenceBook(stack).standing().revision >= 2
