"""Takes away what runs left in the cluster: `python -m geo_assets.kubernetes.janitor`, every few minutes.

A start timeout, or an end in the UI while the Kubernetes API is away, ends a run in Dagster and leaves its Job: a pod
that never starts, or a worker whose work nobody waits for. A Job whose run is alive is never touched, and one that has
ended is left to its own time to live, with what it printed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import structlog
from dagster import DagsterInstance, RunRecord, RunsFilter
from sqlalchemy.exc import SQLAlchemyError

from geo_assets import logs
from geo_assets.kubernetes.api import RUN_LABEL, Jobs, told

log = structlog.get_logger()

SELECTOR = f"app.kubernetes.io/part-of=geo-assets,app.kubernetes.io/component=run,{RUN_LABEL}"
"""Jobs of runs, and no others of the namespace."""

ENDED_S = 120.0
"""How long ago a run must have ended: a worker says that its run has ended, uploads what it printed, and goes."""

UNKNOWN_S = 900.0
"""How old a Job of a run that Dagster does not know must be. A run is written down before its Job is made; the rest is
for a storage that is being restored."""

MOST = 200
"""Most Jobs deleted in one sweep; the next one goes on."""

PAGE = 250
"""Jobs listed, and runs asked for, at a time."""


class WrongStorage(Exception):
    """Dagster's storage knows nothing at all, so what it does not know says nothing."""


@dataclass(frozen=True, slots=True)
class Left:
    """A Job that has not ended.

    Args:
        name: Its name.
        uid: Tells it from another of this name.
        run_id: The run it works for.
        created_s: Seconds since the epoch.
    """

    name: str
    uid: str
    run_id: str
    created_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """What Dagster says of a run: whether it has ended, and when, in seconds since the epoch."""

    ended: bool
    end_s: float | None = None


def reason(job: Left, run: Run | None, now_s: float) -> str | None:
    """Why a Job is to be deleted; None where it is not.

    Args:
        job: It has not ended.
        run: What Dagster knows of its run; None: nothing.
        now_s: Seconds since the epoch.
    """
    if run is None:
        return "Dagster knows no such run" if now_s - job.created_s > UNKNOWN_S else None
    if not run.ended:
        return None
    # A run that was ended before it began may have no time: then its Job's.
    end_s = job.created_s if run.end_s is None else max(run.end_s, job.created_s)
    return "its run has ended" if now_s - end_s > ENDED_S else None


def has_ended(status: Any) -> bool:
    """Whether a Job has ended, by its conditions."""
    return any(one.type in ("Complete", "Failed") and one.status == "True" for one in status.conditions or [])


def jobs_left(client: Jobs, namespace: str) -> Iterator[Left]:
    """The Jobs of runs that have not ended and that nobody deletes, a page at a time."""
    token: str | None = None
    while True:
        page: Any = client.list_jobs(namespace, SELECTOR, PAGE, token)
        for job in page.items:
            about = job.metadata
            if about.deletion_timestamp is None and not has_ended(job.status):
                created_s = about.creation_timestamp.astimezone(UTC).timestamp()
                yield Left(about.name, about.uid, about.labels[RUN_LABEL], created_s)
        token = page.metadata._continue
        if not token:
            return


def runs_of(instance: DagsterInstance, ids: Iterable[str]) -> dict[str, Run]:
    """What Dagster says of these runs, as it stands now; those that it does not know are absent."""
    wanted, found = list(ids), {}
    for start in range(0, len(wanted), PAGE):
        for record in instance.get_run_records(RunsFilter(run_ids=wanted[start : start + PAGE])):
            found[record.dagster_run.run_id] = _run(record)
    return found


def _run(record: RunRecord) -> Run:
    return Run(record.dagster_run.is_finished, record.end_time)


def sweep(instance: DagsterInstance, client: Jobs, namespace: str, now_s: float) -> tuple[int, int]:
    """Delete what is left behind; how many Jobs were deleted, and how many have not ended.

    Jobs are listed before their runs are asked for, and a run is asked for again before its Job is deleted: a run that
    has ended does not begin again. The Job must be the very one that was listed.

    Args:
        instance: Dagster's.
        client: The Kubernetes API.
        namespace: Of the Jobs.
        now_s: Seconds since the epoch.

    Raises:
        ApiAway: The API is away; what was deleted until then is.
        ApiRefused: The API does not delete, or not list.
        WrongStorage: Dagster's storage is empty: nothing is deleted by its word.
    """
    left = list(jobs_left(client, namespace))
    runs = runs_of(instance, (job.run_id for job in left))
    if left and not runs and not instance.get_runs_count():
        raise WrongStorage(
            f"{len(left)} Jobs have not ended, and Dagster's storage has no run at all: "
            "does GEO_ASSETS_DAGSTER_POSTGRES_URL name another one?"
        )
    deleted = 0
    for job, why in _condemned(left, runs, now_s):
        if deleted >= MOST:
            log.warning("more is left than one sweep deletes", most=MOST)
            break
        again = runs_of(instance, [job.run_id]).get(job.run_id)
        if reason(job, again, now_s) is None:
            continue
        if client.delete_job(job.name, namespace, uid=job.uid):
            deleted += 1
            log.info("job deleted", job=job.name, run=job.run_id, why=why)
    return deleted, len(left)


def _condemned(left: Iterable[Left], runs: Mapping[str, Run], now_s: float) -> Iterator[tuple[Left, str]]:
    for job in left:
        why = reason(job, runs.get(job.run_id), now_s)
        if why is not None:
            yield job, why


def _namespace(instance: DagsterInstance) -> str:
    """Where this instance's runs are."""
    return getattr(instance.run_launcher, "job_namespace", None) or "default"


def main() -> int:
    """One sweep. A fault is one line, and the exit code says that it was not done."""
    logs.configure(os.environ.get("GEO_ASSETS_LOG_LEVEL", "info"), os.environ.get("GEO_ASSETS_LOG_FORMAT", "auto"))
    try:
        with DagsterInstance.get() as instance:
            # The launcher loads the configuration of the Kubernetes API that it was given.
            namespace = _namespace(instance)
            deleted, left = sweep(instance, Jobs(), namespace, datetime.now(UTC).timestamp())
    except SQLAlchemyError as fault:
        log.error("nothing more is swept", problem=f"Dagster's storage is away: {told(fault)}")
        return 1
    except Exception as fault:
        log.error("nothing more is swept", problem=told(fault))
        return 1
    log.info("swept", deleted=deleted, running=left - deleted, namespace=namespace)
    return 0


if __name__ == "__main__":
    sys.exit(main())
