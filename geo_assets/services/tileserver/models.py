"""What goes over the wire, as models: OpenAPI and the answers come from the same definitions."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

TileStateName = Literal["present", "empty", "dirty", "failed", "never"]


class _Wire(BaseModel):
    model_config = ConfigDict(frozen=True)


class ProblemDocument(_Wire):
    """What is wrong with a request (RFC 9457)."""

    type: str = Field(description="Kind of problem, a URN, or `about:blank` where the status says it all.")
    title: str
    status: int
    detail: str
    field: str | None = None
    value: str | int | float | bool | None = None
    limit: str | int | float | list[str] | list[float] | list[int] | None = None


class TileChange(_Wire):
    """Data of an event of the change stream: this tile has a new revision."""

    z: int = Field(ge=0, le=22)
    x: int = Field(ge=0)
    y: int = Field(ge=0)
    hash: str | None = Field(description="sha256 of the uncompressed tile in hex; null when the tile was emptied.")
    revision: int = Field(ge=1, description="Grows by one with each change of the tile; a lower one is old news.")
    again: bool = Field(
        default=False,
        description="Load it although you know this revision: a cache may have given out the one before. Absent: no.",
    )


class VectorLayer(_Wire):
    """A layer of the tiles (TileJSON 3.0, section 3.3)."""

    id: str
    description: str
    minzoom: int
    maxzoom: int
    fields: dict[str, str] = Field(description="Attribute to what it is; empty when the layer takes all attributes.")


class ChangeStream(_Wire):
    """Where changes are told, the point to resume from so that none since this document is missed, and what is there.

    An extension of TileJSON: readers that do not know it leave it out.
    """

    events: str
    resume: str | None
    published: int = Field(ge=0, description="Tiles that have content now, at all zooms. `bounds` is the world at 0.")


class TileJson(_Wire):
    """TileJSON 3.0.0."""

    tilejson: Literal["3.0.0"] = "3.0.0"
    name: str
    description: str
    version: str
    scheme: Literal["xyz"] = "xyz"
    tiles: list[str]
    minzoom: int
    maxzoom: int
    bounds: tuple[float, float, float, float] = Field(description="West, south, east, north in degrees.")
    center: tuple[float, float, float] = Field(description="Longitude, latitude in degrees, zoom.")
    attribution: str
    vector_layers: list[VectorLayer]
    live: ChangeStream


class CoveredTile(_Wire):
    """A tile as the ledger has it."""

    x: int
    y: int
    key: str = Field(description="Partition key `zoom:quadkey`.")
    state: TileStateName
    revision: int
    bytes: int
    built_at_ms: int
    error: str | None = None


class Coverage(_Wire):
    """Every tile of a box at one zoom. A state is the first that holds of failed, dirty, never, empty, present."""

    zoom: int
    counts: dict[TileStateName, int]
    tiles: list[CoveredTile]


class HeatCollection(_Wire):
    """Where tiles were built in the last minutes, by H3 cell: the hottest ones of a box."""

    type: Literal["FeatureCollection"] = "FeatureCollection"
    resolution: int = Field(ge=0, le=15, description="Of the cells, H3's.")
    minutes: int = Field(ge=1, le=60)
    since_ms: int = Field(description="Every tile built since then is counted; milliseconds since the epoch.")
    complete: bool = Field(description="Whether that is all of these minutes: false where more was built than is read.")
    tiles: int = Field(ge=0, description="Tiles built, anywhere.")
    wider: int = Field(ge=0, description="Those of them that are wider than a cell, and in none.")
    matched: int = Field(ge=0, description="Cells in the box.")
    returned: int = Field(ge=0, description="Features here.")
    features: list[dict[str, Any]] = Field(
        description="Polygons, lon/lat, past ±180 where a cell lies over the date line. Properties: `cell`, `tiles`."
    )


class WaitingCollection(_Wire):
    """Dirty tiles by quadkey prefix: those of a box that wait the longest. Tiles given up do not count."""

    type: Literal["FeatureCollection"] = "FeatureCollection"
    depth: int = Field(ge=0, le=22, description="Length of the longest prefixes.")
    tiles: int = Field(ge=0, description="Tiles that wait, anywhere.")
    age_s: float = Field(ge=0, description="How long the oldest of them waits.")
    wider: int = Field(ge=0, description="Tiles over the box that are too wide to be shown.")
    wider_age_s: float = Field(ge=0)
    matched: int = Field(ge=0, description="Prefixes in the box.")
    returned: int = Field(ge=0, description="Features here.")
    features: list[dict[str, Any]] = Field(
        description="Polygons, lon/lat. Properties: `prefix`, `depth` (its length), `tiles`, `min_zoom`, `max_zoom`, "
        "`age_s` of the oldest."
    )


class FenceCollection(_Wire):
    """The fences of a box as they judge positions; the largest ones where there are more than were asked for."""

    type: Literal["FeatureCollection"] = "FeatureCollection"
    revision: int = Field(ge=0, description="Of the set of all fences; rises with each change.")
    total: int = Field(ge=0, description="Fences there are.")
    matched: int = Field(ge=0, description="Fences in the box.")
    returned: int = Field(ge=0, description="Features here.")
    features: list[dict[str, Any]] = Field(
        description="Polygons and MultiPolygons, lon/lat. Properties: `key` (by which triggers name it), `source`, "
        "`id` (JSON text), `revision`, `priority`, and where it has one `name`, `dwell_s`, `hysteresis_m`, `schedule`."
    )


class Devices(_Wire):
    """Data of the event `devices`: the newest of each device that moved in the box, or out of it."""

    devices: list[tuple[str, float, float, int, int]] = Field(
        description="Device id, longitude, latitude, its time of the fix and the log's stamp of it, milliseconds."
    )
    left_out: int = Field(ge=0, description="Devices in the box beyond those that one client is told of.")


class ShownTrigger(_Wire):
    """A trigger as in docs/triggers.md, with the name of its fence and the middle of it."""

    device_id: str
    fence_id: str
    state: Literal["ENTER", "DWELL", "EXIT"]
    event_time_ms: int
    sequence: int
    priority: int
    fence_name: str | None = None
    fence_at: tuple[float, float] | None = Field(default=None, description="Longitude, latitude in degrees.")


class Triggers(_Wire):
    """Data of the event `triggers`. `missed`: how many more there were than are told."""

    triggers: list[ShownTrigger]
    missed: int = Field(ge=0)


class FencesChanged(_Wire):
    """Data of the event `fences`: this set stands now."""

    revision: int
    total: int


class SavedFence(_Wire):
    """The answer 202: the record is in the log; it is in force as soon as it is folded."""

    status: Literal["queued"] = "queued"
    event_id: str
    key: str = Field(description="`source:id`, by which triggers name the fence.")
    received_ms: int = Field(description="Its version where it says none.")


class PageConfig(_Wire):
    """What the map page must know of its surroundings."""

    dagster_url: str
    tiles_url: str
    edge_url: str
    version: str
    maplibre: bool = Field(description="Whether the map library is installed beside the page.")
    devices: bool = Field(description="Whether devices and triggers are shown: GEO_ASSETS_DEVICE_VIEW.")
    draw: bool = Field(description="Whether fences may be drawn: GEO_ASSETS_DRAW_FENCES.")
    fence_layers: list[str] = Field(description="Layers of the tiles that hold fences, which the page draws itself.")
    draw_source: str = Field(description="Whose fences those are; only its fences can be changed on the page.")
    install: str = Field(description="What to run where it is not.")


class Health(_Wire):
    """Whether the process lives, or what is ready."""

    status: Literal["ok", "unavailable"]
    checks: dict[str, str] = {}
