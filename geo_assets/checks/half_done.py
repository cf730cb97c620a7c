"""Half done: what somebody began and nobody ended is found. The job `mend` ends it."""

from collections import Counter

from geo_assets.checks.audit import Audit, check_of
from geo_assets.services import half_done as rest
from geo_assets.services.status import moment
from geo_assets.stack import Stack
from geo_assets.tiles.rules import Fault


def audit(stack: Stack) -> Audit:
    """Look for leases, outbox rows, objects, manifests, imports, publications and pins that were left behind."""
    found = rest.find(stack)
    kinds = Counter(one.kind for one in found)
    faults = [
        Fault(
            one.kind,
            one.tile or one.subject,
            f"{one.subject}: {one.problem}" if one.tile else one.problem,
            moment(one.since_ms) or one.count,
            "15 minutes",
        )
        for one in found
    ]
    if found:
        told = ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items()))
        summary = f"half done: {told}; the job mend, or geo-assets mend, ends it"
    else:
        summary = "nothing was left behind"
    return Audit(len(found), faults, summary, passed=not found, numbers=dict(kinds))


half_done = check_of(
    "half_done",
    "Nothing was begun and never ended: no lease, outbox row, object, manifest, import, publication or pin is left "
    "behind for more than 15 minutes. The job `mend` (geo-assets mend) ends what is.",
    audit,
)
