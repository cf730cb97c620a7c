"""What happens to events inside a worker process: parse, validate, reproject. Nothing is stored here.

Plain bytes in, plain records out; a hostile geometry can only ever cost the process it is in, and its own event.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from geo_assets.configuration import load_layers, load_sources
from geo_assets.events import collection
from geo_assets.events.collection import CollectionInfo
from geo_assets.events.dead_letter import Refused
from geo_assets.events.json_text import loads
from geo_assets.events.models import feature_id_text
from geo_assets.events.sources import Source
from geo_assets.events.validate import FeatureContext, ValidEdit, validate
from geo_assets.services.fence_features import check_fence
from geo_assets.settings import Settings

if TYPE_CHECKING:
    from geo_assets.events.sources import Sources
    from geo_assets.tiles.layers import LayerSet


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What is known of a body without reading it: who sent it, when, and what its headers declare."""

    source: Source
    event_id: str
    received_ms: int
    header_crs: str | None
    content_type: str | None
    replay: bool
    """Sent again from a dead letter: keyed on event id and payload."""


@dataclass(frozen=True, slots=True)
class BodyTask:
    """A whole body, small enough to go through one worker."""

    at: Circumstances
    body: bytes


@dataclass(frozen=True, slots=True)
class FeatureTask:
    """One feature of a body, with what the body's first pass found."""

    at: Circumstances
    info: CollectionInfo
    index: int
    raw: bytes


@dataclass(frozen=True, slots=True)
class FeatureResult:
    """A feature's edit, or why there is none."""

    index: int
    raw: bytes
    """Kept for the dead letter of a refused feature; empty for a valid one."""
    edit: ValidEdit | None
    refused: Refused | None
    feature_id: str | None = None
    """Of a refused feature, where it says one: JSON text."""


@dataclass(frozen=True, slots=True)
class BodyResult:
    """A body's features, or why none of them can be taken."""

    features: tuple[FeatureResult, ...]
    refused: Refused | None = None


_settings: Settings | None = None
_layers: LayerSet | None = None
_sources: Sources | None = None


def start(settings: Settings) -> None:
    """Load this process's settings; called once in each worker."""
    global _settings, _layers, _sources
    _settings = settings
    _layers, _sources = load_layers(_settings), load_sources(_settings)


def read_bodies(tasks: Sequence[BodyTask]) -> list[BodyResult]:
    """Read and validate whole bodies."""
    return [_read_body(task) for task in tasks]


def first_passes(tasks: Sequence[BodyTask]) -> list[CollectionInfo | Refused]:
    """The first pass over bodies whose features will come one by one."""
    results: list[CollectionInfo | Refused] = []
    for task in tasks:
        try:
            results.append(collection.first_pass(io.BytesIO(task.body), task.at.content_type))
        except Refused as fault:
            results.append(fault)
    return results


def validate_features(tasks: Sequence[FeatureTask]) -> list[FeatureResult]:
    """Validate single features of larger bodies."""
    return [_validate(task) for task in tasks]


def _read_body(task: BodyTask) -> BodyResult:
    body = io.BytesIO(task.body)
    try:
        info = collection.first_pass(body, task.at.content_type)
    except Refused as fault:
        return BodyResult((), fault)
    results: list[FeatureResult] = []
    for item in collection.features(body, info.form):
        if item.fault is not None:
            results.append(FeatureResult(item.index, item.raw, None, item.fault))
        else:
            results.append(_validate(FeatureTask(task.at, info, item.index, item.raw)))
    return BodyResult(tuple(results))


def _validate(task: FeatureTask) -> FeatureResult:
    assert _settings is not None, "start() was not called"
    assert _layers is not None, "start() was not called"
    try:
        edit = validate(task.raw, context_of(task, _settings, _layers))
        check_fence(edit, _layers)
    except Refused as fault:
        return FeatureResult(task.index, task.raw, None, fault, _id_in(task.raw))
    return FeatureResult(task.index, b"", edit, None)


def _id_in(raw: bytes) -> str | None:
    """The id of a feature that was refused, so that people know which one; None where it has none or cannot be read."""
    try:
        value: Any = loads(raw)
        return feature_id_text(value.get("id")) if isinstance(value, dict) else None
    except ValueError:
        return None


def context_of(task: FeatureTask, settings: Settings, layers: Any) -> FeatureContext:
    """What the events module needs to know to judge one feature."""
    return FeatureContext(
        source=task.at.source,
        layers=layers,
        header_crs=task.at.header_crs,
        collection_crs=task.info.crs,
        event_id=task.at.event_id,
        received_ms=task.at.received_ms,
        in_collection=task.info.is_collection,
        members=task.info.members,
        max_vertices=task.at.source.max_vertices or settings.max_vertices,
        replay=task.at.replay,
    )
