"""Topology: the shapes in stored tiles are what the specification allows and what renderers can fill."""

from geo_assets.checks.audit import Audit, check_of
from geo_assets.checks.stored import decoded_sample
from geo_assets.stack import Stack
from geo_assets.tiles.rules import Fault, topology_faults


def audit(stack: Stack) -> Audit:
    """Decode a sample of the stored tiles and judge their shapes."""
    looked_at = 0
    faults: list[Fault] = []
    for tile, data in decoded_sample(stack, "topology"):
        looked_at += 1
        faults += topology_faults(tile, data)
    tiles = len({fault.subject for fault in faults})
    summary = f"{tiles:,} of {looked_at:,} tiles have invalid shapes" if faults else f"{looked_at:,} tiles are valid"
    return Audit(looked_at, faults, summary, passed=not faults)


topology = check_of(
    "topology",
    "Rings are closed, wound as the specification says, and valid; lines have two points. Looks at 500 tiles: those "
    "built last, and in turn every other one.",
    audit,
)
