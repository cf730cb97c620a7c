"""The one way from the edge into the event log: requests that wait together go in one append, guarded by webhook id.

An append of twenty records costs little more than one (a commit each), so whoever arrives while one is under way
shares the next. What is answered, and when, is decided here; how a body becomes records is not.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, NamedTuple

import structlog

from geo_assets.events import topics
from resources.event_log.protocol import EventLog, InvalidRecord, LogError, NewRecord, RecordTooLarge
from resources.guard.protocol import Guard, GuardUnavailable

Outcome = Literal["queued", "duplicate", "conflict"]

BATCH_REQUESTS = 200
BATCH_BYTES = 8_000_000
"""Most of one append: some 50 ms of the embedded log, so that nobody waits long for the others of a batch."""

UNRECORDED_S = 0.1
"""How long acknowledged ids wait to be recorded together. What a killed edge forgets so is left to ingest, which drops
a repetition by its event key."""

GUARD_PAUSE_S = 1.0
"""After the guard could not answer it is left alone for so long: a slow guard must not make every request slow."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One request's records: all of them go in, or none."""

    records: Sequence[NewRecord]
    guard_key: str | None
    """None: the sender gave nothing to tell a repetition by."""
    fingerprint: str
    """What a repetition must have in common with the first."""
    event_id: str
    """By which the sender finds it again."""


class Answer(NamedTuple):
    """How a submission ended."""

    outcome: Outcome
    event_id: str


class _Waiting(NamedTuple):
    make: Callable[[], Submission]
    size: int
    done: asyncio.Future[Answer]


class Appender:
    """Takes submissions, appends them in groups, and tells each how it ended.

    Args:
        log: Where records go.
        guard: Remembers webhook ids. It may be down: then a repetition is appended again, and ingest drops it. What it
            remembers of another log (one guard for two platforms, a log made anew) counts for nothing: a record is
            left out only where this log has acknowledged it.
        guard_ttl_s: How long ids are remembered, seconds.
        on_append: Told seconds and records of every append (metrics); called in the writer's thread.
        on_guard_fault: Told of every failure of the guard.
    """

    def __init__(
        self,
        log: EventLog,
        guard: Guard,
        *,
        guard_ttl_s: float,
        on_append: Callable[[float, int], None] = lambda seconds, records: None,
        on_guard_fault: Callable[[], None] = lambda: None,
    ) -> None:
        self._log, self._guard, self._guard_ttl_s = log, guard, guard_ttl_s
        self._on_append, self._on_guard_fault = on_append, on_guard_fault
        self._waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="edge-log")
        self._task: asyncio.Task[None] | None = None
        self._guard_rests_until = 0.0
        # Acknowledged ids that the guard has not been told yet; asked before it. In the writer's thread alone.
        self._unrecorded: dict[str, str] = {}
        self._recorded_at = 0.0
        self._log_id: str | None = None
        self._stopping = False

    @property
    def waiting(self) -> int:
        """Submissions that are not yet part of an append. Bounded by the requests that are open."""
        return len(self._waiting)

    def start(self) -> None:
        """Begin to append; call it in the event loop."""
        self._task = asyncio.create_task(self._run(), name="edge-log")

    async def stop(self) -> None:
        """Append what waits, then end."""
        self._stopping = True
        self._arrived.set()
        if self._task is not None:
            await self._task
        await asyncio.get_running_loop().run_in_executor(self._writer, self._record)
        self._writer.shutdown()

    async def submit(self, make: Callable[[], Submission], size: int) -> Answer:
        """Wait until the log acknowledged the records, or the guard knew them.

        Args:
            make: Makes the submission, in the writer's thread, where it takes its turn with all others: only for what
                takes well under a millisecond, or hands out what was made before.
            size: Bytes of its values, for the batch's limit.

        Returns:
            `queued` once they are durable; `duplicate` when the same was acknowledged before; `conflict` when the id
            was used for something else. Nothing is appended for the last two.

        Raises:
            LogError: The log did not take them; nothing was acknowledged.
            Exception: Whatever `make` raised; it costs its own submission alone.
        """
        done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(make, size, done))
        self._arrived.set()
        return await done

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self._waiting:
                if self._stopping:
                    return
                self._arrived.clear()
                try:
                    async with asyncio.timeout(UNRECORDED_S if self._unrecorded else None):
                        await self._arrived.wait()
                except TimeoutError:
                    await loop.run_in_executor(self._writer, self._record)
            batch = self._next_batch()
            try:
                answers: Sequence[Answer | Exception] = await loop.run_in_executor(
                    self._writer, self._append, [waiting.make for waiting in batch]
                )
            except Exception as error:
                structlog.get_logger().error("append failed", error=type(error).__name__)
                answers = [error] * len(batch)
            for waiting, answer in zip(batch, answers, strict=True):
                if waiting.done.done():
                    continue  # its sender is gone; the record is in the log all the same
                if isinstance(answer, Exception):
                    waiting.done.set_exception(answer)
                else:
                    waiting.done.set_result(answer)
            # Nobody waits for the guard, so it is told of many at once.
            if self._unrecorded and time.monotonic() - self._recorded_at > UNRECORDED_S:
                await loop.run_in_executor(self._writer, self._record)

    def _next_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        size = 0
        while self._waiting and len(batch) < BATCH_REQUESTS:
            size += self._waiting[0].size
            if batch and size > BATCH_BYTES:
                break
            batch.append(self._waiting.popleft())
        return batch

    def _append(self, makers: Sequence[Callable[[], Submission]]) -> list[Answer | Exception]:
        """In the writer's thread: make, ask the guard, append. One thread: no repetition overtakes the first."""
        made: list[Submission | Exception] = []
        for make in makers:
            try:
                made.append(make())
            except Exception as error:
                made.append(error)
        batch = [submission for submission in made if isinstance(submission, Submission)]
        ended = iter(self._append_batch(batch))
        return [one if isinstance(one, Exception) else _answer(next(ended), one) for one in made]

    def _append_batch(self, batch: Sequence[Submission]) -> list[Outcome | Exception]:
        known = self._recall([s.guard_key for s in batch if s.guard_key is not None])
        outcomes: list[Outcome | Exception] = []
        # Which submission of this batch was the first under its id: the later ones share its fate.
        first_of: dict[str, int] = {}
        for index, submission in enumerate(batch):
            key = submission.guard_key
            outcome: Outcome = "queued"
            if key is not None:
                fingerprint = known.get(key)
                if fingerprint is None and key not in first_of:
                    first_of[key] = index
                else:
                    fingerprint = fingerprint or batch[first_of[key]].fingerprint
                    outcome = "duplicate" if fingerprint == submission.fingerprint else "conflict"
            outcomes.append(outcome)
        queued = [index for index, outcome in enumerate(outcomes) if outcome == "queued"]
        for index, error in self._append_all([batch[index] for index in queued], queued):
            outcomes[index] = error
        taken = {key: index for key, index in first_of.items() if outcomes[index] == "queued"}
        for index, submission in enumerate(batch):
            first = first_of.get(submission.guard_key or "", index)
            if submission.guard_key not in taken and first != index:
                outcomes[index] = outcomes[first]
        self._unrecorded.update((key, batch[index].fingerprint) for key, index in taken.items())
        return outcomes

    def _append_all(self, submissions: Sequence[Submission], indices: Sequence[int]) -> list[tuple[int, Exception]]:
        """One append for all; one by one only where a record among them is one the log cannot take."""
        if not submissions:
            return []
        records = [record for submission in submissions for record in submission.records]
        began = time.perf_counter()
        try:
            self._log.append(records)
        except (RecordTooLarge, InvalidRecord) as error:
            if len(submissions) == 1:
                return [(indices[0], error)]
            pairs = zip(submissions, indices, strict=True)
            return [fault for submission, index in pairs for fault in self._append_all([submission], [index])]
        except LogError as error:
            structlog.get_logger().warning("log refused", records=len(records), error=str(error)[:300])
            return [(index, error) for index in indices]
        self._on_append(time.perf_counter() - began, len(records))
        return []

    def _recall(self, keys: Sequence[str]) -> dict[str, str]:
        """The fingerprints of the ids that are known; only of the newest where the guard does not answer."""
        known = {key: self._unrecorded[key] for key in keys if key in self._unrecorded}
        if len(known) == len(keys) or time.monotonic() < self._guard_rests_until:
            return known
        mark = self._mark()
        if mark is None:
            return known
        try:
            found = self._guard.get_many(keys)
        except GuardUnavailable as error:
            self._guard_failed(error)
            return known
        return {key: value.removeprefix(mark) for key, value in found.items() if value.startswith(mark)} | known

    def _mark(self) -> str | None:
        """What stands before every fingerprint: this log's identity; None while the log does not tell it."""
        if self._log_id is None:
            try:
                self._log_id = self._log.topic_id(topics.RAW)
            except LogError:
                return None
        return f"{self._log_id} "

    def _record(self) -> None:
        """Tell the guard of what was acknowledged. Where it does not answer, what is forgotten is left to ingest."""
        fingerprints, self._unrecorded = self._unrecorded, {}
        self._recorded_at = time.monotonic()
        if not fingerprints or time.monotonic() < self._guard_rests_until:
            return
        mark = self._mark()
        if mark is None:
            return
        try:
            marked = {key: mark + fingerprint for key, fingerprint in fingerprints.items()}
            self._guard.set_many_if_absent(marked, self._guard_ttl_s)
        except GuardUnavailable as error:
            self._guard_failed(error)

    def _guard_failed(self, error: GuardUnavailable) -> None:
        self._on_guard_fault()
        self._guard_rests_until = time.monotonic() + GUARD_PAUSE_S
        structlog.get_logger().warning("guard does not answer; repetitions are left to ingest", error=str(error)[:300])


def _answer(outcome: Outcome | Exception, submission: Submission) -> Answer | Exception:
    return outcome if isinstance(outcome, Exception) else Answer(outcome, submission.event_id)
