"""What a ledger promises. Adapters keep it; the contract suite in geo_assets_tests shows that they do.

A mark is a value of one counter. A tile is dirty while its live or its backfill mark is above the mark it was built
for. A forced mark rebuilds although the work key matches. Leases save double work and guard nothing: every change of
what a tile *is* goes through an update conditional on the revision as read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

Duty = Literal["purge", "purge_again", "announce", "catalog"]
"""What a commit owes. `purge_again`: caches forget the tile once more when the row is so old that nothing fetched
before the commit can still come in; whoever asks `owed` for it names that age."""

MarkKind = Literal["live", "backfill"]
ManifestState = Literal["writing", "refused", "marked", "done", "cancelled"]
BatchState = Literal["queued", "running", "ended"]


class LedgerError(Exception):
    """The ledger could not do what was asked."""


class LedgerUnavailable(LedgerError):
    """Not now (disk full, server away, locked too long); try again later. Nothing of the transaction stayed."""


class UnknownManifest(LedgerError):
    """No manifest of that id."""


class UnknownBatch(LedgerError):
    """No batch of that id."""


@dataclass(frozen=True, slots=True)
class TileState:
    """A tile's row. A tile nobody ever wanted reads as revision 0, nothing built, not dirty."""

    key: str
    revision: int = 0
    work_key: str | None = None
    content_hash: str | None = None
    """sha256 hex of the uncompressed bytes; None before the first build, after an integrity fault and when empty."""
    bytes: int = 0
    """Uncompressed size; 0 when empty or never built."""
    empty: bool = True
    """No object: never built, or emptied by the current revision."""
    built_at_ms: int = 0
    data_time_ms: int = 0
    wanted_live: int = 0
    wanted_backfill: int = 0
    forced: int = 0
    """The newest mark that forces: forced while it is above `built`."""
    built: int = 0
    """The mark that the current state answers."""
    dirty_since_ms: int = 0
    attempts: int = 0
    given_up: int = 0
    """The mark at which its builds had failed too often: costs nothing until a newer mark."""
    error: str | None = None
    """Why it was not published when last tried."""
    lease: str | None = None
    lease_until_ms: int = 0
    manifest: str | None = None
    """The manifest whose backfill mark stands."""

    @property
    def wanted(self) -> int:
        """The newest mark, of either kind."""
        return max(self.wanted_live, self.wanted_backfill)

    @property
    def dirty(self) -> bool:
        """Whether somebody wants it looked at since it was built."""
        return self.wanted > self.built

    @property
    def object_name(self) -> str | None:
        """Name of its object without extension or prefix: see `object_name`; None when there is none."""
        if self.content_hash is None or self.empty:
            return None
        return object_name(self.key, self.revision, self.content_hash)


def object_name(key: str, revision: int, content_hash: str) -> str:
    """The immutable name `z/x/y/<revision>-<hash>` of a tile's object (first 16 hex digits of the hash)."""
    zoom, _, quadkey = key.partition(":")
    x = y = 0
    for digit in quadkey:
        x, y = x << 1 | int(digit) & 1, y << 1 | int(digit) >> 1
    return f"{zoom}/{x}/{y}/{revision}-{content_hash[:16]}"


class Hint(NamedTuple):
    """A record of `[tiles]`: at `offset`, somebody wants `key` looked at."""

    offset: int
    key: str
    force: bool = False


@dataclass(frozen=True, slots=True)
class Settle:
    """Nothing changed for clients: `built` becomes `wanted` as read, the work key is `work_key`."""

    key: str
    revision: int
    """As read when the tile was taken."""
    wanted: int
    """As read when the tile was taken."""
    work_key: str
    data_time_ms: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    """A new revision (as read + 1). `content_hash` None empties the tile."""

    key: str
    revision: int
    """As read when the tile was taken; the commit makes it one more."""
    wanted: int
    """As read when the tile was taken."""
    work_key: str
    content_hash: str | None
    bytes: int
    data_time_ms: int
    outcome: str
    duties: tuple[Duty, ...] = ("announce", "catalog")
    details: str = "{}"
    """JSON for whoever pays the duties: milliseconds, features, image digest."""


@dataclass(frozen=True, slots=True)
class Owed:
    """An outbox row: this duty of this commit is not paid yet."""

    id: int
    duty: Duty
    key: str
    revision: int
    content_hash: str | None
    work_key: str
    bytes: int
    outcome: str
    built_at_ms: int
    data_time_ms: int
    details: str


@dataclass(frozen=True, slots=True)
class Failure:
    """A build that failed by the tile's own fault; it is charged one attempt."""

    key: str
    wanted: int
    """As read when the tile was taken."""
    error: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Tiles leased together for one run."""

    id: str
    keys: tuple[str, ...]
    attempt: int
    """1 for the first try; halves of a lost batch carry one more."""
    kind: MarkKind
    state: BatchState
    created_ms: int
    lease_until_ms: int
    manifest: str | None = None
    run_id: str | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The tiles that a backfill, an import or a very wide edit will touch."""

    id: str
    title: str
    kind: str
    """`backfill`, `import`, `wide` or `repair`."""
    state: ManifestState
    created_ms: int
    tiles: int
    mark: int
    """The counter value of its marks; 0 before they are raised."""
    parameters: str
    """JSON: region, zooms, who asked."""
    problem: str | None = None


class Progress(NamedTuple):
    """How far a manifest got: tiles in all, answered (built for its mark or a newer one), given up."""

    tiles: int
    done: int
    failed: int


class Lag(NamedTuple):
    """What is dirty at one zoom below one quadkey prefix."""

    zoom: int
    prefix: str
    tiles: int
    oldest_ms: int


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """Totals for status and metrics."""

    tiles: int
    published: int
    """Tiles that have an object now."""
    dirty_live: int
    dirty_backfill: int
    given_up: int
    leased: int
    owed: Mapping[str, int]
    oldest_dirty_ms: int
    """Since when the longest-waiting tile is dirty; 0 when none is."""
    by_zoom: Mapping[int, int]
    """Published tiles by zoom."""
    bytes: int
    revision_sum: int
    """Grows with every commit of any tile: a cheap sign that something changed."""


@runtime_checkable
class Ledger(Protocol):
    """What exists and what is wanted, per tile."""

    # -- reading -----------------------------------------------------------------------------------------------------
    def read(self, keys: Sequence[str]) -> dict[str, TileState]:
        """Rows of these tiles; every key asked for is in the answer."""
        ...

    def scan(
        self, *, zooms: Sequence[int] | None = None, prefix: str | None = None, published: bool = True
    ) -> Iterator[TileState]:
        """Rows in key order, as text, in pieces; `prefix` is a quadkey's. `published`: only those with an object."""
        ...

    def dirty(
        self, limit: int, *, kind: MarkKind | None = None, min_age_ms: int = 0, unleased: bool = True
    ) -> list[TileState]:
        """Dirty tiles in order of work: live before backfill, then since when they are dirty, then key.

        Of a backfill the deepest zooms come first: a low zoom holds everything, and built last it is built once, with
        whatever was edited meanwhile.
        Leaves out tiles given up at their newest mark and, with `unleased`, those under a lease that has not expired.
        `kind='live'`: only those with a live mark above built; `'backfill'`: only those without one.
        """
        ...

    def counts(self) -> LedgerCounts:
        """Totals. A tile given up at its newest mark counts as given up, not as dirty."""
        ...

    def lag(self, prefix_length: int = 4) -> list[Lag]:
        """What is dirty, by zoom and quadkey prefix."""
        ...

    # -- marking -----------------------------------------------------------------------------------------------------
    def positions(self, topic_id: str) -> dict[int, int]:
        """Next offset of each partition that was ever marked from; an absent one starts at the oldest record."""
        ...

    def mark_from_log(self, topic_id: str, partition: int, hints: Sequence[Hint], next_offset: int) -> int:
        """In one transaction: raise the live marks of the hints at or above the position, move it to `next_offset`.

        Hints below the position change nothing, nor does a `next_offset` at or below it. A hint whose key names no tile
        never crashes; validating keys is the caller's. Returns the hints that counted.
        """
        ...

    def reset_position(self, topic_id: str, partition: int, next_offset: int) -> None:
        """Set a position outright (retention took the records; the caller requests a repair of what they named)."""
        ...

    def mark(self, keys: Sequence[str], *, kind: MarkKind = "live", force: bool = False) -> int:
        """Raise marks to one new counter value, which is returned. Attempts and given_up start anew."""
        ...

    def clear(self, keys: Sequence[str]) -> None:
        """After an integrity fault: forget work key and content hash (the revision stays) and mark the tiles live.

        A settle of what was read before it no longer holds: it would bring the work key back, and the damage with it.
        """
        ...

    # -- building ----------------------------------------------------------------------------------------------------
    def take(self, keys: Sequence[str], owner: str, ttl_s: float) -> dict[str, TileState]:
        """Lease those that are free, expired or already this owner's, and read them in the same transaction."""
        ...

    def renew(self, owner: str, ttl_s: float) -> int:
        """Extend every lease of this owner; how many."""
        ...

    def free(self, owner: str, keys: Sequence[str] | None = None) -> None:
        """Give up this owner's leases, of these tiles or of all."""
        ...

    def settle(self, settles: Sequence[Settle]) -> set[str]:
        """Each conditional on the revision as read; keys that held. A lease on it ends. Attempts start anew.

        `built` never sinks: where a newer mark was settled meanwhile, this one holds and changes nothing but the lease.
        """
        ...

    def commit(self, commits: Sequence[Commit]) -> dict[str, list[Owed]]:
        """Each conditional on the revision as read, with one outbox row a duty; only keys that held are in the answer.

        One transaction for all; one that lost its race costs the others nothing. A lease on the tile ends. One whose
        mark as read is below what was settled meanwhile at the same revision does not hold either: there and back again
        (content A, B, A), it would show B after A was found unchanged.
        """
        ...

    def fail(self, failures: Sequence[Failure], *, max_attempts: int) -> set[str]:
        """Charge one attempt each, keep the error, end the lease; the keys that are given up with this one.

        Not charged: a build that began before a newer mark (which started the attempts anew), and one whose mark
        somebody else's build has answered.
        """
        ...

    # -- outbox ------------------------------------------------------------------------------------------------------
    def owed(self, duty: Duty, limit: int = 1_000, *, min_age_ms: int = 0) -> list[Owed]:
        """Unpaid rows, oldest first, due now and at least so old (the committer pays its own at once)."""
        ...

    def pay(self, ids: Sequence[int]) -> None:
        """Delete paid rows."""
        ...

    # -- batches -----------------------------------------------------------------------------------------------------
    def open_batches(
        self,
        groups: Sequence[Sequence[str]],
        *,
        kind: MarkKind,
        ttl_s: float,
        attempt: int = 1,
        manifest: str | None = None,
    ) -> list[Batch]:
        """Lease each group under a batch of its own, in one transaction; the batch's id is the owner of its leases.

        A tile leased elsewhere is left out of its group; a group left without tiles makes no batch.
        """
        ...

    def batch(self, batch_id: str) -> Batch:
        """One batch. Raises UnknownBatch."""
        ...

    def batches(self, *, open_only: bool = True) -> list[Batch]:
        """Batches, oldest first."""
        ...

    def start_batch(self, batch_id: str, run_id: str, ttl_s: float) -> Batch:
        """Its run began: state running, leases renewed; one that was ended stays so. Raises UnknownBatch."""
        ...

    def renew_batches(self, batch_ids: Sequence[str], ttl_s: float) -> None:
        """Extend the leases of the tiles still held by these batches."""
        ...

    def end_batch(self, batch_id: str) -> None:
        """Its run ended or is gone: its leases are free, its state ended."""
        ...

    def forget_batches(self, ended_before_ms: int) -> int:
        """Delete batches that ended before this time; how many."""
        ...

    # -- manifests ---------------------------------------------------------------------------------------------------
    def write_manifest(
        self,
        manifest_id: str,
        title: str,
        kind: str,
        keys: Sequence[str],
        *,
        parameters: str = "{}",
        cap: int | None = None,
    ) -> Manifest:
        """Write the tiles, without marking them: one transaction.

        Writing the same id again adds tiles to it while it is `writing`, and changes nothing later. Over the cap it is
        kept as `refused` with the number and no tiles.
        """
        ...

    def refuse_manifest(
        self, manifest_id: str, title: str, kind: str, problem: str, *, parameters: str = "{}"
    ) -> Manifest:
        """Keep it as `refused` with the problem and no tiles. One that exists is left as it is and returned."""
        ...

    def mark_manifest(self, manifest_id: str, *, force: bool = False) -> Manifest:
        """Raise the backfill marks of all its tiles to one new value. Again: no change. Raises UnknownManifest."""
        ...

    def forget_manifests(self, created_before_ms: int) -> int:
        """Delete manifests written before this time of which nothing is to come: done, cancelled, refused; how many."""
        ...

    def manifest(self, manifest_id: str) -> Manifest:
        """One manifest. Raises UnknownManifest."""
        ...

    def manifests(self, limit: int = 100) -> list[Manifest]:
        """Newest first. One whose tiles are all answered or given up reads as `done`."""
        ...

    def manifest_keys(self, manifest_id: str) -> list[str]:
        """Its tiles, in key order. Raises UnknownManifest."""
        ...

    def progress(self, manifest_id: str) -> Progress:
        """How far it got. Raises UnknownManifest."""
        ...

    def cancel_manifest(self, manifest_id: str) -> int:
        """Take back its own backfill marks and no other; how many tiles are no longer wanted.

        Where another manifest, or a backfill mark outside any, wants the tile as well, that mark stands again. Raises
        UnknownManifest.
        """
        ...

    # -- small durable values -----------------------------------------------------------------------------------------
    def get_value(self, name: str) -> str | None:
        """A named value (SSE epoch, recipe last seen)."""
        ...

    def set_value(self, name: str, value: str | None, *, expect: str | Literal["*"] | None = "*") -> bool:
        """Set (None deletes) if the present value is `expect` (None: absent, `*`: whatever); whether it was."""
        ...

    def close(self) -> None:
        """Release files and connections."""
        ...
