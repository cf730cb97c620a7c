"""Ingest: from `[raw]` to the feature store, and from its outbox to `[tiles]`.

One batch: read records, parse and validate in worker processes, apply in one transaction, write dead letters, send the
hints, and only then move the offset. Killed anywhere in between, it does the batch again and nothing counts twice.
"""

from __future__ import annotations

import io
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from geo_assets.events import collection, topics
from geo_assets.events.collection import CollectionInfo
from geo_assets.events.dead_letter import DeadLetter, Origin, Reason, Refused
from geo_assets.events.foreign import KINDS, Said, kept_headers, readable, readable_headers, said_by
from geo_assets.events.json_text import shorten
from geo_assets.events.models import EnvelopeError, read_events
from geo_assets.events.records import MAX_PART_ID
from geo_assets.flow import retries
from geo_assets.flow.retries import Backoff
from geo_assets.ports import inbox_object
from geo_assets.services import ingest_worker, outbox, tracing
from geo_assets.services.callbacks import Callbacks, Told
from geo_assets.services.dead_letters import now_ms, write_dead_letters
from geo_assets.services.dirty import DirtyPlan
from geo_assets.services.draining import PROCESS
from geo_assets.services.edit_stages import StageHistograms, now_us, stamps_of
from geo_assets.services.event_ids import told_ids
from geo_assets.services.event_records import event_record, part_of
from geo_assets.services.fence_features import follow_fence_layers, send_fences
from geo_assets.services.hot_tiles import HotTiles
from geo_assets.services.housekeeping import Housekeeper
from geo_assets.services.ingest_turns import Turns
from geo_assets.services.ingest_worker import BodyResult, BodyTask, Circumstances, FeatureResult, FeatureTask
from geo_assets.services.layer_changes import follow_layers
from geo_assets.services.lost_records import records_in, remember_loss, stop_if_told
from geo_assets.services.metrics_port import Readiness
from geo_assets.services.pool import TaskFailed, WorkerPool, WorkersUnavailable
from geo_assets.services.valid_edits import edit_of
from resources.event_log.protocol import (
    InvalidRecord,
    LogUnavailable,
    NewRecord,
    OffsetOutOfRange,
    Record,
    RecordTooLarge,
)
from resources.feature_store.protocol import Applied, Edit, FeatureStoreUnavailable
from resources.ledger.protocol import LedgerUnavailable
from resources.tile_store.protocol import TileStoreUnavailable

if TYPE_CHECKING:
    from geo_assets.settings import Settings
    from geo_assets.stack import Stack

log = structlog.get_logger()

POLL_RECORDS = 500
SMALL_BODY = 256_000
"""Bytes up to which a body goes to a worker whole; larger ones are read here, feature by feature, in bounded memory."""
BODIES_A_CHUNK = 25
FEATURES_A_CHUNK = 100
EDITS_A_TRANSACTION = 500
"""A few tenths of a second, which is how long other edits wait for the store."""

HEAVY_BODY = 64_000
"""Bytes from which a body is worked on beside the others: below, it takes milliseconds. What waits in the inbox is."""

BESIDE_S = 0.02
"""Longest wait for records while something heavy is under way."""

MAX_SOURCE = 80
"""Characters of a source that are repeated: a configured one has at most 64."""
LAST_MOMENT_MS = 4_102_444_800_000
"""The year 2100. It is the version of what has none: a record stamped later would be newer than all to come."""

REGISTRY = CollectorRegistry()
RECORDS = Counter("geo_assets_ingest_records_total", "Raw records worked off.", registry=REGISTRY)
EDITS = Counter("geo_assets_ingest_edits_total", "Edits by outcome.", ["outcome"], registry=REGISTRY)
HINTS = Counter("geo_assets_ingest_hints_total", "Hints sent to [tiles] and [tiles-hot].", registry=REGISTRY)
HOT = Gauge("hot_tiles", "Tiles whose hints go to [tiles-hot], as they are so many.", registry=REGISTRY)
BATCH_SECONDS = Histogram("geo_assets_ingest_batch_seconds", "From read to commit of a batch.", registry=REGISTRY)
STAGES = StageHistograms(REGISTRY)
REGISTRY.register(tracing.SPANS)
LAG = Gauge("geo_assets_ingest_lag_records", "Raw records not worked off yet.", registry=REGISTRY)


HELD = Gauge("geo_assets_ingest_held_records", "Raw records that wait behind heavy ones.", registry=REGISTRY)
LOST = Counter("geo_assets_ingest_lost_records_total", "Raw records that retention took unread.", registry=REGISTRY)


class Transient(Exception):
    """Not this record's fault, and likely over soon: the batch is done again from the committed offset."""


OUTAGES = (
    LogUnavailable,
    FeatureStoreUnavailable,
    LedgerUnavailable,
    TileStoreUnavailable,
    WorkersUnavailable,
    Transient,
)
"""Faults that are no record's: the batch is done again when they are over."""


@dataclass(slots=True)
class Outcome:
    """What became of one raw record, for its sender and the counters."""

    record: Record
    counts: dict[str, int] = field(default_factory=dict)
    letters: list[DeadLetter] = field(default_factory=list)
    passed_on: list[NewRecord] = field(default_factory=list)
    """Events that belong on another topic: somebody wrote positions or tile events to `[raw]`."""
    span: tracing.Span | None = None
    """Where it is traced."""

    def count(self, name: str) -> None:
        """One more of this outcome."""
        self.counts[name] = self.counts.get(name, 0) + 1


class Ingest:
    """Works off `[raw]`.

    Args:
        stack: The ports.
        step: Called with the name of each step before it is taken. Tests crash here.
    """

    def __init__(self, stack: Stack, *, step: Callable[[str], None] | None = None) -> None:
        self.stack = stack
        self._step = step or (lambda _name: None)
        settings = stack.settings

        def workers(count: int) -> WorkerPool:
            return WorkerPool(count, settings.task_timeout_s, ingest_worker.start, (settings,))

        # Processes of their own for what is heavy, started by the first of it: no giant holds up a small edit.
        self._pool, self._heavy_pool = workers(settings.ingest_workers), workers(max(1, settings.ingest_workers - 1))
        self._turns = Turns(is_heavy)
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="heavy")
        self._under_way: tuple[Record, Future[list[Outcome]]] | None = None
        self._consumer = stack.log.consumer(topics.INGEST_GROUP, [topics.RAW])
        self._callbacks = Callbacks(stack)
        self._hot = HotTiles(settings.hot_tile_rate)
        self._hinting = threading.Lock()

    def give_up(self) -> None:
        """Let go of what is under way, from another thread: no offset moves, and another member does it again."""
        self._pool.give_up()
        self._heavy_pool.give_up()

    def close(self) -> None:
        """Leave the group and end the workers; what is heavy and under way is finished first."""
        self._consumer.close()
        # Before its workers end: without them it would be a dead letter.
        self._beside.shutdown(wait=True, cancel_futures=True)
        self._pool.close()
        self._heavy_pool.close()
        self._callbacks.close()

    def run(self, stop: threading.Event, ready: Readiness | None = None) -> None:
        """Work until asked to stop; transient faults wait with full jitter and go on from the committed offset.

        Args:
            stop: Set to end it: what is under way is finished, and its offset moved, unless it is given up meanwhile.
            ready: Told whether it works, and what it waits for.
        """
        backoff, chance, failed = Backoff(), random.Random(), 0
        ready = ready or Readiness()
        self._pool.warm()
        self._sweep()
        while not stop.is_set():
            try:
                self._turn(timeout_s=0.5)
                failed, ready.waits_for = 0, None
            except OUTAGES as fault:
                if stop.is_set():
                    return
                failed += 1
                wait_s = backoff.wait_s(failed, chance)
                ready.waits_for = str(fault)
                log.warning("ingest waits", error=str(fault), seconds=round(wait_s, 1))
                self._again()
                stop.wait(wait_s)
        self._finish_heavy()

    def _finish_heavy(self) -> None:
        """Wait for the heavy record under way and move its offset, so that nobody has to do it again."""
        if self._under_way is None:
            return
        record, future = self._under_way
        try:
            future.result()
            if light := self._turns.done(record):
                self.work(light)
            self._move()
            RECORDS.inc(1 + len(light))
        except OUTAGES as fault:
            log.warning("a heavy record is left to another process", error=str(fault))

    def _again(self) -> None:
        """Everything from the committed offsets on is read once more. What is under way is finished, and done again."""
        self._turns = Turns(is_heavy)
        self._under_way = None
        self._consumer.seek_to_committed()

    def _poll(self, timeout_s: float) -> list[Record]:
        """Next records; what retention took unread is said, counted and passed over, or ends ingest."""
        while True:
            try:
                # With enough that waits, it is only told that this member is alive.
                return self._consumer.poll(0 if self._turns.full else POLL_RECORDS, timeout_s)
            except OffsetOutOfRange as gone:
                self._skip_lost(gone)

    def _skip_lost(self, gone: OffsetOutOfRange) -> None:
        """Nothing stored can make up for edits that nobody read: they are told loudly, and senders have to repeat them.

        Raises:
            RecordsLost: The settings say to stop.
        """
        stop_if_told(self.stack.settings, gone, "ingest", "edits in them are lost unless they are sent again")
        log.error(
            "raw records were deleted before they were read: edits in them are lost unless they are sent again",
            topic=gone.topic, partition=gone.partition, records=records_in(gone), position=gone.offset,
            oldest=gone.begin, newest=gone.end,
        )  # fmt: skip
        LOST.inc(records_in(gone))
        # The note before the position: a crash in between tells it again, and never not at all.
        remember_loss(self.stack.ledger, gone, now_ms())
        self.stack.log.commit(topics.INGEST_GROUP, gone.topic, {gone.partition: gone.begin})
        self._again()

    def _sweep(self) -> None:
        """What a predecessor stored and did not send."""
        fences, sent = send_fences(self.stack), outbox.send_hints(self.stack)
        if sent or fences:
            log.info("sent what was owed", hints=sent, fences=fences)

    def run_once(self, timeout_s: float = 0.0) -> int:
        """Work off one batch; how many records came to an end. 0: nothing was there, and nothing is under way."""
        while True:
            done = self._turn(timeout_s)
            if done or self._under_way is None:
                return done

    def _turn(self, timeout_s: float) -> int:
        """Work off what is light, and what became light as a heavy record before it has ended; how many records."""
        started = time.perf_counter()
        ended = self._ended()
        light = [] if ended is None else self._turns.done(ended)
        if not light:
            if ended is not None:
                timeout_s = 0.0
            elif self._under_way is not None:
                timeout_s = min(timeout_s, BESIDE_S)
            # In two steps: where records were lost, polling begins with turns anew.
            records = self._poll(timeout_s)
            light = self._turns.sort(records)
        self._start_heavy()
        HELD.set(len(self._turns))
        if light:
            self.work(light)
        done = len(light) + (ended is not None)
        if not done:
            self._hot.look()
            HOT.set(len(self._hot))
            return 0
        self._move()
        RECORDS.inc(done)
        BATCH_SECONDS.observe(time.perf_counter() - started)
        return done

    def _move(self) -> None:
        """Move the offsets past what is done, and past nothing that waits."""
        if offsets := self._turns.moved():
            self._step("commit offsets")
            self._consumer.commit(offsets)

    def _start_heavy(self) -> None:
        """Begin the next heavy record, beside everything else, where none is under way."""
        if self._under_way is None and (record := self._turns.next_heavy()) is not None:
            self._under_way = record, self._beside.submit(self.work, [record], pool=self._heavy_pool)

    def _ended(self) -> Record | None:
        """The heavy record that was under way and has ended; what went wrong is raised."""
        if self._under_way is None or not self._under_way[1].done():
            return None
        (record, future), self._under_way = self._under_way, None
        future.result()
        return record

    def work(self, records: Sequence[Record], *, pool: WorkerPool | None = None) -> list[Outcome]:
        """Validate, store and announce these records; everything but moving the offset.

        Args:
            records: In order. Those of another call, in another thread, have other keys.
            pool: Whose processes validate.
        """
        outcomes = [Outcome(_readable(record)) for record in records]
        batch = _begin_spans(outcomes)
        try:
            self._work(outcomes, pool or self._pool)
        finally:
            if batch is not None:
                _end_spans(outcomes, batch)
        return outcomes

    def _work(self, outcomes: list[Outcome], pool: WorkerPool) -> None:
        small: list[tuple[int, BodyTask]] = []
        large: list[tuple[int, BodyTask]] = []
        for index, outcome in enumerate(outcomes):
            try:
                task = self._open(outcome)
            except Refused as fault:
                outcome.letters.append(self._letter(outcome.record, fault))
                continue
            if task is not None:
                (small if len(task.body) <= SMALL_BODY else large).append((index, task))
        edits: list[tuple[int, FeatureResult]] = []
        for index, results in self._small(small, outcomes, pool):
            edits.extend((index, result) for result in results)
        # Workers end in any order: edits are applied in the order of the log.
        edits.sort(key=lambda pair: (pair[0], pair[1].index))
        # At once: a map waits for them, and for nothing that comes below.
        self._send_hints(self._store(edits, outcomes))
        for index, task in large:
            for results in self._large(index, task, outcomes, pool):
                self._send_hints(self._store([(index, result) for result in results], outcomes))
        self._pass_on(outcomes)
        self._step("dead letters")
        write_dead_letters(self.stack, [letter for outcome in outcomes for letter in outcome.letters])
        self._step("send fences")
        send_fences(self.stack)
        outbox.plan_wide(self.stack)
        self._report(outcomes)

    def _send_hints(self, stored_us: int) -> None:
        """Tell the builders what was stored so far, in this batch or before it; when, in microseconds, if just now."""
        self._step("send hints")
        # One thread at a time: both would send the same rows.
        with self._hinting:
            HINTS.inc(outbox.send_hints(self.stack, stored_us=stored_us, stages=STAGES, hot=self._hot))
            HOT.set(len(self._hot))

    # -- reading -----------------------------------------------------------------------------------------------------
    def _open(self, outcome: Outcome) -> BodyTask | None:
        """A record's body, wherever it is, and its circumstances; None where its events were passed on.

        What the headers do not say is read off the body, and stands in the record's headers from then on: a producer
        that knows nothing of us needs none of them, and a dead letter names source and event id all the same.
        """
        record = outcome.record
        if record.value is None:
            raise Refused("null_value", "value", explanation="a raw record needs a body")
        headers = dict(record.headers)
        body = record.value
        pointer = headers.get(topics.HEADER_POINTER)
        if pointer:
            body = self._fetch(pointer, headers.get(topics.HEADER_SHA256, ""))
        content_type = headers.get(topics.HEADER_CONTENT_TYPE) or None
        if headers.get(topics.HEADER_KIND) not in KINDS or not headers.get(topics.HEADER_SOURCE):
            said = said_by(body, content_type)
            if headers.get(topics.HEADER_KIND) not in KINDS:
                headers[topics.HEADER_KIND] = said.kind or "features"
            if not headers.get(topics.HEADER_SOURCE):
                headers[topics.HEADER_SOURCE] = self._source_of(said, record.key)
            if said.event_id:
                headers.setdefault(topics.HEADER_EVENT_ID, said.event_id)
            outcome.record = record = record._replace(headers=headers)
        name = headers[topics.HEADER_SOURCE]
        source = self.stack.sources.get(name)
        if source is None:
            raise _unknown_source(name, self.stack.sources)
        event_id = headers.get(topics.HEADER_EVENT_ID) or _hash(body)
        if len(event_id) > MAX_PART_ID or any(ord(c) < 32 or ord(c) == 127 for c in event_id):
            raise Refused(
                "schema", topics.HEADER_EVENT_ID, shorten(event_id), f"1..{MAX_PART_ID} characters",
                explanation="an event id is of that length and has no control characters",
            )  # fmt: skip
        at = Circumstances(
            source=source,
            event_id=event_id,
            received_ms=_moment(headers.get(topics.HEADER_RECEIVED_MS)) or _moment(record.timestamp_ms) or now_ms(),
            header_crs=headers.get(topics.HEADER_CRS) or None,
            content_type=content_type,
            replay=topics.HEADER_REPLAY in headers,
        )
        kind = headers[topics.HEADER_KIND]
        if kind != "features":
            outcome.passed_on = self._events_of(kind, body, at, headers.get(topics.HEADER_CALLBACK))
            if kind == "tiles" and (trace := tracing.header_of(outcome.span)):
                more = tracing.headers_with([trace])
                outcome.passed_on = [replace(one, headers={**one.headers, **more}) for one in outcome.passed_on]
            return None
        return BodyTask(at, body)

    def _source_of(self, said: Said, key: str | None) -> str:
        """Whose a record is that has no such header: the body's word, the key's, else the only source there is."""
        if said.source is not None:
            return said.source
        sources = self.stack.sources
        prefix = (key or "").partition(":")[0]
        if prefix in sources:
            return prefix
        return next(iter(sources)) if len(sources) == 1 else ""

    def _events_of(self, kind: str, body: bytes, at: Circumstances, callback: str | None) -> list[NewRecord]:
        """The records by which tile, position or fence events that stand in `[raw]` go on to their topic."""
        limit = self.stack.settings.stream_above_bytes
        if len(body) > limit:
            raise Refused("too_large", "value", f"{len(body)} bytes", f"{limit} bytes", f"a list of {kind}")
        try:
            events = read_events(body, kind)
        except EnvelopeError as fault:
            # A position's values are personal data and are repeated nowhere.
            value = None if kind == "positions" else fault.value
            raise Refused("schema", fault.field, value, fault.limit, fault.problem) from None
        others = {event.source for event in events if event.source is not None} - {at.source.name}
        if others:
            raise Refused("schema", "source", shorten(min(others)), at.source.name, "is not the record's source")
        return [
            event_record(
                event,
                source=at.source.name,
                event_id=event.event_id or part_of(at.event_id, index, len(events)),
                received_ms=at.received_ms,
                crs=at.header_crs,
                callback=callback,
            )
            for index, event in enumerate(events)
        ]

    def _pass_on(self, outcomes: Sequence[Outcome]) -> None:
        """Append what belongs on another topic; a record that the log never takes costs itself alone."""
        some = [outcome for outcome in outcomes if outcome.passed_on]
        if not some:
            return
        self._step("pass on")
        try:
            self.stack.log.append([record for outcome in some for record in outcome.passed_on])
        except (RecordTooLarge, InvalidRecord):
            for outcome in some:
                try:
                    self.stack.log.append(outcome.passed_on)
                except (RecordTooLarge, InvalidRecord) as fault:
                    reason: Reason = "too_large" if isinstance(fault, RecordTooLarge) else "schema"
                    outcome.passed_on = []
                    outcome.letters.append(
                        self._letter(outcome.record, Refused(reason, "value", explanation=str(fault)))
                    )
        for outcome in some:
            for _ in outcome.passed_on:
                outcome.count("passed_on")

    @retry(
        retry=retry_if_exception_type(Transient),
        stop=stop_after_attempt(retries.ATTEMPTS),
        wait=wait_random_exponential(multiplier=retries.BASE_S, max=retries.CAP_S),
        reraise=True,
    )
    def _fetch(self, pointer: str, sha256: str) -> bytes:
        from resources.tile_store.protocol import InvalidName, TileStoreError

        if not pointer.startswith(inbox_object("")):
            raise Refused("missing_body", "pointer", pointer[:80], inbox_object("…"), "points outside the inbox")
        try:
            body = self.stack.tiles.get(pointer)
        except InvalidName as fault:
            raise Refused("missing_body", "pointer", pointer[:80], explanation=str(fault)) from None
        except TileStoreError as fault:
            raise Transient(f"inbox: {fault}") from fault
        if body is None:
            raise Refused("missing_body", "pointer", pointer[:80], explanation="the inbox has no such body")
        if sha256 and _hash(body) != sha256:
            raise Refused("missing_body", "sha256", sha256[:80], explanation="the body in the inbox has another hash")
        return body

    def _small(
        self, tasks: list[tuple[int, BodyTask]], outcomes: list[Outcome], pool: WorkerPool
    ) -> Iterator[tuple[int, tuple[FeatureResult, ...]]]:
        index_of = {id(task): index for index, task in tasks}
        plain = [task for _, task in tasks]
        for done in pool.map(ingest_worker.read_bodies, _chunks(plain, BODIES_A_CHUNK)):
            index = index_of[id(done.task)]
            result: BodyResult | TaskFailed = done.result
            if isinstance(result, TaskFailed):
                result = BodyResult((), _refusal(result))
            if result.refused is not None:
                outcomes[index].letters.append(
                    self._letter(outcomes[index].record, result.refused, body=done.task.body)
                )
            yield index, result.features

    def _large(
        self, index: int, task: BodyTask, outcomes: list[Outcome], pool: WorkerPool
    ) -> Iterator[list[FeatureResult]]:
        """Features of a large body, a transaction's worth at a time."""
        outcome = outcomes[index]
        info: CollectionInfo | Refused | TaskFailed = next(iter(pool.map(ingest_worker.first_passes, [[task]]))).result
        if isinstance(info, TaskFailed):
            info = _refusal(info)
        if isinstance(info, Refused):
            outcome.letters.append(self._letter(outcome.record, info, body=task.body))
            return
        results: list[FeatureResult] = []

        def tasks() -> Iterator[list[FeatureTask]]:
            chunk: list[FeatureTask] = []
            for item in collection.features(io.BytesIO(task.body), info.form):
                if item.fault is not None:
                    results.append(FeatureResult(item.index, item.raw, None, item.fault))
                    continue
                chunk.append(FeatureTask(task.at, info, item.index, item.raw))
                if len(chunk) >= FEATURES_A_CHUNK:
                    yield chunk
                    chunk = []
            if chunk:
                yield chunk

        for done in pool.map(ingest_worker.validate_features, tasks()):
            result = done.result
            if isinstance(result, TaskFailed):
                result = FeatureResult(done.task.index, done.task.raw, None, _refusal(result))
            results.append(result)
            if len(results) >= EDITS_A_TRANSACTION:
                yield sorted(results, key=lambda one: one.index)
                results.clear()
        if results:
            yield sorted(results, key=lambda one: one.index)

    # -- storing -----------------------------------------------------------------------------------------------------
    def _store(self, results: Sequence[tuple[int, FeatureResult]], outcomes: list[Outcome]) -> int:
        """Store what is valid; when the first of it was durable, microseconds since the epoch, 0 where nothing was."""
        first_us = 0
        for start in range(0, len(results), EDITS_A_TRANSACTION):
            part = results[start : start + EDITS_A_TRANSACTION]
            edits: list[Edit] = []
            owners: list[tuple[int, FeatureResult]] = []
            for index, result in part:
                if result.edit is not None:
                    edits.append(edit_of(result.edit))
                    owners.append((index, result))
                elif result.refused is not None:
                    outcome = outcomes[index]
                    outcome.letters.append(self._letter(outcome.record, result.refused, feature=result))
            if not edits:
                continue
            self._step("apply")
            stamps = {index: stamps_of(outcomes[index].record) for index in {index for index, _ in owners}}
            received = {edit.event_key: stamps[index].received for edit, (index, _) in zip(edits, owners, strict=True)}
            traces: dict[str, str] = {}
            if tracing.ACTIVE is not None:
                traces = {
                    edit.event_key: trace
                    for edit, (index, _) in zip(edits, owners, strict=True)
                    if (trace := tracing.header_of(outcomes[index].span))
                }
            plan = DirtyPlan(self.stack.layers, self.stack.settings.edit_cap, received_us=received, traces=traces)
            done = self.stack.features.apply(edits, plan, now_ms=now_ms())
            stored_us = now_us()
            first_us = first_us or stored_us
            STAGES.observe([one.at("stored", stored_us) for one in stamps.values()], "stored")
            for applied, (index, result) in zip(done, owners, strict=True):
                self._count(applied, outcomes[index], result)
        return first_us

    def _count(self, applied: Applied, outcome: Outcome, result: FeatureResult) -> None:
        outcome.count(applied.outcome)
        if applied.outcome == "version_conflict":
            edit = applied.edit
            fault = Refused(
                "version_conflict", "version", str(edit.version),
                f"above {applied.current_version}, or the same content",
                explanation=f"version {edit.version} of feature {edit.feature_id} stands with other content",
            )  # fmt: skip
            outcome.letters.append(self._letter(outcome.record, fault, feature=result, edit=edit))

    def _letter(
        self,
        record: Record,
        refused: Refused,
        *,
        feature: FeatureResult | None = None,
        edit: Edit | None = None,
        body: bytes | None = None,
    ) -> DeadLetter:
        """The dead letter of a record, or of one feature of it: with its raw payload and where it came from."""
        headers = kept_headers(record.headers)
        payload = feature.raw if feature is not None and feature.raw else body
        if payload is None:
            payload = record.value or b""
        values: dict[str, Any] = {}
        if payload is record.value and topics.HEADER_POINTER in headers:
            values["pointer"] = headers[topics.HEADER_POINTER]
        return DeadLetter.refused(
            refused,
            stage="store" if refused.reason == "version_conflict" else "validate",
            source=headers.get(topics.HEADER_SOURCE, "")[:MAX_SOURCE],
            at_ms=now_ms(),
            event_id=headers.get(topics.HEADER_EVENT_ID, "")[:MAX_PART_ID] or None,
            feature_id=edit.feature_id if edit is not None else feature.feature_id if feature is not None else None,
            layer=edit.feature.layer if edit is not None and edit.feature is not None else None,
            origin=Origin(record.topic, record.partition, record.offset),
            index=feature.index if feature is not None else None,
            event_key=edit.event_key if edit is not None else None,
            payload=payload,
            headers=headers,
            **values,
        )

    def _report(self, outcomes: Sequence[Outcome]) -> None:
        totals: dict[str, int] = {}
        for outcome in outcomes:
            for name, count in outcome.counts.items():
                EDITS.labels(name).inc(count)
                totals[name] = totals.get(name, 0) + count
            dead = len(outcome.letters)
            if dead:
                EDITS.labels("dlq").inc(dead)
                totals["dead_letters"] = totals.get("dead_letters", 0) + dead
            self._callbacks.tell(Told.of(outcome.record, outcome.counts, outcome.letters))
        log.info("ingested", records=len(outcomes), event_ids=told_ids(map(_event_id, outcomes)), **totals)


def _begin_spans(outcomes: Sequence[Outcome]) -> tracing.Span | None:
    """A span for each record, of the trace that it came with, and the batch's, to which they are linked.

    What is replayed begins a trace that is linked to its first one: it may have lain for days.
    """
    tracer = tracing.ACTIVE
    if tracer is None:
        return None
    for outcome in outcomes:
        headers = outcome.record.headers
        if headers.get(topics.HEADER_KIND) == "positions":
            continue
        trace, replayed = headers.get(topics.HEADER_TRACEPARENT, ""), topics.HEADER_REPLAY in headers
        outcome.span = tracer.begin(
            "ingest", "consumer", parent="" if replayed else trace, links=[trace] if replayed else []
        )
    traced = [outcome.span for outcome in outcomes if outcome.span is not None and outcome.span.is_recording()]
    if not traced:
        return None
    batch = tracer.begin("ingest batch", "consumer", sampled=True, attributes={"geo_assets.records": len(outcomes)})
    header = tracer.header(batch)
    for span in traced:
        tracer.link(span, header)
    return batch


def _end_spans(outcomes: Sequence[Outcome], batch: tracing.Span) -> None:
    for outcome in outcomes:
        span, headers = outcome.span, outcome.record.headers
        if span is None:
            continue
        if event_id := _event_id(outcome):
            span.set_attribute("geo_assets.event_id", event_id)
        span.set_attribute("geo_assets.source", headers.get(topics.HEADER_SOURCE, "")[:MAX_SOURCE])
        became = [*sorted(outcome.counts), *(["dead letter"] if outcome.letters else [])]
        # Nothing yet: the batch is done again.
        span.set_attribute("geo_assets.outcome", ", ".join(became) or "not yet")
        span.end()
    batch.end()


def _event_id(outcome: Outcome) -> str:
    return outcome.record.headers.get(topics.HEADER_EVENT_ID, "")[:MAX_PART_ID]


def is_heavy(record: Record) -> bool:
    """Whether a raw record may take long to work off: a large body, here or in the inbox."""
    return len(record.value or b"") > HEAVY_BODY or topics.HEADER_POINTER in record.headers


def _refusal(failed: TaskFailed) -> Refused:
    if failed.reason == "timeout":
        return Refused("timeout", explanation=failed.explanation)
    if failed.reason == "killed":
        return Refused("worker_died", explanation=failed.explanation)
    return Refused("internal", explanation=failed.explanation)


def _chunks(items: list[BodyTask], size: int) -> Iterator[list[BodyTask]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _hash(body: bytes) -> str:
    import hashlib

    return hashlib.sha256(body).hexdigest()


def _unknown_source(name: str, sources: Mapping[str, object]) -> Refused:
    if not name:
        return Refused(
            "schema", "source", None, "the header, a member of the body, or the key before its colon",
            explanation=f"nothing says whose the record is, and there are {len(sources)} sources",
        )  # fmt: skip
    return Refused("schema", "source", name[:MAX_SOURCE], explanation="no such source is configured")


def _readable(record: Record) -> Record:
    """The record with key and headers that can be written again, into a dead letter or a replay."""
    key = None if record.key is None else readable(record.key)
    headers = readable_headers(record.headers)
    return record if key == record.key and headers == record.headers else record._replace(key=key, headers=headers)


def _moment(value: str | int | None) -> int:
    """Milliseconds since the epoch of a header or a timestamp; 0 where it is none: any text may stand there."""
    if isinstance(value, str):
        value = int(value) if value.isascii() and value.isdigit() and len(value) <= 13 else 0
    return value if value is not None and 0 < value <= LAST_MOMENT_MS else 0


def run(settings: Settings, *, once: bool = False) -> None:
    """Run ingest until SIGTERM or SIGINT; with `once`, until the log is worked off.

    Raises:
        ProbeFailed: PROJ answers differently from what it should.
        LibrariesDiffer: A native library is another than the locked one, and `library_check` is `refuse`.
        RecordsLost: Retention took records unread, and `offset_out_of_range` is `stop`.
    """
    from geo_assets.services import native
    from geo_assets.services.fence_keeper import FenceKeeper
    from geo_assets.services.metrics_port import serve_metrics
    from geo_assets.services.pipeline_metrics import PipelineMetrics
    from geo_assets.stack import Stack

    native.check(settings)
    # What is heavy takes the interpreter beside what is light: for a millisecond at a time, not for Python's five.
    sys.setswitchinterval(0.001)
    PROCESS.on_signals(settings.drain_s)
    ready = Readiness("it starts")
    with Stack(settings) as stack:
        follow_layers(stack.ensure())
        follow_fence_layers(stack)
        ingest = Ingest(stack)
        PROCESS.when_late(ingest.give_up)
        housekeeper = Housekeeper(lambda: Stack(settings))
        keeper = FenceKeeper(lambda: Stack(settings))
        metrics = None
        pipeline = PipelineMetrics(lambda: Stack(settings))
        tracing.start(settings, "ingest")
        try:
            if once:
                while not PROCESS.asked and ingest.run_once(timeout_s=2.0):
                    pass
                return
            metrics = serve_metrics(REGISTRY, settings.host, settings.ingest_port, ready)
            if metrics is not None:
                REGISTRY.register(pipeline)
                pipeline.start()
            housekeeper.start()
            keeper.start()
            log.info("ingest is up", workers=settings.ingest_workers, host=socket.gethostname(), pid=os.getpid())
            ingest.run(PROCESS.stop, ready)
        finally:
            # First of all: whoever takes over waits for nothing else.
            ingest.close()
            for thread in (housekeeper, keeper, pipeline):
                if thread.is_alive():
                    thread.stop()
            if metrics is not None:
                metrics()
            tracing.stop()
            log.info("ingest stopped")
