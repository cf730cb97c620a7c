"""Same features and recipe, same bytes: over two imports, in another order, with another number of processes."""

from __future__ import annotations

import random
from pathlib import Path

from benchmarks import synthetic
from benchmarks.city_home import city_home
from geo_assets.services.build import TileBuilder
from geo_assets.services.importer import import_reading
from geo_assets.services.reading import open_file

BUILDINGS = 9_000


def built(home: Path, file: Path, workers: int) -> dict[str, str | None]:
    with city_home(home, build_workers=workers, ingest_workers=workers) as stack:
        done = import_reading(stack, open_file(file, None), next(iter(stack.sources.values())))
        assert done.manifest is not None
        with TileBuilder(stack, "test") as builder:
            assert {r.outcome for r in builder.build(stack.ledger.manifest_keys(done.manifest.id))} <= {
                "built",
                "unchanged",
            }
        return {state.key: state.content_hash for state in stack.ledger.scan()}


def test_rule_6_five_hundred_tiles_are_identical_over_shuffled_imports_and_process_counts(tmp_path: Path) -> None:
    file, shuffled = tmp_path / "city.geojsonl", tmp_path / "shuffled.geojsonl"
    synthetic.write(file, BUILDINGS)
    lines = file.read_text().splitlines(keepends=True)
    random.Random(11).shuffle(lines)
    shuffled.write_text("".join(lines))

    one = built(tmp_path / "one", file, workers=1)
    four = built(tmp_path / "four", shuffled, workers=4)

    assert len(one) >= 500
    assert one == four
