"""What every local service does the same way: its folder, its ports, its process, its log.

A service's module says what is its own: which programs it needs, how it is prepared once, its command, how it is known
to answer, and which settings lead to it.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts.local_services.faults import MissingProgram, NotReady, PortTaken
from scripts.local_services.processes import (
    Process,
    adopt,
    family,
    free_ports,
    lives,
    send,
    taken,
    wait_until_gone,
)

CHECKOUT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
_EXTRA_PATH = ("/usr/local/sbin", "/usr/sbin", "/sbin")


def program(name: str, package: str, *folders: Path) -> str:
    """Path of a program, looked for in `folders`, then on PATH and where Debian puts servers.

    Raises:
        MissingProgram: it is nowhere; the text names the package that has it.
    """
    for folder in folders:
        if (folder / name).exists():
            return str(folder / name)
    found = shutil.which(name, path=os.pathsep.join((os.environ.get("PATH") or os.defpath, *_EXTRA_PATH)))
    if found is None:
        raise MissingProgram(f"{name} is not installed: {package}")
    return found


class Service(ABC):
    """One service in one folder. Methods lock the folder, so several processes may call them."""

    name: str
    ports: tuple[str, ...]
    """Names of the ports it listens on, the main one first."""
    secrets: tuple[str, ...] = ()
    """Names of the passwords made for it once."""
    start_seconds: float = 60.0
    stop_seconds: float = 20.0
    stop_signal: signal.Signals = signal.SIGTERM

    def __init__(self, folder: Path, cache: Path) -> None:
        """Args: `folder` holds this service's data; `cache` what may be shared by all folders, such as downloads."""
        self.folder = folder
        self.cache = cache

    # -- what a service says of itself -----------------------------------------------------------------------------

    @abstractmethod
    def check_programs(self) -> None:
        """Raise MissingProgram when a program is not there."""

    @abstractmethod
    def prepare(self, state: dict[str, Any]) -> None:
        """Write configuration, and make the data folder if it is not there; called before every start."""

    @abstractmethod
    def command(self, state: dict[str, Any]) -> list[str]:
        """The server's command line; it stays in the foreground."""

    @abstractmethod
    def answers(self, state: dict[str, Any]) -> bool:
        """Whether it serves requests now. May raise OSError for "not yet"."""

    @abstractmethod
    def settings(self, state: dict[str, Any]) -> dict[str, str]:
        """Environment variables by which the platform and the tests find it."""

    def finish(self, state: dict[str, Any]) -> None:
        """What is done once it answers, after every start; must bear repetition."""
        return

    def popen_options(self) -> dict[str, Any]:
        """Further arguments of Popen, such as the user to run as."""
        return {"cwd": self.folder}

    def outside(self) -> Sequence[Path]:
        """Folders and sockets of its own that lie elsewhere."""
        return ()

    # -- files -------------------------------------------------------------------------------------------------------

    @property
    def log(self) -> Path:
        """The server's standard output and error of all its starts."""
        return self.folder / f"{self.name}.log"

    @property
    def data(self) -> Path:
        """The server's own files."""
        return self.folder / "data"

    def state(self) -> dict[str, Any] | None:
        """Ports, passwords and options, as they were when it was first started."""
        try:
            return json.loads((self.folder / "state.json").read_text())
        except FileNotFoundError:
            return None

    def process(self) -> Process | None:
        """The process that was last started and not stopped; it may be dead."""
        try:
            return Process(**json.loads((self.folder / "process.json").read_text()))
        except FileNotFoundError:
            return None

    def running(self) -> bool:
        """Whether its process lives."""
        return lives(self.process())

    def wanted(self) -> bool:
        """Whether it was started and not stopped: it runs, or was killed."""
        return self.process() is not None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self, options: Mapping[str, Any]) -> None:
        """Start it unless it runs, on the ports and data it had, and wait until it answers.

        Raises:
            MissingProgram: something is not installed.
            PortTaken: another program has taken its port meanwhile.
            NotReady: it ended or does not answer; the fault's `tail` is the end of its log.
        """
        with self._locked():
            state = self.state()
            if self.running() and state is not None and self._same(state, options):
                self._wait(state, self.log.stat().st_size)
                return
            if self.running():
                self._stop()
            self.check_programs()
            if state is None:
                state = {
                    "ports": dict(zip(self.ports, free_ports(len(self.ports)), strict=True)),
                    "secrets": {name: secrets.token_hex(16) for name in self.secrets},
                }
            state["options"] = dict(options or state.get("options", {}))
            for name, port in state["ports"].items():
                if taken(port):
                    raise PortTaken(
                        f"{self.name}: port {port} ({name}) is taken by another program; end that, or give up this "
                        f"service's data with `scripts/services remove {self.name}`, and start again"
                    )
            write_private(self.folder / "state.json", json.dumps(state, indent=1))
            self.prepare(state)
            before = self.log.stat().st_size if self.log.exists() else 0
            with self.log.open("ab") as log:
                child = subprocess.Popen(
                    self.command(state),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    **self.popen_options(),
                )
            write_private(self.folder / "process.json", json.dumps(asdict(adopt(child))))
            try:
                self._wait(state, before)
                self.finish(state)
            except BaseException:
                self._stop()
                raise

    def stop(self) -> None:
        """End it in order, and by force when that takes too long; its data stays."""
        if self.folder.exists():
            with self._locked():
                self._stop()

    def kill(self) -> None:
        """End it and its children at once (kill -9), as a failing machine would; `start` brings it back."""
        with self._locked():
            process = self.process()
            if process is not None:
                members = family(process)
                for each in members:
                    send(each, signal.SIGKILL)
                wait_until_gone(members, 10)

    def remove(self) -> None:
        """Stop it and delete its data."""
        self.stop()
        for path in (*self.outside(), self.folder):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def tail(self, lines: int, since: int = 0) -> str:
        """The last lines of its log, written after the first `since` bytes."""
        try:
            with self.log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(since, size - 64_000))
                return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""

    def _same(self, state: dict[str, Any], options: Mapping[str, Any]) -> bool:
        return not options or state["options"] == dict(options)

    def _stop(self) -> None:
        process = self.process()
        if process is not None:
            members = family(process)
            send(process, self.stop_signal)
            left = wait_until_gone(members, self.stop_seconds)
            for each in left:
                send(each, signal.SIGKILL)
            wait_until_gone(left, 10)
        (self.folder / "process.json").unlink(missing_ok=True)

    def _wait(self, state: dict[str, Any], log_from: int) -> None:
        deadline = time.monotonic() + self.start_seconds
        while True:
            ended = not self.running()
            try:
                if not ended and self.answers(state):
                    return
            except OSError:
                pass
            if ended or time.monotonic() > deadline:
                port = next(iter(state["ports"].values()))
                problem = "ended" if ended else f"does not answer on {HOST}:{port} after {self.start_seconds:g} s"
                raise NotReady(f"{self.name} {problem}; its log is {self.log}", self.tail(12, log_from))
            time.sleep(0.05)


def write_private(path: Path, text: str) -> None:
    """Replace a file at once by one that only its owner may read."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.replace(path)
