"""The process `geo-assets live`: one worker of the lane, its metrics, and the reporter beside it."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from typing import TYPE_CHECKING

import structlog

from geo_assets.services import tracing
from geo_assets.services.draining import PROCESS
from geo_assets.services.lane.lane import Lane
from geo_assets.services.lane.metrics import REGISTRY
from geo_assets.services.supervisor import in_background

if TYPE_CHECKING:
    from geo_assets.settings import Settings

log = structlog.get_logger()

REPORTER = "geo_assets.catalog_reporter"
REPORTER_WAIT_S = (5.0, 60.0)
"""Between two starts of a reporter that ends: twice as long each time, between these."""


class Reporter(threading.Thread):
    """Keeps the process alive that tells Dagster's catalog of the lane's commits; without Dagster there is none."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(daemon=True, name="reporter")
        self._home = settings.home
        self._stop_asked = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Start it, and again whenever it ended."""
        if importlib.util.find_spec("dagster") is None:
            log.info("no dagster here: commits are reported by the sensor")
            return
        wait_s = REPORTER_WAIT_S[0]
        # Two seconds of importing: not while the lane itself starts.
        while not self._stop_asked.wait(wait_s):
            if "DAGSTER_HOME" not in os.environ and not (self._home / "dagster" / "dagster.yaml").is_file():
                continue  # Nobody has set Dagster up yet.
            self._process = subprocess.Popen(
                [sys.executable, "-m", REPORTER], stdin=subprocess.DEVNULL, preexec_fn=in_background
            )
            began = time.monotonic()
            code = self._process.wait()
            if not self._stop_asked.is_set():
                # One that worked for longer than that starts at once again.
                lived = time.monotonic() - began > REPORTER_WAIT_S[1]
                wait_s = REPORTER_WAIT_S[0] if lived else min(REPORTER_WAIT_S[1], wait_s * 2)
                log.warning("the reporter ended", code=code, seconds=wait_s)

    def ask_to_stop(self) -> None:
        """Have it end; what it has in hand it finishes."""
        self._stop_asked.set()
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End it, and wait so long for it; its process goes when this one does."""
        self.ask_to_stop()
        if self.is_alive():
            self.join(timeout=timeout_s)


def run(settings: Settings) -> None:
    """Run one worker until SIGTERM or SIGINT.

    Raises:
        ProbeFailed: PROJ answers differently from what it should.
        LibrariesDiffer: A native library is another than the locked one, and `library_check` is `refuse`.
    """
    from geo_assets.services import native
    from geo_assets.services.layer_changes import follow_layers
    from geo_assets.services.metrics_port import Readiness, serve_metrics
    from geo_assets.stack import Stack

    native.check(settings)
    PROCESS.on_signals(settings.drain_s)
    ready = Readiness("it starts")
    worker = f"lane:{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:6]}"
    with Stack(settings) as stack:
        follow_layers(stack.ensure())
        tracing.start(settings, "lane")
        lane = Lane(stack, worker)
        PROCESS.when_late(lane.give_up)
        reporter = Reporter(settings)
        metrics = serve_metrics(REGISTRY, settings.host, settings.live_port, ready)
        try:
            reporter.start()
            lane.warm()
            log.info("the lane is up", worker=worker, pid=os.getpid())
            lane.run(PROCESS.stop, ready)
        finally:
            # The lane first: its tiles and partitions are free for others while the reporter pays what it has.
            reporter.ask_to_stop()
            lane.close()
            reporter.stop()
            if metrics is not None:
                metrics()
            tracing.stop()
            log.info("the lane stopped", tiles=lane.built)
