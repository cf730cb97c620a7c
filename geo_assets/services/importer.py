"""Bulk import of a file: ingest's own validation and transaction, with the tiles collected in a manifest."""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from geo_assets.events.collection import CollectionInfo
from geo_assets.events.dead_letter import DeadLetter, Refused
from geo_assets.services import ingest_worker, outbox
from geo_assets.services.dead_letters import now_ms, write_dead_letters
from geo_assets.services.dirty import DirtyPlan
from geo_assets.services.fence_features import send_fences
from geo_assets.services.ingest_worker import Circumstances, FeatureResult, FeatureTask
from geo_assets.services.pool import TaskFailed, WorkerPool
from geo_assets.services.reading.reading import Reading, ReadingError, Unfit
from geo_assets.services.valid_edits import edit_of
from resources.feature_store.protocol import Change, Edit, OutboxRow
from resources.guard.protocol import GuardUnavailable, Lease
from resources.ledger.protocol import Manifest

if TYPE_CHECKING:
    from geo_assets.events.sources import Source
    from geo_assets.stack import Stack

log = structlog.get_logger()

_REGISTERED = re.compile(r"[A-Za-z][A-Za-z0-9_]*:[A-Za-z0-9_.]+")
"""A CRS by its authority's code; a file may also describe one in full, which nothing vouches for."""

CHUNK = 250
AHEAD = 8
"""Chunks under way for each worker: a transaction's worth, so that workers go on while one is stored."""

EDITS_A_TRANSACTION = 2_500
LEASE_S = 120.0


@dataclass(slots=True)
class Imported:
    """What an import did so far."""

    read: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    manifest: Manifest | None = None

    @property
    def changed(self) -> int:
        """Features that are new or differ now."""
        return self.outcomes.get("applied", 0)


def import_reading(
    stack: Stack,
    reading: Reading,
    source: Source,
    *,
    crs: str | None = None,
    progress: Callable[[Imported], None] = lambda _: None,
    stop: threading.Event | None = None,
) -> Imported:
    """Import a file that was opened; its changed tiles are marked by one manifest at the end.

    Args:
        stack: The ports.
        reading: The file.
        source: Whose features they become.
        crs: CRS to take instead of the file's, such as `EPSG:3067`.
        progress: Called after each transaction.
        stop: Ends the import after the transaction under way; what was stored so far is marked all the same.

    Raises:
        ReadingError: The file's CRS has no registered code, or the file turns out to be damaged; what was stored before
            is marked.
    """
    if crs is None and reading.crs is not None and not _REGISTERED.fullmatch(reading.crs):
        raise ReadingError(
            f"{reading.path}: its CRS has no registered code; say which it is with --crs, such as EPSG:3067"
        )
    manifest_id = f"import-{uuid.uuid4().hex[:12]}"
    settings = stack.settings
    done = Imported()
    at = Circumstances(
        source=source,
        event_id=manifest_id,
        received_ms=now_ms(),
        header_crs=crs or reading.crs,
        content_type="application/geo+json",
        replay=False,
    )
    info = CollectionInfo("collection", 0)
    pool = WorkerPool(
        settings.ingest_workers,
        settings.task_timeout_s,
        ingest_worker.start,
        (settings,),
        ahead=AHEAD,
    )
    plan = DirtyPlan(stack.layers, settings.edit_cap, manifest=manifest_id)
    lease = _hold(stack, manifest_id, None)

    def tasks() -> Iterator[list[FeatureTask]]:
        chunk: list[FeatureTask] = []
        for index, raw in enumerate(reading):
            if stop is not None and stop.is_set():
                break
            done.read += 1
            if isinstance(raw, Unfit):
                results.append(FeatureResult(index, raw.raw, None, raw.fault))
                if len(results) >= EDITS_A_TRANSACTION:
                    store()
                continue
            chunk.append(FeatureTask(at, info, index, raw))
            if len(chunk) >= CHUNK:
                yield chunk
                chunk = []
        if chunk:
            yield chunk

    edits: list[Edit] = []
    results: list[FeatureResult] = []
    raws: dict[str, tuple[int, bytes]] = {}
    unchanged: set[str] = set()

    def planned(changes: Sequence[Change]) -> list[OutboxRow]:
        # What has no version of its own comes with the receive stamp, newer at each import: its row takes that, so that
        # an event from before stays stale, but no tile differs.
        same = [_same(change) for change in changes]
        unchanged.clear()
        unchanged.update(change.edit.event_key for change, is_same in zip(changes, same, strict=True) if is_same)
        return plan([change for change, is_same in zip(changes, same, strict=True) if not is_same])

    def taken_for_dead() -> None:
        # Its lease was lost (guard away or flushed) and a sweep marked what was collected so far. What was stored since
        # is not answered by those marks, and tiles collected before are not collected again: all of them are marked
        # anew, and collecting starts over.
        nonlocal manifest_id, plan
        log.warning("import was taken for dead; its tiles are marked again", manifest=manifest_id)
        again = f"{manifest_id}-again"
        stack.ledger.write_manifest(again, reading.path.name, "import", sorted(plan.known))
        done.manifest = stack.ledger.mark_manifest(again)
        outbox.finish_manifest(stack, manifest_id, reading.path.name, "import")
        manifest_id = f"import-{uuid.uuid4().hex[:12]}"
        plan = DirtyPlan(stack.layers, settings.edit_cap, manifest=manifest_id)

    def store() -> None:
        nonlocal lease
        letters = [
            _letter(at, one.index, one.raw, one.refused, one.feature_id) for one in results if one.refused is not None
        ]
        if edits:
            for applied in stack.features.apply(edits, planned, now_ms=now_ms()):
                same = applied.outcome == "applied" and applied.edit.event_key in unchanged
                outcome = "unchanged" if same else applied.outcome
                done.outcomes[outcome] = done.outcomes.get(outcome, 0) + 1
                if applied.outcome == "version_conflict":
                    index, raw = raws[applied.edit.event_key]
                    twice = applied.edit.version == at.received_ms
                    fault = Refused(
                        "version_conflict", "version", str(applied.edit.version),
                        f"above {applied.current_version}, or the same content",
                        "another feature of this import has the same id" if twice else "",
                    )  # fmt: skip
                    letters.append(_letter(at, index, raw, fault, applied.edit.feature_id))
            plan.known |= plan.fresh
            send_fences(stack)
            if outbox.manifest_or_none(stack, manifest_id) is not None:
                taken_for_dead()
        write_dead_letters(stack, letters)
        for letter in letters:
            done.refused[letter.reason] = done.refused.get(letter.reason, 0) + 1
        edits.clear()
        results.clear()
        raws.clear()
        lease = _hold(stack, manifest_id, lease)
        progress(done)

    try:
        for finished in pool.map(ingest_worker.validate_features, tasks()):
            result = finished.result
            if isinstance(result, TaskFailed):
                reason = {"timeout": "timeout", "killed": "worker_died"}.get(result.reason, "internal")
                fault = Refused(reason, explanation=result.explanation)  # pyright: ignore[reportArgumentType]
                result = FeatureResult(finished.task.index, finished.task.raw, None, fault)
            if result.edit is not None:
                edit = edit_of(result.edit)
                raws[edit.event_key] = (result.index, finished.task.raw)
                edits.append(edit)
            else:
                results.append(result)
            if len(edits) + len(results) >= EDITS_A_TRANSACTION:
                store()
        if edits or results:
            store()
    finally:
        pool.close()
        done.left_out = dict(reading.left_out)
        done.manifest = outbox.finish_manifest(stack, manifest_id, reading.path.name, "import") or done.manifest
        outbox.plan_wide(stack)
        if lease is not None:
            outbox.let_go(stack, lease)
        progress(done)
    return done


def _hold(stack: Stack, manifest_id: str, lease: Lease | None) -> Lease | None:
    """The lease that keeps sweeps away, renewed or taken again; while the guard is away the import goes on without."""
    name = outbox.IMPORT_LEASE + manifest_id
    try:
        held = stack.guard.renew(lease, LEASE_S) if lease is not None and lease.name == name else None
        return held or stack.guard.acquire(name, manifest_id, LEASE_S)
    except GuardUnavailable as fault:
        log.warning("import goes on without its lease", manifest=manifest_id, error=str(fault))
        return lease


def _same(change: Change) -> bool:
    """Whether the feature shows as it did: same content, same zooms."""
    before, after = change.before, change.after
    if before is None or after is None:
        return False
    return before.digest == after.digest and (before.min_zoom, before.max_zoom) == (after.min_zoom, after.max_zoom)


def _letter(at: Circumstances, index: int, raw: bytes, refused: Refused, feature_id: str | None) -> DeadLetter:
    from geo_assets.events import topics

    headers = {
        topics.HEADER_SOURCE: at.source.name,
        topics.HEADER_EVENT_ID: at.event_id,
        topics.HEADER_KIND: "features",
        topics.HEADER_RECEIVED_MS: str(at.received_ms),
        topics.HEADER_CONTENT_TYPE: "application/geo+json",
    }
    if at.header_crs:
        headers[topics.HEADER_CRS] = at.header_crs
    return DeadLetter.refused(
        refused,
        stage="store" if refused.reason == "version_conflict" else "validate",
        source=at.source.name,
        at_ms=now_ms(),
        event_id=at.event_id,
        feature_id=feature_id,
        index=index,
        payload=raw,
        headers=headers,
    )
