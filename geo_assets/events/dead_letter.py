"""The dead letter: a record that could not be processed, with its payload, its reason and where it came from.

Also the vocabulary of reasons and the error that carries one. Loads without a geometry library.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

from geo_assets.events.json_text import shorten

Reason = Literal[
    "schema",
    "invalid_geometry",
    "unknown_crs",
    "out_of_range",
    "too_large",
    "timeout",
    "version_conflict",
    "unknown_layer",
    "forbidden_layer",
    "null_value",
    "missing_body",
    "worker_died",
    "build_failed",
    "internal",
]
"""Why a record is dead:

- `schema`: not JSON, not the model's form, or a value outside its range;
- `invalid_geometry`: cannot be parsed, or is invalid and was not to be repaired;
- `unknown_crs`: no CRS declared, a conflict, an unknown one, or a transformation that is not to be trusted;
- `out_of_range`: coordinates outside the world, or outside the source's expected box;
- `too_large`: more bytes or vertices than the limit;
- `timeout`: took longer than a task may;
- `version_conflict`: the version that stands, with other content;
- `unknown_layer`: no such layer on this map; `forbidden_layer`: not the source's to write;
- `null_value`: a record without a value; `missing_body`: its body is not in the inbox, or has another hash;
- `worker_died`: killed the process that worked on it;
- `build_failed`: a tile that failed its last try;
- `internal`: our own fault; the explanation names the exception.
"""

Stage = Literal["edge", "ingest", "validate", "store", "tiles", "build", "route"]
"""Where it died."""

REASONS: tuple[str, ...] = get_args(Reason)
STAGES: tuple[str, ...] = get_args(Stage)

HIDDEN = "(hidden: a position is personal data)"


class Refused(Exception):
    """An event that cannot be taken: reason, field, value, limit, and the library's own explanation."""

    def __init__(
        self,
        reason: Reason,
        field: str | None = None,
        value: str | None = None,
        limit: str | None = None,
        explanation: str = "",
    ) -> None:
        parts = [reason]
        if field is not None:
            parts.append(f"{field}={value}" if value is not None else field)
        if limit is not None:
            parts.append(f"limit: {limit}")
        if explanation:
            parts.append(explanation)
        super().__init__(": ".join(parts))
        self.reason: Reason = reason
        self.field, self.value, self.limit, self.explanation = field, value, limit, explanation

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception's default pickling passes the message alone; this one crosses a process pool.
        return type(self), (self.reason, self.field, self.value, self.limit, self.explanation)


class DeadLetterError(ValueError):
    """Bytes that are no dead letter; the message names the field."""


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Where the record stands in the event log."""

    topic: str
    partition: int
    offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that cannot be processed.

    `make` gives it its id. The payload is here (`payload`) or, when it was too large for a record, under the name
    `pointer` in the inbox; of a collection it is the one feature, and `index` says which.
    """

    id: str
    """Hex: the same record that dies of the same reason again has the same id."""
    reason: Reason
    stage: Stage
    explanation: str
    source: str
    at_ms: int
    """When it died, milliseconds since the epoch, UTC."""
    field: str | None = None
    value: str | None = None
    limit: str | None = None
    event_id: str | None = None
    feature_id: str | None = None
    layer: str | None = None
    origin: Origin | None = None
    index: int | None = None
    """Place of the feature in its collection, from 0."""
    attempts: int = 1
    event_key: str | None = None
    payload: bytes = b""
    pointer: str | None = None
    payload_sha256: str | None = None
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    """Headers of the raw record, as they were."""

    @classmethod
    def make(cls, **values: Any) -> DeadLetter:
        """A dead letter whose id follows from what died where: making it twice makes it once.

        Args:
            **values: Every field but `id` and `payload_sha256`.
        """
        payload: bytes = values.get("payload", b"")
        origin: Origin | None = values.get("origin")
        sha = hashlib.sha256(payload).hexdigest() if payload else values.get("headers", {}).get("sha256")
        place = (origin.topic, origin.partition, origin.offset) if origin is not None else ()
        identity = [
            values["source"],
            values.get("event_key"),
            *place,
            values.get("index"),
            values["stage"],
            values["reason"],
            sha,
        ]
        made = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
        return cls(id=made, payload_sha256=sha, **values)

    @classmethod
    def refused(cls, refusal: Refused, **values: Any) -> DeadLetter:
        """The dead letter of a refusal: reason, field, value, limit and explanation are the refusal's."""
        return cls.make(
            reason=refusal.reason,
            field=refusal.field,
            value=refusal.value,
            limit=refusal.limit,
            explanation=refusal.explanation,
            **values,
        )

    def to_json(self) -> bytes:
        """UTF-8 JSON for the log: every field under its name, the payload in base64."""
        return json.dumps(
            {**self._plain(), "payload": base64.b64encode(self.payload).decode()}, sort_keys=True
        ).encode()

    def summary(self) -> dict[str, Any]:
        """What a listing shows: no payload, and of a position nothing that could be its place (design rule 12)."""
        plain = self._plain()
        plain["bytes"] = len(self.payload)
        if self.headers.get("kind") == "positions":
            plain.update(explanation=HIDDEN, value=None if self.value is None else HIDDEN, feature_id=None)
        plain["headers"] = {
            k: v
            for k, v in self.headers.items()
            if k in ("kind", "content-type", "source-crs", "received-ms", "replay")
        }
        return plain

    def _plain(self) -> dict[str, Any]:
        origin = self.origin
        return {
            "id": self.id,
            "reason": self.reason,
            "stage": self.stage,
            "explanation": self.explanation,
            "field": self.field,
            "value": self.value,
            "limit": self.limit,
            "source": self.source,
            "event_id": self.event_id,
            "feature_id": self.feature_id,
            "layer": self.layer,
            "origin": None
            if origin is None
            else {"topic": origin.topic, "partition": origin.partition, "offset": origin.offset},
            "index": self.index,
            "attempts": self.attempts,
            "at_ms": self.at_ms,
            "event_key": self.event_key,
            "pointer": self.pointer,
            "payload_sha256": self.payload_sha256,
            "headers": dict(self.headers),
        }

    @classmethod
    def from_json(cls, data: bytes) -> DeadLetter:
        """The dead letter of `to_json`.

        Raises:
            DeadLetterError: The bytes are none; the message names the field.
        """
        try:
            read: Any = json.loads(data)
        except (ValueError, RecursionError) as fault:
            raise DeadLetterError(f"no JSON: {fault}") from None
        if not isinstance(read, dict):
            raise DeadLetterError("no JSON object")
        values = cast(dict[str, Any], read)
        made: dict[str, Any] = {}
        for name, kinds in _FIELDS.items():
            value: Any = values.get(name, _DEFAULTS.get(name))
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise DeadLetterError(f"{name} {shorten(value)!r} is of the wrong type")
            made[name] = value
        if made["reason"] not in REASONS:
            raise DeadLetterError(f"reason {shorten(made['reason'])!r} is none of {', '.join(REASONS)}")
        if made["stage"] not in STAGES:
            raise DeadLetterError(f"stage {shorten(made['stage'])!r} is none of {', '.join(STAGES)}")
        if made["origin"] is not None:
            try:
                made["origin"] = Origin(
                    str(made["origin"]["topic"]), int(made["origin"]["partition"]), int(made["origin"]["offset"])
                )
            except (KeyError, TypeError, ValueError):
                raise DeadLetterError("origin is not topic, partition and offset") from None
        try:
            made["payload"] = base64.b64decode(made["payload"], validate=True)
        except ValueError:
            raise DeadLetterError("payload is no base64") from None
        made["headers"] = {str(k): str(v) for k, v in made["headers"].items()}
        return cls(**made)


_TEXT = (str,)
_TEXT_OR_NONE = (str, type(None))
_FIELDS: dict[str, tuple[type, ...]] = {
    "id": _TEXT,
    "reason": _TEXT,
    "stage": _TEXT,
    "explanation": _TEXT,
    "source": _TEXT,
    "at_ms": (int,),
    "field": _TEXT_OR_NONE,
    "value": _TEXT_OR_NONE,
    "limit": _TEXT_OR_NONE,
    "event_id": _TEXT_OR_NONE,
    "feature_id": _TEXT_OR_NONE,
    "layer": _TEXT_OR_NONE,
    "origin": (dict, type(None)),
    "index": (int, type(None)),
    "attempts": (int,),
    "event_key": _TEXT_OR_NONE,
    "payload": _TEXT,
    "pointer": _TEXT_OR_NONE,
    "payload_sha256": _TEXT_OR_NONE,
    "headers": (dict,),
}
_DEFAULTS: dict[str, Any] = {"attempts": 1, "payload": "", "headers": {}}
