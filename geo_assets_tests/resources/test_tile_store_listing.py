from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resources.tile_store.listing import Read, in_name_order
from resources.tile_store.protocol import StoredObject

NAMES = st.sets(
    st.lists(st.sampled_from(["a", "a-", "a-b", "a!", "a.b", "aa", "b", "0"]), min_size=1, max_size=4).map(
        lambda parts: "/".join([*parts, "end"])  # No name is another's folder.
    ),
    max_size=40,
)


class Server:
    """Names in pages, by the bytes of the whole name as S3, or folder by folder as SeaweedFS."""

    def __init__(self, names: set[str], page: int, by_folder: bool) -> None:
        self.requests = 0
        self._page, self._by_folder = page, by_folder
        self._names = sorted(names, key=self._order)

    def _order(self, name: str) -> list[str] | str:
        return name.split("/") if self._by_folder else name

    def read(self, folder: str, after: str | None) -> Iterator[Sequence[StoredObject]]:
        below = [n for n in self._names if not folder or n.startswith(folder + "/")]
        if after is not None:
            below = [n for n in below if self._order(n) > self._order(after)]  # type: ignore[operator]
        for start in range(0, max(len(below), 1), self._page):
            self.requests += 1
            yield [StoredObject(n, 1, 0) for n in below[start : start + self._page]]


def names_of(read: Read, folder: str = "", after: str | None = None) -> list[str]:
    return [item.name for item in in_name_order(read, folder, after)]


@pytest.mark.parametrize("by_folder", [False, True], ids=["by bytes", "by folder"])
@settings(max_examples=250, deadline=None)
@given(names=NAMES, page=st.integers(1, 7), folder=st.sampled_from(["", "a", "a/a", "a-b"]))
def test_names_come_in_order_each_once(by_folder: bool, names: set[str], page: int, folder: str) -> None:
    server = Server(names, page, by_folder)
    assert names_of(server.read, folder) == sorted(n for n in names if not folder or n.startswith(folder + "/"))


def test_a_folder_whose_name_goes_on_before_a_slash_comes_first() -> None:
    server = Server({"a/x", "a/y/z", "a/y.z", "a-b/x", "a.b", "a0", "A"}, 100, by_folder=True)
    assert names_of(server.read) == ["A", "a-b/x", "a.b", "a/x", "a/y.z", "a/y/z", "a0"]


def test_tiles_cost_at_most_two_requests_more_a_page() -> None:
    names = {f"tiles/14/{x}/{y}/{r}-ab.mvt.gz" for x in range(40) for y in range(50) for r in (1, 2)}
    server = Server(names, 100, by_folder=True)
    assert names_of(server.read, "tiles") == sorted(names)
    assert server.requests < 3 * len(names) / 100 + 10
