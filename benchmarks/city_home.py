"""A home folder for benchmarks: the synthetic city's layers and one source, in a temporary folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from geo_assets.settings import Settings
from geo_assets.stack import Stack

LAYERS = """
max_zoom: 18
layers:
  - {name: buildings, min_zoom: 14}
  - {name: streets, min_zoom: 14, min_pixels: 0}
  - {name: places, min_zoom: 14}
"""
"""Zooms 14 to 18: the benchmarks' tiles."""

SOURCES = """
sources:
  city:
    secrets: [whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw]
    default_crs: EPSG:4326
"""


def city_settings(home: Path, **changes: Any) -> Settings:
    """Settings of a home with the city's layers."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "layers.yaml").write_text(LAYERS)
    (home / "sources.yaml").write_text(SOURCES)
    return Settings(home=home, **changes)


@contextmanager
def city_home(home: Path, **changes: Any) -> Iterator[Stack]:
    """An open stack over such a home."""
    with Stack(city_settings(home, **changes)) as stack:
        yield stack.ensure()
