"""What the supervisor does with processes that end: real ones, of a line of Python each."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from geo_assets.services.supervisor import Child, Supervisor
from geo_assets_tests.waiting import until


class Quick(Supervisor):
    RESTART_WAIT_S = (0.01, 0.01)
    PROVEN_S = 1.5
    """Longer than an interpreter takes to start on a busy machine."""


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Quick]:
    made = Quick(tmp_path, lambda name, text: None, stop_s=2.0)
    made.claim()
    yield made
    made.stop()


def child(code: str) -> Child:
    return Child("child", [sys.executable, "-S", "-c", code])


def watch_until(supervisor: Supervisor, done: Callable[[str | None], bool]) -> str | None:
    named: list[str | None] = []
    until(lambda: (named.append(supervisor.watch()), done(named[-1]))[-1])
    return named[-1]


def test_a_process_that_ends_as_soon_as_it_starts_is_named_after_a_few_tries(supervisor: Quick) -> None:
    broken = child("raise SystemExit(1)")
    supervisor.start(broken)
    assert watch_until(supervisor, lambda named: named is not None) == "child"
    assert broken.failures == len(supervisor.RESTART_WAIT_S) + 1


def test_a_process_that_a_signal_kills_is_started_again_however_often(supervisor: Quick) -> None:
    victim = child("import time; time.sleep(60)")
    supervisor.start(victim)
    for _ in range(2 * len(supervisor.RESTART_WAIT_S) + 2):
        killed = victim.process
        assert killed is not None
        killed.send_signal(signal.SIGKILL)
        assert watch_until(supervisor, lambda named, old=killed: named is not None or victim.process is not old) is None


def test_a_process_that_ran_well_is_started_again_however_often_it_fails_then(
    supervisor: Quick, tmp_path: Path
) -> None:
    # Well once; after that it ends at once, as a service does whose database is away.
    mark = tmp_path / "mark"
    code = f"""
import os, time
mark, count = {str(mark)!r}, 0
if os.path.exists(mark): count = int(open(mark).read())
open(mark, 'w').write(str(count + 1))
if count == 0: time.sleep(2.5)
raise SystemExit(1)
"""
    supervisor.start(child(code))
    tries = 3 * len(supervisor.RESTART_WAIT_S)

    def enough(named: str | None) -> bool:
        return named is not None or (mark.exists() and int(mark.read_text() or 0) > tries)

    assert watch_until(supervisor, enough) is None


def test_what_works_in_the_background_gives_way_to_the_others(tmp_path: Path) -> None:
    said: dict[str, list[str]] = {"front": [], "back": []}
    supervisor = Quick(tmp_path, lambda name, text: said.get(name, []).append(text), stop_s=2.0)
    supervisor.claim()
    command = [sys.executable, "-S", "-c", "import os, time; print(os.nice(0), flush=True); time.sleep(60)"]
    try:
        for name in said:
            supervisor.start(Child(name, command, background=name == "back"))
        until(lambda: all(said.values()))
    finally:
        supervisor.stop()
    assert int(said["back"][0]) > int(said["front"][0])
