"""Import of the synthetic city through `geo-assets import`'s own code, against one transaction a feature.

python -m benchmarks.importing [--quick] [--json FILE]
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks import synthetic
from benchmarks.city_home import city_home
from benchmarks.report import Report, parser
from geo_assets.events.collection import CollectionInfo
from geo_assets.services import ingest_worker
from geo_assets.services.dead_letters import now_ms
from geo_assets.services.dirty import DirtyPlan
from geo_assets.services.importer import import_reading
from geo_assets.services.ingest_worker import Circumstances, FeatureTask
from geo_assets.services.reading import open_file
from geo_assets.services.valid_edits import edit_of

NAIVE = 300
"""Features that the naive way imports: it is slow, and its speed does not depend on how many there are."""


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    report = Report("importing", options.quick)
    buildings = 10_000 if options.quick else 100_000
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "city.geojsonl"
        features = synthetic.write(file, buildings)
        with city_home(Path(folder) / "home") as stack:
            source = next(iter(stack.sources.values()))
            started = time.perf_counter()
            done = import_reading(stack, open_file(file, None), source)
            seconds = time.perf_counter() - started
            assert done.outcomes == {"applied": features}, done
            assert done.manifest is not None
        naive = one_by_one(file, Path(folder) / "naive")
        rate = features / seconds
        report.row(f"import of {features:,} features ({buildings:,} buildings)", seconds, "s")
        report.row("import", rate, "features/s", "one transaction a feature", rate / naive)
        report.row("one transaction a feature", naive, "features/s")
        report.row("tiles marked by the manifest", done.manifest.tiles, "tiles")
    report.finish(options.json)


def one_by_one(file: Path, home: Path) -> float:
    """Features a second when each is validated, stored and committed by itself in one process."""
    with city_home(home) as stack, file.open("rb") as lines:
        ingest_worker.start(stack.settings)
        source = next(iter(stack.sources.values()))
        at = Circumstances(source, "naive", now_ms(), "EPSG:4326", None, False)
        info = CollectionInfo("collection", NAIVE)
        started = time.perf_counter()
        for index in range(NAIVE):
            (result,) = ingest_worker.validate_features([FeatureTask(at, info, index, next(lines))])
            assert result.edit is not None, result
            plan = DirtyPlan(stack.layers, stack.settings.edit_cap, manifest="naive")
            stack.features.apply([edit_of(result.edit)], plan, now_ms=now_ms())
        return NAIVE / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
