from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from geo_assets.services.pool import Done, TaskFailed, WorkerPool, WorkersUnavailable
from geo_assets_tests.services.pool_tasks import boom, misbehave, pids
from geo_assets_tests.waiting import patient, until


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(workers=2, timeout_s=patient(2.0))
    yield pool
    pool.close()


def results(done: Iterator[Done[str, str]]) -> dict[str, str]:
    return {one.task: one.result.reason if isinstance(one.result, TaskFailed) else one.result for one in done}


def test_every_task_of_every_chunk_gets_its_result(pool: WorkerPool) -> None:
    chunks = [[f"a{i}-{j}" for j in range(5)] for i in range(20)]

    done = results(pool.map(misbehave, chunks))

    assert done == {task: task.upper() for chunk in chunks for task in chunk}


@pytest.mark.parametrize(("culprit", "reason"), [("hang", "timeout"), ("die", "killed"), ("raise", "error")])
def test_rule_10_a_task_that_misbehaves_costs_only_itself(pool: WorkerPool, culprit: str, reason: str) -> None:
    done = results(pool.map(misbehave, [["a", "b", culprit, "c"], ["d", "e"]]))

    assert done == {"a": "A", "b": "B", culprit: reason, "c": "C", "d": "D", "e": "E"}


def test_the_pool_goes_on_after_several_workers_died(pool: WorkerPool) -> None:
    assert results(pool.map(misbehave, [["die"], ["a"], ["die"], ["b"]]))["a"] == "A"

    assert results(pool.map(misbehave, [["c"]])) == {"c": "C"}


def test_a_task_that_raises_says_what_it_raised(pool: WorkerPool) -> None:
    (done,) = pool.map(misbehave, [["raise"]])

    assert isinstance(done.result, TaskFailed)
    assert done.result.explanation == "ValueError: a task that raises"


def test_chunks_are_read_as_they_are_worked_off(pool: WorkerPool) -> None:
    read = 0

    def chunks() -> Iterator[list[int]]:
        nonlocal read
        for number in range(100):
            read += 1
            yield [number]

    done = pool.map(pids, chunks())
    next(done)

    assert read <= 10
    assert len(list(done)) == 99


def test_workers_that_cannot_start_are_no_tasks_fault() -> None:
    pool = WorkerPool(workers=1, timeout_s=5.0, initializer=boom)
    for _ in range(2):
        with pytest.raises(WorkersUnavailable):
            list(pool.map(misbehave, [["a", "b"], ["c"]]))
    pool.close()


def test_workers_end_when_their_parent_is_killed(tmp_path: object) -> None:
    script = (
        "import sys, time\n"
        "from geo_assets.services.pool import WorkerPool\n"
        "from geo_assets_tests.services.pool_tasks import pids\n"
        "pool = WorkerPool(2, 60)\n"
        "print(*{d.result for d in pool.map(pids, [[i] for i in range(8)])}, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert workers

    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()

    until(lambda: not any(psutil.pid_exists(pid) for pid in workers), why="the workers have ended", every=0.1)
