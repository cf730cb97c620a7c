"""Which names an object may have: one rule for all tile stores, so that what fits one fits the other."""

from __future__ import annotations

from resources.tile_store.protocol import InvalidName

INCOMING = ".incoming"
"""Where the embedded store writes objects before they get their name; no object's name begins with it."""
MAX_NAME_BYTES = 1_024
"""S3's limit for a key."""
MAX_PART_BYTES = 255
"""What the file systems of Linux and macOS take as one name."""


def check_name(name: str) -> None:
    """Refuse a name that could leave the store's room.

    Raises:
        InvalidName: It is empty, absolute or too long, or has an empty part, `.`, `..`, a backslash or a control
            character.
    """
    _check(name, "name")


def check_prefix(prefix: str) -> None:
    """Refuse the beginning of a name that no name can have; "" is fine, and a slash at the end too.

    Raises:
        InvalidName: As for a name.
    """
    if prefix:
        _check(prefix.removesuffix("/"), "prefix")


def check_range(start: int, length: int) -> None:
    """Refuse a range that no object can have.

    Raises:
        ValueError: It begins before the object, or has no byte.
    """
    if start < 0 or length < 1:
        raise ValueError(f"range of {length} bytes from {start}: it begins before the object or has no byte")


def _check(name: str, kind: str) -> None:
    problem = None
    if not name:
        problem = "is empty"
    elif name.startswith("/"):
        problem = "is absolute"
    elif "\\" in name:
        problem = "has a backslash"
    elif any(ord(c) < 32 or 127 <= ord(c) < 160 for c in name):
        problem = "has a control character"
    elif any(0xD800 <= ord(c) < 0xE000 for c in name):
        problem = "has a lone surrogate"
    else:
        parts = name.split("/")
        if "" in parts:
            problem = "has an empty part"
        elif "." in parts or ".." in parts:
            problem = "has a part . or .."
        elif parts[0] == INCOMING:
            problem = f"begins with {INCOMING}, where objects are written"
        elif len(name.encode()) > MAX_NAME_BYTES:
            problem = f"is longer than {MAX_NAME_BYTES} bytes"
        elif max(len(part.encode()) for part in parts) > MAX_PART_BYTES:
            problem = f"has a part longer than {MAX_PART_BYTES} bytes"
    if problem:
        raise InvalidName(f"{kind} {name[:200]!r} {problem}")
