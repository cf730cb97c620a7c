"""How large the pod of a run must be, and as whom it runs: the tag that says so to the run launcher.

Pure, and free of Kubernetes' and Dagster's libraries: sensors ask it wherever they run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

CONFIG_TAG = "dagster-k8s/config"
"""The run launcher reads a run's wishes in it. No other launcher looks at it."""

NOT_LAUNCHED_TAG = "geo_assets/not_launched"
"""On a run for which Kubernetes made no Job: the kind of fault. Sensors wait before they ask again."""

MAIN_MB = 512
"""A run's own process and what it brings: Dagster and the libraries 150 MB, the fork server 80, the rest for rows and
results of the batch, page cache and a dead worker that is replaced."""

WORKER_MB = 256
"""A worker process before any was measured: libraries 80 MB, a chunk of 150,000 vertices 90, and as much again."""

BYTES_A_VERTEX = 1_000
"""What a tile takes while it is encoded: 400 to 600 bytes a vertex were measured at 40,000 to 160,000 vertices."""

BYTES_A_TILE = 20_000
"""What a run keeps of each of its tiles until they are reported: state, task, result and entry of the catalog."""

STEP_MB = 256
"""Sizes come in steps of it: runs of one kind fit the same nodes, and a list of pods can be read."""

MAIN_MILLICORES, WORKER_MILLICORES = 250, 500
"""What a pod asks for; without a limit it takes more where a node has it. A start is three seconds of one core."""

SMALL_VERTICES = 2_000_000
"""Batches below it are built within the time that the start took: they ask for one worker's share of a processor."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a run is to build.

    Args:
        tiles: How many.
        vertices: Of all of them.
        heaviest: Vertices of the heaviest one, which one worker holds.
    """

    tiles: int
    vertices: int
    heaviest: int


@dataclass(frozen=True, slots=True)
class Size:
    """What a pod asks for: megabytes, which are its limit too, and thousandths of a processor."""

    megabytes: int
    millicores: int


def size_of(load: Load, *, workers: int, worker_megabytes: int, most_megabytes: int) -> Size:
    """The size of the pod of a run over a batch of tiles.

    Memory is what the run's process needs, and for each worker what workers were measured to need (the 99th percentile
    of the newest runs), or more where the batch's heaviest tile takes more. It never falls when the load grows.

    Args:
        load: What it builds.
        workers: The setting `build_workers`.
        worker_megabytes: Measured; 0 before any was.
        most_megabytes: Most that a pod may ask for. Where more is needed, it gets this and starts fewer workers.
    """
    heaviest_mb = -(-load.heaviest * BYTES_A_VERTEX // 1_000_000)
    # One worker has the heaviest tile, the others chunks of the usual size.
    usual_mb = max(worker_megabytes, WORKER_MB)
    needed_mb = (
        MAIN_MB
        + -(-load.tiles * BYTES_A_TILE // 1_000_000)
        + (workers - 1) * usual_mb
        + max(usual_mb, WORKER_MB + heaviest_mb)
    )
    megabytes = min(-(-needed_mb // STEP_MB) * STEP_MB, most_megabytes)
    busy = 1 if load.vertices < SMALL_VERTICES else workers
    return Size(megabytes, MAIN_MILLICORES + busy * WORKER_MILLICORES)


def run_tags(size: Size | None, account: str | None = None) -> dict[str, str]:
    """The tag of a run whose pod is of this size and runs as this service account; none for neither.

    Memory that is asked for is also the limit: a pod that takes more is ended before it takes its neighbours along. The
    processor has no limit: a build that is alone on a node uses all of it.
    """
    config: dict[str, object] = {}
    if size is not None:
        memory = f"{size.megabytes}Mi"
        config["container_config"] = {
            "resources": {
                "requests": {"cpu": f"{size.millicores}m", "memory": memory},
                "limits": {"memory": memory},
            }
        }
    if account is not None:
        config["pod_spec_config"] = {"service_account_name": account}
    return {CONFIG_TAG: json.dumps(config, sort_keys=True)} if config else {}
