"""Benchmarks are run by hand: what they use of the project moves on without them unless something looks."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import benchmarks

MODULES = sorted(path.stem for path in Path(benchmarks.__path__[0]).glob("*.py") if not path.stem.startswith("__"))


@pytest.mark.parametrize("name", MODULES)
def test_every_benchmark_finds_what_it_uses(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")
