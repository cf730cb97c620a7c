"""`geo-assets doctor`: is this machine able to run it? Versions, PROJ, ports, disk, configuration."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import socket
import sqlite3
from collections.abc import Callable, Iterator

import typer

from geo_assets.cli.answers import CliError, check_home, logged_settings, out

PACKAGES = (
    "dagster",
    "dagster-webserver",
    "shapely",
    "pyproj",
    "numpy",
    "pyarrow",
    "pyogrio",
    "osmium",
    "h3",
    "mercantile",
    "pydantic",
    "confluent-kafka",
    "redis",
    "psycopg",
    "obstore",
    "dagster-aws",
    "dagster-postgres",
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Look")(doctor)


def doctor() -> None:
    """Look at versions, PROJ, ports, disk and configuration; say what is wrong and what to do."""
    current = logged_settings()
    bad = 0
    for name, check in checks(current):
        try:
            note = check()
            out.print(f"[green]  ok[/green]  {name}: {note}", soft_wrap=True)
        except Exception as fault:
            from geo_assets.cli import explain

            bad += 1
            message = str(fault) if isinstance(fault, CliError) else explain(fault)
            out.print(f"[red]fail[/red]  {name}: ", end="")
            out.print(message, markup=False, soft_wrap=True)
    if bad:
        raise CliError(f"{bad} of the checks failed")


def checks(current: object) -> Iterator[tuple[str, Callable[[], str]]]:
    """Every check by name: it returns a note, or raises what is wrong."""
    from geo_assets.settings import Settings

    assert isinstance(current, Settings)
    yield "Python", lambda: f"{platform.python_version()}, SQLite {sqlite3.sqlite_version}"
    for package in PACKAGES:
        yield package, lambda package=package: importlib.metadata.version(package)
    yield "GEOS and PROJ", lambda: _libraries(current)
    yield "PROJ probe", _probe
    yield "home", lambda: _home(current)
    yield "disk", lambda: _disk(current)
    for name, port in (("edge", current.edge_port), ("tiles", current.tiles_port), ("dagster", current.dagster_port)):
        yield f"port {port} ({name})", lambda port=port: _port(current.host, port)
    yield "layers", lambda: _layers(current)
    yield "sources", lambda: _sources(current)
    from geo_assets.services.reachable import looks

    yield from looks(current)


def _libraries(current: object) -> str:
    from geo_assets.services import native
    from geo_assets.settings import Settings

    assert isinstance(current, Settings)

    here, differing = native.found(), native.differences(contents=True)
    if differing and current.library_check == "refuse":
        raise CliError(f"{'; '.join(map(str, differing))}: install what requirements.lock names")
    grids = [name for name in here if name.startswith("grid ")]
    said = f"GEOS {here['geos']}, PROJ {here['proj']} with EPSG {here['proj.db epsg']}, {len(grids)} grids"
    return f"{said}; {'; '.join(map(str, differing))} (a warning)" if differing else f"{said}, as native.lock has them"


def _probe() -> str:
    from geo_assets.events.crs import probe

    probe()
    return "known coordinates come out where they should"


def _home(current: object) -> str:
    check_home(current)  # pyright: ignore[reportArgumentType]
    return str(current.home)  # pyright: ignore[reportAttributeAccessIssue]


def _disk(current: object) -> str:
    free = shutil.disk_usage(current.home).free  # pyright: ignore[reportAttributeAccessIssue]
    if free < 1_000_000_000:
        raise CliError(f"{free // 1_000_000} MB free, 1000 MB are little enough; set GEO_ASSETS_HOME to another disk")
    return f"{free / 1e9:.0f} GB free"


def _port(host: str, port: int) -> str:
    with socket.socket() as probe:
        probe.settimeout(1)
        return "in use (by geo-assets up, if that is running)" if probe.connect_ex((host, port)) == 0 else "free"


def _layers(current: object) -> str:
    from geo_assets.configuration import load_layers

    return ", ".join(load_layers(current).names)  # pyright: ignore[reportArgumentType]


def _sources(current: object) -> str:
    from geo_assets.configuration import load_sources

    return ", ".join(load_sources(current))  # pyright: ignore[reportArgumentType]
