"""Name order out of object stores that list folder by folder.

S3, R2 and GCS list by the bytes of the whole name: `a-b/x`, `a.b`, `a/x`. SeaweedFS and others that keep real folders
list `a/x` first, because the folder `a` comes before the folder `a-b`. This module reads either in the first order,
with one page in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from resources.tile_store.protocol import StoredObject

Read = Callable[[str, str | None], Iterator[Sequence[StoredObject]]]
"""Pages of all objects below a folder ("" is the root), after a name if one is given."""

LAST = "\U0010ffff"
"""No name has a later character."""


def in_name_order(read: Read, folder: str, after: str | None = None) -> Iterator[StoredObject]:
    """The objects below a folder in the order of their names.

    Only one thing differs between the two orders: where the names of a folder's neighbours go on from its own with a
    character before the slash, they come too late. So before a folder is given, the name after all of its objects is
    looked up - on the page at hand, else by one request, which is one or two a page - and such neighbours go first.

    Args:
        read: How to get pages, in either order.
        folder: Where, without a slash at the end.
        after: Skip names up to this one; it must be below the folder.
    """
    inside: list[str] = []
    early: list[str] = []
    for page in read(folder, after):
        for place, item in enumerate(page):
            name = item.name
            early = [e for e in early if name.startswith(e + "/") or _comes_before(name, e)]
            if any(_comes_before(name, e) for e in early):
                continue
            inside = [f for f in inside if name.startswith(f + "/")]
            for entered in _folders(name, inside[-1] if inside else folder):
                inside.append(entered)
                follower = _name_after(read, entered, page, place)
                if follower is not None and _comes_before(follower, entered):
                    yield from _neighbours(read, entered)
                    early.append(entered)
            yield item


def _comes_before(name: str, folder: str) -> bool:
    """Whether it begins as the folder does and sorts before what is in it."""
    return len(name) > len(folder) and name.startswith(folder) and name[len(folder)] < "/"


def _folders(name: str, known: str) -> Iterator[str]:
    """The folders on the way to a name, from below the known one."""
    end = name.find("/", len(known) + 1 if known else 0)
    while end >= 0:
        yield name[:end]
        end = name.find("/", end + 1)


def _name_after(read: Read, folder: str, page: Sequence[StoredObject], place: int) -> str | None:
    """The first name that follows the folder's objects."""
    for index in range(place + 1, len(page)):
        if not page[index].name.startswith(folder + "/"):
            return page[index].name
    for following in read(folder.rpartition("/")[0], f"{folder}/{LAST}"):
        if following:
            return following[0].name
    return None


def _neighbours(read: Read, folder: str) -> Iterator[StoredObject]:
    for item in in_name_order(read, folder.rpartition("/")[0], f"{folder}/{LAST}"):
        if not _comes_before(item.name, folder):
            return
        yield item
