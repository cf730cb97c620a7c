"""The job that ends what the check `half_done` found: what somebody began and nobody ended."""

from dagster import MetadataValue, OpExecutionContext, Output, in_process_executor, job, op

from geo_assets import catalog
from geo_assets.assets.stack_resource import StackResource
from geo_assets.services import half_done

CATALOG_ROWS = 5_000


@op(description="Looks for what was left behind, and ends it: again does no harm.")
def mend_half_done(context: OpExecutionContext, stack: StackResource) -> Output[int]:
    """Find and mend; how many things were half done."""
    with stack.opened() as ports:
        found = half_done.find(ports)

        def pay_catalog() -> int:
            return catalog.pay_owed(
                ports.ledger, context.instance, ports.settings, limit=CATALOG_ROWS, min_age_ms=half_done.GRACE_MS
            )

        done = half_done.mend(ports, found, pay_catalog=pay_catalog)
    for one in found:
        context.log.info(f"{one.kind} {one.subject}: {one.problem}")
    rows = "\n".join(f"| {kind} | {count:,} |" for kind, count in sorted(done.items()))
    return Output(len(found), metadata={"mended": MetadataValue.md(f"| what | how much |\n| --- | ---: |\n{rows}")})


@job(
    name="mend",
    executor_def=in_process_executor,
    description=(
        "Ends what the check `half_done` finds: dead leases, unpaid outbox rows, orphaned objects, manifests and "
        "imports that nobody finished, publications and pins of the dead."
    ),
)
def mend() -> None:
    """One step: find and mend."""
    mend_half_done()
