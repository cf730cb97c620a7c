"""Runs several processes as one: one readable log, one clean stop, nothing left behind.

Every process it starts inherits a marker in its environment. So whatever a process starts in turn (Dagster's code
server, runs, pools) is found again, also by a successor when this supervisor was killed with -9.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

MARKER = "GEO_ASSETS_SUPERVISOR"
"""Environment variable that names the supervisor (and so the home) a process belongs to."""


BACKGROUND_NICE = 5
"""A third of the weight of those that have none."""


@dataclass(slots=True)
class Child:
    """One supervised process."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    stop_signal: signal.Signals = signal.SIGTERM
    restart: bool = True
    background: bool = False
    """Whether it gives way to the others where there is not enough processor for all."""
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    failures: int = 0
    proven: bool = False
    """It has run well for a while: what ends it now is no fault of its settings, and passes."""


def end_with_parent() -> None:
    """In a new process, before its program: see that it ends when its parent is gone.

    Linux tells it; elsewhere the successor's clean-up does.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def in_background() -> None:
    """As `end_with_parent`, and it gets a third of the processor's time that others get when all want it.

    Edits go on their way to the map meanwhile; what Dagster does is looked at by the second.
    """
    end_with_parent()
    os.nice(BACKGROUND_NICE)


def _session_in_background() -> None:
    in_background()
    # Where the kernel groups processes by session, niceness counts within one alone, and sessions have their own.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(BACKGROUND_NICE))


class Supervisor:
    """Starts processes, passes on what they print, restarts those that die, and stops all of them together.

    Args:
        home: Where the marker of a running supervisor is kept.
        line: Called with (name, text) for each line that a process prints.
        stop_s: How long processes get to end by themselves.
    """

    RESTART_WAIT_S = (1.0, 2.0, 5.0, 10.0)
    PROVEN_S = 30.0
    """How long a process runs until it counts as one that can."""

    def __init__(self, home: Path, line: Callable[[str, str], None], stop_s: float = 10.0) -> None:
        self._line, self._stop_s = line, stop_s
        self._file = home / "up.json"
        self.marker = uuid.uuid4().hex
        self.children: list[Child] = []
        self.stopping = threading.Event()

    def claim(self) -> int:
        """Take the home: end what a killed predecessor left. How many processes that were.

        Raises:
            AlreadyRunning: A supervisor of this home is alive.
        """
        left = 0
        try:
            earlier = json.loads(self._file.read_text())
        except (OSError, ValueError):
            earlier = {}
        if earlier:
            pid, created = earlier.get("pid"), earlier.get("created")
            if isinstance(pid, int) and _alive(pid, created):
                raise AlreadyRunning(pid, self._file.parent)
            left = len(_end(_marked(earlier.get("marker", "")), self._stop_s))
        me = psutil.Process()
        self._file.write_text(json.dumps({"pid": me.pid, "created": me.create_time(), "marker": self.marker}))
        return left

    def start(self, child: Child) -> None:
        """Start a process and follow it."""
        if child not in self.children:
            self.children.append(child)
        environment = {**os.environ, **child.environment, MARKER: self.marker, "PYTHONUNBUFFERED": "1"}
        child.process = subprocess.Popen(
            child.command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # A session of its own: Ctrl-C in the terminal reaches the supervisor alone, which stops them in order.
            start_new_session=True,
            preexec_fn=_session_in_background if child.background else end_with_parent,
        )
        child.started = time.monotonic()
        threading.Thread(target=self._follow, args=(child, child.process), daemon=True).start()

    def _follow(self, child: Child, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for raw in process.stdout:
            self._line(child.name, raw.decode("utf-8", "replace").rstrip())

    def watch(self) -> str | None:
        """Look once: restart what died. Name of a process that keeps ending at its start, else None.

        One that ran well before is started for ever, and so is one that a signal killed: a database that is away for
        a while, or a machine short of memory, must not end everything else.
        """
        for child in self.children:
            process = child.process
            if process is None or process.poll() is None or self.stopping.is_set():
                continue
            lived = time.monotonic() - child.started
            child.proven = child.proven or lived >= self.PROVEN_S
            child.failures = child.failures + 1 if lived < self.PROVEN_S else 1
            self._line(child.name, f"ended with exit code {process.returncode} after {lived:.0f} s")
            hopeless = child.failures > len(self.RESTART_WAIT_S) and not child.proven and process.returncode >= 0
            if hopeless or not child.restart:
                return child.name
            self.stopping.wait(self.RESTART_WAIT_S[min(child.failures, len(self.RESTART_WAIT_S)) - 1])
            if not self.stopping.is_set():
                self.start(child)
        return None

    def stop(self) -> None:
        """Ask every process to end, last started first, then end what is still there."""
        self.stopping.set()
        for child in reversed(self.children):
            if child.process is not None and child.process.poll() is None:
                child.process.send_signal(child.stop_signal)
        deadline = time.monotonic() + self._stop_s
        for child in self.children:
            if child.process is not None:
                try:
                    child.process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    self._line(child.name, "does not end by itself")
        _end(_marked(self.marker), 3.0)
        with contextlib.suppress(OSError):
            self._file.unlink()


class AlreadyRunning(Exception):
    """Another supervisor has this home."""

    def __init__(self, pid: int, home: Path) -> None:
        super().__init__(
            f"geo-assets is already up in {home} (pid {pid}); stop it, or set GEO_ASSETS_HOME to another folder"
        )


def _alive(pid: int, created: float | None) -> bool:
    try:
        return abs(psutil.Process(pid).create_time() - (created or 0)) < 2
    except psutil.Error:
        return False


def _marked(marker: str) -> list[psutil.Process]:
    """Every other process of this user whose environment has the marker."""
    found: list[psutil.Process] = []
    if not marker:
        return found
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARKER) == marker:
                found.append(process)
        except psutil.Error:
            continue
    return found


def _end(processes: Iterable[psutil.Process], wait_s: float) -> list[psutil.Process]:
    """Ask them to end, then make them."""
    processes = list(processes)
    for process in processes:
        try:
            process.terminate()
        except psutil.Error:
            continue
    _, alive = psutil.wait_procs(processes, timeout=wait_s)
    for process in alive:
        try:
            process.kill()
        except psutil.Error:
            continue
    psutil.wait_procs(alive, timeout=wait_s)
    return processes
