"""What a record without our headers says of itself, read off its body: kind, source and event id.

Nothing is judged here: a body that cannot be read says nothing, and whoever parses it says why. Also the texts of keys
and headers, which strangers fill with what they like. Loads without a geometry library.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from geo_assets.events import collection, topics
from geo_assets.events.dead_letter import Refused
from geo_assets.events.json_text import BOM, JsonError, loads
from geo_assets.events.models import Kind

KINDS: frozenset[str] = frozenset({"features", "tiles", "positions", "fences"})

_LONGEST_MEMBER = 2_000
"""Bytes of a member looked at: a longer one is neither a name nor an id."""

_BLANK = b" \t\r\n"

# A dead letter has 600 kB for all but its payload, and a character may take six bytes of JSON: 250 kB at most.
_OUR_LONGEST, _OTHERS, _OTHER_LONGEST, _NAME_LONGEST = 2_000, 32, 500, 100


@dataclass(frozen=True, slots=True)
class Said:
    """What a body says of itself. None: nothing."""

    kind: Kind | None = None
    source: str | None = None
    event_id: str | None = None


_ABSENT = msgspec.Raw(b"null")


class _Members(msgspec.Struct):
    """Members that tell what an object is; all others are checked as JSON and passed over."""

    type: msgspec.Raw = _ABSENT
    source: msgspec.Raw = _ABSENT
    event_id: msgspec.Raw = _ABSENT
    device_id: msgspec.Raw = _ABSENT
    zoom: msgspec.Raw = _ABSENT
    z: msgspec.Raw = _ABSENT
    x: msgspec.Raw = _ABSENT
    y: msgspec.Raw = _ABSENT


_one = msgspec.json.Decoder(_Members)
_many = msgspec.json.Decoder(list[msgspec.Raw])


def said_by(body: bytes, content_type: str | None = None) -> Said:
    """What a body says of itself.

    A Feature, a FeatureCollection or a sequence of them is `features`; an object with `device_id` a position; one with
    a zoom, `x` and `y` a tile event; an array is what its first entry is. A fence is a Feature to everybody who is not
    told otherwise, so nothing is taken for one. Of a collection or sequence that names no source, the first feature
    speaks for all: one of another source is refused when it is judged.

    Args:
        body: The body, as it came.
        content_type: What the sender said, if anything.
    """
    try:
        if collection.form_of(io.BytesIO(body), content_type) == "sequence":
            return Said("features", _first_source(body, "sequence"))
        text = memoryview(body)[len(BOM) :] if body.startswith(BOM) else memoryview(body)
        if bytes(text[:64]).lstrip(_BLANK).startswith(b"["):
            entries = _many.decode(text)
            if not entries:
                return Said()
            # Each entry has an id of its own, or a part of the body's.
            kind, source, _ = _read(_one.decode(entries[0]))
            return Said(None if kind == "features" else kind, source)
        members = _one.decode(text)
        kind, source, event_id = _read(members)
        if source is None and _text(members.type) == "FeatureCollection":
            source = _first_source(body, "collection")
        return Said(kind, source, event_id)
    except (msgspec.MsgspecError, Refused, RecursionError, ValueError):
        return Said()


def _read(members: _Members) -> tuple[Kind | None, str | None, str | None]:
    kind: Kind | None = None
    if _text(members.type) in ("Feature", "FeatureCollection"):
        kind = "features"
    elif _there(members.device_id):
        kind = "positions"
    elif (_there(members.z) or _there(members.zoom)) and _there(members.x) and _there(members.y):
        kind = "tiles"
    return kind, _text(members.source), _text(members.event_id)


def _first_source(body: bytes, form: collection.Form) -> str | None:
    """The `source` of the first feature."""
    for item in collection.features(io.BytesIO(body), form):
        return None if item.fault is not None else _text(_one.decode(item.raw).source)
    return None


def _there(raw: msgspec.Raw) -> bool:
    return bytes(raw) != b"null"


def _text(raw: msgspec.Raw) -> str | None:
    """The text of a member; None where it is no text or an empty one."""
    if len(bytes(raw)) > _LONGEST_MEMBER:
        return None
    try:
        value = loads(bytes(raw))
    except JsonError:
        return None
    return value if isinstance(value, str) and value else None


def readable(text: str) -> str:
    """A key or header as text that can be stored and sent again: what is no Unicode character is spelled out."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()
    return text


def readable_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers of which each name and value is text that can be stored and sent again."""
    return {readable(name): readable(value) for name, value in headers.items()}


def kept_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers as a dead letter keeps them: readable, and of a size that fits beside the payload.

    Ours whole (the longest is a CRS in WKT), of others the first few, shortened.
    """
    made = readable_headers(headers)
    ours = {name: value[:_OUR_LONGEST] for name, value in made.items() if name in topics.HEADERS}
    others = [name for name in made if name not in ours][:_OTHERS]
    return ours | {name[:_NAME_LONGEST]: made[name][:_OTHER_LONGEST] for name in others}
