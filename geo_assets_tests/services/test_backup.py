"""Backup and restore on both stacks: what came after the backup comes again from the log, once, and the map agrees."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from geo_assets.events import topics
from geo_assets.services.backup import (
    CONTENTS,
    BackupError,
    after_restore,
    make_backup,
    read_contents,
    restore,
)
from geo_assets.services.build import TileBuilder
from geo_assets.services.garbage import collect_objects
from geo_assets.services.supervisor import AlreadyRunning, Supervisor
from geo_assets.services.tileserver.stream import EPOCH_NAME
from geo_assets_tests.stacks import STACKS, changes_of
from geo_assets_tests.waiting import patient
from geo_assets_tests.world import HERE, World, feature, settings_for, work_off

LATER = 2**50


class Platform:
    """A home that is opened and closed as its processes are started and stopped."""

    def __init__(self, home: Path, changes: dict[str, Any]) -> None:
        self.home, self.changes = home, changes
        self.settings = settings_for(home, **changes)

    def __enter__(self) -> World:
        self.world = World(self.home, **self.changes)
        return self.world

    def __exit__(self, *_: object) -> None:
        self.world.close()


@pytest.fixture(params=STACKS)
def platform(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Platform]:
    with changes_of(request.param) as changes:
        yield Platform(tmp_path / "home", changes)


@pytest.fixture
def embedded(tmp_path: Path) -> Platform:
    return Platform(tmp_path / "home", {})


def at(number: int) -> tuple[float, float]:
    return HERE[0] + number * 0.002, HERE[1]


def stored(world: World) -> dict[str, tuple[int, str]]:
    return {one.feature_id: (one.version, one.content_hash) for one in world.stack.features.scan()}


def shown(world: World) -> dict[str, str | None]:
    """Content hash of every tile that has an object; the object is there."""
    return {key: state.content_hash for key, state in world.published().items() if world.tile(key)}


def assert_tiles_agree_with_the_store(world: World) -> None:
    keys = [state.key for state in world.stack.ledger.scan(published=False)]
    with TileBuilder(world.stack, "audit", inline=True) as builder:
        outcomes = {result.key: result.outcome for result in builder.build(keys, force=True)}
    # An empty tile that is built again is emptied again.
    assert {key for key, outcome in outcomes.items() if outcome not in ("unchanged", "skipped")} <= {
        key for key in keys if not world.tile(key)
    }


def test_rule_1_what_came_after_a_backup_comes_again_from_the_log_once_and_the_map_agrees(
    platform: Platform, tmp_path: Path
) -> None:
    file = tmp_path / "a.backup"
    with platform as world:
        for number in range(6):
            world.send(feature(number, 1, at=at(number)), event_id=f"e{number}")
        work_off(world)
        world.build_dirty()
        backup = make_backup(world.settings, file)
        of_backup = stored(world)
        epoch = world.stack.ledger.get_value(EPOCH_NAME)

        world.send(feature(0, 2, at=at(10)), event_id="moved")
        world.send(feature(1, 2, at=at(1), height=5), event_id="changed")
        world.send(feature(7, 1, at=at(7)), event_id="new")
        world.send({"type": "Feature", "id": 2, "version": 2, "action": "delete"}, event_id="deleted")
        world.send(feature(3, 1, at=at(3)), event_id="e3")  # a duplicate
        world.send(feature(4, 3, at=at(4), name="x"), event_id="twice")
        work_off(world)
        world.build_dirty()
        world.send(feature(4, 4, at=at(4), name="y"), event_id="thrice")
        work_off(world)
        world.build_dirty()
        # Objects that the backup's ledger names are collected; the edits themselves stay in the log.
        assert collect_objects(world.stack, now_ms=LATER) > 0
        newest, tiles, letters = stored(world), shown(world), len(world.letters())
    assert newest != of_backup

    done = restore(platform.settings, file)

    assert done.replayed == 7
    assert done.lost == 0
    assert done.cleared > 0
    with platform as world:
        assert stored(world) == of_backup
        assert world.stack.ledger.get_value(EPOCH_NAME) not in (None, epoch)
        assert all(state.dirty for state in world.stack.ledger.scan(published=False))
        world.build_dirty()
        assert_tiles_agree_with_the_store(world)

        work_off(world)
        world.build_dirty()
        assert stored(world) == newest
        assert shown(world) == tiles
        assert len(world.letters()) == letters
        assert_tiles_agree_with_the_store(world)
        assert [m.state for m in world.stack.ledger.manifests()][:1] == ["done"]
    assert backup == read_contents(file)


def test_a_backup_while_edits_are_ingested_loses_none(platform: Platform, tmp_path: Path) -> None:
    file = tmp_path / "a.backup"
    with platform as world:
        for number in range(20):
            world.send(feature(number, 1, at=at(number % 4)), event_id=f"e{number}")
        world.ingest.run_once(timeout_s=patient(30))
        # Applied, and its offset not yet committed: it comes again.
        world.edit(feature(100, 1), event_id="applied")
        make_backup(world.settings, file)
        work_off(world)
        everything = stored(world)
    restore(platform.settings, file)
    with platform as world:
        work_off(world)
        assert stored(world) == everything
        assert len(everything) == 21


def test_a_restore_by_other_means_reads_the_whole_log_again_and_doubles_nothing(platform: Platform) -> None:
    with platform as world:
        for number in range(4):
            world.send(feature(number, 1, at=at(number)), event_id=f"e{number}")
        work_off(world)
        world.build_dirty()
        before, tiles = stored(world), shown(world)
        revisions = {key: state.revision for key, state in world.published().items()}
    with platform as world:
        done = after_restore(world.stack, None)
        assert (done.replayed, done.cleared) == (4, 0)
        assert done.tiles == len(list(world.stack.ledger.scan(published=False)))
        work_off(world)
        assert all(result.outcome != "failed" for result in world.build_dirty())
        assert stored(world) == before
        assert shown(world) == tiles
        assert {key: state.revision for key, state in world.published().items()} == revisions


def test_records_that_retention_took_since_the_backup_are_counted_as_lost(embedded: Platform, tmp_path: Path) -> None:
    file = tmp_path / "a.backup"
    with embedded as world:
        world.send(feature(1), event_id="one")
        work_off(world)
        make_backup(world.settings, file)
        for number in range(2, 5):
            world.send(feature(number), event_id=f"e{number}")
        work_off(world)
        world.retention_takes(topics.RAW)
    done = restore(embedded.settings, file)
    assert done.lost == 3
    assert done.replayed == 0
    assert done.other_topic is None


def test_a_log_made_anew_since_the_backup_is_read_from_its_start(embedded: Platform, tmp_path: Path) -> None:
    file = tmp_path / "a.backup"
    with embedded as world:
        for number in range(5):
            world.send(feature(number), event_id=f"e{number}")
        work_off(world)
        make_backup(world.settings, file)
    for path in embedded.home.glob("event-log.db*"):
        path.unlink()
    with embedded as world:
        world.send(feature(9), event_id="of the new log")
        work_off(world)
    done = restore(embedded.settings, file)
    assert (done.replayed, done.lost) == (1, 0)
    assert done.other_topic == 5
    with embedded as world:
        work_off(world)
        assert len(stored(world)) == 6


def test_records_that_retention_took_of_a_log_made_anew_are_lost(embedded: Platform, tmp_path: Path) -> None:
    file = tmp_path / "a.backup"
    with embedded as world:
        world.send(feature(1), event_id="one")
        work_off(world)
        make_backup(world.settings, file)
    for path in embedded.home.glob("event-log.db*"):
        path.unlink()
    with embedded as world:
        for number in range(2, 5):
            world.send(feature(number), event_id=f"e{number}")
        world.retention_takes(topics.RAW)
    done = restore(embedded.settings, file)
    assert (done.replayed, done.lost, done.other_topic) == (0, 3, 1)


def test_a_restore_while_something_runs_changes_nothing(platform: Platform, tmp_path: Path) -> None:
    file = tmp_path / "a.backup"
    with platform as world:
        world.edit(feature(1))
        make_backup(world.settings, file)
        world.edit(feature(2))
        before = stored(world)
        home = Supervisor(platform.home, lambda *_: None)
        home.claim()
        with pytest.raises((BackupError, AlreadyRunning), match=r"up in|sessions of geo-assets are open"):
            restore(platform.settings, file)
        home.stop()
        assert stored(world) == before


def test_a_backup_overwrites_no_file_and_is_readable_by_its_owner_alone(embedded: Platform, tmp_path: Path) -> None:
    file = tmp_path / "a.backup"
    with embedded as world:
        make_backup(world.settings, file)
        assert file.stat().st_mode & 0o777 == 0o600
        with pytest.raises(BackupError, match="already"):
            make_backup(world.settings, file)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("data", [b"", b"no archive at all", b"\x1f\x8b" + b"0" * 50], ids=["empty", "text", "gzip"])
def test_what_is_no_backup_is_refused_by_name(embedded: Platform, tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "a.backup"
    file.write_bytes(data)
    with pytest.raises(BackupError, match=r"a\.backup"):
        restore(embedded.settings, file)


def changed_contents(file: Path, change: Any) -> None:
    """Write the archive anew with other contents."""
    with tarfile.open(file) as archive:
        members = {member.name: archive.extractfile(member).read() for member in archive.getmembers()}  # type: ignore[union-attr]
    contents = json.loads(members[CONTENTS])
    change(contents)
    members[CONTENTS] = json.dumps(contents).encode()
    with tarfile.open(file, "w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def test_a_backup_of_a_later_program_is_refused(embedded: Platform, tmp_path: Path) -> None:
    file = tmp_path / "a.backup"
    with embedded as world:
        world.edit(feature(1))
        make_backup(world.settings, file)
    changed_contents(file, lambda contents: contents["parts"][0].update(version=99))
    with pytest.raises(BackupError, match="version 99"):
        restore(embedded.settings, file)
    changed_contents(file, lambda contents: contents.update(format=99))
    with pytest.raises(BackupError, match="format 99"):
        restore(embedded.settings, file)
    with embedded as world:
        assert len(stored(world)) == 1


def test_a_member_that_would_leave_the_folder_is_refused(embedded: Platform, tmp_path: Path) -> None:
    file = tmp_path / "a.backup"
    with embedded as world:
        make_backup(world.settings, file)
    with tarfile.open(file) as archive:
        contents = archive.extractfile(CONTENTS).read()  # type: ignore[union-attr]
    record = json.loads(contents)
    record["parts"] = [{**record["parts"][0], "member": "../../escaped"}]
    with tarfile.open(file, "w:gz") as archive:
        for name, data in ((CONTENTS, json.dumps(record).encode()), ("../../escaped", b"x")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    with pytest.raises(BackupError, match=r"a\.backup"):
        restore(embedded.settings, file)
    assert not (tmp_path / "escaped").exists()


def test_a_backup_of_one_stack_is_not_restored_into_another(embedded: Platform, tmp_path: Path) -> None:
    file = tmp_path / "a.backup"
    with embedded as world:
        make_backup(world.settings, file)
    with changes_of("production") as changes, pytest.raises(BackupError, match="of kind file"):
        restore(settings_for(tmp_path / "other", **changes), file)


def test_a_postgres_backup_belongs_to_its_schema(tmp_path: Path) -> None:
    file = tmp_path / "a.backup"
    with changes_of("production") as changes:
        with Platform(tmp_path / "home", changes) as world:
            make_backup(world.settings, file)
        with changes_of("production") as others, pytest.raises(BackupError, match="GEO_ASSETS_POSTGRES_SCHEMA"):
            restore(settings_for(tmp_path / "other", **others), file)
