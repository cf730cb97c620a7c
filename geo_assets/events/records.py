"""What stands in records that the platform writes by itself, beside the events that come in: hints and announcements.

The models are the writers' and the documents' at once. Loads without a geometry library.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, StringConstraints

from geo_assets.events.json_text import JsonError, loads
from geo_assets.events.models import EnvelopeError, PositionEvent, TileEvent, parse
from geo_assets.tiles.tile import MAX_ZOOM, Tile

MAX_PART_ID = 300
"""Characters of a record's event id: those of an event, and the number of one that was sent among others."""

_WRITTEN = {"zoom", "x", "y", "event_id", "source", "version", "data_time_ms", "force"}


def _either_zoom(schema: dict[str, Any]) -> None:
    """Say in the schema what the alias does: `z` and `zoom` are one member under two names."""
    schema["properties"]["zoom"] = schema["properties"]["z"] | {
        "description": "The same as `z`, one of which is needed."
    }
    schema["required"] = ["x", "y"]
    schema["anyOf"] = [{"required": ["z"]}, {"required": ["zoom"]}]


class TileHint(TileEvent):
    """Look at this tile again. It carries no order: once or twice, early or late, the tile is looked at."""

    model_config = ConfigDict(
        title="TileHint",
        json_schema_extra=_either_zoom,
    )

    zoom: int = Field(
        ge=0,
        le=MAX_ZOOM,
        validation_alias=AliasChoices("z", "zoom"),
        serialization_alias="z",
        description="Zoom of the tile, WebMercatorQuad.",
    )
    event_id: Annotated[str, StringConstraints(min_length=1, max_length=MAX_PART_ID)] | None = Field(
        default=None, description="Id of the event behind it."
    )
    data_time_ms: int | None = Field(
        default=None, description="Event time of the edit behind it, milliseconds since the epoch, UTC."
    )

    @classmethod
    def of(
        cls,
        tile: Tile,
        *,
        event_id: str | None,
        source: str | None,
        version: int | None,
        data_time_ms: int | None,
        force: bool = False,
    ) -> TileHint:
        """A hint of our own making; nothing of it is checked again."""
        return cls.model_construct(
            zoom=tile.z, x=tile.x, y=tile.y, event_id=event_id, source=source, version=version,
            data_time_ms=data_time_ms, force=force,
        )  # fmt: skip

    def to_json(self) -> bytes:
        """The value of its record, UTF-8 JSON."""
        return self.model_dump_json(by_alias=True, include=_WRITTEN, warnings=False).encode()


def read_hint(value: bytes) -> TileHint:
    """The hint of a record's value: one JSON object with `z` or `zoom`, `x` and `y`; whoever wrote it.

    Raises:
        EnvelopeError: It is none; the field is named.
    """
    try:
        body = loads(value)
    except JsonError as fault:
        raise EnvelopeError("$", str(fault)) from None
    if not isinstance(body, dict):
        raise EnvelopeError("$", "the value is no JSON object", limit="object with z (or zoom), x and y")
    return parse(TileHint, cast(dict[str, Any], body))


class TileUpdated(BaseModel):
    """A tile has a new revision. Compare `revision`, never a time: what is not above the one you have is old news."""

    model_config = ConfigDict(
        title="TileUpdated",
        frozen=True,
        json_schema_extra={
            "examples": [
                {
                    "z": 14,
                    "x": 9327,
                    "y": 4741,
                    "hash": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
                    "revision": 7,
                    "outcome": "built",
                    "bytes": 18342,
                    "built_at_ms": 1777636799022,
                    "data_time_ms": 1777636799000,
                    "stages": {
                        "received": 1777636799000250,
                        "stored": 1777636799006100,
                        "hinted": 1777636799007900,
                        "taken": 1777636799011300,
                        "built": 1777636799020800,
                        "committed": 1777636799022500,
                        "announced": 1777636799022900,
                    },
                }
            ]
        },
    )

    z: int = Field(ge=0, le=MAX_ZOOM, description="Zoom, WebMercatorQuad.")
    x: int = Field(ge=0, description="Column from the west.")
    y: int = Field(ge=0, description="Row from the north (XYZ, not TMS).")
    hash: str | None = Field(
        pattern="^[0-9a-f]{64}$",
        description="sha256 of the tile's uncompressed bytes, hex; null: the tile is empty now, and is served as 204.",
    )
    revision: int = Field(ge=1, description="One up at each commit of this tile. What a consumer compares.")
    outcome: Literal["built", "emptied"]
    bytes: int = Field(ge=0, description="Size of the stored object (gzip); 0 where it is empty.")
    built_at_ms: int = Field(description="When it was committed, milliseconds since the epoch, UTC.")
    data_time_ms: int = Field(
        description="Newest event time of what the tile shows, milliseconds since the epoch, UTC; 0: none is known."
    )
    again: bool = Field(
        default=False,
        description="Told before, but a cache may have given out the tile as it was: load it again although you have "
        "this revision. Absent: false.",
    )
    stages: dict[str, int] | None = Field(
        default=None,
        description="When the edit that waited longest for this revision passed the stages of its way: stage -> "
        "microseconds since the epoch, UTC. For watching alone; absent where nobody stamped it.",
    )


def feature_key(source: str, feature_id: str) -> str:
    """By what a feature or fence is known in keys of records and in triggers: `demo:"depot"`, `demo:123`.

    Args:
        source: Whose it is; a source's name has no colon.
        feature_id: JSON text of its id, as `feature_id_text` makes it.
    """
    return f"{source}:{feature_id}"


def parts_of_key(key: str) -> tuple[str, str]:
    """Source and JSON text of the id, of a key that `feature_key` made."""
    source, _, feature_id = key.partition(":")
    return source, feature_id


def position_value(event: PositionEvent) -> dict[str, Any]:
    """The value of a position's record: the event as it was sent, with its time in one unit beside it."""
    return event.model_dump(exclude_unset=True) | {"event_time_ms": event.event_time_ms}
