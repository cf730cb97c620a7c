from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import shapely
from structlog.testing import capture_logs

from geo_assets.events import topics
from geo_assets.services import outbox
from geo_assets.services.dead_letters import list_dead_letters, replay, scan_topic
from geo_assets.services.ingest import Ingest
from geo_assets_tests.stacks import STACKS, changes_of
from geo_assets_tests.waiting import until
from geo_assets_tests.world import HERE, World, feature, tiles_touched, work_off
from resources.event_log.protocol import NewRecord


class Crash(BaseException):
    """A process that is gone: nothing may catch it."""


@pytest.fixture(params=STACKS)
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    with changes_of(request.param) as changes:
        world = World(tmp_path / "home", **changes)
        yield world
        world.close()


def hinted(world: World) -> set[str]:
    return {record.key or "" for record in scan_topic(world.stack.log, topics.TILES)}


def test_rule_3_an_edit_dirties_the_tiles_of_old_and_new_geometry_grown_by_the_buffer(world: World) -> None:
    old, new = feature(1, 1), feature(1, 2, at=(HERE[0] + 0.03, HERE[1] + 0.01))
    world.edit(old)
    world.build_dirty()
    (before,) = world.stack.features.scan()
    world.edit(new)
    (after,) = world.stack.features.scan()

    zooms = range(min(before.min_zoom, after.min_zoom), 17)
    buffer = world.stack.layers.reach_fraction
    assert {s.key for s in world.stack.ledger.dirty(10_000)} == set()
    world.mark_hints()
    dirty = {s.key for s in world.stack.ledger.dirty(10_000)}
    assert dirty == tiles_touched([old["geometry"], new["geometry"]], list(zooms), buffer)


def test_rule_1_every_event_ends_applied_duplicate_stale_or_dead(world: World) -> None:
    outcomes = [
        world.edit(feature(1, 5), event_id="a"),
        world.edit(feature(1, 5), event_id="a"),
        world.edit(feature(1, 5), event_id="b"),
        world.edit(feature(1, 4), event_id="c"),
        world.edit(feature(1, 5, name="other"), event_id="d"),
        world.edit(b"{not json", event_id="e"),
        world.edit({"type": "Feature", "id": True, "geometry": None, "properties": {}}, event_id="f"),
    ]

    assert [o.counts for o in outcomes[:4]] == [{"applied": 1}, {"duplicate": 1}, {"duplicate": 1}, {"stale": 1}]
    assert [letter.reason for letter in world.letters()] == ["version_conflict", "schema", "schema"]


def test_dead_letters_keep_the_raw_payload_and_say_where_it_came_from(world: World) -> None:
    body = (
        b'{"type": "Feature", "id": 7, "version": 1, "properties": {}, '
        b'"geometry": {"type": "Polygon", "coordinates": [[[0,0],[1,1],[1,0],[0,1],[0,0]]]}}'
    )
    outcome = world.edit(body, event_id="bow-tie")

    (letter,) = world.letters()
    assert letter.reason == "invalid_geometry"
    assert letter.payload == body
    assert letter.event_id == "bow-tie"
    assert (letter.origin.topic, letter.origin.offset) == (topics.RAW, outcome.record.offset)
    assert "Self-intersection" in letter.explanation


def test_a_feature_at_fault_in_a_collection_costs_only_itself(world: World) -> None:
    bad = feature(2, 1)
    bad["geometry"]["coordinates"][0][1] = [1000.0, 2000.0]
    outcome = world.edit(
        {"type": "FeatureCollection", "features": [feature(1, 1), bad, feature(3, 1)]}, event_id="mixed"
    )

    assert outcome.counts == {"applied": 2}
    (letter,) = outcome.letters
    assert (letter.reason, letter.index) == ("out_of_range", 1)
    assert json.loads(letter.payload)["id"] == 2


def test_replay_after_a_fix_applies_once_and_never_undoes_something_newer(world: World) -> None:
    bow_tie = feature(1, 1)
    lon, lat = HERE
    bow_tie["geometry"]["coordinates"] = [
        [[lon, lat], [lon + 0.001, lat + 0.001], [lon + 0.001, lat], [lon, lat + 0.001], [lon, lat]]
    ]
    world.edit(bow_tie, event_id="broken")
    (letter,) = world.letters()
    fixed = json.dumps(feature(1, 1)).encode()

    replay(world.stack, [letter], payload=fixed)
    replay(world.stack, [letter], payload=fixed)
    assert drain(world) == {"applied": 1, "duplicate": 1}

    world.edit(feature(1, 9), event_id="newer")
    replay(world.stack, [letter], payload=json.dumps(feature(1, 1, name="again")).encode())
    assert drain(world) == {"stale": 1}
    assert next(iter(world.stack.features.scan())).version == 9


@pytest.mark.parametrize(
    ("said", "known"),
    [(7, "7"), ("a[/red]", '"a[/red]"'), (2**70, str(2**70)), (None, None), (True, None), ([1], None), ("", None)],
)
def test_a_dead_letter_says_which_feature_it_was_where_that_can_be_read(
    world: World, said: object, known: object
) -> None:
    far_off = {**feature(1, 1, at=(24.9, 95.0)), "id": said}
    (letter,) = world.edit(far_off).letters
    assert letter.feature_id == known
    (letter,) = world.edit({"type": "FeatureCollection", "features": [far_off]}).letters
    assert letter.feature_id == known


def test_junk_among_dead_letters_is_one_line_however_much_it_is_and_hides_no_letter(world: World) -> None:
    world.stack.log.append([NewRecord(topics.DEAD_LETTERS, "x", value, {}) for value in (b"junk", b"{}", b"[]")])
    world.edit(b"nonsense", event_id="x")
    with capture_logs() as lines:
        assert len(list_dead_letters(world.stack.log)) == 1
    (line,) = lines
    assert line["records"] == 3
    assert {"partition", "offset", "error"} <= set(line["first"])


def test_a_replayed_letter_is_listed_as_replayed(world: World) -> None:
    world.edit(b"nonsense", event_id="x")
    (listed,) = list_dead_letters(world.stack.log)
    assert listed.replayed_ms is None

    replay(world.stack, [listed.letter])

    assert list_dead_letters(world.stack.log)[0].replayed_ms is not None


def drain(world: World) -> dict[str, int]:
    """Ingest what is in `[raw]` and not yet seen; outcomes."""
    seen: dict[str, int] = {}
    records = [
        r
        for r in scan_topic(world.stack.log, topics.RAW)
        if (r.partition, r.offset) not in world.__dict__.setdefault("drained", set())
    ]
    known = world.__dict__["drained"]
    fresh = [r for r in records if topics.HEADER_REPLAY in r.headers]
    known.update((r.partition, r.offset) for r in records)
    for outcome in world.ingest.work(fresh) if fresh else []:
        for name, count in outcome.counts.items():
            seen[name] = seen.get(name, 0) + count
    return seen


@pytest.mark.parametrize(("step", "nth"), [("apply", 0), ("dead letters", 0), ("send hints", 0), ("commit offsets", 0)])
def test_rule_2_ingest_killed_before_each_step_loses_nothing_and_counts_nothing_twice(
    tmp_path: Path, step: str, nth: int
) -> None:
    world = World(tmp_path / "home")
    try:
        for number in range(5):
            world.send(feature(number, 1, at=(HERE[0] + 0.01 * number, HERE[1])), event_id=f"e{number}")
        world.send(b"nonsense", event_id="bad")
        seen = itertools.count()

        def hook(name: str) -> None:
            if name == step and next(seen) == nth:
                raise Crash(step)

        doomed = Ingest(world.stack, step=hook)
        with pytest.raises(Crash):
            work_off(world, doomed)
        doomed.close()

        successor = Ingest(world.stack)
        work_off(world, successor)
        successor.close()

        assert sorted(f.feature_id for f in world.stack.features.scan()) == ["0", "1", "2", "3", "4"]
        assert [letter.event_id for letter in world.letters()] == ["bad"]
        assert world.stack.features.owed() == []
        world.build_dirty()
        shown = [p for key in world.published() if key.startswith("16:") for p in world.properties(key)]
        assert len(shown) >= 5
    finally:
        world.close()


def test_hints_that_a_dead_process_left_are_sent_by_the_next(world: World) -> None:
    from geo_assets.services.dead_letters import now_ms
    from geo_assets.services.dirty import DirtyPlan
    from geo_assets.services.ingest_worker import BodyTask, Circumstances, read_bodies, start
    from geo_assets.services.valid_edits import edit_of

    start(world.settings)
    at = Circumstances(world.stack.sources["city"], "gone", 1, None, None, False)
    (result,) = read_bodies([BodyTask(at, json.dumps(feature(1, 1)).encode())])
    edits = [edit_of(one.edit) for one in result.features if one.edit is not None]
    world.stack.features.apply(edits, DirtyPlan(world.stack.layers, 2_000), now_ms=now_ms())
    assert hinted(world) == set()

    assert outbox.send_hints(world.stack) > 0
    assert hinted(world)
    assert world.stack.features.owed() == []


def test_two_edits_of_different_features_in_one_tile_both_show_in_either_order(world: World) -> None:
    world.edit(feature(1, 7, name="seven"))
    world.edit(feature(2, 1, name="one"))
    world.build_dirty()
    key = next(key for key in world.published() if key.startswith("14:"))
    assert {p["name"] for p in world.properties(key)} == {"seven", "one"}


def test_a_create_older_than_the_delete_does_not_bring_it_back(world: World) -> None:
    world.edit(feature(1, 3))
    world.edit({"type": "Feature", "id": 1, "version": 5, "action": "delete"})
    late = world.edit(feature(1, 4))

    assert late.counts == {"stale": 1}
    world.build_dirty()
    assert world.published() == {}


def test_ids_keep_their_type(world: World) -> None:
    world.edit(feature(123, 1))
    world.edit(feature("123", 1))
    assert sorted(f.feature_id for f in world.stack.features.scan()) == ['"123"', "123"]


def test_rule_7_an_edit_over_its_cap_is_stored_marks_what_fits_and_leaves_the_rest_to_a_manifest(
    tmp_path: Path,
) -> None:
    world = World(tmp_path / "home", edit_cap=50)
    try:
        outcome = world.edit(feature(1, 1, size=0.2))
        assert outcome.counts == {"applied": 1}
        (manifest,) = world.stack.ledger.manifests()
        (stored,) = world.stack.features.scan()
        marked = world.mark_hints()
        keys = hinted(world) | set(world.stack.ledger.manifest_keys(manifest.id))

        assert (manifest.kind, manifest.state) == ("wide", "marked")
        assert 0 < marked <= 50
        zooms = list(range(stored.min_zoom, stored.max_zoom + 1))
        geometry = shapely.from_wkb(stored.geometry)
        assert keys == tiles_touched([geometry], zooms, world.stack.layers.reach_fraction)
    finally:
        world.close()


def test_rule_7_an_edit_beyond_the_manifest_cap_is_refused_with_the_number_and_what_to_do(tmp_path: Path) -> None:
    world = World(tmp_path / "home", edit_cap=50, manifest_cap=200)
    try:
        assert world.edit(feature(1, 1, size=2.0)).counts == {"applied": 1}
        (manifest,) = world.stack.ledger.manifests()
        assert (manifest.state, manifest.tiles) == ("refused", 0)
        assert "200" in (manifest.problem or "")
        assert "GEO_ASSETS_MANIFEST_CAP" in (manifest.problem or "")
    finally:
        world.close()


def test_a_body_in_the_inbox_is_fetched_by_its_pointer_and_checked_by_its_hash(world: World) -> None:
    import hashlib

    body = json.dumps(feature(1, 1)).encode()
    sha = hashlib.sha256(body).hexdigest()
    world.stack.tiles.put(f"inbox/{sha}", body)
    assert world.edit(b"", event_id="p", pointer=f"inbox/{sha}", sha256=sha).counts == {"applied": 1}

    missing = world.edit(b"", event_id="q", pointer="inbox/" + "0" * 64, sha256="0" * 64)
    assert [letter.reason for letter in missing.letters] == ["missing_body"]


def test_a_large_collection_goes_through_feature_by_feature(world: World) -> None:
    many = [feature(n, 1, at=(HERE[0] + 0.0001 * n, HERE[1]), note="x" * 400) for n in range(600)]
    body = json.dumps({"type": "FeatureCollection", "features": many}).encode()
    import hashlib

    sha = hashlib.sha256(body).hexdigest()
    world.stack.tiles.put(f"inbox/{sha}", body)
    assert world.edit(b"", event_id="large", pointer=f"inbox/{sha}", sha256=sha).counts == {"applied": 600}


def test_rule_1_records_that_retention_took_unread_are_counted_and_the_rest_is_read(world: World) -> None:
    import threading

    from geo_assets.services import ingest as module

    ingest = Ingest(world.stack)
    for number in range(8):
        world.send(feature(number, 1), event_id=f"read{number}")
    work_off(world, ingest)
    ingest.close()
    for number in range(8):
        world.send(feature(10 + number, 1), event_id=f"lost{number}")
    world.retention_takes(topics.RAW)
    world.send(feature(100, 1), event_id="new")
    ingest = Ingest(world.stack)
    before = module.LOST._value.get()
    stop = threading.Event()
    worker = threading.Thread(target=ingest.run, args=(stop,))
    worker.start()
    # Each partition says for itself what it lost, and the one with the new record may be the first.
    until(
        lambda: len(list(world.stack.features.scan())) >= 9 and module.LOST._value.get() >= before + 8,
        why="the rest is read, and every loss is told",
        every=0.05,
    )
    stop.set()
    worker.join()
    ingest.close()

    assert sorted(int(f.feature_id) for f in world.stack.features.scan()) == [*range(8), 100]
    assert module.LOST._value.get() == before + 8


def test_a_null_value_is_a_dead_letter(world: World) -> None:
    headers = {topics.HEADER_SOURCE: "city"}
    (position,) = world.stack.log.append([NewRecord(topics.RAW, "city:n", None, headers)])
    (record,) = world.stack.log.read(topics.RAW, position.partition, position.offset, 1)
    (outcome,) = world.ingest.work([record])
    assert [letter.reason for letter in outcome.letters] == ["null_value"]


def test_an_unknown_source_is_a_dead_letter(world: World) -> None:
    assert [letter.reason for letter in world.edit(feature(1, 1), source="nobody").letters] == ["schema"]


@pytest.mark.parametrize(
    "body",
    [
        None,
        1,
        [],
        "x",
        {"type": "Nothing"},
        {"type": "FeatureCollection"},
        {"type": "FeatureCollection", "features": 1},
    ],
)
def test_bodies_of_another_form_are_dead_letters(world: World, body: Any) -> None:
    outcome = world.edit(json.dumps(body).encode(), event_id="odd")
    assert [letter.reason for letter in outcome.letters] == ["schema"]


def test_a_wide_feature_that_is_deleted_leaves_no_ghost_in_a_published_tile(tmp_path: Path) -> None:
    world = World(tmp_path / "home", edit_cap=50, manifest_cap=200)
    try:
        world.edit(feature(1, 1))
        world.build_dirty()
        near = set(world.published())
        wide = {**feature(2, 1, at=(20.0, 56.0), size=10.0), "id": 2}
        world.edit(wide)
        world.build_dirty()
        shown = [key for key in near if any(p["version"] == 1 for p in world.properties(key))]
        assert all(len(world.properties(key)) == 2 for key in shown), "it shows in every tile that was there"

        world.edit({"type": "Feature", "id": 2, "version": 2, "action": "delete"})
        world.build_dirty()
        assert all(len(world.properties(key)) == 1 for key in shown)
        assert world.stack.ledger.counts().dirty_live == 0
        assert "refused" in {m.state for m in world.stack.ledger.manifests()}
    finally:
        world.close()
