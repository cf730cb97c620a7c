"""Build tiles: take, digest, skip or encode, commit, announce. The Dagster asset and every other builder call this.

The steps and their order are the build protocol of docs/architecture.md: features are read after the mark, objects are
put before the ledger names them, each tile is committed by itself on the revision as read, and the outbox pays for
whoever dies in between.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import structlog

from geo_assets.events.dead_letter import DeadLetter
from geo_assets.services import announce, build_worker, encoding, engines, purging, throughput, tracing
from geo_assets.services.build_worker import BuildTask, Built, Step
from geo_assets.services.dead_letters import now_ms, write_dead_letters
from geo_assets.services.edit_stages import now_us
from geo_assets.services.encoding import Shown
from geo_assets.services.following import Follower
from geo_assets.services.pool import TaskFailed, WorkerPool
from geo_assets.services.recipe import current_recipe
from geo_assets.tiles import workkey
from geo_assets.tiles.tile import Tile
from resources.ledger.protocol import Commit, Failure, Settle, TileState

if TYPE_CHECKING:
    from geo_assets.services.edit_stages import StageHistograms
    from geo_assets.stack import Stack
    from geo_assets.tiles.encode.cache import EncodedCache

log = structlog.get_logger()

Outcome = Literal["built", "unchanged", "skipped", "emptied", "failed"]

CHUNK_TILES = 128
"""Most tiles of a chunk: the encoder's fixed cost of half a millisecond a call vanishes, and commits come often."""

CHUNK_VERTICES = 150_000
"""Most vertices of a chunk, a second of encoding: both workers end together and memory stays small."""

FOLLOWED_SHARE = 8
"""Part of the bytes for encoded features that may be taken, besides, by what the tiles show: 40 bytes a feature, 300 of
which are kept encoded."""

LOST_RACES = 3
"""How often a tile that another builder committed meanwhile is built again here before it is left to the next mark."""


@dataclass(frozen=True, slots=True)
class TileResult:
    """What became of one tile: what Dagster shows and counts."""

    key: str
    outcome: Outcome
    revision: int
    content_hash: str | None
    work_key: str
    bytes: int
    ms: float
    features: int
    vertices: int
    data_time_ms: int
    left_out: tuple[tuple[str, str, str], ...] = ()
    error: str | None = None
    catalog_owed: tuple[int, ...] = ()
    """Outbox rows to pay once the materialization is stored."""


def weigh(stack: Stack, keys: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """What a build of these tiles would find: work key and vertices of each, from one query."""
    digests = stack.features.digests(build_worker.boxes_of(keys, stack.layers))
    recipe = current_recipe(stack.layers, engines.version(stack))
    sources = workkey.source_digests(len(keys), digests.pair_tile, digests.pair_digest)
    work_keys = [workkey.work_key(key, digest, recipe) for key, digest in zip(keys, sources, strict=True)]
    vertices = np.bincount(digests.pair_tile, weights=digests.pair_vertices, minlength=len(keys)).astype(np.int64)
    return work_keys, vertices


@dataclass(slots=True)
class Prepared:
    """Tiles that were taken: those that are done already, and what is to be encoded."""

    states: dict[str, TileState]
    tasks: list[BuildTask]
    settled: list[TileResult]
    """Their work key stood: nothing to encode."""
    lost: list[str]
    """Another builder committed them meanwhile."""


class TileBuilder:
    """Builds tiles in worker processes and commits them one by one.

    Args:
        stack: The ports.
        owner: Who holds the leases: a batch's id, or any name of the caller's own.
        step: Called before each step of the protocol with its name and the tile's key; tests crash or pause there.
            The steps inside a worker process are told only `inline`.
        inline: Build in this process. A tile that kills its builder kills the caller then.
        details_of: Adds to what the commit of a tile says of its making: (key, details) -> details, for its JSON.
        stages: Histograms that each announcement is noted in.
        lease_s: How long a tile that was taken is left to this builder; default: the settings'.
        cache: Encoded features that this process keeps: of a tile that it has built, only what changed is looked up,
            read and encoded again, unless it is forced. Only `inline`.
        traces: The spans of the tiles; whoever has a tile's result tells them of it.
    """

    def __init__(
        self,
        stack: Stack,
        owner: str,
        *,
        step: Step | None = None,
        inline: bool = False,
        details_of: Callable[[str, dict[str, Any]], dict[str, Any]] | None = None,
        stages: StageHistograms | None = None,
        lease_s: float | None = None,
        cache: EncodedCache | None = None,
        traces: tracing.TileTraces | None = None,
    ) -> None:
        self.stack, self.owner, self.cache = stack, owner, cache
        self._traces = traces
        self._follower = None if cache is None else Follower(stack, cache.max_bytes // FOLLOWED_SHARE)
        self._step = step or build_worker.no_step
        self._inline = inline
        self._details_of, self._stages = details_of or (lambda _key, details: details), stages
        settings = stack.settings
        self._lease_s = settings.lease_s if lease_s is None else lease_s
        fitting = throughput.workers(
            stack.ledger, settings.build_workers, settings.runs_in_flight, own=settings.run_pods
        )
        if fitting < settings.build_workers:
            log.warning(
                "fewer workers: memory has no room for more", workers=fitting, of=settings.build_workers,
                worker_megabytes=throughput.worker_megabytes(stack.ledger),
            )  # fmt: skip
        self._pool = WorkerPool(fitting, settings.build_timeout_s, build_worker.start, (settings, stack.scoped))
        self.encoded = 0
        """Tiles that went to the encoder."""
        self.forced = 0
        """Those of them that went there whatever their work key said."""
        self.purged = self.purges_owed = 0
        """Tiles that caches forgot before their announcement, and those that they will later."""

    def __enter__(self) -> TileBuilder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()
        if self.purged or self.purges_owed:
            log.info("caches purged", tiles=self.purged, owed=self.purges_owed, owner=self.owner)
            self.purged = self.purges_owed = 0

    def build(self, keys: Sequence[str], *, force: bool = False) -> Iterator[TileResult]:
        """Build these tiles; yield each as it is committed, settled or failed. The order is the builder's own.

        Args:
            keys: Partition keys. One that names no tile fails alone.
            force: Encode although the work key matches, and see that the object is there. What is skipped is not asked
                for: a request a tile would make a backfill over an object store as slow as a build.
        """
        pending: list[str] = []
        for key in dict.fromkeys(keys):
            try:
                Tile.from_key(key)
                pending.append(key)
            except ValueError as fault:
                yield TileResult(key, "failed", 0, None, "", 0, 0.0, 0, 0, 0, error=str(fault))
        # Quadkey order keeps neighbours in one chunk: they share features, which are then fetched and parsed once.
        pending.sort(key=lambda key: key.partition(":")[2])
        for last in range(LOST_RACES - 1, -1, -1):
            if not pending:
                return
            lost: list[str] = []
            yield from self._round(pending, force, lost)
            states = self.stack.ledger.read(lost)
            pending = [key for key in lost if states[key].dirty and last]
            for key in lost:
                if key not in pending:
                    # Somebody newer committed it: what stands answers the mark, or the mark goes on standing.
                    yield _as_it_stands(states[key])

    def _round(self, keys: list[str], force: bool, lost: list[str]) -> Iterator[TileResult]:
        prepared = self.prepare(keys, force=force)
        yield from prepared.settled
        for tasks, results in self._encode(prepared.tasks):
            yield from self.finish(prepared, tasks, results)
        lost.extend(prepared.lost)

    def prepare(self, keys: Sequence[str], *, force: bool = False, free_only: bool = False) -> Prepared:
        """Take tiles, weigh them, and settle those whose work key stands.

        Args:
            keys: Partition keys.
            force: Encode although the work key matches.
            free_only: Leave out tiles that somebody else has leased, and those that nobody wants looked at. A lease
                saves double work and guards nothing: a tile asked for by name is built all the same.
        """
        ledger = self.stack.ledger
        began_ns = 0 if self._traces is None else tracing.now_ns()
        for key in keys:
            self._step("take", key)
        states = ledger.take(keys, self.owner, self._lease_s)
        if free_only:
            idle = {key for key, state in states.items() if not state.dirty or state.given_up >= state.wanted}
            if idle:
                ledger.free(self.owner, sorted(idle))
                if self._traces is not None:
                    self._traces.forgotten(idle)
            keys = [key for key in keys if key in states and key not in idle]
        else:
            leased_elsewhere = [key for key in keys if key not in states]
            if leased_elsewhere:
                states |= ledger.read(leased_elsewhere)
        prepared = Prepared(states, [], [], [])
        if not keys:
            return prepared
        if self._traces is not None:
            self._traces.taken(keys, began_ns)
        for key in keys:
            self._step("read digests", key)
        started = time.perf_counter()
        all_forced = {key for key in keys if force or states[key].forced > states[key].built}
        work_keys, shown = self._look(keys, all_forced)
        share_ms = (time.perf_counter() - started) * 1000 / len(keys)
        settles: list[Settle] = []
        for key, work_key, shows in zip(keys, work_keys, shown, strict=True):
            state = states[key]
            forced = key in all_forced
            self.forced += forced
            if state.work_key == work_key and not forced:
                settles.append(Settle(key, state.revision, state.wanted, work_key))
            else:
                prepared.tasks.append(
                    BuildTask(
                        key, state.revision, state.work_key, state.content_hash, state.empty, shows.vertices,
                        shown=None if self.cache is None else shows, fresh=forced,
                    )
                )  # fmt: skip
        for settle in settles:
            self._step("settle", settle.key)
        held = ledger.settle(settles) if settles else set()
        for settle in settles:
            if settle.key in held:
                prepared.settled.append(_as_it_stands(states[settle.key], ms=share_ms))
            else:
                prepared.lost.append(settle.key)
        self.encoded += len(prepared.tasks)
        return prepared

    def _look(self, keys: Sequence[str], anew: Collection[str]) -> tuple[list[str], list[Shown]]:
        """Work keys of tiles, and what they show; those of `anew` are asked for whatever is known of them."""
        if self._follower is None:
            shown = encoding.shown_of(self.stack.features.digests(build_worker.boxes_of(keys, self.stack.layers)))
        else:
            shown = self._follower.shown(keys, anew)
        unknown = [number for number, each in enumerate(shown) if not each.source_digest]
        if unknown:
            some = [shown[number] for number in unknown]
            pair_tile = np.arange(len(some)).repeat([len(each.number) for each in some])
            found = workkey.source_digests(len(some), pair_tile, np.concatenate([each.digest for each in some]))
            shown = list(shown)
            for number, source in zip(unknown, found, strict=True):
                shown[number] = replace(shown[number], source_digest=source)
        recipe = current_recipe(self.stack.layers, engines.version(self.stack))
        return [workkey.work_key(key, each.source_digest, recipe) for key, each in zip(keys, shown, strict=True)], shown

    def _encode(self, tasks: list[BuildTask]) -> Iterator[tuple[Sequence[BuildTask], Sequence[Built | TaskFailed]]]:
        """Chunks of tasks with their results, as they come."""
        if self._inline:
            for chunk in chunks_of(tasks):
                yield chunk, build_worker.build_in(self.stack, chunk, self._step, cache=self.cache)
            return
        together: list[BuildTask] = []
        results: list[Built | TaskFailed] = []
        renewed = time.monotonic()
        for done in self._pool.map(build_worker.build, chunks_of(tasks)):
            together.append(done.task)
            results.append(done.result)
            if len(together) >= CHUNK_TILES or isinstance(done.result, TaskFailed):
                yield together, results
                together, results = [], []
            if time.monotonic() - renewed > self._lease_s / 3:
                self.stack.ledger.renew(self.owner, self._lease_s)
                renewed = time.monotonic()
        if together:
            yield together, results

    def finish(
        self, prepared: Prepared, tasks: Sequence[BuildTask], results: Sequence[Built | TaskFailed]
    ) -> Iterator[TileResult]:
        """Commit, settle or fail a chunk: one ledger transaction each, every tile conditional by itself."""
        ledger, settings, states, lost = self.stack.ledger, self.stack.settings, prepared.states, prepared.lost
        commits: dict[str, tuple[Commit, Built]] = {}
        settles: dict[str, tuple[Settle, Built]] = {}
        failures: dict[str, str] = {}
        for task, result in zip(tasks, results, strict=True):
            state = states[task.key]
            if isinstance(result, TaskFailed):
                failures[task.key] = f"{result.reason}: {result.explanation}"
            elif result.error is not None:
                failures[task.key] = result.error
            elif result.changed:
                outcome = "emptied" if result.content_hash is None else "built"
                details: dict[str, Any] = {"ms": round(result.ms, 2), "features": result.features}
                details = self._details_of(task.key, {**details, "image": settings.image_digest})
                if self._traces is not None:
                    details = self._traces.details(task.key, details)
                commits[task.key] = (
                    Commit(
                        key=task.key,
                        revision=state.revision,
                        wanted=state.wanted,
                        work_key=result.work_key,
                        content_hash=result.content_hash,
                        bytes=result.bytes,
                        data_time_ms=result.data_time_ms,
                        outcome=outcome,
                        duties=purging.duties(settings),
                        details=json.dumps(details, separators=(",", ":")),
                    ),
                    result,
                )
            else:
                settles[task.key] = (
                    Settle(task.key, state.revision, state.wanted, result.work_key, result.data_time_ms),
                    result,
                )
        if commits:
            yield from self._commit(commits, lost)
        if settles:
            for key in settles:
                self._step("settle", key)
            held = ledger.settle([settle for settle, _ in settles.values()])
            for key, (_, built) in settles.items():
                if key in held:
                    yield _result(key, "unchanged", states[key].revision, built)
                else:
                    lost.append(key)
        if failures:
            yield from self._fail(failures, states)

    def _commit(self, commits: dict[str, tuple[Commit, Built]], lost: list[str]) -> Iterator[TileResult]:
        for key in commits:
            self._step("commit", key)
        owed = self.stack.ledger.commit([commit for commit, _ in commits.values()])
        committed_us = now_us()
        if self._traces is not None:
            self._traces.committed(commits, owed)
        purges = [row for rows in owed.values() for row in rows if row.duty == "purge"]
        for row in purges:
            self._step("purge", row.key)
        forgotten = purging.purge(self.stack, purges)
        self.purged += len(forgotten)
        self.purges_owed += len(purges) - len(forgotten)
        for key in owed:
            self._step("announce", key)
        announcements = [row for rows in owed.values() for row in rows if row.duty == "announce"]
        announce.announce(self.stack, announcements, purged=forgotten, stages=self._stages, committed_us=committed_us)
        for key, (commit, built) in commits.items():
            if key not in owed:
                lost.append(key)
                continue
            catalog = tuple(row.id for row in owed[key] if row.duty == "catalog")
            outcome: Outcome = "emptied" if commit.content_hash is None else "built"
            yield _result(key, outcome, commit.revision + 1, built, catalog)

    def _fail(self, failures: dict[str, str], states: dict[str, TileState]) -> Iterator[TileResult]:
        limit = self.stack.settings.max_attempts
        # Written before the ledger gives a tile up: a crash in between writes the letter twice, under the same id.
        last = [key for key in failures if states[key].attempts + 1 >= limit and states[key].dirty]
        write_dead_letters(
            self.stack, [tile_dead_letter(k, failures[k], limit, states[k].wanted) for k in sorted(last)]
        )
        charges = [Failure(key, states[key].wanted, error) for key, error in failures.items()]
        given_up = self.stack.ledger.fail(charges, max_attempts=limit)
        for key, error in failures.items():
            log.warning("tile failed", tile=key, error=error, given_up=key in given_up)
            state = states[key]
            yield TileResult(
                key, "failed", state.revision, state.content_hash, state.work_key or "", state.bytes, 0.0, 0, 0,
                state.data_time_ms, error=error,
            )  # fmt: skip


def tile_dead_letter(key: str, error: str, attempts: int, wanted: int) -> DeadLetter:
    """The dead letter of a tile whose builds failed too often: it costs nothing more until it is wanted anew.

    Args:
        key: The tile.
        error: Why its last build failed.
        attempts: How many failed.
        wanted: The mark they were for: one letter a mark, however often it is written.
    """
    return DeadLetter.make(
        reason="build_failed",
        stage="build",
        explanation=error,
        source="",
        at_ms=now_ms(),
        attempts=attempts,
        payload=json.dumps({"tile": key, "mark": wanted}).encode(),
        headers={"tile": key},
    )


def chunks_of(tasks: Sequence[BuildTask], most_vertices: int = CHUNK_VERTICES) -> Iterator[list[BuildTask]]:
    """Cut into chunks of similar weight, in order; a task heavier than `most_vertices` is a chunk of its own."""
    chunk: list[BuildTask] = []
    weight = 0
    for task in tasks:
        if chunk and (len(chunk) >= CHUNK_TILES or weight + task.vertices > most_vertices):
            yield chunk
            chunk, weight = [], 0
        chunk.append(task)
        weight += task.vertices
    if chunk:
        yield chunk


def _result(key: str, outcome: Outcome, revision: int, built: Built, catalog: tuple[int, ...] = ()) -> TileResult:
    return TileResult(
        key=key,
        outcome=outcome,
        revision=revision,
        content_hash=built.content_hash,
        work_key=built.work_key,
        bytes=built.bytes,
        ms=built.ms,
        features=built.features,
        vertices=built.vertices,
        data_time_ms=built.data_time_ms,
        left_out=built.left_out,
        catalog_owed=catalog,
    )


def _as_it_stands(state: TileState, ms: float = 0.0) -> TileResult:
    return TileResult(
        key=state.key,
        outcome="skipped",
        revision=state.revision,
        content_hash=state.content_hash,
        work_key=state.work_key or "",
        bytes=state.bytes,
        ms=ms,
        features=0,
        vertices=0,
        data_time_ms=state.data_time_ms,
    )
