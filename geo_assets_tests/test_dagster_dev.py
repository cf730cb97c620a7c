from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from dagster import DagsterRunStatus

from geo_assets import dagster_home
from geo_assets.dagster_dev import LONGEST_SOCKET, end_lost_runs, meeting_place
from geo_assets.settings import Settings
from geo_assets_tests.dagster_world import world
from geo_assets_tests.running_platform import free_ports
from geo_assets_tests.waiting import patient, until

LOCATIONS = """
{ workspaceOrError { ... on Workspace { locationEntries { name locationOrLoadError { __typename } } } } }
"""


def test_runs_whose_process_is_gone_are_marked_failed_and_those_that_wait_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world(tmp_path, monkeypatch) as here:
        left = here.run_with({}, DagsterRunStatus.STARTED)
        waiting = here.run_with({}, DagsterRunStatus.NOT_STARTED)
        assert end_lost_runs(here.instance) == 1
        statuses = [here.instance.get_run_by_id(run.run_id).status for run in (left, waiting)]  # type: ignore[union-attr]
        assert statuses == [DagsterRunStatus.FAILURE, DagsterRunStatus.NOT_STARTED]
        assert end_lost_runs(here.instance) == 0


def test_a_socket_finds_room_however_long_the_path_of_the_home_is_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    for home in (tmp_path, tmp_path / ("long" * 40)):
        home.mkdir(exist_ok=True)
        (home / "meeting").mkdir()
        (home / "meeting" / "databases").touch()  # of a killed predecessor
        with meeting_place(home) as folder, socket.socket(socket.AF_UNIX) as listener:
            assert list(folder.iterdir()) == []
            listener.bind(str(folder / "code"))
            assert len(os.fsencode(folder / "code")) <= LONGEST_SOCKET
        assert not folder.exists()


@pytest.mark.timeout(240)
def test_ui_daemon_and_code_server_of_a_new_home_come_up_together_and_end_together(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    current = Settings(home=tmp_path / "home")
    current.home.mkdir()
    folder = dagster_home.prepare(current)
    process = subprocess.Popen(
        [sys.executable, "-m", "geo_assets.dagster_dev", "-h", "127.0.0.1", "-p", str(port)],
        env={**os.environ, **dagster_home.environment(current, folder)},
    )
    try:
        url = f"http://127.0.0.1:{port}"

        def loaded() -> bool:
            assert process.poll() is None
            try:
                answer = httpx.post(
                    f"{url}/graphql", json={"query": LOCATIONS}, timeout=patient(30), trust_env=False
                ).json()
            except httpx.HTTPError:
                return False
            (entry,) = answer["data"]["workspaceOrError"]["locationEntries"]
            assert entry["name"] == "geo_assets"
            return entry["locationOrLoadError"]["__typename"] == "RepositoryLocation"

        until(loaded, 120, why="the UI shows the definitions", every=0.2)
        children = psutil.Process(process.pid).children(recursive=True)
        # One that dies takes the others with it: the supervisor starts all of them again.
        next(child for child in children if "daemon" in child.cmdline()).kill()
        assert process.wait(patient(30)) == 1
        until(lambda: not any(child.is_running() for child in children), why="all of them ended", every=0.2)
        assert not (folder / "meeting").exists()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(patient(30))
