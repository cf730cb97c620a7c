"""Fixtures that tests of several folders share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import pytest_timeout
import structlog

from geo_assets_tests.needs import missing
from geo_assets_tests.stacks import forget_settings
from geo_assets_tests.waiting import patient

forget_settings()


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Any:
    """A test as a whole is given as much more time as each wait in it, wherever its limit was written."""
    return pytest_timeout.pytest_timeout_set_timer(item, settings._replace(timeout=patient(settings.timeout)))


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


class _Patient:
    """A browser whose pages wait as long for what they are asked for as this machine may take."""

    def __init__(self, browser: Any, limit_ms: float) -> None:
        self._browser, self._limit_ms = browser, limit_ms

    def new_context(self, **options: Any) -> Any:
        context = self._browser.new_context(**options)
        context.set_default_timeout(self._limit_ms)
        return context

    def new_page(self, **options: Any) -> Any:
        page = self._browser.new_page(**options)
        page.set_default_timeout(self._limit_ms)
        return page


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
        limit_ms = patient(60) * 1_000
        opened = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS, timeout=limit_ms)
        yield _Patient(opened, limit_ms)
        opened.close()
