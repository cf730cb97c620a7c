"""A tile put together from encoded features is held against a full build, whatever came and went before."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import shapely
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from geo_assets.tiles import workkey
from geo_assets.tiles.encode import EncodedTile, TileFeatures, encode_tiles
from geo_assets.tiles.encode.assembly import EncodedFeatures, Strings, encode_features
from geo_assets.tiles.encode.cache import EncodedCache
from geo_assets.tiles.layers import Layer, LayerSet
from geo_assets.tiles.tile import Tile
from geo_assets_tests.tiles.encoding import lon_lat
from geo_assets_tests.tiles.test_encode import PROPERTIES
from geo_assets_tests.tiles.test_encode_few import GEOMETRY, WRONG

TILE = Tile(14, 9326, 4738)
LAYERS = LayerSet((Layer("a", simplify=2.0), Layer("b", simplify=0.0), Layer("c", attributes=("name", "_id", "é"))))
OTHERS = LayerSet((Layer("c"), Layer("a", attributes=("a",)), Layer("b", simplify=1.0)))
TILES = [TILE, Tile(14, 9327, 4738), Tile(16, 37304, 18953), Tile(9, 291, 148), Tile(0, 0, 0)]


class Row(NamedTuple):
    """A feature as the store has it."""

    source: str
    feature_id: str
    layer: str
    geometry: bytes | None
    properties: str

    @property
    def digest(self) -> bytes:
        content = workkey.content_hash(self.layer, self.geometry, self.properties)
        return workkey.feature_digest(self.source, self.layer, self.feature_id, content)


def row(number: Any, geometry: Any = None, properties: Any = "{}", layer: str = "a", source: str = "one") -> Row:
    """A feature of its parts; ids and properties may be given as JSON text."""
    at = lon_lat(TILE, shapely.Point(10, 20)) if geometry is None else geometry
    return Row(
        source,
        number if isinstance(number, str) else json.dumps(number),
        layer,
        at if isinstance(at, bytes) else shapely.to_wkb(at),
        properties if isinstance(properties, str) else json.dumps(properties),
    )


def columns(rows: list[Row], tiles: list[Tile]) -> TileFeatures:
    """Every tile is to show every row."""
    return TileFeatures(
        [each.source for each in rows],
        [each.feature_id for each in rows],
        [each.layer for each in rows],
        [each.geometry for each in rows],
        [each.properties for each in rows],
        tiles,
        np.arange(len(tiles)).repeat(len(rows)),
        np.tile(np.arange(len(rows)), len(tiles)),
    )


def digests_of(rows: list[Row]) -> Any:
    return np.frombuffer(b"".join(each.digest for each in rows), np.uint8).reshape(-1, 16)


def fully(rows: list[Row], tile: Tile, layers: LayerSet = LAYERS) -> EncodedTile:
    (encoded,) = encode_tiles(columns(rows, [tile]), layers)
    return encoded


def encoded(rows: list[Row], tile: Tile, layers: LayerSet = LAYERS) -> EncodedFeatures:
    (features,) = encode_features(columns(rows, [tile]), digests_of(rows), layers)
    return features


def rebuilt(
    kept: EncodedFeatures | None, rows: list[Row], tile: Tile, layers: LayerSet = LAYERS
) -> tuple[EncodedTile, EncodedFeatures, int]:
    """The tile from what is kept of it, what to keep of it now, and how many features were encoded for that."""
    kept = kept or EncodedFeatures.none()
    keep, missing = kept.match(digests_of(rows))
    new = [rows[number] for number in missing.tolist()]
    features = kept.changed(keep, encoded(new, tile, layers))
    return features.assembled(tile, layers), features, len(new)


IDS = st.integers(-1, 5).map(json.dumps) | st.sampled_from(['"x"', '"1"', '""', "1.5", "007", "٣", str(1 << 64)])
ROWS = st.builds(
    lambda geometry, number, properties, layer, source: row(
        number, b"" if geometry is None else geometry, properties, layer, source
    ),
    GEOMETRY,
    IDS,
    PROPERTIES | WRONG,
    st.sampled_from("aabbccx"),
    st.sampled_from(["one", "two"]),
)
EDIT = st.one_of(
    st.tuples(st.just("put"), ROWS),
    st.tuples(st.just("delete"), st.integers(0, 20)),
    st.tuples(st.just("move"), st.integers(0, 20), GEOMETRY),
    st.tuples(st.just("attributes"), st.integers(0, 20), PROPERTIES | WRONG),
    st.tuples(st.just("attributes"), st.integers(0, 20), st.sampled_from(['{"a":1}', '{"a":1.0}', '{"a":true}'])),
    st.tuples(st.just("layer"), st.integers(0, 20), st.sampled_from("abcx")),
)


def apply(live: dict[tuple[str, str], Row], edit: Any) -> None:
    """What an edit leaves of the features, by identity."""
    kind, what, *to = edit
    if kind == "put":
        live[what.source, what.feature_id] = what
    elif live:
        at = list(live)[what % len(live)]
        if kind == "delete":
            del live[at]
        elif kind == "move":
            geometry = to[0]
            wkb = geometry if isinstance(geometry, bytes) else b"" if geometry is None else shapely.to_wkb(geometry)
            live[at] = live[at]._replace(geometry=wkb)
        elif kind == "attributes":
            text = to[0] if isinstance(to[0], str) else json.dumps(to[0])
            live[at] = live[at]._replace(properties=text)
        else:
            live[at] = live[at]._replace(layer=to[0])


SETTINGS = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@SETTINGS
@given(st.lists(ROWS, max_size=8), st.lists(st.lists(EDIT, max_size=3), max_size=6), st.sampled_from(TILES))
@example([row(1, properties='{"a":1}'), row(2, properties='{"a":true}')], [[("attributes", 0, '{"a":1.0}')]], TILE)
@example([row(1, properties='{"a":-0.0}')], [[("put", row(2, properties='{"a":0.0}'))], [("delete", 0)]], TILE)
@example([row(1, properties='{"a":"\\ud800"}')], [[("put", row(2, properties='{"a":"\\ufffd"}'))]], TILE)
@example([row(1, properties='{"a":"\\ud800"}')], [[("put", row(2, properties='{"a":"?"}'))]], TILE)
@example([row('"é"', properties='{"_id":5}')], [[("put", row('"e"'))], [("attributes", 0, "{}")]], TILE)
def test_rule_6_a_tile_put_together_after_any_edits_has_the_bytes_of_a_full_build(
    rows: list[Row], steps: list[list[Any]], tile: Tile
) -> None:
    live = {(each.source, each.feature_id): each for each in rows}
    kept: EncodedFeatures | None = None
    for edits in [[], *steps]:
        for edit in edits:
            apply(live, edit)
        now = list(live.values())
        got, kept, new = rebuilt(kept, now[::-1], tile)
        assert got == fully(now, tile)
        assert len(kept) == len(now)
        assert sorted(map(bytes, kept.digests())) == sorted(each.digest for each in now)
        event(f"encoded {new} of {len(now)}, left out {len(got.left_out) > 0}")


@pytest.mark.parametrize("seed", range(3))
def test_rule_6_edits_that_move_numbers_over_the_bounds_of_their_bytes_give_the_bytes_of_a_full_build(
    seed: int,
) -> None:
    chance = random.Random(seed)

    def value() -> Any:
        return chance.choice([chance.randrange(500), f"text {chance.randrange(200)}", chance.random() < 0.5, None])

    def attributes() -> dict[str, Any]:
        return {key: value() for key in chance.sample("abcdefghijkl", chance.randrange(6))}

    def one(number: int) -> Row:
        name = number if number % 3 else f"id {number}"
        return row(name, properties=attributes(), layer=chance.choice("ab"), source=chance.choice(["one", "two"]))

    rows = {number: one(number) for number in range(240)}
    kept: EncodedFeatures | None = None
    for step in range(60):
        got, kept, _ = rebuilt(kept, list(rows.values()), TILE)
        assert got == fully(list(rows.values()), TILE)
        for number in chance.sample(range(240), chance.choice([1, 1, 1, 2, 5, 20])):
            before = rows.get(number)
            if before is None or step % 7 == 6:
                rows[number] = one(number)
            elif step % 11 == 10 and len(rows) > 200:
                del rows[number]
            else:
                # As most edits are: the same feature with other attributes.
                rows[number] = before._replace(properties=json.dumps(attributes()))
    assert kept is not None
    assert len(kept.values) > 127


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(ROWS, max_size=6),
    st.lists(st.tuples(EDIT, st.lists(st.sampled_from(TILES), max_size=3), st.booleans()), max_size=10),
    st.sampled_from([0, 20_000, 60_000, 1 << 30]),
)
def test_rule_6_one_cache_for_many_tiles_and_recipes_gives_a_full_builds_bytes_before_and_after_evictions(
    rows: list[Row], steps: list[Any], max_bytes: int
) -> None:
    live = {(each.source, each.feature_id): each for each in rows}
    cache = EncodedCache(max_bytes)
    for edit, tiles, other in steps:
        apply(live, edit)
        layers = OTHERS if other else LAYERS
        recipe = workkey.recipe(layers, "1", "3", "9")
        for tile in tiles:
            now = list(live.values())
            kept = cache.get(recipe, tile.key)
            got, features, _ = rebuilt(kept, now, tile, layers)
            cache.put(recipe, tile.key, features)
            assert got == fully(now, tile, layers)
            assert cache.nbytes <= max_bytes
            event(f"kept: {kept is not None}")


def town(count: int, seed: int = 1) -> list[Row]:
    """Buildings with a name, a height and a kind each."""
    random_ = np.random.default_rng(seed)
    result: list[Row] = []
    for number in range(count):
        x, y = random_.uniform(0, 4000, 2)
        shape = shapely.box(x, y, x + random_.uniform(5, 90), y + 40)
        own = {"height": round(float(random_.uniform(3, 30)), 2), "name": f"House {number}", "kind": "abc"[number % 3]}
        result.append(row(number, lon_lat(TILE, shape), own, "ab"[number % 2]))
    return result


def test_of_a_thousand_features_one_that_changed_is_the_only_one_that_is_encoded() -> None:
    rows = town(1_000)
    _, kept, new = rebuilt(None, rows, TILE)
    assert new == 1_000
    for properties in ('{"height":3.5}', '{"height":1000.25,"name":"New"}', '{"zip":1}', "{}"):
        rows[500] = rows[500]._replace(properties=properties)
        got, kept, new = rebuilt(kept, rows, TILE)
        assert new == 1
        assert got == fully(rows, TILE)


def test_features_whose_digests_begin_alike_are_told_apart() -> None:
    rows = town(4)
    alike = digests_of(rows).copy()
    alike[:, :8] = alike[0, :8]
    (kept,) = encode_features(columns(rows, [TILE]), alike, LAYERS)
    other = alike[1:].copy()
    other[0, 15] ^= 1
    keep, missing = kept.match(other)
    # Which of them are found among those that begin alike is free; what is not found is encoded again.
    assert missing.tolist()[0] == 0
    assert keep.sum() + len(missing) == len(other)
    (more,) = encode_features(columns([rows[1:][at] for at in missing.tolist()], [TILE]), other[missing], LAYERS)
    assert kept.changed(keep, more).assembled(TILE, LAYERS) == fully(rows[1:], TILE)


# -- what is kept ------------------------------------------------------------------------------------------------------
def other_strings(strings: Strings) -> Strings:
    """The same lengths, the last byte flipped."""
    return Strings(strings.data[:-1] + bytes([strings.data[-1] ^ 1]), strings.bounds)


def flipped(array: Any) -> Any:
    """One number in the middle of an array changed."""
    result = array.copy()
    result.flat[result.size // 2] ^= 1
    return result


def longer_first(bounds: Any) -> Any:
    """The first is a byte longer, the second one shorter."""
    result = bounds.copy()
    result[1] += 1
    return result


BROKEN = {
    "a layer": lambda kept: replace(kept, layer=np.where(kept.layer == 1, 2, kept.layer).astype(np.int32)),
    "the order": lambda kept: replace(kept, id=kept.id[::-1].copy()),
    "the bytes": lambda kept: replace(kept, bodies=other_strings(kept.bodies)),
    "a key": lambda kept: replace(kept, names=[f"{name}2" for name in kept.names]),
    "a value's place": lambda kept: replace(kept, value=flipped(kept.value)),
    "a value": lambda kept: replace(kept, fields=other_strings(kept.fields)),
    "a tag": lambda kept: replace(kept, key=np.roll(kept.key, 1)),
    "a body's length": lambda kept: replace(kept, bodies=Strings(kept.bodies.data, longer_first(kept.bodies.bounds))),
    "the box": lambda kept: replace(kept, box=kept.box + 1),
    "whose an item is": lambda kept: replace(kept, feature=np.roll(kept.feature, 1)),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_whatever_is_broken_in_what_is_kept_shows_beside_a_full_build(broken: str) -> None:
    rows = town(40)
    _, kept, _ = rebuilt(None, rows, TILE)
    rows[3] = rows[3]._replace(properties='{"height":1}')
    assert rebuilt(kept, rows, TILE)[0] == fully(rows, TILE)
    assert rebuilt(BROKEN[broken](kept), rows, TILE)[0] != fully(rows, TILE)


def test_a_feature_that_is_missing_or_not_known_any_more_is_encoded_again() -> None:
    rows = town(40)
    _, kept, _ = rebuilt(None, rows, TILE)
    few = kept.changed(np.arange(40) != 7, EncodedFeatures.none())
    unknown = replace(kept, high=flipped(kept.high))
    for broken in (few, unknown):
        got, _, new = rebuilt(broken, rows, TILE)
        assert (got, new) == (fully(rows, TILE), 1)


def test_what_is_kept_is_never_changed_by_what_is_made_of_it() -> None:
    rows = town(60)
    first, kept, _ = rebuilt(None, rows, TILE)
    for number in range(5):
        later = [each for at, each in enumerate(rows) if at % 5 != number]
        assert rebuilt(kept, later, TILE)[0] == fully(later, TILE)
    assert rebuilt(kept, rows, TILE)[::2] == (first, 0)


def test_rule_9_a_cache_holds_what_it_may_and_lets_go_of_the_tile_that_was_asked_for_the_longest_ago() -> None:
    _, kept, _ = rebuilt(None, town(30), TILE)
    cache = EncodedCache(3 * kept.nbytes)
    for key in "abc":
        cache.put("r", key, kept)
    assert cache.get("r", "a") is kept
    cache.put("r", "d", kept)
    assert [cache.get("r", key) is kept for key in "abcd"] == [True, False, True, True]
    assert (len(cache), cache.nbytes) == (3, 3 * kept.nbytes)
    assert cache.get("another recipe", "a") is None
    cache.discard("r", "a")
    cache.discard("r", "none")
    cache.put("r", "c", kept)
    assert (len(cache), cache.nbytes) == (2, 2 * kept.nbytes)


def test_rule_9_what_is_larger_than_the_cache_is_not_kept_and_costs_nobody_his_place() -> None:
    _, small, _ = rebuilt(None, town(10), TILE)
    _, large, _ = rebuilt(None, town(400), TILE)
    cache = EncodedCache(large.nbytes - 1)
    cache.put("r", "a", small)
    cache.put("r", "b", large)
    assert cache.get("r", "b") is None
    assert cache.get("r", "a") is small
    # What was kept of a tile is older than what was not.
    cache.put("r", "a", large)
    assert (len(cache), cache.nbytes) == (0, 0)


def size_of(kept: EncodedFeatures) -> int:
    """Bytes that Python says everything in it takes."""
    total = 0
    for name in EncodedFeatures.__slots__:
        value = getattr(kept, name)
        parts = [value.data, value.bounds] if isinstance(value, Strings) else [value]
        for part in parts:
            total += sys.getsizeof(part) if isinstance(part, bytes | list | tuple) else part.nbytes + 112
            if isinstance(part, list):
                total += sum(map(sys.getsizeof, part))
    return total


@pytest.mark.parametrize(
    "rows",
    [
        [],
        town(1_000),
        [row(f'"ключ {n} 😀"', properties={f"é{n % 7} 😀": "длинный текст 😀" * 20}) for n in range(300)],
        [row(n, properties={f"k{k}": n * 31 + k + 0.25 for k in range(9)}) for n in range(200)],
        [row(n, properties={"n": (1 << 63) + n, "m": -n, "t": n % 2 == 0}, source=f"s{n}") for n in range(300)],
    ],
    ids=["nothing", "town", "texts", "numbers", "integers"],
)
def test_rule_9_what_is_kept_takes_no_more_memory_than_it_counts(rows: list[Row]) -> None:
    _, kept, _ = rebuilt(None, rows, TILE)
    for number in range(0, len(rows), 50):
        rows[number] = rows[number]._replace(properties='{"k":"replaced"}')
    _, kept, _ = rebuilt(kept, rows, TILE)
    assert size_of(kept) <= kept.nbytes


def held_by(array: Any) -> int:
    """Bytes of what an array is a view of."""
    # What is compiled makes arrays whose memory is their own, behind a base that does not tell its size.
    return array.base.nbytes if isinstance(array.base, np.ndarray) else array.nbytes


def test_rule_9_what_is_kept_of_a_tile_holds_nothing_of_the_batch_that_it_was_encoded_in() -> None:
    rows = town(60)
    features = encode_features(columns(rows, TILES), digests_of(rows), LAYERS)
    for tile, first in zip(TILES, features, strict=True):
        _, later, _ = rebuilt(first, rows[1:], tile)
        for kept in (first, later):
            parts = [getattr(kept, name) for name in EncodedFeatures.__slots__]
            parts += [part.bounds for part in parts if isinstance(part, Strings)]
            arrays = [part for part in parts if isinstance(part, np.ndarray) and part.size]
            assert all(held_by(array) <= array.nbytes for array in arrays)


def test_values_and_ids_that_nobody_has_any_more_are_not_kept() -> None:
    rows = [row(f'"w{number}"', properties={"name": f"first {number}"}) for number in range(50)]
    _, kept, _ = rebuilt(None, rows, TILE)
    size = kept.nbytes
    for turn in range(30):
        rows = [row(f'"w{turn} {number}"', properties={"name": f"{turn} {number}"}) for number in range(50)]
        _, kept, _ = rebuilt(kept, rows, TILE)
    assert kept.nbytes < 1.2 * size
