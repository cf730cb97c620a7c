"""What the guard's suite runs in processes of their own. Imports no test library, so that they start at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from geo_assets_tests.waiting import patient
from resources.guard.protocol import Guard


def set_when_told(open_guard: Callable[[], Guard], name: str, number: int, barrier: Any, results: Any) -> None:
    guard = open_guard()
    barrier.wait(patient(60))
    results.put({f"{name}-{n}": guard.set_if_absent(f"{name}-{n}", str(number), 600) for n in range(200)})
    guard.close()


def acquire_when_told(open_guard: Callable[[], Guard], name: str, number: int, barrier: Any, results: Any) -> None:
    guard = open_guard()
    barrier.wait(patient(60))
    leases = {f"{name}-{n}": guard.acquire(f"{name}-{n}", f"owner-{number}", 600) for n in range(100)}
    results.put({key: None if lease is None else lease.token for key, lease in leases.items()})
    guard.close()


def die_holding_a_lease(open_guard: Callable[[], Guard], name: str, ready: Any) -> None:
    guard = open_guard()
    assert guard.acquire(name, "a", 600) is not None
    assert guard.set_if_absent(name, "kept", 600) is None
    ready.set()
    time.sleep(600)
