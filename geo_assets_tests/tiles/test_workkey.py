from __future__ import annotations

import gzip
import hashlib
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets.tiles.layers import Layer, LayerSet
from geo_assets.tiles.tile import Tile, TileError
from geo_assets.tiles.workkey import (
    compress,
    content_hash,
    feature_digest,
    ordered_source_digest,
    recipe,
    source_digests,
    tile_hash,
    work_key,
)

LAYERS = LayerSet((Layer("roads"), Layer("water")))


def test_the_content_hash_moves_with_layer_geometry_and_properties_and_nothing_else() -> None:
    base = ("roads", b"\x01\x02", '{"a":1}')
    hashes = {
        content_hash(*base),
        content_hash("road", b"s\x01\x02", '{"a":1}'),
        content_hash("roads", b"\x01\x03", '{"a":1}'),
        content_hash("roads", b"\x01\x02", '{"a":1.0}'),
        content_hash("roads", b"\x01\x02", '{"a":true}'),
        content_hash("roads", None, '{"a":1}'),
        content_hash("roads", b"", '{"a":1}'),
        content_hash("roads", b'\x01\x02{"a":1}', ""),
    }
    assert len(hashes) == 8
    assert content_hash(*base) == content_hash(*base)
    assert all(len(value) == 32 and set(value) <= set("0123456789abcdef") for value in hashes)


def test_the_digest_knows_the_type_of_an_id() -> None:
    digests = {
        feature_digest("osm", "roads", "123", "c"),
        feature_digest("osm", "roads", '"123"', "c"),
        feature_digest("osmr", "oads", "123", "c"),
        feature_digest("osm", "roads", "12", "3c"),
    }
    assert len(digests) == 4
    assert {len(digest) for digest in digests} == {16}


pairs = st.lists(st.tuples(st.integers(0, 4), st.binary(min_size=16, max_size=16)), max_size=30)


def digests_of(rows: list[tuple[int, bytes]], count: int = 5) -> list[str]:
    tiles = np.array([tile for tile, _ in rows], dtype=np.int64)
    digests = np.frombuffer(b"".join(digest for _, digest in rows), dtype=np.uint8).reshape(-1, 16)
    return source_digests(count, tiles, digests)


@given(pairs, st.randoms())
@settings(max_examples=200)
def test_rule_6_the_order_of_features_does_not_show(rows: list[tuple[int, bytes]], random: object) -> None:
    shuffled = list(rows)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert digests_of(rows) == digests_of(shuffled)


@given(pairs)
@settings(max_examples=200)
def test_a_source_digest_is_one_sha256_over_the_sorted_digests_of_the_tile(rows: list[tuple[int, bytes]]) -> None:
    expected = [
        hashlib.sha256(b"".join(sorted(digest for at, digest in rows if at == tile))).hexdigest() for tile in range(5)
    ]
    assert digests_of(rows) == expected


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=30))
@settings(max_examples=100)
def test_digests_that_are_in_order_already_give_the_same_source_digest(digests: list[bytes]) -> None:
    ordered = np.frombuffer(b"".join(sorted(digests)), dtype=np.uint8).reshape(-1, 16)
    assert ordered_source_digest(ordered) == digests_of([(0, digest) for digest in digests], 1)[0]


def test_digests_that_agree_in_their_first_half_are_ordered_by_their_second() -> None:
    rows = [(0, b"a" * 8 + bytes([n]) * 8) for n in (9, 3, 255, 0)]
    assert digests_of(rows) == digests_of(rows[::-1])


def test_a_feature_more_or_less_shows() -> None:
    rows = [(0, bytes([n]) * 16) for n in range(4)]
    assert len({digests_of(rows[:n])[0] for n in range(5)}) == 5


def test_arrays_that_do_not_fit_are_refused() -> None:
    digest = np.zeros((2, 16), dtype=np.uint8)
    with pytest.raises(ValueError, match="pair_tile has shape"):
        source_digests(3, np.array([0]), digest)
    with pytest.raises(ValueError, match=r"outside 0\.\.2"):
        source_digests(3, np.array([0, 3]), digest)
    assert source_digests(0, np.empty(0, dtype=np.int64), np.empty((0, 16), dtype=np.uint8)) == []


def test_600_000_pairs_over_5_000_tiles_are_digested_together() -> None:
    rng = np.random.default_rng(1)
    tiles, digests = np.sort(rng.integers(0, 5_000, 600_000)), rng.integers(0, 256, (600_000, 16), dtype=np.uint8)
    started = time.process_time()
    source_digests(5_000, tiles, digests)
    assert time.process_time() - started < 10


def test_more_tiles_than_sort_by_radix_are_ordered_too() -> None:
    count = 70_000
    tiles = np.arange(count)[::-1].copy()
    digests = np.random.default_rng(2).integers(0, 256, (count, 16), dtype=np.uint8)
    found = source_digests(count, tiles, digests)
    assert found[0] == hashlib.sha256(digests[-1].tobytes()).hexdigest()
    assert found[-1] == hashlib.sha256(digests[0].tobytes()).hexdigest()


def test_the_recipe_moves_with_everything_that_can_change_bytes() -> None:
    base = recipe(LAYERS, "1", "3.14.1", "9.7.0")
    assert base == recipe(replace(LAYERS, attribution="<b>someone</b>"), "1", "3.14.1", "9.7.0")
    described = LayerSet((Layer("roads", description="all"), Layer("water")))
    assert base == recipe(described, "1", "3.14.1", "9.7.0")
    changed = [
        recipe(LAYERS, "2", "3.14.1", "9.7.0"),
        recipe(LAYERS, "1", "3.14.2", "9.7.0"),
        recipe(LAYERS, "1", "3.14.1", "9.7.1"),
        recipe(replace(LAYERS, buffer=32), "1", "3.14.1", "9.7.0"),
        recipe(LayerSet((Layer("water"), Layer("roads"))), "1", "3.14.1", "9.7.0"),
        recipe(LayerSet((Layer("roads", simplify=1.0), Layer("water"))), "1", "3.14.1", "9.7.0"),
    ]
    assert len({base, *changed}) == 7


def test_the_work_key_is_that_of_the_tile_and_of_its_partition_key() -> None:
    tile = Tile(14, 9327, 4741)
    key = work_key(tile, "d", "r")
    assert key == work_key(tile.key, "d", "r") == hashlib.sha256(b"14/9327/4741|d|r").hexdigest()[:16]
    assert len({key, work_key(Tile(14, 9327, 4742), "d", "r"), work_key(tile, "e", "r"), work_key(tile, "d", "s")}) == 4
    with pytest.raises(TileError):
        work_key("14/1/1", "d", "r")


def test_rule_14_the_clock_is_in_no_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    before = compress(b"tile"), tile_hash(b"tile"), work_key("0:", "d", recipe(LAYERS, "1", "g", "p"))
    monkeypatch.setattr(time, "time", lambda: 4_000_000_000.0)
    assert (compress(b"tile"), tile_hash(b"tile"), work_key("0:", "d", recipe(LAYERS, "1", "g", "p"))) == before
    assert before[0][4:8] == b"\0\0\0\0", "the time in the header of gzip (RFC 1952, section 2.3)"


def test_what_is_compressed_comes_back() -> None:
    data = bytes(range(256)) * 100
    assert gzip.decompress(compress(data)) == data
    assert gzip.decompress(compress(b"")) == b""
    assert tile_hash(b"") == hashlib.sha256(b"").hexdigest()
