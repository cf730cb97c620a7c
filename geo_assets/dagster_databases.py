"""Dagster's databases of a home, made by one process while all others wait.

Two processes that make them at once write their schema's version twice, and no process can open them after that.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
from pathlib import Path

MARKER = "databases-made"
LOCK = "databases.lock"


def made(home: Path) -> bool:
    """Whether the databases that this process's environment names were made by this version of Dagster."""
    marker = home / MARKER
    return marker.exists() and marker.read_text() == _version()


def make(home: Path) -> None:
    """Make them, unless that was done; whoever else is at it is waited for. Imports Dagster where there is work to do.

    Args:
        home: Dagster's home, with its dagster.yaml; what that reads from the environment is set.
    """
    if made(home):
        return
    # The lock of a process that was killed is free.
    with (home / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if made(home):
            return
        from dagster import DagsterInstance, RunsFilter

        # Each makes its tables when it is first used.
        with DagsterInstance.from_config(str(home)) as instance:
            instance.get_runs(RunsFilter(run_ids=["none"]), limit=1)
            instance.event_log_storage.get_asset_records([])
            if instance.schedule_storage is not None:
                instance.schedule_storage.all_instigator_state()
        (home / MARKER).write_text(_version())


def _version() -> str:
    # Another server in the same home is another database.
    server = os.environ.get("GEO_ASSETS_DAGSTER_POSTGRES_URL", "")
    return f"{importlib.metadata.version('dagster')} {hashlib.sha256(server.encode()).hexdigest()[:16]}"
