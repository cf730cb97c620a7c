"""Fixtures that tests of several folders share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from geo_assets_tests.needs import missing
from geo_assets_tests.stacks import forget_settings

forget_settings()


def _logging_that_ends() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(scope="session", autouse=True)
def loggers_keep_nothing() -> Iterator[None]:
    """No logger keeps the level and the stream of its first line: that may have been another test's."""
    configure = structlog.configure

    def uncached(*args: Any, **more: Any) -> None:
        configure(*args, **{**more, "cache_logger_on_first_use": False})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(structlog, "configure", uncached)
        yield


@pytest.fixture(scope="module", autouse=True)
def logging_ends_with_its_module(loggers_keep_nothing: None) -> Iterator[None]:
    """What fixtures of a module make of logging is not the next one's."""
    yield from _logging_that_ends()


@pytest.fixture(autouse=True)
def logging_ends_with_its_test(logging_ends_with_its_module: None) -> Iterator[None]:
    """What a test makes of logging is not the next one's."""
    yield from _logging_that_ends()


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
