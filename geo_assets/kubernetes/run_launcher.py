"""Dagster's run launcher for Kubernetes: an API that cannot be reached is no dead worker.

One run is one Job, and one Job one pod. Nothing here starts a run again: what a lost run leaves dirty is asked for by
the sensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import structlog
from dagster import Array, DagsterRun, Field
from dagster._core.launcher import LaunchRunContext
from dagster._core.launcher.base import CheckRunHealthResult, WorkerStatus
from dagster_k8s import K8sRunLauncher
from dagster_k8s.container_context import K8sContainerContext
from dagster_k8s.job import UserDefinedDagsterK8sConfig, get_job_name_from_run_id, get_user_defined_k8s_config
from kubernetes.client import V1JobStatus

from geo_assets.kubernetes.api import Jobs, is_absent, told
from geo_assets.kubernetes.pods import NOT_LAUNCHED_TAG

log = structlog.get_logger()

OURS = ("app.kubernetes.io/", "dagster/", "batch.kubernetes.io/", "pod-security.kubernetes.io/", "eks.amazonaws.com/")
"""Labels and annotations that others go by: Services, the janitor, controllers and whoever hands out credentials."""


class TagRefused(Exception):
    """A run's tags ask for what no tag may choose."""


def refusals(asked: UserDefinedDagsterK8sConfig, accounts: Collection[str]) -> list[str]:
    """What a run's tags ask for that they may not, beyond the fields that dagster.yaml closes.

    Args:
        asked: The tag `dagster-k8s/config`.
        accounts: Service accounts that a run may have.
    """
    found: list[str] = []
    account = asked.pod_spec_config.get("service_account_name")
    if account is not None and account not in accounts:
        found.append(f"service account {account!r}: a run may have {', '.join(sorted(accounts))}")
    for kind in ("labels", "annotations"):
        names: Mapping[str, Any] = asked.pod_template_spec_metadata.get(kind) or {}
        found += [f"{kind[:-1]} {name!r}" for name in sorted(names) if name.startswith(OURS)]
    return found


def judge(name: str, found: V1JobStatus | Exception) -> CheckRunHealthResult:
    """What a look at its Job says of a worker whose run has started and not ended.

    Only what the API says for certain ends a run: that the Job is not there, failed, or ended without the run's having
    done so. Everything else (no connection, a timeout, 429, 5xx, no permission) says nothing of the worker, which goes
    on without the API. How long that may last is bounded by the run's longest time and the Job's own deadline.

    Args:
        name: Of the Job, for the message.
        found: Its status, or the fault with which the API answered.
    """
    if isinstance(found, Exception):
        if is_absent(found):
            return CheckRunHealthResult(WorkerStatus.NOT_FOUND, f"Job {name} is not there")
        return CheckRunHealthResult(WorkerStatus.RUNNING, f"Job {name} cannot be looked at: {told(found)}")
    conditions: Sequence[Any] = found.conditions or []
    ended = {one.type: one for one in conditions if one.status == "True"}
    if "Failed" in ended:
        why = ": ".join(text for text in (ended["Failed"].reason, ended["Failed"].message) if text)
        return CheckRunHealthResult(WorkerStatus.FAILED, f"Job {name} failed: {why or 'no reason given'}")
    if "Complete" in ended or (found.succeeded and not found.active):
        return CheckRunHealthResult(WorkerStatus.FAILED, f"Job {name} is complete, and its run has not ended")
    if found.failed and not found.active:
        return CheckRunHealthResult(WorkerStatus.FAILED, f"the pod of Job {name} failed or was taken away")
    return CheckRunHealthResult(WorkerStatus.RUNNING)


class PatientRunLauncher(K8sRunLauncher):
    """`K8sRunLauncher` for an API server that may be away, and for runs that nobody resumes.

    A launch asks for a minute while the API is away, and once where it refuses, and then raises: the run fails before
    it began, and the sensor asks for its tiles again after a pause that grows. A run that is ended while the API is
    away is ended in Dagster; the janitor takes its Job.

    Args:
        run_service_accounts: Service accounts that a run's tags may choose.
        config: As of `K8sRunLauncher`.
    """

    def __init__(self, run_service_accounts: Sequence[str] = (), **config: Any) -> None:
        super().__init__(**config)
        self.run_service_accounts = frozenset({*run_service_accounts, self.service_account_name})
        self._api_client = Jobs()
        self._away = False

    @classmethod
    def config_type(cls) -> dict[str, Any]:
        """The configuration that dagster.yaml may give."""
        accounts = Field(
            Array(str), is_required=False, description="Service accounts that a run's tags may choose; default: none."
        )
        return {**super().config_type(), "run_service_accounts": accounts}

    @property
    def supports_resume_run(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A second worker of the same run would be a second level of retries."""
        return False

    @property
    def supports_run_worker_crash_recovery(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As `supports_resume_run`: a Job has one name, and no attempt in it."""
        return False

    def launch_run(self, context: LaunchRunContext) -> None:
        """Make a run's Job; a run that gets none is marked, so that the next one is not asked for at once.

        Raises:
            ApiAway, ApiRefused, TagRefused: It got none.
        """
        try:
            super().launch_run(context)
        except Exception as fault:
            run_id, kind = context.dagster_run.run_id, type(fault).__name__
            log.warning("run not launched", run=run_id, kind=kind, problem=str(fault))
            self._instance.add_run_tags(run_id, {NOT_LAUNCHED_TAG: kind})
            raise

    def get_container_context_for_run(self, dagster_run: DagsterRun) -> K8sContainerContext:
        """What a run's pod is made of.

        Raises:
            TagRefused: Its tags ask for what no tag may choose.
        """
        refused = refusals(get_user_defined_k8s_config(dagster_run.tags), self.run_service_accounts)
        if refused:
            raise TagRefused(f"the run's tag dagster-k8s/config may not choose: {'; '.join(refused)}")
        return super().get_container_context_for_run(dagster_run)

    def check_run_worker_health(self, run: DagsterRun) -> CheckRunHealthResult:
        """Look at a run's Job once, without waiting for an API that is away."""
        name = get_job_name_from_run_id(run.run_id)
        try:
            job: Any = self._api_client.batch_api.read_namespaced_job_status(name, self.job_namespace)
        except Exception as fault:
            seen = judge(name, fault)
        else:
            seen = judge(name, job.status)
        away = seen.status is WorkerStatus.RUNNING and seen.msg is not None
        if away and not self._away:
            log.warning("runs go on without a look at their Jobs", problem=seen.msg)
        self._away = away
        return seen
