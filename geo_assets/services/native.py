"""The native libraries that decide where a coordinate lies and what a tile's bytes are, held against `native.lock`.

The lock names what the wheels of `requirements.lock` bring: GEOS, PROJ, PROJ's database and every grid it may use. What
transforms or builds looks at start-up. `python -m geo_assets.services.native` says what differs, `--write` writes the
lock anew (`make lock` does).
"""

from __future__ import annotations

import hashlib
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import pyproj
import pyproj.database
import pyproj.datadir
import shapely
import structlog

if TYPE_CHECKING:
    from geo_assets.settings import Settings

LOCK = Path(__file__).resolve().parent.parent / "native.lock"

_HEAD = """\
# The native libraries that requirements.lock's wheels bring; `make lock` writes it. What transforms or builds compares
# at start-up (GEO_ASSETS_LIBRARY_CHECK): other libraries give other coordinates and other tiles.
"""

GRID_SUFFIXES = frozenset({".tif", ".gsb", ".gtx", ".gvb", ".ct2", ".las", ".los", ".lla"})
"""Of files that PROJ reads shifts from: GeoTIFF of PROJ-data, and the formats before it (PROJ, "Resource files")."""

_DATABASE = {"epsg": "EPSG.VERSION", "esri": "ESRI.VERSION", "ignf": "IGNF.VERSION", "proj-data": "PROJ_DATA.VERSION"}
"""What identifies PROJ's database whoever's build wrote the file: the releases of what is in it."""

log = structlog.get_logger(__name__)


class LibrariesDiffer(RuntimeError):
    """A native library, PROJ's database or a grid is another than the lock names."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not as the lock has it."""

    name: str
    found: str
    """Empty: it is not there."""
    locked: str
    """Empty: the lock does not know it."""

    def __str__(self) -> str:
        return f"{self.name} is {self.found or 'absent'}, native.lock says {self.locked or 'none'}"


def found(*, contents: bool = False) -> dict[str, str]:
    """What this process runs on, by name: versions, and each grid's size in bytes.

    Args:
        contents: Read the grids, and give their SHA-256 with the size; a grid may have 100 MB and more.
    """
    versions = {"geos": ".".join(map(str, shapely.geos_version)), "proj": pyproj.proj_version_str}
    for name, key in _DATABASE.items():
        versions[f"proj.db {name}"] = str(pyproj.database.get_database_metadata(key) or "")
    for grid in _grids():
        versions[f"grid {grid.name}"] = f"{grid.stat().st_size} bytes" + (
            f", sha256:{_sha256(grid)}" if contents else ""
        )
    return versions


def _grids() -> Iterator[Path]:
    """Every grid that PROJ would find by its name, in its order: the user's folder first."""
    named: set[str] = set()
    user = pyproj.datadir.get_user_data_dir()  # pyright: ignore[reportPrivateImportUsage]
    for folder in (user, *pyproj.datadir.get_data_dir().split(_SEPARATOR)):
        try:
            files = sorted(Path(folder).iterdir())
        except OSError:
            continue
        for file in files:
            if file.suffix.lower() in GRID_SUFFIXES and file.name not in named:
                named.add(file.name)
                yield file


_SEPARATOR = ";" if sys.platform == "win32" else ":"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@lru_cache(maxsize=1)
def locked() -> Mapping[str, str]:
    """What the lock names.

    Raises:
        LibrariesDiffer: It is not there, or no lock.
    """
    try:
        return {str(name): str(value) for name, value in tomllib.loads(LOCK.read_text()).items()}
    except (OSError, tomllib.TOMLDecodeError) as fault:
        raise LibrariesDiffer(f"{LOCK} cannot be read: {fault}; `make lock` writes it") from None


def differences(*, contents: bool = False) -> list[Difference]:
    """What is not as the lock has it; a grid of the same name and size counts as the same, unless `contents` are read.

    Raises:
        LibrariesDiffer: There is no lock.
    """
    here, lock = found(contents=contents), dict(locked())
    if not contents:
        lock = {name: value.partition(",")[0] if name.startswith("grid ") else value for name, value in lock.items()}
    return [
        Difference(name, here.get(name, ""), lock.get(name, ""))
        for name in dict.fromkeys((*lock, *here))
        if here.get(name) != lock.get(name)
    ]


def check(settings: Settings) -> None:
    """Probe PROJ, then compare with the lock: run at start-up, before anything is transformed or built.

    Raises:
        ProbeFailed: PROJ answers differently from what it should, whatever the setting.
        LibrariesDiffer: Something is not as locked, and `library_check` is `refuse`. With `warn` the log says so.
    """
    from geo_assets.events.crs import probe

    probe()
    compare(settings)


def compare(settings: Settings) -> None:
    """Compare with the lock, which takes two milliseconds; the probe takes forty.

    Raises:
        LibrariesDiffer: Something is not as locked, and `library_check` is `refuse`. With `warn` the log says so.
    """
    try:
        message = "; ".join(map(str, differences()))
    except LibrariesDiffer as fault:
        message = str(fault)
    if message and settings.library_check == "refuse":
        raise LibrariesDiffer(
            f"{message}: install what requirements.lock names, or set GEO_ASSETS_LIBRARY_CHECK=warn to work with these"
        )
    if message:
        log.warning("native libraries differ from the lock", differences=message)


def write(path: Path = LOCK) -> None:
    """Write the lock for what this process runs on."""
    lines = [f'"{name}" = "{value}"\n' for name, value in found(contents=True).items()]
    path.write_text(_HEAD + "".join(lines))


def main(arguments: list[str]) -> int:
    """Say what differs, one line each, and whether anything does; `--write` writes the lock."""
    if arguments == ["--write"]:
        write()
        return 0
    from geo_assets.events.crs import ProbeFailed, probe

    try:
        probe()
        differing = differences(contents=True)
    except (LibrariesDiffer, ProbeFailed) as fault:
        print(fault, file=sys.stderr)
        return 1
    for each in differing:
        print(each, file=sys.stderr)
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
