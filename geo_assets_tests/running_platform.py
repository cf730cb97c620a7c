"""`geo-assets up` as a person starts it, in a process of its own on free ports, for tests from the outside."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from geo_assets.services.supervisor import MARKER
from geo_assets.settings import Settings
from geo_assets.stack import Stack
from geo_assets_tests.stacks import settings_from
from geo_assets_tests.waiting import patient, until


def free_ports(count: int) -> list[int]:
    """Ports of loopback that are free now, outside those that the kernel gives to outgoing connections."""
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


class Platform:
    """A running `geo-assets up`."""

    def __init__(self, home: Path, *flags: str, **environment: str) -> None:
        self.home = home
        self.edge_port, self.tiles_port, self.dagster_port = free_ports(3)
        self.environment = {
            **os.environ,
            "GEO_ASSETS_HOME": str(home),
            "GEO_ASSETS_EDGE_PORT": str(self.edge_port),
            "GEO_ASSETS_TILES_PORT": str(self.tiles_port),
            "GEO_ASSETS_DAGSTER_PORT": str(self.dagster_port),
            "GEO_ASSETS_INGEST_PORT": "0",
            "GEO_ASSETS_LIVE_PORT": "0",
            "COLUMNS": "200",
            **environment,
        }
        self.flags = flags
        self.lines: list[str] = []
        self.process: subprocess.Popen[str] | None = None

    @property
    def edge(self) -> str:
        return f"http://127.0.0.1:{self.edge_port}"

    @property
    def tiles(self) -> str:
        return f"http://127.0.0.1:{self.tiles_port}"

    @property
    def dagster(self) -> str:
        return f"http://127.0.0.1:{self.dagster_port}"

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "geo_assets.cli", "up", *self.flags],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append(line.rstrip())

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_until_up(self, seconds: float = 600) -> None:
        def up() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, f"geo-assets up ended:\n{self.text}"
            return "geo_assets is up" in self.text

        try:
            until(up, seconds, why="geo-assets up is ready", every=0.2)
        except AssertionError as fault:
            raise AssertionError(f"{fault}\n{self.text}") from None

    def stop(self, number: int = signal.SIGINT, seconds: float = 40) -> int:
        """Ctrl-C, and wait for the end; its exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(patient(seconds))

    def kill(self) -> None:
        """Kill every process of it with -9, the supervisor first."""
        assert self.process is not None
        doomed = [self.process.pid, *(p.pid for p in self.left())]
        for pid in doomed:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(patient(30))

    def left(self) -> list[psutil.Process]:
        """Processes of this home that are alive, the supervisor left out."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            try:
                environment = process.environ()
            except psutil.Error:
                continue
            ours = MARKER in environment and environment.get("GEO_ASSETS_HOME") == str(self.home)
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    @property
    def settings(self) -> Settings:
        """The settings its processes have."""
        return settings_from(self.environment)

    def stack(self) -> Stack:
        """Its ports, for a look from outside."""
        return Stack(self.settings)

    # -- what people do ------------------------------------------------------------------------------------------------
    def command(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run the command line in this home."""
        return subprocess.run(
            [sys.executable, "-m", "geo_assets.cli", *arguments],
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=patient(180),
            check=False,
        )

    def post(self, body: Any, *arguments: str) -> dict[str, Any]:
        """Post a body as its source; the edge's answer."""
        done = self.command("post", "-", *arguments, stdin=json.dumps(body))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def status(self) -> dict[str, Any]:
        """What `geo-assets status --json` prints, without a process of its own each time it is asked for."""
        from geo_assets.services.status import snapshot

        with self.stack() as stack:
            return snapshot(stack)

    def etag(self, path: str) -> str | None:
        """ETag of a tile `z/x/y`; None when it is empty."""
        answer = httpx.get(f"{self.tiles}/tiles/{path}.mvt", trust_env=False, timeout=patient(30))
        assert answer.status_code in (200, 204), answer.text
        return answer.headers.get("etag") if answer.status_code == 200 else None

    def graphql(self, query: str, **variables: Any) -> dict[str, Any]:
        """Ask the Dagster UI's own interface."""
        answer = httpx.post(
            f"{self.dagster}/graphql",
            json={"query": query, "variables": variables},
            timeout=patient(30),
            trust_env=False,
        )
        value = answer.json()
        assert "errors" not in value, value
        return value["data"]


class Listener(threading.Thread):
    """Collects the change stream."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.events: list[dict[str, Any]] = []
        self.opened = threading.Event()
        self._ended = threading.Event()
        self._url = url
        self.start()
        assert self.opened.wait(patient(30))

    def run(self) -> None:
        with httpx.Client(timeout=None, trust_env=False) as client, client.stream("GET", self._url) as answer:
            self.opened.set()
            kind = "message"
            for line in answer.iter_lines():
                if self._ended.is_set():
                    return
                if line.startswith("event:"):
                    kind = line.partition(":")[2].strip()
                elif line.startswith("data:") and line[5:].strip().startswith("{"):
                    self.events.append({"kind": kind, **json.loads(line[5:])})
                elif not line:
                    kind = "message"

    def tiles(self) -> dict[str, dict[str, Any]]:
        """The last event of each tile, by path."""
        return {f"{e['z']}/{e['x']}/{e['y']}": e for e in self.events if "z" in e}

    def close(self) -> None:
        self._ended.set()


@contextmanager
def running(home: Path, *flags: str, **environment: str) -> Iterator[Platform]:
    """A platform that is up; whatever a failing test leaves of it is killed."""
    platform = Platform(home, *flags, **environment)
    platform.start()
    try:
        platform.wait_until_up()
        yield platform
    finally:
        if platform.process is not None and platform.process.poll() is None:
            try:
                platform.stop()
            except subprocess.TimeoutExpired:
                platform.kill()
        for process in platform.left():
            process.kill()


def paths(keys: Sequence[str]) -> set[str]:
    """Partition keys as paths `z/x/y`."""
    from geo_assets.tiles.tile import Tile

    return {Tile.from_key(key).path for key in keys}
