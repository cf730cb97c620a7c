"""Fixtures that tests of several folders share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from geo_assets_tests.needs import missing
from geo_assets_tests.stacks import forget_settings

forget_settings()

CHROMIUM_FLAGS = [
    "--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
"""Headless drawing in software, and no look-ups of the browser maker's hosts."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium of the machine's own, driven by playwright."""
    from geo_assets.services.tileserver.static import StaticFiles

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        missing("no Chromium (Debian and Ubuntu have it in the package chromium)")
    if not StaticFiles().has_vendor:
        missing("the map library is not installed (npm ci --prefix geo_assets/services/web)")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS)
        yield opened
        opened.close()
