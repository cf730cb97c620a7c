"""Kafka, Redis, Postgres and S3 killed with -9 and started again, each in turn, while edits come in."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from geo_assets_tests.ordeal import LAYERS, ordeal
from geo_assets_tests.real_services import settings_of
from geo_assets_tests.running_platform import Platform
from geo_assets_tests.stacks import environment_of
from geo_assets_tests.world import settings_for
from scripts.local_services import STANDARD, Services


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """Services of this file's own: others' tests must not lose theirs."""
    settings_of("kafka", "redis", "postgres", "s3")  # Skips, or fails, where they cannot run.
    own = Services(tmp_path_factory.mktemp("services"))
    try:
        own.start()
        yield own
    finally:
        own.remove()


@pytest.fixture
def besieged(tmp_path: Path, services: Services) -> Iterator[Platform]:
    home = tmp_path / "home"
    home.mkdir()
    (home / "layers.yaml").write_text(LAYERS)
    settings_for(home)
    with environment_of("production", services.settings()) as environment:
        platform = Platform(home, GEO_ASSETS_LEASE_S="20", **environment)
        platform.start()
        try:
            platform.wait_until_up()
            yield platform
        finally:
            if platform.process is not None and platform.process.poll() is None:
                platform.kill()
            for process in platform.left():
                process.kill()


@pytest.mark.timeout(1200)
def test_each_service_killed_and_back_loses_nothing_and_needs_no_hand(besieged: Platform, services: Services) -> None:
    ordeal(besieged, edits=160, kills=list(STANDARD), every=6.0, pause=0.25, services=services)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_services_killed_in_turn_during_two_thousand_edits_lose_nothing(besieged: Platform, services: Services) -> None:
    kills = [*STANDARD, *STANDARD, "ingest", "live", *STANDARD, "up", *STANDARD]
    random.Random(4).shuffle(kills)
    ordeal(besieged, edits=2_000, kills=kills, every=15.0, pause=0.25, services=services)
