from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from geo_assets.services.build import TileBuilder
from geo_assets.tiles.tile import Tile
from geo_assets_tests.dagster_world import LAYERS, World, world

HERE = Tile(14, 9327, 4741)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with world(tmp_path, monkeypatch) as made:
        made.put_square("house", HERE)
        keys = [HERE.ancestor(zoom).key for zoom in range(10, 15)]
        made.ledger.mark(keys)
        with TileBuilder(made.stack, "tests", inline=True) as builder:
            list(builder.build(keys))
        yield made


def run(here: World, **config: Any) -> Any:
    from geo_assets.definitions import defs

    job = defs.resolve_job_def("shadow_diff")
    run_config = {"ops": {"compare_shadow": {"config": config}}} if config else {}
    return job.execute_in_process(run_config=run_config, instance=here.instance, raise_on_error=False)


def metadata_of(result: Any) -> dict[str, Any]:
    (event,) = [event for event in result.all_events if event.is_successful_output]
    return dict(event.step_output_data.metadata)


def test_with_no_configuration_the_map_is_compared_with_what_would_be_built(here: World) -> None:
    result = run(here)
    assert result.success
    assert result.output_for_node("compare_shadow") == 0
    metadata = metadata_of(result)
    assert metadata["differing_tiles"].value == 0
    assert metadata["tiles"].value == len(list(here.ledger.scan()))
    assert "worst" not in metadata


def test_what_differs_is_a_table_and_a_picture_in_the_runs_metadata(here: World, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(LAYERS.replace("min_pixels: 0", "min_pixels: 0, attributes: []"))
    result = run(here, layers_file=str(other), worst=1)
    assert result.success
    metadata = metadata_of(result)
    assert metadata["differing_tiles"].value == result.output_for_node("compare_shadow") > 0
    row = metadata["differing"].records[0].data
    assert row["features"] == "buildings +0 -0 ~1"
    assert row["map"].startswith(f"{here.stack.settings.tiles_url}/#")
    head, _, encoded = metadata["worst"].value.removesuffix(")").partition("base64,")
    assert head == "![before, after, difference](data:image/svg+xml;"
    assert base64.b64decode(encoded).startswith(b"<svg")
    failed = run(here, layers_file=str(other), fail_on_difference=True)
    assert not failed.success
    (failure,) = failed.get_step_failure_events()
    assert "tiles differ" in failure.step_failure_data.user_failure_data.description


def test_what_cannot_be_built_is_one_line(here: World) -> None:
    (failure,) = run(here, layers_file="/nowhere.yaml").get_step_failure_events()
    assert "/nowhere.yaml is not there" in failure.step_failure_data.user_failure_data.description
