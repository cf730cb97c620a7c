"""What a test needs and a machine may lack: skipped with a line, or a failure where everything is said to be there."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def missing(what: str) -> NoReturn:
    """Skip the test with a line; fail it under REQUIRE_SERVICES=1, where a skip would hide a broken machine."""
    if os.environ.get("REQUIRE_SERVICES") == "1":
        pytest.fail(what)
    pytest.skip(what)
