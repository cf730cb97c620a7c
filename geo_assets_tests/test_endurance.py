"""The disk stays bounded while ledger and catalog writer are driven and retention runs: a little of it here, whole in
`make soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

from geo_assets_tests.endurance import Endured, endure
from geo_assets_tests.stacks import STACKS

MARGIN_BYTES = 6_000_000
"""What pages, logs and a pass under way may differ by."""


def stays_bounded(result: Endured) -> None:
    print(result.told())
    assert result.faults == []
    assert result.passes > 2
    assert result.removed["superseded materializations"] > 0
    _, middle, last = result.thirds()
    assert last <= middle * 1.1 + MARGIN_BYTES


@pytest.mark.parametrize("stack", STACKS)
def test_the_disk_stays_bounded_under_a_steady_rate_of_commits(
    stack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stays_bounded(endure(stack, tmp_path, monkeypatch, seconds=6, rate=200, kept_s=1.0, every_s=0.4))


@pytest.mark.soak
@pytest.mark.parametrize("stack", STACKS)
def test_the_disk_stays_bounded_for_ten_minutes_at_four_hundred_commits_a_second(
    stack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = endure(stack, tmp_path, monkeypatch, seconds=600, rate=400, kept_s=60, every_s=10)
    stays_bounded(result)
    assert result.rate > 380
