"""What is compiled is kept for other processes; whatever becomes of that, a worker starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from geo_assets_tests.waiting import patient

WARM = """
from geo_assets.tiles.encode import compiled
compiled.warm()
print(sum(compiled.occurrences.stats.cache_hits.values()))
"""
NO_ROOM = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4_096, 4_096))\n{WARM}"
"""No file may be larger than a page: numba's are."""


def started(kept: Path, code: str = WARM) -> bool:
    """Start a process that compiles or loads everything; whether it loaded."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(kept)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=patient(120), check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout) > 0


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a process has kept what it compiled."""
    folder = tmp_path_factory.mktemp("numba")
    assert not started(folder)
    assert started(folder)
    return folder


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(("damage", "suffix"), [(emptied, ".nbi"), (cut, ".nbc")])
def test_what_is_kept_and_damaged_is_compiled_anew_and_kept_again(
    kept: Path, damage: Callable[[Path], None], suffix: str
) -> None:
    for file in kept.rglob(f"*{suffix}"):
        damage(file)
    assert not started(kept)
    assert started(kept)


def test_where_there_is_no_room_to_keep_it_each_process_compiles_for_itself(tmp_path: Path) -> None:
    assert not started(tmp_path, NO_ROOM)
    assert not started(tmp_path, NO_ROOM)
