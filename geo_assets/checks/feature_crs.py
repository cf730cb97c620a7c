"""CRS of stored features: each lies on the globe and where its source is expected, and PROJ has the grids it needs."""

import shapely
from dagster import AssetCheckSeverity

from geo_assets.catalog import FEATURES
from geo_assets.checks.audit import Audit, check_of
from geo_assets.checks.stored_features import features
from geo_assets.events.crs import crs_name, missing_grids
from geo_assets.events.dead_letter import Refused
from geo_assets.stack import Stack
from geo_assets.tiles.rules import Fault

NULL_ISLAND_DEGREES = 1e-3
"""A hundred metres around 0, 0: nothing is there, and missing coordinates are."""


def audit(stack: Stack) -> Audit:
    """Look for features off the globe, around 0, 0 or outside of their source's box, and for missing grids."""
    looked_at = 0
    faults: list[Fault] = []
    for one in features(stack, "feature_crs"):
        looked_at += 1
        west, south, east, north = shapely.bounds(one.shape).tolist()
        source = stack.sources.get(one.source)
        box = source.expected_box if source is not None else None
        found = f"{west:.5f},{south:.5f},{east:.5f},{north:.5f}"
        if not (-180 <= west <= east <= 180 and -90 <= south <= north <= 90):
            problem, limit = "is off the globe", "±180,±90"
        elif max(abs(west), abs(south), abs(east), abs(north)) <= NULL_ISLAND_DEGREES:
            problem, limit = "is at 0, 0, as missing coordinates are", f"±{NULL_ISLAND_DEGREES}"
        elif box is not None and not (box[0] <= west and box[1] <= south and east <= box[2] and north <= box[3]):
            problem, limit = "is outside of its source's expected_box", ",".join(f"{n:g}" for n in box)
        else:
            continue
        subject = one.subject(stack.layers.max_zoom)
        faults.append(Fault("feature_crs", subject, f"{one.name} of {one.layer} {problem}", found, limit))
    grids = _missing(stack)
    misplaced = len(faults)
    summary = (
        f"{misplaced:,} of {looked_at:,} features are misplaced"
        if misplaced
        else f"{looked_at:,} features are in place"
    )
    if grids:
        summary += f"; PROJ lacks {', '.join(str(fault.value) for fault in grids)}"
    return Audit(
        looked_at, [*faults, *grids], summary, passed=not faults and not grids,
        # Without a grid PROJ does the next best, and says how exact that is; a misplaced feature is wrong.
        severity=AssetCheckSeverity.ERROR if faults else AssetCheckSeverity.WARN,
    )  # fmt: skip


def _missing(stack: Stack) -> list[Fault]:
    found: list[Fault] = []
    for source in stack.sources.values():
        if source.default_crs is None:
            continue
        try:
            grids = missing_grids(crs_name(source.default_crs, "default_crs") or "")
        except Refused as fault:
            found.append(Fault("feature_crs", source.name, f"its default_crs is unknown: {fault}", source.default_crs))
            continue
        if grids:
            problem = f"PROJ lacks a grid for the best transformation of {source.default_crs}"
            found.append(Fault("feature_crs", source.name, problem, ", ".join(grids), "install proj-data"))
    return found


feature_crs = check_of(
    "feature_crs",
    "Stored features lie on the globe, not at 0, 0, and within their source's expected_box; PROJ has the grids that "
    "the CRS of the sources need. Looks at every feature of a store of up to 50,000, and at a sample of a larger one.",
    audit,
    asset=FEATURES,
)
