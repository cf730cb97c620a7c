"""One service of a home as a real process, for tests from the outside."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from geo_assets_tests.running_platform import free_ports
from geo_assets_tests.waiting import patient, until


class Service:
    """One service of a home, in a process group of its own."""

    def __init__(self, name: str, home: Path, **environment: str) -> None:
        self.name = name
        ports = dict(zip(("EDGE", "TILES", "INGEST", "LIVE"), free_ports(4), strict=True))
        self.port = ports.get(name.upper(), 0)
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "geo_assets.cli", name],
            env={
                **os.environ,
                "GEO_ASSETS_HOME": str(home),
                "GEO_ASSETS_INGEST_WORKERS": "1",
                # Finishing what is under way takes as long as the machine needs.
                "GEO_ASSETS_DRAIN_S": "60",
                **{f"GEO_ASSETS_{each}_PORT": str(port) for each, port in ports.items()},
                **environment,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(line.rstrip() for line in self.process.stdout)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def status(self, path: str) -> int | None:
        """Status of an answer; None where there is none."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=patient(30))
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def wait_until_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, "\n".join(self.lines)
            return self.status("/readyz") == 200

        until(ready, 180, why=f"{self.name} is ready", every=0.2)

    def end(self, *, group: bool = False) -> None:
        """Ask it to end; `group`: its worker processes with it, as systemd and a terminal do."""
        (os.killpg if group else os.kill)(self.process.pid, signal.SIGTERM)

    def exit_code(self) -> int:
        return self.process.wait(patient(120))


@contextmanager
def service(name: str, home: Path, **environment: str) -> Iterator[Service]:
    one = Service(name, home, **environment)
    try:
        yield one
    finally:
        if one.process.poll() is None:
            os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait(patient(30))
