"""`dagster dev`, after ending the runs that a killed predecessor left started.

The default run launcher has no health check: a run whose process is gone would read as started for ever, and hold its
place in the queue and, through its batch, its tiles. Here it is known to be gone: the supervisor ended its processes.
"""

from __future__ import annotations

import sys

from dagster import DagsterInstance, DagsterRunStatus, RunsFilter

LEFT = [DagsterRunStatus.STARTING, DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING]


def end_lost_runs(instance: DagsterInstance) -> int:
    """Mark runs failed whose process cannot be alive; how many."""
    runs = instance.get_runs(RunsFilter(statuses=LEFT))
    for run in runs:
        instance.report_run_failed(run, "The process of this run is gone: geo-assets up was killed while it ran.")
    return len(runs)


def main() -> None:
    """End lost runs, then become `dagster dev` with the arguments given."""
    with DagsterInstance.get() as instance:
        lost = end_lost_runs(instance)
    if lost:
        sys.stdout.write(f"marked {lost} runs failed that a killed predecessor left\n")
        sys.stdout.flush()
    from dagster._cli import main as dagster

    sys.argv = ["dagster", "dev", *sys.argv[1:]]
    dagster()


if __name__ == "__main__":
    main()
