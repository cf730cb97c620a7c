"""A pause before runs are asked for again that could not be launched: Kubernetes refuses them, or its API is away.

The dirty mark asks on every tick; a permission that is missing, or a quota, would then make a failed run each second.
Nothing is remembered here: the newest runs say how many launches failed in a row, and the last one when.
"""

from collections.abc import Sequence
from random import Random

from dagster import DagsterInstance, RunRecord, RunsFilter
from dagster._core.storage.tags import SENSOR_NAME_TAG

from geo_assets.flow.retries import Backoff
from geo_assets.kubernetes.pods import NOT_LAUNCHED_TAG

BACKOFF = Backoff(base_s=10.0, cap_s=120.0)
"""A person mends it, or the quota's runs end: two minutes of waiting are little beside either. The fast lane builds
edits meanwhile."""

LOOKED_AT = 8
"""Newest runs: after five failures the bound is the cap."""


def failed_launches(newest: Sequence[RunRecord]) -> int:
    """How many runs in a row could not be launched; those on their way say nothing.

    Args:
        newest: Runs, newest first.
    """
    failed = 0
    for record in newest:
        if NOT_LAUNCHED_TAG in record.dagster_run.tags:
            failed += 1
        elif record.dagster_run.is_finished or record.start_time is not None:
            break
    return failed


def pause(newest: Sequence[RunRecord], now_s: float) -> tuple[int, float]:
    """How many launches failed in a row, and for how many seconds from now nothing is asked for.

    The jitter comes from the last one's id: each tick finds the same end.

    Args:
        newest: Runs, newest first.
        now_s: Seconds since the epoch.
    """
    failed = failed_launches(newest)
    if not failed:
        return 0, 0.0
    last = next(record for record in newest if NOT_LAUNCHED_TAG in record.dagster_run.tags)
    end_s = last.end_time or last.update_timestamp.timestamp()
    wait_s = BACKOFF.wait_s(failed, Random(last.dagster_run.run_id))
    return failed, max(0.0, end_s + wait_s - now_s)


def pause_of(instance: DagsterInstance, sensor: str, now_s: float) -> tuple[int, float]:
    """The pause of the runs that a sensor asks for; as `pause`."""
    runs = instance.get_run_records(RunsFilter(tags={SENSOR_NAME_TAG: sensor}), limit=LOOKED_AT)
    return pause(runs, now_s)
