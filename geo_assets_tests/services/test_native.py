"""native.lock: what is locked is what is there, and what is not starts no service of the image."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyproj.datadir
import pytest
from structlog.testing import capture_logs

from geo_assets.services import native
from geo_assets.services.native import Difference, LibrariesDiffer
from geo_assets_tests.waiting import patient
from geo_assets_tests.world import settings_for


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock of what is here, to be changed."""
    path = tmp_path / "native.lock"
    native.write(path)
    monkeypatch.setattr(native, "LOCK", path)
    native.locked.cache_clear()
    yield path  # pyright: ignore[reportReturnType]
    native.locked.cache_clear()


@pytest.fixture
def grids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder of grids, which PROJ looks into first."""
    folder = tmp_path / "proj"
    folder.mkdir()
    monkeypatch.setattr(pyproj.datadir, "get_user_data_dir", lambda: str(folder))
    return folder


def changed(lock: Path, old: str, new: str) -> None:
    text = lock.read_text()
    assert old in text
    lock.write_text(text.replace(old, new))
    native.locked.cache_clear()


def test_what_the_requirements_bring_is_what_is_locked_and_writing_it_again_changes_nothing(lock: Path) -> None:
    committed = Path(native.__file__).parents[1] / "native.lock"

    assert native.differences(contents=True) == []
    assert lock.read_text() == committed.read_text()


@pytest.mark.parametrize("name", ["geos", "proj", "proj.db epsg"])
def test_a_service_refuses_another_version_in_one_line_that_names_it_the_value_and_the_locked_one(
    lock: Path, tmp_path: Path, name: str
) -> None:
    here = native.found()[name]
    changed(lock, f'"{name}" = "{here}"', f'"{name}" = "1.2.3"')

    with pytest.raises(LibrariesDiffer) as refused:
        native.check(settings_for(tmp_path, library_check="refuse"))

    assert str(refused.value).startswith(f"{name} is {here}, native.lock says 1.2.3: ")
    assert "\n" not in str(refused.value)


def test_where_somebody_installed_other_versions_by_hand_it_is_a_warning(lock: Path, tmp_path: Path) -> None:
    changed(lock, native.found()["geos"], "3.99.0")

    with capture_logs() as logged:
        native.check(settings_for(tmp_path))

    (line,) = logged
    assert line["log_level"] == "warning"
    assert "3.99.0" in line["differences"]


def test_a_grid_that_the_lock_does_not_know_is_refused_and_one_that_lacks_too(
    lock: Path, grids: Path, tmp_path: Path
) -> None:
    refusing = settings_for(tmp_path, library_check="refuse")
    (grids / "ch_swisstopo_CHENyx06a.tif").write_bytes(b"II*\0")
    with pytest.raises(LibrariesDiffer, match=r"grid ch_swisstopo_CHENyx06a.tif is 4 bytes, native.lock says none"):
        native.check(refusing)

    native.write(lock)
    native.locked.cache_clear()
    native.check(refusing)

    (grids / "ch_swisstopo_CHENyx06a.tif").unlink()
    with pytest.raises(LibrariesDiffer, match=r"grid ch_swisstopo_CHENyx06a.tif is absent, native.lock says 4 bytes"):
        native.check(refusing)


def test_a_grid_with_the_same_size_and_another_content_is_found_where_contents_are_read(
    lock: Path, grids: Path
) -> None:
    grid = grids / "a.gsb"
    grid.write_bytes(b"one")
    native.write(lock)
    native.locked.cache_clear()
    grid.write_bytes(b"two")

    assert native.differences() == []
    assert [each.name for each in native.differences(contents=True)] == ["grid a.gsb"]


def test_what_is_no_grid_is_of_no_interest(grids: Path) -> None:
    for name in ("proj.db", "notes.txt", "us_noaa.json"):
        (grids / name).write_text("1")

    assert native.differences() == []


def test_without_a_lock_an_image_does_not_start_and_a_developer_is_told(
    lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock.unlink()
    native.locked.cache_clear()

    with pytest.raises(LibrariesDiffer, match="make lock"):
        native.check(settings_for(tmp_path, library_check="refuse"))
    with capture_logs() as logged:
        native.check(settings_for(tmp_path))
    assert "make lock" in logged[0]["differences"]


def test_a_difference_says_what_is_absent_and_what_is_not_locked() -> None:
    assert str(Difference("proj", "", "9.5.1")) == "proj is absent, native.lock says 9.5.1"
    assert str(Difference("grid a.tif", "4 bytes", "")) == "grid a.tif is 4 bytes, native.lock says none"


OTHER_GEOS = "import shapely; shapely.geos_version = (3, 99, 0); "
"""As if another wheel of shapely were installed."""


@pytest.mark.parametrize(
    "start",
    ["from geo_assets.services.ingest import run", "from geo_assets.services.lane.service import run"],
    ids=["ingest", "live"],
)
def test_a_role_ends_with_one_line_before_it_opens_anything(start: str, tmp_path: Path) -> None:
    code = (
        OTHER_GEOS + start + "; from geo_assets.settings import Settings; from geo_assets.cli import explain\n"
        "try: run(Settings())\nexcept Exception as fault: print(explain(fault))"
    )
    said = _python(code, tmp_path)

    assert said.stdout.startswith("geos is 3.99.0, native.lock says 3."), said.stderr
    assert said.stdout.count("\n") == 1
    assert not (tmp_path / "home").exists()


def test_dagster_loads_no_code_location_on_other_libraries(tmp_path: Path) -> None:
    said = _python(OTHER_GEOS + "import geo_assets.definitions", tmp_path)

    assert said.returncode == 1
    assert "LibrariesDiffer: geos is 3.99.0" in said.stderr.splitlines()[-1]


def _python(code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"GEO_ASSETS_LIBRARY_CHECK": "refuse", "GEO_ASSETS_HOME": str(tmp_path / "home")}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=patient(120), check=False
    )
