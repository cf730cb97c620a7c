"""Tests and benchmarks leave alone the platform that the shell is set up for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from geo_assets.settings import Settings
from geo_assets_tests.stacks import forget_settings

ROOT = Path(__file__).parents[1]

SHELL = {
    "GEO_ASSETS_POSTGRES_URL": "postgresql://somebody:secret@127.0.0.1:1/theirs",
    "GEO_ASSETS_KAFKA_SERVERS": "127.0.0.1:1",
    "GEO_ASSETS_HOME": "/nowhere/of/theirs",
    "GEO_ASSETS_SERVICES": "/nowhere/services",
    "GEO_ASSETS_TEST_PATIENCE": "4",
}


def test_the_shells_settings_are_forgotten_but_for_the_tests_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SHELL.items():
        monkeypatch.setenv(name, value)
    forget_settings()
    assert Settings().postgres_url is None
    assert Settings().kafka_servers is None
    assert Settings().home == Path(".geo_assets")
    assert os.environ["GEO_ASSETS_SERVICES"] == "/nowhere/services"
    assert os.environ["GEO_ASSETS_TEST_PATIENCE"] == "4"


@pytest.mark.parametrize(
    "code",
    [
        "import geo_assets_tests.conftest",
        "from benchmarks.report import parser; parser('a benchmark')",
    ],
)
def test_tests_and_benchmarks_begin_without_the_shells_settings(code: str) -> None:
    show = "import os; print(sorted(name for name in os.environ if name.startswith('GEO_ASSETS_')))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; {show}"],
        env={**os.environ, **SHELL},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "['GEO_ASSETS_SERVICES', 'GEO_ASSETS_TEST_PATIENCE']"
