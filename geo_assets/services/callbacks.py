"""Tell senders the outcome of their events, where they asked for it and their source's definition allows the address.

Best effort by design: the outcome is also in the metrics and the dead letters, and a sender's slow server must never
hold up ingest. The queue is bounded; what does not fit is counted.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import structlog
from tenacity import RetryError, Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from geo_assets.events import topics
from geo_assets.events.dead_letter import DeadLetter
from geo_assets.events.signature import sign
from geo_assets.flow import retries

if TYPE_CHECKING:
    from geo_assets.stack import Stack
    from resources.event_log.protocol import Record

log = structlog.get_logger()

QUEUE = 1_000


class _Again(Exception):
    """A callback that may be delivered later: the server is away or says 5xx or 429."""


@dataclass(frozen=True, slots=True)
class Told:
    """What one sender is to be told, and where."""

    url: str
    source: str
    event_id: str
    body: bytes

    @classmethod
    def of(cls, record: Record, counts: Mapping[str, int], letters: Sequence[DeadLetter]) -> Told | None:
        """What to tell of a record; None when its sender did not ask."""
        url = record.headers.get(topics.HEADER_CALLBACK)
        if not url:
            return None
        event_id = record.headers.get(topics.HEADER_EVENT_ID, "")
        refused = [
            {"dead_letter": letter.id, "reason": letter.reason, "field": letter.field, "value": letter.value,
             "limit": letter.limit, "explanation": letter.explanation, "feature": letter.feature_id,
             "index": letter.index}
            for letter in letters[:100]
        ]  # fmt: skip
        value: dict[str, Any] = {
            "event_id": event_id,
            "status": "refused" if letters and not counts else "partly_refused" if letters else "done",
            "outcomes": dict(counts),
            "refused": refused,
            "refused_count": len(letters),
        }
        return cls(url, record.headers.get(topics.HEADER_SOURCE, ""), event_id, json.dumps(value).encode())


class Callbacks:
    """Sends callbacks in a thread that starts with the first of them."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._queue: queue.Queue[Told | None] = queue.Queue(QUEUE)
        self._thread: threading.Thread | None = None
        self.dropped = 0

    def tell(self, told: Told | None) -> None:
        """Queue it; a full queue drops it and counts."""
        if told is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="callbacks")
            self._thread.start()
        try:
            self._queue.put_nowait(told)
        except queue.Full:
            self.dropped += 1
            log.warning(
                "callback dropped, the queue is full", source=told.source, event_id=told.event_id, dropped=self.dropped
            )

    def close(self) -> None:
        """Send what is queued, for at most a few seconds."""
        if self._thread is not None:
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                return
            self._thread.join(timeout=5)

    def _run(self) -> None:
        # Redirects are not followed: the source's definition allows this address and no other.
        with httpx.Client(timeout=5.0, follow_redirects=False, trust_env=False) as client:
            while (told := self._queue.get()) is not None:
                try:
                    for attempt in Retrying(
                        retry=retry_if_exception_type(_Again),
                        stop=stop_after_attempt(retries.ATTEMPTS),
                        wait=wait_random_exponential(multiplier=retries.BASE_S, max=retries.CAP_S),
                    ):
                        with attempt:
                            self._send(client, told)
                except RetryError:
                    log.warning("callback failed", source=told.source, event_id=told.event_id)

    def _send(self, client: httpx.Client, told: Told) -> None:
        source = self._stack.sources.get(told.source)
        if source is None or told.url not in source.callback_urls:
            log.warning("callback is not allowed any more", source=told.source, event_id=told.event_id)
            return
        headers = {"content-type": "application/json"}
        if source.secrets:
            headers |= sign(source.secrets[0], told.event_id, int(time.time()), told.body)
        try:
            answer = client.post(told.url, content=told.body, headers=headers)
        except httpx.TransportError as fault:
            raise _Again from fault
        if answer.status_code == 429 or answer.status_code >= 500:
            raise _Again
        if answer.status_code >= 300:
            log.warning("callback refused", source=told.source, event_id=told.event_id, status=answer.status_code)
