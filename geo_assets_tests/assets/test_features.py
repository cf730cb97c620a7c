"""The source asset `features`: observed, with its watermark and what it holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from geo_assets import catalog
from geo_assets.definitions import defs
from geo_assets.tiles.tile import Tile
from geo_assets_tests.dagster_world import world

HOME = Tile(14, 9_327, 4_741)


def test_observing_in_the_ui_shows_watermark_and_counts_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world(tmp_path, monkeypatch) as here:
        here.put_square("a", HOME)
        here.put_square("b", HOME)
        result = defs.resolve_job_def("observe_features").execute_in_process(instance=here.instance)
        assert result.success
        (observed,) = here.instance.fetch_observations(catalog.FEATURES, limit=5).records
        entry = observed.asset_observation
        assert entry is not None
        assert entry.tags["dagster/data_version"] == "1700000000002"
        assert entry.metadata["features"].value == 2
        assert [row.data for row in entry.metadata["layers"].value.records] == [{"layer": "buildings", "features": 2}]


def test_an_empty_store_can_be_observed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with world(tmp_path, monkeypatch) as here:
        assert defs.resolve_job_def("observe_features").execute_in_process(instance=here.instance).success
