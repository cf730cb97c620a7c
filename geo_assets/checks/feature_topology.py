"""Topology of stored features: what ingest let in is valid, whoever wrote it into the store."""

from itertools import islice

import shapely

from geo_assets.catalog import FEATURES
from geo_assets.checks.audit import Audit, check_of
from geo_assets.checks.stored_features import features
from geo_assets.stack import Stack
from geo_assets.tiles.rules import Fault

AT_ONCE = 5_000
"""Features tested together: some tens of MB."""


def audit(stack: Stack) -> Audit:
    """Test the validity of stored geometries, many at a time."""
    looked_at = 0
    faults: list[Fault] = []
    found = features(stack, "feature_topology")
    while piece := list(islice(found, AT_ONCE)):
        looked_at += len(piece)
        valid = shapely.is_valid([one.shape for one in piece])
        for one in (one for one, right in zip(piece, valid, strict=True) if not right):
            reason = shapely.is_valid_reason(one.shape)
            subject = one.subject(stack.layers.max_zoom)
            faults.append(Fault("feature_topology", subject, f"{one.name} of {one.layer} is invalid", reason, "valid"))
    summary = (
        f"{len(faults):,} of {looked_at:,} features are invalid" if faults else f"{looked_at:,} features are valid"
    )
    return Audit(looked_at, faults, summary, passed=not faults)


feature_topology = check_of(
    "feature_topology",
    "Stored geometries are valid (OGC simple features). Looks at every feature of a store of up to 50,000, and at "
    "those in a sample of its tiles in a larger one.",
    audit,
    asset=FEATURES,
)
