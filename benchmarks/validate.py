"""Validation: features of the synthetic city from bytes to edits, at once, one at a time, and against mere parsing.

Both of ours give the same edits; where they do not, the benchmark fails. Reading the text with the standard library's
parser and its geometry with shapely is what nobody can do without, and checks nothing.
"""

from __future__ import annotations

import json
import time
from itertools import islice

from shapely.geometry import shape

from benchmarks.cover import timed
from benchmarks.report import Report, parser
from benchmarks.synthetic import city
from geo_assets.events.sources import Source
from geo_assets.events.validate import FeatureContext, validate, validate_all
from geo_assets.tiles.layers import Layer, LayerSet


def main() -> None:
    arguments = parser("Validation at once against one at a time, and against mere parsing.").parse_args()
    report = Report("validate", quick=arguments.quick)
    count = 2_000 if arguments.quick else 20_000
    features = list(islice(city(count), count))
    raws = [json.dumps(feature).encode() for feature in features]
    layers = LayerSet(tuple(Layer(name) for name in sorted({feature["layer"] for feature in features})))
    context = FeatureContext(
        source=Source("city", default_crs="EPSG:4326"), layers=layers, event_id="e", received_ms=1_700_000_000_000
    )
    edits, together = timed(lambda: validate_all(raws, context), time.process_time)
    same, single = timed(lambda: [validate(raw, context) for raw in raws], time.process_time)
    if edits != same:
        raise SystemExit("validated at once and one by one, the edits differ")
    _, parsed = timed(lambda: [shape(json.loads(raw)["geometry"]) for raw in raws], time.process_time)
    report.row(f"{count:,} features at once", count / together, "features/s and core", "one by one", single / together)
    report.row("the same one by one", count / single, "features/s and core")
    report.row("json and shapely, nothing checked", count / parsed, "features/s and core", "ours at once",
               together / parsed)  # fmt: skip
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
