"""What a feature store promises. Adapters keep it; the contract suite in geo_assets_tests shows that they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Action = Literal["upsert", "delete"]
EditOutcome = Literal["applied", "duplicate", "stale", "version_conflict"]


class FeatureStoreError(Exception):
    """The feature store could not do what was asked."""


class FeatureStoreUnavailable(FeatureStoreError):
    """Not now (disk full, server away, locked too long); try again later. Nothing of the transaction stayed."""


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature as it is stored. Geometry and box are EPSG:4326 lon/lat degrees."""

    source: str
    feature_id: str
    """The id as JSON text with its type: `123` and `"123"` are two features."""
    layer: str
    version: int
    geometry: bytes | None
    """WKB (ISO, little endian, 2D), already split at the antimeridian; None is stored and shows in no tile."""
    bbox: tuple[float, float, float, float] | None
    """West, south, east, north in degrees; None without geometry."""
    properties: str
    """A JSON object, canonical (sorted keys, exact numbers)."""
    content_hash: str
    """Hex digest over layer, geometry and properties: same hash, same content."""
    digest: bytes
    """16 bytes over source, layer, feature id and content hash: what a tile's source digest is made of."""
    min_zoom: int
    max_zoom: int
    """Zooms at which it is visible, both included; min above max shows nowhere."""
    vertex_count: int
    event_time_ms: int
    """When the edit was received, milliseconds since the epoch, UTC: the tile's data time."""


@dataclass(frozen=True, slots=True)
class Edit:
    """An event to apply: `feature` for an upsert; a delete needs only its source, id and version (a tombstone)."""

    event_key: str
    """Idempotency key, hex."""
    event_id: str
    action: Action
    source: str
    feature_id: str
    version: int
    event_time_ms: int
    content_hash: str
    """The feature's content hash; of a delete, the constant `deleted`."""
    feature: Feature | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """What one applied edit did: `before` and `after` are None where there was, or is, no feature."""

    edit: Edit
    before: Feature | None
    after: Feature | None


@dataclass(frozen=True, slots=True)
class OutboxRow:
    """A hint owed to the log, written in the transaction of the edit that owes it.

    `kind` is `tiles` (key is a partition key, goes to the topic), `manifest` (key is a partition key, `group` names
    the manifest it is collected for), `wide` (`key` is `source:feature id`, `value` JSON with what is to be planned) or
    `fence` (`key` is `source:feature id`, `value` a fence event, goes to the topic of fences).
    """

    kind: Literal["tiles", "manifest", "wide", "fence"]
    key: str
    value: bytes
    headers: Mapping[str, str]
    group: str = ""
    id: int = 0
    """Given by the store; ascending in the order in which rows were committed."""


CHANGES_KEPT = 10_000
"""Changes that a store's log holds: a minute and a half at a hundred edits a second. Whoever asks less often asks for
the digests themselves, which costs him little then."""

Plan = Callable[[Sequence[Change]], Sequence[OutboxRow]]
"""Called inside the transaction with the changes in order: says which hints they owe. It does no I/O."""


@dataclass(frozen=True, slots=True)
class Applied:
    """How one edit ended; `current_version` is the version that stands after it."""

    edit: Edit
    outcome: EditOutcome
    current_version: int


@dataclass(frozen=True, slots=True)
class TileBox:
    """A question for one tile: which features are visible at `zoom` and meet this box (degrees, buffered, closed)."""

    key: str
    zoom: int
    west: float
    south: float
    east: float
    north: float


class Position(NamedTuple):
    """How far the store's log of changes went."""

    number: int
    """Ascends with every change; 0 before the first."""
    mark: int
    """Tells this store's history from any other: after a restore the same number has another one."""


@dataclass(frozen=True, slots=True)
class TileDigests:
    """Which features show in which tile, all read in one snapshot.

    `pair_tile[i]` is an index into the boxes asked for (ascending), `pair_digest[i]` the 16-byte feature digest as a
    row of uint8, `pair_number[i]` the store's own number of the feature, which `rows` takes, `pair_time_ms[i]` its
    `event_time_ms`. Within one tile the order is unspecified.
    """

    pair_tile: npt.NDArray[np.int64]
    pair_digest: npt.NDArray[np.uint8]
    pair_vertices: npt.NDArray[np.int64]
    pair_number: npt.NDArray[np.int64]
    pair_time_ms: npt.NDArray[np.int64]
    data_time_ms: npt.NDArray[np.int64]
    """Newest `event_time_ms` of the features of each box, 0 where there is none."""
    position: Position
    """Every change up to here is in it; of later ones, some may be."""


@dataclass(frozen=True, slots=True)
class TileFeatureRows:
    """The features of many tiles, each distinct feature once, and which tile shows which: one snapshot.

    `pair_tile[i]` (ascending, an index into the boxes asked for) shows the feature in row `pair_row[i]`.
    """

    source: Sequence[str]
    feature_id: Sequence[str]
    layer: Sequence[str]
    geometry: Sequence[bytes]
    """WKB, EPSG:4326 lon/lat."""
    properties: Sequence[str]
    digest: npt.NDArray[np.uint8]
    """(rows, 16)."""
    vertex_count: npt.NDArray[np.int64]
    event_time_ms: npt.NDArray[np.int64]
    pair_tile: npt.NDArray[np.int64]
    pair_row: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """Features that have a geometry, in no order."""

    source: Sequence[str]
    feature_id: Sequence[str]
    layer: Sequence[str]
    geometry: Sequence[bytes]
    """WKB, EPSG:4326 lon/lat."""
    properties: Sequence[str]
    digest: npt.NDArray[np.uint8]
    """(rows, 16)."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Which features changed, and what is left of each: one snapshot."""

    position: Position
    """Up to where."""
    number: npt.NDArray[np.int64]
    """(features) the store's own numbers, ascending, each once."""
    change: npt.NDArray[np.int64]
    """(features) number of each one's last change."""
    shows: npt.NDArray[np.bool_]
    """(features) whether it shows anywhere. Of those that do not, the rest says nothing."""
    digest: npt.NDArray[np.uint8]
    """(features, 16)."""
    vertices: npt.NDArray[np.int64]
    time_ms: npt.NDArray[np.int64]
    zooms: npt.NDArray[np.int64]
    """(features, 2) first and last zoom at which it is visible."""
    box: npt.NDArray[np.float64]
    """(features, 4) west, south, east, north in degrees."""


class SourceTimes(NamedTuple):
    """How current a source is, in milliseconds since the epoch, UTC."""

    watermark_ms: int
    """Newest event time of anything of it that was applied."""
    received_ms: int
    """When the last event of it came in that was none before; 0 where that was not written down."""


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """What is in the store: features by layer, tombstones, applied keys, outbox rows owed, newest event time."""

    by_layer: Mapping[str, int]
    tombstones: int
    applied_keys: int
    outbox: int
    watermark_ms: int
    """Newest event time of anything applied, milliseconds since the epoch, UTC; 0 when nothing was."""
    sources: Mapping[str, SourceTimes] = field(default_factory=dict[str, SourceTimes])
    """How current each source is that ever wrote."""


@runtime_checkable
class FeatureStore(Protocol):
    """Features, with what guards and announces their edits, in one transactional place."""

    def apply(self, edits: Sequence[Edit], plan: Plan, *, now_ms: int) -> list[Applied]:
        """Apply a batch in one durable transaction: all of it or nothing.

        For each edit in order: its event key was applied already -> `duplicate`; its version is below the one that
        stands for (source, feature id), tombstones included -> `stale`; equal with the same content hash ->
        `duplicate`; equal with another -> `version_conflict` (nothing is written, not even its event key); else
        the feature is upserted, or deleted leaving a tombstone. The event key of everything but a conflict is
        recorded. Then `plan` gets the changes, and its rows go to the outbox. Two edits of one feature in a batch
        see each other.

        Raises:
            FeatureStoreUnavailable: Nothing was applied.
            ValueError: An edit that no caller may make: an upsert without its feature, or with another one's.
        """
        ...

    def forget_keys(self, event_keys: Sequence[str]) -> None:
        """Release event keys (a dead letter frees its own, so that its replay is no duplicate)."""
        ...

    def owed(self, limit: int = 10_000, *, kind: str | None = None, group: str | None = None) -> list[OutboxRow]:
        """Outbox rows, oldest first."""
        ...

    def pay(self, ids: Sequence[int]) -> None:
        """Delete outbox rows that the log (or the ledger) acknowledged."""
        ...

    def digests(self, boxes: Sequence[TileBox]) -> TileDigests:
        """Digests of the features that show in each box: one snapshot, one query for thousands of boxes."""
        ...

    def features(self, boxes: Sequence[TileBox]) -> TileFeatureRows:
        """The features that show in each box: one snapshot, one query for thousands of boxes."""
        ...

    def changes(self, since: Position, limit: int) -> Changes | None:
        """What changed since a position: edits, deletes and rewritten zooms.

        With it, what `digests` answered is brought up to date at the cost of what changed: what changed leaves the
        tiles it was in, and what of it shows in a box (visible at its zoom, its box meets it, edges included) comes in.

        Args:
            since: Of an earlier answer.
            limit: Most changes.

        Returns:
            None where there were more, where the log does not reach back so far (the last `CHANGES_KEPT` are kept), and
            where the position is of another history.
        """
        ...

    def rows(self, numbers: Sequence[int]) -> FeatureRows:
        """Features by the store's own numbers, as they are now, each once.

        What changed since its number was read has another digest, what was deleted or lost its geometry is left out: a
        caller who means a certain content looks whether all its digests are there.
        """
        ...

    def get(self, source: str, feature_id: str) -> Feature | None:
        """One feature."""
        ...

    def scan(
        self,
        *,
        source: str | None = None,
        layer: str | None = None,
        bbox: tuple[float, float, float, float] | None = None,
    ) -> Iterator[Feature]:
        """Features in no order, read in pieces: memory does not grow with them."""
        ...

    def set_zooms(self, limits: Mapping[tuple[str, str], tuple[int, int]]) -> None:
        """Rewrite (source, feature id) -> (min_zoom, max_zoom) in one transaction, for a changed layer."""
        ...

    def counts(self) -> StoreCounts:
        """What is in the store."""
        ...

    def expire(self, *, tombstones_before_ms: int, keys_before_ms: int) -> tuple[int, int]:
        """Delete tombstones and applied keys written before these times; how many of each went."""
        ...

    def close(self) -> None:
        """Release files and connections."""
        ...
