"""Publishing to the embedded log without waiting: a thread appends what gathers, group by group."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from resources.event_log.protocol import (
    Done,
    InvalidRecord,
    LogError,
    LogUnavailable,
    NewRecord,
    Position,
    RecordTooLarge,
)

_GROUP_RECORDS = 5_000
"""Most of one transaction: larger ones take no less time a record, and each waits for its whole group."""


class _Sent:
    __slots__ = ("acknowledged", "done", "failed", "records")

    def __init__(self, records: list[NewRecord], done: Done) -> None:
        self.records, self.done = records, done
        self.failed: dict[int, LogError] = {}
        self.acknowledged: list[int] = []


class SqlitePublisher:
    """`Publisher` on the embedded log.

    Args:
        append: `SqliteEventLog.append`.
        topic: Its name.
        max_record_bytes: The topic's limit.
    """

    def __init__(
        self, append: Callable[[Sequence[NewRecord]], list[Position]], topic: str, max_record_bytes: int
    ) -> None:
        self._append, self._topic, self._limit = append, topic, max_record_bytes
        self._lock = threading.Condition()
        self._waiting: deque[_Sent] = deque()
        self._outcomes: deque[_Sent] = deque()
        self._records = 0
        self._broken: LogError | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=f"publish {topic}", daemon=True)
        self._thread.start()

    @property
    def under_way(self) -> int:
        """Records sent of which no outcome was served yet."""
        return self._records

    @property
    def broken(self) -> LogError | None:
        """Why it takes no more."""
        return self._broken

    @property
    def max_record_bytes(self) -> int:
        """The topic's limit."""
        return self._limit

    def send(
        self, keys: Sequence[str | None], values: Sequence[bytes | None], done: Done, *, partition: int | None = None
    ) -> None:
        """Send records, in this order (see `Publisher.send`)."""
        sent = _Sent(
            [NewRecord(self._topic, k, v, {}, None, partition) for k, v in zip(keys, values, strict=True)], done
        )
        for place, record in enumerate(sent.records):
            fault = _fault_of(record, self._limit)
            if fault is not None:
                sent.failed[place] = fault
        with self._lock:
            if self._broken is not None or self._closed:
                raise self._broken or LogUnavailable(f"this publisher of {self._topic} is closed")
            self._records += len(sent.records)
            self._waiting.append(sent)
            self._lock.notify_all()

    def serve(self, timeout_s: float = 0.0) -> None:
        """Call `done` of what has its outcome by now; waits at most `timeout_s` for a first one."""
        if timeout_s > 0 and not self._outcomes:
            with self._lock:
                self._lock.wait_for(lambda: self._outcomes, timeout_s)
        for _ in range(len(self._outcomes)):
            sent = self._outcomes.popleft()
            self._records -= len(sent.records)
            sent.done(sent.failed, sent.acknowledged)

    def flush(self, timeout_s: float) -> bool:
        """Serve until nothing is under way; whether that was reached in time."""
        deadline = time.monotonic() + timeout_s
        while self._records and time.monotonic() < deadline:
            self.serve(0.05)
        return not self._records

    def close(self) -> None:
        """Fail what is still under way, and end."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self._thread.join()
        self.serve()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._waiting or self._closed)
                if self._closed or self._broken is not None:
                    self._fail_waiting(self._broken or LogUnavailable(f"this publisher of {self._topic} is closed"))
                    if self._closed:
                        return
                    continue
                group: list[_Sent] = []
                count = 0
                while self._waiting and (not group or count + len(self._waiting[0].records) <= _GROUP_RECORDS):
                    count += len(self._waiting[0].records)
                    group.append(self._waiting.popleft())
            self._commit(group)

    def _commit(self, group: list[_Sent]) -> None:
        records = [r for sent in group for place, r in enumerate(sent.records) if place not in sent.failed]
        broken: LogError | None = None
        try:
            self._append(records)
        except LogError as fault:
            broken = fault
        except Exception as fault:
            broken = LogError(f"append to {self._topic}: {fault}")
        now = time.perf_counter_ns()
        for sent in group:
            if broken is None:
                sent.acknowledged = [now] * (len(sent.records) - len(sent.failed))
            else:
                sent.failed = {place: sent.failed.get(place, broken) for place in range(len(sent.records))}
        with self._lock:
            self._outcomes.extend(group)
            if broken is not None:
                self._broken = broken
                self._fail_waiting(broken)
            self._lock.notify_all()

    def _fail_waiting(self, why: LogError) -> None:
        while self._waiting:
            sent = self._waiting.popleft()
            sent.failed = {place: sent.failed.get(place, why) for place in range(len(sent.records))}
            self._outcomes.append(sent)
        self._lock.notify_all()


def _fault_of(record: NewRecord, limit: int) -> LogError | None:
    size = len(record.value or b"")
    if record.key is not None:
        try:
            size += len(record.key.encode())
        except UnicodeEncodeError as fault:
            return InvalidRecord(f"a key of a record for {record.topic!r} is no text: {fault}")
    if size > limit:
        return RecordTooLarge(f"a record of {size} bytes is over the limit of {record.topic}, {limit} bytes")
    return None
