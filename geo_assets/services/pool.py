"""A pool of worker processes in which a task that hangs, dies or raises costs only itself.

Tasks go out in chunks, because a trip to another process costs about as much as validating a feature. A chunk that ran
out of time or killed its worker is tried again one task at a time, so that only the culprit fails.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any, Generic, Literal, TypeVar

import structlog
from pebble import ProcessExpired, ProcessPool

from geo_assets.services.draining import PROCESS

log = structlog.get_logger()

T = TypeVar("T")
R = TypeVar("R")


class WorkersUnavailable(Exception):
    """Worker processes cannot be started (no memory, no disk, a configuration they cannot read): no task's fault."""


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """Why a task gave no result: it ran out of time, its worker died, or it raised."""

    reason: Literal["timeout", "killed", "error"]
    explanation: str


@dataclass(frozen=True, slots=True)
class Done(Generic[T, R]):
    """One task and what became of it."""

    task: T
    result: R | TaskFailed


def _context() -> BaseContext:
    # Forking a process that has threads (Dagster, uvicorn) can deadlock the child; a fork server has none, and forks in
    # milliseconds with the libraries loaded, where spawn would import them for a second each time a worker is replaced.
    if "forkserver" in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["geo_assets.services.build_worker", "geo_assets.services.ingest_worker"])
        return context
    return multiprocessing.get_context("spawn")


def _start_worker(initializer: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    threading.Thread(target=_die_with_parent, args=(os.getppid(),), daemon=True, name="parent-watch").start()
    # A Ctrl-C in the terminal reaches every process of the group: the parent decides what it means for its workers.
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if initializer is not None:
        initializer(*arguments)


def _die_with_parent(parent: int) -> None:
    # A parent killed with -9 tells nobody; its fork server notices and ends, and this worker is adopted by another.
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _ready(tasks: Sequence[int]) -> list[int]:
    return list(tasks)


class WorkerPool:
    """Worker processes, started when the first task comes.

    Args:
        workers: Processes.
        timeout_s: Longest a single task may take; its process is killed then.
        initializer: Called once in every new process, with `arguments`.
        ahead: Chunks under way for each worker. More keep workers busy while the caller does something long with
            results, and take memory.
    """

    def __init__(
        self,
        workers: int,
        timeout_s: float,
        initializer: Callable[..., None] | None = None,
        arguments: tuple[Any, ...] = (),
        *,
        ahead: int = 2,
    ) -> None:
        self.workers, self.timeout_s, self.ahead = workers, timeout_s, ahead
        self._initializer, self._arguments = initializer, arguments
        self._pool: ProcessPool | None = None
        self._given_up = False
        self._waited_for: dict[Future[Any], ProcessPool] = {}

    def map(
        self, function: Callable[[Sequence[T]], Sequence[R]], chunks: Sequence[Sequence[T]] | Iterator[Sequence[T]]
    ) -> Iterator[Done[T, R]]:
        """Run `function` (chunk in, one result a task out) over chunks; yield tasks as their chunks end, in any order.

        At most `ahead` chunks a worker are under way: a long iterator of chunks is read as it is worked off.
        A process that dies takes its own task along and no other's: the pool says whose it was.

        Raises:
            WorkersUnavailable: Processes cannot be started; tasks that were not yielded have no result.
        """
        source = iter(chunks)
        running: dict[Any, Sequence[T]] = {}
        suspects: list[T] = []
        while True:
            while len(running) < self.ahead * self.workers:
                chunk = [suspects.pop(0)] if suspects else next(source, None)
                if chunk is None:
                    break
                if len(chunk):
                    running[self._submit(function, chunk)] = chunk
            if not running:
                return
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                chunk = running.pop(future)
                try:
                    results = future.result()
                except BrokenProcessPool as fault:
                    self.close()
                    raise WorkersUnavailable(f"worker processes cannot be started: {fault}") from fault
                except WorkersUnavailable:
                    raise
                except Exception as fault:
                    failed = self._failed(fault)
                else:
                    yield from (Done(task, result) for task, result in zip(chunk, results, strict=True))
                    continue
                if len(chunk) > 1:
                    log.warning("chunk failed, trying its tasks one by one", tasks=len(chunk), reason=failed.reason)
                    suspects.extend(chunk)
                else:
                    yield Done(chunk[0], failed)

    def start(self, function: Callable[[Sequence[T]], Sequence[R]], task: T) -> Future[Sequence[R]]:
        """Start one task and do not wait; `outcome` of its future says what became of it.

        Raises:
            WorkersUnavailable: Processes cannot be started.
        """
        return self._submit(function, [task])

    def outcome(self, future: Future[Sequence[R]], passing: tuple[type[Exception], ...] = ()) -> R | TaskFailed:
        """The result of a started task that is done; faults of the kinds `passing` are raised.

        Raises:
            WorkersUnavailable: Processes cannot be started: the task has no result.
        """
        try:
            return future.result()[0]
        except BrokenProcessPool as fault:
            self.close()
            raise WorkersUnavailable(f"worker processes cannot be started: {fault}") from fault
        except (WorkersUnavailable, *passing):
            raise
        except Exception as fault:
            return self._failed(fault)

    def _failed(self, fault: Exception) -> TaskFailed:
        if self._given_up or (PROCESS.asked and isinstance(fault, ProcessExpired)):
            # Whoever ends a group of processes ends the workers too: that is no task's fault.
            raise WorkersUnavailable("what is under way was given up") from fault
        if isinstance(fault, FutureTimeout):
            return TaskFailed("timeout", f"took longer than {self.timeout_s:g} s")
        if isinstance(fault, ProcessExpired):
            return TaskFailed("killed", f"its process died (exit code {fault.exitcode})")
        return TaskFailed("error", f"{type(fault).__name__}: {fault}")

    def warm(self) -> None:
        """Start every process now, so that the first task does not wait for libraries to load."""
        for future in [self._submit(_ready, [0]) for _ in range(self.workers)]:
            future.add_done_callback(lambda _: None)

    def _submit(self, function: Callable[[Sequence[T]], Sequence[R]], chunk: Sequence[T]) -> Future[Any]:
        if self._given_up:
            raise WorkersUnavailable("what is under way was given up")
        pool = self._pool
        if pool is None:
            pool = self._pool = ProcessPool(
                max_workers=self.workers,
                context=_context(),  # pyright: ignore[reportArgumentType]
                initializer=_start_worker,
                initargs=(self._initializer, self._arguments),
            )
        try:
            future: Future[Any] = pool.schedule(function, args=(chunk,), timeout=self.timeout_s)
        except RuntimeError as fault:
            self.close()
            raise WorkersUnavailable(f"worker processes cannot be started: {fault}") from fault
        self._waited_for[future] = pool
        future.add_done_callback(lambda done: self._waited_for.pop(done, None))
        if self._pool is not pool:
            # Closed meanwhile, by another thread.
            self._let_go(pool)
        return future

    def _let_go(self, pool: ProcessPool) -> None:
        """End what is waited for: pebble leaves the tasks of a pool that stops without any result, for ever."""
        for future in [one for one, whose in tuple(self._waited_for.items()) if whose is pool]:
            # One that ended meanwhile has its result.
            with contextlib.suppress(InvalidStateError):
                future.set_exception(WorkersUnavailable("what is under way was given up"))

    def give_up(self) -> None:
        """End the processes for good, from another thread: whoever waits for a task gets `WorkersUnavailable`."""
        self._given_up = True
        self.close()

    def close(self) -> None:
        """End the processes; what they were doing is lost, and whoever waits for it gets `WorkersUnavailable`."""
        if self._pool is not None:
            pool, self._pool = self._pool, None
            pool.stop()
            pool.join()
            self._let_go(pool)
