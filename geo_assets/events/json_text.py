"""JSON as it comes from outside: one strict reader, one canonical writer. Nothing about features or events.

Loads without a geometry library.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

BOM = b"\xef\xbb\xbf"
"""A UTF-8 byte order mark. RFC 8259, section 8.1 lets a reader pass over it; many editors write it."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NOT_UTF8 = (b"\xff\xfe", b"\xfe\xff", b"\x00")


class JsonError(ValueError):
    """Text that is no JSON, or JSON that two readers could understand differently; the message says what and where."""


class JsonSyntaxError(JsonError):
    """Text that is no JSON at all, for any reader."""


class _Duplicate(ValueError):
    """A member name that stands twice in one object."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _Duplicate(name)
            seen.add(name)
    return made


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_constant)
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def shorten(value: object, limit: int = 80) -> str:
    """A value from outside as it may stand in a message: printable, at most `limit` characters, never a whole body."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, default=repr)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    text = "".join(c if c.isprintable() else "\ufffd" for c in text[: limit + 1])
    return text if len(text) <= limit else text[: limit - 1] + "…"


def check_encoding(head: bytes) -> None:
    """Refuse a text whose first four bytes are those of UTF-16 or UTF-32.

    Raises:
        JsonError: They are.
    """
    if head.startswith(_NOT_UTF8) or head[1:2] == b"\x00":
        raise JsonSyntaxError(
            "the text is not UTF-8 (it looks like UTF-16 or UTF-32); RFC 8259, section 8.1 asks for UTF-8"
        )


def decode(text: bytes) -> str:
    """The text of a body: UTF-8, a leading byte order mark passed over.

    Raises:
        JsonError: Another encoding, or bytes that are no UTF-8.
    """
    check_encoding(text[:4])
    if text.startswith(BOM):
        text = text[3:]
    try:
        return text.decode()
    except UnicodeDecodeError as fault:
        raise JsonSyntaxError(f"the text is not UTF-8: {fault.reason} at byte {fault.start}") from None


def loads(text: bytes) -> Any:
    """The value of a JSON text (RFC 8259), numbers exact: int of any size read, float as the nearest double.

    A number beyond a double's range is read as infinity; whoever uses a number checks that it is finite.

    Raises:
        JsonSyntaxError: No JSON, which NaN and Infinity are not either.
        JsonError: A member twice, a lone surrogate, too deep, or a number too long to read.
    """
    try:
        value = _DECODER.decode(decode(text))
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except JsonError:
        raise
    except json.JSONDecodeError as fault:
        raise JsonSyntaxError(f"no JSON: {fault.msg} at line {fault.lineno}, column {fault.colno}") from None
    except _Duplicate as fault:
        raise JsonError(f"member {shorten(str(fault))!r} stands twice in one object") from None
    except UnicodeEncodeError:
        raise JsonError("a text holds half of a surrogate pair (\\ud800 to \\udfff alone)") from None
    except RecursionError:
        raise JsonError("nested too deeply") from None
    except ValueError as fault:
        if "digits" in str(fault):
            raise JsonError("a number has too many digits") from None
        raise JsonSyntaxError(f"no JSON: {fault}") from None
    return value


def canonical(value: Any) -> str:
    """The one text of a JSON value: members sorted, no spaces; `1`, `1.0` and `true` stay three values.

    Raises:
        JsonError: A number that is not finite, or nesting too deep to write.
    """
    try:
        return _ENCODER.encode(value)
    except RecursionError:
        raise JsonError("nested too deeply") from None
    except ValueError:
        raise JsonError("a number is beyond the range of a double (about 1.8e308)") from None
