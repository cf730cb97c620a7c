"""Dagster's UI, daemon and code server as `dagster dev` has them, started side by side, which halves the time to ready.

`dagster dev` starts one after the other, and a fourth process before the code server that can swap its code. Most of
a start is three interpreters that import Dagster: here they do it at the same time.

The daemon first ends the runs that a killed predecessor left started. The default run launcher has no health check: a
run whose process is gone would read as started for ever, and hold its place in the queue and, through its batch, its
tiles. Here it is known to be gone: the supervisor ended its processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geo_assets import dagster_databases

if TYPE_CHECKING:
    from dagster import DagsterInstance

# Dagster is imported by the functions: the parent of the three processes does without, and is up at once.

CODE_S = 120.0
"""How long UI and daemon wait for the code server, which imports the same as they do and more."""
LONGEST_SOCKET = 100
"""Bytes of a socket's path: 108 on Linux, 104 on macOS, and the end of the text is one of them."""
STOP_S = 8.0
"""How long processes get to end by themselves; the supervisor gives all of them ten seconds."""


def end_lost_runs(instance: DagsterInstance) -> int:
    """Mark runs failed whose process cannot be alive; how many."""
    from dagster import DagsterRunStatus, RunsFilter

    left = [DagsterRunStatus.STARTING, DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING]
    runs = instance.get_runs(RunsFilter(statuses=left))
    for run in runs:
        instance.report_run_failed(run, "The process of this run is gone: geo-assets up was killed while it ran.")
    return len(runs)


# -- the three processes -------------------------------------------------------------------------------------------


def create_databases(home: Path) -> None:
    """Have the databases made before any of the three opens them; nothing to do where that was done before.

    Raises:
        SystemExit: They cannot be made; the lines above say why.
    """
    if dagster_databases.made(home):
        return
    if subprocess.run([sys.executable, "-m", "geo_assets.dagster_dev", "databases"], check=False).returncode:
        raise SystemExit("Dagster's databases cannot be made")


def daemon(folder: Path, arguments: Sequence[str]) -> None:
    """End lost runs, then become the daemon."""
    from dagster import DagsterInstance
    from dagster._daemon.cli import main

    with DagsterInstance.get() as instance:
        lost = end_lost_runs(instance)
    if lost:
        sys.stdout.write(f"marked {lost} runs failed that a killed predecessor left\n")
        sys.stdout.flush()
    _become(main, folder, ["dagster-daemon", "run", "-w", str(folder / "workspace.yaml"), *arguments])


def webserver(folder: Path, arguments: Sequence[str]) -> None:
    """Become the UI."""
    from dagster_webserver.cli import main

    _become(main, folder, ["dagster-webserver", "-w", str(folder / "workspace.yaml"), *arguments])


def _become(main: Callable[[], Any], folder: Path, command: list[str]) -> None:
    _wait(lambda: _listens(folder / "code"), "Dagster's code server")
    sys.argv = command
    main()


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _wait(ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + CODE_S
    while not ready():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} did not come within {CODE_S:.0f} s")
        time.sleep(0.05)


# -- their parent --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def meeting_place(home: Path) -> Iterator[Path]:
    """A folder for the code server's socket and the workspace that names it, with nothing in it from before.

    In Dagster's home, where a killed predecessor's is taken over; elsewhere when the home's path is too long, since a
    socket's has room for about a hundred bytes.
    """
    folder = home / "meeting"
    if len(os.fsencode(folder / "code")) > LONGEST_SOCKET:
        folder = Path(tempfile.mkdtemp(prefix="geo-assets-"))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def commands(folder: Path, listen: Sequence[str]) -> list[list[str]]:
    """How the three are started: the one that takes longest first.

    Args:
        folder: Where they meet: the code server's socket, and the workspace that names it.
        listen: Options of the UI.
    """
    me = [sys.executable, "-m", "geo_assets.dagster_dev"]
    code = ["--socket", str(folder / "code"), "-m", "geo_assets.definitions", "--location-name", "geo_assets"]
    return [
        [sys.executable, "-m", "dagster", "api", "grpc", *code, "--log-level", "warning"],
        [*me, "webserver", str(folder), "--live-data-poll-rate", "2000", *listen],
        [*me, "daemon", str(folder)],
    ]


def run(listen: Sequence[str]) -> int:
    """Run the three until a signal comes, or one of them ends: then the others end too. The exit code."""
    from geo_assets.services.supervisor import end_with_parent

    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    # `dagster dev` says so as well: it changes what the UI says about itself.
    environment = {**os.environ, "DAGSTER_IS_DEV_CLI": "1"}
    create_databases(Path(os.environ["DAGSTER_HOME"]))
    with meeting_place(Path(os.environ["DAGSTER_HOME"])) as folder:
        place = {"socket": str(folder / "code"), "location_name": "geo_assets"}
        (folder / "workspace.yaml").write_text(json.dumps({"load_from": [{"grpc_server": place}]}))
        started: list[subprocess.Popen[bytes]] = []
        ended: subprocess.Popen[bytes] | None = None
        try:
            for command in commands(folder, listen):
                started.append(subprocess.Popen(command, env=environment, preexec_fn=end_with_parent))
            while ended is None and not stopping.wait(0.25):
                ended = next((process for process in started if process.poll() is not None), None)
        finally:
            _stop(started)
    if ended is None or stopping.is_set():
        return 0
    sys.stdout.write(f"{' '.join(map(str, ended.args[2:5]))} ended with exit code {ended.returncode}\n")  # type: ignore[index]
    return 1


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End all of them, the daemon first, so that it starts no run any more, and runs with the code server."""
    import psutil

    runs: list[psutil.Process] = []
    for process in reversed(processes):
        if process.poll() is None:
            with contextlib.suppress(psutil.Error):
                runs += psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + STOP_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for left in runs:
        with contextlib.suppress(psutil.Error):
            left.kill()


def main() -> None:
    """Be one of the processes, as the first argument says, or else the parent of all."""
    role = next(iter(sys.argv[1:]), "")
    if role == "databases":
        dagster_databases.make(Path(os.environ["DAGSTER_HOME"]))
    elif role in ("daemon", "webserver"):
        folder, *arguments = sys.argv[2:]
        (daemon if role == "daemon" else webserver)(Path(folder), arguments)
    else:
        sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
