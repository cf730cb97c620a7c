"""What a tile store promises: atomic put, get, delete and list of named objects. Names are immutable by use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable


class TileStoreError(Exception):
    """The tile store could not do what was asked."""


class TileStoreUnavailable(TileStoreError):
    """Not now (disk full, endpoint away); try again later."""


class InvalidName(TileStoreError):
    """A name that could leave the store's room: empty, absolute, with `..`, a backslash or a control character."""


class StoredObject(NamedTuple):
    """An object in a listing: its name, its size in bytes as stored, and when it was put (ms since the epoch, UTC)."""

    name: str
    size: int
    modified_ms: int


@runtime_checkable
class TileStore(Protocol):
    """Objects by name (`/` separates folders). A reader sees the whole old object, the whole new one, or none."""

    def put(self, name: str, data: bytes, *, metadata: Mapping[str, str] | None = None) -> None:
        """Write atomically and durably; same name again replaces. Metadata is kept where the store has room for it."""
        ...

    def put_stream(self, name: str, pieces: Iterable[bytes], *, metadata: Mapping[str, str] | None = None) -> None:
        """The same of what does not fit into memory: pieces in order. An error while they come leaves no object."""
        ...

    def get(self, name: str) -> bytes | None:
        """The bytes, or None when there is no such object."""
        ...

    def get_range(self, name: str, start: int, length: int) -> bytes | None:
        """Bytes from `start` on, fewer than `length` at the end of the object; None when there is no such object."""
        ...

    def exists(self, name: str) -> bool:
        """Whether there is such an object."""
        ...

    def delete(self, names: Sequence[str]) -> int:
        """Delete these; those that are not there are no error. How many went."""
        ...

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """Objects whose name begins with `prefix`, in name order, read in pieces."""
        ...

    def close(self) -> None:
        """Release connections."""
        ...
