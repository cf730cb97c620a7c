"""What every feature store promises, as tests. An adapter's test file derives from it and gives the fixtures."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from geo_assets_tests.waiting import patient
from resources.feature_store.protocol import (
    CHANGES_KEPT,
    Change,
    Edit,
    Feature,
    FeatureStore,
    OutboxRow,
    Position,
    TileBox,
    TileDigests,
)

REPOSITORY = Path(__file__).parents[2]
WORLD = TileBox("0:", 15, -180, -90, 180, 90)

Box = tuple[float, float, float, float]


def box_wkb(box: Box) -> bytes:
    """A rectangle as ISO WKB, little endian."""
    west, south, east, north = box
    ring = (west, south, east, south, east, north, west, north, west, south)
    return struct.pack("<BIII10d", 1, 3, 1, 5, *ring)


def feature(
    feature_id: str = '"a"',
    version: int = 1,
    *,
    box: Box | None = (10.0, 20.0, 11.0, 21.0),
    zooms: tuple[int, int] = (14, 18),
    layer: str = "buildings",
    content: str = "x",
    source: str = "city",
    time_ms: int = 1_000,
) -> Feature:
    """A feature that is as its arguments say."""
    content_hash = hashlib.sha256(f"{layer} {content} {box}".encode()).hexdigest()[:32]
    return Feature(
        source=source,
        feature_id=feature_id,
        layer=layer,
        version=version,
        geometry=None if box is None else box_wkb(box),
        bbox=box,
        properties=json.dumps({"content": content}),
        content_hash=content_hash,
        digest=hashlib.md5(f"{source} {layer} {feature_id} {content_hash}".encode()).digest(),
        min_zoom=zooms[0],
        max_zoom=zooms[1],
        vertex_count=0 if box is None else 5,
        event_time_ms=time_ms,
    )


def upsert(of: Feature, key: str | None = None) -> Edit:
    """An edit that writes the feature; its event key follows from it unless it is given."""
    key = key or hashlib.sha256(f"{of.source} {of.feature_id} {of.version} {of.content_hash}".encode()).hexdigest()
    return Edit(key, "event", "upsert", of.source, of.feature_id, of.version, of.event_time_ms, of.content_hash, of)


def delete(feature_id: str = '"a"', version: int = 2, key: str | None = None, source: str = "city") -> Edit:
    key = key or hashlib.sha256(f"delete {source} {feature_id} {version}".encode()).hexdigest()
    return Edit(key, "event", "delete", source, feature_id, version, 2_000, "deleted")


def no_plan(changes: Sequence[Change]) -> list[OutboxRow]:
    return []


def hint(key: str, kind: str = "tiles", group: str = "") -> OutboxRow:
    return OutboxRow(kind, key, b'{"z":1}', {"event-id": "e1"}, group)  # pyright: ignore[reportArgumentType]


Connect = Callable[[], FeatureStore]
"""Opens the one store of a test; again and again, as further processes would."""


def run_elsewhere(opening: str, code: str) -> subprocess.Popen[str]:
    """Run `code` in a process of its own, with `store` opened there and this module's helpers at hand."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    helpers = "from geo_assets_tests.resources.contract_feature_store import *"
    return subprocess.Popen(
        [sys.executable, "-c", f"{helpers}\n{opening}\n{code}"], env=environment, text=True, stdout=subprocess.PIPE
    )


def _pairs(digests: TileDigests) -> list[tuple[int, int, bytes, int, int]]:
    """Tile, number, digest, vertices and time of each feature that shows in a tile."""
    columns = (digests.pair_number, map(bytes, digests.pair_digest), digests.pair_vertices, digests.pair_time_ms)
    return [
        (int(tile), int(number), digest, int(vertices), int(time_ms))
        for tile, number, digest, vertices, time_ms in zip(digests.pair_tile, *columns, strict=True)
    ]


class FeatureStoreContract:
    """Derive, and give the fixtures `connect` and `opening`."""

    @pytest.fixture
    def store(self, connect: Connect) -> Iterator[FeatureStore]:
        store = connect()
        yield store
        store.close()

    def outcomes(self, store: FeatureStore, *edits: Edit) -> list[str]:
        return [applied.outcome for applied in store.apply(edits, no_plan, now_ms=5)]

    def shown(self, store: FeatureStore, box: TileBox = WORLD) -> set[str]:
        """Ids of the features in one box, which digests and features agree on."""
        rows, digests = store.features([box]), store.digests([box])
        assert sorted(map(bytes, rows.digest[rows.pair_row])) == sorted(map(bytes, digests.pair_digest))
        return {rows.feature_id[i] for i in rows.pair_row.tolist()}

    # -- edits and versions ------------------------------------------------------------------------------------------
    def test_it_is_a_feature_store(self, store: FeatureStore) -> None:
        assert isinstance(store, FeatureStore)

    def test_a_feature_is_read_back_as_it_was_written(self, store: FeatureStore) -> None:
        written = feature("123", 7, box=(-180.0, -85.5, 180.0, 0.1 + 0.2), content="ä ✓", zooms=(0, 22))
        assert self.outcomes(store, upsert(written)) == ["applied"]
        assert store.get("city", "123") == written
        assert store.get("city", '"123"') is None
        assert store.get("other", "123") is None

    def test_an_applied_edit_says_which_version_stands(self, store: FeatureStore) -> None:
        (applied,) = store.apply([upsert(feature(version=7))], no_plan, now_ms=5)
        assert (applied.outcome, applied.current_version) == ("applied", 7)
        (stale,) = store.apply([upsert(feature(version=3))], no_plan, now_ms=5)
        assert (stale.outcome, stale.current_version) == ("stale", 7)

    def test_rule_2_an_event_key_applies_once(self, store: FeatureStore) -> None:
        assert self.outcomes(store, upsert(feature(version=1), "k")) == ["applied"]
        assert self.outcomes(store, upsert(feature(version=2, content="y"), "k")) == ["duplicate"]
        assert self.outcomes(store, upsert(feature(version=2), "l"), upsert(feature(version=3), "l")) == [
            "applied",
            "duplicate",
        ]
        stands = store.get("city", '"a"')
        assert stands is not None
        assert stands.version == 2

    def test_a_lower_version_is_stale_and_changes_nothing(self, store: FeatureStore) -> None:
        newest = feature(version=5)
        assert self.outcomes(store, upsert(newest), upsert(feature(version=4, content="old"))) == ["applied", "stale"]
        assert store.get("city", '"a"') == newest

    def test_an_equal_version_is_a_duplicate_with_the_same_content_and_a_conflict_with_another(
        self, store: FeatureStore
    ) -> None:
        self.outcomes(store, upsert(feature(), "k1"))
        assert self.outcomes(store, upsert(feature(), "k2")) == ["duplicate"]
        assert self.outcomes(store, upsert(feature(content="y"), "k3")) == ["version_conflict"]
        assert self.outcomes(store, delete(version=1)) == ["version_conflict"]
        assert store.get("city", '"a"') == feature()

    def test_a_conflict_writes_nothing_not_even_its_event_key(self, store: FeatureStore) -> None:
        self.outcomes(store, upsert(feature(), "k1"))
        before = store.counts()
        assert self.outcomes(store, upsert(feature(content="y"), "k3")) == ["version_conflict"]
        assert store.counts() == before
        assert self.outcomes(store, upsert(feature(version=2, content="y"), "k3")) == ["applied"]

    def test_stale_and_duplicate_edits_leave_their_event_key(self, store: FeatureStore) -> None:
        self.outcomes(store, upsert(feature(version=5), "k1"), upsert(feature(version=4), "k2"))
        self.outcomes(store, upsert(feature(version=5), "k3"))
        assert store.counts().applied_keys == 3
        assert self.outcomes(store, upsert(feature(version=9), "k2")) == ["duplicate"]

    def test_a_delete_leaves_a_tombstone_that_guards_the_version(self, store: FeatureStore) -> None:
        self.outcomes(store, upsert(feature(version=1)))
        assert self.outcomes(store, delete(version=3)) == ["applied"]
        assert store.get("city", '"a"') is None
        assert store.counts().tombstones == 1
        assert self.outcomes(store, upsert(feature(version=2, content="late"))) == ["stale"]
        assert self.outcomes(store, upsert(feature(version=3))) == ["version_conflict"]
        assert self.outcomes(store, delete(version=3, key="again")) == ["duplicate"]
        assert self.outcomes(store, upsert(feature(version=4))) == ["applied"]
        assert store.counts().tombstones == 0
        assert store.get("city", '"a"') == feature(version=4)

    def test_a_delete_that_comes_first_keeps_an_older_create_out(self, store: FeatureStore) -> None:
        assert self.outcomes(store, delete(version=2)) == ["applied"]
        assert self.outcomes(store, upsert(feature(version=1))) == ["stale"]
        assert store.get("city", '"a"') is None

    def test_identity_is_source_and_typed_id(self, store: FeatureStore) -> None:
        edits = [upsert(feature("123", content="n")), upsert(feature('"123"', content="s"))]
        edits.append(upsert(feature("123", source="county")))
        assert self.outcomes(store, *edits) == ["applied"] * 3
        assert sum(store.counts().by_layer.values()) == 3

    def test_two_edits_of_one_feature_in_a_batch_see_each_other(self, store: FeatureStore) -> None:
        seen: list[Change] = []

        def plan(changes: Sequence[Change]) -> list[OutboxRow]:
            seen.extend(changes)
            return []

        first, second = feature(version=1), feature(version=3, content="y", box=(1.0, 1.0, 2.0, 2.0))
        edits = [upsert(first), delete(version=2), upsert(second), upsert(feature(version=2, content="z"))]
        assert [a.outcome for a in store.apply(edits, plan, now_ms=5)] == ["applied", "applied", "applied", "stale"]
        assert [(c.before, c.after) for c in seen] == [(None, first), (first, None), (None, second)]
        assert store.get("city", '"a"') == second
        assert store.counts().tombstones == 0

    def test_a_create_and_a_delete_in_one_batch_leave_a_tombstone(self, store: FeatureStore) -> None:
        assert self.outcomes(store, upsert(feature(version=1)), delete(version=2)) == ["applied", "applied"]
        assert store.get("city", '"a"') is None
        assert store.counts().tombstones == 1
        assert self.shown(store) == set()

    # -- the plan and the outbox -------------------------------------------------------------------------------------
    def test_rule_3_the_plan_sees_the_feature_before_and_after(self, store: FeatureStore) -> None:
        old, new = feature(version=1), feature(version=2, box=(30.0, 30.0, 31.0, 31.0))
        seen: list[list[Change]] = []

        def plan(changes: Sequence[Change]) -> list[OutboxRow]:
            seen.append(list(changes))
            return [hint("1:0"), hint("1:3")]

        store.apply([upsert(old)], plan, now_ms=5)
        store.apply([upsert(new)], plan, now_ms=5)
        store.apply([delete(version=3)], plan, now_ms=5)
        assert [(c.before, c.after) for (c,) in seen] == [(None, old), (old, new), (new, None)]
        assert [row.key for row in store.owed()] == ["1:0", "1:3"] * 3

    def test_the_plan_gets_only_what_changed(self, store: FeatureStore) -> None:
        seen: list[int] = []

        def plan(changes: Sequence[Change]) -> list[OutboxRow]:
            seen.append(len(changes))
            return [hint("1:0") for _ in changes]

        store.apply([upsert(feature(version=3)), upsert(feature(version=2))], plan, now_ms=5)
        store.apply([upsert(feature(version=1), "other")], plan, now_ms=5)
        assert seen[0] == 1
        assert sum(seen) == 1
        assert len(store.owed()) == 1

    def test_rule_1_a_plan_that_raises_leaves_nothing_of_the_batch(self, store: FeatureStore) -> None:
        def plan(changes: Sequence[Change]) -> list[OutboxRow]:
            raise ZeroDivisionError("planned badly")

        before = store.counts()
        with pytest.raises(ZeroDivisionError, match="planned badly"):
            store.apply([upsert(feature())], plan, now_ms=5)
        assert store.counts() == before
        assert store.get("city", '"a"') is None
        assert self.shown(store) == set()
        assert self.outcomes(store, upsert(feature())) == ["applied"]

    def test_an_upsert_that_disagrees_with_its_feature_is_refused_with_the_field(self, store: FeatureStore) -> None:
        good = upsert(feature())
        wrong = [(replace(good, feature=None), "feature"), (replace(good, version=9), "version")]
        wrong += [(replace(good, source="other"), "source"), (replace(good, content_hash="other"), "content_hash")]
        for edit, field in wrong:
            with pytest.raises(ValueError, match=field):
                store.apply([upsert(feature("1")), edit], no_plan, now_ms=5)
        assert store.counts().by_layer == {}

    def test_an_empty_batch_does_nothing(self, store: FeatureStore) -> None:
        assert store.apply([], no_plan, now_ms=5) == []

    def test_outbox_rows_are_kept_in_order_until_they_are_paid(self, store: FeatureStore) -> None:
        rows = [hint("1:1"), hint("1:0"), hint("2:00", "manifest", "m1"), hint("2:01", "manifest", "m2")]
        rows.append(OutboxRow("wide", "city:1", "ä".encode(), {}))
        store.apply([upsert(feature())], lambda _: rows, now_ms=5)
        owed = store.owed()
        assert [replace(row, id=0) for row in owed] == rows
        assert [row.id for row in owed] == sorted({row.id for row in owed})
        assert [row.key for row in store.owed(2)] == ["1:1", "1:0"]
        assert [row.key for row in store.owed(kind="manifest")] == ["2:00", "2:01"]
        assert [row.key for row in store.owed(kind="manifest", group="m2")] == ["2:01"]
        assert [row.key for row in store.owed(group="m1")] == ["2:00"]
        store.pay([owed[0].id, owed[4].id])
        assert [row.key for row in store.owed()] == ["1:0", "2:00", "2:01"]
        store.pay([row.id for row in store.owed()])
        assert store.owed() == []
        store.apply([upsert(feature(version=2))], lambda _: rows[:1], now_ms=5)
        assert store.owed()[0].id > owed[4].id

    # -- keys, tombstones, counts ------------------------------------------------------------------------------------
    def test_a_forgotten_event_key_applies_again(self, store: FeatureStore) -> None:
        self.outcomes(store, upsert(feature(version=1), "k1"), upsert(feature("1"), "k2"))
        store.forget_keys(["k1", "unknown"])
        assert self.outcomes(store, upsert(feature(version=2), "k1"), upsert(feature("1", 2), "k2")) == [
            "applied",
            "duplicate",
        ]

    def test_expiry_takes_what_was_written_before_and_nothing_else(self, store: FeatureStore) -> None:
        store.apply([delete("1"), upsert(feature("2"))], no_plan, now_ms=100)
        store.apply([delete("3"), upsert(feature("4"))], no_plan, now_ms=200)
        assert store.expire(tombstones_before_ms=100, keys_before_ms=100) == (0, 0)
        assert store.expire(tombstones_before_ms=101, keys_before_ms=200) == (1, 2)
        counts = store.counts()
        assert (counts.tombstones, counts.applied_keys, sum(counts.by_layer.values())) == (1, 2, 2)
        assert self.outcomes(store, upsert(feature("1", 1))) == ["applied"]
        assert self.outcomes(store, upsert(feature("3", 1))) == ["stale"]

    def test_counts_say_what_is_in_the_store(self, store: FeatureStore) -> None:
        assert store.counts().watermark_ms == 0
        edits = [upsert(feature("1", time_ms=50)), upsert(feature("2", layer="roads", time_ms=70))]
        edits += [upsert(feature("3", layer="roads", time_ms=60)), delete("9")]
        store.apply([replace(edits[3], event_time_ms=65), *edits[:3]], lambda _: [hint("0:")], now_ms=5)
        counts = store.counts()
        assert counts.by_layer == {"buildings": 1, "roads": 2}
        assert (counts.tombstones, counts.applied_keys, counts.outbox, counts.watermark_ms) == (1, 4, 1, 70)
        self.outcomes(store, replace(upsert(feature("2", 0, layer="roads", time_ms=999)), event_time_ms=999))
        assert store.counts().watermark_ms == 70

    def test_counts_say_how_current_each_source_is(self, store: FeatureStore) -> None:
        assert store.counts().sources == {}
        store.apply([upsert(feature("1", time_ms=50)), upsert(feature("2", time_ms=40))], no_plan, now_ms=100)
        other = feature("1", source="o:ther", time_ms=7)
        store.apply([upsert(other)], no_plan, now_ms=300)
        (mine,) = {feature("1").source}
        assert store.counts().sources == {mine: (50, 100), "o:ther": (7, 300)}
        # What is stale was received, and moves no watermark; what was applied before is neither.
        stale = upsert(feature("1", 0, time_ms=999))
        store.apply([stale], no_plan, now_ms=400)
        store.apply([stale], no_plan, now_ms=500)
        assert store.counts().sources[mine] == (50, 400)

    # -- reading for tiles -------------------------------------------------------------------------------------------
    def test_a_feature_shows_where_its_box_meets_the_tiles_box_edges_included(self, store: FeatureStore) -> None:
        self.outcomes(store, upsert(feature(box=(10.0, 20.0, 11.0, 21.0))))
        near = np.nextafter
        meets = [
            (10.5, 20.5, 10.6, 20.6),
            (0.0, 0.0, 10.0, 20.0),
            (11.0, 21.0, 12.0, 22.0),
            (-180.0, -90.0, 180.0, 90.0),
        ]
        misses = [
            (0.0, 0.0, float(near(10.0, 0)), 30.0),
            (float(near(11.0, 12)), 0.0, 30.0, 30.0),
            (0.0, 0.0, 30.0, float(near(20.0, 0))),
            (0.0, float(near(21.0, 22)), 30.0, 30.0),
        ]
        for box in meets:
            assert self.shown(store, TileBox("t", 15, *box)) == {'"a"'}, box
        for box in misses:
            assert self.shown(store, TileBox("t", 15, *box)) == set(), box

    def test_a_feature_nearer_to_0_than_any_32_bit_number_shows_where_its_box_meets_too(
        self, store: FeatureStore
    ) -> None:
        tiny = 1e-138
        self.outcomes(store, upsert(feature(box=(-tiny, -tiny, -tiny, -tiny))))
        for box in ((-1.0, -1.0, -tiny, -tiny), (-tiny, -tiny, 1.0, 1.0), (-tiny, -1.0, -tiny, 1.0)):
            assert self.shown(store, TileBox("t", 15, *box)) == {'"a"'}, box
            assert len(list(store.scan(bbox=box))) == 1
        assert self.shown(store, TileBox("t", 15, 0.0, 0.0, 1.0, 1.0)) == set()

    def test_a_feature_shows_at_the_zooms_of_its_row_only(self, store: FeatureStore) -> None:
        self.outcomes(store, upsert(feature("1", zooms=(14, 16))), upsert(feature("2", zooms=(1, 0))))
        shown = [zoom for zoom in range(23) if self.shown(store, replace(WORLD, zoom=zoom))]
        assert shown == [14, 15, 16]

    def test_a_feature_without_geometry_is_stored_and_shows_nowhere(self, store: FeatureStore) -> None:
        without = feature(version=2, box=None)
        self.outcomes(store, upsert(feature(version=1)))
        assert self.outcomes(store, upsert(without)) == ["applied"]
        assert store.get("city", '"a"') == without
        assert self.shown(store) == set()
        self.outcomes(store, upsert(feature(version=3)))
        assert self.shown(store) == {'"a"'}

    def test_a_moved_feature_leaves_its_old_place_and_a_deleted_one_every_place(self, store: FeatureStore) -> None:
        here, there = TileBox("h", 15, 9, 19, 12, 22), TileBox("t", 15, 29, 29, 32, 32)
        self.outcomes(store, upsert(feature(version=1)))
        self.outcomes(store, upsert(feature(version=2, box=(30.0, 30.0, 31.0, 31.0))))
        assert (self.shown(store, here), self.shown(store, there)) == (set(), {'"a"'})
        self.outcomes(store, delete(version=3))
        assert self.shown(store, there) == set()

    def test_rewritten_zooms_show_at_once(self, store: FeatureStore) -> None:
        self.outcomes(store, upsert(feature("1")), upsert(feature("2")), upsert(feature("3", box=None)))
        store.set_zooms({("city", "1"): (3, 4), ("city", "2"): (1, 0), ("city", "3"): (0, 22), ("city", "4"): (0, 22)})
        assert self.shown(store, replace(WORLD, zoom=3)) == {"1"}
        assert self.shown(store, replace(WORLD, zoom=15)) == set()
        store.set_zooms({("city", "2"): (15, 15)})
        assert self.shown(store, replace(WORLD, zoom=15)) == {"2"}
        rewritten = store.get("city", "1")
        assert rewritten is not None
        assert (rewritten.min_zoom, rewritten.max_zoom, rewritten.version) == (3, 4, 1)

    def test_each_feature_is_one_row_however_many_tiles_show_it(self, store: FeatureStore) -> None:
        self.outcomes(store, upsert(feature("1", time_ms=7)), upsert(feature("2", box=(50.0, 50.0, 51.0, 51.0))))
        empty = TileBox("e", 15, 0, 0, 1, 1)
        boxes = [WORLD, empty, WORLD, TileBox("w", 15, 9, 19, 12, 22)]
        rows = store.features(boxes)
        assert sorted(rows.feature_id) == ["1", "2"]
        assert rows.pair_tile.tolist() == [0, 0, 2, 2, 3]
        assert [rows.feature_id[i] for i in rows.pair_row[-1:]] == ["1"]
        row = rows.feature_id.index("1")
        whole = feature("1", time_ms=7)
        assert (rows.source[row], rows.layer[row], rows.geometry[row]) == ("city", "buildings", whole.geometry)
        assert (rows.properties[row], bytes(rows.digest[row])) == (whole.properties, whole.digest)
        assert (rows.vertex_count[row], rows.event_time_ms[row]) == (5, 7)
        digests = store.digests(boxes)
        assert digests.pair_tile.tolist() == [0, 0, 2, 2, 3]
        assert digests.pair_vertices.tolist() == [5] * 5
        assert digests.data_time_ms.tolist() == [1_000, 0, 1_000, 7]
        assert digests.pair_digest.dtype == rows.digest.dtype == np.uint8
        assert digests.pair_digest.shape == (5, 16)
        assert len(set(digests.pair_number.tolist())) == 2

    def test_no_boxes_and_empty_boxes_have_answers_of_the_right_shape(self, store: FeatureStore) -> None:
        for boxes in ([], [WORLD, WORLD]):
            digests, rows = store.digests(boxes), store.features(boxes)
            assert digests.pair_digest.shape == (0, 16)
            assert len(digests.pair_number) == len(digests.pair_vertices) == 0
            assert rows.digest.shape == (0, 16)
            assert digests.data_time_ms.tolist() == [0] * len(boxes)
            assert len(rows.feature_id) == len(rows.pair_tile) == len(rows.pair_row) == 0

    def test_the_features_of_a_tile_are_found_again_by_the_numbers_that_came_with_their_digests(
        self, store: FeatureStore
    ) -> None:
        made = [feature(str(i), box=(10 + i / 10, 20.0, 11.0 + i / 10, 21.0), content=str(i)) for i in range(300)]
        self.outcomes(store, *map(upsert, made))
        boxes = [TileBox("few", 15, 10, 19, 10.55, 22), WORLD]
        digests = store.digests(boxes)
        by_digest = {each.digest: each for each in made}
        for tile in (0, 1):
            shown = digests.pair_tile == tile
            rows = store.rows(digests.pair_number[shown].tolist())
            assert rows.digest.shape == (shown.sum(), 16)
            assert sorted(map(bytes, rows.digest)) == sorted(map(bytes, digests.pair_digest[shown]))
            for row, digest in enumerate(map(bytes, rows.digest)):
                of = by_digest[digest]
                assert (rows.source[row], rows.feature_id[row], rows.layer[row]) == (of.source, of.feature_id, of.layer)
                assert (rows.geometry[row], rows.properties[row]) == (of.geometry, of.properties)
        # A number and a digest of one place are of one feature.
        for number, digest in zip(digests.pair_number[:3].tolist(), digests.pair_digest[:3], strict=True):
            assert store.rows([number]).digest.tolist() == [digest.tolist()]

    def test_what_changed_since_its_number_was_read_has_another_digest_and_what_is_gone_is_left_out(
        self, store: FeatureStore
    ) -> None:
        self.outcomes(store, *(upsert(feature(str(i))) for i in range(4)))
        before = store.digests([WORLD])
        self.outcomes(
            store,
            upsert(feature("0", 2, content="y")),
            delete("1", 2),
            upsert(feature("2", 2, box=None)),
        )
        rows = store.rows([*before.pair_number.tolist(), 1 << 40, *before.pair_number.tolist()])
        assert sorted(rows.feature_id) == ["0", "3"]
        assert dict(zip(rows.feature_id, map(bytes, rows.digest), strict=True)) == {
            "0": feature("0", 2, content="y").digest,
            "3": feature("3").digest,
        }
        assert store.rows([]).digest.shape == (0, 16)

    # -- the log of changes ------------------------------------------------------------------------------------------
    def test_the_log_tells_what_changed_and_what_is_left_of_it(self, store: FeatureStore) -> None:
        self.outcomes(store, *(upsert(feature(str(i), content=str(i))) for i in range(7)))
        at = store.digests([WORLD])
        number = {bytes(d): n for d, n in zip(at.pair_digest, at.pair_number.tolist(), strict=True)}
        of = [number[feature(str(i), content=str(i)).digest] for i in range(7)]
        moved = feature("1", 2, box=(50.1, 50.0, 51.0, 51.3), zooms=(3, 9), time_ms=77)
        self.outcomes(store, upsert(moved), delete("2", 2), upsert(feature("3", 2, box=None)), upsert(moved))
        self.outcomes(store, upsert(feature("1", 1)))
        store.set_zooms({("city", "4"): (1, 0), ("city", "5"): (2, 4)})
        changes = store.changes(at.position, 100)
        assert changes is not None
        assert changes.number.tolist() == sorted(of[1:6])
        place = {n: i for i, n in enumerate(changes.number.tolist())}
        assert [changes.shows.tolist()[place[of[i]]] for i in (1, 2, 3, 4, 5)] == [True, False, False, False, True]
        one = place[of[1]]
        assert (bytes(changes.digest[one]), changes.box[one].tolist()) == (moved.digest, [50.1, 50.0, 51.0, 51.3])
        assert (changes.vertices[one], changes.time_ms[one], changes.zooms[one].tolist()) == (5, 77, [3, 9])
        assert changes.zooms[place[of[5]]].tolist() == [2, 4]
        assert at.position.number < changes.change.min() <= changes.change.max() == changes.position.number
        # From there on nothing changed, whoever asks, and edits that change nothing are none.
        self.outcomes(store, upsert(moved), delete("2", 1))
        assert store.digests([WORLD]).position == changes.position
        after = store.changes(changes.position, 100)
        assert after is not None
        assert (after.position, len(after.number), after.digest.shape) == (changes.position, 0, (0, 16))

    def test_the_log_says_when_it_cannot_tell(self, store: FeatureStore) -> None:
        assert store.digests([]).position == Position(0, 0)
        assert store.changes(Position(0, 0), 100) is None
        self.outcomes(store, upsert(feature("1")))
        first = store.digests([]).position
        assert store.changes(first, 0) is not None
        # Another history, and a future.
        assert store.changes(Position(first.number, first.mark + 1), 100) is None
        assert store.changes(Position(first.number + 1, first.mark), 100) is None
        self.outcomes(store, *(upsert(feature(str(i))) for i in range(2, 6)))
        assert store.changes(first, 3) is None
        changes = store.changes(first, 4)
        assert changes is not None
        assert len(changes.number) == 4

    def test_rule_9_the_log_keeps_the_last_changes_and_forgets_the_first(self, store: FeatureStore) -> None:
        self.outcomes(store, *(upsert(feature(str(i))) for i in range(2_600)))
        limits = {("city", str(i)): (3, 4) for i in range(2_600)}
        first = store.digests([]).position
        for _ in range(3):
            store.set_zooms(limits)
            limits = {identity: (zooms[0], zooms[1] + 1) for identity, zooms in limits.items()}
        # What is kept is enough for this one, and it was asked for by its number alone.
        changes = store.changes(first, CHANGES_KEPT)
        assert changes is not None
        assert len(changes.number) == 2_600
        store.set_zooms(limits)
        assert store.changes(first, 10 * CHANGES_KEPT) is None

    @pytest.mark.parametrize("seed", range(2))
    def test_digests_brought_up_to_date_by_the_log_are_those_that_are_asked_for(
        self, store: FeatureStore, connect: Connect, seed: int
    ) -> None:
        pick = random.Random(seed)

        def some(version: int, number: int) -> Edit:
            if pick.random() < 0.2:
                return delete(str(number), version)
            west, south = pick.randrange(30) / 3, pick.randrange(30) / 3
            box = None if pick.random() < 0.1 else (west, south, west + 1 / 3, south + pick.choice([0, 2 / 3]))
            zooms = pick.choice([(0, 22), (3, 5), (5, 9), (1, 0)])
            return upsert(feature(str(number), version, box=box, zooms=zooms, content=str(version), time_ms=version))

        boxes = [TileBox(str(i), i % 8, i / 3, 1.0, i / 3 + 3, 3.0 + i / 3) for i in range(12)]
        self.outcomes(store, *(some(1, number) for number in range(60)))
        seen = store.digests(boxes)
        shown: list[dict[int, tuple[bytes, int, int]]] = [{} for _ in boxes]
        for tile, *of in _pairs(seen):
            shown[tile][of[0]] = (of[1], of[2], of[3])
        position = seen.position
        other = connect()
        stop = threading.Event()

        def write() -> None:
            for version in range(2, 60):
                other.apply([some(version, pick.randrange(60)) for _ in range(3)], no_plan, now_ms=5)
                if version % 9 == 0:
                    other.set_zooms({("city", str(pick.randrange(60))): pick.choice([(0, 22), (4, 4), (1, 0)])})
            stop.set()

        thread = threading.Thread(target=write)
        thread.start()
        last = False
        while not last:
            last = stop.is_set()
            changes = store.changes(position, CHANGES_KEPT)
            assert changes is not None
            for tile, box in zip(shown, boxes, strict=True):
                for i, number in enumerate(changes.number.tolist()):
                    tile.pop(number, None)
                    west, south, east, north = changes.box[i].tolist()
                    if (
                        changes.shows[i]
                        and changes.zooms[i, 0] <= box.zoom <= changes.zooms[i, 1]
                        and (west <= box.east and box.west <= east and south <= box.north and box.south <= north)
                    ):
                        tile[number] = bytes(changes.digest[i]), int(changes.vertices[i]), int(changes.time_ms[i])
            position = changes.position
        thread.join()
        other.close()
        expected: list[dict[int, tuple[bytes, int, int]]] = [{} for _ in boxes]
        for tile, *of in _pairs(store.digests(boxes)):
            expected[tile][of[0]] = (of[1], of[2], of[3])
        assert shown == expected

    @pytest.mark.parametrize("seed", range(3))
    def test_many_boxes_answer_as_brute_force_does(self, store: FeatureStore, seed: int) -> None:
        pick = random.Random(seed)

        def any_box(size: float) -> Box:
            # A grid of thirds, so that edges meet and are no round numbers in any precision.
            west, south = pick.randrange(-60, 60) / 3, pick.randrange(-60, 60) / 3
            return west, south, west + pick.choice([0, 1 / 3, size]), south + pick.choice([0, 1 / 3, size])

        features = [
            feature(str(i), box=any_box(2.0), zooms=pick.choice([(0, 22), (3, 5), (5, 9), (1, 0)]), time_ms=i)
            for i in range(400)
        ]
        self.outcomes(store, *map(upsert, features))
        boxes = [TileBox(str(i), pick.randrange(12), *any_box(4.0)) for i in range(200)]
        expected = {
            (i, f.digest)
            for i, b in enumerate(boxes)
            for f in features
            if f.bbox is not None
            and f.min_zoom <= b.zoom <= f.max_zoom
            and f.bbox[0] <= b.east
            and b.west <= f.bbox[2]
            and f.bbox[1] <= b.north
            and b.south <= f.bbox[3]
        }
        digests, rows = store.digests(boxes), store.features(boxes)
        got = [*zip(digests.pair_tile.tolist(), map(bytes, digests.pair_digest), strict=True)]
        assert len(got) == len(expected)
        assert set(got) == expected
        assert np.all(np.diff(digests.pair_tile) >= 0)
        assert {(t, bytes(rows.digest[r])) for t, r in zip(rows.pair_tile, rows.pair_row, strict=True)} == expected
        assert len(set(rows.feature_id)) == len(rows.feature_id)
        newest = [
            max([0, *(f.event_time_ms for f in features if (i, f.digest) in expected)]) for i in range(len(boxes))
        ]
        assert digests.data_time_ms.tolist() == newest

    def test_one_answer_comes_from_one_snapshot(self, store: FeatureStore, connect: Connect) -> None:
        # Two features in two places always carry the same version; no answer may show two.
        far = (50.0, 50.0, 51.0, 51.0)
        stop = threading.Event()

        def write() -> None:
            other = connect()
            version = 0
            while not stop.is_set():
                version += 1
                both = [feature("1", version, time_ms=version), feature("2", version, box=far, time_ms=version)]
                other.apply(list(map(upsert, both)), no_plan, now_ms=5)
            other.close()

        thread = threading.Thread(target=write)
        thread.start()
        try:
            seen = set()
            deadline = time.monotonic() + patient(60)
            while len(seen) < 10 and time.monotonic() < deadline:
                boxes = [TileBox("h", 15, 9, 19, 12, 22), TileBox("t", 15, 49, 49, 52, 52)]
                times = store.digests(boxes).data_time_ms.tolist()
                assert times[0] == times[1]
                assert len(set(store.features(boxes).event_time_ms.tolist())) <= 1
                seen.add(times[0])
        finally:
            stop.set()
            thread.join()
        assert len(seen) >= 10

    # -- scanning ----------------------------------------------------------------------------------------------------
    def test_a_scan_gives_every_feature_once_by_source_layer_and_box(self, store: FeatureStore) -> None:
        features = [
            feature(
                str(i), source="ab"[i % 2], layer=["roads", "water", "land"][i % 3], box=(i / 100, 0.0, i / 100, 1.0)
            )
            for i in range(2_500)
        ]
        features.append(feature("none", source="a", layer="roads", box=None))
        self.outcomes(store, *map(upsert, features))
        assert sorted(f.feature_id for f in store.scan()) == sorted(f.feature_id for f in features)
        assert list(store.scan(source="none")) == []
        chosen = [f.feature_id for f in features if f.source == "a" and f.layer == "roads"]
        assert sorted(f.feature_id for f in store.scan(source="a", layer="roads")) == sorted(chosen)
        box = (10.0, 0.5, 21.5, 0.6)
        inside = [f for f in features if f.bbox is not None and 10.0 <= f.bbox[0] <= 21.5]
        assert sorted(f.feature_id for f in store.scan(bbox=box)) == sorted(f.feature_id for f in inside)
        chosen = [f.feature_id for f in inside if f.layer == "water"]
        assert sorted(f.feature_id for f in store.scan(bbox=box, layer="water")) == sorted(chosen)
        assert next(store.scan(source="b")) in features

    def test_a_store_may_be_written_while_it_is_scanned(self, store: FeatureStore) -> None:
        self.outcomes(store, *(upsert(feature(str(i))) for i in range(1_500)))
        seen = set()
        for found in store.scan():
            if not seen:
                self.outcomes(store, delete("1499"), upsert(feature("new")))
            seen.add(found.feature_id)
        assert {str(i) for i in range(1_499)} <= seen

    # -- any edits, against a model ----------------------------------------------------------------------------------
    edits = st.lists(
        st.tuples(
            st.sampled_from(["upsert", "upsert", "delete"]),
            st.sampled_from(["1", '"1"', "2"]),
            st.integers(1, 4),
            st.sampled_from("xy"),
            st.sampled_from([None, "k1", "k2"]),
        ),
        max_size=12,
    )

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(batches=st.lists(edits, max_size=4))
    def test_any_edits_end_as_the_rules_say(self, connect: Connect, batches: list, request) -> None:
        store = connect()
        source = f"s{time.monotonic_ns()}"
        standing: dict[str, tuple[int, str, Feature | None]] = {}
        keys: set[str] = set()
        number = 0
        for batch in batches:
            edits, expected = [], []
            for action, feature_id, version, content, key in batch:
                number += 1
                key = f"{source} {key or number}"
                made = feature(feature_id, version, content=content, source=source)
                edit = upsert(made, key) if action == "upsert" else delete(feature_id, version, key, source)
                edits.append(edit)
                now = standing.get(feature_id)
                if key in keys:
                    expected.append("duplicate")
                elif now is None or version > now[0]:
                    expected.append("applied")
                    standing[feature_id] = version, edit.content_hash, edit.feature
                elif version < now[0]:
                    expected.append("stale")
                else:
                    expected.append("duplicate" if edit.content_hash == now[1] else "version_conflict")
                if expected[-1] != "version_conflict":
                    keys.add(key)
            assert self.outcomes(store, *edits) == expected
            for feature_id, (_, _, stands) in standing.items():
                assert store.get(source, feature_id) == stands
            rows = store.features([WORLD])
            shown = {rows.feature_id[i] for i in rows.pair_row.tolist() if rows.source[i] == source}
            assert shown == {i for i, (_, _, stands) in standing.items() if stands is not None}
        store.close()

    # -- many at once, and kills -------------------------------------------------------------------------------------
    def test_rule_2_two_processes_that_apply_the_same_edits_apply_each_once(
        self, store: FeatureStore, opening: str
    ) -> None:
        code = """
applied = 0
for start in range(0, 300, 10):
    edits = [upsert(feature(str(i))) for i in range(start, start + 10)]
    done = store.apply(edits, lambda changes: [hint("0:") for _ in changes], now_ms=5)
    applied += sum(a.outcome == "applied" for a in done)
print(applied)
"""
        processes = [run_elsewhere(opening, code) for _ in range(2)]
        assert sum(int(process.communicate(timeout=patient(60))[0]) for process in processes) == 300
        counts = store.counts()
        assert (counts.outbox, counts.applied_keys, counts.by_layer) == (300, 300, {"buildings": 300})

    def test_rule_1_a_process_killed_while_it_applies_leaves_whole_batches_only(
        self, opening: str, connect: Connect
    ) -> None:
        code = """
import itertools
print("ready", flush=True)
for batch in itertools.count(START):
    edits = [upsert(feature(str(i), batch + 1, time_ms=batch + 1)) for i in range(200)]
    store.apply(edits, lambda changes: [hint("0:") for _ in changes], now_ms=5)
"""
        connect().close()
        batches = 0
        for attempt in range(3):
            process = run_elsewhere(opening, code.replace("START", str(batches)))
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.2 + 0.05 * attempt)
            process.send_signal(signal.SIGKILL)
            process.communicate()
            store = connect()
            versions = {f.version for f in store.scan()}
            assert len(versions) <= 1
            batches = versions.pop() if versions else 0
            counts = store.counts()
            assert counts.outbox == counts.applied_keys == 200 * batches
            assert counts.watermark_ms == batches
            assert len(self.shown(store)) == (200 if batches else 0)
            store.close()
        assert batches > 0

    def test_a_bulk_of_features_takes_seconds_not_minutes(self, store: FeatureStore) -> None:
        began = time.perf_counter()
        for start in range(0, 10_000, 2_000):
            boxes = [
                (10 + i % 100 / 100, 20 + i / 10_000, 10.001 + i % 100 / 100, 20.001 + i / 10_000)
                for i in range(start, start + 2_000)
            ]
            edits = [upsert(feature(str(start + i), box=box)) for i, box in enumerate(boxes)]
            assert self.outcomes(store, *edits) == ["applied"] * 2_000
        questions = [TileBox("t", 15, 10 + i / 500, 20.0, 10.02 + i / 500, 21.0) for i in range(500)]
        assert len(store.digests(questions).pair_tile) >= 10_000
        # Measured 1.5 s on an idle core; a statement a feature and a query a box take minutes.
        assert time.perf_counter() - began < patient(30)
