"""Dagster's databases: whoever comes first makes them, and whoever comes at the same time waits."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from dagster import DagsterInstance

from geo_assets import catalog_reporter, dagster_databases, dagster_home
from geo_assets.dagster_instance import instance_of
from geo_assets.settings import Settings
from geo_assets_tests.waiting import patient


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    settings = Settings(home=tmp_path / "home")
    folder = dagster_home.prepare(settings)
    for name, value in dagster_home.environment(settings, folder).items():
        monkeypatch.setenv(name, value)
    return settings


def test_processes_that_start_at_once_make_them_once_and_each_can_open_them(settings: Settings) -> None:
    folder = settings.home / "dagster"
    program = (
        "import sys; from pathlib import Path; from geo_assets import dagster_databases as d; d.make(Path(sys.argv[1]))"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", program, str(folder)], stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for one in started:
        _, told = one.communicate(timeout=patient(300))
        assert one.returncode == 0, told
    with DagsterInstance.from_config(str(folder)) as instance:
        assert instance.get_runs_count() == 0


def test_who_opens_the_instance_waits_for_whoever_makes_its_databases(settings: Settings) -> None:
    folder = settings.home / "dagster"
    opened = threading.Event()

    def opens() -> None:
        with instance_of(settings):
            opened.set()

    with (folder / dagster_databases.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = threading.Thread(target=opens)
        other.start()
        time.sleep(1.0)
        assert not opened.is_set()
        assert not dagster_databases.made(folder)
    other.join(patient(120))
    assert opened.is_set()
    assert dagster_databases.made(folder)


def test_what_the_lane_built_is_told_to_the_homes_own_dagster_whatever_the_shell_names(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "dagster.yaml").write_text("telemetry: {enabled: false}")
    monkeypatch.setenv("DAGSTER_HOME", str(elsewhere))
    asked: list[str] = []

    class Enough(Exception):
        pass

    def stack(_: Settings) -> None:
        asked.append(os.environ["DAGSTER_HOME"])
        raise Enough

    monkeypatch.setattr(catalog_reporter, "Stack", stack)
    with pytest.raises(Enough):
        catalog_reporter.run(settings, threading.Event())
    assert asked == [str(settings.home / "dagster")]
