"""Disk and memory stay bounded while ledger, catalog writer, ingest and the fast lane are driven and retention runs: a
little of it here, whole in `make soak`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from geo_assets_tests import lane_endurance
from geo_assets_tests.endurance import Endured, endure
from geo_assets_tests.lane_endurance import Sample, growth
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


# -- ingest and the fast lane ------------------------------------------------------------------------------------------


def nothing_is_left(result: lane_endurance.Endured) -> None:
    """Of all that edits leave behind, retention took something meanwhile and the rest at the end."""
    print(result.told())
    assert result.removed["records"] > 0
    assert result.removed["objects"] > 0
    assert result.removed["tombstones and applied keys"] > 0
    assert set(result.left.values()) == {0}


def test_three_thousand_edits_through_ingest_and_lane_leave_only_what_is_current(tmp_path: Path) -> None:
    result = lane_endurance.endure(tmp_path / "home", edits=3_000, workers=1, every_edits=750)
    assert result.edits == 3_000
    nothing_is_left(result)
    assert {"ingest", "ingest workers", "lane 1"} <= {name for one in result.samples for name in one.memory_mb}


def test_what_grows_a_little_all_the_time_is_told_from_what_goes_up_and_down() -> None:
    def endured(disk: Callable[[int], float], memory: Callable[[int], float]) -> dict[str, tuple[float, float]]:
        samples = [Sample(float(at), disk(at), {"lane 1": memory(at)}) for at in range(1_200)]
        return lane_endurance.Endured(samples=samples).grown()

    bounded = endured(lambda at: min(at, 200) + 15 * (at % 5), lambda at: min(100 + at, 180) + at % 7)
    assert all(grew <= may for grew, may in bounded.values())
    leaks = endured(lambda at: 100 + 0.05 * at + 15 * (at % 5), lambda at: 150 + 0.03 * at)
    assert all(grew > may for grew, may in leaks.values())
    assert growth([0.0, 1.0, 2.0], [5.0, 6.0, 7.0]) == pytest.approx(2.0)


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_neither_memory_nor_disk_grows_in_five_hundred_thousand_edits(tmp_path: Path) -> None:
    # Ten minutes: the longest that anything is kept is two, and the second half must be long past that.
    result = lane_endurance.endure(tmp_path / "home", edits=500_000, workers=2, every_s=10.0, at_most_per_s=800.0)
    assert result.edits == 500_000
    nothing_is_left(result)
    grown = {name: (grew, may) for name, (grew, may) in result.grown().items() if grew > may}
    assert not grown, f"MB by which these grew over the second half, and may: {grown}"
