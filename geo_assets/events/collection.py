"""Reading a stored body feature by feature: syntax and collection members first, then one feature's bytes at a time.

Memory holds one feature and a chunk, never the collection. What a feature means is not judged here.

The pieces are cut out of the text by a scanner of our own rather than by an event parser: each feature keeps its bytes
(so its numbers, and the hash that is its identity where it has no id), and a number of a million digits, which brings
ijson 3.6's C reader down with the process, costs its feature alone.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal, NamedTuple

import msgspec

from geo_assets.events.dead_letter import Refused
from geo_assets.events.json_text import BOM, JsonError, JsonSyntaxError, check_encoding, loads, shorten
from geo_assets.events.models import (
    RECORD_SEPARATOR,
    CollectionMembers,
    EnvelopeError,
    begins_as_sequence,
    is_sequence_type,
    parse,
)

Form = Literal["feature", "collection", "sequence"]

MAX_FEATURE_BYTES = 64_000_000
"""Bytes of one feature's text: the settings' million vertices at up to 40 characters each, and room for properties."""

_CHUNK = 1 << 18
_SNIFFED = 1 << 20
_MEMBERS = ("type", "crs", "event_id", "version", "action", "layer", "source")
_MAX_MEMBERS = 1_000
_MAX_MEMBER_BYTES = 100_000
_OPENING = b"{["
_BLANK = b" \t\r\n"

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
# Up to and including the next brace (or brace or bracket) that stands outside a string. Possessive: no backtracking,
# so no memory for it, whatever the text.
_TO_BRACE = re.compile(rb'(?:[^"{}]++|' + _STRING + rb")*+[{}]", re.DOTALL)
_TO_BRACKET = re.compile(rb'(?:[^"\[\]{}]++|' + _STRING + rb")*+[\[\]{}]", re.DOTALL)
_WHOLE_STRING = re.compile(_STRING, re.DOTALL)
_SCALAR = re.compile(rb"[^,\]}\s]++(?=[,\]}\s])")
_SOMETHING = re.compile(rb"[^ \t\r\n]")


@dataclass(frozen=True, slots=True)
class CollectionInfo:
    """What the first pass found out about a body."""

    form: Form
    count: int
    """Features (of a sequence: records)."""
    crs: Any = None
    """The collection's `crs` member as a JSON value; None where there is none."""
    members: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """`event_id`, `version`, `action`, `layer`, `source` of a FeatureCollection: defaults for its features."""

    @property
    def is_collection(self) -> bool:
        """Whether each feature is an event of its own within the body's event."""
        return self.form != "feature"


@dataclass(frozen=True, slots=True)
class FeatureItem:
    """One feature's text, exactly as it stood in the body; `fault` where it is none and costs itself alone."""

    index: int
    raw: bytes
    fault: Refused | None = None


def form_of(body: BinaryIO, content_type: str | None = None) -> Literal["document", "sequence"]:
    """Whether a body is one JSON text or a sequence of them.

    A sequence begins with a record separator (RFC 8142), or has one JSON object a line (newline-delimited), and more
    than one line unless the content type says that it is one.

    Args:
        body: Seekable; it is read from its beginning.
        content_type: What the sender said.
    """
    body.seek(0)
    head = body.read(_SNIFFED)
    if begins_as_sequence(head):
        return "sequence"
    if is_sequence_type(content_type):
        line = head.removeprefix(BOM).strip(_BLANK).partition(b"\n")[0].rstrip()
        if line.startswith(b"{") and (line.endswith(b"}") or len(line) > _SNIFFED // 2):
            return "sequence"
    return "document"


def first_pass(body: BinaryIO, content_type: str | None = None) -> CollectionInfo:
    """Read a body once to its end: is it JSON, what is it, what does it say of all its features.

    Of a sequence only the records are counted: a record that is no JSON costs itself alone.

    Args:
        body: Seekable; it is read from its beginning.
        content_type: What the sender said.

    Raises:
        Refused: `schema`: no JSON, no Feature or FeatureCollection, or a member of the collection at fault.
    """
    if form_of(body, content_type) == "sequence":
        return CollectionInfo("sequence", sum(1 for _ in _records(body, MAX_FEATURE_BYTES)))
    members: dict[str, Any] = {}
    names: set[str] = set()
    count: int | None = None
    for piece in _pieces(body, MAX_FEATURE_BYTES, check=True):
        if piece.name is None:
            count = (count or 0) + 1
            _check(piece.raw, f"features[{count - 1}]")
            continue
        if piece.name in names:
            raise Refused("schema", shorten(piece.name), explanation="the member stands twice in the body's object")
        names.add(piece.name)
        if len(names) > _MAX_MEMBERS:
            raise Refused("schema", "$", None, f"{_MAX_MEMBERS} members", "the body's object has more members")
        if piece.is_features:
            count = 0
        elif piece.name in _MEMBERS and piece.raw is not None:
            members[piece.name] = _member(piece.name, piece.raw)
        else:
            _check(piece.raw, shorten(piece.name))
    form = members.get("type")
    crs = members.get("crs")
    if form == "Feature":
        return CollectionInfo("feature", 1, crs)
    if form != "FeatureCollection":
        raise Refused("schema", "type", shorten(form), "Feature, FeatureCollection", "the body is neither of them")
    if count is None:
        raise Refused("schema", "features", None, "array", "a FeatureCollection has an array of features")
    try:
        parse(CollectionMembers, {name: value for name, value in members.items() if name != "crs"})
    except EnvelopeError as fault:
        raise Refused("schema", fault.field, fault.value, fault.limit, fault.problem) from None
    defaults = {name: value for name, value in members.items() if name not in ("type", "crs") and value is not None}
    return CollectionInfo("collection", count, crs, defaults)


def _member(name: str, raw: bytes) -> Any:
    """The value of a member of the collection."""
    if len(raw) > _MAX_MEMBER_BYTES:
        raise Refused("schema", name, f"{len(raw)} bytes", f"{_MAX_MEMBER_BYTES} bytes", "the member is too large")
    try:
        return loads(raw)
    except JsonError as fault:
        raise Refused("schema", name, explanation=str(fault)) from None


def _check(raw: bytes | None, field: str) -> None:
    """Refuse a text that is no JSON. One that is too long or too deep is left to whoever reads it."""
    if raw is None:
        return
    try:
        msgspec.json.decode(raw, type=msgspec.Raw)
    except RecursionError:
        return
    except msgspec.DecodeError:
        # The fast reader also stops at what is JSON and yet unreadable (half a surrogate pair): that one's own fault.
        try:
            loads(raw)
        except JsonSyntaxError as fault:
            raise Refused("schema", field, explanation=str(fault)) from None
        except JsonError:
            return


def features(
    body: BinaryIO,
    form: Form | None = None,
    *,
    content_type: str | None = None,
    max_feature_bytes: int = MAX_FEATURE_BYTES,
) -> Iterator[FeatureItem]:
    """The features of a body that passed `first_pass`, one after the other, in order.

    Args:
        body: Seekable; it is read from its beginning.
        form: What the first pass found; None looks again (and takes a document that names no features for a Feature).
        content_type: What the sender said, for looking again.
        max_feature_bytes: A longer feature is passed over and comes with a fault, without its text.

    Yields:
        Each feature with its text; one that is no JSON object, or too long, with its fault.

    Raises:
        Refused: `schema`: the body ends in the middle, so it did not pass.
    """
    if form is None:
        form = "sequence" if form_of(body, content_type) == "sequence" else first_pass(body, content_type).form
    if form == "sequence":
        return _sequence(body, max_feature_bytes)
    if form == "feature":
        return _single(body, max_feature_bytes)
    return _collection(body, max_feature_bytes)


def _too_large(index: int, limit: int) -> FeatureItem:
    fault = Refused(
        "too_large", f"features[{index}]", None, f"{limit} bytes", f"the feature has more than {limit} bytes"
    )
    return FeatureItem(index, b"", fault)


def _single(body: BinaryIO, limit: int) -> Iterator[FeatureItem]:
    body.seek(0)
    raw = body.read(limit + 1)
    if len(raw) > limit:
        yield _too_large(0, limit)
    else:
        yield FeatureItem(0, raw.removeprefix(BOM).strip(_BLANK))


def _records(body: BinaryIO, limit: int) -> Iterator[bytes | None]:
    """The texts of a sequence, blank ones left out; None for one over the limit."""
    body.seek(0)
    head = body.read(_SNIFFED)
    separator = RECORD_SEPARATOR if head.removeprefix(BOM).lstrip(_BLANK).startswith(RECORD_SEPARATOR) else b"\n"
    body.seek(len(BOM) if head.startswith(BOM) else 0)
    chunk = body.read(_CHUNK)
    pieces: list[bytes] = []
    size = 0
    while chunk:
        *ended, rest = chunk.split(separator)
        for text in ended:
            if size + len(text) > limit:
                yield None
            else:
                record = b"".join([*pieces, text]).strip(_BLANK)
                if record:
                    yield record
            pieces, size = [], 0
        size += len(rest)
        if size <= limit:
            pieces.append(rest)
        else:
            pieces = []
        chunk = body.read(_CHUNK)
    if size > limit:
        yield None
    elif record := b"".join(pieces).strip(_BLANK):
        yield record


def _sequence(body: BinaryIO, limit: int) -> Iterator[FeatureItem]:
    for index, raw in enumerate(_records(body, limit)):
        if raw is None:
            yield _too_large(index, limit)
        else:
            yield FeatureItem(index, raw, None if raw.startswith(b"{") else _no_object(index, raw))


def _no_object(index: int, raw: bytes) -> Refused:
    return Refused(
        "schema", f"features[{index}]", shorten(raw[:80].decode(errors="replace")), "object", "no GeoJSON object"
    )


class _Piece(NamedTuple):
    """A member of the body's object, or (without a name) an element of its `features`."""

    name: str | None
    raw: bytes | None
    """None: longer than the limit, or the array of features, whose elements follow."""
    is_features: bool = False


class _Scanner:
    """A place in a JSON text: finds the ends of values by strings and brackets, without reading what is in them."""

    def __init__(self, body: BinaryIO, start: int, check: bool) -> None:
        self._body = body
        self._decoder = codecs.getincrementaldecoder("utf-8")() if check else None
        self._read = start
        self.text = b""
        self.at = 0

    def more(self, keep: int) -> bool:
        """Read on, keeping the text from `keep` on, which then begins at 0; False at the body's end."""
        # As much again as is kept, so that a long value is copied a few times, not once a chunk.
        chunk = self._body.read(max(_CHUNK, len(self.text) - keep))
        if self._decoder is not None:
            try:
                self._decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as fault:
                place = f"near byte {self._read + fault.start}"
                raise Refused("schema", "$", explanation=f"the text is not UTF-8: {fault.reason} {place}") from None
        self._read += len(chunk)
        self.text = self.text[keep:] + chunk
        self.at -= keep
        return bool(chunk)

    def next(self) -> int:
        """The next byte that is not blank, the place moved onto it; -1 at the end."""
        while True:
            match = _SOMETHING.search(self.text, self.at)
            if match is not None:
                self.at = match.start()
                return self.text[self.at]
            self.at = len(self.text)
            if not self.more(self.at):
                return -1

    def take(self, wanted: bytes) -> int:
        """The next byte that is not blank, one of `wanted`, the place moved behind it.

        Raises:
            Refused: It is another.
        """
        found = self.next()
        if found < 0:
            raise Refused("schema", "$", explanation="no JSON: the body ends in the middle")
        if found not in wanted:
            place = self._read - len(self.text) + self.at
            expected = " or ".join(repr(chr(c)) for c in wanted)
            raise Refused("schema", "$", explanation=f"no JSON: {chr(found)!r} instead of {expected} at byte {place}")
        self.at += 1
        return found

    def value(self, limit: int) -> bytes | None:
        """The text of the value that begins here, the place moved behind it; None where it is longer than `limit`."""
        first = self.next()
        if first < 0:
            raise Refused("schema", "$", explanation="no JSON: the body ends in the middle")
        start: int | None = self.at
        if first in _OPENING:
            pattern = _TO_BRACE if first == ord("{") else _TO_BRACKET
            depth = 0
            while True:
                match = pattern.match(self.text, self.at)
                if match is None:
                    start = self._more_of(start, limit)
                    continue
                self.at = match.end()
                depth += 1 if self.text[self.at - 1] in _OPENING else -1
                if depth == 0:
                    break
        else:
            pattern = _WHOLE_STRING if first == ord('"') else _SCALAR
            while (match := pattern.match(self.text, self.at)) is None:
                if first in b",:]}":
                    self.take(b'{["')
                start = self._more_of(start, limit)
            self.at = match.end()
        if start is None or self.at - start > limit:
            return None
        return self.text[start : self.at]

    def _more_of(self, start: int | None, limit: int) -> int | None:
        """Read on within a value that began at `start`; None once it is over the limit and no longer kept."""
        if start is not None and len(self.text) - start > limit:
            start = None
        if not self.more(self.at if start is None else start):
            raise Refused("schema", "$", explanation="no JSON: the body ends in the middle of a value")
        return None if start is None else 0


def _pieces(body: BinaryIO, limit: int, *, check: bool) -> Iterator[_Piece]:
    """The members of the object that a body is, and behind `features` its elements, in order of the text.

    Args:
        body: Seekable; it is read from its beginning.
        limit: Bytes over which a piece comes without its text.
        check: Whether the text must be UTF-8 and nothing may stand behind the object.

    Raises:
        Refused: `schema`: the body is no JSON object. What is within the pieces is not looked at.
    """
    body.seek(0)
    head = body.read(4)
    try:
        check_encoding(head)
    except JsonError as fault:
        raise Refused("schema", "$", explanation=str(fault)) from None
    start = len(BOM) if head.startswith(BOM) else 0
    body.seek(start)
    scanner = _Scanner(body, start, check)
    first = scanner.next()
    if first < 0:
        raise Refused("schema", "$", explanation="the body is empty")
    if first != ord("{"):
        raise Refused("schema", "$", None, "object", "the body is no GeoJSON object")
    scanner.at += 1
    if scanner.next() == ord("}"):
        scanner.at += 1
    else:
        while True:
            name = _name(scanner)
            scanner.take(b":")
            if name == "features" and scanner.next() == ord("["):
                yield _Piece(name, None, True)
                yield from _elements(scanner, limit)
            else:
                yield _Piece(name, scanner.value(limit))
            if scanner.take(b",}") == ord("}"):
                break
    if check and scanner.next() >= 0:
        raise Refused("schema", "$", explanation="no JSON: something stands behind the body's object")


def _name(scanner: _Scanner) -> str:
    scanner.take(b'"')
    scanner.at -= 1
    raw = scanner.value(_MAX_MEMBER_BYTES)
    if raw is None:
        raise Refused("schema", "$", None, f"{_MAX_MEMBER_BYTES} bytes", "a member's name is too long")
    return str(_member("$", raw))


def _elements(scanner: _Scanner, limit: int) -> Iterator[_Piece]:
    scanner.take(b"[")
    if scanner.next() == ord("]"):
        scanner.at += 1
        return
    while True:
        yield _Piece(None, scanner.value(limit))
        if scanner.take(b",]") == ord("]"):
            return


def _collection(body: BinaryIO, limit: int) -> Iterator[FeatureItem]:
    index = 0
    for piece in _pieces(body, limit, check=False):
        if piece.name is not None:
            continue
        if piece.raw is None:
            yield _too_large(index, limit)
        else:
            fault = None if piece.raw.startswith(b"{") else _no_object(index, piece.raw)
            yield FeatureItem(index, piece.raw, fault)
        index += 1
