"""CRS: PROJ answers as it should, and no stored tile shows signs of coordinates taken for what they are not."""

from geo_assets.checks.audit import Audit, check_of
from geo_assets.checks.stored import decoded_sample
from geo_assets.events.crs import ProbeFailed, probe
from geo_assets.stack import Stack
from geo_assets.tiles.rules import crs_faults, probe_faults


def audit(stack: Stack) -> Audit:
    """Probe PROJ with a known coordinate, then look for null island and strays in a sample of the stored tiles."""
    try:
        probe()
        problem = None
    except ProbeFailed as failed:
        problem = str(failed)
    faults = probe_faults(problem)
    looked_at = 0
    for tile, data in decoded_sample(stack, "crs"):
        looked_at += 1
        faults += crs_faults(tile, data, stack.layers)
    if problem is not None:
        summary = f"PROJ answers wrongly: {problem}"
    elif faults:
        summary = f"{len({fault.subject for fault in faults}):,} of {looked_at:,} tiles hold misplaced coordinates"
    else:
        summary = f"PROJ answers as it should; {looked_at:,} tiles hold their own coordinates"
    return Audit(
        looked_at, faults, summary, passed=not faults, numbers={"proj_probe": "failed" if problem else "passed"}
    )


crs = check_of(
    "crs",
    "A known coordinate is projected as it should be; no tile holds coordinates outside of its box or a cluster around "
    "0, 0. Looks at 500 tiles: those built last, and in turn every other one.",
    audit,
)
